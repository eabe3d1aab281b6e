"""Whole runs beside a made ``dcgmi``: it finds nothing, finds a fault, cannot tell, hangs, and is not there."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.dcgm import NO_ENGINE, entity, install, report_4, warning
from tests.support.launching import ACCEPTANCE
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import Torchrun, run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

KEYS = ("dcgm_diag[software]", "dcgm_diag[memory]")
PLACES = ("node0-gpu0", "node0-gpu1")
OTHER = "gpu_count"
"""A criterion that passes in any case: a run in which nothing passed is never accepted."""
UUIDS = {4: "GPU-00000001-0000-0000-0000-000000000001", 7: "GPU-00000000-0000-0000-0000-000000000000"}
"""DCGM's numbers here are neither NVML's nor in its order: GPU 4 is node0-gpu1."""
SOFTWARE = [entity(4), entity(7)]
HEALTHY = report_4(software=SOFTWARE, memory=SOFTWARE)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def limits(**recipe: Any) -> dict[str, Any]:
    """The packaged entry as it is, and one for the test of the memory, with a longer diagnostic."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    first, other = ({**packaged[key], "profiles": {}, "level": "quick"} for key in (KEYS[0], OTHER))
    second = {**first, "recipe": {"run": 2, "within_s": 120, **recipe}}
    return {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {OTHER: other, **dict(zip(KEYS, (first, second), strict=True))},
    }


def run(folder: Path, library: Path, path: Path, *, torchrun: Torchrun | None = None, **recipe: Any) -> FinishedRun:
    """The criteria on a simulated host of two GPUs; ``path`` is the first folder of PATH."""
    (folder / "limits.yaml").write_text(json.dumps(limits(**recipe)), encoding="utf-8")
    gpus = with_gpus(library, "count 2\n")
    variables = {name: gpus[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}
    variables["PATH"] = f"{path}{os.pathsep}{os.environ['PATH']}"
    chosen = [f"{ACCEPTANCE}/{name}" for name in ("test_health.py", "test_health_dcgm.py")]
    options = ("-k", f"{OTHER} or dcgm", "--gpucluster-thresholds=limits.yaml", "--gpucluster-gate")
    return run_pytest(folder, *chosen, *options, variables=variables, torchrun=torchrun)


def outcomes(ran: FinishedRun) -> dict[tuple[str, str | None], str]:
    """What became of each test and GPU."""
    return {(key, place): outcome for key in KEYS for place, outcome in ran.outcomes(key).items()}


def all_of(word: str, **others: str) -> dict[tuple[str, str | None], str]:
    """Every test and GPU alike, but for those of the memory at these GPUs."""
    same = {(key, place): word for key in KEYS for place in PLACES}
    return same | {(KEYS[1], f"node0-{gpu}"): outcome for gpu, outcome in others.items()}


@pytest.mark.slow
def test_it_finds_nothing(tmp_path: Path, library: Path) -> None:
    """One call for all, at the longer of the levels; ACCEPTED, and DCGM's version is told."""
    path = install(tmp_path / "bin", uuids=UUIDS, report=HEALTHY)
    ran = run(tmp_path, library, path)
    assert outcomes(ran) == all_of("passed"), ran.stdout
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)
    calls = (path / "calls").read_text(encoding="ascii").splitlines()
    assert [call for call in calls if call.startswith("diag")] == ["diag -r 2 -j -i 4,7"]
    assert ran.row(KEYS[0], PLACES[0])["evidence"]["DCGM"] == "4.2.3"


