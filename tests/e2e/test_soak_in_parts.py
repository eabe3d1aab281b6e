"""Soaks on a simulated host that are killed and go on: what the first part saw, or what came in between, is judged."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build, plant
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import PLANTS, RUN_S, collect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

JUDGED = ("ecc_growth", "pcie_replays", "nvlink_errors", "gpu_worsened", "xid_during_run")
SOAK = ("gpu_errors_soak", "dcgm_diag_soak")
"""The second one does not apply, as this host has no dcgmi: it takes no part in the soak."""
HEALTHY = "count 2\n"
DRIVER = "6,1,1,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64\n"
PLANTED = """\
    import sys
    from pathlib import Path
    from pytest_gpucluster.inventory import identity
    identity.BOOT_ID = Path({boot!r})
    if "pytest_gpucluster.agent.main" in sys.orig_argv:
        from pytest_gpucluster.inventory.driver_events import KernelLog
        KernelLog.__init__.__defaults__ = (Path({log!r}),)
    """
"""As ``sitecustomize``: these files are the kernel log and the id of the boot."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host with two GPUs, and the folder of a soak on it."""

    folder: Path
    library: Path

    def set(self, *, log: str | None = DRIVER, boot: str = "1" * 32) -> None:
        """What its kernel has logged since which boot."""
        (self.folder / "boot").write_text(boot, encoding="utf-8")
        if log is not None:
            (self.folder / "kmsg").write_text(log, encoding="utf-8")

    def start(self, scenario: str = HEALTHY) -> tuple[Launch, dict[str, str]]:
        """Start the soak, or go on with it."""
        packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
        limits: dict[str, Any] = {
            "schema": 1,
            "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
            "criteria": {key: {**packaged[key], "profiles": {}} for key in (*JUDGED, *SOAK)},
        }
        (self.folder / "limits.yaml").write_text(json.dumps(limits), encoding="utf-8")
        planted = textwrap.dedent(PLANTED).format(boot=str(self.folder / "boot"), log=str(self.folder / "kmsg"))
        (self.folder / "sitecustomize.py").write_text(planted, encoding="utf-8")
        chosen = (f"{ACCEPTANCE}/test_health.py", f"{ACCEPTANCE}/test_soak.py", "-k", " or ".join((*JUDGED, *SOAK)))
        options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
        variables = {
            **environment(measured=False),
            **with_gpus(self.library, scenario),
            "PYTHONPATH": python_path(PLANTS, self.folder),
        }
        command = [*PYTEST, *chosen, "--gpucluster-level=soak:8s", *options]
        return Launch(command=command, cwd=self.folder, environment=variables, name="node0").start(), variables

    def cut(self, *, during: str = "") -> None:
        """A soak that is killed: ``during`` is planted after its first round, and two more whole rounds follow."""
        launch, variables = self.start()
        try:
            launch.until(lambda: rounds_of(launch.journal()) >= 1, what="a round")
            plant(variables, f"{HEALTHY}{during}")
            now = rounds_of(launch.journal())
            launch.until(lambda: rounds_of(launch.journal()) >= now + 4, what="more rounds")
            os.kill(launch.pid, signal.SIGKILL)
            launch.end()
            launch.gone()
        finally:
            launch.kill_all()

    def go_on(self, scenario: str = HEALTHY) -> FinishedRun:
        """The same command again."""
        launch, _ = self.start(scenario)
        try:
            launch.end(within_s=RUN_S)
        finally:
            launch.kill_all()
        return collect([launch])


def rounds_of(journal: list[dict[str, Any]]) -> int:
    """How many rounds are over."""
    return sum(event["event"] == "soak_round" for event in journal)


def test_a_healthy_soak_goes_on(tmp_path: Path, library: Path) -> None:
    """ACCEPTED, and the verdict says that it was cut."""
    host = Host(folder=tmp_path, library=library)
    host.set()
    host.cut()
    ran = host.go_on()
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0), ran.stdout
    assert "soak_resumed" in ran.results, ran.stdout
    assert ran.outcomes(SOAK[1]) == {"node0": "skipped"}
    assert "the soak was cut short after" in ran.verdict_line


@pytest.mark.parametrize(
    ("during", "log", "key"),
    [
        ("xids 1:79\n", DRIVER, "xid_during_run"),
        pytest.param("xids 1:94 1:48\n", None, "xid_during_run", marks=pytest.mark.slow),
        pytest.param("1.recovery 1\n", DRIVER, "gpu_worsened", marks=pytest.mark.slow),
        pytest.param("1.remap.pending 1\n", None, "gpu_worsened", marks=pytest.mark.slow),
    ],
)
def test_what_the_first_part_saw(tmp_path: Path, library: Path, during: str, log: str | None, key: str) -> None:
    """It is judged by the run that follows, also where a new soak begins since nobody can know what came in between."""
    host = Host(folder=tmp_path, library=library)
    host.set(log=log)
    host.cut(during=during)
    ran = host.go_on()
    assert ran.outcomes(key) == {"node0-gpu0": "passed", "node0-gpu1": "failed"}, ran.stdout
    assert "in a soak that was cut short before this run" in ran.row(key, "node0-gpu1")["reason"]
    assert (ran.results["verdict"], ran.returncode != 0) == ("REJECTED", True)
    assert ("soak_resumed" in ran.results) == (log is not None)
    assert [one["places"] for one in ran.results["culprits"]] == [["node0-gpu1"]]


def test_the_node_crashed(tmp_path: Path, library: Path) -> None:
    """It was booted, which cleared all counters but that of the GPU's whole life: a new soak, and that GPU is bad."""
    host = Host(folder=tmp_path, library=library)
    host.set()
    host.cut()
    host.set(boot="2" * 32)
    ran = host.go_on(f"{HEALTHY}1.ecc.unc.agg 7\n")
    assert "soak_resumed" not in ran.results
    assert "a new soak begins, as node0-gpu0 has another boot id" in ran.stdout
    assert ran.outcomes("ecc_growth") == {"node0-gpu0": "passed", "node0-gpu1": "failed"}, ran.stdout
    assert ran.row("ecc_growth", "node0-gpu1")["value"] == 7
    assert ran.results["verdict"] == "REJECTED"


@pytest.mark.slow
def test_an_xid_while_nobody_watched(tmp_path: Path, library: Path) -> None:
    """The kernel log has it."""
    host = Host(folder=tmp_path, library=library)
    host.set()
    host.cut()
    host.set(log=f"{DRIVER}4,2,5,-;NVRM: Xid (PCI:0000:43:00): 79, pid='<unknown>', GPU has fallen off the bus.\n")
    ran = host.go_on()
    assert "soak_resumed" in ran.results
    assert ran.outcomes("xid_during_run") == {"node0-gpu0": "passed", "node0-gpu1": "failed"}, ran.stdout
    assert ran.results["verdict"] == "REJECTED"
