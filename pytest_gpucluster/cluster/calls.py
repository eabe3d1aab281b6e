"""``cluster.run``: from places to ranks and back."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cluster.results import Results, rounds_of_pairs
from pytest_gpucluster.cluster.unmeasurable import not_idle, spread, whole_groups
from pytest_gpucluster.controller.controller import Call
from pytest_gpucluster.controller.diagnosis import diagnose
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.inventory.identity import Identity, identity
from pytest_gpucluster.inventory.occupancy import read_occupancy
from pytest_gpucluster.judging import noise
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.functions import RefusedError, needs_idle_gpu

if TYPE_CHECKING:
    from pytest_gpucluster.controller.controller import Controller
    from pytest_gpucluster.controller.inline import InlineController

PER = ("gpu", "node", "cluster", "pair")
DEADLINE_S = 300.0
LOOK_S = 30.0
REPEATS = ("iterations", "bursts", "repeats")
"""Arguments of a measurement that say how often it repeats: what a second look multiplies."""
Asked = Callable[[], "frozenset[Place] | None"]
Wave = tuple[list[Place], "list[list[Place]] | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Values and errors of one run as they come in; ``pairs``: keyed by ordered pairs of places."""

    what: str
    pairs: bool
    values: dict[Any, Any] = field(default_factory=dict)
    errors: dict[Any, MeasurementError] = field(default_factory=dict)


