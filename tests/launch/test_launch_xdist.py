"""``pytest -n``: the same testcases for each GPU, each GPU measured once, and what needs all GPUs left out with the reason."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import Starter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launching import Launch

pytestmark = pytest.mark.e2e

PLACES = ("node0-cpu0", "node0-cpu1")
MEASURE = """
import os
import pathlib
import time

import pytest

def timed(what, deadly=None):
    began_s, rank = time.monotonic(), int(os.environ["RANK"])
    if rank == deadly:
        os.kill(os.getpid(), 9)
    time.sleep(0.2)
    mark = pathlib.Path(f"{os.environ['HERE']}-{what}-{rank}-{os.getpid()}-{time.monotonic_ns()}")
    mark.write_text(f"{began_s} {time.monotonic()}")
    return rank + 1

@pytest.fixture(scope="session")
def rates(cluster):
    return cluster.run(timed, per="gpu", deadline_s=30, what="rates")
"""
HOUSE = f"""{MEASURE}
@pytest.fixture(scope="session")
def others(cluster):
    return cluster.run(timed, per="gpu", deadline_s=30, what="others")

def test_rate(rates, place, criterion):
    criterion.require(rates[place])

def test_other(others, place, criterion):
    criterion.require(others[place])

def test_worst(rates, criterion):
    criterion.require(rates.slowest(float))

def test_of_node(rates, node, criterion):
    criterion.require(rates[node])

@pytest.mark.distributed
def test_body(rank):
    assert rank < 2
"""
FAULTY = f"""{MEASURE}
@pytest.fixture(scope="session")
def deadly(cluster):
    return cluster.run(timed, per="gpu", deadline_s=30, what="deadly", deadly=1)

def test_low(rates, place, criterion):
    criterion.require(rates[place])

def test_dies(deadly, place, criterion):
    criterion.require(deadly[place])

def test_killed(rates, place, criterion):
    if place.gpu == 0:
        pathlib.Path("here.tmp").write_text(str(os.getpid()))
        pathlib.Path("here.tmp").rename("here")
        time.sleep(300)
    criterion.require(rates[place])

def test_rest(rates, place, criterion):
    criterion.require(rates[place])
