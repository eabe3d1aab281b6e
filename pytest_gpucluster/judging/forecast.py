"""The estimated duration and the progress of a run. Pure: the entries' ``takes_s`` in, seconds and words out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.text import counted, with_commas

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.resolve import Threshold

SUBJECTS = ("health", "compute", "memory", "links", "fabric", "training", "platform")
"""The marks by which tests are grouped."""
SOAK, OTHERS = "soak", "others"
STARTUP_S = 4.0
"""Starting the ranks, up to their first CUDA context (1.1 to 3.8 s on 4 H200, docs/results)."""
SELFTEST = "self-test"
SELFTEST_S = {1: 5.0, 2: 18.0}
"""A self-test by the number of places, the last for all larger ones: 3.2 and 5.0 s on one GPU, 13 to 18 s on two, 20 s on
four (docs/results). A single place plants nothing."""
REHEARSED_SELFTEST_S = 12.0
"""On a CPU nothing is heated and sizes are small."""
FIRST_TRAINING_S = 15.0
"""What the first training of a run takes more than a later one: it loads, compiles and captures. Cold caches and warm ones
hardly differ: 18 to 34 s where finetune_loss comes first, 13 to 15 s where it does not (docs/results)."""
REHEARSED = "tiny"
"""The preset of a training on a CPU."""
REHEARSED_BUDGET_S = 6.0
"""At least, in a rehearsal: its entries take a part of a second, and less than the other processes of the host may delay."""
BOOKS_GIB, BOOKS_OF_A_TEST_KIB = 0.37, 10.7
"""Memory of the controller, itself and for each test: a line through 16 x 8 and 128 x 8 (docs/results/2026-11-27-own-cost)."""
BOOKS_OF_A_TEST_S = 0.00125
"""Seconds of the controller for each test, in which all GPUs wait: 1.2 ms at 16 x 8 and 32 x 8 on an idle machine, 1.3 ms of
CPU at 128 x 8 (docs/results/2026-11-27-own-cost). Two real GPUs waited 0.4 s (docs/results/2026-11-27-h100x2-3f6dcd6)."""
UNFINISHED = 0.99
"""The largest fraction shown before the last test is done."""
STEADY = 0.9
"""Up to this share of its estimate, a measurement moves the progress with the clock; then ever slower, and never to the end."""
LATE, LATE_S = 1.5, 3.0
"""A measurement that takes so many times its estimate, and so long beyond it, leaves no remaining time to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One selected criterion, or test without one. ``takes_s``: 0 where an earlier step measures for it, None if not known."""

    criterion: str
    subject: str
    tests: int
    takes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is known of the tests of each criterion: their mark, one of :data:`SUBJECTS`, and the fixtures that measure.

    ``fixtures`` has the tests that are not selected too. ``absent`` are the criteria whose program this host does not have:
    they are skipped at once.
    """

    subjects: Mapping[str, str]
    fixtures: Mapping[str, frozenset[str]]
    absent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What will run, in order, with estimated durations. ``left_out``: criteria that a rule of the profile excludes here.

    ``selftest_s`` is how long the self-test takes, which comes before the first of them; 0 without one.
    ``first_training`` is the criterion whose measurement trains first, and takes :data:`FIRST_TRAINING_S` more.
    """

    steps: tuple[Step, ...]
    left_out: int = 0
    selftest_s: float = 0.0
    first_training: str | None = None

    @property
    def total_s(self) -> float:
        """Start-up, self-test, bookkeeping and every measurement that has an estimate."""
        return STARTUP_S + self.selftest_s + self.books_s + sum(self.lasts_s(step) or 0.0 for step in self.steps)

    def lasts_s(self, step: Step) -> float | None:
        """The seconds of a step, with what it takes more where it trains first; None if not known."""
        return step.takes_s and step.takes_s + (FIRST_TRAINING_S if step.criterion == self.first_training else 0.0)

    @property
    def tests(self) -> int:
        """Number of tests, each with one outcome."""
        return sum(step.tests for step in self.steps)

    @property
    def books_s(self) -> int:
        """The whole seconds in which the ranks wait because the controller judges and writes; 0 in a run of few tests."""
        return int(self.tests * BOOKS_OF_A_TEST_S)

    @property
    def plan(self) -> list[str]:
        """The plan, in pieces that may be wrapped: counts, total time, then the time of each subject."""
        unknown = sum(step.takes_s is None for step in self.steps)
        without = f", {unknown} without an estimate" if unknown else ""
        rules = f", {self.left_out} not applicable" if self.left_out else ""
        counts = f"{counted(len(self.steps), 'criterion', 'criteria')}, {counted(self.tests, 'check')}{rules}{without},"
        by_subject = grouped((step.subject, lasts_s) for step in self.steps if (lasts_s := self.lasts_s(step)) is not None)
        subjects = [name for name in (*SUBJECTS, SOAK, OTHERS) if name in by_subject]
        times = [f"{name} {clock(math.ceil(sum(by_subject[name])))}" for name in subjects]
        times += [f"{SELFTEST} {clock(math.ceil(self.selftest_s))}"] if self.selftest_s else []
        times += [f"bookkeeping {clock(self.books_s)}"] if self.books_s else []
        parts = [*times, f"start-up {clock(STARTUP_S)})"]
        total = f"about {clock(math.ceil(self.total_s))}"
        return [counts, total, f"({parts[0]}{',' if times else ''}", *with_commas(parts[1:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. ``remaining_s`` is None while a measurement takes much longer than estimated.

    ``counts`` (``3 of 23 tests``) stands for the time left in a run of which no test has an estimate.
    """

    fraction: float
    elapsed_s: float
    remaining_s: float | None
    counts: str = ""

    @property
    def percent(self) -> int:
        """Of the planned time, rounded down."""
        return math.floor(100 * self.fraction)

    @property
    def text(self) -> str:
        """``43 %  0:41, about 1:07 left``: share of the planned time, elapsed time, remaining time."""
        left = "longer than estimated" if self.remaining_s is None else f"about {clock(math.ceil(self.remaining_s) or 1)} left"
        return f"{self.percent:2d} %  {clock(self.elapsed_s)}, {self.counts or left}"


