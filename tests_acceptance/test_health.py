"""GPU health, by NVML, before and under load."""

import pytest

from pytest_gpucluster import Finding, NotAvailable, health
from pytest_gpucluster.measurements.health import clocks_under_load, gpu_counters, gpu_state, gpu_xids
from tests_acceptance.conftest import measured

pytestmark = [pytest.mark.health, pytest.mark.reads]


loaded_clocks = measured(clocks_under_load, "clocks_under_load")
"""Clocks event reasons of every GPU while a matrix product keeps it busy."""


def reading(states, place, name):
    """One reading of NVML, or why there is none."""
    gpu = states[place].gpu
    return gpu if isinstance(gpu, NotAvailable) else getattr(gpu, name)


def found(states, place, judge, *names, kind="gpu"):  # noqa: ANN002 - as in all of this suite
    """What a judge makes of readings of a GPU. One that is not available was not measured; a lost GPU is to blame for that."""
    values = {name: reading(states, place, name) for name in names}
    refused = [f"{name} is {value}" for name, value in values.items() if isinstance(value, NotAvailable)]
    if refused:
        state = states[place]
        return Finding(unknown={"": refused}, unknown_kind="gpu" if state.lost else "unknown", unknown_advice=state.advice)
    made = judge(*values.values())
    return made if isinstance(made, Finding) else Finding(value=made, kind=kind, evidence=values)


def of_node(states, cluster, node, name):
    """One reading of each GPU of a node."""
    return {gpu: reading(states, gpu, name) for gpu in cluster.places if gpu.node == node.node}


@pytest.mark.reads(only=False)
def test_no_foreign_process(cluster, place, criterion):
    """No foreign process was on the GPU before this run. Measuring on a GPU that was not idle is an error, not a failure."""
    before = cluster.at_start[place]
    criterion.require(before.holders, evidence={"GiB in use": before.memory_used_gib, "% busy": before.utilization_percent})


def test_gpu_count(gpu_states, cluster, node, criterion):
    """NVML shows every expected GPU, and all that the PCI bus shows where nobody stated how many there are."""
    is_stated = cluster.promised.gpus_are_stated
    criterion.judge(health.judge_gpu_count(gpu_states.first_of(node), is_stated=is_stated))


def test_torch_sees_gpus(gpu_states, node, criterion):
    """PyTorch can use every expected GPU."""
    criterion.require(gpu_states.first_of(node).torch_device_count)


def test_gpu_model(gpu_states, cluster, place, criterion):
    """The GPU is the promised one."""
    criterion.judge(found(gpu_states, place, lambda name: int(name not in cluster.promised.gpu_names), "name"))


def test_gpu_memory(gpu_states, place, criterion):
    """The whole memory is there."""
    criterion.judge(found(gpu_states, place, float, "memory_gib"))


def test_ecc_enabled(gpu_states, place, criterion):
    """The memory is protected: with ECC off, no error would be counted."""
    criterion.judge(found(gpu_states, place, lambda is_on: int(not is_on), "ecc_enabled", kind="settings"))


def test_mig_disabled(gpu_states, place, criterion):
    """The GPU is whole, not cut into instances."""
    criterion.judge(found(gpu_states, place, int, "mig", kind="settings"))


def test_ecc_uncorrected(gpu_states, place, criterion):
    """No uncorrected memory error since the driver was loaded."""
    errors = found(gpu_states, place, int, "ecc_uncorrected_volatile")
    criterion.judge(errors.with_evidence(**{"over its life": str(reading(gpu_states, place, "ecc_uncorrected_aggregate"))}))


def test_remapped_rows(gpu_states, place, criterion):
    """No memory row waits for a remap, and none failed."""
    rows = found(gpu_states, place, lambda *flags: sum(flags), "remapped_rows_pending", "remapped_rows_failed")
    banks = reading(gpu_states, place, "spare_row_banks")
    criterion.judge(rows.with_evidence(**{"banks by spare rows": banks if isinstance(banks, dict) else str(banks)}))


def test_recovery_action(gpu_states, place, criterion):
    """NVML asks for no reset, no reboot and no other recovery."""
    criterion.judge(found(gpu_states, place, health.judge_recovery, "repair"))


def test_memory_repair(gpu_states, place, criterion):
    """The memory waits for no repair, can be repaired, and its SRAM is within NVIDIA's threshold."""
    criterion.judge(found(gpu_states, place, health.judge_repair, "repair"))


def test_compute_mode(gpu_states, place, criterion):
    """Any process may use the GPU, as many as there are."""
    criterion.judge(found(gpu_states, place, lambda mode: int(mode != "default"), "compute_mode", kind="settings"))


def test_persistence(gpu_states, place, criterion):
    """The driver stays loaded while nobody uses the GPU."""
    criterion.judge(found(gpu_states, place, lambda is_on: int(not is_on), "persistence", kind="settings"))


def test_power_limit(gpu_states, place, criterion):
    """The GPU may draw what its board is made for."""
    names = ("power_limit_w", "power_limit_default_w")
    criterion.judge(found(gpu_states, place, lambda limit, usual: max(0.0, usual - limit), *names, kind="settings"))


def test_nvlink_links(gpu_states, cluster, node, criterion):
    """Every NVLink of each GPU is up, at its rate."""
    nvlinks = of_node(gpu_states, cluster, node, "nvlinks")
    criterion.judge(health.judge_nvlinks(nvlinks, gb_s=cluster.promised.gpu_links.nvlink_gb_s), among=nvlinks)


