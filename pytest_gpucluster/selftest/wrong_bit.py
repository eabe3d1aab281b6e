"""Flip one bit of one output at one place. Found: the run's comparison of digests names that place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging import agreement
from pytest_gpucluster.measurements import digest
from pytest_gpucluster.selftest.report import WRONG, NotPlanted, Trial
from pytest_gpucluster.selftest.setup import Setup, ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.measurements.digest import Digests
    from pytest_gpucluster.places import Place

CRITERION = "silent_corruption"
BITS_PER_ROW = 32
"""Every kind of output has at least so many bits for each row."""


def try_wrong_bit(setup: Setup) -> list[Trial | NotPlanted]:
    """Flip a bit in each kind of output once, at one place after the other; then repeat without a flip."""
    if len(setup.places) < 2:
        return [NotPlanted(kind=WRONG, why="one place alone has nothing to be compared with")]
    victims = setup.victims()
    victim_of = {kind: next(victims) for kind in digest.KINDS}
    bits = BITS_PER_ROW * setup.sizes.digest_size
    flips = [{"kind": kind, "bit": setup.random.randrange(bits), "rank": place.rank} for kind, place in victim_of.items()]
    seed = setup.random.randrange(1 << 31)
    flipped = _compute(setup, seed=seed, flips=flips)
    clean = _compute(setup, seed=seed, flips=[])
    named = ids(place for place, kinds in suspicions(clean).items() if kinds)
    clean_trial = Trial(kind=WRONG, what="nothing planted", victim=None, expected=(), named=named)
    return [*wrong_trials(flipped, victim_of), clean_trial]


def wrong_trials(computed: Mapping[Place, Digests], victim_of: Mapping[str, Place]) -> list[Trial | NotPlanted]:
    """One trial for each kind of output: the places that the run's comparison names."""
    suspected = suspicions(computed)
    results: list[Trial | NotPlanted] = []
    for kind, victim in victim_of.items():
        own = computed[victim]
        alike = [place for place, found in computed.items() if found.model == own.model and kind in found.digests]
        if kind in own.excluded or len(alike) == 1:
            why = own.excluded.get(kind) or f"{victim.id} is the only {own.model}"
            results.append(NotPlanted(kind=WRONG, why=f"{kind}: {why}"))
            continue
        results.append(
            Trial(
                kind=WRONG,
                what="one wrong bit",
                where=kind,
                victim=victim.id,
                expected=ids([victim] if len(alike) >= agreement.FEWEST_TO_NAME else alike),
                named=ids(place for place, kinds in suspected.items() if kind in kinds),
                criterion=CRITERION,
            )
        )
    return results


def suspicions(computed: Mapping[Place, Digests]) -> dict[Place, dict[str, str]]:
    """By place, the kinds of output whose digest differs, each with the reason to suspect this place."""
    models = {place: found.model for place, found in computed.items()}
    return agreement.suspicions({place: found.digests for place, found in computed.items()}, models)


def _compute(setup: Setup, *, seed: int, flips: list[dict[str, Any]]) -> dict[Place, Digests]:
    results = setup.run(digest.digests, per="gpu", rounds=1, size=setup.sizes.digest_size, seed=seed, flips=flips)
    return results.each(lambda found: found)
