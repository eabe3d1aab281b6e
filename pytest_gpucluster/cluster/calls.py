"""``cluster.run``: a function is called on the ranks of places, and its values come back by place."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.cluster.unmeasurable import (
    complete_groups,
    error_for,
    errors_of_pairs,
    foreign_process_errors,
    idle_again,
    merged,
    missing_error,
    rank_of,
)
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.occupancy import read_occupancy_again
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.functions import RefusedError, needs_idle_gpu, uses_no_device
from pytest_gpucluster.protocol.messages import CALL_VARIABLES, FunctionName, Reply
from pytest_gpucluster.protocol.rank import rounds_of_pairs
from pytest_gpucluster.worker.worker import look_at_gpu

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.binding import Binding
    from pytest_gpucluster.controller.controller import Controller
    from pytest_gpucluster.controller.inline import InlineController

PER = ("gpu", "host", "node", "domain", "cluster", "pair")
DEADLINE_S = 300.0
LOOK_DEADLINE_S = 30.0


Wave: TypeAlias = "Sequence[Sequence[Place]]"
"""The groups that one call measures at the same time; with ``per="gpu"``, of one GPU each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The values and errors of one ``cluster.run`` so far; with ``per="pair"`` their keys are ordered pairs of places."""

    per: str
    values: dict[Any, Any] = field(default_factory=dict)
    errors: dict[Any, MeasurementError] = field(default_factory=dict)


class Caller(Protocol):
    """Who measures."""

    def wanted_places(self) -> frozenset[Place] | None:
        """The places that the tests need at the moment; None: all of them."""

    def note_results(self, made: Results) -> None:
        """Remember what a :meth:`Cluster.run` returned."""


class Cluster:
    """The bound places, and calls of functions on their ranks."""

    def __init__(
        self,
        controller: Controller | InlineController,
        binding: Binding,
        *,
        caller: Caller | None = None,
        deadline_s: float = DEADLINE_S,
        reads_only: bool = False,
    ) -> None:
        """Measure on the places of ``binding`` through ``controller``.

        ``caller`` says which places it wants; without one, it is all of them. ``deadline_s`` holds for every call that
        brings no deadline of its own. ``reads_only``: only functions that use no GPU may be called.
        """
        self.deadline_s = deadline_s
        self.places = binding.places
        """The expected GPUs, each bound to the hardware that answers there."""
        self.nodes = binding.nodes
        """The expected nodes, each with its hostname."""
        self.world_size = binding.attendance.answering
        """How many ranks answer."""
        self.promised = binding.inventory
        """What was promised: shape, fabric, names of the GPU."""
        self._controller = controller
        self._binding = binding
        self.at_start = binding.at_start
        """By place, what used the GPU before this run; an error (kind ``not_idle``) where that was too much."""
        self._caller = caller
        self._reads_only = reads_only
        self._variables: dict[str, str] = {}
        self._came: dict[Place, MeasurementError] = {}
        """The GPUs to which a foreign process came during this run, and was there when it was last looked for."""

    @property
    def device(self) -> str:
        """``cuda``, or ``cpu`` in a rehearsal."""
        return self.promised.device

    @property
    def not_idle(self) -> dict[Place, MeasurementError]:
        """The GPUs that somebody else used before this run, each with its error."""
        return {place: error for place, error in self.at_start.errors.items() if error.kind == "not_idle"}

    def require_present(self, place: Place) -> Place:
        """The same place with what is known about its hardware.

        Raises:
            MeasurementError: nothing answers there (kind ``missing``).
        """
        bound = self._binding.by_id[place.id]
        attendance = self._binding.attendance
        answers = bound.rank is not None if bound.gpu is not None else bound.node in attendance.answering_nodes
        if not answers:
            raise missing_error(bound, attendance)
        return bound

    def with_variables(self, variables: Mapping[str, str]) -> Cluster:
        """The same cluster, whose calls of :meth:`run` have new workers with these variables in their environment.

        Raises:
            ConfigurationError: a variable that a call may not set.
        """
        foreign = [name for name in variables if name not in CALL_VARIABLES]
        if foreign:
            raise ConfigurationError(f"a call cannot set {', '.join(foreign)}; it can set {', '.join(CALL_VARIABLES)}")
        other = copy.copy(self)
        other._variables = dict(variables)  # noqa: SLF001 -- a copy of this object
        return other

    def run(
        self,
        function: Callable[..., Any],
        *,
        per: str = "gpu",
        places: Iterable[Place] | None = None,
        at_once: int | str | None = None,
        deadline_s: float | None = None,
        **kwargs: Any,
    ) -> Results:
        """Measure with ``function`` on the GPUs; every place once.

        Args:
            function: a function at module level, of any importable module or test file; it gets ``kwargs`` and returns
                plain data (dataclass, dict, number).
            per: which ranks share a process group: ``gpu`` none; ``host`` none, and one rank of each node runs;
                ``node`` those of a node, ``domain`` those of an NVLink domain (a node, or nodes whose GPUs NVML calls one
                fabric: NVL72), ``cluster`` all, ``pair`` every pair in disjoint rounds (the value of the ordered
                pair ``(a, b)`` is what ``a`` returned).
            places: measure these only.
            at_once: how many GPUs of a node measure at the same time; None or ``"all"``: all of them.
            deadline_s: how long the call may take, set-up apart; by default what the level gives (:attr:`deadline_s`).
            kwargs: plain data.

        Returns:
            The values by place. Places that could not be measured raise when they are read.

        Raises:
            ConfigurationError: ``per``, ``at_once``, the function or an argument is not usable.
        """
        _check(per, at_once)
        chosen, unnoted = self._choose(per, places), copy.copy(self)
        unnoted._caller = None  # noqa: SLF001 -- a copy of this object
        if per == "host":
            first_ones = _one_of_each_node(chosen, self._unmeasurable(chosen, needs_idle=needs_idle_gpu(function)))
            return self._noted(unnoted.run(function, places=first_ones, deadline_s=deadline_s, **kwargs).by_node(self.nodes))
        try:
            name = self._controller.name(_allowed(function, reads_only=self._reads_only))
            plain_data.to_plain(kwargs)
        except (RefusedError, plain_data.NotPlainDataError) as refused:
            raise ConfigurationError(f"cluster.run({getattr(function, '__name__', function)}): {refused}") from None
        deadline_s, began_s = self.deadline_s if deadline_s is None else deadline_s, time.monotonic()
        measured = _Measured(per=per)
        unmeasurable = self._unmeasurable(chosen, needs_idle=needs_idle_gpu(function))
        measured.errors.update(errors_of_pairs(unmeasurable, chosen) if per == "pair" else unmeasurable)
        for wave in _waves(per, chosen, at_once, unmeasurable, measured.errors):
            self._measure(name, wave, measured, deadline_s=deadline_s, kwargs=kwargs)
        again = functools.partial(
            unnoted.run, function, per=per, places=chosen, at_once=at_once, deadline_s=deadline_s, **kwargs
        )
        took_s = time.monotonic() - began_s
        return self._noted(Results(measured.values, measured.errors, again=again, took_s=took_s, is_single=per == "gpu"))

    def _noted(self, made: Results) -> Results:
        if self._caller is not None:
            self._caller.note_results(made)
        return made

    def run_groups(
        self, function: Callable[..., Any], groups: Sequence[Sequence[Place]], *, deadline_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Measure with ``function`` in several process groups at once.

        Args:
            function: as of :meth:`run`.
            groups: of nodes (with all their GPUs) or of GPUs; no GPU is in two of them.
            deadline_s: how long the call may take, set-up apart.
            kwargs: plain data.

        Returns:
            For each group, in order, what its first rank returned; the :class:`MeasurementError` of a group that failed.
        """
        members = [self._choose("node", group) for group in groups]
        chosen = [place for group in members for place in group]
        name = self._controller.name(_allowed(function, reads_only=self._reads_only))
        measured = _Measured(per="node")
        measured.errors.update(self._unmeasurable(chosen, needs_idle=needs_idle_gpu(function)))
        able = [group for group in members if not any(place in measured.errors for place in group)]
        if able:
            deadline_s = self.deadline_s if deadline_s is None else deadline_s
            self._measure(name, able, measured, deadline_s=deadline_s, kwargs=kwargs)
        errors = [next((measured.errors[place] for place in group if place in measured.errors), None) for group in members]
        return [measured.values[group[0]] if error is None else error for group, error in zip(members, errors, strict=True)]

    def _choose(self, per: str, places: Iterable[Place] | None) -> list[Place]:
        """The places to measure: those of the caller, else the wanted ones; whole nodes where a node shares a group."""
        if places is not None:
            given: list[Any] = [*places]
            if not given:
                raise ConfigurationError("cluster.run: places has no place: leave it out to measure all")
            bad = [one for one in given if not isinstance(one, Place)]
            if bad:
                raise ConfigurationError(f"cluster.run: places has {bad[0]!r}, which is no Place: take some of cluster.places")
            ids = {place.id for place in given}
            unknown = ids - {place.id for place in (*self.places, *self.promised.nodes)}
            if unknown:
                raise ConfigurationError(f"cluster.run: no expected place is called {', '.join(sorted(unknown))}")
            nodes = {node.node for node in self.promised.nodes if node.id in ids}
            return [place for place in self.places if place.id in ids or place.node in nodes]
        wanted = None if self._caller is None else self._caller.wanted_places()
        if wanted is None or per in ("domain", "cluster", "pair"):
            return list(self.places)
        nodes = {place.node for place in wanted if per in ("host", "node") or place.gpu is None}
        return [place for place in self.places if place in wanted or place.node in nodes]

    def _unmeasurable(self, chosen: Iterable[Place], *, needs_idle: bool) -> dict[Place, MeasurementError]:
        """The places that cannot be measured, and why: nothing answers there, or somebody else uses the GPU."""
        chosen = list(chosen)
        not_idle = {**self._still_there(chosen), **self.not_idle} if needs_idle else {}
        attendance = self._binding.attendance
        missing = {place: missing_error(place, attendance) for place in chosen if place.rank is None}
        return {place: error for place in chosen if (error := missing.get(place) or not_idle.get(place)) is not None}

    def _still_there(self, chosen: Sequence[Place]) -> dict[Place, MeasurementError]:
        """The chosen GPUs to which a foreign process came during this run, unless it has left since."""
        places = [place for place in chosen if place in self._came]
        if places:
            name, ranks = self._controller.name(look_at_gpu), [rank_of(place) for place in places]
            replies = self._controller.call(Call(function=name, ranks=ranks, deadline_s=LOOK_DEADLINE_S))
            for place in places:
                if not replies[rank_of(place)].foreign_processes:
                    del self._came[place]
        return {place: self._came[place] for place in places if place in self._came}

    def _measure(
        self, name: FunctionName, wave: Wave, measured: _Measured, *, deadline_s: float, kwargs: dict[str, Any]
    ) -> None:
        """Make the call of one wave, and sort its replies into values and errors.

        A failure in a group is the error of its failed members, a foreign process that of all members.
        """
        groups = [[rank_of(place) for place in group] for group in wave]
        call = Call(
            function=name,
            ranks=[rank for group in groups for rank in group],
            groups=None if measured.per == "gpu" else groups,
            deadline_s=deadline_s,
            kwargs=kwargs,
            variables=self._variables,
        )
        replies = self._controller.call(call)
        for group in wave:
            of_group = {rank_of(place): replies[rank_of(place)] for place in group}
            not_idle = self._note_foreign(replies, group, f"{name.qualname} was measured")
            succeeded = all(reply.ok for reply in of_group.values())
            error = not_idle or (None if succeeded else error_for(of_group, group, what=f"{name.qualname} was not measured"))
            for place in group:
                reply = of_group[rank_of(place)]
                keys = [(place, other) for other in group if other != place] if measured.per == "pair" else [place]
                for key in keys:
                    if reply.ok and not_idle is None:
                        measured.values[key] = reply.value
                    elif error is not None:
                        measured.errors[key] = error

    def _note_foreign(self, replies: Mapping[int, Reply], group: Iterable[Place], what: str) -> MeasurementError | None:
        """The error of a group of which a member's GPU had a foreign process on it; None if none had."""
        errors = foreign_process_errors(replies, group, what=what)
        self._came.update(errors)
        return merged(list(errors.values())) if errors else None

    def error_for(self, replies: Mapping[int, Reply], what: str) -> MeasurementError:
        """The error of a call to any ranks, of which at least one failed; ``what`` did not work, in words."""
        return error_for(replies, self.places, what=what)

    def run_test(
        self, name: FunctionName, *, per: str, arguments: Sequence[str], parameters: Mapping[str, Any], deadline_s: float
    ) -> dict[int, Reply]:
        """Run the body of a ``@pytest.mark.distributed`` test on every rank; the replies by rank.

        Raises:
            MeasurementError: an expected place is missing, so the test cannot run; or a GPU was not idle, before or meanwhile.
        """
        for error in self._unmeasurable(self.places, needs_idle=True).values():
            raise error
        groups = [[place] for place in self.places] if per == "gpu" else complete_groups(self.places, {}, per=per)[0]
        call = Call(
            function=name,
            ranks=[rank_of(place) for place in self.places],
            groups=[[rank_of(place) for place in group] for group in groups],
            deadline_s=deadline_s,
            kwargs=dict(parameters),
            test_arguments=tuple(arguments),
        )
        replies = self._controller.call(call)
        not_idle = self._note_foreign(replies, self.places, f"{name.qualname} ran")
        if not_idle is not None:
            raise not_idle
        return replies


