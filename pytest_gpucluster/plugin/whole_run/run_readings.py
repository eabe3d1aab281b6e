"""Readings that are taken before the first test and after the last measurement; and the tests that judge them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cluster.results import Results, unmeasured
from pytest_gpucluster.cluster.unmeasurable import domains_of
from pytest_gpucluster.controller.call import TerminatedError
from pytest_gpucluster.errors import ConfigurationError, CriterionFailedError, GpuclusterError, MeasurementError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.identity import read_boot_id
from pytest_gpucluster.plugin.stash_keys import CRITERION, PAIR, RECORD, RULE
from pytest_gpucluster.protocol.plain_data import NotPlainDataError, from_plain, to_plain
from pytest_gpucluster.reporting.run_spans import Snapshot, SnapshotRecord, Span, Spans
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    import pytest

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.judging.finding import Finding
    from pytest_gpucluster.places import Place

MARK = "over_run"
OF_EARLIER_RUNS = ("between", "over_boots")
"""Arguments of the mark that are none of the reader."""
DEADLINE_S = 60.0
EVERY_S, EACH = 10.0, 50
"""While a run goes on: what only it can hear is written down at most so often, and at most each so manieth second."""
WHEN = {
    "watched": "in a soak that was cut short before this run",
    "between": "after a soak was cut short and before this run, while nobody watched",
}
WHEN_OF_PARTS = {
    "watched": "in an earlier part of this run",
    "between": "after an earlier part of this run and before this one, while nobody watched",
}


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
    def _places_by_fixture(self) -> dict[str, list[Place | None]]:
        return grouped((name, item.stash[PAIR].place) for item in self.items for name in getattr(item, "fixturenames", ()))

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

    def is_used_later(self, fixture: object) -> bool:
        """Whether a test uses a fixture of this definition, with any parameter, that has no outcome yet."""
        return any(used[0] is fixture and RECORD not in item.stash for (used, _), item in self._last_users.items())


def _fixture_of(item: Any, name: str) -> tuple[Any, int]:
    """The fixture of this name that a test uses, and which of its parameters."""
    defined = item._fixtureinfo.name2fixturedefs.get(name, (None,))  # noqa: SLF001 -- pytest has no other way to it
    return defined[-1], getattr(getattr(item, "callspec", None), "indices", {}).get(name, 0)


def reader_of(mark: pytest.Mark) -> str:
    """The name of a mark's reader, and who is asked."""
    return f"{mark.args[0].__module__}.{mark.args[0].__qualname__} {mark.kwargs.get('per', 'gpu')}"


