"""Which part of one run is which part of another: GPUs by UUID and serial number, wherever they are; nodes by hostname."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    """

    before: Mapping[str | None, PartKey]
    after: Mapping[str | None, PartKey]
    places_before: Mapping[PartKey, Mapping[str, Any]]
    places_after: Mapping[PartKey, Mapping[str, Any]]

    @property
    def moved(self) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """GPUs that are in another node or slot than before, as they were and as they are."""
        both = ((self.places_before[key], self.places_after[key]) for key in self.places_before if key in self.places_after)
        return [(old, new) for old, new in both if old["gpu"] is not None and _position(old) != _position(new)]

    @property
    def gone(self) -> list[Mapping[str, Any]]:
        """Parts of the earlier run that the later one lacks."""
        return [place for key, place in self.places_before.items() if key not in self.places_after and _answered(place)]

    @property
    def emptied(self) -> dict[int, list[Mapping[str, Any]]]:
        """The GPUs of each node of the earlier run, by its number, of which the later run has none."""
        had = Counter(place["node"] for place in self.places_before.values() if place["gpu"] is not None and _answered(place))
        found: dict[int, list[Mapping[str, Any]]] = {}
        for place in self.gone:
            if place["gpu"] is not None:
                found.setdefault(place["node"], []).append(place)
        return {node: gpus for node, gpus in found.items() if len(gpus) == had[node]}

    @property
    def silent(self) -> set[str]:
        """The hosts of the later run of which no GPU answered."""
        heard = {place["node"] for place in self.places_after.values() if place["gpu"] is not None and _answered(place)}
        return {str(place["hostname"]) for place in self.places_after.values() if place["node"] not in heard}

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
    found = Matching(
        before={None: CLUSTER, **keys_before},
        after={None: CLUSTER, **keys_after},
        places_before={keys_before[name]: place for name, place in old.items()},
        places_after={keys_after[name]: place for name, place in new.items()},
    )
    if old and new and not set(found.places_before) & set(found.places_after):
        raise ConfigurationError(
            f"these are runs of different clusters: no GPU and no host of {_hosts(old)} is in the other run, {_hosts(new)}"
        )
    return found


def places_of(document: Mapping[str, Any]) -> Places:
    """The places of a run by id, also of an older results.json, which has them in its rows."""
    listed = [place for place in document.get("places", ()) if isinstance(place, dict)]
    rows = [] if listed else [row["place"] for row in document["criteria"] if row["place"] is not None]
    return {place["id"]: place for place in (*listed, *rows)}


def label_of(place: Mapping[str, Any] | None) -> str:
    """A part in words: host, place, serial number or UUID."""
    if place is None:
        return "the cluster"
    part = f" serial {place['serial']}" if place.get("serial") else f" {place['uuid']}" if place.get("uuid") else ""
    host = f"{place['hostname']} " if place.get("hostname") else ""
    return f"{host}({place['id']}){part}" if host else f"{place['id']}{part}"


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
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
