"""GPU health, by NVML, before and under load."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.driver_errors import judge_xids
from pytest_gpucluster.health.gpu import advice_for, needs_of
from pytest_gpucluster.health.growth import grown, held_back, nvlink_growth, pcie_growth, per_minute, worsened
from pytest_gpucluster.health.nvlink import (
    DOMAIN_ADVICE,
    FABRIC_ADVICE,
    count_nvlinks,
    judge_fabric,
    outside_domains,
    worst_ber,
)
from pytest_gpucluster.inventory.reading import NotAvailable, or_none
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.driver_errors import gpu_xids
from pytest_gpucluster.measurements.health import clocks_under_load, gpu_counters, gpu_state
from tests_acceptance.conftest import snapshot, watched_s

pytestmark = pytest.mark.health


@pytest.fixture(scope="session")
def loaded_clocks(cluster, recipe):
    """Clocks event reasons of every GPU while a matrix product keeps it busy."""
    return cluster.run(clocks_under_load, per="gpu", **recipe("clocks_under_load"))


@pytest.fixture(scope="session")
def counters_at_end(cluster):
    """The same counters, after everything else."""
    return snapshot(cluster, gpu_counters, per="gpu", deadline_s=60)


def read(states, place, name):
    """One reading of NVML; a GPU that does not give the value was not measured."""
    return available(reading(states, place, name), name, place, part="gpu" if states[place].lost else "unknown")


def reading(states, place, name):
    """One reading of NVML, or why there is none."""
    gpu = states[place].gpu
    return gpu if isinstance(gpu, NotAvailable) else getattr(gpu, name)


def available(value, name, place, *, part="unknown"):
    """The value of a reading; one that is not available was not measured."""
    if isinstance(value, NotAvailable):
        blame = Blame(part=part, cause=value.why)
        raise MeasurementError(f"{place.label}: {name} could not be read: {value.why}", culprits=(place,), blame=blame)
    return value


def test_no_foreign_process(cluster, place, criterion):
    """No foreign process was on the GPU before this run. Measuring on a GPU that was not idle is an error, not a failure."""
    found = cluster.at_start[place]
    criterion.require(found.holders, evidence={"GiB in use": found.memory_used_gib, "% busy": found.utilization_percent})


def test_gpu_count(gpu_states, node, criterion):
    """NVML shows every expected GPU."""
    state = gpu_states.first_of(node)
    if state.nvml_device_count is None:
        raise MeasurementError(f"{node.label}: there is no NVML to count GPUs with")
    criterion.require(state.nvml_device_count, evidence={"NVIDIA GPUs on the PCI bus": or_none(state.pci_device_count)})


def test_torch_sees_gpus(gpu_states, node, criterion):
    """PyTorch can use every expected GPU."""
    criterion.require(gpu_states.first_of(node).torch_device_count)


def test_gpu_model(gpu_states, cluster, place, criterion):
    """The GPU is the promised one."""
    name = read(gpu_states, place, "name")
    criterion.require(0 if name in cluster.promised.gpu_names else 1, evidence={"found": name})


def test_gpu_memory(gpu_states, place, criterion):
    """The whole memory is there."""
    criterion.require(read(gpu_states, place, "memory_gib"))


def test_ecc_enabled(gpu_states, place, criterion):
    """The memory is protected: with ECC off, no error would be counted."""
    criterion.require(0 if read(gpu_states, place, "ecc_enabled") else 1)


def test_mig_disabled(gpu_states, place, criterion):
    """The GPU is whole, not cut into instances."""
    criterion.require(1 if read(gpu_states, place, "mig") else 0)


def test_ecc_uncorrected(gpu_states, place, criterion):
    """No uncorrected memory error since the driver was loaded."""
    errors = read(gpu_states, place, "ecc_uncorrected_volatile")
    criterion.require(errors, evidence={"over its life": or_none(gpu_states[place].gpu.ecc_uncorrected_aggregate)})


def test_remapped_rows(gpu_states, place, criterion):
    """No memory row waits for a remap, and none failed."""
    pending, failed = (read(gpu_states, place, name) for name in ("remapped_rows_pending", "remapped_rows_failed"))
    banks = or_none(gpu_states[place].gpu.spare_row_banks)
    evidence = {"pending": pending, "failed": failed, "banks by spare rows": banks}
    criterion.require(int(pending) + int(failed), evidence=evidence)


def test_recovery_action(gpu_states, place, criterion):
    """NVML asks for no reset, no reboot and no other recovery."""
    action = available(read(gpu_states, place, "repair").recovery_action, "recovery_action", place)
    advice = advice_for(action)
    criterion.require(0 if advice is None else 1, evidence={"asked for": action}, parts=Parts(kind="gpu", advice=advice))


def test_memory_repair(gpu_states, place, criterion):
    """The memory waits for no repair, can be repaired, and its SRAM is within NVIDIA's threshold."""
    needs = needs_of(read(gpu_states, place, "repair"))
    if needs.facts or not needs.unknown:
        parts = Parts(kind="gpu", advice=needs.advice)
        criterion.require(len(needs.facts), evidence={"needs": needs.facts}, parts=parts)
    if needs.unknown:
        available(NotAvailable("; ".join(needs.unknown)), "memory_repair", place)


