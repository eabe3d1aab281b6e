"""A wrong bit: one bit of one output flipped at one place; found: the run's comparison of digests points there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging import agreement
from pytest_gpucluster.measurements import digest
from pytest_gpucluster.selftest.assessment import WRONG, Trial, Unshown
from pytest_gpucluster.selftest.site import Site, ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.measurements.digest import Digests
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.selftest.site import Outcome

CRITERION = "silent_corruption"
BITS_A_ROW = 32
"""No kind of output has fewer bits than so many for each row."""


def wrong(site: Site) -> Outcome:
    """Each kind of output once, at one place after the other, and once all of them without a flip."""
    if len(site.places) < 2:
        return [], [Unshown(kind=WRONG, why="one place alone has nothing to be compared with")]
    victims = site.victims()
    at = {kind: next(victims) for kind in digest.KINDS}
    bits = BITS_A_ROW * site.effort.digest_size
    flips = [{"kind": kind, "bit": site.chance.randrange(bits), "rank": victim.rank} for kind, victim in at.items()]
    seed = site.chance.randrange(1 << 31)
    flipped, clean = (_compute(site, seed=seed, flips=some) for some in (flips, []))
    trials, unshown = assessed(flipped, at)
    named = ids(place for place, told in suspicions(clean).items() if told)
    return [*trials, Trial(kind=WRONG, what="nothing planted", victim=None, should_name=(), named=named)], unshown


def assessed(computed: Mapping[Place, Digests], at: Mapping[str, Place]) -> Outcome:
    """Whom the run's comparison names for each kind of output, of which one bit was flipped ``at`` a place."""
    against = suspicions(computed)
    trials: list[Trial] = []
    unshown: list[Unshown] = []
    for kind, victim in at.items():
        own = computed[victim]
        alike = [place for place, found in computed.items() if found.model == own.model and kind in found.digests]
        if kind in own.excluded or len(alike) == 1:
            unshown.append(
                Unshown(kind=WRONG, why=f"{kind}: {own.excluded.get(kind) or f'{victim.id} is the only {own.model}'}")
            )
            continue
        trials.append(
            Trial(
                kind=WRONG,
                what="one wrong bit",
                where=kind,
                victim=victim.id,
                should_name=ids([victim] if len(alike) >= agreement.FEWEST_TO_NAME else alike),
                named=ids(place for place, told in against.items() if kind in told),
                criterion=CRITERION,
            )
        )
    return trials, unshown


def suspicions(computed: Mapping[Place, Digests]) -> dict[Place, dict[str, str]]:
    """What there is against each place, by kind of output."""
    models = {place: found.model for place, found in computed.items()}
    return agreement.suspicions({place: found.digests for place, found in computed.items()}, models)


def _compute(site: Site, *, seed: int, flips: list[dict[str, Any]]) -> dict[Place, Digests]:
    results = site.run(digest.digests, per="gpu", rounds=1, size=site.effort.digest_size, seed=seed, flips=flips)
    return results.each(lambda found: found)
