"""Numbers of nodes: which expected node each host is; and which places the name of a part means. Pure.

An expected list of hosts decides where there is one: node N is the N-th host of the list, whoever is absent. So does the list
that an earlier run left, if all that answer are in it. Without a list the nodes that answer have the first numbers, in the
natural order of their hostnames. A part is named by its identity, so that a re-test never measures another part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpucluster.config.host_list import is_address, is_same_host
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.selection import ONLY
from pytest_gpucluster.text import shortlist

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pytest_gpucluster.config.settings import PartName
    from pytest_gpucluster.places import Inventory, Place

SHOWN_HOSTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringNode:
    """A node that answers. ``group_rank`` is torchrun's number of it; several nodes may be on one host."""

    hostname: str
    group_rank: int

    @property
    def sort_key(self) -> tuple[tuple[tuple[int, int, str], ...], int, str]:
        """Natural order of hostnames, then torchrun's."""
        return natural_sort_key(self.hostname), self.group_rank, self.hostname


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
    ordered = sorted(nodes, key=lambda node: node.sort_key)
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
            f"{ONLY} {name}: no host of this run has that name; there are {shortlist(hosts, most=SHOWN_HOSTS) or 'none'}."
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