def test_compute_mode(gpu_states, place, criterion):
    """Any process may use the GPU, as many as there are."""
    mode = read(gpu_states, place, "compute_mode")
    criterion.require(0 if mode == "default" else 1, evidence={"mode": mode}, parts=Parts(kind="settings"))


def test_persistence(gpu_states, place, criterion):
    """The driver stays loaded while nobody uses the GPU."""
    criterion.require(0 if read(gpu_states, place, "persistence") else 1, parts=Parts(kind="settings"))


def test_power_limit(gpu_states, place, criterion):
    """The GPU may draw what its board is made for."""
    limit_w, default_w = (read(gpu_states, place, name) for name in ("power_limit_w", "power_limit_default_w"))
    evidence = {"limit W": limit_w, "default W": default_w}
    criterion.require(max(0.0, default_w - limit_w), evidence=evidence, parts=Parts(kind="settings"))


def blamed(bad, gpus):
    """The bad GPUs of a node; none where all of its GPUs are bad, as the fault is the node's then."""
    return tuple(bad) if len(bad) < len(gpus) else ()


def nothing_unknown(unknown, gpus, node):
    """Raise the error of the GPUs of a node of which nothing is known: what, by GPU."""
    texts = [f"{gpu.id}: {why}" for gpu, whys in unknown.items() for why in whys]
    if texts:
        blame = Blame(part="gpu", cause=texts[0])
        raise MeasurementError(f"{node.label}: {'; '.join(texts)}", culprits=blamed(unknown, gpus) or (node,), blame=blame)


def test_nvlink_links(gpu_states, cluster, node, criterion):
    """Every NVLink of each GPU is up, at its rate."""
    gpus = {gpu.id: gpu for gpu in cluster.places if gpu.node == node.node}
    nvlinks = {name: reading(gpu_states, gpu, "nvlinks") for name, gpu in gpus.items()}
    found = count_nvlinks(nvlinks, gb_s=cluster.promised.gpu_links.nvlink_gb_s)
    if found.by_gpu:
        fewest = min(found.by_gpu.values())
        worst = [gpus[name] for name, links in found.by_gpu.items() if links == fewest]
        criterion.require(fewest, evidence={"links": found.facts}, parts=Parts(kind="gpu", places=blamed(worst, gpus)))
    nothing_unknown({gpus[name]: whys for name, whys in found.unknown.items()}, gpus, node)


@pytest.mark.parametrize("kind", ["effective", "symbol"])
def test_nvlink_ber(kind, gpu_states, cluster, node, criterion):
    """The NVLinks of each GPU correct what they receive: no bit error rate is above that of a healthy one."""
    gpus = {gpu.id: gpu for gpu in cluster.places if gpu.node == node.node}
    worst, unknown = worst_ber({name: reading(gpu_states, gpu, "nvlinks") for name, gpu in gpus.items()}, kind=kind)
    if worst:
        highest = max(worst.values())[0]
        bad = [gpus[name] for name, (rate, _) in worst.items() if rate == highest]
        evidence = {name: f"link {link}: {rate:g}" for name, (rate, link) in worst.items()}
        criterion.require(highest, evidence=evidence, parts=Parts(kind="gpu", places=blamed(bad, gpus)))
    nothing_unknown({gpus[name]: whys for name, whys in unknown.items()}, gpus, node)


