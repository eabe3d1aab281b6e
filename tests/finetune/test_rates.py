"""Rates are what a user gets: all that a step waits for is inside the clock, whatever it is; checks and compiling are not."""

from __future__ import annotations

import dataclasses
import functools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from finetune_smoke.checkpoints import writing
from finetune_smoke.data import batches
from finetune_smoke.reporting import clock as clock_module
from finetune_smoke.reporting import report
from finetune_smoke.reporting.clock import Clock, Window
from finetune_smoke.settings.config import preset
from finetune_smoke.training import loop, steps
from finetune_smoke.training.loop import Outcome, finetune
from tests.support.finetune.runs import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SETTINGS: dict[str, Any] = {
    **QUICK, "steps": 6, "window_steps": 2, "audit_every": 4, "digest_every": 4, "greedy_rows": 0, "restore_check": False,
    "packed": True, "row_tokens": 128, "rows": 2, "heldout_rows": 2,
}  # fmt: skip
POSITIONS = 256
STEP_S = 1.0
SLOW_S = 3.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the clock under test: a step takes STEP_S, and nothing else takes time by itself."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(steps, "_step", _taking(now, STEP_S, steps._step))
    return now


def _taking(now: SimpleNamespace, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def slow(*arguments: Any, **named: Any) -> Any:
        now.s += seconds
        return work(*arguments, **named)

    return slow


def run(**settings: Any) -> Outcome:
    """A quick run of packed rows on a single rank."""
    return finetune(preset("tiny", **{**SETTINGS, **settings}))


INSIDE = {"rows": (steps, "step_rows"), "batches": (batches, "batch"), "copies": (batches.Batch, "to")}


@pytest.mark.parametrize("part", INSIDE)
def test_what_a_step_waits_for_is_inside(part: str, now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them 3 s slower a step: the rate is that of 4 s a step, not of 1."""
    where, name = INSIDE[part]
    monkeypatch.setattr(where, name, _taking(now, SLOW_S, getattr(where, name)))
    found = run(audit_every=0)
    assert found.positions_per_s_per_gpu == pytest.approx(POSITIONS / (STEP_S + SLOW_S))
    assert found.step_ms == pytest.approx(1e3 * (STEP_S + SLOW_S))


def test_optimiser_and_clipping_are_inside(now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate is read before the optimiser's step, and once more for the log: as slow as that, the step is."""
    monkeypatch.setattr(steps, "learning_rate", _taking(now, SLOW_S, steps.learning_rate))
    assert run().positions_per_s_per_gpu == pytest.approx(POSITIONS / (STEP_S + 2 * SLOW_S))


def test_saving_is_inside(now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint after each window: a user waits for it."""
    monkeypatch.setattr(writing.Saver, "save", _taking(now, SLOW_S, writing.Saver.save))
    found = run(checkpoint_dir=str(tmp_path), checkpoint_every=2)
    assert found.timed_s == 5 * STEP_S + 2 * SLOW_S  # after steps 2 and 4; what follows the last window delays none
    assert found.positions_per_s_per_gpu == pytest.approx(5 * POSITIONS / found.timed_s)


@pytest.mark.parametrize("part", [(steps, "audit"), (loop, "_compare_adapters"), (steps, "_compile"), (steps, "_capture")])
def test_checks_and_compiling_are_outside(part: Any, now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take."""
    where, name = part
    monkeypatch.setattr(where, name, _taking(now, 100.0, getattr(where, name)))
    assert run().positions_per_s_per_gpu == pytest.approx(POSITIONS / STEP_S)


def test_rate_falls_with_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that needs 0.2 s for the rows of a step: about 5 steps a second are told; on a busy machine some lay ready."""
    slow = steps.step_rows

    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.2)
        return slow(*arguments, **named)

    monkeypatch.setattr(steps, "step_rows", late)
    monkeypatch.setattr(steps, "_compile", lambda at, *_: time.sleep(0 if at.log.losses else 1))  # rows are made meanwhile
    settings = {"loader_workers": 1, "prefetch": 2, "audit_every": 0, "digest_every": 0, "steps": 10}
    found = run(**settings)
    assert found.positions_per_s_per_gpu is not None
    assert found.positions_per_s_per_gpu <= POSITIONS / 0.2 * 2  # without the wait it is seven times as much
    assert found.rows_s > 0.2


def test_windows_and_their_spread_are_told(now: SimpleNamespace) -> None:
    """RESULT has each timed window, steps and seconds; the screen the spread."""
    found = run()
    assert (len(found.window_rates), found.timed_steps, found.timed_s) == (3, 5, 5 * STEP_S)
    fields = report.result(preset("tiny", **SETTINGS), found)
    assert {"window_rates", "timed_steps", "timed_s", "positions_per_s_per_gpu", "tokens_per_s_per_gpu"} <= set(fields)
    assert "3 windows" in report.summary(preset("tiny", **SETTINGS), found)


def test_padding_is_no_token(now: SimpleNamespace) -> None:
    """Rows filled up to the longest: both rates are told, and they differ by the padding."""
    settings = {"packed": False, "row_tokens": 56}
    found = run(**settings)
    assert found.tokens_per_s_per_gpu is not None
    assert found.positions_per_s_per_gpu is not None
    assert found.tokens_per_s_per_gpu < found.positions_per_s_per_gpu


def test_tokens_of_a_row_end_with_the_last_predicted_one() -> None:
    """What follows is padding; a row that predicts nothing has none."""
    assert batches.Row([1, 2, 3, 0, 0], [1, 2]).tokens == 3
    assert batches.Row([1, 2, 3], [1, 2]).tokens == batches.Row([1, 2, 3], []).tokens == 3


def _windows(*ends: int) -> list[Window]:
    plain = {"tokens": 1, "positions": 1, "seconds": 1.0, "began_s": 0.0, "ended_s": 1.0}
    return [Window(first=first, last=last, **plain) for first, last in zip((0, *ends), ends, strict=False)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "ahead", "left"),
    [
        ((), 0, []),
        ((1,), 0, [0]),
        ((1, 2, 4), 0, [1, 2]),
        ((1, 2, 4, 6, 8), 2, [4, 6]),
        ((1, 2, 4), 9, [1, 2]),
    ],
)
def test_windows_whose_rows_lay_ready_are_left_out(ends: tuple[int, ...], ahead: int, left: list[int]) -> None:
    """The first always, if there is another; a run too short for more leaves out that one alone."""
    assert [window.first for window in Clock(ahead=ahead, windows=_windows(*ends)).timed()] == left


@pytest.mark.parametrize(
    ("step_s", "first", "end"),
    [(None, 0, 1), (None, 7, 8), (0.001, 1, 10), (0.4, 10, 20), (1.0, 10, 15), (3.2, 10, 11), (60.0, 10, 11), (0.4, 98, 100)],
)
def test_window_ends_after_five_seconds(step_s: float | None, first: int, end: int) -> None:
    """By the time of the last step; one step at least, and no further than what is due."""
    config = preset("tiny", steps=100, window_steps=10, audit_every=50, digest_every=25)
    assert loop._window_end(config, first, step_s) == end


def test_the_slowest_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks end a window at the same step, or they would wait for each other for ever."""
    told = SimpleNamespace(gather_floats=lambda mine: [mine, [4.0]], gather=lambda mine: [mine, mine], world_size=2, rank=0)
    log = SimpleNamespace(clock=Clock(), forward_ms=[], predicted=0, rows=0, positions=0)
    log.clock.start(ahead=0)
    config = SimpleNamespace(accumulation=1)
    at: Any = SimpleNamespace(run=SimpleNamespace(ranks=told, checks=None, rows=1, config=config), log=log)
    monkeypatch.setattr(steps.exact, "record_rows_read", lambda *_, **__: None)
    assert steps._close(at, range(1), [steps.StepRows(rows=[], first=0, batches=[])], (0, 0), []) == 4.0


def test_clock_of_the_caller_has_the_windows() -> None:
    """From which telemetry knows the moments that were timed."""
    clock = Clock()
    outcome = finetune(preset("tiny", **{**SETTINGS, "steps": 4}), clock=clock)
    assert [window.last for window in clock.windows] == [1, 2, 4]
    assert clock.windows[-1].ended_s >= clock.windows[-1].began_s > 0
    assert outcome.timed_s == pytest.approx(sum(window.seconds for window in clock.timed()))
    assert dataclasses.asdict(outcome)["timed_steps"] == 3