def test_it_finds_a_fault(tmp_path: Path, library: Path) -> None:
    """At the GPU that DCGM means, by its UUID; with its text, its advice and the GPU as the bad part."""
    bad = report_4(software=SOFTWARE, memory=[entity(4, "Fail", warning("Row remap failed", severity=6)), entity(7)])
    ran = run(tmp_path, library, install(tmp_path / "bin", uuids=UUIDS, report=bad, exit_code=226))
    assert outcomes(ran) == all_of("passed", gpu1="failed"), ran.stdout
    row = ran.row(KEYS[1], PLACES[1])
    assert row["evidence"]["found"] == ["memory, GPU 4: Fail: Row remap failed"]
    assert "drain the node and reset the GPU" in row["reason"]
    assert ran.culprit(PLACES[1])["kind"] == "gpu"
    assert (ran.results["verdict"], ran.returncode) == ("REJECTED", 1)


def test_it_cannot_tell(tmp_path: Path, library: Path) -> None:
    """An error beside a pass, and a skip: an ERROR of that test at that GPU, with the reason; never green."""
    told = report_4(
        software=[entity(4), entity(7, "Pass", warning("a page was retired"))],
        memory=[entity(4, "Skip", warning("ECC is off")), entity(7)],
    )
    ran = run(tmp_path, library, install(tmp_path / "bin", uuids=UUIDS, report=told))
    assert outcomes(ran) == all_of("passed", gpu1="error") | {(KEYS[0], PLACES[0]): "error"}, ran.stdout
    assert "DCGM 4.2.3: software, GPU 7: Pass: a page was retired" in ran.row(KEYS[0], PLACES[0])["reason"]
    assert "DCGM 4.2.3: memory, GPU 4: Skip: ECC is off" in ran.row(KEYS[1], PLACES[1])["reason"]
    assert (ran.results["verdict"], ran.returncode) == ("INCOMPLETE", 1)


@pytest.mark.parametrize(
    ("dcgmi", "said"),
    [
        ({"before": NO_ENGINE}, "is DCGM's host engine, nv-hostengine, running"),
        pytest.param(
            {"before": '[ "$1" = discovery ] || sleep 1000'}, "no answer within 2 s, so it was ended", marks=pytest.mark.slow
        ),
    ],
    ids=["no host engine", "hangs"],
)
def test_it_fails_itself(tmp_path: Path, library: Path, dcgmi: dict[str, Any], said: str) -> None:
    """An ERROR of all of it, with the reason; the rest of the run goes on."""
    path = install(tmp_path / "bin", **{"uuids": UUIDS, "report": HEALTHY, **dcgmi})
    ran = run(tmp_path, library, path, within_s=2)
    assert outcomes(ran) == all_of("error"), ran.stdout
    assert all(said in ran.row(key, place)["reason"] for key in KEYS for place in PLACES)
    assert ran.outcomes(OTHER) == {"node0": "passed"}


def test_it_is_not_there(tmp_path: Path, library: Path) -> None:
    """Skipped by its rule, told in the report and in the JUnit file; the rest is ACCEPTED."""
    ran = run(tmp_path, library, tmp_path)
    assert outcomes(ran) == all_of("skipped"), ran.stdout
    told = "needs dcgmi, which is not installed on any host"
    assert ran.row(KEYS[0], PLACES[0])["reason"] == told
    case = ran.case("test_dcgm_diag[software-node0-gpu0]")
    assert (case.outcome, told in case.text) == ("skipped", True)
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)
    assert "no dcgmi" in ran.stdout


@pytest.mark.slow
def test_it_is_on_one_host_of_two(tmp_path: Path, library: Path) -> None:
    """Where others have it, a host without it is an ERROR that names them."""
    path = install(tmp_path / "bin", uuids=UUIDS, report=HEALTHY)
    without = {"PATH": os.environ["PATH"]}
    ran = run(tmp_path, library, path, torchrun=Torchrun(ranks=2, nodes=({}, without)))
    found = outcomes(ran)
    assert {place[:5]: outcome for (_, place), outcome in found.items() if place} == {"node0": "passed", "node1": "error"}, (
        ran.stdout
    )
    reason = ran.row(KEYS[0], "node1-gpu0")["reason"]
    assert "dcgmi is not installed here, and is on other hosts: " in reason
    assert "(node0" in reason.partition("other hosts: ")[2]
