"""Which part of one run is which part of another: GPUs by UUID and serial number, wherever they are; nodes by hostname."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.text import shortlist

CLUSTER = ("cluster", "")
PartKey = tuple[str, str]
"""What a part is (``gpu``, ``node``, ``cluster``), and by what it is known in both runs."""
Places = dict[str, "dict[str, Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The parts of two runs.

    Attributes:
        before: the key of each place id of the earlier run.
        after: the same of the later run; a part of both has one key.
        places_before: the places of the earlier run by key.
        places_after: those of the later run.
        renamed: hosts of the earlier run that are called otherwise in the later one, with their new name.
    """

    before: Mapping[str | None, PartKey]
    after: Mapping[str | None, PartKey]
    places_before: Mapping[PartKey, Mapping[str, Any]]
    places_after: Mapping[PartKey, Mapping[str, Any]]
    renamed: Mapping[str, str]

    @property
    def moved(self) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """GPUs that are in another node or slot than before, as they were and as they are."""
        both = ((self.places_before[key], self.places_after[key]) for key in self.places_before if key in self.places_after)
        return [(old, new) for old, new in both if old["gpu"] is not None and self._now(old) != _position(new)]

    def _now(self, place: Mapping[str, Any]) -> tuple[Any, ...]:
        """Where a place of the earlier run is by the names of the later one."""
        host, *rest = _position(place)
        return self.renamed.get(host, host), *rest

    @property
    def sizes_before(self) -> Counter[int]:
        """How many GPUs answered, by node of the earlier run."""
        return _sizes(self.places_before)

    @property
    def gone(self) -> list[Mapping[str, Any]]:
        """Parts of the earlier run that the later one lacks."""
        return [place for key, place in self.places_before.items() if key not in self.places_after and _answered(place)]

    @property
    def emptied(self) -> dict[int, list[Mapping[str, Any]]]:
        """The GPUs of each node of the earlier run, by its number, of which the later run has none."""
        return _whole_nodes(self.gone, self.sizes_before)

    @property
    def filled(self) -> dict[int, list[Mapping[str, Any]]]:
        """The GPUs of each node of the later run, by its number, of which the earlier run had none."""
        return _whole_nodes(self.new, _sizes(self.places_after))

    @property
    def heard(self) -> set[str]:
        """The hosts of the later run of which a GPU answered."""
        there = (place for place in self.places_after.values() if place["gpu"] is not None and _answered(place))
        return {str(place.get("hostname")) for place in there}

    @property
    def new(self) -> list[Mapping[str, Any]]:
        """Parts that only the later run has."""
        return [place for key, place in self.places_after.items() if key not in self.places_before and _answered(place)]


def match(before: Mapping[str, Any], after: Mapping[str, Any]) -> Matching:
    """Match the parts of two results.json.

    Raises:
        ConfigurationError: nothing of one cluster is in the other, or one of the two was simulated or a rehearsal.
    """
    _require_alike(before, after)
    old, new = places_of(before), places_of(after)
    keys_before: dict[str | None, PartKey] = {name: _own_key(place) for name, place in old.items()}
    known = _by_identity(old.values())
    keys_after: dict[str | None, PartKey] = {name: _known_key(place, known) or _own_key(place) for name, place in new.items()}
    renamed = _renamed(old, new, keys_before=keys_before, keys_after=keys_after)
    hosts = {name: host for host, name in renamed.items()}
    for name, place in new.items():
        if place["gpu"] is None and place.get("hostname") in hosts:
            keys_after[name] = ("node", hosts[place["hostname"]])
    found = Matching(
        before={None: CLUSTER, **keys_before},
        after={None: CLUSTER, **keys_after},
        places_before={keys_before[name]: place for name, place in old.items()},
        places_after={keys_after[name]: place for name, place in new.items()},
        renamed=renamed,
    )
    if old and new and not set(found.places_before) & set(found.places_after):
        raise ConfigurationError(
            f"these are runs of different clusters: no GPU and no host of {_hosts(old)} is in the other run, {_hosts(new)}"
        )
    return found


