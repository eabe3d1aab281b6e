"""A measurement that failed and that its test did not look at is an error of that test, not a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import Torchrun, run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

OWN = '''
"""Own tests: what a rank raised, and whether they look."""

import pytest
from pytest_gpucluster import MeasurementError, measurement
import torch.distributed as dist


@measurement
def raises(*, rank=None):
    """Raise on a rank, by default on each."""
    if rank is None or rank == dist.get_rank():
        raise RuntimeError("CUDA error 401")
    return 1


@pytest.fixture
def measured(cluster):
    return cluster.run(raises, per="cluster")


@pytest.fixture(scope="module")
def shared(cluster):
    return cluster.run(raises, per="cluster")


@pytest.fixture(scope="module")
def two(cluster):
    return cluster.run(fine, per="gpu"), cluster.run(raises_by_place, per="gpu")


def test_takes_one_of_two(two):
    assert set(two[0].values()) == {1}


def test_reads_one_of_two(two):
    assert set(two[0].values()) == {1}


@pytest.fixture(scope="module")
def shares(cluster):
    return cluster.run(fine, per="gpu"), cluster.run(raises_by_place, per="gpu")


def test_takes_the_first(shares):
    assert set(shares[0].values()) == {1}


def test_takes_the_second(shares):
    assert len(shares[1].errors) == 1


def test_reads_nothing(cluster):
    cluster.run(raises, per="cluster")


def test_reads_nothing_of_one_rank(cluster):
    cluster.run(raises, per="cluster", rank=1)


def test_reads_nothing_of_a_host(cluster):
    cluster.run(raises_alone, per="host")


def test_reads_a_healthy_place(cluster):
    found = cluster.run(raises_by_place, per="gpu")
    assert found[cluster.places[0]] == 1


def test_reads_no_fixture(measured):
    pass


def test_reads_no_shared_fixture(shared):
    pass


def test_reads_the_number_only(cluster):
    assert len(cluster.run(raises, per="cluster")) == 2


def test_reads_errors(cluster):
    assert len(cluster.run(raises, per="cluster").errors) == 2


def test_reads_what_is_raised(cluster):
    with pytest.raises(MeasurementError):
        cluster.run(raises, per="cluster").value


def test_reads_places(cluster):
    found = cluster.run(raises_by_place, per="gpu")
    for place in cluster.places:
        try:
            found[place]
        except MeasurementError:
            pass


@pytest.fixture
def at_end(cluster, request):
    yield
    found = cluster.run(raises_by_place, per="gpu")
    assert "all" not in request.node.name or len(found.errors) == 1


def test_reads_no_teardown(at_end):
    pass


def test_needs_all_of_the_teardown(at_end):
    pass


def test_reads_all(cluster):
    assert set(cluster.run(fine, per="gpu").each(int).values()) == {1}


def test_needs_no_value(cluster):
    cluster.run(fine, per="gpu")


@measurement
def fine():
    return 1


@measurement
def raises_alone():
    raise RuntimeError("CUDA error 802")


@measurement
def raises_by_place():
    import os

    if os.environ["RANK"] == "1":
        raise RuntimeError("CUDA error 802")
    return 1
'''
OTHER = '''
"""The same name for another fixture; and one fixture that measures for each of its parameters."""

import pytest
from pytest_gpucluster import measurement


@measurement
def answers(*, fails):
    if fails:
        raise RuntimeError("CUDA error 401")
    return 1


@pytest.fixture(scope="module")
def shared(cluster):
    return cluster.run(answers, per="host", fails=FAILS)


def test_FILE(shared):
    if not FAILS:
        assert set(shared.values()) == {1}


@pytest.fixture(scope="module", params=[0, 1])
def each(cluster, request):
    return cluster.run(answers, per="gpu", fails=request.param)


def test_each_FILE(each, request):
    if "[0]" in request.node.name:
        assert set(each.values()) == {1}
'''
TEARDOWN = '''
"""The teardown of a fixture of several tests measures all places, and rank 0 raises; the last test is of rank 1."""

import os
import pytest
from pytest_gpucluster import measurement


@measurement
def raises_at_0():
    if os.environ["RANK"] == "0":
        raise RuntimeError("CUDA error 401")
    return 1


@pytest.fixture(scope="SCOPE")
def late(cluster):
    yield
    found = cluster.run(raises_at_0, per="gpu")
    if READS:
        assert (len(found), len(found.errors)) == (2, 1)


class TestOfAPlace:
    def test_own(self, late, place):
        pass
'''
ANEW = '''
"""Fixtures of several tests that measure twice; rank 1 raises the first time, and every test reads rank 0."""

import os
import pytest
from pytest_gpucluster import measurement


@measurement
def raises_at_1(*, fails):
    if fails and os.environ["RANK"] == "1":
        raise RuntimeError("CUDA error 401")
    return 1


TIMES = {"a class": 0}


@pytest.fixture(scope="class")
def of_class(cluster):
    TIMES["a class"] += 1
    return cluster.run(raises_at_1, per="gpu", fails=TIMES["a class"] == 1)


class TestOne:
    def test_first(self, of_class, cluster):
        assert of_class[cluster.places[0]] == 1


class TestTwo:
    def test_again(self, of_class, cluster):
        assert of_class[cluster.places[0]] == 1


@pytest.fixture(scope="module", params=[0, 1])
def step(request):
    return request.param


@pytest.fixture(scope="module")
def depends(cluster, step):
    return cluster.run(raises_at_1, per="gpu", fails=step == 0)


def test_depends(depends, cluster):
    assert depends[cluster.places[0]] == 1
'''
LOOKS = (
    "takes_one_of_two",
    "takes_the_first",
    "takes_the_second",
    "reads_errors",
    "reads_what_is_raised",
    "reads_places",
    "reads_all",
    "needs_all_of_the_teardown",
    "needs_no_value",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two ranks."""
    folder: Path = tmp_path_factory.mktemp("unread")
    (folder / "test_own.py").write_text(OWN, encoding="utf-8")
    return run_pytest(folder, "test_own.py")


