"""Whole runs on a simulated host with one bad GPU, each beside a healthy one: what NVML tells before any load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.programs import why_not_working
from tests.support.runs import PLANTS, RUN_S, collect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

OF_NODE = ("nvlink_links", "fabric_state")
OF_GPU = ("recovery_action", "memory_repair", "compute_mode", "persistence", "power_limit")
JUDGED = (*OF_NODE, *OF_GPU)
LOWER = {500_000: 200.0, 699_000: 1.0}
"""Power limits in mW, and how many W each is below the default of the board."""
FAULTS = {
    "recovery 1": ("recovery_action", "failed", "next: end all processes on the GPU and reset it"),
    "recovery 2": ("recovery_action", "failed", "next: reboot the node"),
    "recovery 99": ("recovery_action", "failed", "NVML asks for unknown_99"),
    "err.field.230 2": ("recovery_action", "error", "recovery_action is not available: Invalid Argument"),
    "unrepairable 1": ("memory_repair", "failed", "next: take the GPU out of service"),
    "sram.threshold 1": ("memory_repair", "failed", "its SRAM has had too many uncorrectable errors"),
    "repair.channel 1": ("memory_repair", "failed", "next: reset the GPU"),
    "repair.tpc 1": ("memory_repair", "failed", "a processing cluster (TPC) waits for a repair"),
    "repair.tpc 1; err.nvmlDeviceGetSramEccErrorStatus 3": ("memory_repair", "failed", "waits for a repair"),
    "err.nvmlDeviceGetRepairStatus 13": ("memory_repair", "error", "channel_repair_pending is not available: Function Not"),
    "compute.mode 3": ("compute_mode", "failed", "mode exclusive_process"),
    "err.nvmlDeviceGetPersistenceMode 3": ("persistence", "error", "persistence is not available: Not Supported"),
    "err.nvmlDeviceGetPowerManagementDefaultLimit 3": (
        "power_limit",
        "error",
        "power_limit_default_w is not available: Not Supported",
    ),
    **{f"power.limit_mw {limit_mw}": ("power_limit", "passed", "") for limit_mw in LOWER},
}
"""The fault of GPU 1, of GPU 2 and so on: its criterion, the outcome and a part of the reason. The simulator has 16 GPUs."""
FAULTS_OF_NODE = {
    "14.fabric.state 2": ("fabric_state", "next: look at the fabric manager of the node"),
    "15.nvlink.4 0": ("nvlink_links", "node0-gpu15: link 4 is down"),
}
"""At a GPU that has no other fault, and seen by a criterion of the node."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def limits(judged: tuple[str, ...], gpu: str) -> dict[str, Any]:
    """The packaged entries alone."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    alone = {key: {name: value for name, value in packaged[key].items() if name != "measured_with"} for key in judged}
    return {
        "schema": 1,
        "profiles": {gpu: {"gpu": gpu, "accept_at": "quick"}},
        "criteria": {key: {**entry, "takes_s": 0.1, "profiles": {}} for key, entry in alone.items()},
    }


def run(folder: Path, library: Path, scenario: str, *, judged: tuple[str, ...] = JUDGED, gpu: str = "h200-sxm") -> FinishedRun:
    """The criteria on the GPUs of a scenario."""
    return started(folder, with_gpus(library, scenario), command_for(folder, judged, gpu))


def command_for(folder: Path, judged: tuple[str, ...], gpu: str) -> list[str]:
    """The command that judges these criteria, whose limits it writes."""
    (folder / "limits.yaml").write_text(json.dumps(limits(judged, gpu)), encoding="utf-8")
    chosen = (f"{ACCEPTANCE}/test_health.py", "-k", " or ".join(key.partition("[")[0] for key in judged))
    options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    return [*PYTEST, *chosen, *options]


def started(folder: Path, gpus: dict[str, str], command: list[str]) -> FinishedRun:
    """The command over simulated GPUs."""
    variables = {**environment(measured=True), **gpus, "PYTHONPATH": python_path(PLANTS)}
    launch = Launch(command=command, cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def outcomes(ran: FinishedRun) -> dict[str, dict[str, str]]:
    """What is not green, by criterion and place."""
    found = {key: ran.outcomes(key) for key in JUDGED}
    assert all(found.values()), ran.stdout
    return {
        key: bad
        for key, places in found.items()
        if (bad := {place: outcome for place, outcome in places.items() if outcome != "passed"})
    }


def test_healthy_host(tmp_path: Path, library: Path) -> None:
    """Two GPUs with nothing planted: ACCEPTED."""
    ran = run(tmp_path, library, "count 2")
    assert outcomes(ran) == {}, ran.stdout
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory, library: Path) -> FinishedRun:
    """One host whose every GPU but the first has a fault of its own, or a lower power limit."""
    of_gpus = [f"{gpu}.{line}" for gpu, fault in enumerate(FAULTS, 1) for line in fault.split("; ")]
    scenario = (f"count {1 + len(FAULTS)}", *of_gpus, *FAULTS_OF_NODE)
    return run(tmp_path_factory.mktemp("sick"), library, "\n".join(scenario))


def test_each_fault_shows_at_its_gpu_and_nowhere_else(sick: FinishedRun) -> None:
    """GPU 0 is green, and so is every other criterion of each GPU; a lower power limit is accepted."""
    bad: dict[str, dict[str, str]] = {key: {"node0": "failed"} for key, _ in FAULTS_OF_NODE.values()}
    for gpu, (key, outcome, _) in enumerate(FAULTS.values(), 1):
        if outcome != "passed":
            bad.setdefault(key, {})[f"node0-gpu{gpu}"] = outcome
    assert outcomes(sick) == bad, sick.stdout
    assert sick.results["verdict"] == "REJECTED"


@pytest.mark.parametrize(("fault", "gpu"), [(fault, gpu) for gpu, fault in enumerate(FAULTS, 1)])
def test_why_a_gpu_is_not_green(sick: FinishedRun, fault: str, gpu: int) -> None:
    """The row of its criterion says what was found, and what to do next."""
    key, _, said = FAULTS[fault]
    assert said in sick.row(key, f"node0-gpu{gpu}")["reason"]


@pytest.mark.parametrize("fault", FAULTS_OF_NODE)
def test_why_a_node_is_not_green(sick: FinishedRun, fault: str) -> None:
    """The row of its criterion names the GPU, the link or what to look at."""
    key, said = FAULTS_OF_NODE[fault]
    assert said in sick.row(key, "node0")["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "bad", "said"),
    [
        ("1.fabric.state 1", {"fabric_state": {"node0": "failed"}}, "node0-gpu1: its state is not_started"),
        ("1.fabric.health 0x1", {"fabric_state": {"node0": "failed"}}, "degraded bandwidth"),
        ("1.fabric.state 0", {"fabric_state": {"node0": "error"}}, "it shows no fabric"),
        ("1.nvlink.17.speed 13281", {"nvlink_links": {"node0": "failed"}}, "node0-gpu1: link 17 at 13.281 of 25 GB/s"),
        ("1.err.field.164 3", {"nvlink_links": {"node0": "error"}}, "its rate is not available: Not Supported"),
        ("1.err.nvmlDeviceGetNvLinkState 3", {"nvlink_links": {"node0": "error"}}, "NVLinks are not available: Not Supported"),
    ],
)
def test_one_bad_gpu(tmp_path: Path, library: Path, scenario: str, bad: dict[str, Any], said: str) -> None:
    """One criterion of the node is not green, and says why; two such faults cannot share a run."""
    ran = run(tmp_path, library, f"count 2\n{scenario}")
    assert outcomes(ran) == bad, ran.stdout
    assert all(said in ran.row(key, place)["reason"] for key, places in bad.items() for place in places)
    assert ran.results["verdict"] != "ACCEPTED"


@pytest.mark.slow
def test_what_a_gpu_asks_for_is_the_next_step(tmp_path: Path, library: Path) -> None:
    """In results.json and on the terminal, in place of what is usual for a GPU."""
    ran = run(tmp_path, library, "count 2\n1.recovery 4")
    assert "start nothing new on it, and reset it" in ran.culprit("node0-gpu1")["action"]
    assert "start nothing new on it, and reset it" in " ".join(ran.stdout.split())


@pytest.mark.parametrize(("limit_mw", "value"), LOWER.items())
def test_lower_power_limit_is_shown(sick: FinishedRun, limit_mw: int, value: float) -> None:
    """A GPU below the default of its board is shown with both, and accepted: its owner may want it so."""
    gpu = 1 + [*FAULTS].index(f"power.limit_mw {limit_mw}")
    row = sick.row("power_limit", f"node0-gpu{gpu}")
    assert (row["value"], row["unit"], row["advisory"]) == (value, "W", True)
    assert row["evidence"] == {"power_limit_w": limit_mw / 1000, "power_limit_default_w": 700.0}
    assert "power_limit" in sick.stdout


@pytest.mark.slow
def test_persistence_is_advisory(tmp_path: Path, library: Path) -> None:
    """A driver that leaves with the last process is told, and accepted."""
    ran = run(tmp_path, library, "count 2\n1.persistence 0")
    assert outcomes(ran) == {}, ran.stdout
    assert ran.row("persistence", "node0-gpu1")["advisory"] is True
    assert ran.results["verdict"] == "ACCEPTED"


def test_gpu_alone(tmp_path: Path, library: Path) -> None:
    """NVML refuses every link of the only GPU of a host, as on a real one: skipped by rule."""
    ran = run(tmp_path, library, "count 1\nerr.nvmlDeviceGetNvLinkState 3")
    assert outcomes(ran) == {key: {"node0": "skipped"} for key in OF_NODE}, ran.stdout


BER = ("nvlink_ber[effective]", "nvlink_ber[symbol]")


@pytest.mark.parametrize(
    ("field", "failed"), [(220, "nvlink_ber[effective]"), pytest.param(222, "nvlink_ber[symbol]", marks=pytest.mark.slow)]
)
def test_a_bit_error_rate_of_a_blackwell(tmp_path: Path, library: Path, field: int, failed: str) -> None:
    """3e-9 on one link: its GPU is named with the link, and the other rate passes. Links of Hopper tell no rates."""
    scenario = f"count 2\nname NVIDIA B200\nnvlink5 1\n1.nvlink.4.field.{field} {3 << 8 | 9}\n"
    ran = run(tmp_path, library, scenario, judged=BER, gpu="b200-sxm")
    assert {key: ran.outcomes(key) for key in BER} == {
        key: {"node0": "failed" if key == failed else "passed"} for key in BER
    }, ran.stdout
    assert "node0-gpu1 link 4: 3e-09" in ran.row(failed, "node0")["reason"]
    (culprit,) = ran.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("gpu", "node0-gpu1")


def over_bus(folder: Path, number: int) -> tuple[str, ...]:
    """A command that starts another one where the PCI bus has so many NVIDIA GPUs; skips the test where it may not mount."""
    for bus in range(number):
        device = folder / "devices" / f"0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    script = 'mount --bind "$0" /sys/bus/pci/devices && exec "$@"'
    before = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, str(folder / "devices"))
    why = why_not_working(before[0], *before[1:], "true")
    if why is not None:
        pytest.skip(f"no mount in a namespace of its own: {why}")
    return before


@pytest.mark.parametrize(
    ("stated", "outcome", "exit_code"),
    [(None, "error", 1), (3, "passed", 0), pytest.param(4, "failed", 1, marks=pytest.mark.slow)],  # the limit of any number
    ids=["nobody", "3", "4"],
)
def test_a_gpu_that_only_the_pci_bus_shows(
    tmp_path: Path, library: Path, stated: int | None, outcome: str, exit_code: int
) -> None:
    """NVML lists 3 of 4: never ACCEPTED where nobody stated the number, and the GPUs of the bus are named."""
    options = () if stated is None else (f"--gpucluster-expect=gpus_per_node={stated}",)
    command = [*over_bus(tmp_path, 4), *command_for(tmp_path, ("gpu_count",), "h200-sxm"), *options]
    ran = started(tmp_path, with_gpus(library, "count 3"), command)
    assert ran.outcomes("gpu_count") == {"node0": outcome}, ran.stdout
    assert ran.returncode == exit_code
    assert "0000:03:00.0 (no driver)" in " ".join(ran.stdout.split())
