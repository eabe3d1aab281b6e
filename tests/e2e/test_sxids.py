"""Whole runs on a simulated host whose kernel logs errors of NVSwitches (SXids) during the run, each beside a healthy twin."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_gpucluster.inventory.error_codes import sxid_of
from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import PLANTS, RUN_S, collect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

KEY = "sxid_during_run"
FIRST = "gpu_count"
DRIVER = "6,1,1,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64\n"
DOWN = "3,2,5,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up\n"
HARMLESS = "3,3,5,-;nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt\n"
ANOTHER_LOG = """\
    import sys
    from pathlib import Path
    if "pytest_gpucluster.agent.main" in sys.orig_argv:
        from pytest_gpucluster.inventory.driver_events import KernelLog
        KernelLog.__init__.__defaults__ = (Path({path!r}),)
    """
"""As ``sitecustomize``: the agents of the run, and so the listener, read this file as the kernel log."""
BETWEEN = """\
    import time
    from pathlib import Path
    import pytest

    @pytest.mark.health
    def test_between():
        if {lines!r}:
            with Path({path!r}).open("a", encoding="utf-8") as log:
                log.write({lines!r})
            time.sleep(2)  # until the listener has read it
    """


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def limits(cluster: dict[str, Any]) -> dict[str, Any]:
    """The packaged entries alone."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    return {
        "schema": 1,
        "cluster": cluster,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {key: {**packaged[key], "profiles": {}} for key in (FIRST, KEY)},
    }


def run(folder: Path, library: Path, *, begin: str | None, during: str = "", cluster: dict[str, Any]) -> FinishedRun:
    """The criterion on a host whose log has ``begin`` (None: there is no log) and gets ``during`` in a test of the run."""
    path = folder / "kmsg"
    if begin is not None:
        path.write_text(begin, encoding="utf-8")
    (folder / "limits.yaml").write_text(json.dumps(limits(cluster)), encoding="utf-8")
    for name, text in (("sitecustomize.py", ANOTHER_LOG), ("test_between.py", BETWEEN)):
        (folder / name).write_text(textwrap.dedent(text).format(path=str(path), lines=during), encoding="utf-8")
    chosen = ("test_between.py", ACCEPTANCE, "-k", f"{FIRST} or {KEY} or between")
    options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    variables = {**environment(measured=True), **with_gpus(library, "count 2\n"), "PYTHONPATH": python_path(PLANTS, folder)}
    launch = Launch(command=[*PYTEST, *chosen, *options], cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


@pytest.mark.slow
def test_nothing_is_reported(tmp_path: Path, library: Path) -> None:
    """An error from before the run, and a harmless one in it: ACCEPTED."""
    ran = run(tmp_path, library, begin=DRIVER + DOWN, during=HARMLESS, cluster={"kernel_log": "required"})
    assert ran.outcomes(KEY) == {"node0": "passed"}, ran.stdout
    evidence = str(ran.row(KEY, "node0")["evidence"])
    assert str(sxid_of(22013)) in evidence
    assert "before the run" in evidence
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)


def test_a_link_goes_down(tmp_path: Path, library: Path) -> None:
    """The node fails, with the switch, the meaning and what to do."""
    ran = run(tmp_path, library, begin=DRIVER, during=DOWN * 2, cluster={"kernel_log": "required"})
    assert ran.outcomes(KEY) == {"node0": "failed"}, ran.stdout
    row = ran.row(KEY, "node0")
    assert row["value"] == 2
    assert f"NVSwitch 1 (0000:06:00): {sxid_of(20034)} (Fatal), link 48, 2 times" in str(row["evidence"]["found"])
    assert f"next: {sxid_of(20034).action}" in row["reason"]
    assert (ran.results["verdict"], ran.returncode != 0) == ("REJECTED", True)


def test_the_log_cannot_be_read(tmp_path: Path, library: Path) -> None:
    """Where the limits require it, nothing is known of the switches: an error with its reason, never a pass."""
    ran = run(tmp_path, library, begin=None, cluster={"kernel_log": "required"})
    assert ran.outcomes(KEY) == {"node0": "error"}, ran.stdout
    assert "kmsg cannot be read: No such file or directory" in ran.row(KEY, "node0")["reason"]
    assert ran.results["verdict"] == "INCOMPLETE"


@pytest.mark.parametrize("cluster", [{}, pytest.param({"kernel_log": "optional"}, marks=pytest.mark.slow)])
def test_the_log_is_not_required(tmp_path: Path, library: Path, cluster: dict[str, Any]) -> None:
    """The rule of the limits leaves the criterion out and says so, whatever the log has."""
    ran = run(tmp_path, library, begin=DRIVER, during=DOWN, cluster=cluster)
    assert ran.outcomes(KEY) == {"node0": "skipped"}, ran.stdout
    assert "cluster: kernel_log: required" in ran.row(KEY, "node0")["reason"]
    assert ran.results["verdict"] == "ACCEPTED"