def look_again(cluster: Cluster) -> None:
    """Read again who is on the GPUs that were not idle before this run: one whose user has left is measured from now on."""
    before, busy = cluster.at_start, list(cluster.not_idle)
    if not busy:
        return
    controller = cluster._controller  # noqa: SLF001 -- a part of the class, whose methods are enough
    name, ranks = controller.name(read_occupancy_again), [rank_of(place) for place in busy]
    found = idle_again(busy, controller.call(Call(function=name, ranks=ranks, deadline_s=LOOK_DEADLINE_S)))
    kept = {place: before[place] for place in before if place not in before.errors}
    errors = {place: error for place, error in before.errors.items() if place not in found}
    cluster.at_start = Results({**kept, **found}, errors)


def _allowed(function: Callable[..., Any], *, reads_only: bool) -> Callable[..., Any]:
    """The function, unless it may use a GPU in a run that only reads.

    Raises:
        ConfigurationError: it may.
    """
    if reads_only and not uses_no_device(function):
        name = getattr(function, "__name__", function)
        raise ConfigurationError(f"an audit only reads, and {name} may use a GPU: leave the mark 'reads' off its test")
    return function


def _check(per: str, at_once: int | str | None) -> None:
    if per not in PER:
        raise ConfigurationError(f"cluster.run: per={per!r} is not one of {', '.join(PER)}.{did_you_mean(str(per), PER)}")
    if at_once not in (None, "all") and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
        raise ConfigurationError(f"cluster.run: at_once={at_once!r} is not 'all' or a whole number above zero")
    if at_once not in (None, "all") and per != "gpu":
        raise ConfigurationError(f"cluster.run: at_once goes with per='gpu', not with per={per!r}")


