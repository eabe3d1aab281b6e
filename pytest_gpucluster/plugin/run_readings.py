"""Readings that are taken before the first test and after the last measurement: what is judged over the whole run."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.unmeasurable import domains_of
from pytest_gpucluster.errors import GpuclusterError, MeasurementError
from pytest_gpucluster.plugin.stash_keys import PAIR, RULE

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.plugin.collection import Collection

MARK = "over_run"
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a reader gave at one moment of the controller's clock."""

    results: Results
    at_s: float


class OverRun:
    """One reader's values at the start of the run and at its end: ``first, last = over_run[place]``.

    Reading a place that could not be measured at the start, or at the end, raises its :class:`MeasurementError`.
    """

    def __init__(self, first: _Taken, last: _Taken) -> None:
        """Two readings by the same function."""
        self.first = first.results
        self.last = last.results
        self.seconds = last.at_s - first.at_s

    def __getitem__(self, place: Place) -> tuple[Any, Any]:
        """The values of a place at the start and at the end."""
        return self.first[place], self.last[place]

    def of_gpus(self, node: Place) -> dict[Place, tuple[Any, Any]]:
        """The values of each GPU of a node that was read."""
        return {place: self[place] for place in self.first if place.node == node.node}

    def of_domain(self, place: Place) -> dict[Place, Any]:
        """The values at the end of the other GPUs of a GPU's NVLink domain; of its node where NVLink ends there.

        GPUs that could not be measured are left out: their own tests say so.
        """
        domains = domains_of(self.last)
        members = [one for one in self.last if domains[one.node] == domains[place.node] and one != place]
        found = {}
        for one in members:
            with contextlib.suppress(MeasurementError):
                found[one] = self.last[one]
        return found


class Readings:
    """The fixture ``readings``: each reader's values before the first test, and after the last one.

    A reader is a function that ``cluster.run`` calls, of the mark ``over_run(function, per="gpu", every=False, **arguments)``.
    ``every``: all places are read, whichever tests are selected, because they are compared. An argument that is a function is
    called with the cluster first.
    """

    def __init__(self, cluster: Callable[[], Cluster], collection: Collection) -> None:
        """``cluster`` is called at the first reading; ``collection`` has the selected tests."""
        self._cluster = cluster
        self._collection = collection
        self._started = False
        self._first: dict[tuple[str, str], _Taken] = {}
        self._last: dict[tuple[str, str], _Taken] = {}

    @property
    def _items(self) -> list[pytest.Item]:
        return [item for item in self._collection.items if RULE not in item.stash]

    def take_first(self) -> None:
        """Read, once, what the selected tests judge over the run. An error is raised again in each test that reads it."""
        if not self._started:
            self._started = True
            for mark in filter(None, [item.get_closest_marker(MARK) for item in self._items]):
                with contextlib.suppress(GpuclusterError):
                    self.first(*mark.args, **mark.kwargs)

    def first(self, function: Callable[..., Any], *, per: str = "gpu", every: bool = False, **arguments: Any) -> Results:
        """What was read before the first test; read now if no selected test judges this reader over the run."""
        return self._read(self._first, function, per=per, every=every, **arguments).results

    def over_run(self, item: pytest.Item) -> OverRun:
        """The two readings of a test with the mark ``over_run``.

        Raises:
            pytest.UsageError: the test has no such mark, or one without a function.
        """
        mark = item.get_closest_marker(MARK)
        if mark is None or len(mark.args) != 1 or not callable(mark.args[0]):
            raise pytest.UsageError(
                f"{item.nodeid}: the fixture over_run needs the mark @pytest.mark.over_run(function, per=...)"
            )
        return OverRun(*(self._read(kept, *mark.args, **mark.kwargs) for kept in (self._first, self._last)))

    def _read(
        self,
        kept: dict[tuple[str, str], _Taken],
        function: Callable[..., Any],
        *,
        per: str = "gpu",
        every: bool = False,
        **arguments: Any,
    ) -> _Taken:
        """One reading, taken once."""
        key = (f"{function.__module__}.{function.__qualname__}", per)
        if key not in kept:
            cluster = self._cluster()
            wanted = {item.stash[PAIR].place for item in self._items}
            chosen = {place for place in wanted if place is not None}
            places = cluster.places if every or None in wanted else tuple(chosen)
            known = {name: value(cluster) if callable(value) else value for name, value in arguments.items()}
            results = cluster.run(function, per=per, places=places, **{"deadline_s": DEADLINE_S, **known})
            kept[key] = _Taken(results, time.monotonic())
        return kept[key]