class Cluster:
    """Everything a test may ask of the machines."""

    def __init__(
        self, controller: Controller | InlineController, inventory: Inventory, *, asked: Asked, deadline_s: float = DEADLINE_S
    ) -> None:
        """``asked`` tells which places the selected tests want from the fixture being set up; None: all.

        ``deadline_s`` holds for every call that does not bring its own.
        """
        self.deadline_s = deadline_s
        self._controller = controller
        self._inventory = inventory
        self._asked = asked
        self._bound: dict[str, Place] = {place.id: place for place in inventory.places}
        self.identities: dict[str, Identity] = {}
        self.unexpected: list[str] = []
        self.startup_s = 0.0
        self.unheard: dict[int, str] = {}
        self.at_start = Results({}, {})
        """By place what was on the GPU before this run was; an error (kind ``not_idle``) where that was too much."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The expected places, bound to the hardware that said hello."""
        return tuple(self._bound[place.id] for place in self._inventory.places)

    @property
    def nodes(self) -> tuple[Place, ...]:
        """The expected nodes, each with the hostname that said hello."""
        return tuple(replace(node, hostname=self._hostname(node)) for node in self._inventory.nodes)

    @property
    def world_size(self) -> int:
        """How many ranks answer."""
        return sum(place.rank is not None for place in self.places)

    @property
    def device(self) -> str:
        """``cuda``, or ``cpu`` in a rehearsal."""
        return self._inventory.device

    @property
    def promised(self) -> Inventory:
        """What was promised: shape, fabric, names of the GPU."""
        return self._inventory

    @property
    def not_idle(self) -> dict[Place, MeasurementError]:
        """The GPUs on which somebody else was before this run, and what is told of it."""
        return {place: error for place, error in self.at_start.errors.items() if error.kind == "not_idle"}

    def bound(self, place: Place) -> Place:
        """The same place with what is known about its hardware."""
        if place.gpu is None:
            return replace(place, hostname=self._hostname(place))
        return self._bound[place.id]

    def require_present(self, place: Place) -> Place:
        """The bound place.

        Raises:
            MeasurementError: nothing answers there (kind ``missing``).
        """
        members = [member for member in self.places if place.gpu is None and member.node == place.node] or [self.bound(place)]
        absent = [member for member in members if member.rank is None]
        if absent and (place.gpu is not None or len(absent) == len(members)):
            raise self._missing(self.bound(place))
        return self.bound(place)

    def _missing(self, place: Place) -> MeasurementError:
        what = "node" if place.gpu is None or not self._hostname(place) else "GPU"
        told = f"{self.world_size} of {len(self.places)} expected places answer"
        here = f" on {place.hostname or self._hostname(place)}" if self._hostname(place) else ""
        return MeasurementError(
            f"not run: {place.id} is missing: no such {what} joined{here} ({told})", culprits=(place,), kind="missing"
        )

    def _hostname(self, place: Place) -> str | None:
        return next((member.hostname for member in self.places if member.node == place.node and member.hostname), None)

    # Measuring.

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
            per: who shares a process group: ``gpu`` nobody, ``node`` the ranks of a node, ``cluster`` all, ``pair`` every
                pair in disjoint rounds (the value of the ordered pair ``(a, b)`` is what ``a`` returned).
            places: narrows it to these.
            at_once: how many GPUs of a node measure at the same time; None or ``"all"``: all of them.
            deadline_s: how long the call may take, set-up apart; by default what the level gives (:attr:`deadline_s`).
            kwargs: plain data.

        Returns:
            The values by place. Places that could not be measured raise when they are read.

        Raises:
            ConfigurationError: ``per``, ``at_once``, the function or an argument is not usable.
        """
        self._check(per, at_once, deadline_s)
        chosen = self._chosen(per, places)
        try:
            name = self._controller.name(function)
            plain_data.to_plain(kwargs)
        except (RefusedError, plain_data.NotPlainError) as refused:
            raise ConfigurationError(f"cluster.run({getattr(function, '__name__', function)}): {refused}") from None
        found = _Found(what=name["qualname"], pairs=per == "pair")
        unfit = self._unfit(chosen, needs_idle=needs_idle_gpu(function))
        found.errors.update(spread(unfit, chosen, pairs=found.pairs))
        for alone, groups in self._waves(per, chosen, at_once, unfit, found.errors):
            call = Call(
                function=name,
                ranks=[_rank(place) for place in alone],
                groups=None if groups is None else [[_rank(place) for place in group] for group in groups],
                deadline_s=deadline_s or self.deadline_s,
                kwargs=kwargs,
            )
            replies = self._controller.call(call)
            self._sort(replies, groups or [[place] for place in alone], found)
        beside = tuple(place for place in chosen if place not in unfit)
        more = {name: number * noise.MORE for name, number in kwargs.items() if name in REPEATS and isinstance(number, int)}
        again = functools.partial(
            self.run,
            function,
            per=per,
            places=chosen,
            at_once=at_once,
            deadline_s=noise.MORE * (deadline_s or self.deadline_s),
            **{**kwargs, **more},
        )
        return Results(found.values, found.errors, ran_beside=beside, again=again)

    def _check(self, per: str, at_once: int | str | None, deadline_s: float | None) -> None:
        if per not in PER:
            raise ConfigurationError(f"cluster.run: per={per!r} is not one of {', '.join(PER)}")
        if at_once not in (None, "all") and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
            raise ConfigurationError(f"cluster.run: at_once={at_once!r} is not 'all' or a whole number above zero")
        if at_once not in (None, "all") and per != "gpu":
            raise ConfigurationError(f"cluster.run: at_once goes with per='gpu', not with per={per!r}")
        if deadline_s is not None and not 0 < deadline_s < float("inf"):
            raise ConfigurationError(f"cluster.run: deadline_s={deadline_s!r} is not a time above zero")

    def _chosen(self, per: str, places: Iterable[Place] | None) -> list[Place]:
        """The places to measure, bound; whole nodes where a node shares a group."""
        if places is not None:
            wanted = {place.id for place in places}
            unknown = wanted - set(self._bound) - {node.id for node in self._inventory.nodes}
            if unknown:
                raise ConfigurationError(f"cluster.run: no expected place is called {', '.join(sorted(unknown))}")
            return [place for place in self.places if place.id in wanted or f"node{place.node}" in wanted]
        asked = self._asked()
        if asked is None or per in ("cluster", "pair"):
            return list(self.places)
        nodes = {place.node for place in asked if per == "node" or place.gpu is None}
        return [place for place in self.places if place in asked or place.node in nodes]

    def _unfit(self, chosen: Iterable[Place], *, needs_idle: bool) -> dict[Place, MeasurementError]:
        """The places that cannot be measured, and why: nothing answers there, or somebody else is on the GPU."""
        busy = self.not_idle if needs_idle else {}
        return {
            place: self._missing(place) if place.rank is None else busy[place]
            for place in chosen
            if place.rank is None or place in busy
        }

    def _waves(
        self,
        per: str,
        chosen: list[Place],
        at_once: int | str | None,
        unfit: Mapping[Place, MeasurementError],
        errors: dict[Any, MeasurementError],
    ) -> list[Wave]:
        """Who measures together, call after call; members of groups that are not whole go into ``errors``."""
        fit = [place for place in chosen if place not in unfit]
        if not fit:
            return []
        if per == "gpu":
            by_node = {node: [place for place in fit if place.node == node] for node in {place.node for place in fit}}
            size = len(fit) if at_once in (None, "all") else int(str(at_once))
            longest = max(len(members) for members in by_node.values())
            slices = [
                [place for members in by_node.values() for place in members[i : i + size]] for i in range(0, longest, size)
            ]
            return [(wave, None) for wave in slices]
        if per == "pair":
            return [(list(sum(pairs, ())), [list(pair) for pair in pairs]) for pairs in rounds_of_pairs(fit)]
        groups, broken = whole_groups(chosen, unfit, per=per)
        errors.update(broken)
        members = [place for group in groups for place in group]
        return [(members, groups)] if members else []

    def _sort(self, replies: Mapping[int, Any], groups: Sequence[Sequence[Place]], found: _Found) -> None:
        for group in groups:
            answers = {_rank(place): replies[_rank(place)] for place in group}
            good = all(reply["ok"] for reply in answers.values())
            bad = None if good else self.blame(answers, f"{found.what} was not measured")
            for place in group:
                reply = answers[_rank(place)]
                keys = [(place, other) for other in group if other != place] if found.pairs else [place]
                for key in keys:
                    if reply["ok"]:
                        found.values[key] = plain_data.from_plain(reply["value"])
                    elif bad is not None:
                        found.errors[key] = bad

    def blame(self, answers: Mapping[int, Any], what: str) -> MeasurementError:
        """The error of a group in which at least one rank failed."""
        found = diagnose(answers, name=self._name, what=what)
        culprits = tuple(place for place in self.places if place.rank in found.culprits)
        return MeasurementError(found.text, culprits=culprits, kind=found.kind)

    def _name(self, rank: int) -> str:
        place = next((place for place in self.places if place.rank == rank), None)
        return f"rank {rank} ({place.id}, {place.hostname})" if place is not None else f"rank {rank}"

    # Distributed tests.

    def run_test(
        self, name: dict[str, Any], *, per: str, arguments: Sequence[str], parameters: Mapping[str, Any], deadline_s: float
    ) -> dict[int, Any]:
        """Run the body of a ``@pytest.mark.distributed`` test on every rank; the replies by rank.

        Raises:
            MeasurementError: an expected place is missing or its GPU not idle, so the test cannot run as asked.
        """
        for unfit in self._unfit(self.places, needs_idle=True).values():
            raise unfit
        groups = [[place] for place in self.places] if per == "gpu" else self._waves(per, list(self.places), None, {}, {})[0][1]
        call = Call(
            function=name,
            ranks=[_rank(place) for place in self.places],
            groups=[[_rank(place) for place in group] for group in groups or ()],
            deadline_s=deadline_s,
            kwargs=dict(parameters),
            test_arguments=arguments,
        )
        return self._controller.call(call)

    # Binding places to hardware.

    def bind(self, *, within_s: float) -> None:
        """Let every rank say hello, and bind each expected place to the GPU that answers for it."""
        started_s = time.monotonic()
        self._controller.meet(within_s=within_s)
        looks = self._look() if self.device == "cuda" else {}
        call = Call(
            function=self._controller.name(identity),
            ranks=range(self._controller.world_size),
            deadline_s=60.0,
            kwargs={"device": self.device},
            any_device=True,
        )
        replies = self._controller.call(call)
        self._controller.measuring_s = 0.0
        found = {rank: plain_data.from_plain(reply["value"]) for rank, reply in replies.items() if reply["ok"]}
        self._refuse_other_versions(found)
        self.unheard = {rank: str(reply["error"]) for rank, reply in replies.items() if not reply["ok"]}
        found.update(self._refuse_other_files(replies))
        for node, ranks in enumerate(_by_node(found)):
            for gpu, rank in enumerate(sorted(ranks, key=lambda rank: (found[rank].pci or "", found[rank].local_rank))):
                self._bind_one(node, gpu, rank, found[rank])
        if looks:
            self.at_start = self._judge_idle(looks)
        self.startup_s = time.monotonic() - started_s

    def _look(self) -> Mapping[int, Any]:
        """Who is on the GPUs: asked before any worker of ours uses one, so that whoever is there is somebody else."""
        call = Call(
            function=self._controller.name(read_occupancy),
            ranks=range(self._controller.world_size),
            deadline_s=LOOK_S,
            any_device=True,
            once=True,
        )
        return self._controller.call(call)

    def _judge_idle(self, looks: Mapping[int, Any]) -> Results:
        """What was seen on each place's GPU; by UUID, because ranks may count GPUs in another order than CUDA."""
        values: dict[Any, Any] = {}
        errors: dict[Any, MeasurementError] = self._unfit(self.places, needs_idle=False)
        seen = {rank: plain_data.from_plain(reply["value"]) for rank, reply in looks.items() if reply["ok"]}
        present = [place for place in self.places if place.rank is not None]
        by_uuid = {(place.node, seen[place.rank].uuid): seen[place.rank] for place in present if place.rank in seen}
        for place in present:
            found = by_uuid.get((place.node, place.uuid)) if place.uuid else seen.get(_rank(place))
            if found is None:
                errors[place] = self._unseen(place, looks)
            elif found.holders:
                errors[place] = not_idle(place, found)
            else:
                values[place] = found
        return Results(values, errors)

    def _unseen(self, place: Place, looks: Mapping[int, Any]) -> MeasurementError:
        """Nobody read this GPU: because of who should have, its own rank if that one failed, else another of its node."""
        ranks = [_rank(place), *(_rank(other) for other in self.places if other.node == place.node and other.rank is not None)]
        failed = next((rank for rank in ranks if not looks[rank]["ok"]), None)
        if failed is not None:
            return self.blame({failed: looks[failed]}, "who is on the GPU was not read")
        return MeasurementError(
            f"who is on the GPU was not read: of the ranks of {place.hostname} none looked at {place.label}; do two share one?",
            culprits=(place,),
            kind="raised",
        )

    def _refuse_other_versions(self, found: Mapping[int, Identity]) -> None:
        """Nodes with other versions measure something else: they answer with an error that names the difference."""
        ours = found[min(found)] if found else None
        for rank, who in found.items():
            other = {name: version for name, version in who.versions.items() if ours and ours.versions[name] != version}
            if ours is not None and other:
                told = ", ".join(f"{name} {version} instead of {ours.versions[name]}" for name, version in other.items())
                self._controller.refuse(rank, f"rank {rank} on {who.hostname} runs {told}: bring every node to one version")

    def _refuse_other_files(self, replies: Mapping[int, Any]) -> dict[int, Identity]:
        """Ranks that are there, and whose copy of this package is not ours: bound by what their agents said."""
        there: dict[int, Identity] = {}
        for rank, reply in replies.items():
            who = self._controller.who(rank) if reply.get("type") == "RefusedError" else None
            if who is not None:
                names = {name: who[name] for name in ("hostname", "group_rank", "local_rank")}
                there[rank] = Identity(**names, versions={}, torch_gpus=0)
                self._controller.refuse(rank, f"rank {rank} on {who['hostname']}: {reply['error']}")
        return there

    def _bind_one(self, node: int, gpu: int, rank: int, who: Identity) -> None:
        self._controller.nodes[rank] = node
        place = next((place for place in self._inventory.places if (place.node, place.gpu) == (node, gpu)), None)
        if place is None:
            self.unexpected.append(f"rank {rank} on {who.hostname}")
            return
        self.identities[place.id] = who
        self._bound[place.id] = replace(place, rank=rank, hostname=who.hostname, uuid=who.uuid, serial=who.serial, pci=who.pci)


def _rank(place: Place) -> int:
    if place.rank is None:
        raise ValueError(f"{place.id} is not bound")
    return place.rank


def _by_node(found: Mapping[int, Identity]) -> list[list[int]]:
    """Ranks by node, nodes in the natural order of their hostnames, then by torchrun's group rank."""
    keys = sorted({(who.hostname, who.group_rank) for who in found.values()}, key=lambda key: (natural(key[0]), key[1]))
    return [[rank for rank, who in found.items() if (who.hostname, who.group_rank) == key] for key in keys]


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key under which ``node2`` comes before ``node10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]
