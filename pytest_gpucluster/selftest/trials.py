"""The trials of a self-test: each plants one kind of fault on the run's own ranks, and sees whom the run names for it.

====================  =====================================  ==============================================================
planted               how                                    found if
====================  =====================================  ==============================================================
a slow GPU            one place is delayed in its timed      the run's straggler criteria name that place and no other
                      windows
a wrong bit           one bit of one output is flipped       the run's comparison of digests names that place
a dead, a hung rank   in a collective of all ranks           the run names that rank and no other, and goes on
====================  =====================================  ==============================================================
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging import agreement
from pytest_gpucluster.judging.failure_text import require_possible
from pytest_gpucluster.judging.siblings import FEWEST_SIBLINGS, Healthy, Siblings, compare
from pytest_gpucluster.measurements import digest
from pytest_gpucluster.selftest import planted
from pytest_gpucluster.selftest.report import DEAD, HUNG, SLOW, WRONG, NotPlanted, Trial
from pytest_gpucluster.text import counted, first_line

if TYPE_CHECKING:
    import random

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.measurements.digest import Digests
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.resolve import Threshold

    Slowdown = tuple[float, Place | None]  # per cent taken off the rate, and where; (0.0, None): a clean repeat

CALL_DEADLINE_S = 60.0
MEASURED_BY = {"bf16": "bf16_tflops", "fp32": "fp32_tflops", "copy": "hbm_bandwidth"}
"""The entries that measure the same rates, and know what a GPU can reach; ``straggler[...]`` of them compares the GPUs."""
FEWEST_PLACES = FEWEST_SIBLINGS + 1
SIGMAS = 2.0
"""A healthy GPU may be so many robust sigmas faster than its siblings; slowed down, it keeps that lead."""
DIGEST_CRITERION = "silent_corruption"
BITS_PER_ROW = 32
"""Every kind of output has at least so many bits for each row."""
KILL_AFTER_S = 0.3
"""From a rank's first sum to its death: by then the other ranks are in the middle of their sums."""
GIVE_UP_S = 20.0
HANG_DEADLINE_S = 3.0
ABSENT = "never arrived"
"""The diagnosis says this of a rank that is not in the collective in which the other ranks wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    ``operations`` holds the size of each timed operation, and ``timed`` how it is timed. Each of ``percents`` is taken off its
    rate, ``repeats`` times.
    ``not_judged`` is why no slow GPU is judged; None: it is.
    """

    operations: Mapping[str, int]
    percents: tuple[float, ...]
    repeats: int
    timed: Mapping[str, float]
    digest_size: int
    not_judged: str | None