@pytest.mark.parametrize("kind", ["effective", "symbol"])
def test_nvlink_ber(kind, gpu_states, cluster, node, criterion):
    """The NVLinks of each GPU correct what they receive: no bit error rate is above that of a healthy one."""
    nvlinks = of_node(gpu_states, cluster, node, "nvlinks")
    criterion.judge(health.judge_ber(nvlinks, kind=kind, is_healthy=criterion.limit.holds), among=nvlinks)


def test_fabric_state(gpu_states, cluster, node, criterion):
    """Every GPU behind NVSwitches has joined their fabric, is healthy there, and in one clique with its siblings."""
    peers, fabrics = (of_node(gpu_states, cluster, node, name) for name in ("nvlink_peer", "fabric"))
    criterion.judge(health.judge_fabric(peers, fabrics), among=fabrics)


def test_nvlink_domain(cluster, node, criterion):
    """The GPUs of the node are in the NVLink domain of the other nodes of its rack."""
    bound = [gpu for gpu in cluster.places if gpu.rank is not None]
    fabrics = {one.id: [gpu.fabric for gpu in bound if gpu.node == one.node] for one in cluster.nodes}
    present = {name: of_gpus for name, of_gpus in fabrics.items() if of_gpus}
    criterion.judge(health.judge_domain(node.id, present, nodes_per_domain=cluster.promised.nodes_per_domain))


@pytest.mark.reads(only=False)
def test_pcie_link(loaded_clocks, cluster, place, recipe, criterion):
    """Under load the GPU's PCIe link has the generation and the lanes that it should have."""
    clocks, promised, asked = loaded_clocks[place], cluster.promised.gpu_links, recipe("pcie_link")
    most = {"gen": asked["gen"] or promised.pcie_gen, "lanes": asked["lanes"] or promised.pcie_width}
    is_whole = clocks.telemetry is not None and clocks.nvml_error is None
    telemetry = clocks.telemetry if is_whole else NotAvailable(clocks.nvml_error or "no NVML")
    criterion.judge(health.judge_pcie_width(telemetry, most))


@pytest.mark.reads(only=False)
def test_clocks_under_load(loaded_clocks, place, criterion):
    """No thermal, hardware or power-brake slowdown under load; the power cap is normal."""
    clocks = loaded_clocks[place]
    telemetry = NotAvailable(clocks.nvml_error or "no NVML") if clocks.telemetry is None else clocks.telemetry
    criterion.judge(health.judge_clocks(telemetry).with_evidence(**clocks.evidence))


@pytest.mark.over_run(gpu_state, per="gpu")
def test_gpu_worsened(over_run, place, criterion):
    """No link went down during the run, and no GPU came to need a reset or a repair."""
    states = over_run[place]
    gone = next((state for state in states if isinstance(state.gpu, NotAvailable)), None)
    if gone is not None:
        criterion.judge(Finding(unknown={"": (f"state is {gone.gpu}",)}, unknown_kind="gpu" if gone.lost else "unknown"))
    first, last = (state.gpu for state in states)
    held = {"seconds watched": over_run.seconds, "seconds held back by": health.throttled_s(first, last)}
    criterion.judge(health.state_changes(first, last).with_evidence(**held))


@pytest.mark.over_run(gpu_counters, per="gpu", over_boots=True)
def test_ecc_growth(over_run, place, criterion):
    """No uncorrected memory error came during the run."""
    errors = health.judge_memory_errors(*over_run[place])
    criterion.judge(errors.with_evidence(**{"seconds watched": over_run.seconds}))


@pytest.mark.over_run(gpu_counters, per="gpu")
def test_gpu_held_back(over_run, place, recipe, criterion):
    """Neither heat nor the power brake of the node held the clocks back during the run."""
    first, last = (counters.held_back_s for counters in over_run[place])
    limits = health.read_limits(recipe("gpu_held_back")["limits"])
    criterion.judge(health.judge_counters(first, last, seconds=over_run.seconds, limits=limits).with_evidence(**last))


@pytest.mark.over_run(gpu_xids, per="gpu", between=health.judge_xids_between)
def test_xid_during_run(over_run, place, criterion):
    """The driver reported no error of the GPU; what a worker of this run caused itself is shown where it happened."""
    _, last = over_run[place]
    found = health.judge_xids(last, lambda: over_run.of_domain(place))
    criterion.judge(found.with_evidence(**{"seconds watched": over_run.seconds}))


@pytest.mark.over_run(gpu_counters, per="gpu")
def test_pcie_replays(over_run, place, criterion):
    """The PCIe link hardly ever had to send a packet again."""
    criterion.judge(health.judge_replays(*over_run[place], seconds=over_run.seconds))


@pytest.mark.over_run(gpu_counters, per="gpu")
def test_nvlink_errors(over_run, node, recipe, criterion):
    """No NVLink sent packets again or had to be trained again during the run."""
    counters, limits = over_run.of_gpus(node), health.read_limits(recipe("nvlink_errors")["limits"])
    found = health.judge_nvlink_counters(counters, seconds=over_run.seconds, limits=limits)
    before = health.judge_earlier_recoveries({gpu: first for gpu, (first, _) in counters.items()})
    criterion.judge(health.merge([found, before]), among=counters)