def _clock() -> tuple[str, float] | None:
    boot = read_boot_id()
    return None if boot is None else (boot, time.clock_gettime(time.CLOCK_BOOTTIME))


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a reader gave at one moment of the controller's clock.

    ``wall_s``: the same moment in seconds since 1970, and ``clock`` since the boot, as in :class:`Snapshot`.
    """

    results: Results
    at_s: float
    wall_s: float = field(default_factory=time.time)
    clock: tuple[str, float] | None = field(default_factory=_clock)

    @property
    def snapshot(self) -> Snapshot:
        """The same as plain data. What cannot be read, is no plain data, or is of a pair of places, is missing."""
        failed = unmeasured(self.results)
        values, missing = {}, [str(place) for place in failed]
        for place in self.results:
            try:
                if place not in failed:
                    values[place.id] = to_plain(self.results[place])
            except (AttributeError, NotPlainDataError):
                missing.append(str(place))
        return Snapshot(at_s=self.wall_s, values=values, missing=tuple(missing), clock=self.clock)


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

    A test also judges what earlier runs had read for a soak that was cut short, and the time from then to this run. Where its
    own judgement does not hold for that time, ``between=`` of the mark is a judge of the values at its begin and end.
    ``over_boots=True``: the time between is judged also where a new soak begins, for example since the host was booted.
    """

    def __init__(self, cluster: Callable[[], Cluster], tests: Callable[[], SelectedTests]) -> None:
        """``cluster`` is called at the first reading; ``tests`` gives the selected ones."""
        self._cluster = cluster
        self._tests = tests
        self._started = False
        self._first: dict[str, _Taken] = {}
        self._last: dict[str, _Taken] = {}
        self._record = SnapshotRecord()
        self.earlier: Spans = {}
        """What earlier runs, or earlier parts of this one, had read."""
        self.goes_on = False
        """Whether this is a later part of a run, whose earlier parts have to be judged too."""
        self.newcomers: frozenset[str] = frozenset()
        """The ids of places at which nothing answered in the earlier parts."""
        self._written: set[str] = set()
        self._unwatched: str | None = None
        self._next_s = 0.0

    def take_earlier(self, spans: Spans) -> None:
        """Take over what was read earlier. What the journal gets from here on stands by itself."""
        self.earlier, self._record = spans, SnapshotRecord()

    def while_it_runs(self) -> dict[str, Snapshot]:
        """By reader, what is read now, if it is time; empty otherwise. At most 2 % of the time, and not in the first 10 s.

        Only readers of what is gone with this run: what came since an event was heard can be read again by no other.
        """
        began_s = time.monotonic()
        if not self._next_s:
            self._next_s = began_s + EVERY_S
        if began_s < self._next_s or self._last:
            return {}
        found: dict[str, _Taken] = {}
        for _, mark in self._tests().over_run:
            if "between" in mark.kwargs:
                with contextlib.suppress(GpuclusterError):
                    self._read(found, *mark.args, **mark.kwargs)
        now_s = time.monotonic()
        self._next_s = now_s + max(EVERY_S, EACH * (now_s - began_s))
        return {reader: taken.snapshot for reader, taken in found.items()}

    def new_lasts(self) -> dict[str, Snapshot]:
        """By reader, what was read after the last measurement, and was not asked for here before."""
        new = [reader for reader in self._last if reader not in self._written and reader in self.judges]
        self._written.update(new)
        return {reader: self._last[reader].snapshot for reader in new}

    @property
    def judges(self) -> dict[str, set[str]]:
        """By reader, the criteria that judge it."""
        return self._tests().judges

    @property
    def between(self) -> dict[str, Callable[[Any, Any], Finding]]:
        """By reader, the judge of the time between two runs, where a mark has one."""
        return {reader_of(mark): mark.kwargs["between"] for _, mark in self._tests().over_run if "between" in mark.kwargs}

    def firsts(self) -> dict[str, Snapshot]:
        """By reader, what was read before the first test."""
        return self._snapshots(self._first)

    def now(self) -> dict[str, Snapshot]:
        """By reader, what is read now.

        Raises:
            TerminatedError: the run is being ended, so nothing can be read.
        """
        found: dict[str, _Taken] = {}
        for _, mark in self._tests().over_run:
            try:
                self._read(found, *mark.args, **mark.kwargs)
            except TerminatedError:
                raise
            except GpuclusterError:
                continue
        return self._snapshots(found)

    def _snapshots(self, taken: Mapping[str, _Taken]) -> dict[str, Snapshot]:
        """Of each reader that a test judges. One that could not be called at all has no value anywhere."""
        nothing = Snapshot(at_s=time.time(), values={}, missing=("the cluster",))
        return {reader: taken[reader].snapshot if reader in taken else nothing for reader in self.judges}

    def facts(self, taken: Mapping[str, Snapshot]) -> Iterator[dict[str, Any]]:
        """What the journal of a soak gets of these readings: what differs from the last time."""
        return (self._record.facts(reader, snapshot) for reader, snapshot in taken.items())

    def take_first(self) -> None:
        """Read, once, what the selected tests judge over the run. An error is raised again in each test that reads it."""
        if not self._started:
            self._started = True
            for _, mark in self._tests().over_run:
                with contextlib.suppress(GpuclusterError):
                    self.first(*mark.args, **mark.kwargs)

    def first(self, function: Callable[..., Any], *, per: str = "gpu", every: bool = False, **arguments: Any) -> Results:
        """What was read before the first test; read now if no selected test judges this reader over the run."""
        return self._read(self._first, function, per=per, every=every, **arguments).results

    def over_run(self, item: pytest.Item) -> OverRun:
        """The two readings of a test with the mark ``over_run``.

        Raises:
            ConfigurationError: the test has no such mark, or one without a function.
        """
        mark = item.get_closest_marker(MARK)
        if mark is None or len(mark.args) != 1 or not callable(mark.args[0]):
            text = f"{item.nodeid}: the fixture over_run needs the mark @pytest.mark.over_run(function, per=...)"
            raise ConfigurationError(text)
        return OverRun(*(self._read(kept, *mark.args, **mark.kwargs) for kept in (self._first, self._last)))

    def _read(
        self,
        kept: dict[str, _Taken],
        function: Callable[..., Any],
        *,
        per: str = "gpu",
        every: bool = False,
        **arguments: Any,
    ) -> _Taken:
        """One reading, taken once."""
        key = f"{function.__module__}.{function.__qualname__} {per}"
        if key not in kept:
            cluster = self._cluster()
            wanted = self._tests().places
            places = cluster.places if every or None in wanted else tuple(place for place in wanted if place is not None)
            of_reader = {name: value for name, value in arguments.items() if name not in OF_EARLIER_RUNS}
            known = {name: value(cluster) if callable(value) else value for name, value in of_reader.items()}
            results = cluster.run(function, per=per, places=places, **{"deadline_s": DEADLINE_S, **known})
            kept[key] = _Taken(results, time.monotonic())
        return kept[key]

    def judge_earlier(self, item: pytest.Function, by_id: Mapping[str, Place]) -> MeasurementError | None:
        """Judge a test's criterion by what earlier runs had read; ``by_id`` has the places of this run.

        Returns:
            Why a part of the soak that goes on is not known; None if all is.

        Raises:
            CriterionFailedError: something was bad then.
        """
        mark = item.get_closest_marker(MARK) if self.earlier or self.goes_on else None
        place, unknown, self._unwatched = item.stash[PAIR].place, None, None
        if mark is None or (place is not None and place.id in self.newcomers):
            return None
        spans, when = self.earlier.get(reader_of(mark), ()), WHEN_OF_PARTS if self.goes_on else WHEN
        if self.goes_on and not spans:
            text = f"{mark.args[0].__qualname__} was not read in the earlier parts of this run"
            return MeasurementError(text, kind="missing")
        for span in spans:
            is_apart = span.kind == "between" and not span.is_needed  # of no soak: perhaps a boot, certainly other work
            if span.first == span.last or (is_apart and not mark.kwargs.get("over_boots", False)):
                continue
            try:
                self._judge_span(item, mark, span, by_id)
            except CriterionFailedError:
                criterion = item.stash[CRITERION]
                if criterion.judged is not None:
                    criterion.judged = replace(criterion.judged, reason=f"{criterion.judged.reason}\nseen {when[span.kind]}")
                raise
            except MeasurementError as error:
                if self.goes_on and span.kind == "between" and "between" in mark.kwargs:
                    self._unwatched = f"what came while nobody watched is not known: {first_line(str(error))}"
                    continue
                text = f"{error}\n{when[span.kind]}"
                if span.is_needed and unknown is None:
                    unknown = MeasurementError(text, culprits=error.culprits, kind=error.kind, blame=error.blame)
        return unknown

    def remark_on(self, item: pytest.Item) -> None:
        """Say beside the outcome of a test what of the time between two parts of its run is not known."""
        criterion = item.stash.get(CRITERION, None)
        if self._unwatched is not None and criterion is not None and criterion.judged is not None:
            said = "; ".join(filter(None, (criterion.judged.remark, self._unwatched)))
            criterion.judged = replace(criterion.judged, remark=said)

    def _judge_span(self, item: pytest.Function, mark: pytest.Mark, span: Span, by_id: Mapping[str, Place]) -> None:
        """Judge one span, by the test's own function or by the mark's judge of the time between two runs.

        Raises:
            CriterionFailedError, MeasurementError: something is bad, or not known.
        """
        if "over_run" not in item.funcargs:
            raise MeasurementError(f"{item.stash[PAIR].criterion} does not use over_run, so it judges this run alone")
        ids = [place for place in span.first.values if place in span.last.values and place in by_id]
        first, last = ({by_id[name]: from_plain(one.values[name]) for name in ids} for one in (span.first, span.last))
        over = OverRun(_Taken(Results(first, {}), 0.0), _Taken(Results(last, {}), span.seconds))
        own = item.stash[PAIR].place
        is_there = bool(ids) if own is None else own in over.first or (own.gpu is None and bool(over.of_gpus(own)))
        if not is_there:
            raise MeasurementError(f"{mark.args[0].__qualname__} was not read", culprits=() if own is None else (own,))
        if span.kind == "watched" or "between" not in mark.kwargs:
            names = item._fixtureinfo.argnames  # noqa: SLF001 -- as pytest calls it
            item.obj(**{name: over if name == "over_run" else item.funcargs[name] for name in names})
        else:
            for place in over.first if own is None else (own,):
                item.stash[CRITERION].judge(mark.kwargs["between"](*over[place]))
