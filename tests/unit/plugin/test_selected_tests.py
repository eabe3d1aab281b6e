"""What is asked of all selected tests, for each test and each call, is looked up: no work that grows with their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.plan import Rule
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.plugin.collection import leave_out_logging
from pytest_gpucluster.plugin.pairing import Pairing
from pytest_gpucluster.plugin.phases import Phases
from pytest_gpucluster.plugin.stash_keys import PAIR, RULE
from pytest_gpucluster.plugin.whole_run.run_readings import Readings, SelectedTests, _Taken, reader_of
from tests.support.operations import operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FEW, MANY = 8, 64


def counters() -> int:
    """In place of a reader; never called."""
    return 0


MARK = pytest.mark.over_run(counters, per="host").mark


def items_of(num_nodes: int) -> list[Any]:
    """At each GPU a test that judges over the run and one that measures; one at the cluster; some that a rule leaves out."""
    found: list[Any] = []
    for place in [*Inventory(num_nodes=num_nodes, gpus_per_node=8, device="cuda").places, None]:
        for criterion, mark in (("errors", MARK), ("tflops", None), ("rails", MARK)):
            pair = Pairing(criterion=criterion, place=place, judges=True)
            stash = {PAIR: pair, **({RULE: Rule(text="no rails", cause="no rails")} if criterion == "rails" else {})}
            names = ("place", "over_run") if mark else ("place", "gemm") if place else ("busbw",)
            found.append(SimpleNamespace(stash=stash, fixturenames=names, get_closest_marker=lambda _name, mark=mark: mark))
    return found


class Asked:
    """The two that ask: the hooks of a test, and the readings of the whole run."""

    def __init__(self, num_nodes: int) -> None:
        collection: Any = SimpleNamespace(tests=SelectedTests(items_of(num_nodes)))
        nothing: Any = None
        self.readings = Readings(nothing, lambda: collection.tests)
        results: Any = SimpleNamespace(errors={}, __iter__=lambda: iter(()))
        self.readings._last[reader_of(MARK)] = _Taken(results, 0.0)
        self.readings._written.add(reader_of(MARK))
        self.phases = Phases(nothing, nothing, collection, nothing, self.readings)
        self.phases._fixtures.append(SimpleNamespace(argname="busbw"))


ASKED: dict[str, Callable[[Asked], object]] = {
    "what was read since the test before": lambda asked: asked.readings.new_lasts(),
    "what is read now and then": lambda asked: asked.readings.while_it_runs(),
    "who judges a reader": lambda asked: asked.readings.judges,
    "the places of a call": lambda asked: asked.phases.wanted_places(),
}


@pytest.mark.parametrize("what", ASKED)
def test_work_after_each_test(what: str) -> None:
    """Eight times the nodes, the same work: it was 111 of 213 s at 16 x 8, and four times that at 32 x 8."""
    few, many = Asked(FEW), Asked(MANY)
    for asked in (few, many):
        ASKED[what](asked)
    assert operations(lambda: ASKED[what](many)) <= 1.2 * operations(lambda: ASKED[what](few))


def test_what_the_tables_say() -> None:
    """The same as a walk over all tests."""
    items = items_of(2)
    tests = SelectedTests(items)
    assert len(tests.that_apply) == 2 * len(items) // 3
    assert tests.judges == {f"{__name__}.counters host": {"errors"}}
    assert [item.stash[PAIR].criterion for item, _ in tests.over_run] == ["errors"] * (len(items) // 3)
    assert tests.places_that_use("gemm") == {item.stash[PAIR].place for item in items} - {None}
    assert tests.places_that_use("busbw") == {None}
    assert tests.places_that_use("nobody's") == frozenset()
    assert SelectedTests().judges == {}


def test_a_mark_without_a_reader_is_none() -> None:
    """Also one with two, and one with what is no function."""
    marks = [pytest.mark.over_run.mark, pytest.mark.over_run(counters, counters).mark, pytest.mark.over_run(1).mark]
    stash = {PAIR: Pairing(criterion="x", place=None, judges=True)}
    items: list[Any] = [SimpleNamespace(stash=stash, get_closest_marker=lambda _, mark=mark: mark) for mark in marks]
    assert SelectedTests(items).over_run == ()


@pytest.mark.parametrize(
    ("folder", "fixtures", "options", "is_left_out"),
    [
        ("tests_acceptance", ("place",), {}, True),
        ("tests_acceptance", ("place", "caplog"), {}, False),
        ("own", ("place",), {}, False),
        ("tests_acceptance", ("place",), {"log_level": "INFO"}, False),
        ("tests_acceptance", ("place",), {"log_cli": True}, False),
        ("tests_acceptance", ("place",), {"log_file": "run.log"}, False),
    ],
)
def test_who_catches_log_records(
    tmp_path: Path, folder: str, fixtures: tuple[str, ...], options: dict[str, Any], *, is_left_out: bool
) -> None:
    """Nobody for the packaged suite, which logs nothing; as before for any other test, and where somebody asks for them."""
    left: list[object] = []
    plugins = SimpleNamespace(get_plugin=lambda name: name, unregister=left.append)
    config: Any = SimpleNamespace(option=SimpleNamespace(**options), getini=options.get, pluginmanager=plugins)
    items: Any = [SimpleNamespace(path=tmp_path / folder / "test_a.py", fixturenames=fixtures)]
    leave_out_logging(config, items)
    assert left == (["logging-plugin"] if is_left_out else [])
