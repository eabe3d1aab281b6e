"""Whole runs on a host whose sysfs has NICs: a healthy one, and faults that are there from the begin or come in the run.

The run sees the made sysfs in a mount namespace of its own, at the place of the real one: nothing in it knows of the test.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.programs import why_not_working
from tests.support.runs import PLANTS, RUN_S, collect
from tests.support.sysfs import MadeSys, infiniband

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

MOUNT = 'for name in class bus; do mount --bind "$1/$name" "/sys/$name" || exit 99; done; shift; exec "$@"'
IN_NAMESPACE = ["unshare", "-rm", "sh", "-c", MOUNT, "sh"]
JUDGED = ("nic_ports", "nic_pcie", "nic_errors")
SOAK = "nic_flaps_soak"
PORTS = 4
PORT = "mlx5_1 port 1 (0000:22:00.0)"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML; skips where there are no mounts of one's own."""
    folder = tmp_path_factory.mktemp("nvml")
    for name in ("class", "bus"):
        (folder / name).mkdir()
    if why_not_working(*IN_NAMESPACE, str(folder), "true"):
        pytest.skip("no mounts of one's own here (unshare -rm)")
    return build(folder)


def limits_of(fabric: str) -> dict[str, Any]:
    """The packaged entries for one host: four ports of 400 Gb/s are promised."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    entries = {key: {**packaged[key], "profiles": {}, "needs": {"nodes": 1}} for key in (*JUDGED, SOAK)}
    entries["nic_ports"]["recipe"] = {"ports": PORTS, "gbit_s": 400}
    return {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick", "fabric": fabric}},
        "criteria": entries,
    }


def run(folder: Path, library: Path, *options: str, fabric: str = "infiniband", **changes: str) -> FinishedRun:
    """The criteria on one simulated GPU. Two changes of ``made``: ``before`` the run, and ``between``, in a test of it."""
    before, between = changes.get("before", ""), changes.get("between", "")
    made = MadeSys(folder / "sys", *map(infiniband, range(PORTS)))
    exec(before, {"made": made})  # noqa: S102 -- a line of this file
    (folder / "limits.yaml").write_text(json.dumps(limits_of(fabric)), encoding="utf-8")
    (folder / "test_between.py").write_text(
        textwrap.dedent(f"""\
            import threading
            from pathlib import Path
            from tests.support.sysfs import MadeSys

            def test_between():
                made = MadeSys.__new__(MadeSys)
                made.root = Path({str(made.root)!r})
                {between or "pass"}
            """),
        encoding="utf-8",
    )
    names = " or ".join((*JUDGED, SOAK, "between"))
    chosen = [*(f"{ACCEPTANCE}/{name}" for name in ("test_nics.py", "test_soak.py")), "test_between.py", "-k", names]
    options = (*options, "--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    variables = {**environment(measured=True), **with_gpus(library, "count 1\n"), "PYTHONPATH": python_path(PLANTS)}
    command = [*IN_NAMESPACE, str(made.root), *PYTEST, *chosen, *options]
    launch = Launch(command=command, cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def outcomes(ran: FinishedRun) -> dict[str, str]:
    """What became of each criterion."""
    return {key: ran.outcomes(key).get("node0", "") for key in JUDGED}


def test_healthy(tmp_path: Path, library: Path) -> None:
    """Traffic alone: ACCEPTED."""
    ran = run(tmp_path, library, between='made.change("mlx5_1", "counters/port_xmit_data", "123456")')
    assert outcomes(ran) == dict.fromkeys(JUDGED, "passed"), ran.stdout
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)


FAULTS = {
    "nic_ports": ("mlx5_0 port 1 (0000:12:00.0)", "DOWN, Polling"),
    "nic_errors": ("mlx5_1 port 1 (0000:22:00.0)", "link_downed +1 in "),
    "nic_pcie": ("0000:32:00.0", "0000:32:00.0: on the way to mlx5_2: x8 at 32 GT/s of x16 at 32 GT/s"),
}
"""The bad part of each criterion, and what is said of it; the fourth adapter is healthy."""


@pytest.fixture(scope="module")
def three_bad(tmp_path_factory: pytest.TempPathFactory, library: Path) -> FinishedRun:
    """One adapter without a cable, one whose link goes down in the run, and one whose slot trained at x8."""
    narrow = '(made.root / "bus/pci/devices/0000:32:00.0/current_link_width").write_text("8")'
    return run(
        tmp_path_factory.mktemp("three-bad"),
        library,
        before=f'made.pull_down("mlx5_0"); {narrow}',
        between='made.change("mlx5_1", "counters/link_downed", "1")',
    )


def test_three_bad_adapters_are_named(three_bad: FinishedRun) -> None:
    """The adapters of a node are one culprit. Each criterion names its own bad one, and no other."""
    assert outcomes(three_bad) == dict.fromkeys(JUDGED, "failed"), three_bad.stdout
    (culprit,) = three_bad.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"], {*culprit["criteria"]}) == ("nic", "node0", {*FAULTS})
    for bad, (part, _) in FAULTS.items():
        (line,) = (line for line in culprit["evidence"] if line.startswith(f"{bad} at "))
        assert [other for other, _ in FAULTS.values() if other in line] == [part]
    assert (three_bad.results["verdict"], three_bad.returncode) == ("REJECTED", 1)


@pytest.mark.parametrize("bad", FAULTS)
def test_what_is_said_of_a_bad_adapter(three_bad: FinishedRun, bad: str) -> None:
    """Its port or its address, and what is wrong with it."""
    part, said = FAULTS[bad]
    text = three_bad.case(f"test_{bad}[node0]").text
    assert part in text
    assert said in text


def test_what_a_narrow_link_leaves(three_bad: FinishedRun) -> None:
    """The evidence says what the link could be; the reason counts the links."""
    row = three_bad.row("nic_pcie", "node0")
    assert row["evidence"]["found"] == [FAULTS["nic_pcie"][1]]
    assert " (node0) 0000:32:00.0: 1 link, above 0 links (1 link off; " in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "change", "said"),
    [
        ("before", 'made.change("mlx5_1", "rate", "200 Gb/sec (4X HDR)")', "200 Gb/sec (4X HDR)"),
        ("between", 'made.pull_down("mlx5_1")', "is DOWN at the end, and was ACTIVE"),
    ],
)
def test_one_port(tmp_path: Path, library: Path, when: str, change: str, said: str) -> None:
    """The right criterion fails, by the port's name, and the culprit is a NIC of that node; the others pass."""
    bad = "nic_ports" if when == "before" else "nic_errors"
    ran = run(tmp_path, library, **{when: change})
    assert outcomes(ran) == {**dict.fromkeys(JUDGED, "passed"), bad: "failed"}, ran.stdout
    (culprit,) = ran.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"], culprit["criteria"]) == ("nic", "node0", [bad])
    assert PORT in culprit["evidence"][0]
    assert said in ran.case(f"test_{bad}[node0]").text
    assert ran.returncode == 1


