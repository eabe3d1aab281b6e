"""The selected tests, and which test and which fixture run now: that decides the places that ``cluster.run`` measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.plugin.stash_keys import PAIR, RULE

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpucluster.places import Place


class Selection:
    """A pytest plugin that remembers the selected tests, the running test and the fixtures being set up."""

    def __init__(self) -> None:
        """Nothing is selected yet."""
        self.items: tuple[pytest.Item, ...] = ()
        self._current: pytest.Item | None = None
        self._fixtures: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember the tests that will run; those that were refused have no pair."""
        self.items = tuple(item for item in session.items if PAIR in item.stash)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Remember which test runs."""
        self._current = item
        try:
            return (yield)
        finally:
            self._current = None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Remember which fixture is being set up."""
        self._fixtures.append(fixturedef.argname)
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    def wanted_places(self) -> frozenset[Place] | None:
        """The places of the running test, or of all tests that use the fixture being set up; None: every place."""
        if self._fixtures:
            wanting = [item for item in self.items if self._fixtures[-1] in getattr(item, "fixturenames", ())]
        else:
            wanting = [self._current] if self._current is not None else []
        places = {item.stash[PAIR].place for item in wanting}
        return None if None in places or not places else frozenset(place for place in places if place is not None)

    def criteria(self) -> list[str]:
        """The criteria that a selected test judges and no rule excludes."""
        return list(dict.fromkeys(item.stash[PAIR].criterion for item in self.items if RULE not in item.stash))

    def compares(self) -> bool:
        """Whether a selected test compares places with each other: the mark ``compares``."""
        return any(item.get_closest_marker("compares") is not None for item in self.items)
