"""What is asked of a run as a whole, beside its limits: how long a soak, how many GPUs, at which level. Pure.

Who asks for less than was promised elsewhere may do so, and the verdict says it, or is no acceptance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pytest_gpucluster.config.settings import reaches
from pytest_gpucluster.judging.forecast import in_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpucluster.inventory.identity import Identity
    from pytest_gpucluster.places import Inventory, Place
    from pytest_gpucluster.thresholds.resolve import Profile


class Promise(Protocol):
    """Whoever says how many nodes and GPUs there should be; None where it does not say."""

    @property
    def nodes(self) -> int | None:
        """Number of nodes."""

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of each node."""


def short_soak(profile: Profile, *, level: str, soak_s: float | None) -> str | None:
    """Why a soak is no acceptance for a profile that accepts at level soak; None if it is long enough, or there is none."""
    if profile.rehearsal or profile.accept_at != "soak" or level != "soak" or soak_s is None or soak_s >= profile.accept_soak_s:
        return None
    return f"a soak of {in_words(soak_s)}, and the profile asks for {in_words(profile.accept_soak_s)}"


def changed_terms(
    profile: Profile, standard: Profile | None, expected: Inventory, promises: Mapping[str, Promise]
) -> list[str]:
    """What is asked otherwise than by the packaged profile (None: there is none for these GPUs), or less than was promised.

    Args:
        profile: the one of this run.
        standard: the packaged profile it stands for.
        expected: what this run expects.
        promises: whatever promises a shape, by its name for people.
    """
    if profile.rehearsal:
        return []
    found = [] if standard is None else [*_otherwise(profile, standard)]
    for name, here in (("nodes", expected.num_nodes), ("gpus_per_node", expected.gpus_per_node)):
        more = {
            who: promised for who, one in promises.items() if (promised := getattr(one, name)) is not None and here < promised
        }
        if more:
            who = max(more, key=lambda who: more[who])
            found.append(f"{name} {here} instead of {more[who]} ({who})")
    return found


def _otherwise(profile: Profile, standard: Profile) -> Iterable[str]:
    if not reaches(profile.accept_at, standard.accept_at):
        yield f"accept_at {profile.accept_at} instead of {standard.accept_at}"
    elif profile.accept_at == standard.accept_at == "soak" and profile.accept_soak_s < standard.accept_soak_s:
        yield f"a soak of {in_words(profile.accept_soak_s)} instead of {in_words(standard.accept_soak_s)}"
    if profile.fabric != standard.fabric:
        yield f"fabric {profile.fabric} instead of {standard.fabric}"


def doubled_gpus(places: Iterable[Place]) -> list[str]:
    """GPUs that answer at several places: two launches on one machine are not two nodes, and some GPU was never asked."""
    found: dict[str, list[str]] = {}
    for place in places:
        if place.uuid is not None:
            found.setdefault(place.uuid, []).append(place.id)
    return [f"{uuid} answers at {' and '.join(ids)}" for uuid, ids in found.items() if len(ids) > 1]


def unexpected_gpus(identities: Iterable[Identity], expected: Inventory) -> list[str]:
    """Hosts that show PyTorch more GPUs than are expected of a node: no rank was started for the rest."""
    shown = {who.hostname: who.torch_gpus for who in identities if who.torch_gpus > expected.gpus_per_node}
    return [f"{number} on {hostname}, {expected.gpus_per_node} expected" for hostname, number in sorted(shown.items())]
