"""Delay one place inside its timed windows. Found: the run's straggler criteria name that place and no other."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.siblings import FEWEST_SIBLINGS, Healthy, Siblings, compare
from pytest_gpucluster.selftest import planted
from pytest_gpucluster.selftest.report import SLOW, NotPlanted, Trial
from pytest_gpucluster.selftest.setup import Setup, Sizes, ids

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.resolve import Threshold

    Slowdown = tuple[float, Place | None]  # per cent taken off the rate, and where; (0.0, None): a clean repeat

CRITERIA = {
    "bf16": "straggler[bf16_tflops]",
    "fp32": "straggler[fp32_tflops]",
    "copy": "straggler[hbm_bandwidth]",
}
"""The entries that compare the GPUs' rates, by the operation that the self-test slows down."""
FEWEST_PLACES = FEWEST_SIBLINGS + 1
SIGMAS = 2.0
"""A healthy GPU may be so many robust sigmas faster than its siblings; slowed down, it keeps that lead."""


def try_slow_gpu(setup: Setup) -> list[Trial | NotPlanted]:
    """Take each percentage off the rate of one place after the other, with as many clean repeats."""
    if len(setup.places) < FEWEST_PLACES:
        why = f"it takes {FEWEST_PLACES} places to say which is slow, and {len(setup.places)} answer"
        return [NotPlanted(kind=SLOW, why=why)]
    results: list[Trial | NotPlanted] = []
    for operation in setup.sizes.operations:
        threshold = setup.criteria.get(CRITERIA[operation])
        if threshold is None:
            why = f"{operation}: this run's thresholds have no {CRITERIA[operation]}"
            results.append(NotPlanted(kind=SLOW, why=why))
        else:
            slowdowns = _slowdowns(setup)
            measured = _measure(setup, operation, slowdowns)
            results += slow_trials(measured, slowdowns, operation=operation, threshold=threshold, sizes=setup.sizes)
    return results


def _slowdowns(setup: Setup) -> list[Slowdown]:
    percents = [percent for percent in (0.0, *setup.sizes.percents) for _ in range(setup.sizes.repeats)]
    setup.random.shuffle(percents)  # so that no percentage has all the cold or all the hot repeats
    victims = setup.victims()
    return [(percent, next(victims) if percent else None) for percent in percents]


def _measure(setup: Setup, operation: str, slowdowns: Sequence[Slowdown]) -> Results:
    sizes = setup.sizes
    return setup.run(
        planted.rates_with_delays,
        per="gpu",
        operation=operation,
        size=sizes.operations[operation],
        iterations=sizes.iterations,
        warmup_s=sizes.warmup_s,
        rest_s=sizes.rest_s,
        plants=[
            {} if victim is None else {"delay_percent": delay_percent(lost), "rank": victim.rank} for lost, victim in slowdowns
        ],
    )


def delay_percent(lost_percent: float) -> float:
    """How much longer an operation takes, in per cent of its time, if its rate is ``lost_percent`` lower."""
    return 100 * lost_percent / (100 - lost_percent)


def slow_trials(
    measured: Results, slowdowns: Sequence[Slowdown], *, operation: str, threshold: Threshold, sizes: Sizes
) -> list[Trial]:
    """One trial for each repeat: the places that the run's comparison names in it.

    Raises:
        MeasurementError: a place was not measured.
    """
    rates_at = measured.each(lambda found: found.rates)
    models = measured.each(lambda found: found.device)
    clean = [number for number, (_, victim) in enumerate(slowdowns) if victim is None]
    trials = []
    for number, (percent, victim) in enumerate(slowdowns):
        rates = {place: found[number] for place, found in rates_at.items()}
        named = ids(stragglers(threshold, rates, models))
        if victim is None:
            trials.append(
                Trial(
                    kind=SLOW,
                    what="nothing planted",
                    where=operation,
                    victim=None,
                    expected=(),
                    named=named,
                    criterion=threshold.key,
                    not_judged=sizes.not_judged,
                )
            )
            continue
        usual = statistics.median(rates_at[victim][repeat] for repeat in clean)
        lost_percent = 100 * (1 - rates[victim] / usual)
        alike = [place for place, model in models.items() if model == models[victim]]
        trials.append(
            Trial(
                kind=SLOW,
                what=f"{percent:g} % slow in {operation}",
                where=operation,
                victim=victim.id,
                expected=(victim.id,),
                named=named,
                measured={"delay_us": round(measured[victim].delay_us[number], 2), "lost_percent": round(lost_percent, 2)},
                criterion=threshold.key,
                not_judged=sizes.not_judged or _why_not_judged(percent, threshold, alike),
            )
        )
    return trials


def stragglers(threshold: Threshold, rates: Mapping[Place, float], models: Mapping[Place, str]) -> list[Place]:
    """The places that this run would call stragglers; places of one model should be alike."""
    limit_percent = threshold.limit(gpus=1, cluster={}).value
    siblings = Siblings(rates=rates, models=models, hosts={place: place.node for place in rates})
    found = compare(siblings, Healthy(**threshold.recipe), limit_percent=limit_percent)
    return [place for place, one in found.items() if one.shortfall.is_named(limit_percent)]


def promised_percent(threshold: Threshold, alike: Collection[Place]) -> float:
    """The smallest loss of its own rate by which this run finds every one of these GPUs, however fast the GPU was."""
    healthy = Healthy(**threshold.recipe)
    explained_percent = healthy.lowest_percent(len(alike), len({place.node for place in alike}))
    most_percent = max(threshold.limit(gpus=1, cluster={}).value, explained_percent)
    return most_percent + 100 * SIGMAS * healthy.floor_spread


def _why_not_judged(percent: float, threshold: Threshold, alike: Collection[Place]) -> str | None:
    """Why this run may miss such a fault; None if it must find it."""
    if len(alike) < FEWEST_PLACES:
        return f"{len(alike)} GPUs of one model are too few to say which is slow"
    promised = promised_percent(threshold, alike)
    return None if percent >= promised else f"{threshold.key} promises {promised:.3g} % and more"
