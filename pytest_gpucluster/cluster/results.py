"""The results of a call, by place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pytest_gpucluster.errors import Blame, MeasurementError, Part
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.noise import Repeats
from pytest_gpucluster.judging.siblings import OUTLIER_SIGMAS, shortfalls
from pytest_gpucluster.places import Place
from pytest_gpucluster.text import shortlist, text_of

Value = TypeVar("Value")
OF_THE_RANK: tuple[Part, ...] = ("gpu", "link", "nic", "switch", "path")
"""Parts of which a rank that answers for its whole host may be the only one to know."""


class Results(Mapping[Any, Any]):
    """What each place returned. Reading a place that could not be measured raises :class:`MeasurementError`.

    Keys are places; ``per="pair"`` has ordered pairs of places. A node's place gives the value of that node's first rank,
    provided that all its ranks were measured: collective measurements return the same value on each.
    """

    def __init__(
        self,
        values: Mapping[Any, Any],
        errors: Mapping[Any, MeasurementError],
        *,
        again: Callable[[], Results] | None = None,
        took_s: float = 0.0,
        is_single: bool = False,
    ) -> None:
        """Keep values and errors by place; a place is in one of the two.

        ``again`` measures all of it once more. ``took_s``: how long the measurement took, in seconds. ``is_single``: each
        GPU measured for itself, so that the value of one is not that of its node.
        """
        self._values = dict(values)
        self._errors = dict(errors)
        self._again = again
        self.took_s = took_s
        self._is_single = is_single

        self._unread = set(errors)
        self._is_read = False
        self._has_ended: dict[Any, bool] = {}

    @property
    def errors(self) -> Mapping[Any, MeasurementError]:
        """The places that could not be measured, and why."""
        self._unread.clear()
        return MappingProxyType(self._errors)

    @property
    def unread(self) -> dict[Any, MeasurementError]:
        """The errors that nobody read, by place, in order."""
        return {place: self._errors[place] for place in sorted(self._unread, key=_order)}

    @property
    def is_read(self) -> bool:
        """Whether anybody read a value or an error."""
        return self._is_read or len(self._unread) < len(self._errors)

    @functools.cached_property
    def _in_order(self) -> tuple[Any, ...]:
        return tuple(sorted([*self._values, *self._errors], key=_order))

    @functools.cached_property
    def _of_nodes(self) -> Mapping[int, list[Place]]:
        """The GPUs that were to be measured, in order, by the number of their node."""
        return grouped((place.node, place) for place in self._in_order if isinstance(place, Place))

    def __getitem__(self, place: Any) -> Any:
        """The value measured there.

        Raises:
            MeasurementError: the place could not be measured.
            KeyError: the place was not to be measured.
        """
        members = self._of_nodes.get(place.node) if isinstance(place, Place) and place.gpu is None else None
        if members and place not in self:
            self._raise_if_any(members)
            return _common([self._values[member] for member in members], is_single=self._is_single)
        if place in self._errors:
            self._unread.discard(place)
            raise self._errors[place].with_traceback(None)  # of an earlier reader
        if place not in self._values:
            known = shortlist([*map(_named, self)], most=8)
            raise KeyError(f"{_named(place)} is none of the places that were measured: {known}")
        self._is_read = True
        return self._values[place]

    def __contains__(self, place: object) -> bool:
        """Whether the place was to be measured."""
        return place in self._values or place in self._errors

    def __iter__(self) -> Iterator[Any]:
        """All places that were to be measured, in order."""
        return iter(self._in_order)

    def __len__(self) -> int:
        """How many places were to be measured."""
        return len(self._values) + len(self._errors)

    @property
    def value(self) -> Any:
        """The value of a measurement that all places made together. Every rank returned the same, so this is the first one's.

        Raises:
            MeasurementError: any of the places was not measured; the cause, not a consequence of it.
        """
        self._raise_if_any(list(self))
        return _common([self._values[place] for place in self], is_single=self._is_single)

    def repeated(self, place: Any, value: str, repeats: str) -> Repeats:
        """A value with its repeats, by which ``criterion.require`` tells noise from a fault.

        Args:
            place: where; None for what all places measured together.
            value: the name of the judged field (a key, where the measurement returned a dict).
            repeats: the name of the field that lists its repeats.

        Who kept the host busy meanwhile is in ``host_load.disturbed_by`` of what was measured, where it has that.
        """
        measured = self.value if place is None else self[place]
        again = None if self._again is None else lambda: self._remeasured.repeated(place, value, repeats)
        return Repeats(
            value=_field(measured, value),
            samples=_field(measured, repeats),
            again=again,
            took_s=self.took_s,
            disturbed_by=getattr(getattr(measured, "host_load", None), "disturbed_by", None),
        )

    def by_node(self, nodes: Sequence[Place]) -> Results:
        """The same by node, for values of which each node has one.

        One rank answered for its host: an error blames the node, unless it is that of a GPU or a link.
        """
        self._unread.clear()  # whoever has the other one reads it there
        node_of = {node.node: node for node in nodes}
        values = {node_of[place.node]: value for place, value in self._values.items()}
        errors = {node_of[place.node]: _of_host(error, node_of[place.node]) for place, error in self._errors.items()}
        again = None if self._again is None else lambda: self._remeasured.by_node(nodes)
        return Results(values, errors, again=again, took_s=self.took_s)

    @functools.cached_property
    def _remeasured(self) -> Results:
        """The next round, of all places under the same conditions. Made once, however many places were noisy."""
        assert self._again is not None
        return self._again()

    def first_of(self, node: Place) -> Any:
        """The value of the first measured rank of a node, for facts that every rank of the node reports alike.

        Raises:
            MeasurementError: none of its ranks was measured.
        """
        members = self._of_nodes.get(node.node, [])
        self._unread.difference_update(members)
        self._is_read = True
        measured = next((place for place in members if place in self._values), None)
        if measured is None:
            self._raise_if_any(members)
        return self._values[measured]

    def each(self, read: Callable[[Any], Value]) -> dict[Any, Value]:
        """``read(value)`` by place; raises MeasurementError if a place has none."""
        self._raise_if_any(list(self))
        return {place: read(self._values[place]) for place in self}

    def slowest(self, read: Callable[[Any], float]) -> float:
        """The lowest ``read(value)`` of all places, for rates: higher is better."""
        return min(self.each(read).values())

    def relative_to_fastest(self, read_time: Callable[[Any], float]) -> dict[Any, float]:
        """``relative_perf_score`` by place: fastest time / own time, 1.0 is best (term of nvidia-resiliency-ext)."""
        times_s = self.each(read_time)
        fastest_s = min(times_s.values())
        return {place: fastest_s / time_s for place, time_s in times_s.items()}

    def outliers(self, read: Callable[[Any], float], *, relative: float = 0.05) -> dict[Any, float]:
        """Places slower than the rest by more than ``relative`` and than the others' own spread: ratio to their median.

        See :mod:`outliers`. At least three places are needed: of two places that differ, either may be the slow one.
        """
        found = shortfalls(self.each(read), floor_spread=relative / OUTLIER_SIGMAS)
        return {place: 1 - one.percent / 100 for place, one in found.items() if one.is_named(0.0)}

    def _raise_if_any(self, places: Sequence[Any]) -> None:
        if not places:
            raise MeasurementError("nothing was measured: no place was chosen")
        errors = [self._errors[place] for place in places if place in self._errors]
        self._unread.difference_update(places)
        self._is_read = True
        if errors:
            raise _merged(errors).with_traceback(None)


def _common(values: Sequence[Any], *, is_single: bool) -> Any:
    """The first value, which all of them equal where GPUs measured together.

    Raises:
        MeasurementError: each measured for itself, and they differ.
    """
    if is_single and any(value != values[0] for value in values[1:]):
        text = "GPUs measured each for itself, and differ: no value is that of all of them"
        raise MeasurementError(f"{text}; read each place, or each(), slowest()", blame=Blame(part="software"))
    return values[0]


def unmeasured(made: Results) -> KeysView[Any]:
    """The places that could not be measured. Whoever asks has not read why."""
    return made._errors.keys()  # noqa: SLF001 -- of this module


def note_end(made: Iterable[Results], *, by_exception: bool) -> None:
    """Remember for each error read just now, at its place, whether an exception ended who read it; the first reader counts."""
    for one in made:
        for place in one._errors.keys() - one._unread:  # noqa: SLF001 -- of this module
            one._has_ended.setdefault(place, by_exception)  # noqa: SLF001 -- of this module


def read_where_one_ended(made: Iterable[Results]) -> None:
    """Count each error as read at whose place one of another result ended its reader, who could not go on to this one."""
    ended = {place for one in made for place, has_ended in one._has_ended.items() if has_ended}  # noqa: SLF001 -- as above
    for one in made:
        one._unread -= ended  # noqa: SLF001 -- of this module


def _of_host(error: MeasurementError, node: Place) -> MeasurementError:
    if error.blames in OF_THE_RANK or error.kind == "not_idle" or not error.culprits:
        return error
    return MeasurementError(str(error), culprits=(node,), kind=error.kind, blame=error.blame)


def _merged(errors: list[MeasurementError]) -> MeasurementError:
    """The first error; where others have the same cause, one error that blames the places of all of them."""
    first = errors[0]
    same = [error for error in errors if error.blame.cause is not None and error.blame == first.blame]
    culprits = tuple(dict.fromkeys(place for error in same for place in error.culprits))
    if len(culprits) <= len(first.culprits):
        return first
    others = ", ".join(place.id for place in culprits if place not in first.culprits)
    return MeasurementError(f"{first}\n  the same at {others}", culprits=culprits, kind=first.kind, blame=first.blame)


def _field(measured: Any, name: str) -> Any:
    return measured[name] if isinstance(measured, Mapping) else getattr(measured, name)


def _named(place: Any) -> str:
    return " to ".join(map(str, place)) if isinstance(place, tuple) else text_of(place)


def _order(place: Any) -> tuple[Any, ...]:
    if isinstance(place, tuple):
        return tuple(_order(member) for member in place)
    return (place.node, -1 if place.gpu is None else place.gpu)
