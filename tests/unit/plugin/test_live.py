"""What a run shows while it measures: the bar, the lines of a log, the first failures."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.judging.forecast import Forecast, Progress, Step
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.plugin.header import bar_line
from pytest_gpucluster.plugin.live import SHOWN_FAILURES, Live, LiveFailures
from pytest_gpucluster.plugin.pairing import Pairing
from tests.support.entries import limit

PLAN = Forecast(
    steps=(
        Step(criterion="ecc", subject="health", tests=2, takes_s=1.0),
        Step(criterion="mig", subject="health", tests=1, takes_s=0.0),
        Step(criterion="tflops", subject="compute", tests=2, takes_s=600.0),
    )
)
PLACES = {"node3-gpu5": Place(id="node3-gpu5", node=3, gpu=5, rank=29, hostname="gpu-node-3")}


class FakeScreen:
    """Keeps the lines that stay, and the last transient one."""

    def __init__(self, *, is_terminal: bool = False, verbosity: int = 0, width: int = 80) -> None:
        self.is_terminal, self.verbosity, self.width, self.has_color = is_terminal, verbosity, width, False
        self.is_on, self.has_bar = verbosity <= 0, is_terminal and verbosity == 0
        self.lines: list[str] = []
        self.transient: str | None = None
        self.rewritten = 0

    def log(self, *_of_test: Any) -> None:
        """Not needed."""

    def write(self, text: str, **_markup: bool) -> None:
        """Keep a line."""
        self.lines.append(text)

    def rewrite(self, text: str) -> None:
        """Keep the line that is rewritten."""
        self.transient = text
        self.rewritten += 1

    def clear(self) -> None:
        """Erase it."""
        self.transient = None


class Run:
    """A run whose clock the test moves."""

    def __init__(self, plan: Forecast = PLAN, **screen: Any) -> None:
        self.now_s = 0.0
        self.screen: Any = FakeScreen(**screen)
        setup = SimpleNamespace(
            started_s=0.0,
            rehearsal=False,
            simulation=None,
            level_reached=True,
            inventory=SimpleNamespace(num_nodes=1, gpus_per_node=8, device="cuda"),
            changed_entries={},
            settings=SimpleNamespace(level="standard", thresholds=None, audit=False),
            profile=SimpleNamespace(name="h200-sxm", accept_at="standard"),
            remarks=[],
        )
        self.asked_for_places = 0
        self.session: Any = SimpleNamespace(
            setup=setup,
            controller=SimpleNamespace(is_signed=True),
            recorder=SimpleNamespace(cut_soak=None),
            binding=None,
            places=self.places,
        )
        self.live = Live(self.screen, self.session, clock=lambda: self.now_s)
        self.live.announce(plan)
        self.header = len(self.screen.lines)

    def places(self) -> dict[str, Place]:
        """The places, as a session has them ready."""
        self.asked_for_places += 1
        return PLACES

    @property
    def lines(self) -> list[str]:
        """The lines below the header."""
        return list(self.screen.lines[self.header :])

    def join(self) -> None:
        """All ranks have said hello."""
        inventory = Inventory(num_nodes=1, gpus_per_node=1, device="cuda")
        place = replace(inventory.places[0], rank=0, hostname="gpu-node-3")
        versions = {"torch": "2.11"}
        one = Identity(
            hostname="gpu-node-3", group_rank=0, local_rank=0, versions=versions, torch_gpus=1, gpu_name="NVIDIA H200"
        )
        self.session.binding = Binding(inventory=inventory, places=(place,), identities={place.id: one})

    def test(self, criterion: str, outcome: str = "passed", *, took_s: float = 0.0, **known: Any) -> None:
        """One test from its beginning to its end."""
        self.live.begin(Pairing(criterion=criterion, place=None, judges=True))
        self.wait(took_s)
        self.live.done(Record(criterion=criterion, outcome=outcome, **{"place": None, **known}))

    def wait(self, seconds: float) -> None:
        """Nothing is heard of the ranks for so long."""
        for _ in range(round(10 * seconds)):
            self.now_s += 0.1
            self.live.tick()


def bad(place: str | None = "node3-gpu5", **known: Any) -> dict[str, Any]:
    """The facts of a value that misses its limit."""
    return {"place": place, "value": 498.0, "limit": limit(), **known}


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no version, and runs all the same."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    assert Run().screen.lines[0].startswith("gpucluster from a checkout   ACCEPTANCE")


def test_a_log_has_a_line_a_subject() -> None:
    """As the last of its tests ends, with counts and seconds."""
    run = Run()
    run.test("ecc", took_s=1.5)
    run.test("ecc")
    assert run.lines == []
    run.test("mig", took_s=0.5)
    assert run.lines == ["health      2 criteria   3 passed   2.0 s"]


def test_a_subject_says_what_is_bad() -> None:
    """In the words of the verdict."""
    run = Run()
    run.test("tflops", took_s=5)
    run.test("tflops", "failed", **bad())
    assert run.lines[-1] == "compute    1 criterion   1 passed, 1 failed   5.0 s"


def test_a_run_that_is_cut_short() -> None:
    """What has begun and not ended says how far it came."""
    run = Run()
    run.test("ecc")
    run.live.close()
    assert run.lines == ["health      2 criteria   1 passed of 3 checks, cut short   0.0 s"]


def test_a_long_subject_has_a_line_now_and_then() -> None:
    """Every 10 s at most, also while no rank reports anything; with one percentage and one remaining time."""
    run = Run()
    run.live.begin(Pairing(criterion="tflops", place=None, judges=True))
    run.wait(60)
    assert len(run.lines) == 5 or len(run.lines) == 6
    assert run.lines[0].split("  ", 1)[0] == ""
    assert all(line.count("%") == 1 and line.count(" left") == 1 for line in run.lines)


@pytest.mark.parametrize("hours", [1, 8])
def test_a_run_of_hours_has_about_a_hundred_lines(hours: int) -> None:
    """Whatever is reported meanwhile."""
    run = Run(Forecast(steps=(Step(criterion="soak", subject="soak", tests=1, takes_s=3600.0 * hours),)))
    run.live.begin(Pairing(criterion="soak", place=None, judges=True))
    for _ in range(3600 * hours):
        run.now_s += 1
        run.live.progress(0, f"at {run.now_s}", 0.5)
    assert 90 <= len(run.lines) <= 101


def test_a_failure_is_shown_at_once() -> None:
    """Criterion, place, value and limit; once, also where a soak showed it first."""
    run = Run()
    record = Record(criterion="tflops", outcome="failed", **bad())
    run.live.show_failure(record)
    assert run.lines == ["failed: tflops at gpu-node-3 gpu 5 (node3-gpu5): 498 TFLOPS, not above 700 TFLOPS"]
    run.live.done(record)
    assert len(run.lines) == 1


def test_a_failure_stands_above_the_bar() -> None:
    """On a terminal too, and the bar counts what is bad."""
    run = Run(is_terminal=True)
    run.test("tflops", "failed", **bad())
    run.wait(1)
    assert len(run.lines) == 1
    assert " 1 bad " in run.screen.transient


def test_what_is_not_measured() -> None:
    """Each cause once; absent places stand in the header."""
    failures = LiveFailures()
    facts = {"outcome": "error", "reason": "rank 3 was killed\nmore", "cause": "was killed"}
    first = failures.line_of(Record(criterion="ecc", place="node0-gpu3", **facts), {})
    assert first == "not measured: ecc at node0-gpu3: rank 3 was killed"
    assert failures.line_of(Record(criterion="mig", place="node0-gpu3", **facts), {}) is None
    assert failures.line_of(Record(criterion="mig", place="node0-gpu4", outcome="missing"), {}) is None
    assert failures.number == 2
    unnamed = {"outcome": "error", "reason": "no rank can be reached"}
    lines = [failures.line_of(Record(criterion="ecc", place=f"node{node}", **unnamed), {}) for node in range(9)]
    assert lines == ["not measured: ecc at node0: no rank can be reached", *8 * [None]]


def test_many_failures_are_counted() -> None:
    """20 lines, one that says so, and no more."""
    failures = LiveFailures()
    records = [Record(criterion="tflops", outcome="failed", **bad(f"node{number}-gpu0")) for number in range(1024)]
    lines = [line for record in records if (line := failures.line_of(record, {})) is not None]
    assert len(lines) == SHOWN_FAILURES + 1
    assert lines[-1] == "20 are shown; from here on they are counted, and all are below"
    assert failures.number == 1024


def test_a_foreign_reason_is_one_short_line() -> None:
    """It acts on no terminal."""
    record = Record(criterion="ecc", place=None, outcome="error", reason="\x1b[2J" + 500 * "x" + "\nverdict ACCEPTED")
    line = LiveFailures().line_of(record, {})
    assert line is not None
    assert line.startswith(r"not measured: ecc at the cluster: \x1b[2Jxxx")
    assert len(line) < 210


@pytest.mark.parametrize("verbosity", [-1, 1])
def test_quiet_and_verbose_runs(verbosity: int) -> None:
    """-q shows nothing; -v leaves failures and the ends of tests to pytest."""
    run = Run(verbosity=verbosity, is_terminal=True)
    run.test("tflops", "failed", took_s=60, **bad())
    run.test("tflops")
    run.live.close()
    assert run.screen.rewritten == 0
    assert [line for line in run.lines if "%" not in line] == []
    assert len(run.lines) <= (0 if verbosity < 0 else 6)


def test_the_bar_moves_while_a_call_is_silent() -> None:
    """At most ten times a second; no other line on a terminal."""
    run = Run(is_terminal=True)
    run.join()
    run.test("ecc", took_s=5)
    assert 40 <= run.screen.rewritten <= 52
    run.live.progress(3, "size 512", 0.5)
    run.wait(0.2)
    assert "size 512" in run.screen.transient
    assert "50 %" not in run.screen.transient
    run.live.close()
    assert run.screen.transient is None
    assert run.lines == ["gpu-node-3: 1 NVIDIA H200, torch 2.11"]


NOW = Progress(fraction=0.47, elapsed_s=89, remaining_s=101)


@pytest.mark.parametrize(("width", "bar"), [(80, 10), (200, 30)])
def test_the_bar_fits(width: int, bar: int) -> None:
    """One column less than the terminal has, whatever is done now."""
    line = bar_line(NOW, "tflops: rank 0: 4.1 of [20] s", bad=0, width=width, color=False)
    assert line[bar:].strip() == "47 %  1:29, about 1:41 left tflops: rank 0: 4.1 of [20] s"
    assert len(line) == width - 1
    assert len(bar_line(NOW, 500 * "\x1b[2J\n", bad=37, width=width, color=False)) == width - 1


def test_the_bar_in_colour_says_the_same() -> None:
    """Colour adds nothing but colour."""
    line = bar_line(NOW, "tflops", bad=2, width=80, color=True)
    assert "\x1b[" in line
    assert all(word in line for word in ("47 %", "1:29, about 1:41 left", "2 bad", "tflops"))


def test_a_test_costs_the_same_in_a_large_run() -> None:
    """No pass over tests or places: 34,000 tests ask for the places as they are, and loop over none."""
    steps = tuple(Step(criterion=f"c{number}", subject="compute", tests=1024, takes_s=1.0) for number in range(33))
    run = Run(Forecast(steps=steps), is_terminal=True)
    for step in steps:
        for _ in range(step.tests):
            run.test(step.criterion)
    assert run.screen.rewritten == len(steps)
    assert run.asked_for_places <= 34_000


def test_one_bad_part_has_one_line() -> None:
    """17 failures of one slow GPU are one cause; the others are counted, and another part is shown all the same."""
    failures = LiveFailures()
    records = [Record(criterion=f"rate{number}", outcome="failed", **bad("node0-gpu3")) for number in range(17)]
    lines = [failures.line_of(record, {}) for record in records]
    assert [line is not None for line in lines] == [True] + [False] * 16
    assert failures.line_of(Record(criterion="rate0", outcome="failed", **bad("node1-gpu0")), {}) is not None
    assert failures.number == 18