@pytest.mark.parametrize(
    ("before", "between", "said"),
    [
        ('made.refuse("mlx5_1", "counters/link_downed")', "", "link_downed is not available"),
        pytest.param(
            'made.change("mlx5_1", "counters/link_downed", "9")',
            'made.change("mlx5_1", "counters/link_downed", "0")',
            "reset",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_counters_of_which_nothing_is_known(tmp_path: Path, library: Path, before: str, between: str, said: str) -> None:
    """Never green: an ERROR that names the port; its state is judged all the same."""
    ran = run(tmp_path, library, before=before, between=between)
    assert outcomes(ran) == {**dict.fromkeys(JUDGED, "passed"), "nic_errors": "error"}, ran.stdout
    row = ran.row("nic_errors", "node0")
    assert PORT in row["reason"]
    assert said in row["reason"]
    assert (ran.results["verdict"], ran.returncode) == ("INCOMPLETE", 1)


def test_no_adapter_where_they_are_promised(tmp_path: Path, library: Path) -> None:
    """Without the class: an ERROR of each that says what is not there."""
    ran = run(tmp_path, library, before='import shutil; shutil.rmtree(made.root / "class" / "infiniband")')
    assert outcomes(ran) == dict.fromkeys(JUDGED, "error"), ran.stdout
    assert "/sys/class/infiniband" in ran.row("nic_ports", "node0")["reason"]


@pytest.mark.slow
def test_no_adapter_where_none_is_promised(tmp_path: Path, library: Path) -> None:
    """Skipped by rule, with the reason, however bad the ports are."""
    ran = run(tmp_path, library, before='made.pull_down("mlx5_1")', fabric="none")
    assert outcomes(ran) == dict.fromkeys(JUDGED, "skipped"), ran.stdout
    assert "the profile promises none" in ran.row("nic_ports", "node0")["reason"]


@pytest.mark.parametrize("flaps", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cable_that_flaps_once_in_a_soak(tmp_path: Path, library: Path, *, flaps: bool) -> None:
    """The soak names the port, the round and the rate; the whole run shows it too. The twin without a flap is green."""
    flap = 'threading.Timer(3, lambda: made.change("mlx5_1", "counters/link_downed", "1")).start()'
    ran = run(tmp_path, library, "--gpucluster-level=soak:6s", between=flap if flaps else "pass")
    expected = "failed" if flaps else "passed"
    assert ran.outcomes(SOAK) == ran.outcomes("nic_errors") == {"node0": expected}, ran.stdout
    row = ran.row(SOAK, "node0")
    assert (row["value"], row["evidence"]["rounds"] > 1) == (int(flaps), True)
    if flaps:
        assert row["evidence"]["worst in round"] > 1
        assert PORT in row["reason"].splitlines()[0]
        assert "an hour), 0 allowed" in row["evidence"]["found"][0]
