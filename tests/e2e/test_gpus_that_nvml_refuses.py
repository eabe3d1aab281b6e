"""Whole runs on a simulated host of four GPUs of which NVML refuses one: it is named, and the others keep their numbers."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import pytest
import yaml

from pytest_gpucluster.inventory.error_codes import ACTIONS
from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import PLANTS, RUN_S, collect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

KEYS = ("gpu_model", "ecc_uncorrected", "xid_during_run")
BUSES = (0x10, 0x18, 0x20, 0x28)
ANOTHER_BUS = """\
    import sys
    from pathlib import Path
    if "pytest_gpucluster.agent.main" in sys.orig_argv:
        from pytest_gpucluster.inventory import pci_tree
        pci_tree.read_nvidia_gpus.__kwdefaults__["root"] = Path({path!r})
    """
"""As ``sitecustomize``: the workers of the run read this folder as sysfs."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def run(folder: Path, library: Path, plant: str, *, has_bus: bool = True) -> FinishedRun:
    """Criteria of health on a host with a plant. ``has_bus``: the PCI bus can be read."""
    for bus in BUSES if has_bus else ():
        device = folder / "sys" / "bus" / "pci" / "devices" / f"0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n", encoding="ascii")
        (device / "class").write_text("0x030200\n", encoding="ascii")
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    limits = {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {key: {**packaged[key], "profiles": {}} for key in KEYS},
    }
    (folder / "limits.yaml").write_text(json.dumps(limits), encoding="utf-8")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(ANOTHER_BUS).format(path=str(folder / "sys")), encoding="utf-8")
    chosen = (f"{ACCEPTANCE}/test_health.py", "-k", " or ".join(KEYS))
    options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    scenario = "".join(f"{number}.pci.bus {bus}\n" for number, bus in enumerate(BUSES))
    variables = {
        **environment(measured=True),
        **with_gpus(library, f"count 4\n{scenario}{plant}\n"),
        "PYTHONPATH": python_path(PLANTS, folder),
    }
    launch = Launch(command=[*PYTEST, *chosen, *options], cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def addresses(ran: FinishedRun) -> dict[str, str | None]:
    """The PCI address of each GPU by its place."""
    return {row["place"]["id"]: row["place"]["pci"] for row in ran.results["criteria"] if row["criterion"] == "gpu_model"}


@pytest.mark.parametrize(
    ("refused", "code", "has_bus"),
    [
        (2, 16, True),
        pytest.param(0, 15, True, marks=pytest.mark.slow),
        pytest.param(3, 16, False, marks=pytest.mark.slow),
        (1, 15, False),
    ],
)
def test_a_handle_that_nvml_refuses(tmp_path: Path, library: Path, refused: int, code: int, *, has_bus: bool) -> None:
    """The GPU has its own number, and the address that only the PCI bus still has; its next step is the driver's."""
    ran = run(tmp_path, library, f"{refused}.err {code}", has_bus=has_bus)
    known = {f"node0-gpu{number}": f"00000000:{bus:02x}:00.0" for number, bus in enumerate(BUSES)}
    place = f"node0-gpu{refused}"
    assert addresses(ran) == {**known, **({} if has_bus else {place: None})}, ran.stdout
    assert {name for name, outcome in ran.outcomes("ecc_uncorrected").items() if outcome != "passed"} == {place}
    (culprit,) = ran.results["culprits"]
    assert (culprit["place"]["id"], culprit["kind"]) == (place, "gpu")
    assert ACTIONS["Xid"][{15: "reboot", 16: "reset"}[code]] in culprit["action"]


def test_one_call_that_requires_a_reset(tmp_path: Path, library: Path) -> None:
    """The cause is the GPU, and its next step is the reset."""
    ran = run(tmp_path, library, "2.err.nvmlDeviceGetTotalEccErrors 16")
    assert ran.outcomes("ecc_uncorrected")["node0-gpu2"] == "error", ran.stdout
    assert "GPU requires restart" in ran.row("ecc_uncorrected", "node0-gpu2")["reason"]
    (culprit,) = ran.results["culprits"]
    assert (culprit["place"]["id"], culprit["kind"]) == ("node0-gpu2", "gpu")
    assert ACTIONS["Xid"]["reset"] in culprit["action"]