def _renamed(
    old: Places, new: Places, *, keys_before: Mapping[str | None, PartKey], keys_after: Mapping[str | None, PartKey]
) -> dict[str, str]:
    """The hosts with another name: all GPUs of a host that is gone by its name are on one that is new by its name."""
    was = {keys_before[name]: place.get("hostname") for name, place in old.items() if place["gpu"] is not None}
    now = {keys_after[name]: place.get("hostname") for name, place in new.items() if place["gpu"] is not None}
    ways = {(was[key], now[key]) for key in was.keys() & now.keys()}
    to, came = grouped(ways), Counter(name for _, name in ways)
    hosts_before, hosts_after = ({place.get("hostname") for place in places.values()} for places in (old, new))
    found = {}
    for host in dict.fromkeys(was.values()):
        names = to.get(host, [])
        name = next(iter(names), None)
        is_new = host is not None and name is not None and host not in hosts_after and name not in hosts_before
        if is_new and len(names) == came[name] == 1:
            found[str(host)] = str(name)
    return found


def _sizes(places: Mapping[PartKey, Mapping[str, Any]]) -> Counter[int]:
    return Counter(place["node"] for place in places.values() if place["gpu"] is not None and _answered(place))


def _whole_nodes(places: Iterable[Mapping[str, Any]], sizes: Mapping[int, int]) -> dict[int, list[Mapping[str, Any]]]:
    """The GPUs among these parts by node, where they are all GPUs of it."""
    found = grouped((place["node"], place) for place in places if place["gpu"] is not None)
    return {node: gpus for node, gpus in found.items() if len(gpus) == sizes[node]}


def places_of(document: Mapping[str, Any]) -> Places:
    """The places of a run by id, also of an older results.json, which has them in its rows."""
    listed = [place for place in document.get("places", ()) if isinstance(place, dict)]
    rows = [row["place"] for row in document["criteria"] if row["place"] is not None]
    return {place["id"]: place for place in (*rows, *listed)}


NAMES = ("id", "hostname", "uuid", "serial")
"""By what a place of a run can be named."""


def where_of(place: Mapping[str, Any]) -> str:
    """A place with its host, where that is known."""
    host = place.get("hostname")
    return f"{host} ({place['id']})" if host else str(place["id"])


def label_of(place: Mapping[str, Any] | None) -> str:
    """A part in words: host, place, serial number or UUID."""
    if place is None:
        return "the cluster"
    part = f" serial {place['serial']}" if place.get("serial") else f" {place['uuid']}" if place.get("uuid") else ""
    return f"{where_of(place)}{part}"


def _require_alike(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    if bool(before.get("simulated")) != bool(after.get("simulated")):
        raise ConfigurationError("one of the two runs is of a simulated fleet, and the other is not: they cannot be compared")
    rehearsed = [run.get("verdict") == "REHEARSED" and not run.get("simulated") for run in (before, after)]
    if rehearsed[0] != rehearsed[1]:
        raise ConfigurationError("one of the two runs is a rehearsal, and the other is not: they cannot be compared")


def _by_identity(places: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], PartKey]:
    found: dict[tuple[str, str], PartKey] = {}
    for place in places:
        for name in ("uuid", "serial"):
            if place["gpu"] is not None and place.get(name):
                found.setdefault((name, str(place[name])), _own_key(place))
    return found


def _known_key(place: Mapping[str, Any], known: Mapping[tuple[str, str], PartKey]) -> PartKey | None:
    if place["gpu"] is None:
        return None
    return next((known[name, str(place[name])] for name in ("uuid", "serial") if (name, str(place.get(name))) in known), None)


def _own_key(place: Mapping[str, Any]) -> PartKey:
    if place["gpu"] is None:
        return "node", str(place.get("hostname") or place["id"])
    known = place.get("uuid") or place.get("serial")
    return "gpu", str(known or f"{place.get('hostname') or ''}/{place['id']}")


def _position(place: Mapping[str, Any]) -> tuple[Any, ...]:
    return place.get("hostname") or place["id"], place.get("pci"), place.get("slot")


def _answered(place: Mapping[str, Any]) -> bool:
    return place.get("rank") is not None or bool(place.get("uuid"))


def _hosts(places: Places) -> str:
    names = list(dict.fromkeys(str(place.get("hostname") or place["id"]) for place in places.values()))
    return shortlist(names, most=1)
