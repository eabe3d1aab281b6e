"""The fine-tune: one readable loop.

CPU runs compute in float32, GPUs with a bf16 or float8 base and float32 adapters. The steps themselves run in windows
(steps.py); audits, digests and checkpoints lie between windows, outside the timed part. Evaluation and the checks of the
end run eagerly and with whole layers, whatever training did.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetune_smoke import digests, ranks
from finetune_smoke.checkpoints import export, reading, writing
from finetune_smoke.checks import exact
from finetune_smoke.evaluation import forward_time, heldout
from finetune_smoke.parallel import strategy
from finetune_smoke.reporting import tensorboard
from finetune_smoke.reporting.outcome import Log, Outcome, mean_last, settle
from finetune_smoke.settings.config import OwnInputError
from finetune_smoke.training import steps, stopping
from finetune_smoke.training.setup import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.run import Progress, Run
    from finetune_smoke.settings.config import Config

__all__ = ["Outcome", "finetune"]


def finetune(config: Config, *, progress: Progress | None = None, alone: bool = False) -> Outcome:
    """Run ``config`` on this rank and tell the outcome, equal on every rank.

    Uses an initialised default process group as it is; else makes one from torchrun's variables if WORLD_SIZE is
    above 1, and takes it down again; else runs alone, and with ``alone`` in any case. ``progress(step, fraction)`` hears
    what happens on this rank.
    Audits are repeatable on CUDA only if cuBLAS has not started without CUBLAS_WORKSPACE_CONFIG. Raises InputError
    (a ValueError) for a model, data set, checkpoint or setting that cannot be used, also if it concerns another rank,
    and for a run that does not fit into a GPU's memory.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    listening = stopping.listening(wanted=config.checkpoint_dir is not None)
    with listening as stop, ranks.alone() if alone else ranks.joined() as everyone, _memory_named(config, everyone):
        return _finetune(config, everyone, progress or (lambda _step, _fraction: None), stop)


def _finetune(config: Config, everyone: ranks.Ranks, progress: Progress, stop: stopping.Stop) -> Outcome:
    begin = time.monotonic()
    run = prepare(config, ranks=everyone, progress=progress)
    start = _start(run)
    run = start.run
    with (
        strategy.gathering(run),
        _fewer_casts(run),
        tensorboard.board(run) as board,
        writing.saver(run, start.damaged) as saver,
    ):
        export.claim(run)
        log = Log(
            losses=start.losses,
            resumed_at=start.step or None,
            notes=[*run.notes, *start.notes],
            setup_s=time.monotonic() - begin,
        )
        begin = time.monotonic()
        _train(run, start.step, log, Between(saver=saver, stop=stop, board=board))
        log.train_s = time.monotonic() - begin
        log.notes += saver.remarks() if saver else []
        log.saved_step = saver.saved if saver and saver.saved is not None else log.resumed_at
        if log.stopped:
            return settle(run, log)
        begin = time.monotonic()
        run.progress("evaluating", None)
        with strategy.plainly(run):
            log.heldout_loss, log.exact_match = heldout.heldout(run)
            log.greedy_exact_match = heldout.greedy(run)
            _last_checks(run, log)
            if saver:
                saver.amend()
            export.final(run)
        log.eval_s = time.monotonic() - begin
        outcome = settle(run, log)
    export.summarize(run, outcome)
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What is there for the time between two windows; no saver without a checkpoint directory."""

    saver: writing.Saver | None
    stop: stopping.Stop
    board: tensorboard.Board


def _start(run: Run) -> reading.Resumed:
    """Where to begin, with the losses before it: from a checkpoint if one is asked for and there."""
    nothing = reading.Resumed(run=run, step=0, losses=[], notes=[])
    if run.config.checkpoint_dir is None:
        return nothing
    reading.open_folder(run)
    if run.config.resume != "auto":
        reading.require_none(run)
        return nothing
    resumed = reading.resume(run)
    run.progress(f"resumed at step {resumed.step}" if resumed.step else "no checkpoint to resume from", None)
    return resumed


@contextmanager
def _memory_named(config: Config, everyone: ranks.Ranks) -> Iterator[None]:
    """Say which settings make a run smaller where the memory of a GPU, or of a host that computes, does not suffice."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and "DefaultCPUAllocator: can't allocate" not in str(error):
            raise
        smaller = [f"fewer --rows than {config.rows} with more --accumulation", f"--row-tokens below {config.row_tokens}"]
        smaller += [] if config.gradient_checkpointing else ["--gradient-checkpointing"]
        smaller += [] if config.strategy == "fsdp" else ["--strategy fsdp on several GPUs"]
        smaller += ["--cpu-offload"] if config.strategy == "fsdp" and not config.cpu_offload else []
        reason = (str(error).partition("DefaultCPUAllocator: ")[2] or str(error)).partition(". ")[0]
        raise OwnInputError(f"rank {everyone.rank}: out of memory ({reason}); try {', '.join(smaller)}") from error