"""
ABOUT = {"criterion": "It is judged.", "unit": "count", "level": "quick", "why": "A test.", "source": "none"}


def limits(folder: Path, **criteria: dict[str, object]) -> str:
    """A thresholds file with these criteria and no others, for rehearsals."""
    document = {
        "schema": 1,
        "cluster": {},
        "profiles": {"rehearsal": {"gpu": None, "rehearsal": True, "accept_at": "quick", "fabric": "none"}},
        "criteria": {name: {**ABOUT, "per": "gpu", "min": 1, **keys} for name, keys in criteria.items()},
    }
    path = folder / f"{'-'.join(criteria)}.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML
    return f"--gpucluster-thresholds={path}"


def outcomes(launch: Launch, folder: str = "gpucluster-results") -> dict[tuple[str, str | None], str]:
    """Outcome by criterion and place id."""
    rows = launch.results(folder)["criteria"]
    return {(row["criterion"], (row["place"] or {"id": None})["id"]): row["outcome"] for row in rows}


def measured(folder: Path, run: str, what: str) -> dict[int, list[tuple[float, float]]]:
    """When each rank measured in a run: (begin, end) in s, in order."""
    found: dict[int, list[tuple[float, float]]] = {}
    for file in folder.glob(f"{run}-{what}-*"):
        began_s, ended_s = map(float, file.read_text(encoding="utf-8").split())
        found.setdefault(int(file.name.split("-")[2]), []).append((began_s, ended_s))
    return {rank: sorted(found[rank]) for rank in sorted(found)}


def settled_once(launch: Launch, folder: str = "gpucluster-results") -> bool:
    """Whether the journal has one outcome for each criterion and place."""
    records = [event["record"] for event in launch.journal(folder) if event["event"] == "outcome"]
    counts = Counter((record["criterion"], record["place"]) for record in records)
    return set(counts.values()) == {1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launch]]:
    """One suite collected without ``-n``, run with it, and run with it and the gate."""
    starter = Starter(tmp_path_factory.mktemp("xdist"))
    starter.write(test_house=HOUSE)
    known = limits(starter.folder, rate={}, other={}, worst={"per": "cluster"}, of_node={"per": "node"})
    options = {"plain": ("--collect-only", "-q"), "two": ("-n", "2"), "auto": ("-n", "auto", "--gpucluster-gate")}
    launches = {
        name: starter.pytest(
            known, f"--gpucluster-results={name}", f"--junitxml={name}.xml", *more, HERE=name, PYTEST_XDIST_AUTO_NUM_WORKERS="5"
        )
        for name, more in options.items()
    }
    for name, launch in launches.items():
        assert launch.end() == (1 if name == "auto" else 0), launch.output
    yield launches
    assert not starter.end_all()


@pytest.mark.parametrize("run", ["two", "auto"])
def test_same_testcases(runs: dict[str, Launch], run: str) -> None:
    """Names as without ``-n``, the verdict last; each place's value at its place; -n auto is one process for each GPU."""
    names = [line.partition("::")[2] for line in runs["plain"].output.splitlines() if "::" in line]
    cases = runs[run].junit(f"{run}.xml")
    assert len(names) == 7
    assert sorted(cases) == sorted([*names, "gpucluster.verdict"])
    assert list(cases)[-1] == "gpucluster.verdict"
    per_gpu = {name for name in names if name.endswith(("-cpu0]", "-cpu1]"))}
    assert {cases[name] for name in per_gpu} == {"passed"}
    rows = [row for row in runs[run].results(run)["criteria"] if row["outcome"] == "passed"]
    assert len(rows) == len(per_gpu) == 4
    assert all(row["value"] == row["place"]["gpu"] + 1 == row["place"]["rank"] + 1 for row in rows)
    assert "2/2 workers" in runs[run].output


@pytest.mark.parametrize("run", ["two", "auto"])
def test_each_place_is_measured_once(runs: dict[str, Launch], run: str) -> None:
    """Every fixture once at every place, and at one place never two at a time."""
    folder = runs[run].cwd
    for what in ("rates", "others"):
        assert [len(times) for times in measured(folder, run, what).values()] == [1, 1], what
    for rank in (0, 1):
        (_, first_end_s), (second_begin_s, _) = sorted(measured(folder, run, "*")[rank])
        assert first_end_s <= second_begin_s
    assert settled_once(runs[run], run)


def test_what_needs_all_gpus_says_why_it_is_skipped(runs: dict[str, Launch]) -> None:
    """Not selected, skipped with the reason in JUnit, and the verdict is INCOMPLETE: exit 0, with the gate 1."""
    found, cases = outcomes(runs["two"], "two"), runs["two"].junit("two.xml")
    for criterion, place, case in (("worst", None, ""), ("of_node", "node0", "[node0]"), ("body", None, "")):
        assert found[criterion, place] == "not_selected"
        assert cases[f"test_{criterion}{case}"] == "skipped"
    text = (runs["two"].cwd / "two.xml").read_text(encoding="utf-8")
    assert text.count('message="needs all GPUs at once; run without -n"') == 3
    assert {runs[name].results(name)["verdict"] for name in ("two", "auto")} == {"INCOMPLETE"}
    assert "pytest-xdist (-n)" in runs["two"].results("two")["verdict_line"]
    assert cases["gpucluster.verdict"] == "skipped"  # own files alone, and nothing of them is bad


def kill_while_testing(starter: Starter, *, the_controller: bool) -> Launch:
    """Kill the process that runs a test of the first place, or the one that has the agents; wait for the end."""
    starter.write(test_faulty=FAULTY)
    known = limits(starter.folder, low={"min": 2}, dies={}, killed={}, rest={})
    launch = starter.pytest(known, "-n", "2", "--junitxml=junit.xml", HERE="faulty")
    launch.until((starter.folder / "here").exists, within_s=60, what="test to kill")
    os.kill(launch.pid if the_controller else int((starter.folder / "here").read_text(encoding="utf-8")), signal.SIGKILL)
    launch.end()
    launch.gone()
    return launch


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """A value too low at the first place, an agent's worker that dies at the second, and a test whose process is killed."""
    starter = Starter(tmp_path_factory.mktemp("faulty"))
    yield kill_while_testing(starter, the_controller=False)
    assert not starter.end_all()


