"""Binding: which GPU, of which rank and host, answers at each expected place. Done once, before anything is measured.

Numbers of nodes: which expected node each host is; and which places the name of a part means. Pure.

An expected list of hosts decides where there is one: node N is the N-th host of the list, whoever is absent. So does the list
that an earlier run left, if all that answer are in it. Without a list the nodes that answer have the first numbers, in the
natural order of their hostnames. A part is named by its identity, so that a re-test never measures another part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.cluster.unmeasurable import Attendance, error_for, missing_error, not_idle_error, rank_of
from pytest_gpucluster.config.host_list import is_address, is_same_host
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.identity import Identity, identity
from pytest_gpucluster.inventory.occupancy import read_occupancy
from pytest_gpucluster.judging.agreement import majority
from pytest_gpucluster.judging.selection import ONLY
from pytest_gpucluster.protocol.messages import Failure, Reply
from pytest_gpucluster.text import one_line, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.config.settings import PartName
    from pytest_gpucluster.controller.controller import Controller
    from pytest_gpucluster.controller.inline import InlineController
    from pytest_gpucluster.places import Inventory, Place


SHOWN_HOSTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringNode:
    """A node that answers. ``group_rank`` is torchrun's number of it; several nodes may be on one host."""

    hostname: str
    group_rank: int


def only_own(inventory: Inventory, hostnames: Iterable[str]) -> Inventory:
    """The inventory without a list that an earlier run left, where a host answers that is not in it: another cluster's."""
    if not inventory.hosts_are_remembered:
        return inventory
    exact = {host.lower() for host in inventory.hosts}
    others = {name for name in hostnames if name.lower() not in exact}
    if all(any(is_same_host(name, host) for host in inventory.hosts) for name in others):
        return inventory
    return replace(inventory, hosts=(), hosts_are_remembered=False)


def number_nodes(nodes: Collection[AnsweringNode], inventory: Inventory) -> dict[AnsweringNode, int]:
    """The number of each node. A number that is not below ``inventory.num_nodes`` is that of a node nobody expects.

    A host that is not in the list never gets the number of a host of the list. Two lists are of names that no hostname
    equals: one of addresses, and one of which no name answers. There torchrun's order is meant, as ``launch --hosts`` says.
    """
    ordered = sorted(nodes, key=lambda node: (natural_sort_key(node.hostname), node.group_rank, node.hostname))
    if not inventory.hosts:
        return {node: number for number, node in enumerate(ordered)}
    numbers = _by_name(ordered, inventory.hosts)
    others = [node for node in ordered if node not in numbers]
    for node in others:
        at = node.group_rank
        is_named_otherwise = at < len(inventory.hosts) and (len(others) == len(ordered) or is_address(inventory.hosts[at]))
        if is_named_otherwise and at not in numbers.values():
            numbers[node] = at
    free = (at for at in range(len(inventory.hosts), len(inventory.hosts) + inventory.num_nodes + len(ordered)))
    numbers.update({node: next(free) for node in others if node not in numbers})
    return numbers


def _by_name(ordered: Sequence[AnsweringNode], hosts: Sequence[str]) -> dict[AnsweringNode, int]:
    """The nodes whose hostnames are in the list. Several nodes on one host have its entries in torchrun's order.

    So have hosts that are called alike but for their domains, where they show none.
    """
    entries = grouped((host.lower(), at) for at, host in enumerate(hosts))
    numbers: dict[AnsweringNode, int] = {}
    for node in ordered:
        name = node.hostname.lower()
        alike = [free for host, free in entries.items() if free and is_same_host(host, name)]
        found = entries.get(name) or next((free for free in alike if node.group_rank in free), next(iter(alike), None))
        if found:
            numbers[node] = found.pop(found.index(node.group_rank) if len(alike) > 1 and node.group_rank in found else 0)
    return numbers


