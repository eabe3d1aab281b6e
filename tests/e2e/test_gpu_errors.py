"""Whole runs on a simulated host whose GPUs count errors during the run, each beside one that counts none."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import PLANTS, RUN_S, collect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

Kind: TypeAlias = Literal["whole", "soak", "late"]
JUDGED = ("ecc_growth", "pcie_replays", "nvlink_errors", "gpu_worsened", "gpu_held_back")
SOAK = "gpu_errors_soak"
FIRST = "gpu_count"
"""Judged before ``test_between``, so the run has begun by then, as in a whole suite."""
LOST = {"node0-gpu1": "error"}
COUNTED_BEFORE = ("ecc.cor.vol 3", "ecc.unc.vol 2", "pcie.replay 40", "nvlink.4.recovery 3", "nvlink.4.crc_data 7")
FAULTS = {
    "ecc.unc.vol 3": ("ecc_growth", "failed", "ecc_growth at "),
    "field.271 1500000000": ("gpu_held_back", "failed", "power_brake_s +1.5"),
    "err.field.271 3": ("gpu_held_back", "error", "power_brake_s is not available: the counter is not there"),
    "pcie.replay 49": ("pcie_replays", "failed", "pcie_replays at "),
    "nvlink.4.recovery 4": ("nvlink_errors", "failed", "link 4 recoveries +1"),
    "ecc.unc.vol 0": ("ecc_growth", "error", "the counter was reset during the run"),
    "pcie.replay 0": ("pcie_replays", "error", "the counter was reset during the run"),
    "err.nvmlDeviceGetTotalEccErrors 3": ("ecc_growth", "error", "Not Supported"),
    "nvlink.7 0": ("gpu_worsened", "failed", "link 7 went down"),
    "recovery 1": ("gpu_worsened", "failed", "reset it (nvidia-smi --gpu-reset)"),
    "remap.pending 1": ("gpu_worsened", "failed", "remapped_rows_pending is True, was False"),
    "err.nvmlDeviceGetRepairStatus 3": ("gpu_worsened", "error", "channel_repair_pending is not"),
}
"""What GPU 1, GPU 2 and so on count during the run: the criterion, its outcome, and a part of its reason or evidence."""
BEGIN = "count 2\n1.ecc.cor.vol 3\n1.ecc.unc.vol 2\n1.pcie.replay 40\n1.nvlink.4.recovery 3\n1.nvlink.4.crc_data 7\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def limits() -> dict[str, Any]:
    """The packaged entries alone."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    return {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {key: {**packaged[key], "profiles": {}} for key in (FIRST, *JUDGED, SOAK)},
    }


