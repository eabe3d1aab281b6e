"""The order in which tests run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_gpucluster.plugin.collection import in_run_order
from pytest_gpucluster.plugin.pairing import Pairing


class Item(SimpleNamespace):
    """A test that can be a key."""

    __hash__ = object.__hash__


def item(name: str, criterion: str, *marks: str, file: str = "test_a.py") -> Any:
    """A collected test with these marks."""
    return Item(
        name=name,
        originalname=name.partition("[")[0],
        parent=file,
        path=Path(file),
        pair=Pairing(criterion=criterion, place=None, judges=True),
        get_closest_marker=lambda wanted: wanted if wanted in marks else None,
    )


def order(*items: Any, soaking: tuple[str, ...] = ()) -> list[str]:
    """The names of the tests as they will run."""
    return [one.name for one in in_run_order(items, {one: one.pair for one in items}, soaking=soaking)]


def test_health_comes_first_and_a_soak_last() -> None:
    """A broken GPU is seen before the long measurements; otherwise the files' own order stays."""
    files = [
        item("test_tflops", "tflops", "compute"),
        item("test_wear", "wear", "compute"),
        item("test_own", "own"),
        item("test_ecc", "ecc", "health"),
        item("test_hot", "hot", "health"),
        item("test_copy", "copy", "links"),
    ]
    assert order(*files, soaking=("wear", "hot")) == [
        "test_ecc",
        "test_tflops",
        "test_own",
        "test_copy",
        "test_hot",
        "test_wear",
    ]


def test_what_judges_the_whole_run_comes_after_it() -> None:
    """The mark at_end comes after a soak, whatever else is marked, and keeps the order of its own."""
    files = [
        item("test_grown", "grown", "health", "at_end"),
        item("test_wear", "wear", "compute"),
        item("test_lost", "lost", "at_end"),
        item("test_ecc", "ecc", "health"),
    ]
    assert order(*files, soaking=("wear",)) == ["test_ecc", "test_wear", "test_grown", "test_lost"]


def test_what_is_read_over_the_run_comes_last_too() -> None:
    """The mark over_run, from whatever folder; the readings before the run need no test of its own to be first."""
    files = [
        item("test_grown", "grown", "health", "over_run", file="suite/test_health.py"),
        item("test_own_ecc", "own_ecc", "health", file="own/test_own.py"),
        item("test_own", "own", file="own/test_own.py"),
        item("test_ecc", "ecc", "health", file="suite/test_health.py"),
    ]
    assert order(*files) == ["test_own_ecc", "test_ecc", "test_own", "test_grown"]


def test_one_criterion_after_the_other() -> None:
    """Where a test judges several, all places of one come before the next."""
    names = [("test_copy[up-gpu0]", "copy[up]"), ("test_copy[down-gpu0]", "copy[down]"), ("test_copy[up-gpu1]", "copy[up]")]
    found = order(*(item(name, criterion) for name, criterion in names))
    assert found == ["test_copy[up-gpu0]", "test_copy[up-gpu1]", "test_copy[down-gpu0]"]
