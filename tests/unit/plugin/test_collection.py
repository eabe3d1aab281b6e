"""What collection does with the selected tests."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

from pytest_gpucluster.commands.arguments import nodeid_in_suite
from pytest_gpucluster.config.process import SELDOM, collect_seldom
from pytest_gpucluster.judging.forecast import Suite, forecast
from pytest_gpucluster.plugin.collection import Collection, deselect, only_reads, refuse_unknown_mark, share_locations
from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pathlib import Path


class Item:
    """A test that counts how often any of them is compared with another."""

    compared = 0
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Only the same is equal."""
        Item.compared += 1
        return self is other


def test_tests_are_left_out_at_once() -> None:
    """None of the left ones is compared with all that are left out."""
    items: list[Any] = [Item() for _ in range(300)]
    kept, told = [id(item) for number, item in enumerate(items) if number % 3], items[::3]
    hook = Mock()
    deselect(Mock(hook=hook), items, told)
    assert [id(item) for item in items] == kept
    hook.pytest_deselected.assert_called_once_with(items=told)
    assert Item.compared <= 300


@pytest.mark.parametrize(
    ("mark", "is_distributed", "expected"),
    [(None, False, False), ({}, False, True), ({"only": False}, False, False), ({}, True, False)],
)
def test_an_audit_takes_what_is_marked(mark: Any, is_distributed: bool, expected: bool) -> None:  # noqa: FBT001 -- a case
    """The nearest mark decides; the body of a distributed test runs in a process group, so it never belongs to an audit."""
    reads = None if mark is None else SimpleNamespace(kwargs=mark)
    marks = {"reads": reads, "distributed": object() if is_distributed else None}
    item: Any = SimpleNamespace(get_closest_marker=marks.__getitem__)
    assert only_reads(item) is expected


def marked(*names: str) -> Any:
    """A test with these marks."""
    return SimpleNamespace(iter_markers=lambda: [SimpleNamespace(name=name) for name in names])


def pytest_of(expression: str, **more: object) -> Any:
    """A pytest that was given ``-m``, and knows a mark that no test has."""
    lines = ["slow: takes long", "over_run(function, per='gpu'): at the end"]
    return SimpleNamespace(option=SimpleNamespace(markexpr=expression), getini=lambda _name: lines, **more)


TESTS = [marked("health", "parametrize"), marked("compute", "compares")]


@pytest.mark.parametrize(
    ("expression", "unknown", "near"),
    [
        ("gpu", "gpu", ""),
        ("helth", "helth", " Did you mean 'health'?"),
        ("gpu and not network", "gpu, network", ""),
        ("health and gpu", "gpu", ""),
        ("parametrize and gpu", "parametrize, gpu", ""),
        ("gpu(kind='health')", "gpu", ""),
    ],
)
def test_a_mark_that_no_test_has(expression: str, unknown: str, near: str) -> None:
    """Where it selects nothing, the marks that exist are named, and the one that was meant."""
    with pytest.raises(pytest.UsageError) as refused:
        refuse_unknown_mark(pytest_of(expression), TESTS)
    said = f"there is no mark {unknown}; marks of these tests: compares, compute, health.{near}"
    assert str(refused.value) == f"-m {expression!r} selects no test: {said}"


@pytest.mark.parametrize("expression", ["", "slow", "health and compute", "over_run", "over_run(per='cluster')", "not health"])
def test_marks_that_exist_may_select_nothing(expression: str) -> None:
    """So does a registered one; that is pytest's exit code 5."""
    refuse_unknown_mark(pytest_of(expression), TESTS)


def test_where_a_mark_cannot_be_refused() -> None:
    """A worker of pytest-xdist would crash; without tests there is nothing to name."""
    refuse_unknown_mark(pytest_of("gpu", workerinput={}), TESTS)
    refuse_unknown_mark(pytest_of("gpu"), [])
    with pytest.raises(pytest.UsageError, match="these tests have no marks"):
        refuse_unknown_mark(pytest_of("gpu"), [marked()])


