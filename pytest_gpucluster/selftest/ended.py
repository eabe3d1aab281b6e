"""A dead and a hung rank in a collective of all ranks; found: the run's diagnosis names that rank alone, and goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.selftest import planted
from pytest_gpucluster.selftest.assessment import DEAD, HUNG, Trial, Unshown
from pytest_gpucluster.selftest.site import Site, ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.selftest.site import Outcome

Value = TypeVar("Value")

KILL_AFTER_S = 0.3
"""From a rank's first sum to its death: by then the others are in the middle of their sums."""
GIVE_UP_S = 20.0
HANG_DEADLINE_S = 3.0
ABSENT = "never arrived"
"""What the diagnosis says of a rank that is not in the collective in which the others wait."""
FEWEST = 2
TOO_FEW = "a collective takes two ranks, and one answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a call with a plant came back: the victim's error, and seconds from the fault (or the call's start) to its return."""

    error: MeasurementError | None
    seconds: float
    recovered_s: float


def dead(site: Site) -> Outcome:
    """One rank killed in the middle of sums over all ranks."""
    if len(site.places) < FEWEST:
        return [], [Unshown(kind=DEAD, why=TOO_FEW)]
    victim = next(site.victims())

    def call() -> Results:
        return site.run(planted.die_among_sums, per="cluster", victim=victim.rank, after_s=KILL_AFTER_S, give_up_s=GIVE_UP_S)

    return [dead_trial(victim, _end(site, victim, call, before_s=KILL_AFTER_S))], []


def hung(site: Site) -> Outcome:
    """One rank that never comes to a sum over all ranks."""
    if len(site.places) < FEWEST:
        return [], [Unshown(kind=HUNG, why=TOO_FEW)]
    victim = next(site.victims())

    def call() -> Results:
        return site.run(planted.miss_the_sum, per="cluster", victim=victim.rank, deadline_s=HANG_DEADLINE_S)

    return [hung_trial(victim, _end(site, victim, call, before_s=0.0))], []


def dead_trial(victim: Place, ended: Ended) -> Trial:
    """Found where the victim alone is named, as one that died."""
    error = ended.error
    fault = f"told as {error.kind}, not as died" if error is not None and error.kind != "died" else None
    told = f"in {ended.seconds:.2g} s (the next collective after {ended.recovered_s:.2g} s)"
    return _trial(DEAD, victim, ended, fault=fault, told=told)


def hung_trial(victim: Place, ended: Ended) -> Trial:
    """Found where the victim alone is named, as one that the others waited for."""
    first = str(ended.error).partition("\n")[0]
    fault = f"told as: {first}" if ended.error is not None and ABSENT not in first else None
    return _trial(HUNG, victim, ended, fault=fault, told=f"at its deadline of {HANG_DEADLINE_S:g} s, named")


def _trial(kind: str, victim: Place, ended: Ended, *, fault: str | None, told: str) -> Trial:
    return Trial(
        kind=kind,
        what=f"a {kind} rank",
        victim=victim.id,
        should_name=(victim.id,),
        named=ids(ended.error.culprits if ended.error is not None else ()),
        fault=fault,
        told=told,
        measured={"seconds": round(ended.seconds, 3), "next_collective_s": round(ended.recovered_s, 3)},
    )


def _end(site: Site, victim: Place, call: Callable[[], Results], *, before_s: float) -> Ended:
    """Make the call with the plant, and then a sound one.

    Raises:
        MeasurementError: a collective without a plant does not work.
    """
    _sum_up(site)  # from here on the group stands, so that only the fault is timed
    results, took_s = _timed(call)
    _, recovered_s = _timed(lambda: _sum_up(site))
    return Ended(error=results.errors.get(victim), seconds=took_s - before_s, recovered_s=recovered_s)


def _sum_up(site: Site) -> None:
    counted = set(site.run(planted.add_up, per="cluster").each(float).values())
    if counted != {float(len(site.places))}:
        raise MeasurementError(f"a sum over {len(site.places)} ranks counted {', '.join(map(str, sorted(counted)))}")


def _timed(call: Callable[[], Value]) -> tuple[Value, float]:
    started_s = time.monotonic()
    return call(), time.monotonic() - started_s