ON_GPUS = Sizes(
    operations={"bf16": 8192, "fp32": 4096, "copy": 1 << 30},
    percents=(3.0, 5.0, 10.0),
    repeats=5,
    timed={"iterations": 10, "warmup_s": 0.005, "rest_s": 0.05},
    digest_size=1024,
    not_judged=None,
)
IN_A_REHEARSAL = Sizes(
    operations={"bf16": 256, "copy": 1 << 22},
    percents=(50.0,),
    repeats=2,
    timed={"iterations": 5, "warmup_s": 0.0, "rest_s": 0.0},
    digest_size=64,
    not_judged="the cores of a CPU share too much",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The places that answer, and the limits of this run; ``random`` is seeded, so that a self-test can be repeated."""

    cluster: Cluster
    places: tuple[Place, ...]
    criteria: Mapping[str, Threshold]
    sizes: Sizes
    random: random.Random

    def victims(self) -> Iterator[Place]:
        """The places in random order, again and again: each is a victim as often as any other."""
        order = self.random.sample(self.places, len(self.places))
        while True:
            yield from order

    def run(self, function: Callable[..., Any], *, per: str, deadline_s: float = CALL_DEADLINE_S, **kwargs: Any) -> Results:
        """``cluster.run`` at all places that answer."""
        return self.cluster.run(function, per=per, places=self.places, deadline_s=deadline_s, **kwargs)


def ids(places: Iterable[Place]) -> tuple[str, ...]:
    """The places' ids."""
    return tuple(place.id for place in places)


# --- a slow GPU ---


def try_slow_gpu(setup: Setup) -> list[Trial | NotPlanted]:
    """Take each percentage off the rate of one place after the other, with as many clean repeats."""
    if len(setup.places) < FEWEST_PLACES:
        why = f"it takes {FEWEST_PLACES} places to say which is slow, and {len(setup.places)} answer"
        return [NotPlanted(kind=SLOW, why=why)]
    results: list[Trial | NotPlanted] = []
    for operation in setup.sizes.operations:
        criterion = f"straggler[{MEASURED_BY[operation]}]"
        threshold = setup.criteria.get(criterion)
        if threshold is None:
            results.append(NotPlanted(kind=SLOW, why=f"{operation}: this run's thresholds have no {criterion}"))
        else:
            slowdowns = _slowdowns(setup)
            measured = _measure(setup, operation, slowdowns)
            require_possible_rates(measured, setup.criteria.get(MEASURED_BY[operation]))
            results += slow_trials(measured, slowdowns, operation=operation, threshold=threshold, sizes=setup.sizes)
    return results


def _slowdowns(setup: Setup) -> list[Slowdown]:
    percents = [percent for percent in (0.0, *setup.sizes.percents) for _ in range(setup.sizes.repeats)]
    setup.random.shuffle(percents)  # so that no percentage has all the cold or all the hot repeats
    victims = setup.victims()
    return [(percent, next(victims) if percent else None) for percent in percents]


def _measure(setup: Setup, operation: str, slowdowns: Sequence[Slowdown]) -> Results:
    plants = [
        {} if victim is None else {"delay_percent": delay_percent(lost), "rank": victim.rank} for lost, victim in slowdowns
    ]
    recipe: dict[str, Any] = {"operation": operation, "size": setup.sizes.operations[operation], **setup.sizes.timed}
    return setup.run(planted.rates_with_delays, per="gpu", plants=plants, **recipe)


def require_possible_rates(measured: Results, threshold: Threshold | None) -> None:
    """Refuse rates by which nobody finds who is slow; ``threshold`` is the entry that measures the same.

    Raises:
        MeasurementError: a rate is more than the hardware can, or a place was not measured.
    """
    if threshold is None:
        return
    bound = threshold.best_possible(gpus=1, cluster={})
    for place, rates in measured.each(lambda found: found.rates).items():
        for rate in rates:
            require_possible(rate, bound, what=f"{threshold.key}, planted in {place}")


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
        own: dict[str, Any] = {"what": "nothing planted", "victim": None, "expected": (), "not_judged": sizes.not_judged}
        if victim is not None:
            usual = statistics.median(rates_at[victim][repeat] for repeat in clean)
            lost_percent = 100 * (1 - rates[victim] / usual)
            alike = [place for place, model in models.items() if model == models[victim]]
            own = {
                "what": f"{percent:g} % slow in {operation}",
                "victim": victim.id,
                "expected": (victim.id,),
                "measured": {"delay_us": round(measured[victim].delay_us[number], 2), "lost_percent": round(lost_percent, 2)},
                "not_judged": sizes.not_judged or _why_not_judged(percent, threshold, alike),
            }
        named = ids(stragglers(threshold, rates, models))
        trials.append(Trial(kind=SLOW, where=operation, named=named, criterion=threshold.key, **own))
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
        return f"{counted(len(alike), 'GPU')} of one model: too few to say which is slow"
    promised = promised_percent(threshold, alike)
    return None if percent >= promised else f"{threshold.key} promises {promised:.3g} % and more"


# --- a wrong bit ---


def try_wrong_bit(setup: Setup) -> list[Trial | NotPlanted]:
    """Flip a bit in each kind of output once, at one place after the other; then repeat without a flip."""
    if len(setup.places) < 2:
        return [NotPlanted(kind=WRONG, why="a single place has nothing to be compared with")]
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
        else:
            expected = ids([victim] if len(alike) >= agreement.FEWEST_TO_NAME else alike)
            named = ids(place for place, kinds in suspected.items() if kind in kinds)
            planted_at: dict[str, Any] = {"where": kind, "victim": victim.id, "expected": expected, "named": named}
            results.append(Trial(kind=WRONG, what="one wrong bit", criterion=DIGEST_CRITERION, **planted_at))
    return results


def suspicions(computed: Mapping[Place, Digests]) -> dict[Place, dict[str, str]]:
    """By place, the kinds of output whose digest differs, each with the reason to suspect this place."""
    models = {place: found.model for place, found in computed.items()}
    return agreement.suspicions({place: found.digests for place, found in computed.items()}, models)


def _compute(setup: Setup, *, seed: int, flips: list[dict[str, Any]]) -> dict[Place, Digests]:
    results = setup.run(digest.digests, per="gpu", rounds=1, size=setup.sizes.digest_size, seed=seed, flips=flips)
    return results.each(lambda found: found)


# --- a dead and a hung rank ---


def try_killed_rank(setup: Setup) -> list[Trial | NotPlanted]:
    """Kill one rank in the middle of sums over all ranks."""
    return _try_fault(setup, DEAD, killed_trial, planted.die_among_sums, after_s=KILL_AFTER_S, give_up_s=GIVE_UP_S)


def try_hung_rank(setup: Setup) -> list[Trial | NotPlanted]:
    """Keep one rank from entering a sum over all ranks."""
    return _try_fault(setup, HUNG, hung_trial, planted.miss_the_sum, deadline_s=HANG_DEADLINE_S)


def killed_trial(victim: Place, error: MeasurementError | None, *, detected_s: float, recovered_s: float) -> Trial:
    """Found if the run names the victim alone, as one that died.

    Args:
        victim: the killed rank's place.
        error: the error of the call at that place.
        detected_s: seconds from the kill to the call's return.
        recovered_s: seconds that the next collective of all ranks took.
    """
    return Trial(
        kind=DEAD,
        what="a dead rank",
        fault=f"reported as {error.kind}, not as died" if error is not None and error.kind != "died" else None,
        how=f"in {detected_s:.2g} s (the next collective after {recovered_s:.2g} s)",
        **_victim_fields(victim, error, detected_s, recovered_s),
    )


def hung_trial(victim: Place, error: MeasurementError | None, *, detected_s: float, recovered_s: float) -> Trial:
    """Found if the run names the victim alone, as the one that the other ranks waited for.

    Args:
        victim: the hung rank's place.
        error: the error of the call at that place.
        detected_s: seconds from the call's start to its return.
        recovered_s: seconds that the next collective of all ranks took.
    """
    words = first_line(str(error))
    return Trial(
        kind=HUNG,
        what="a hung rank",
        fault=f"reported as: {words}" if error is not None and ABSENT not in words else None,
        how=f"at its deadline of {HANG_DEADLINE_S:g} s, named",
        **_victim_fields(victim, error, detected_s, recovered_s),
    )


def _victim_fields(victim: Place, error: MeasurementError | None, detected_s: float, recovered_s: float) -> dict[str, Any]:
    return {
        "victim": victim.id,
        "expected": (victim.id,),
        "named": ids(error.culprits if error is not None else ()),
        "measured": {"seconds": round(detected_s, 3), "next_collective_s": round(recovered_s, 3)},
    }


def _try_fault(
    setup: Setup, kind: str, judge: Callable[..., Trial], function: Callable[..., Any], **recipe: float
) -> list[Trial | NotPlanted]:
    """Make the call with the fault, and then a sound one; ``after_s`` into the call the fault begins.

    Raises:
        MeasurementError: a collective without a fault does not work.
    """
    if len(setup.places) < 2:
        return [NotPlanted(kind=kind, why="a collective takes two ranks, and one answers")]
    victim = next(setup.victims())
    _sum_up(setup)  # creates the process group, so that only the fault is timed
    began_s = time.monotonic()
    results = setup.run(function, per="cluster", victim=victim.rank, **recipe)
    ended_s = time.monotonic()
    _sum_up(setup)
    detected_s, recovered_s = ended_s - began_s - recipe.get("after_s", 0.0), time.monotonic() - ended_s
    return [judge(victim, results.errors.get(victim), detected_s=detected_s, recovered_s=recovered_s)]


def _sum_up(setup: Setup) -> None:
    counts = set(setup.run(planted.add_up, per="cluster").each(float).values())
    if counts != {float(len(setup.places))}:
        raise MeasurementError(f"a sum over {counted(len(setup.places), 'rank')} counted {', '.join(map(str, sorted(counts)))}")
