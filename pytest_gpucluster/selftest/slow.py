"""A slow GPU: delays inside the timed windows of one place; found: the run's straggler criteria name it and nobody else."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.selftest import planted, straggling
from pytest_gpucluster.selftest.assessment import SLOW, Trial, Unshown
from pytest_gpucluster.selftest.site import Effort, Site, ids

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.selftest.site import Outcome

Plant = tuple[float, "Place | None"]
"""Per cent of the rate that is taken away, and where; ``(0.0, None)`` plants nothing."""


def slow(site: Site) -> Outcome:
    """Each percentage of the effort, at one place after the other, and as many repeats without a plant."""
    if len(site.places) < straggling.FEWEST:
        why = f"it takes {straggling.FEWEST} places to say which is slow, and {len(site.places)} answer"
        return [], [Unshown(kind=SLOW, why=why)]
    trials: list[Trial] = []
    unshown: list[Unshown] = []
    for operation in site.effort.operations:
        judge = straggling.judge_of(operation, site.criteria)
        if judge is None:
            why = f"{operation}: this run's thresholds have no {straggling.CRITERIA[operation]}"
            unshown.append(Unshown(kind=SLOW, why=why))
            continue
        plants = _plants(site)
        trials += assessed(_measure(site, operation, plants), plants, operation=operation, judge=judge, effort=site.effort)
    return trials, unshown


def _plants(site: Site) -> list[Plant]:
    percents = [percent for percent in (0.0, *site.effort.percents) for _ in range(site.effort.repeats)]
    site.chance.shuffle(percents)  # no percentage has the cold or the hot end to itself
    victims = site.victims()
    return [(percent, next(victims) if percent else None) for percent in percents]


def _measure(site: Site, operation: str, plants: list[Plant]) -> Results:
    effort = site.effort
    return site.run(
        planted.rates_with_delays,
        per="gpu",
        operation=operation,
        size=effort.operations[operation],
        iterations=effort.iterations,
        warmup_s=effort.warmup_s,
        rest_s=effort.rest_s,
        plants=[{} if at is None else {"delay_percent": delay_percent(lost), "rank": at.rank} for lost, at in plants],
    )


def delay_percent(lost_percent: float) -> float:
    """How much longer an operation takes, in per cent of its time, whose rate is ``lost_percent`` lower."""
    return 100 * lost_percent / (100 - lost_percent)


def assessed(measured: Results, plants: list[Plant], *, operation: str, judge: straggling.Judge, effort: Effort) -> list[Trial]:
    """Whom the run's comparison names in each repeat.

    Raises:
        MeasurementError: a place was not measured.
    """
    repeats = measured.each(lambda found: found.rates)
    models = measured.each(lambda found: found.device)
    clean = [number for number, (_, victim) in enumerate(plants) if victim is None]
    usual = {place: statistics.median(rates[number] for number in clean) for place, rates in repeats.items()}
    trials = []
    for number, (percent, victim) in enumerate(plants):
        rates = {place: found[number] for place, found in repeats.items()}
        trial = Trial(
            kind=SLOW,
            what=f"{percent:g} % slow in {operation}" if victim is not None else "nothing planted",
            where=operation,
            victim=None,
            should_name=(),
            named=ids(judge.names(rates, models)),
            criterion=judge.criterion,
            unjudged=effort.unjudged,
        )
        if victim is not None:
            lost_percent = 100 * (1 - rates[victim] / usual[victim])
            trial = replace(
                trial,
                victim=victim.id,
                should_name=(victim.id,),
                measured={"delay_us": round(measured[victim].delay_us[number], 2), "lost_percent": round(lost_percent, 2)},
                unjudged=effort.unjudged or _unjudged(percent, judge, [*models.values()].count(models[victim])),
            )
        trials.append(trial)
    return trials


def _unjudged(percent: float, judge: straggling.Judge, alike: int) -> str | None:
    """Why this run may miss such a plant without being at fault."""
    if alike < straggling.FEWEST:
        return f"{alike} GPUs of one model are too few to say which is slow"
    promised = judge.promised_percent
    return None if percent >= promised else f"{judge.criterion} promises {promised:.3g} % and more"