def test_failure_and_error_at_their_places(faulty: Launch) -> None:
    """REJECTED where the value was measured; not measured is an ERROR where it died; the other place passes both."""
    found = {key: outcome for key, outcome in outcomes(faulty).items() if key[0] in ("low", "dies")}
    first, second = PLACES
    assert found == {("low", first): "failed", ("low", second): "passed", ("dies", first): "passed", ("dies", second): "error"}
    results, cases = faulty.results(), faulty.junit()
    assert (faulty.end(within_s=1), results["verdict"], cases["gpucluster.verdict"]) == (1, "REJECTED", "failure")
    assert [cases[f"test_low[{place}]"] for place in PLACES] == ["failure", "passed"]
    assert [cases[f"test_dies[{place}]"] for place in PLACES] == ["passed", "error"]
    culprits = {culprit["place"]["id"]: culprit["criteria"] for culprit in results["culprits"]}
    assert culprits == {first: ["killed", "low"], second: ["dies"]}
    assert any("rank 1 (node0-cpu1, " in (row["reason"] or "") for row in results["criteria"])


def test_killed_process_of_xdist(faulty: Launch) -> None:
    """Its test is an ERROR at its place, is not run again, and costs no measurement; the rest of the place goes on."""
    found = outcomes(faulty)
    assert [found["killed", place] for place in PLACES] == ["error", "passed"]
    assert [found["rest", place] for place in PLACES] == ["passed", "passed"]
    assert [len(times) for times in measured(faulty.cwd, "faulty", "rates").values()] == [1, 1]
    assert settled_once(faulty)
    (case,) = (one for one in faulty.cases() if one.name == "test_killed[node0-cpu0]")
    hardware = {"place": "node0-cpu0", "hostname": socket.gethostname(), "rank": "0"}
    assert case.properties == {"criterion": "killed", **hardware, "failure_type": "error"}
    assert case.outcome == "error"
    assert "not judged: pytest-xdist's worker" in case.body


def test_killed_controller_of_xdist(starter: Starter) -> None:
    """Nothing goes on without it, not even a test that sleeps; the reports are there, and nothing in them is green."""
    launch = kill_while_testing(starter, the_controller=True)
    assert launch.results()["verdict"] in ("INCOMPLETE", "REJECTED")
    assert outcomes(launch)["killed", "node0-cpu0"] == "missing"
    assert launch.junit()["gpucluster.verdict"] in ("error", "failure")


def test_wrong_starts(starter: Starter) -> None:
    """Said once, whoever notices: a test without an entry, other processes than ours, a debugger, fixtures unasked for."""
    starter.write(test_house="def test_unknown(place, criterion): pass\n")
    (starter.folder / "unasked").mkdir()
    (starter.folder / "unasked" / "test_it.py").write_text("def test_it(cluster): pass\n", encoding="utf-8")
    known = limits(starter.folder, rate={})
    cases = {
        "judges the criterion 'unknown'": starter.pytest(known, "-n", "2", "test_house.py"),
        "pytest-xdist's --tx cannot be used here": starter.pytest(known, "--tx", "2*popen", "-d"),
        "--gpucluster-inline runs in one process": starter.pytest("-n", "auto", "--gpucluster-inline"),
        "need --gpucluster or the ini option": starter.pytest("-n", "2", "unasked"),
    }
    for said, launch in cases.items():
        assert launch.end() == (1 if "ini option" in said else 4), launch.output
        launch.gone()
        once = 2 if "ini option" in said else 1  # an error in set-up stands in the summary too, where pytest sees a CI
        assert 1 <= launch.output.count(said) <= once, (said, launch.output)
        assert "Traceback" not in launch.output
