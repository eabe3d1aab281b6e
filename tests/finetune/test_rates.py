"""Rates are what a user gets: all that a step waits for is inside the clock, whatever it is; checks and compiling are not."""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from finetune_smoke.checkpoints import writing
from finetune_smoke.data import batches
from finetune_smoke.reporting import outcome as clock_module
from finetune_smoke.reporting import report
from finetune_smoke.reporting.outcome import Clock, Window
from finetune_smoke.settings.config import preset
from finetune_smoke.training import loop, steps
from finetune_smoke.training.loop import finetune
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
SAVING_S = 1.0
INSIDE = [
    (steps, "step_rows", 0.25), (batches, "batch", 0.125), (batches.Batch, "to", 0.5),
    (steps, "learning_rate", 0.0625),  # read before the optimiser's step, and once more for the log
]  # fmt: skip
"""What a user waits for, and how many seconds each takes here: no two sums of them are equal."""
WAITED_S = 0.25 + 0.125 + 0.5 + 2 * 0.0625
OUTSIDE = [(steps, "audit"), (loop, "_compare_adapters"), (steps, "_compile"), (steps, "_capture")]


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


def test_what_a_user_waits_for_is_inside_and_checks_are_not(
    now: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each part as slow as INSIDE says, checks and compiling slower than all; RESULT has windows, steps and seconds."""
    for where, name, seconds in [*INSIDE, (writing.Saver, "save", SAVING_S), *((*each, 100.0) for each in OUTSIDE)]:
        monkeypatch.setattr(where, name, _taking(now, seconds, getattr(where, name)))
    settings = {**SETTINGS, "checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    found = finetune(preset("tiny", **settings))
    timed_s = 5 * (STEP_S + WAITED_S) + 2 * SAVING_S  # after steps 2 and 4; what follows the last window delays none
    assert (len(found.window_rates), found.timed_steps, found.timed_s) == (3, 5, pytest.approx(timed_s))
    assert found.positions_per_s_per_gpu == pytest.approx(5 * POSITIONS / timed_s)
    assert found.step_ms == pytest.approx(1e3 * timed_s / 5)
    fields = report.result(preset("tiny", **settings), found)
    assert {"window_rates", "timed_steps", "timed_s", "positions_per_s_per_gpu", "tokens_per_s_per_gpu"} <= set(fields)
    assert "3 windows" in report.summary(preset("tiny", **settings), found)


@pytest.mark.parametrize(("enough_s", "steps_made"), [(None, 40), (30.5, 32), (5.0, 16), (60.0, 40)])
def test_what_is_timed_alone_ends_when_eight_windows_took_long(
    now: SimpleNamespace, enough_s: float | None, steps_made: int
) -> None:
    """FSDP2 over a slow network took 132 s where 40 were planned. The spread still needs its windows."""
    assert now.s == 0
    settings = {**SETTINGS, "steps": 40, "audit_every": 0, "digest_every": 0}
    found = finetune(preset("tiny", **settings), clock=Clock(enough_s=enough_s))
    assert (found.steps, found.stopped) == (steps_made, steps_made < 40)
    assert len(found.window_rates) >= 8
    assert [note for note in found.notes if "of 40 steps" in note] == (
        [f"ended after {steps_made} of 40 steps: they took {steps_made} s"] if found.stopped else []
    )


def test_rate_falls_with_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that needs 0.2 s for the rows of a step: about 5 steps a second are told; on a busy machine some lay ready."""
    slow = steps.step_rows

    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.2)
        return slow(*arguments, **named)

    monkeypatch.setattr(steps, "step_rows", late)
    monkeypatch.setattr(steps, "_compile", lambda at, *_: time.sleep(0 if at.log.losses else 1))  # rows are made meanwhile
    settings = {"loader_workers": 1, "prefetch": 2, "audit_every": 0, "digest_every": 0, "steps": 10}
    found = finetune(preset("tiny", **{**SETTINGS, **settings}))
    assert found.positions_per_s_per_gpu is not None
    assert found.positions_per_s_per_gpu <= POSITIONS / 0.2 * 2  # without the wait it is seven times as much
    assert found.rows_s > 0.2


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
    log = SimpleNamespace(clock=Clock(), predicted=0, rows=0, positions=0)
    log.clock.start(ahead=0)
    config = SimpleNamespace(accumulation=1)
    at: Any = SimpleNamespace(run=SimpleNamespace(ranks=told, checks=None, rows=1, config=config), log=log)
    monkeypatch.setattr(steps.exact, "record_rows_read", lambda *_, **__: None)
    assert steps._close(at, range(1), [steps.StepRows(rows=[], first=0, batches=[])], (0, 0)) == 4.0


def test_clock_of_the_caller_has_the_windows_and_padding_is_no_token() -> None:
    """From which telemetry knows the moments that were timed. Both rates are shown, and they differ by the padding."""
    clock = Clock()
    outcome = finetune(preset("tiny", **{**SETTINGS, "steps": 4, "packed": False, "row_tokens": 56}), clock=clock)
    assert [window.last for window in clock.windows] == [1, 2, 4]
    assert clock.windows[-1].ended_s >= clock.windows[-1].began_s > 0
    assert outcome.timed_s == pytest.approx(sum(window.seconds for window in clock.timed()))
    assert outcome.timed_steps == 3
    assert outcome.tokens_per_s_per_gpu is not None
    assert outcome.positions_per_s_per_gpu is not None
    assert outcome.tokens_per_s_per_gpu < outcome.positions_per_s_per_gpu