class Meter:
    """Where a run stands. Each call takes the same time, however many tests there are.

    A criterion is measured when the first of its tests begins. Its time counts as it passes, and wholly once that test is
    done. All times are in seconds since the run began.
    """

    def __init__(self, plan: Forecast) -> None:
        """Nothing has begun."""
        self._plan = plan
        self._unmeasured = {step.criterion: plan.lasts_s(step) or 0.0 for step in plan.steps}
        self._planned = frozenset(self._unmeasured)
        self._unmeasured[SELFTEST] = plan.selftest_s
        self._tests_left = plan.tests
        self._counts_tests = bool(plan.steps) and all(step.takes_s is None for step in plan.steps)
        self._books_of_a_test_s = plan.books_s / max(1, plan.tests)
        self._has_started = False
        self._past_s = 0.0
        self._current: str | None = None
        self._current_s = 0.0
        self._fraction = 0.0

    @property
    def planned_s(self) -> float:
        """How long the whole run is planned to take, in seconds."""
        return self._plan.total_s

    def begin(self, criterion: str, now_s: float) -> None:
        """A test of this criterion begins, and the one before was of another; or the self-test, before all of them."""
        if self._current == SELFTEST:
            self._past_s += self._unmeasured.pop(SELFTEST, 0.0)
        self._current, self._current_s = criterion, now_s

    def joined(self, now_s: float) -> None:
        """The start-up is over: the current measurement begins now."""
        self._has_started, self._current_s = True, now_s

    def finish(self, criterion: str) -> None:
        """One test of this criterion is done."""
        if criterion in self._planned:
            self._has_started = True
            self._tests_left -= 1
            self._past_s += self._unmeasured.pop(criterion, 0.0) + self._books_of_a_test_s

    def progress(self, now_s: float) -> Progress:
        """How far the run is now. The fraction never falls."""
        if self._counts_tests:
            done = self._plan.tests - self._tests_left
            counts = f"{done} of {counted(self._plan.tests, 'test')}"
            return Progress(fraction=done / self._plan.tests, elapsed_s=now_s, remaining_s=None, counts=counts)
        planned_s = self._unmeasured.get(self._current or "", 0.0)
        passed_s = now_s - self._current_s if self._has_started else 0.0
        past_s = self._past_s + share_s(planned_s, passed_s) + (STARTUP_S if self._has_started else share_s(STARTUP_S, now_s))
        total_s = self._plan.total_s
        is_over = self._tests_left <= 0
        self._fraction = 1.0 if is_over else max(self._fraction, min(UNFINISHED, past_s / total_s))
        is_late = planned_s > 0 and passed_s > max(LATE * planned_s, planned_s + LATE_S)
        slowness = (now_s + total_s) / (past_s + total_s)
        left_s = max(0.0, total_s - past_s) * slowness
        is_late |= left_s < 1 and now_s > total_s + LATE_S  # what is measured again at the end has no estimate
        remaining_s = 0.0 if is_over else None if is_late else left_s
        return Progress(fraction=self._fraction, elapsed_s=now_s, remaining_s=remaining_s)


