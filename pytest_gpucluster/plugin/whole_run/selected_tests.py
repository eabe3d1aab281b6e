"""The selected tests, with tables of what is asked of all of them for each test or call: nothing walks over all tests again."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.plugin.stash_keys import PAIR, RULE

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

    from pytest_gpucluster.places import Place

MARK = "over_run"


class SelectedTests:
    """The tests that will run. The set is fixed after collection, so each table is made once, when it is first needed."""

    def __init__(self, items: Iterable[pytest.Item] = ()) -> None:
        """``items``: in the order in which they run; each has its pairing."""
        self.items = tuple(items)

    @cached_property
    def that_apply(self) -> tuple[pytest.Item, ...]:
        """The tests that no rule of the profile excludes."""
        return tuple(item for item in self.items if RULE not in item.stash)

    @cached_property
    def places(self) -> frozenset[Place | None]:
        """The places of the tests that apply; None among them: the whole cluster."""
        return frozenset(item.stash[PAIR].place for item in self.that_apply)

    @cached_property
    def over_run(self) -> tuple[tuple[pytest.Item, pytest.Mark], ...]:
        """The tests that judge over the whole run, with their marks. A mark without one function as its argument is none."""
        marked = ((item, item.get_closest_marker(MARK)) for item in self.that_apply)
        return tuple((item, mark) for item, mark in marked if mark and len(mark.args) == 1 and callable(mark.args[0]))

    @cached_property
    def judges(self) -> dict[str, set[str]]:
        """By reader, the criteria that judge it over the whole run."""
        found: dict[str, set[str]] = {}
        for item, mark in self.over_run:
            found.setdefault(reader_of(mark), set()).add(item.stash[PAIR].criterion)
        return found

    @cached_property
    def _places_by_fixture(self) -> dict[str, set[Place | None]]:
        found: dict[str, set[Place | None]] = {}
        for item in self.items:
            for name in getattr(item, "fixturenames", ()):
                found.setdefault(name, set()).add(item.stash[PAIR].place)
        return found

    def places_that_use(self, fixture: str) -> frozenset[Place | None]:
        """The places of the tests that use a fixture of this name; None among them: the whole cluster."""
        return frozenset(self._places_by_fixture.get(fixture, ()))

    @cached_property
    def _last_users(self) -> dict[tuple[Any, Place | None], pytest.Item]:
        return {
            (_fixture_of(item, used), item.stash[PAIR].place): item
            for item in self.that_apply
            for used in getattr(item, "fixturenames", ())
        }

    def is_last(self, item: pytest.Item, name: str) -> bool:
        """Whether no test of this place comes after this one that uses the same fixture."""
        return self._last_users.get((_fixture_of(item, name), item.stash[PAIR].place)) is item


def _fixture_of(item: Any, name: str) -> tuple[Any, int]:
    """The fixture of this name that a test uses, and which of its parameters."""
    defined = item._fixtureinfo.name2fixturedefs.get(name, (None,))  # noqa: SLF001 -- pytest has no other way to it
    return defined[-1], getattr(getattr(item, "callspec", None), "indices", {}).get(name, 0)


def reader_of(mark: pytest.Mark) -> str:
    """The name of a mark's reader, and who is asked."""
    return f"{mark.args[0].__module__}.{mark.args[0].__qualname__} {mark.kwargs.get('per', 'gpu')}"
