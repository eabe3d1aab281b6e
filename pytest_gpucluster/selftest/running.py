"""The self-test as a whole: one kind of fault after the other; what could not be planted is part of the result."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pytest_gpucluster.controller.controller import TerminatedError
from pytest_gpucluster.errors import GpuclusterError, MeasurementError
from pytest_gpucluster.selftest.assessment import DEAD, HUNG, NAMES, SLOW, WRONG, Assessment, Trial, Unshown
from pytest_gpucluster.selftest.ended import dead, hung
from pytest_gpucluster.selftest.site import IN_A_REHEARSAL, ON_GPUS, Site
from pytest_gpucluster.selftest.slow import slow
from pytest_gpucluster.selftest.wrong import wrong

if TYPE_CHECKING:
    from pytest_gpucluster.selftest.site import Outcome
    from pytest_gpucluster.session import Session

Tell = Callable[[str, float], None]
KINDS = {SLOW: slow, WRONG: wrong, DEAD: dead, HUNG: hung}


def carry_out(session: Session, tell: Tell) -> Assessment:
    """Plant each kind of fault on this run's own ranks; ``tell`` gets what happens now, and how far along it is (0 to 1).

    Never raises because of the cluster: what could not be done is told in the assessment.
    """
    started_s = time.monotonic()
    seed = secrets.randbelow(1 << 31)
    trials: list[Trial] = []
    unshown: list[Unshown] = []
    places, stopped = 0, None
    try:
        site = _site(session, seed)
        places = len(site.places)
        for index, kind in enumerate(KINDS):
            tell(f"planting {NAMES[kind]}", index / len(KINDS))
            some, lacking = _make(kind, site)
            trials += some
            unshown += lacking
    except GpuclusterError as error:
        stopped = _first_line(error)
    return Assessment(
        trials=tuple(trials),
        unshown=tuple(unshown),
        stopped=stopped,
        selected=_selected(session),
        seconds=time.monotonic() - started_s,
        seed=seed,
        places=places,
        rehearsal=session.rehearsal,
    )


def _make(kind: str, site: Site) -> Outcome:
    """One kind of fault; a cluster on which it cannot be planted has its next kind tried."""
    try:
        return KINDS[kind](site)
    except TerminatedError:
        raise
    except MeasurementError as error:
        return [], [Unshown(kind=kind, why=_first_line(error), objects=True)]


def _site(session: Session, seed: int) -> Site:
    """Where it is made; waits for the ranks to join.

    Raises:
        MeasurementError: nobody did.
    """
    cluster = session.cluster
    places = tuple(place for place in cluster.places if place.rank is not None and place not in cluster.not_idle)
    if not places:
        raise MeasurementError("none of the expected places answers", kind="missing")
    effort = IN_A_REHEARSAL if session.rehearsal else ON_GPUS
    return Site(cluster=cluster, places=places, criteria=session.criteria, effort=effort, chance=random.Random(seed))


def _selected(session: Session) -> frozenset[str]:
    """The criteria that this run is about to judge: a test of it is selected, and no rule of the profile leaves it out."""
    left_out = {key for key, threshold in session.criteria.items() if threshold.skip is not None}
    return frozenset(record.criterion for record in session.plan.pending()) - left_out


def _first_line(error: GpuclusterError) -> str:
    return str(error).partition("\n")[0]
