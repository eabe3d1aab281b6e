"""``request.getfixturevalue``: a fixture of ours that a test asks for while it runs works, or is a clear error of that test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WORKS = ("cluster", "recipe", "budget", "possible", "readings", "entries", "compared_places")
ARGUMENTS = ("criterion", "place", "node")
IN_WORKERS = ("process_group", "rank", "world_size", "device")
LATE = f"""
import pytest
from pytest_gpucluster import measurement

NAMES = {(*WORKS, *ARGUMENTS, *IN_WORKERS, "over_run", "soak")}


@pytest.mark.parametrize("name", NAMES)
def test_late(request, name):
    request.getfixturevalue(name)


def test_without():
    pass
"""
MORE = """

@pytest.fixture
def own(request):
    return request.getfixturevalue("criterion")


def test_in_set_up(own):
    own.require(1)


def test_own_rate(request):
    request.getfixturevalue("criterion").require(0.5)


def test_known(request, place):
    assert request.getfixturevalue("place") is place


@measurement
def raises():
    raise RuntimeError("CUDA error 401")


@measurement
def answers():
    return 1


@pytest.fixture(scope="module")
def measured(cluster):
    return cluster.run(raises, per="cluster")


def test_unread(request):
    request.getfixturevalue("measured")


@pytest.fixture(scope="class")
def two(cluster):
    return cluster.run(answers, per="gpu"), cluster.run(raises, per="gpu")


class TestHalf:
    def test_half_read(self, request):
        assert set(request.getfixturevalue("two")[0].values()) == {1}


@pytest.fixture(scope="class")
def both(cluster):
    return cluster.run(raises, per="gpu"), cluster.run(raises, per="gpu")


class TestEnded:
    def test_ended(self, request, place):
        first, second = request.getfixturevalue("both")
        assert first[place] == second[place]

    def test_after_it(self):
        pass


class TestEndedOtherwise:
    def test_ended_otherwise(self, request, place):
        first, second = request.getfixturevalue("both")
        try:
            first[place]
        except Exception as error:
            raise type(error)("no rate") from error

    def test_after_otherwise(self):
        pass


class TestEndedAtOnePlace:
    def test_ended_at_one(self, request, cluster):
        first, second = request.getfixturevalue("both")
        first[cluster.places[0]]

    def test_after_one(self):
        pass


class TestSwallowed:
    def test_swallowed(self, request, place):
        first, second = request.getfixturevalue("both")
        with pytest.raises(Exception, match="401"):
            first[place]

    def test_after_swallowed(self):
        pass


class TestLooked:
    def test_looked(self, request):
        first, second = request.getfixturevalue("both")
        assert len(first.errors) == 2

    def test_after_looked(self):
        pass


class TestSkipped:
    def test_skipped(self, request):
        first, second = request.getfixturevalue("both")
        try:
            first.value
        except Exception:
            pytest.skip("no rate")

    def test_after_skipped(self):
        pass


class TestWhole:
    def test_whole_read(self, request):
        first, second = request.getfixturevalue("two")
        assert set(first.values()) == {1}
        assert len(second.errors) == 2
"""
LIMITS = """
schema: 1
extends: packaged
criteria:
  own_rate: {criterion: Own., min: 1, unit: GB/s, per: cluster, level: quick, why: own, source: own}
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A rehearsal on two ranks."""
    folder: Path = tmp_path_factory.mktemp("late")
    (folder / "test_late.py").write_text(LATE + MORE, encoding="utf-8")
    (folder / "own.yaml").write_text(LIMITS, encoding="utf-8")
    return run_pytest(folder, "--gpucluster-profile=rehearsal", "--gpucluster-thresholds=own.yaml", "test_late.py")


def test_what_is_the_same_for_every_test_works(ran: FinishedRun) -> None:
    """So does a fixture that the test has already."""
    names = [*(f"test_late[{name}]" for name in WORKS), "test_known[node0-cpu0]", "test_whole_read", "test_without"]
    assert {name: ran.case(name).outcome for name in names} == dict.fromkeys(names, "passed")


def test_what_is_fixed_at_collection_is_an_error(ran: FinishedRun) -> None:
    """Nothing was measured and bad, so it is no failure, and the text says what to write."""
    names = [f"test_late[{name}]" for name in (*ARGUMENTS, *IN_WORKERS, "over_run", "soak")]
    for name in (*names, "test_in_set_up", "test_own_rate"):
        assert ran.case(name).outcome == "error", name
        assert "KeyError" not in ran.case(name).text, name
    for name in ("test_in_set_up", "test_own_rate", *names[: len(ARGUMENTS)]):
        assert "as an argument of the test" in ran.case(name).text, name
    assert ran.results["verdict"] == "INCOMPLETE"


@pytest.mark.parametrize("name", ["test_unread", "test_half_read"])
def test_what_is_not_read_is_an_error(ran: FinishedRun, name: str) -> None:
    """Also where a shared fixture measured it that the test asked for late."""
    cases = [case for case in ran.cases if case.name == name]
    assert "error" in {case.outcome for case in cases}
    assert any("its test did not read" in case.text for case in cases)


@pytest.mark.parametrize("end", ["ended", "ended_otherwise"])
def test_who_ended_by_one_error_need_not_read_the_next(ran: FinishedRun, end: str) -> None:
    """Of a fixture with two measurements, no later test is blamed for the second."""
    cases = {case.name: case.outcome for case in ran.cases}
    assert {cases[f"test_{end}[node0-cpu{gpu}]"] for gpu in (0, 1)} == {"error"}
    assert cases["test_after_it" if end == "ended" else "test_after_otherwise"] == "passed"


@pytest.mark.parametrize("how", ["one", "swallowed", "looked", "skipped"])
def test_who_did_not_end_by_an_error_had_to_read_the_next(ran: FinishedRun, how: str) -> None:
    """It ended at another place, or caught the error, or only counted them."""
    assert "its test did not read" in ran.case(f"test_after_{how}").text


def test_where_no_run_was_begun(tmp_path: Path) -> None:
    """In another project, a test fails that asks for one late: nothing else is started or ended, and pytest goes on."""
    (tmp_path / "test_late.py").write_text(LATE, encoding="utf-8")
    ran = run_pytest(tmp_path, "test_late.py")
    assert ran.returncode == 1, ran.stdout
    assert "INTERNALERROR" not in ran.stdout
    outcomes = {case.name: case.outcome for case in ran.cases}
    assert outcomes.pop("test_without") == "passed"
    assert {name for name, outcome in outcomes.items() if outcome != "failure"} == {"test_late[entries]"}  # needs no run
    assert "--gpucluster" in ran.case("test_late[cluster]").text
    assert ran.results == {}
