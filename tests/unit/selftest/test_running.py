"""The self-test as a whole: faults that cannot be planted are reported and object; a run that is being ended ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.controller.call import TerminatedError
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.places import Place
from pytest_gpucluster.selftest import running
from pytest_gpucluster.selftest.report import DEAD, HUNG, SLOW, WRONG, NotPlanted, Trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.selftest.report import SelftestReport
    from pytest_gpucluster.selftest.trials import Setup

    Results = list[Trial | NotPlanted]

BOUND = Place(id="node0-gpu0", node=0, gpu=0, rank=0)
UNBOUND = Place(id="node0-gpu1", node=0, gpu=1)


def found(setup: Setup) -> Results:
    """One plant, found, at the first place."""
    victim = setup.places[0].id
    return [Trial(kind=DEAD, what="a plant", victim=victim, expected=(victim,), named=(victim,))]


def raising(error: Exception) -> Callable[[Setup], Results]:
    """A kind of fault on which this happens."""

    def kind(_setup: Setup) -> Results:
        raise error

    return kind


class Session(SimpleNamespace):
    """As much of a run's session as the self-test asks for; joining may fail."""

    @property
    def cluster(self) -> Any:
        """Where it is made."""
        if isinstance(self.joined, Exception):
            raise self.joined
        return SimpleNamespace(places=self.joined, not_idle=self.not_idle)


def carried_out(
    monkeypatch: pytest.MonkeyPatch, kinds: dict[str, Callable[[Setup], Results]], joined: Any = (BOUND, UNBOUND)
) -> tuple[SelftestReport, list[tuple[str, float]]]:
    """The report, and the progress that was reported."""
    monkeypatch.setattr(running, "TRY_BY_KIND", kinds)
    reported: list[tuple[str, float]] = []
    plan = SimpleNamespace(pending=lambda: [SimpleNamespace(criterion=key) for key in ("silent_corruption", "left_out")])
    criteria = {"left_out": SimpleNamespace(skip="a rule"), "silent_corruption": SimpleNamespace(skip=None)}
    setup = SimpleNamespace(criteria=criteria, rehearsal=True)
    session: Any = Session(joined=joined, not_idle={}, setup=setup, plan=plan)
    return running.run_selftest(session, lambda step, fraction: reported.append((step, fraction))), reported


def test_all_kinds_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the places that answer; progress is reported before each."""
    report, reported = carried_out(monkeypatch, {SLOW: found, WRONG: found})
    assert reported == [("planting a slow GPU", 0.0), ("planting a wrong bit", 0.5)]
    assert (len(report.trials), report.places, report.objections) == (2, 1, [])
    assert report.selected == {"silent_corruption"}


def test_one_kind_that_fails_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason in one line, as an objection."""
    error = MeasurementError("rank 0 died\n  more")
    report, _ = carried_out(monkeypatch, {WRONG: raising(error), DEAD: found})
    assert report.objections == ["in the self-test a wrong bit could not be tried to the end: rank 0 died"]
    assert len(report.trials) == 1


def test_a_run_that_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing further is planted."""
    kinds = {SLOW: found, DEAD: raising(TerminatedError("not run: terminated by SIGTERM")), HUNG: found}
    report, _ = carried_out(monkeypatch, kinds)
    assert report.objections == ["the self-test did not come to its end: not run: terminated by SIGTERM"]
    assert len(report.trials) == 1


@pytest.mark.parametrize(
    ("joined", "why"),
    [
        ((UNBOUND,), "none of the expected places answers"),
        (MeasurementError("no rank can be reached: x"), "no rank can be reached: x"),
        (ConfigurationError("two versions"), "two versions"),
    ],
)
def test_nobody_joined(monkeypatch: pytest.MonkeyPatch, joined: Any, why: str) -> None:
    """No plant, no certificate."""
    report, reported = carried_out(monkeypatch, {SLOW: found}, joined=joined)
    assert report.objections == [f"the self-test did not come to its end: {why}"]
    assert (report.outcome, report.trials, reported) == ("error", (), [])


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a cluster can cause is an outcome."""
    with pytest.raises(ZeroDivisionError):
        carried_out(monkeypatch, {SLOW: raising(ZeroDivisionError())})
