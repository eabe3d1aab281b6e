"""The self-test as a whole: one kind of fault after the other. The report also says what could not be planted."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_gpucluster.controller.call import TerminatedError
from pytest_gpucluster.errors import GpuclusterError, MeasurementError
from pytest_gpucluster.selftest import trials
from pytest_gpucluster.selftest.report import DEAD, HUNG, NAMES, SLOW, WRONG, NotPlanted, SelftestReport, Trial
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.session import Session

OnProgress = Callable[[str, float], None]
TRY_BY_KIND = {SLOW: trials.try_slow_gpu, WRONG: trials.try_wrong_bit, DEAD: trials.try_killed_rank, HUNG: trials.try_hung_rank}


def run_selftest(session: Session, on_progress: OnProgress) -> SelftestReport:
    """Plant each kind of fault on this run's own ranks; the report holds every error that a cluster can cause.

    Args:
        session: the run, before its first test.
        on_progress: gets the current step and the finished share of the self-test, 0 to 1.
    """
    started_s = time.monotonic()
    seed = secrets.randbelow(1 << 31)
    results: list[Trial | NotPlanted] = []
    num_places, stopped = 0, None
    try:
        setup = _setup(session, seed)
        num_places = len(setup.places)
        for index, kind in enumerate(TRY_BY_KIND):
            on_progress(f"planting {NAMES[kind]}", index / len(TRY_BY_KIND))
            results += _try(kind, setup)
    except GpuclusterError as error:
        stopped = first_line(str(error))
    return SelftestReport(
        trials=tuple(one for one in results if isinstance(one, Trial)),
        not_planted=tuple(one for one in results if isinstance(one, NotPlanted)),
        stopped=stopped,
        selected=_selected(session),
        seconds=time.monotonic() - started_s,
        seed=seed,
        places=num_places,
        rehearsal=session.setup.rehearsal,
    )


def _try(kind: str, setup: trials.Setup) -> list[Trial | NotPlanted]:
    """Plant one kind of fault. An error of the cluster ends this kind only; a run that is being ended ends all."""
    try:
        return TRY_BY_KIND[kind](setup)
    except TerminatedError:
        raise
    except MeasurementError as error:
        return [NotPlanted(kind=kind, why=first_line(str(error)), is_error=True)]


def _setup(session: Session, seed: int) -> trials.Setup:
    """Wait for the ranks to join and take the places that answer.

    Raises:
        MeasurementError: no place answers.
    """
    cluster = session.cluster
    places = tuple(place for place in cluster.places if place.rank is not None and place not in cluster.not_idle)
    if not places:
        raise MeasurementError("none of the expected places answers", kind="missing")
    sizes = trials.IN_A_REHEARSAL if session.setup.rehearsal else trials.ON_GPUS
    return trials.Setup(
        cluster=cluster, places=places, criteria=session.setup.criteria, sizes=sizes, random=random.Random(seed)
    )


def _selected(session: Session) -> frozenset[str]:
    """The criteria that this run will judge: a test of each is selected, and no rule of the profile leaves it out."""
    left_out = {key for key, threshold in session.setup.criteria.items() if threshold.skip is not None}
    return frozenset(record.criterion for record in session.plan.pending()) - left_out
