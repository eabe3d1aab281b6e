"""What a run tells: a few lines for people, a line of strict JSON for programs, curves for TensorBoard."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from finetune_smoke.settings.config import Config, as_input_error, preset
from pytest_gpucluster.config.strict_json import strict_json

if TYPE_CHECKING:  # these import torch, and options are checked before it
    from finetune_smoke.reporting.outcome import Log, Outcome
    from finetune_smoke.run import TrainingRun


def line(fields: Mapping[str, object]) -> str:
    """``RESULT {json}``: strict JSON, NaN and infinity as null."""
    return "RESULT " + json.dumps(strict_json(fields), allow_nan=False)


def result(config: Config, outcome: Outcome) -> dict[str, object]:
    """Outcome and settings for RESULT; a stopped run has not passed."""
    passed = not outcome.problems() and not outcome.stopped
    fields: dict[str, object] = {"preset": config.preset, "fault": config.fault, "passed": passed}
    return fields | dataclasses.asdict(outcome) | {"config": dataclasses.asdict(config)}


def summary(config: Config, outcome: Outcome) -> str:
    """A few lines for people: losses, speed and the result of each check."""
    limit = "no limit" if outcome.loss_limit is None else f"limit {outcome.loss_limit}"
    floor = "" if outcome.blind_floor_nats is None else f", {outcome.blind_floor_nats:.2f} without reading the prompt"
    scope = "all tokens" if config.dataset else "answers only"
    fall = f"loss {outcome.first_loss:.3f} -> {outcome.loss:.4f} in {outcome.steps} steps ({limit}{floor}; {scope})"
    lines = [fall if outcome.stopped else f"{fall}, held-out {outcome.heldout_loss:.4f}"]
    if outcome.exact_match is not None:
        drawn = "" if outcome.greedy_exact_match is None else f", {outcome.greedy_exact_match:.0%} of those generated"
        lines.append(f"held-out calls exact: {outcome.exact_match:.1%}{drawn}")
    if rates := outcome.window_rates:
        mfu = "" if outcome.mfu is None else f", MFU {outcome.mfu:.1%}"
        lines.append(
            f"{outcome.step_ms:.1f} ms a step, {outcome.tokens_per_s_per_gpu:.0f} tokens/s/GPU{mfu} "
            f"({outcome.positions_per_s_per_gpu:.0f} with padding); {len(rates)} windows, "
            f"{min(rates):.0f} to {max(rates):.0f}, waits for rows and copies inside"
        )
    lines.append(f"set-up {outcome.setup_s:.1f} s, training {outcome.train_s:.1f} s, evaluation {outcome.eval_s:.1f} s")
    peak = f", peak memory {max(outcome.memory_peak_gib):.1f} GiB" if outcome.memory_peak_gib else ""
    lines.append(
        f"strategy {outcome.strategy}: {outcome.step_rows} rows a step, {outcome.wire_gb_per_step:.2f} GB sent a GPU{peak}"
    )
    usual = preset(config.preset)
    changed = [f"{name} {value}" for name, value in dataclasses.asdict(config).items() if value != getattr(usual, name)]
    lines.append(f"settings: {', '.join([f'preset {config.preset}', *changed])}")
    lines += outcome.notes
    for name, check in outcome.checks.items():
        lines.append(f"{'ok  ' if check['passed'] else 'FAIL'} {name}: {check['detail']}")
    lines += [f"skip {name}: {why}" for name, why in outcome.left_out.items()]
    lines += [f"NOT GOOD: {problem}" for problem in outcome.problems()]
    if outcome.stopped:
        lines.append(f"STOPPED after step {outcome.steps} of {config.steps}, {_resumable(outcome)}")
    return "\n".join(lines)


def _resumable(outcome: Outcome) -> str:
    """Where --resume auto would continue."""
    if outcome.saved_step is None:
        return "without a checkpoint: --resume auto starts at step 0"
    where = "there" if outcome.saved_step == outcome.steps else f"the checkpoint of step {outcome.saved_step}"
    return f"resumable: --resume auto goes on from {where}"


CurveWriter: TypeAlias = "Callable[[int, Log], None]"
"""Called after each window with its last step and the log so far."""


@contextmanager
def curve_writer(run: TrainingRun) -> Iterator[CurveWriter]:
    """A writer of the curves of ``run``, which does nothing without --tensorboard.

    Raises InputError on every rank if the curves cannot be written.
    """
    folder = run.config.tensorboard
    writer = None if folder is None else run.ranks.run_on_rank_0(lambda: _writer(folder))
    try:
        yield (lambda _step, _log: None) if writer is None else functools.partial(_write, writer)
    finally:
        if writer is not None:
            writer.close()


def _writer(folder: str) -> Any:
    with as_input_error("--tensorboard needs the package tensorboard (pip install tensorboard)", ImportError):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- only there with the tensorboard package
    with as_input_error("directory for TensorBoard cannot be written"):
        return SummaryWriter(folder)


def _write(writer: Any, step: int, log: Log) -> None:
    """Write the steps of the last window. The log has the norms of this process, and the losses of earlier ones too."""
    window = log.clock.windows[-1]
    for at in range(window.first, window.last):
        writer.add_scalar("loss", log.losses[at], at)
        writer.add_scalar("gradient_norm", log.norms[at - step], at)
        writer.add_scalar("learning_rate", log.learning_rates[at - step], at)
    writer.add_scalar("tokens_per_s_per_gpu", window.tokens / window.seconds, step - 1)
    writer.add_scalar("step_ms", 1e3 * window.step_s, step - 1)
    writer.flush()