WRITE_FIXTURES = """
import json
from pathlib import Path
from pytest_gpucluster.plugin.collection import fixtures_of
from pytest_gpucluster.thresholds.lint import load

def pytest_collection_finish(session):
    found = fixtures_of(session.items, load(None).content.criteria)
    Path("nodeids.json").write_text(json.dumps([item.nodeid for item in session.items]))
    Path("fixtures.json").write_text(json.dumps({key: sorted(names) for key, names in found.items()}))
"""


@pytest.mark.long
def test_every_packaged_entry_has_an_estimate(tmp_path: Path) -> None:
    """Else the plan's time would be a part of the truth: its own, that of its fixtures, or that of the entry that it names.

    A run that never began has the same names of tests: it knows them without pytest.
    """
    (tmp_path / "write_fixtures.py").write_text(WRITE_FIXTURES, encoding="utf-8")
    options = ("--collect-only", "-q", "-p", "write_fixtures", "--gpucluster-level=soak")
    ran = run_pytest(tmp_path, ACCEPTANCE, *options, variables={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stdout
    found = json.loads((tmp_path / "fixtures.json").read_text(encoding="utf-8"))
    places = (None, "node0", "node0-cpu0", "node0-cpu1")
    named = {nodeid_in_suite(key, place, root=tmp_path) for key in packaged().content.criteria for place in places}
    collected = json.loads((tmp_path / "nodeids.json").read_text(encoding="utf-8"))
    assert [nodeid for nodeid in collected if nodeid.rpartition("/")[2] not in named | {"gpucluster.verdict"}] == []
    suite = Suite(subjects={}, fixtures={key: frozenset(names) for key, names in found.items()})
    criteria = packaged().criteria(packaged().profiles["h200-sxm"])

    def takes_s(key: str) -> float | None:
        return forecast({key: 1}, criteria, suite, gpus_per_node=8, soak_s=None).steps[0].takes_s

    assert found.keys() == criteria.keys()
    assert [key for key in criteria if takes_s(key) is None] == []
    gpu, node = (criteria[f"training_throughput_{name}"].takes_s or 0.0 for name in ("gpu", "ddp_node"))
    assert takes_s("training_scaling_node") == gpu + node
    assert takes_s("straggler[bf16_at_clock]") == criteria["bf16_sustained"].takes_s
    assert takes_s("ecc_enabled") == criteria["gpu_count"].takes_s


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_looked_for_as_before_once_all_is_collected(*, was_on: bool) -> None:
    """Not while tests are collected; afterwards as the host program had it."""
    switch = {True: gc.enable, False: gc.disable}
    before = gc.isenabled()
    try:
        switch[was_on]()
        collecting = Collection.pytest_collection(object.__new__(Collection), cast("pytest.Session", None))
        next(collecting)
        assert not gc.isenabled()
        collecting.close()
        assert gc.isenabled() is was_on
    finally:
        switch[before]()


@pytest.mark.parametrize("own", [(700, 10, 10), (0, 10, 10)])
def test_garbage_is_looked_for_seldom_while_tests_run(own: tuple[int, int, int]) -> None:
    """Where the host program does look for it; afterwards as often as before."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(*own)
        undo = collect_seldom()
        assert gc.get_threshold() == (SELDOM if own[0] else own)
        undo()
        assert gc.get_threshold() == own
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


LOCATED = """
import pytest


@pytest.mark.parametrize("number", range(3))
def test_plain(number):
    pass


class TestOwn:
    @pytest.mark.parametrize("number", range(2))
    def test_in_class(self, number):
        pass

    test_again = test_in_class
"""


def test_where_a_test_stands_is_said_as_pytest_says_it(tmp_path: Path) -> None:
    """File, line and name, though a function is looked for once: also in classes, and under two names."""
    (tmp_path / "test_located.py").write_text(LOCATED, encoding="utf-8")
    found: list[tuple[Any, Any]] = []

    class Collected:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            of_pytest = [vars(pytest.Item)["location"].func(item) for item in session.items]
            share_locations(session.items)
            found.extend(zip([item.location for item in session.items], of_pytest, strict=True))

    quietly = ["-qq", "--collect-only", "-p", "no:gpucluster", "-p", "no:cacheprovider"]
    assert pytest.main([*quietly, f"--rootdir={tmp_path}", str(tmp_path)], plugins=[Collected()]) == 0
    assert len(found) == 7
    assert all(ours == of_pytest for ours, of_pytest in found), found