def share_s(planned_s: float, passed_s: float) -> float:
    """How much of its planned time a measurement has done, by the time that has passed: never all of it."""
    steady_s = STEADY * planned_s
    return passed_s if passed_s <= steady_s else planned_s * (1 - (1 - STEADY) * steady_s / passed_s)


def forecast(
    selected: Mapping[str, int], criteria: Mapping[str, Threshold], suite: Suite, *, gpus_per_node: int, soak_s: float | None
) -> Forecast:
    """Estimate how long the selected tests will take.

    Args:
        selected: number of tests by criterion, in the order in which they run.
        criteria: the entries by key; a test without an entry has no estimate.
        suite: what is known of the tests.
        gpus_per_node: a recipe with ``at_once: 1`` takes its time for each GPU of a node.
        soak_s: how long the criteria of level soak run in turn; None without a soak.
    """
    counted: set[str] = set()
    first_training: str | None = None
    soaking = [criteria[key] for key in selected if key in criteria and criteria[key].level == "soak"]
    steps = []
    for key, tests in selected.items():
        takes_s, subject = None, suite.subjects.get(key, OTHERS)
        threshold = criteria.get(key)
        if threshold is not None and threshold.level == "soak" and soak_s is not None:
            subject = SOAK
            takes_s = 0.0 if SOAK in counted else soak_s + sum(one.takes_s or 0.0 for one in soaking) / 2  # a round ends it
            counted.add(SOAK)
        elif threshold is not None:
            owners = _owners(threshold, criteria, suite.fixtures)
            due = [_takes_s(one, places=min(tests, gpus_per_node)) for one in owners if one.key not in counted]
            if threshold.key in suite.absent:
                due = [0.0]
            takes_s = None if not owners or None in due else sum(one or 0.0 for one in due)
            # a training of a size that is compiled; the one of a rehearsal is not
            is_training = any(one.recipe.get("preset", REHEARSED) != REHEARSED for one in owners)
            if takes_s and first_training is None and is_training:
                first_training = key
            counted.update(one.key for one in owners)
        steps.append(Step(criterion=key, subject=subject, tests=tests, takes_s=takes_s))
    return Forecast(steps=tuple(steps), first_training=first_training)


def _owners(threshold: Threshold, criteria: Mapping[str, Threshold], fixtures: Mapping[str, frozenset[str]]) -> list[Threshold]:
    """The entries with the ``takes_s`` of what is measured for an entry: itself, one that it names, or those by its fixtures.

    An entry with a time of its own counts for each test that takes all fixtures of its test.
    """
    if "measured_with" in threshold.model_fields_set:
        return [criteria[threshold.measured_with]]
    if threshold.takes_s is not None:
        return [threshold]
    taken = fixtures.get(threshold.key, frozenset())
    measured = [one for one in criteria.values() if one.takes_s is not None and fixtures.get(one.key)]
    return [one for one in measured if fixtures[one.key] <= taken]


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


def selftest_s(*, places: int, is_rehearsal: bool) -> float:
    """About how long a self-test takes, in seconds."""
    return REHEARSED_SELFTEST_S if is_rehearsal else SELFTEST_S[min(places, max(SELFTEST_S))]


def memory_remark(tests: int, *, available_gib: float) -> str | None:
    """What to know before a run whose books do not fit the memory of this host; None where they do."""
    needed_gib = BOOKS_GIB + tests * BOOKS_OF_A_TEST_KIB / 2**20
    if needed_gib <= available_gib:
        return None
    return (
        f"the books of {tests:,} tests take about {needed_gib:.1f} GiB of memory on this host, and "
        f"{available_gib:.1f} GiB are available: the kernel may end the run. Give its job more memory (Slurm: --mem=0), or run "
        "groups of nodes"
    )