def natural_sort_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key under which ``node2`` comes before ``node10``."""
    parts = [part for part in re.split(r"(\d+)", text) if part]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def places_of_parts(names: Iterable[PartName], places: Collection[Place]) -> frozenset[str]:
    """The ids of the named parts: of a host its node and all of its GPUs, of a GPU that GPU alone.

    A host that is expected and does not answer is all of its places, which are missing.

    Raises:
        ConfigurationError: there is no such host, or no such part on it; the text says what is there instead.
    """
    return frozenset(place.id for name in names for place in _places_of(name, places))


def _places_of(name: PartName, places: Collection[Place]) -> Sequence[Place]:
    here = [place for place in places if place.hostname and is_same_host(place.hostname, name.host)]
    if not here:
        hosts = [place.hostname for place in places if place.gpu is None and place.hostname is not None]
        raise ConfigurationError(
            f"{ONLY} {name}: no host of this run has that name; its hosts: {shortlist(hosts, most=SHOWN_HOSTS) or 'none'}."
            f"{did_you_mean(name.host, hosts)}"
        )
    if name.part is None:
        return here
    found = [place for place in here if place.rank is not None and _has_identity(place, name.part)]
    if not found:
        raise ConfigurationError(f"{ONLY} {name}: {_what_is_there(name, here, places)}")
    return found


def _has_identity(place: Place, part: str) -> bool:
    """Whether the part is the place's UUID, its serial number, or its kind and number (``gpu3``)."""
    known = (place.uuid, place.serial, f"{place.kind}{place.gpu}")
    return place.gpu is not None and part.lower() in [one.lower() for one in known if one]


def _what_is_there(name: PartName, here: Sequence[Place], places: Collection[Place]) -> str:
    """What the host has instead, and where the part is now if another host of this run has it."""
    gpus = [place for place in here if place.gpu is not None and place.rank is not None]
    if not gpus:
        return f"{name.host} does not answer"
    shown = ", ".join(
        " ".join(filter(None, (f"{place.kind}{place.gpu}", f"serial {place.serial}" if place.serial else None, place.uuid)))
        for place in gpus
    )
    moved = [place for place in places if place.rank is not None and name.part in (place.uuid, place.serial) and name.part]
    now = f"; that part is {moved[0].on_host} now" if moved else ""
    return f"{name.host} has no such part; it has {shown}{now}"


OCCUPANCY_DEADLINE_S = 30.0
IDENTITY_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The expected places, each with the hardware that answers there; a place with ``rank`` None is missing.

    What is derived from the places is built once: another binding is another object.

    Attributes:
        places: the expected GPUs, in the order of ``inventory.places``.
        identities: what each rank reported about itself, by place id.
        unexpected: the ranks for which no place was expected, in words.
        unidentified: by rank, why it did not report its identity.
        at_start: by place, what used the GPU before this run; an error (kind ``not_idle``) where that was too much.
        startup_s: how long the ranks took to join and to be identified.
    """

    inventory: Inventory
    places: tuple[Place, ...]
    identities: Mapping[str, Identity] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    unidentified: Mapping[int, str] = field(default_factory=dict)
    at_start: Results = field(default_factory=lambda: Results({}, {}))
    startup_s: float = 0.0

    @cached_property
    def nodes(self) -> tuple[Place, ...]:
        """The expected nodes, each with the hostname that one of its GPUs has, else with the one that is expected."""
        hostnames = self.attendance.hostnames
        return tuple(replace(node, hostname=hostnames.get(node.node)) for node in self.inventory.nodes)

    @cached_property
    def attendance(self) -> Attendance:
        """How many of the expected GPUs answer, and on which hosts."""
        return Attendance(self.places)

    @cached_property
    def nic_gb_s_per_gpu(self) -> float | None:
        """What the ports of the node with the fastest ones carry for each GPU, in 10^9 bytes/s; None where nobody shows it."""
        shown = [one.ports_gb_s for one in self.identities.values() if one.ports_gb_s is not None]
        return max(shown) / self.inventory.gpus_per_node if shown else None

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What the verdict line says of a list of names that no host has: of another cluster, or of another kind."""
        listed = [host for host in self.inventory.hosts if not is_address(host)]
        answering = {one.hostname for one in self.identities.values()}
        if not listed or not answering or any(is_same_host(host, name) for name in answering for host in listed):
            return ()
        names = shortlist(listed, most=3)
        return (f"no host of this run has a name of the list of hosts ({names}): its order is torchrun's",)

    @cached_property
    def by_rank(self) -> Mapping[int, Place]:
        """The GPU at which each rank answers."""
        return {place.rank: place for place in self.places if place.rank is not None}

    @cached_property
    def by_id(self) -> Mapping[str, Place]:
        """Every expected GPU and node by id."""
        return {place.id: place for place in (*self.places, *self.nodes)}


