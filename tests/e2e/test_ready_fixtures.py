"""What stands ready is handed to a packaged test without a set-up; where somebody sees set-ups, pytest makes them all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.fleets import simulate
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = pytest.mark.e2e

FLEET, GPUS = "2x4", 8
CHOSEN = ("-k", "ecc_enabled or power_limit")
COUNTS = """
import json, pathlib
from collections import Counter
from _pytest.fixtures import FixtureDef
from pluggy import HookCaller

made, hooks = Counter(), Counter()
execute, call = FixtureDef.execute, HookCaller.__call__

def counted(self, request):
    made[self.argname] += self.cached_result is None
    return execute(self, request)

def called(self, **arguments):
    hooks[self.name] += 1
    return call(self, **arguments)

FixtureDef.execute, HookCaller.__call__ = counted, called

def pytest_unconfigure():
    pathlib.Path("made.json").write_text(json.dumps([made, hooks]))
"""
WATCHES = """
def pytest_fixture_post_finalizer(fixturedef):
    pass
"""


def counted(folder: Path, *arguments: str, bad: tuple[str, ...] = ()) -> tuple[FinishedRun, dict[str, int], dict[str, int]]:
    """Two criteria on eight GPUs: the run, which fixtures were made how often, and which hooks were called how often."""
    (folder / "counts.py").write_text(COUNTS, encoding="utf-8")
    (folder / "watches.py").write_text(WATCHES, encoding="utf-8")
    run = simulate(folder, FLEET, "-p", "counts", *CHOSEN, *arguments, bad=bad)
    made, hooks = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    return run, made, hooks


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, dict[str, int], dict[str, int]]:
    """The run of which a node is absent."""
    return counted(tmp_path_factory.mktemp("ready"), bad=("node1:absent",))


def test_fixtures_are_made_for_the_first_test(ready: tuple[FinishedRun, dict[str, int], dict[str, int]]) -> None:
    """Of all that share one measurement. It was one place and one criterion for each test."""
    _, made, hooks = ready
    assert made["gpu_states"] == 1
    assert made["place"] == made["criterion"] == 1
    assert hooks["pytest_runtest_setup"] >= 2 * GPUS
    assert hooks["pytest_fixture_setup"] <= sum(made.values())


def test_outcomes_are_the_same(ready: tuple[FinishedRun, dict[str, int], dict[str, int]]) -> None:
    """A GPU that answers passes; one of an absent node is missing, with the words of its fixture."""
    run, _, _ = ready
    for criterion in ("ecc_enabled", "power_limit"):
        outcomes = run.outcomes(criterion)
        assert [outcomes[f"node0-gpu{number}"] for number in range(GPUS // 2)] == ["passed"] * (GPUS // 2)
        assert [outcomes[f"node1-gpu{number}"] for number in range(GPUS // 2)] == ["missing"] * (GPUS // 2)
    first, later = (run.row(criterion, "node1-gpu3")["reason"] for criterion in ("ecc_enabled", "power_limit"))
    assert first == later


@pytest.mark.parametrize("arguments", [("-p", "watches"), ("--setup-show",)])
def test_who_watches_set_ups_sees_all(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A plugin with a hook of fixtures, such as that of Allure, and an option of pytest that shows them."""
    _, made, hooks = counted(tmp_path, *arguments)
    assert made["place"] == made["criterion"] == 2 * GPUS
    assert hooks["pytest_fixture_post_finalizer"] >= 4 * GPUS


OWN = """
import pytest

@pytest.fixture(scope="session")
def rate(cluster):
    return 2.0

@pytest.fixture(params=[1.0, 2.0], scope="session")
def factor(request):
    return request.param

@pytest.fixture(scope="session")
def cluster(cluster):
    return cluster

@pytest.fixture
def seen(place):
    print("placed at", place)
    return place

@pytest.mark.parametrize("wanted", [1, 2])
def test_seen(rate, seen, place, wanted):
    assert (rate, seen, wanted in (1, 2)) == (2.0, place, True)

def test_scaled(rate, factor, cluster):
    assert factor in (1.0, 2.0)

@pytest.fixture(scope="module")
def of_file(cluster):
    nodes = []
    yield nodes
    assert len(nodes) == 2

def test_of_file(of_file, node):
    of_file.append(node)
"""


def test_what_a_user_defines_is_made(tmp_path: Path) -> None:
    """Also in a folder with the name of the packaged suite: another ``cluster``, parameters of a session, what a file keeps."""
    folder = tmp_path / "tests_acceptance"
    folder.mkdir()
    (folder / "test_site.py").write_text(OWN, encoding="utf-8")
    fleet = ("-p", "pytest_gpucluster.plugin.fleet", f"--fleet={FLEET}", "--gpucluster-profile=h200-sxm")
    run = run_pytest(tmp_path, *fleet, "-rP", "tests_acceptance")
    assert {case.outcome for case in run.cases if case.name.startswith("test_")} == {"passed"}, run.stdout
    assert run.stdout.count("placed at node") == 2 * GPUS