def test_fabric_state(gpu_states, cluster, node, criterion):
    """Every GPU behind NVSwitches has joined their fabric, is healthy there, and in one clique with its siblings."""
    gpus = {gpu.id: gpu for gpu in cluster.places if gpu.node == node.node}
    peers, fabrics = ({name: reading(gpu_states, gpu, of) for name, gpu in gpus.items()} for of in ("nvlink_peer", "fabric"))
    found = judge_fabric(peers, fabrics)
    if found.bad or not found.unknown:
        parts = Parts(kind="gpu", places=blamed([gpus[name] for name in found.bad], gpus), advice=FABRIC_ADVICE)
        criterion.require(len(found.bad), evidence=found.bad, parts=parts)
    nothing_unknown({gpus[name]: whys for name, whys in found.unknown.items()}, gpus, node)


def test_nvlink_domain(cluster, node, criterion):
    """The GPUs of the node are in the NVLink domain of the other nodes of its rack."""
    fabrics = {
        one.id: [gpu.fabric for gpu in cluster.places if gpu.node == one.node and gpu.rank is not None] for one in cluster.nodes
    }
    present = {name: of_gpus for name, of_gpus in fabrics.items() if of_gpus}
    outside = outside_domains(present, nodes_per_domain=cluster.promised.nodes_per_domain)
    evidence = {"why": outside[node.id]} if node.id in outside else {"domain": present[node.id][0]}
    criterion.require(int(node.id in outside), evidence=evidence, parts=Parts(kind="node", advice=DOMAIN_ADVICE))


def test_pcie_link(loaded_clocks, cluster, place, recipe, criterion):
    """Under load the GPU's PCIe link has the generation and the lanes that it should have."""
    clocks, promised, asked = loaded_clocks[place], cluster.promised.gpu_links, recipe("pcie_link")
    most = {"gen": asked["gen"] or promised.pcie_gen, "lanes": asked["lanes"] or promised.pcie_width}
    is_whole = clocks.telemetry is not None and clocks.nvml_error is None
    link = available(clocks.telemetry if is_whole else NotAvailable(clocks.nvml_error or "no NVML"), "telemetry", place)
    seen = {"gen": link.pcie_gen_max, "lanes": link.pcie_width_min}
    found = {name: available(value, f"PCIe {name}", place) for name, value in seen.items()}
    lost = [name for name in most if found[name] < most[name]]
    criterion.require(len(lost), evidence={**found, **{f"{name} promised": most[name] for name in most}})


def test_clocks_under_load(loaded_clocks, place, criterion):
    """No thermal, hardware or power-brake slowdown under load; the power cap is normal."""
    clocks = loaded_clocks[place]
    seen = NotAvailable(clocks.nvml_error or "no NVML") if clocks.telemetry is None else clocks.telemetry.fault_reasons
    criterion.require(len(available(seen, "clocks event reasons", place)), evidence=clocks.evidence)


@pytest.fixture(scope="session")
def gpu_states_at_end(cluster):
    """The same view, after everything else."""
    return snapshot(cluster, gpu_state, per="gpu", deadline_s=60)


@pytest.mark.at_end
def test_gpu_worsened(gpu_states_at_start, gpu_states_at_end, place, criterion):
    """No link went down during the run, and no GPU came to need a reset or a repair."""
    seconds = watched_s(gpu_states_at_start, gpu_states_at_end)
    both = [states.results[place] for states in (gpu_states_at_start, gpu_states_at_end)]
    for state in both:
        available(state.gpu, "state", place, part="gpu" if state.lost else "unknown")
    found = worsened(*(state.gpu for state in both))
    if found.over or not found.unknown:
        repair = both[1].gpu.repair
        advice = None if isinstance(repair.recovery_action, NotAvailable) else advice_for(repair.recovery_action)
        parts = Parts(kind="gpu", advice=advice or needs_of(repair).advice)
        seconds_held = or_none(held_back(*(state.gpu for state in both)))
        evidence = {"worse": found.facts, "seconds watched": seconds, "seconds held back by": seconds_held}
        criterion.require(found.over, evidence=evidence, parts=parts)
    if found.unknown:
        available(NotAvailable("; ".join(found.unknown)), "state", place, part="gpu")