def bind(controller: Controller | InlineController, inventory: Inventory, *, within_s: float) -> Binding:
    """Wait ``within_s`` for every rank to join, and bind each expected place to the GPU that answers for it.

    Ranks whose software differs from the first one's are refused: every later call answers there with the difference.

    Raises:
        MeasurementError: the ranks cannot be reached at all, or the run was terminated.
    """
    started_s = time.monotonic()
    controller.meet(within_s=within_s)
    # Who uses the GPUs is read before a worker of this run uses one: whatever is there belongs to somebody else.
    is_on_gpus = inventory.device == "cuda"
    occupancies = _ask_all(controller, read_occupancy, deadline_s=OCCUPANCY_DEADLINE_S, once=True) if is_on_gpus else {}
    replies = _ask_all(controller, identity, deadline_s=IDENTITY_DEADLINE_S, kwargs={"device": inventory.device})
    found = {rank: _in_one_line(reply.value) for rank, reply in replies.items() if reply.ok}
    refuse_other_versions(controller, found)
    found.update(_refuse_other_files(controller, replies))
    inventory = only_own(inventory, (one.hostname for one in found.values()))
    by_position = _by_position(found, inventory)
    controller.assign_nodes({rank: node for (node, _), rank in by_position.items()})
    ranks = {place: by_position.pop((place.node, place.gpu), None) for place in inventory.places}
    hostnames = {place.node: found[rank].hostname for place, rank in ranks.items() if rank is not None}
    places = tuple(
        replace(place, hostname=hostnames.get(place.node, place.hostname)) if rank is None else _bound(place, rank, found[rank])
        for place, rank in ranks.items()
    )
    listed = ", which is not among the expected hosts" if inventory.hosts else ""
    return Binding(
        inventory=inventory,
        places=places,
        identities={place.id: found[rank] for place, rank in ranks.items() if rank is not None},
        unexpected=tuple(
            f"rank {rank} on {found[rank].hostname}{listed if node >= inventory.num_nodes else ''}"
            for (node, _), rank in by_position.items()
        ),
        unidentified={rank: reply.error for rank, reply in replies.items() if not reply.ok},
        at_start=_judge_idle(places, occupancies) if occupancies else Results({}, {}),
        startup_s=time.monotonic() - started_s,
    )


def _ask_all(controller: Controller | InlineController, function: Callable[..., Any], **terms: Any) -> dict[int, Reply]:
    """The replies of all ranks, as a part of the start-up."""
    name, ranks = controller.name(function), range(controller.world_size)
    return controller.call(Call(function=name, ranks=ranks, any_device=True, is_startup=True, **terms))


def _in_one_line(one: Identity) -> Identity:
    """The identity with text that cannot break a line or a report, whatever bytes a host has as its name."""
    texts = {name: value for name, value in asdict(one).items() if isinstance(value, str)}
    fit: dict[str, Any] = {name: one_line(text) for name, text in texts.items()}
    return replace(one, **fit)


def _by_position(found: Mapping[int, Identity], inventory: Inventory) -> dict[tuple[int, int | None], int]:
    """The rank at each (node, GPU), both counted from 0: nodes by :func:`number_nodes`, the GPUs of a node by PCI address."""
    nodes = grouped((AnsweringNode(hostname=one.hostname, group_rank=one.group_rank), rank) for rank, one in found.items())
    positions: dict[tuple[int, int | None], int] = {}
    for key, node in number_nodes(nodes, inventory).items():
        ranks = _in_bus_order({rank: found[rank] for rank in nodes[key]})
        positions.update({(node, gpu): rank for gpu, rank in enumerate(ranks)})
    return positions