def test_who_looks_passes(ran: FinishedRun) -> None:
    """By whatever way, and what could be measured need not be read."""
    assert {name: ran.case(f"test_{name}").outcome for name in LOOKS} == dict.fromkeys(LOOKS, "passed")


def test_who_does_not_look_is_an_error(ran: FinishedRun) -> None:
    """The error of the measurement, with its rank."""
    others = [case for case in ran.cases if case.name.startswith("test_reads") and case.name.removeprefix("test_") not in LOOKS]
    assert len(others) == 9
    for case in others:
        assert case.outcome == "error", case.name
        assert "CUDA error" in case.text, case.name
        assert "its test did not read" in case.text, case.name
    assert ran.results["verdict"] == "INCOMPLETE"


@pytest.mark.parametrize("reads", [True, False])
def test_what_the_end_of_a_shared_fixture_measures(tmp_path: Path, *, reads: bool) -> None:
    """It measures every place, and an error there that nobody read is one of the last test, of whatever place that is."""
    scopes = ("class", "module", "session")  # each in a file, and the session's end comes last
    for scope in scopes:
        text = TEARDOWN.replace("SCOPE", scope).replace("READS", str(reads)).replace("test_own", f"test_{scope}")
        (tmp_path / f"test_of_{scope}.py").write_text(text, encoding="utf-8")
    ran = run_pytest(tmp_path, *(f"test_of_{scope}.py" for scope in scopes))
    outcomes = {case.name: case.outcome for case in ran.cases if case.name.startswith("test_")}
    last = "passed" if reads else "error"
    assert outcomes == {
        f"test_{scope}[node0-cpu{index}]": (last if index else "passed") for scope in scopes for index in (0, 1)
    }, ran.stdout
    assert all("its test did not read" in case.text for case in ran.cases if case.outcome == "error" and "test_" in case.name)


@pytest.mark.parametrize("raises", [True, False])
def test_an_absent_place_is_told_by_its_own_outcome(tmp_path: Path, *, raises: bool) -> None:
    """The end of a shared fixture cannot measure it: that is no error of the last test. What a rank there raised is one."""
    text = TEARDOWN.replace("SCOPE", "module").replace("READS", "False")
    text = text.replace('os.environ["RANK"] == "0"', 'os.environ["RANK"] == "0"' if raises else "False")
    (tmp_path / "test_own.py").write_text(f"{text}\n\ndef test_last(late):\n    pass\n", encoding="utf-8")
    ran = run_pytest(
        tmp_path, "test_own.py", "--gpucluster-expect", "nodes=1,gpus_per_node=3", torchrun=Torchrun(ranks=2), timeout_s=300
    )
    assert set(ran.outcomes("own").values()) == {"passed", "missing"}, ran.stdout
    assert ran.case("test_last").outcome == ("error" if raises else "passed"), ran.stdout


def test_each_time_a_shared_fixture_is_set_up(tmp_path: Path) -> None:
    """An error of the first time is told then: of the last test of a class; or it forbids an acceptance.

    The second is where what the fixture uses has another parameter: it ends when the next test is set up.
    """
    (tmp_path / "test_own.py").write_text(ANEW, encoding="utf-8")
    ran = run_pytest(tmp_path, "test_own.py")
    outcomes = {case.name: case.outcome for case in ran.cases if case.name.startswith("test_")}
    assert outcomes == {
        "test_first": "error",
        "test_again": "passed",
        "test_depends[0]": "passed",
        "test_depends[1]": "passed",
    }, ran.stdout
    told = "fixture depends: a measurement failed, and its test did not read what it gave: raises_at_1 was not measured"
    assert [one for one in ran.results["objections"] if one.startswith(told)] != []
    assert all("its test did not read" in case.text for case in ran.cases if case.outcome == "error" and "test_" in case.name)


def test_each_shared_fixture_by_itself(tmp_path: Path) -> None:
    """Neither another one of that name, nor the same with another parameter, counts as this one read."""
    for name, fails in (("a", 0), ("b", 1)):
        text = OTHER.replace("FILE", name).replace("FAILS", str(fails))
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    ran = run_pytest(tmp_path, "test_a.py", "test_b.py")
    outcomes = {case.name: case.outcome for case in ran.cases if case.name.startswith("test_")}
    told = {"test_a": "passed", "test_b": "error"}
    assert outcomes == {
        **told,
        **{f"test_each_{name}[{fails}]": ("passed", "error")[fails] for name in "ab" for fails in (0, 1)},
    }
