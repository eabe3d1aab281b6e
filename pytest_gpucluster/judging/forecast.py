"""The estimated duration and the progress of a run. Pure: the entries' ``takes_s`` in, seconds and words out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.thresholds.resolve import Threshold

SUBJECTS = ("health", "compute", "memory", "links", "fabric", "training", "platform")
"""The marks by which tests are grouped."""
SOAK, OTHERS = "soak", "others"
STARTUP_S = 4.0
"""Starting the ranks, up to their first CUDA context (1.1 to 3.8 s on 4 H200, docs/results)."""
MAX_SUBJECT_LINES = 7
UNFINISHED = 0.99
"""The largest fraction shown before the last test is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One selected criterion, or test without one. ``takes_s``: 0 where an earlier step measures for it, None if not known."""

    criterion: str
    subject: str
    tests: int
    takes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What will run, in order, with estimated durations."""

    steps: tuple[Step, ...]

    @property
    def total_s(self) -> float:
        """Start-up and every measurement that has an estimate."""
        return STARTUP_S + sum(step.takes_s or 0.0 for step in self.steps)

    @property
    def tests(self) -> int:
        """Number of tests, each with one outcome."""
        return sum(step.tests for step in self.steps)

    def lines(self, *, level: str, where: str) -> list[str]:
        """The plan in a few lines, by subject. ``where`` names the number of GPUs."""
        unknown = sum(step.takes_s is None for step in self.steps)
        without = f" and {unknown} without an estimate" if unknown else ""
        head = f"plan: {_criteria(len(self.steps))} at {where}, {_tests(self.tests)}, level {level}: "
        return [f"{head}about {in_words(self.total_s)}{without}", *self._by_subject()]

    def _by_subject(self) -> list[str]:
        grouped: dict[str, list[Step]] = {}
        for subject in (*SUBJECTS, SOAK, OTHERS):
            steps = [step for step in self.steps if step.subject == subject]
            name = OTHERS if len(grouped) >= MAX_SUBJECT_LINES - 1 else subject
            if steps:
                grouped.setdefault(name, []).extend(steps)
        if list(grouped) in ([], [OTHERS]):
            return []
        rows = [(name, len(steps), sum(step.tests for step in steps), _sum_s(steps)) for name, steps in grouped.items()]
        return [f"  {name:<9} {_criteria(count):>12}  {_tests(tests):>10}  {estimate}" for name, count, tests, estimate in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. ``remaining_s`` is None once the run takes longer than estimated."""

    fraction: float
    done: int
    total: int
    elapsed_s: float
    remaining_s: float | None

    @property
    def left(self) -> str:
        """``about 1:07 left``, or ``longer than estimated``."""
        return "longer than estimated" if self.remaining_s is None else f"about {clock(self.remaining_s)} left"

    @property
    def percent(self) -> int:
        """Of the planned time, rounded down."""
        return math.floor(100 * self.fraction)

    @property
    def text(self) -> str:
        """``43 % 12/77 0:41, about 1:07 left``: share of the planned time, finished tests, elapsed time."""
        return f"{self.percent:2d} % {self.done}/{self.total} {clock(self.elapsed_s)}, {self.left}"


def forecast(
    selected: Mapping[str, int],
    criteria: Mapping[str, Threshold],
    *,
    subjects: Mapping[str, str],
    gpus_per_node: int,
    soak_s: float | None,
) -> Forecast:
    """Estimate how long the selected tests will take.

    Args:
        selected: number of tests by criterion, in the order in which they run.
        criteria: the entries by key; a test without an entry has no estimate.
        subjects: the mark (one of :data:`SUBJECTS`) by criterion, as far as known.
        gpus_per_node: a recipe with ``at_once: 1`` takes its time for each GPU of a node.
        soak_s: how long the criteria of level soak run in turn; None without a soak.
    """
    counted: set[str] = set()
    soaking = [criteria[key] for key in selected if key in criteria and criteria[key].level == "soak"]
    steps = []
    for key, tests in selected.items():
        takes_s, subject = None, subjects.get(key, OTHERS)
        threshold = criteria.get(key)
        if threshold is not None and threshold.level == "soak" and soak_s is not None:
            subject = SOAK
            takes_s = 0.0 if SOAK in counted else soak_s + _half_a_round_s(soaking)
            counted.add(SOAK)
        elif threshold is not None:
            owner = criteria[threshold.measured_with or key]
            takes_s = 0.0 if owner.key in counted else _takes_s(owner, places=min(tests, gpus_per_node))
            counted.add(owner.key)
        steps.append(Step(criterion=key, subject=subject, tests=tests, takes_s=takes_s))
    return Forecast(steps=tuple(steps))


def progress(
    plan: Forecast, done: Mapping[str, int], *, current: str | None, in_current_s: float, elapsed_s: float
) -> Progress:
    """Compute how far a run is.

    A criterion is measured when the first of its tests begins. Its time counts as it passes, up to its estimate, and
    wholly once that test is done.

    Args:
        plan: the forecast that was shown.
        done: finished tests by criterion.
        current: the criterion whose test runs now.
        in_current_s: since that criterion began.
        elapsed_s: since the run began.
    """
    past_s = min(STARTUP_S, elapsed_s)
    for step in plan.steps:
        planned_s = step.takes_s or 0.0
        if done.get(step.criterion):
            past_s += planned_s
        elif step.criterion == current:
            past_s += min(planned_s, in_current_s)
    finished = sum(done.get(step.criterion, 0) for step in plan.steps)
    is_over = finished >= plan.tests
    is_late = elapsed_s >= plan.total_s or past_s >= plan.total_s
    return Progress(
        fraction=1.0 if is_over else min(UNFINISHED, past_s / plan.total_s),
        done=finished,
        total=plan.tests,
        elapsed_s=elapsed_s,
        remaining_s=0.0 if is_over else None if is_late else plan.total_s - past_s,
    )


def in_words(seconds: float) -> str:
    """``48 s``, ``12 min``, ``8 h 5 min``: as exact as an estimate is."""
    if seconds < 299.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """``0:41``, ``8:05:00``."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _takes_s(threshold: Threshold, *, places: int) -> float | None:
    """The time of one measurement, repeated if its recipe takes the GPUs of a node in turn."""
    at_once = threshold.recipe.get("at_once")
    waves = math.ceil(places / at_once) if isinstance(at_once, int) else 1
    return None if threshold.takes_s is None else waves * threshold.takes_s


def _half_a_round_s(soaking: list[Threshold]) -> float:
    """Half a round: a soak ends with the round in which its time is over, half a round late on average."""
    return sum(threshold.takes_s or 0.0 for threshold in soaking) / 2


def _criteria(count: int) -> str:
    return "1 criterion" if count == 1 else f"{count} criteria"


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


def _sum_s(steps: list[Step]) -> str:
    known = [step.takes_s for step in steps if step.takes_s is not None]
    return f"about {in_words(sum(known)):>7}" if known else "no estimate"