def _in_bus_order(of_node: Mapping[int, Identity]) -> list[int]:
    """The ranks of a node by the PCI address of their GPU. One without an address keeps the number that it has on the bus."""
    by_local_rank = sorted(of_node, key=lambda rank: of_node[rank].local_rank)
    ranks = sorted(filter(lambda rank: of_node[rank].pci, by_local_rank), key=lambda rank: str(of_node[rank].pci).lower())
    for rank in by_local_rank:
        one = of_node[rank]
        if not one.pci:
            ranks.insert(one.local_rank if one.gpu_number is None else one.gpu_number, rank)
    return ranks


def _bound(place: Place, rank: int, one: Identity) -> Place:
    found = {name: getattr(one, name) for name in ("hostname", "uuid", "serial", "pci", "board", "fabric", "switch", "boot_id")}
    return replace(place, rank=rank, driver=one.stack.get("driver"), **found)


def refuse_other_versions(controller: Controller | InlineController, found: Mapping[int, Identity]) -> None:
    """Refuse ranks with other versions than most have, or the first rank where none has the majority."""
    first = found[min(found)].versions if found else {}
    ours = {name: majority([one.versions[name] for one in found.values()]) or version for name, version in first.items()}
    for rank, one in found.items():
        other = {name: version for name, version in one.versions.items() if ours[name] != version}
        if other:
            difference = ", ".join(f"{name} {version} instead of {ours[name]}" for name, version in other.items())
            controller.refuse(rank, f"its node runs {difference}: bring every node to one version")


def _refuse_other_files(controller: Controller | InlineController, replies: Mapping[int, Reply]) -> dict[int, Identity]:
    """Refuse ranks whose copy of this package differs. They are bound by what their agents said about themselves."""
    refused: dict[int, Identity] = {}
    for rank, reply in replies.items():
        hello = controller.hello_of(rank)
        if hello is not None and isinstance(reply, Failure) and reply.type == "RefusedError":
            refused[rank] = Identity(
                hostname=hello.hostname, group_rank=hello.group_rank, local_rank=hello.local_rank, versions={}, torch_gpus=0
            )
            controller.refuse(rank, reply.error)
    return refused


def _judge_idle(places: Sequence[Place], occupancies: Mapping[int, Reply]) -> Results:
    """What used each place's GPU. Matched by UUID, because ranks may count GPUs in another order than CUDA."""
    values: dict[Any, Any] = {}
    attendance = Attendance(places)
    errors: dict[Any, MeasurementError] = {place: missing_error(place, attendance) for place in places if place.rank is None}
    read = {rank: reply.value for rank, reply in occupancies.items() if reply.ok}
    present = [place for place in places if place.rank is not None]
    on_node = grouped((place.node, place) for place in present)
    by_uuid = {(place.node, read[place.rank].uuid): read[place.rank] for place in present if place.rank in read}
    for place in present:
        found = by_uuid.get((place.node, place.uuid)) if place.uuid else read.get(rank_of(place))
        if found is None:
            errors[place] = _unread_error(place, on_node[place.node], occupancies)
        elif found.holders:
            errors[place] = not_idle_error(place, found)
        else:
            values[place] = found
    return Results(values, errors)


def _unread_error(place: Place, others: Sequence[Place], occupancies: Mapping[int, Reply]) -> MeasurementError:
    """Why nobody read this GPU: its own rank failed, or one of the ``others`` of its node, or two ranks read one GPU."""
    failed = next((one for one in (place, *others) if not occupancies[rank_of(one)].ok), None)
    if failed is not None:
        return error_for({rank_of(failed): occupancies[rank_of(failed)]}, [failed], what="who is on the GPU was not read")
    return MeasurementError(
        f"who is on the GPU was not read: of the ranks of {place.hostname} none looked at {place.label}; do two share one?",
        culprits=(place,),
        kind="raised",
    )