def run(folder: Path, library: Path, *, begin: str = BEGIN, between: str, kind: Kind = "whole") -> FinishedRun:
    """The criteria on the GPUs of ``begin``; a test of the run replaces lines of the scenario by those of ``between``.

    That test is collected first, and is a test of health as well. In a soak, which takes 6 s, the lines are replaced 3 s after
    it. In a late run, none of our tests can run before it.
    """
    soaks = kind == "soak"
    (folder / "limits.yaml").write_text(json.dumps(limits()), encoding="utf-8")
    kept = [line for line in begin.splitlines() if line.split()[0] not in {new.split()[0] for new in between.splitlines()}]
    (folder / "test_between.py").write_text(
        textwrap.dedent(f"""\
            import os
            import threading
            import pytest
            from tests.support.nvml_simulator import plant

            @pytest.mark.health
            def test_between():
                planting = threading.Timer({3 if soaks else 0}, plant, (os.environ, {chr(10).join([between, *kept])!r}))
                planting.start()
                {"" if soaks else "planting.join()"}
            """),
        encoding="utf-8",
    )
    names = " or ".join((FIRST, *JUDGED, "between", SOAK))
    selected = ("-k", f"({names}) and not {FIRST if kind == 'late' else 'nothing'}")
    chosen = ("test_between.py", f"{ACCEPTANCE}/test_health.py", f"{ACCEPTANCE}/test_soak.py", *selected)
    level = ("--gpucluster-level=soak:6s",) if soaks else ()
    options = (*level, "--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    variables = {**environment(measured=True), **with_gpus(library, begin), "PYTHONPATH": python_path(PLANTS)}
    launch = Launch(command=[*PYTEST, *chosen, *options], cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def outcomes(ran: FinishedRun) -> dict[str, dict[str, str]]:
    """What is not green, by criterion and place."""
    found = {key: ran.outcomes(key) for key in JUDGED}
    assert all(found.values())
    return {
        key: bad
        for key, places in found.items()
        if (bad := {place: outcome for place, outcome in places.items() if outcome != "passed"})
    }


def test_counters_that_hardly_grow(tmp_path: Path, library: Path) -> None:
    """What was counted before the run, a corrected error, some replays and CRC errors of data: ACCEPTED.

    Seconds in which power held the clocks back are shown.
    """
    grown = "1.ecc.cor.vol 4\n1.pcie.replay 48\n1.pcie.field.175 6\n1.nvlink.4.crc_data 9\n1.violation.0 2500000000"
    ran = run(tmp_path, library, between=grown)
    assert outcomes(ran) == {}, ran.stdout
    held_back = [ran.row("gpu_worsened", gpu)["evidence"]["seconds held back by"] for gpu in ("node0-gpu0", "node0-gpu1")]
    assert [one["power"] for one in held_back] == [0, 2.5]
    assert ran.row("pcie_replays", "node0-gpu1")["evidence"]["receiver errors"] == 6
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory, library: Path) -> FinishedRun:
    """One host whose every GPU but the first counts something else during the run."""
    begin = [f"{gpu}.{line}" for gpu in range(1, 1 + len(FAULTS)) for line in COUNTED_BEFORE]
    between = "\n".join(f"{gpu}.{line}" for gpu, line in enumerate(FAULTS, 1))
    return run(
        tmp_path_factory.mktemp("worn"),
        library,
        begin="\n".join([f"count {1 + len(FAULTS)}", *begin, ""]),
        between=between,
    )


def test_each_fault_shows_at_its_gpu_and_nowhere_else(worn: FinishedRun) -> None:
    """The right criteria are not green, at the right places; each GPU is named, also by a value of its node; GPU 0 is not."""
    bad: dict[str, dict[str, str]] = {}
    for gpu, (key, outcome, _) in enumerate(FAULTS.values(), 1):
        bad.setdefault(key, {})["node0" if key == "nvlink_errors" else f"node0-gpu{gpu}"] = outcome
    assert outcomes(worn) == bad, worn.stdout
    assert sorted(place for one in worn.results["culprits"] for place in one["places"]) == sorted(
        f"node0-gpu{gpu}" for gpu in range(1, 1 + len(FAULTS))
    )
    assert worn.results["verdict"] == "REJECTED"


@pytest.mark.parametrize(("fault", "gpu"), [(fault, gpu) for gpu, fault in enumerate(FAULTS, 1)])
def test_why_a_gpu_is_not_green(worn: FinishedRun, fault: str, gpu: int) -> None:
    """The row of its criterion says what was counted, or why nothing is known."""
    key, _, said = FAULTS[fault]
    row = worn.row(key, "node0" if key == "nvlink_errors" else f"node0-gpu{gpu}")
    assert said in f"{row['reason']} {row['evidence']}"


@pytest.mark.parametrize(
    ("between", "bad", "said"),
    [
        pytest.param(
            "1.nvlink.9.replay 2", {"nvlink_errors": {"node0": "failed"}}, "link 9 replays +2", marks=pytest.mark.slow
        ),
        pytest.param(
            "1.nvlink.3.crc_flit 900000",
            {"nvlink_errors": {"node0": "failed"}},
            "crc_flits, most on link 3, +900000",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "1.nvlink.4.recovery 0",
            {"nvlink_errors": {"node0": "error"}},
            "link 4 recoveries fell from 3 to 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "1.err.nvmlDeviceGetNvLinkErrorCounter 3",
            {"nvlink_errors": {"node0": "error"}},
            "Not Supported",
            marks=pytest.mark.slow,
        ),
        (
            "1.err 15",
            {
                **dict.fromkeys(("ecc_growth", "pcie_replays", "gpu_worsened", "gpu_held_back"), LOST),
                "nvlink_errors": {"node0": "error"},
            },
            "GPU is lost",
        ),
    ],
)
def test_one_gpu(tmp_path: Path, library: Path, between: str, bad: dict[str, Any], said: str) -> None:
    """As above for what cannot share a run: counters of the node's links, and a GPU that tells nothing any more."""
    ran = run(tmp_path, library, between=between)
    assert outcomes(ran) == bad, ran.stdout
    assert said in " ".join(ran.stdout.split())  # long lines are wrapped
    assert [one["places"] for one in ran.results["culprits"]] == [["node0-gpu1"]], "the GPU, also by a value of its node"
    assert ran.results["verdict"] != "ACCEPTED"


@pytest.mark.parametrize(
    ("between", "outcome", "said"),
    [
        pytest.param("1.ecc.cor.vol 9\n1.pcie.replay 41\n1.nvlink.4.crc_data 9", "passed", None, marks=pytest.mark.slow),
        ("1.ecc.unc.vol 3", "failed", "ecc_uncorrected +1"),
        pytest.param("1.pcie.replay 49", "failed", "pcie_replays +9", marks=pytest.mark.slow),
        pytest.param("1.nvlink.4.recovery 4", "failed", "link 4 recoveries +1", marks=pytest.mark.slow),
        pytest.param("1.pcie.replay 0", "error", "pcie_replays fell from 40 to 0", marks=pytest.mark.slow),
        pytest.param("1.err 15", "error", "GPU is lost", marks=pytest.mark.slow),
    ],
)
def test_one_gpu_in_a_soak(tmp_path: Path, library: Path, between: str, outcome: str, said: str | None) -> None:
    """The right GPU is not green, and its round is told; the other GPU is green."""
    ran = run(tmp_path, library, between=between, kind="soak")
    assert ran.outcomes(SOAK) == {"node0-gpu0": "passed", "node0-gpu1": outcome}, ran.stdout
    row = ran.row(SOAK, "node0-gpu1")
    if outcome == "failed":
        assert row["evidence"]["worst in round"] > 1
        assert said in str(row["evidence"]["found"])
    if outcome == "error":
        assert re.search(r"in round ([2-9]|\d\d+) of the soak", row["reason"])
        assert said in row["reason"]


@pytest.mark.slow
def test_what_was_bad_before_is_not_worse(tmp_path: Path, library: Path) -> None:
    """A dead link, a repair and a refused reading at the begin are for other criteria; one that becomes well is no fault."""
    begin = f"{BEGIN}1.nvlink.7 0\n1.repair.tpc 1\n1.err.nvmlDeviceGetSramEccErrorStatus 3\n1.recovery 1\n"
    ran = run(tmp_path, library, begin=begin, between="1.recovery 0")
    assert outcomes(ran) == {}, ran.stdout


@pytest.mark.slow
def test_one_gpu_has_no_links_to_others(tmp_path: Path, library: Path) -> None:
    """Its NVLinks are refused, as on a real host of one GPU: skipped by rule, and the rest is judged."""
    ran = run(tmp_path, library, begin="count 1\nerr.nvmlDeviceGetNvLinkState 3\n", between="0.pcie.replay 1")
    assert ran.outcomes("nvlink_errors") == {"node0": "skipped"}, ran.stdout
    assert ran.results["verdict"] == "ACCEPTED"


@pytest.mark.slow
def test_one_gpu_in_a_soak_has_no_links(tmp_path: Path, library: Path) -> None:
    """The soak judges the rest of its counters."""
    ran = run(tmp_path, library, begin="count 1\nerr.nvmlDeviceGetNvLinkState 3\n", between="0.pcie.replay 1", kind="soak")
    assert ran.outcomes(SOAK) == {"node0-gpu0": "passed"}, ran.stdout


def test_a_test_of_another_folder_that_runs_first(tmp_path: Path, library: Path) -> None:
    """The readings are taken before it, so what happened while it ran is judged."""
    ran = run(tmp_path, library, between="1.ecc.unc.vol 3\n1.pcie.replay 400\n1.nvlink.9.replay 2", kind="late")
    judged = {key: ran.outcomes(key) for key in ("ecc_growth", "pcie_replays")}
    assert judged == {key: {"node0-gpu0": "passed", "node0-gpu1": "failed"} for key in judged}, ran.stdout
    assert ran.outcomes("nvlink_errors") == {"node0": "failed"}