def growth_of(name, first, last, place):
    """By how much a counter of a GPU grew; a counter that was refused, or reset, was not measured."""
    return available(grown(getattr(first.results[place], name), getattr(last.results[place], name)), name, place, part="gpu")


@pytest.mark.at_end
def test_ecc_growth(counters_at_start, counters_at_end, place, criterion):
    """No uncorrected memory error came during the run."""
    first, last = counters_at_start.results[place], counters_at_end.results[place]
    corrected = grown(first.ecc_corrected, last.ecc_corrected)
    errors = growth_of("ecc_uncorrected", counters_at_start, counters_at_end, place)
    criterion.require(
        errors, evidence={"corrected": str(corrected), "seconds watched": watched_s(counters_at_start, counters_at_end)}
    )


@pytest.fixture(scope="session")
def xids_at_end(cluster):
    """The same, after everything else."""
    return snapshot(cluster, gpu_xids, per="gpu", deadline_s=60)


@pytest.mark.at_end
def test_xid_during_run(xids_at_start, xids_at_end, place, criterion):
    """The driver reported no error of the GPU; what a worker of this run caused itself is shown where it happened."""
    seconds = watched_s(xids_at_start, xids_at_end)
    found = judge_xids(xids_at_end.results[place])
    if found.over or found.unknown is None:
        evidence = {"found": found.facts, "of own workers": found.own, "before the run": found.before}
        parts = Parts(kind="gpu", advice=found.advice)
        shown = {name: texts for name, texts in evidence.items() if texts}
        criterion.require(found.over, evidence={**shown, "seconds watched": seconds}, parts=parts)
    if found.unknown is not None:
        available(NotAvailable(found.unknown), "Xids", place)


@pytest.mark.at_end
def test_pcie_replays(counters_at_start, counters_at_end, place, criterion):
    """The PCIe link hardly ever had to send a packet again."""
    run_s = watched_s(counters_at_start, counters_at_end)
    replays = growth_of("pcie_replays", counters_at_start, counters_at_end, place)
    others = pcie_growth(counters_at_start.results[place], counters_at_end.results[place])
    criterion.require(per_minute(replays, run_s), evidence={"replays": replays, "seconds": run_s, **others})


@pytest.fixture
def nvlinks(counters_at_start, counters_at_end, node, recipe):
    """What happened on the NVLinks of each GPU of a node from the begin of the run to its end, by GPU."""
    first, last = counters_at_start.results, counters_at_end.results
    apart = {"seconds": watched_s(counters_at_start, counters_at_end), **recipe("nvlink_errors")}
    return {gpu: nvlink_growth(first[gpu], last[gpu], **apart) for gpu in first if gpu.node == node.node}


def of_all(nvlinks, name):
    """One kind of what happened, over all GPUs, each with the GPU's name."""
    return [f"{gpu.id}: {fact}" for gpu, one in nvlinks.items() for fact in getattr(one, name)]


@pytest.mark.at_end
def test_nvlink_errors(nvlinks, node, criterion):
    """No NVLink sent packets again or had to be trained again during the run."""
    over = sum(one.over for one in nvlinks.values())
    unknown = {gpu: one.unknown for gpu, one in nvlinks.items() if one.unknown}
    if over or not unknown:
        bad = blamed([gpu for gpu, one in nvlinks.items() if one.over], nvlinks)
        evidence = {"links": of_all(nvlinks, "facts"), "within": of_all(nvlinks, "within")}
        criterion.require(over, evidence=evidence, parts=Parts(kind="gpu", places=bad))
    nothing_unknown(unknown, nvlinks, node)
