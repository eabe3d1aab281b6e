"""The places of parts that are named by their identity, so that a re-test never measures another part. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.host_list import is_same_host
from pytest_gpucluster.judging.selection import ONLY
from pytest_gpucluster.text import shortlist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpucluster.cluster.binding import Binding
    from pytest_gpucluster.config.settings import PartName
    from pytest_gpucluster.places import Place

SHOWN_HOSTS = 16


def places_of_parts(names: Iterable[PartName], binding: Binding) -> frozenset[str]:
    """The ids of the named parts: of a host its node and all of its GPUs, of a GPU that GPU alone.

    A host that is expected and does not answer is all of its places, which are missing.

    Raises:
        ConfigurationError: there is no such host, or no such part on it; the text says what is there instead.
    """
    return frozenset(place.id for name in names for place in _places_of(name, binding))


def _places_of(name: PartName, binding: Binding) -> Sequence[Place]:
    here = [place for place in binding.by_id.values() if place.hostname and is_same_host(place.hostname, name.host)]
    if not here:
        hosts = [node.hostname for node in binding.nodes if node.hostname is not None]
        raise ConfigurationError(
            f"{ONLY} {name}: no host of this run has that name; there are {shortlist(hosts, most=SHOWN_HOSTS) or 'none'}."
            f"{did_you_mean(name.host, hosts)}"
        )
    if name.part is None:
        return here
    found = [place for place in here if place.rank is not None and _has_identity(place, name.part)]
    if not found:
        raise ConfigurationError(f"{ONLY} {name}: {_what_is_there(name, here, binding)}")
    return found


def _has_identity(place: Place, part: str) -> bool:
    """Whether the part is the place's UUID, its serial number, or its kind and number (``gpu3``)."""
    known = (place.uuid, place.serial, f"{place.kind}{place.gpu}")
    return place.gpu is not None and part.lower() in [one.lower() for one in known if one]


def _what_is_there(name: PartName, here: Sequence[Place], binding: Binding) -> str:
    """What the host has instead, and where the part is now if another host of this run has it."""
    gpus = [place for place in here if place.gpu is not None and place.rank is not None]
    if not gpus:
        return f"{name.host} does not answer"
    shown = ", ".join(
        " ".join(filter(None, (f"{place.kind}{place.gpu}", f"serial {place.serial}" if place.serial else None, place.uuid)))
        for place in gpus
    )
    moved = [
        place for place in binding.places if place.rank is not None and name.part in (place.uuid, place.serial) and name.part
    ]
    now = f"; that part is {moved[0].on_host} now" if moved else ""
    return f"{name.host} has no such part; it has {shown}{now}"