def _one_of_each_node(chosen: Iterable[Place], unmeasurable: Mapping[Place, MeasurementError]) -> list[Place]:
    """The first place of each node that can be measured; the first one where none can."""
    found: dict[int, Place] = {}
    for place in sorted(chosen, key=lambda place: place in unmeasurable):
        found.setdefault(place.node, place)
    return sorted(found.values(), key=lambda place: place.node)


def _waves(
    per: str,
    chosen: list[Place],
    at_once: int | str | None,
    unmeasurable: Mapping[Place, MeasurementError],
    errors: dict[Any, MeasurementError],
) -> Sequence[Wave]:
    """The calls to make, one after the other; the members of incomplete groups go into ``errors``."""
    measurable = [place for place in chosen if place not in unmeasurable]
    if not measurable:
        return []
    if per == "gpu":
        return _waves_of_gpus(measurable, len(measurable) if at_once in (None, "all") else int(str(at_once)))
    if per == "pair":
        return rounds_of_pairs(measurable)
    groups, incomplete = complete_groups(chosen, unmeasurable, per=per)
    errors.update(incomplete)
    return [groups] if groups else []


def _waves_of_gpus(measurable: Sequence[Place], size: int) -> list[Wave]:
    """At most ``size`` GPUs of each node at a time, on all nodes at once."""
    by_node = grouped((place.node, place) for place in measurable)
    longest = max(map(len, by_node.values()))
    return [
        [[place] for members in by_node.values() for place in members[first : first + size]]
        for first in range(0, longest, size)
    ]