@contextmanager
def _fewer_casts(run: Run) -> Iterator[None]:
    """Under autocast peft's own cast of every input to float32 is undone at once: leave it out, it costs launches."""
    from peft.helpers import disable_input_dtype_casting  # noqa: PLC0415 -- peft is loaded only with a model

    with disable_input_dtype_casting(run.model.model, active=run.ranks.device.type == "cuda"):
        yield


def _train(run: Run, first: int, log: Log, between: Between) -> None:
    """All steps from ``first`` on, window by window, with what is due between them."""
    begin = time.monotonic()
    with steps.steps_of(run, log) as at:
        _windows(at, first, between, begin)


def _windows(at: steps.Steps, first: int, between: Between, begin: float) -> None:
    run, log, config = at.run, at.log, at.run.config
    if first == config.steps:
        _look_at_the_end(at, first)
    while first < config.steps:
        if _due(first, config.audit_every):
            steps.audit(at, first)
        last = _window_end(config, first)
        steps.window(at, range(first, last))
        log.note_limit(config.loss_limit, seconds=time.monotonic() - begin)
        between.board(last, log)
        log.stopped = between.stop.agreed(run.ranks) and last < config.steps
        if log.stopped or last == config.steps:
            _look_at_the_end(at, last)  # before it is saved: what is unfit is not
        elif _due(last, config.digest_every):
            _compare_adapters(run, last)
        if between.saver and (log.stopped or last == config.steps or _due(last, config.checkpoint_every)):
            between.saver.save(step=last, losses=log.losses, norms=log.norms)
        run.progress(_progress(config, last, log), last / config.steps)
        if log.stopped:
            return
        first = last


def _look_at_the_end(at: steps.Steps, step: int) -> None:
    """What is due between windows, once more after the last: a fault of the last steps would else be seen by nobody."""
    run, log = at.run, at.log
    if run.config.audit_every:
        steps.audit(at, step)
    _compare_base(run)
    _compare_adapters(run, step)
    exact.finite(run.checks, values=[*log.losses, *log.norms], weights=run.adapters.values())


def _progress(config: Config, step: int, log: Log) -> str:
    """Where the run is after ``step`` steps, how fast this rank is and how long it will take, by its last window."""
    left_s = (config.steps - step) * log.step_s[-1]
    speed = f"{log.tokens_per_s[-1]:.0f} tokens/s/GPU, {left_s:.0f} s left"
    stopped = ", stopped by a signal" if log.stopped else ""
    return f"step {step} of {config.steps}: loss {mean_last(log.losses):.4f}, {speed}{stopped}"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _window_end(config: Config, first: int) -> int:
    """The next step at which something is due."""
    intervals = (config.window_steps, config.audit_every, config.digest_every, config.checkpoint_every)
    return min(config.steps, *((first // every + 1) * every for every in intervals if every))


def _compare_adapters(run: Run, step: int) -> None:
    """``adapter_digest``: bits of the adapters on every rank; at the end those of the optimiser's state too."""
    mine = [digests.digest(run.adapters.values())]
    what = f"adapters after step {step}"
    if step == run.config.steps:
        state = run.optimizer.state_dict()["state"].values()
        mine.append(digests.digest(value for entry in state for value in entry.values()))
        what = f"adapters and optimiser after step {step}"
    exact.equal(run.checks, "adapter_digest", values=mine, what=what)


def _compare_base(run: Run) -> None:
    """``base_digest`` once more: bits of the frozen weights after training, on each rank as it holds them."""
    now = strategy.held_digest(run.model, run.adapters, run.ranks.device)
    exact.unchanged(run.checks, before=run.held_digest, now=now)


def _last_checks(run: Run, log: Log) -> None:
    """What can be told only at the end."""
    if run.config.steps > 1:  # the first step moves only the B matrices: A has no gradient while B is 0
        exact.moved(run.checks, before=run.start, now=digests.fingerprints(run.adapters.values()))
    if run.config.restore_check:
        reading.check_restore(run)
    if log.forward_ms and run.ranks.world_size > 1:
        forward_time.spread(run.checks, forward=forward_time.forward(run, log.forward_ms), limit=run.config.spread_limit)
