"""Kill one rank, or let it hang, in a collective of all ranks. Found: the run names that rank alone and goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.selftest import planted
from pytest_gpucluster.selftest.report import DEAD, HUNG, NotPlanted, Trial
from pytest_gpucluster.selftest.setup import Setup, ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.places import Place

Value = TypeVar("Value")

KILL_AFTER_S = 0.3
"""From a rank's first sum to its death: by then the other ranks are in the middle of their sums."""
GIVE_UP_S = 20.0
HANG_DEADLINE_S = 3.0
ABSENT = "never arrived"
"""The diagnosis says this of a rank that is not in the collective in which the other ranks wait."""
FEWEST_PLACES = 2
TOO_FEW = "a collective takes two ranks, and one answers"


def try_killed_rank(setup: Setup) -> list[Trial | NotPlanted]:
    """Kill one rank in the middle of sums over all ranks."""
    if len(setup.places) < FEWEST_PLACES:
        return [NotPlanted(kind=DEAD, why=TOO_FEW)]
    victim = next(setup.victims())
    error, took_s, recovered_s = _call_with_fault(
        setup, victim, planted.die_among_sums, after_s=KILL_AFTER_S, give_up_s=GIVE_UP_S
    )
    return [killed_trial(victim, error, detected_s=took_s - KILL_AFTER_S, recovered_s=recovered_s)]


def try_hung_rank(setup: Setup) -> list[Trial | NotPlanted]:
    """Keep one rank from entering a sum over all ranks."""
    if len(setup.places) < FEWEST_PLACES:
        return [NotPlanted(kind=HUNG, why=TOO_FEW)]
    victim = next(setup.victims())
    error, took_s, recovered_s = _call_with_fault(setup, victim, planted.miss_the_sum, deadline_s=HANG_DEADLINE_S)
    return [hung_trial(victim, error, detected_s=took_s, recovered_s=recovered_s)]


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
        fault=f"told as {error.kind}, not as died" if error is not None and error.kind != "died" else None,
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
    first_line = str(error).partition("\n")[0]
    return Trial(
        kind=HUNG,
        what="a hung rank",
        fault=f"told as: {first_line}" if error is not None and ABSENT not in first_line else None,
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


def _call_with_fault(
    setup: Setup, victim: Place, function: Callable[..., Any], **recipe: float
) -> tuple[MeasurementError | None, float, float]:
    """Make the call with the fault, and then a sound one: the victim's error, and the seconds of both calls.

    Raises:
        MeasurementError: a collective without a fault does not work.
    """
    _sum_up(setup)  # creates the process group, so that only the fault is timed
    results, took_s = _timed(lambda: setup.run(function, per="cluster", victim=victim.rank, **recipe))
    _, recovered_s = _timed(lambda: _sum_up(setup))
    return results.errors.get(victim), took_s, recovered_s


def _sum_up(setup: Setup) -> None:
    counts = set(setup.run(planted.add_up, per="cluster").each(float).values())
    if counts != {float(len(setup.places))}:
        raise MeasurementError(f"a sum over {len(setup.places)} ranks counted {', '.join(map(str, sorted(counts)))}")


def _timed(call: Callable[[], Value]) -> tuple[Value, float]:
    started_s = time.monotonic()
    return call(), time.monotonic() - started_s
