"""How often repeats are judged wrong, or left open: by the rule of judging/noise.py, and by the one before it. No GPU.

    python3 benchmarks/too_close_to_call.py [--healthy 10000] [--slow 30000] [--seed 30] [--second-look] [--only CRITERION ...]

For each entry with `noise` it draws rounds of repeats as they were measured (MODELS), lets both rules judge them, and counts.
A healthy part has the measured median; a slow one the same distribution with its median 5 % below the limit. Prints a table:
how many healthy parts are left open, how many fail, how many slow parts are accepted, each before and now; the rounds that
a healthy part takes now; and how many runs with 16 such parts both looks leave open (95 % interval). The same seed gives the
same table. Takes some minutes.

``--second-look`` prints another table: what a second look at the end of the run makes of it (judging/second_chance.py). A part
that the first look leaves open is measured and judged once more, and that decides.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

from pytest_gpucluster.judging.noise import Repeats, doubt, settle
from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.lint import load

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW = 0.95
"""The median of a slow part, as a share of the limit."""
SIGMAS = 2.563
"""From the 10th to the 90th percentile of a normal distribution."""
OPEN, PASSED, FAILED = "open", "passed", "failed"
LINKS = 16
"""Parts of a run that are judged by one entry and its other direction: 8 GPUs, host to device and device to host."""
SLICES = 10
"""Repeats of bf16_sustained, whose recipe has seconds: the last half of 20 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How the repeats of a healthy part scatter; rates are shares of the undisturbed median.

    ``healthy``: the healthy median over the limit. ``spread``: from the 10th to the 90th percentile while nothing disturbs.
    ``low``, ``low_share``: so many repeats are at this rate instead, each by chance. ``copies``: a repeat is a span of so many
    copies after one that is not timed; ``disturbed`` of all copies lie in bursts of :data:`BURST`, at rates from 0.5 to 0.95.
    ``took_s``: how long a round takes; a host link of two GPUs by default.
    """

    healthy: float
    spread: float
    low: float = 1.0
    low_share: float = 0.0
    copies: int = 0
    disturbed: float = 0.0
    took_s: float = 4.4

    def draw(self, count: int, chance: random.Random) -> list[float]:
        """One round of repeats."""
        if not self.copies:
            return [self._undisturbed(chance) * (self.low if chance.random() < self.low_share else 1.0) for _ in range(count)]
        is_in_burst, rates = chance.random() < self.disturbed, []
        begins = self.disturbed / ((1 - self.disturbed) * BURST)
        for _ in range(count):
            times = []
            for _ in range(1 + self.copies):
                times.append(1 / (chance.uniform(0.5, 0.95) if is_in_burst else self._undisturbed(chance)))
                is_in_burst = chance.random() < (1 - 1 / BURST if is_in_burst else begins)
            rates.append(self.copies / sum(times[1:]))
        return rates

    def _undisturbed(self, chance: random.Random) -> float:
        return chance.gauss(1.0, self.spread / SIGMAS)


BURST = 4
"""Copies of 512 MiB in a burst on average. On two H100 of a shared host (2026-11-25) copies of 256 MiB were as if in bursts of
8: with 8 % of them in bursts this gives the 7 % of copies below 50 GB/s that were measured, 26 % of windows of 30 copies
undecided by the rule before, 10 % by the interval of the median, and none of 400 copies. With 20 % it gives the spreads of 11
to 31 % of the host that was INCOMPLETE in 4 runs of 4."""
SHARED: dict[str, Any] = {"copies": 2, "disturbed": 0.08}
BUSY: dict[str, Any] = {"copies": 2, "disturbed": 0.2}
BEFORE = 4, 10
"""Copies of a span and spans of a round until November 2026."""
MODELS = {
    # repeats as widest in docs/measuring.md, "Repeatability"; medians of 2 H100 (bf16, hbm, links) and of an H200
    "bf16_tflops": Model(healthy=778 / 700, spread=0.0128),
    "bf16_sustained": Model(healthy=661 / 600, spread=0.03),
    "fp16_tflops": Model(healthy=768 / 700, spread=0.0232),
    "fp8_tflops": Model(healthy=1585 / 1200, spread=0.02, low=1335 / 1585, low_share=0.2),
    "tf32_tflops": Model(healthy=417 / 330, spread=0.02, low=375 / 417, low_share=0.3),
    "fp32_tflops": Model(healthy=51.2 / 45, spread=0.0018),
    "fp64_tflops": Model(healthy=55.7 / 48, spread=0.0211),
    "int8_tops": Model(healthy=958 / 800, spread=0.0138),
    "hbm_bandwidth": Model(healthy=3.053 / 3, spread=0.0019),
    "host_to_device": Model(healthy=54.8 / 50, spread=0.006, **SHARED),
    "device_to_host": Model(healthy=54.65 / 50, spread=0.006, **SHARED),
    "host_to_device, busy host": Model(healthy=54.5 / 50, spread=0.006, **BUSY),
    "device_to_host, busy host": Model(healthy=54.0 / 50, spread=0.006, **BUSY),
    "host_to_device, busy host of 8 GPUs": Model(healthy=54.5 / 50, spread=0.006, took_s=17.6, **BUSY),
    "host_to_device_all": Model(healthy=39 / 30, spread=0.15, **SHARED),
    "device_to_host_all": Model(healthy=33 / 25, spread=0.15, **SHARED),
    # nobody measured a limit and its repeats on such a shape: as far from its limit, and as wide, as its noise
    "busbw[all_reduce]": Model(healthy=480 / 400, spread=0.05),
    "busbw[all_gather]": Model(healthy=360 / 300, spread=0.05),
    "busbw[reduce_scatter]": Model(healthy=360 / 300, spread=0.05),
    "busbw[all_to_all]": Model(healthy=1.06, spread=0.05),
    "busbw[send_recv]": Model(healthy=1.06, spread=0.05),
    "inter_node_busbw[all_reduce]": Model(healthy=1.06, spread=0.05),
    "inter_node_busbw[all_gather]": Model(healthy=1.06, spread=0.05),
    "inter_node_busbw[reduce_scatter]": Model(healthy=1.06, spread=0.05),
    "inter_node_busbw[all_to_all]": Model(healthy=1.06, spread=0.05),
    "domain_busbw[all_reduce]": Model(healthy=1.06, spread=0.05),
}
"""``busbw[broadcast]`` has a limit on no shape. The limits of all_to_all and send_recv are those of 4 GPUs, less 6 %."""

LIMIT = Limit(kind="above", value=1.0, unit="x")


Rule = Callable[[Callable[[int], list[float]], int, float, float], tuple[str, int]]
"""Judges a part: what draws a round of so many repeats, how many, the noise, seconds of a round."""


def judged_now(draw: Callable[[int], list[float]], count: int, allowed: float, took_s: float) -> tuple[str, int]:
    """The outcome by the rule of judging/noise.py, and how many rounds it took."""

    def measure() -> Repeats:
        samples = draw(count)
        return Repeats(value=statistics.median(samples), samples=samples, again=measure, took_s=took_s)

    settled = settle(measure(), limit=LIMIT, allowed=allowed)
    outcome = OPEN if settled.doubt is not None else PASSED if LIMIT.holds(settled.value) else FAILED
    return outcome, len(settled.rounds)


def judged_twice(draw: Callable[[int], list[float]], count: int, allowed: float, took_s: float) -> tuple[str, int]:
    """The outcome by the rule of judging/noise.py, with a second look at what it leaves open; and how many rounds both took."""
    outcome, rounds = judged_now(draw, count, allowed, took_s)
    if outcome != OPEN:
        return outcome, rounds
    again, more = judged_now(draw, count, allowed, took_s)
    return again, rounds + more


def judged_before(draw: Callable[[int], list[float]], count: int, allowed: float, _took_s: float) -> tuple[str, int]:
    """The outcome by the rule until November 2026: a second measurement of three times the repeats, judged like the first."""
    for turn, size in enumerate((count, 3 * count), start=1):
        samples = draw(size)
        value = statistics.median(samples)
        if doubt(Repeats(value=value, samples=samples), limit=LIMIT, allowed=allowed) is None:
            return PASSED if LIMIT.holds(value) else FAILED, turn
    return OPEN, 2


def outcomes(  # noqa: PLR0913 -- a simulation and its terms
    rule: Rule, model: Model, median: float, *, count: int, allowed: float, runs: int, seed: int
) -> tuple[Counter[str], float]:
    """How often each outcome comes for a part with this median over the limit, and the mean number of rounds."""
    chance = random.Random(seed)
    scale = median / statistics.median(model.draw(100_001, chance))
    found: Counter[str] = Counter()
    rounds = 0
    for _ in range(runs):
        outcome, took = rule(lambda size: [scale * rate for rate in model.draw(size, chance)], count, allowed, model.took_s)
        found[outcome] += 1
        rounds += took
    return found, rounds / runs


def row(name: str, *, runs: tuple[int, int], seed: int) -> list[str]:
    """One row of the table; ``runs``: of healthy parts and of slow ones."""
    count, allowed = repeats_of(name.split(",", maxsplit=1)[0])
    now = MODELS[name]
    before, count_before = (replace(now, copies=BEFORE[0]), BEFORE[1]) if now.copies else (now, count)
    ways: list[tuple[Rule, Model, int]] = [(judged_before, before, count_before), (judged_now, now, count)]
    healthy, slow = (
        [outcomes(rule, model, median, count=size, allowed=allowed, runs=number, seed=seed) for rule, model, size in ways]
        for median, number in ((now.healthy, runs[0]), (SLOW, runs[1]))
    )
    cells = [f"`{name}`", str(count), f"{100 * allowed:g}"]
    cells += [f"{found[outcome]}" for outcome in (OPEN, FAILED) for found, _ in healthy]
    cells += [f"{found[PASSED]}" for found, _ in slow]
    return [*cells, f"{healthy[1][1]:.2f}", of_10_000_runs(healthy[1][0][OPEN], runs[0])]


NEAR_SHARES = (0.98, 1.0)
"""Medians over the limit of parts that nobody may accept by luck either: 2 % below the limit, and just at it."""


def row_of_second_look(name: str, *, runs: tuple[int, int], seed: int) -> list[str]:
    """One row of the second table: healthy parts left open by one look and by both, then slow parts accepted by each.

    Those near the limit are as many as the healthy ones: each takes all rounds.
    """
    count, allowed = repeats_of(name.split(",", maxsplit=1)[0])
    model, cells = MODELS[name], [f"`{name}`"]
    near = ((share, runs[0], PASSED) for share in NEAR_SHARES)
    for median, number, counted in ((model.healthy, runs[0], OPEN), (SLOW, runs[1], PASSED), *near):
        for rule in (judged_now, judged_twice):
            found, _ = outcomes(rule, model, median, count=count, allowed=allowed, runs=number, seed=seed)
            cells.append(f"{found[counted]}")
    return cells


def of_10_000_runs(number: int, of: int) -> str:
    """The interval of runs with :data:`LINKS` parts that both looks leave open, where one look left ``number`` of ``of`` open.

    Looks, and the parts of a run, scatter independently here: a run is open with ``LINKS`` x share^2.
    """
    return " to ".join(f"{1e4 * LINKS * share**2:.2f}" for share in share_of(number, of))


def share_of(number: int, of: int) -> tuple[float, float]:
    """The interval that has the true share with 95 %, where ``number`` of so many were counted (Clopper and Pearson, 1934)."""

    def at_most(most: int, share: float) -> float:
        """The probability of so many or fewer."""
        ways = [math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1) for k in range(most + 1)]
        return sum(math.exp(way + k * math.log(share) + (of - k) * math.log1p(-share)) for k, way in enumerate(ways))

    def where(most: int, tail: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(most, middle) > tail else (low, middle)
        return low

    return where(number - 1, 0.975) if number else 0.0, where(number, 0.025) if number < of else 1.0


def repeats_of(key: str) -> tuple[int, float]:
    """The repeats of one round by the entry's recipe, and its noise."""
    file = load(None)
    entry = file.criteria(file.profiles["h100-sxm"])[key]
    counts = [entry.recipe[name] for name in ("bursts", "repeats", "iterations") if name in entry.recipe]
    assert entry.noise is not None
    return int(str(counts[0])) if counts else SLICES, entry.noise


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--healthy", type=int, default=10_000, help="healthy parts for each entry")
    parser.add_argument("--slow", type=int, default=30_000, help="parts 5 %% below the limit for each entry")
    parser.add_argument("--seed", type=int, default=30)
    parser.add_argument("--second-look", action="store_true", help="the table of what a second look makes of it")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="CRITERION")
    given = parser.parse_args(arguments)
    print(f"of {given.healthy} healthy and {given.slow} slow parts, seed {given.seed}\n")
    head = ["criterion", "repeats", "noise, %", "healthy open before", "now", "healthy failed before", "now"]
    head += ["slow accepted before", "now", "rounds of a healthy part", "runs open by both looks, of 10,000"]
    if given.second_look:
        head = ["criterion", "healthy open, one look", "both"]
        looks = [(share, look) for share in (SLOW, *NEAR_SHARES) for look in ("one look", "both")]
        head += [f"{100 * (1 - share):.0f} % below accepted, {look}" for share, look in looks]
    rows = row_of_second_look if given.second_look else row
    for cells in (head, ["---"] * len(head)):
        print(f"| {' | '.join(cells)} |")
    for name in given.only:
        print(f"| {' | '.join(rows(name, runs=(given.healthy, given.slow), seed=given.seed))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
