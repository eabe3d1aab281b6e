"""The fine-tune: one readable loop.

CPU runs compute in float32, GPU runs with a bf16 base and float32 adapters. The steps run in windows
(training/steps.py). Audits, digests and checkpoints lie between windows, outside the timed part. Evaluation and the final
checks run eagerly and with unsharded layers, whatever the training used.

SIGTERM or SIGUSR1 to any rank ends the run with a checkpoint that can be resumed. Schedulers send one some time before they
kill (Slurm: ``--signal=USR1@60``), torchrun 30 s before. The handler only sets a flag. After each window the ranks exchange
their flags, because the signal may reach one rank before the others.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from finetune_smoke import digests, ranks
from finetune_smoke.checkpoints import export, reading, writing
from finetune_smoke.checks import band, exact
from finetune_smoke.evaluation import forward_time, heldout
from finetune_smoke.parallel import strategy
from finetune_smoke.reporting import report
from finetune_smoke.reporting.outcome import Clock, Log, Outcome, collect_outcome, mean_last
from finetune_smoke.run import ProgressCallback, TrainingRun
from finetune_smoke.settings.config import Config, OwnInputError
from finetune_smoke.training import steps
from finetune_smoke.training.setup import prepare

__all__ = ["Outcome", "finetune"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
WINDOW_S = 5.0
"""A window ends after at most so long, by the time of the last one: only between windows is a signal obeyed. torchrun kills
30 s after it; the audits and a checkpoint of the 7B shape take the rest."""


def finetune(
    config: Config, *, progress: ProgressCallback | None = None, single_rank: bool = False, clock: Clock | None = None
) -> Outcome:
    """Run ``config`` on this rank and return the outcome, which is equal on every rank.

    The ranks are those of ``ranks.all_ranks``: of the default process group, of torchrun's variables, or a single one.

    Args:
        config: what to train.
        progress: called as ``progress(step, fraction)`` with what happens on this rank.
        single_rank: train on this rank by itself, whatever group it is in.
        clock: a new clock, which has this rank's windows of steps afterwards.

    Raises:
        InputError: (a ValueError) the model, data set, checkpoint or a setting cannot be used, on this or on another rank,
            or the run does not fit into a GPU's memory.

    Audits are repeatable on CUDA only if CUBLAS_WORKSPACE_CONFIG was set before cuBLAS started.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    signals = handle_signals(wanted=config.checkpoint_dir is not None)
    group = ranks.single_rank() if single_rank else ranks.all_ranks()
    with signals as stop, group as members, _explain_out_of_memory(config, members):
        begin = time.monotonic()
        # No name here for the run: leaving the group frees what nobody names, and compiled layers name themselves.
        return _finetune(
            prepare(config, ranks=members, progress=progress or (lambda _step, _fraction: None)), stop, clock or Clock(), begin
        )


def _finetune(run: TrainingRun, stop: StopRequest, clock: Clock, begin: float) -> Outcome:
    """Train and evaluate; the set-up began at ``begin``."""
    start = _starting_point(run)
    run = start.run
    saver = None if run.config.checkpoint_dir is None else writing.Saver(run=run, damaged=start.damaged)
    from peft.helpers import disable_input_dtype_casting  # noqa: PLC0415 -- peft is loaded only with a model

    # Autocast undoes peft's cast of every input to float32 at once, and it costs kernel launches.
    uncast = disable_input_dtype_casting(run.model.model, active=run.ranks.device.type == "cuda")
    with uncast, report.curve_writer(run) as board:
        export.claim_folder(run)
        log = Log(
            losses=start.losses,
            resumed_at=start.step or None,
            notes=[*run.notes, *start.notes],
            setup_s=time.monotonic() - begin,
            clock=clock,
            began_s=time.monotonic(),
        )
        with steps.open_steps(run, log) as at:
            _train(at, start.step, saver=saver, stop=stop, board=board)
        log.train_s = time.monotonic() - log.began_s
        log.notes += saver.notes() if saver else []
        log.saved_step = saver.saved if saver and saver.saved is not None else log.resumed_at
        if log.stopped:
            return collect_outcome(run, log)
        begin = time.monotonic()
        run.progress("evaluating", None)
        with strategy.unsharded_eager(run):
            log.heldout_loss, log.exact_match = heldout.evaluate(run)
            log.greedy_exact_match = heldout.generate(run)
            if run.config.steps > 1:  # the first step moves only the B matrices: A has no gradient while B is 0
                exact.record_moved(run.checks, before=run.initial.adapters, now=digests.fingerprints(run.adapters.values()))
            if run.config.restore_check:
                reading.check_restore(run)
            export.write_final(run)
        log.eval_s = time.monotonic() - begin
        outcome = collect_outcome(run, log)
    export.write_summary(run, outcome)
    return outcome


@dataclass(slots=True)
class StopRequest:
    """Whether this rank received a signal to stop; ``listens`` is equal on all ranks."""

    listens: bool
    received: bool = False

    def on_any_rank(self, ranks: ranks.Ranks) -> bool:
        """Whether any rank received a signal; a collective with the same result on all ranks."""
        return self.listens and bool(ranks.where(self.received))


@contextmanager
def handle_signals(*, wanted: bool) -> Iterator[StopRequest]:
    """Handle the signals within the block, if ``wanted``; restore the earlier handlers afterwards.

    Python lets only the main thread install handlers. In another thread the signals keep their earlier handlers.
    """
    stop = StopRequest(listens=wanted)

    def hear(_number: int, _frame: Any) -> None:
        stop.received = True

    possible = wanted and threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, hear) for number in SIGNALS} if possible else {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _starting_point(run: TrainingRun) -> reading.Resumed:
    """The first step and the losses before it: from a checkpoint if one is wanted and exists."""
    if run.config.checkpoint_dir is not None:
        reading.open_folder(run)
        if run.config.resume == "auto":
            resumed = reading.resume(run)
            run.progress(f"resumed at step {resumed.step}" if resumed.step else "no checkpoint to resume from", None)
            return resumed
        reading.require_none(run)
    return reading.Resumed(run=run)


@contextmanager
def _explain_out_of_memory(config: Config, members: ranks.Ranks) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU, or of the CPU, into an InputError that names settings for a smaller run."""
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
        raise OwnInputError(f"rank {members.rank}: out of memory ({reason}); try {', '.join(smaller)}") from error


def _train(at: steps.Steps, first: int, *, saver: writing.Saver | None, stop: StopRequest, board: report.CurveWriter) -> None:
    """Run all steps from ``first`` on, window by window, and what is due between windows."""
    run, log, config = at.run, at.log, at.run.config
    if first == config.steps:
        _audit_at_end(at, first)
    step_s, trained_s = None, 0.0
    while first < config.steps:
        if _due(first, config.audit_every):
            with log.clock.outside():
                steps.audit(at, first)
        last = _window_end(config, first, step_s)
        step_s = steps.window(at, range(first, last))
        log.note_limit(config.loss_limit)
        trained_s += step_s * (last - first)
        is_enough = log.clock.is_enough(trained_s)
        log.stopped = (stop.on_any_rank(run.ranks) or is_enough) and last < config.steps
        if log.stopped and is_enough:
            log.notes.append(f"ended after {last} of {config.steps} steps: they took {trained_s:.0f} s")
        run.progress(_progress_text(config, last, log), last / config.steps)
        board(last, log)
        with log.clock.outside():
            if log.stopped or last == config.steps:
                _audit_at_end(at, last)  # before saving: the audits decide whether the state is worth saving
            elif _due(last, config.digest_every):
                _compare_adapters(run, last)
        if saver and (log.stopped or last == config.steps or _due(last, config.checkpoint_every)):
            saver.save(step=last, losses=log.losses, norms=log.norms)
        if log.stopped:
            return
        first = last


def _audit_at_end(at: steps.Steps, step: int) -> None:
    """Run the checks that lie between windows once more after the last one: they find a fault of the last steps."""
    run, log = at.run, at.log
    if run.config.audit_every:
        steps.audit(at, step)
    _compare_base(run)
    _compare_adapters(run, step)
    machine = band.CurveMachine.of(run.ranks.device)
    band.record(run.checks, run.config, machine=machine, step_rows=run.step_rows, losses=log.losses)
    exact.record_finite(run.checks, values=[*log.losses, *log.norms], weights=run.adapters.values())
    if run.ranks.device.type == "cuda":
        log.peak_gib = torch.cuda.max_memory_allocated(run.ranks.device) / 2**30
    if step == run.config.steps and run.ranks.world_size > 1:
        at.captured = None  # frees the memory of the step's graphs
        _record_spread(run, log)


def _record_spread(run: TrainingRun, log: Log) -> None:
    """Record ``step_time_spread`` if there was a step: a run that is resumed after the last one carries what was found."""
    limit = run.config.spread_limit
    if limit is None:
        run.checks.leave_out("step_time_spread", why="--spread-limit is none")
    elif run.strategy == "fsdp" and run.ranks.device.type == "cuda":  # the base may not fit, and the last step is not saved yet
        run.checks.leave_out("step_time_spread", why="it would gather all of FSDP's layers on each GPU")
    elif log.forward_ms:
        with strategy.unsharded_eager(run):
            forward = forward_time.measure(run, log.forward_ms)
        forward_time.record_spread(run.checks, forward=forward, limit=limit)


def _progress_text(config: Config, step: int, log: Log) -> str:
    """Step, loss, speed of this rank and time left, by the last window."""
    window = log.clock.windows[-1]
    left_s = (config.steps - step) * window.step_s
    speed = f"{window.tokens / window.seconds:.0f} tokens/s/GPU, {left_s:.0f} s left"
    stopped = ", stopped by a signal" if log.stopped and log.clock.enough_s is None else ""
    return f"step {step} of {config.steps}: loss {mean_last(log.losses):.4f}, {speed}{stopped}"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _window_end(config: Config, first: int, step_s: float | None) -> int:
    """The step at which the window from ``first`` ends: the next one at which something is due, after at most 5 s.

    ``step_s`` is the slowest rank's time of a step in the last window. The first window has one step, since nobody knows.
    """
    intervals = (config.window_steps, config.audit_every, config.digest_every, config.checkpoint_every)
    most = 1 if step_s is None else max(1, int(WINDOW_S / step_s))
    return min(config.steps, first + most, *((first // every + 1) * every for every in intervals if every))


def _compare_adapters(run: TrainingRun, step: int) -> None:
    """Record ``adapter_digest``: compare the adapters of all ranks, after the last step the optimiser's state too."""
    mine = [digests.digest(run.adapters.values())]
    what = f"adapters after step {step}"
    if step == run.config.steps:
        state = run.optimizer.state_dict()["state"].values()
        mine.append(digests.digest(value for entry in state for value in entry.values()))
        what = f"adapters and optimiser after step {step}"
    exact.record_equal(run.checks, "adapter_digest", values=mine, what=what)


def _compare_base(run: TrainingRun) -> None:
    """Record ``base_digest`` again: compare the frozen weights that this rank holds with those before training."""
    local_base = strategy.local_base_digest(run.model, run.adapters, run.ranks.device)
    changed = run.ranks.where(local_base != run.initial.local_base)
    problem = f"frozen weights of {ranks.rank_list(changed)} have other bits than before training" if changed else None
    run.checks.record("base_digest", problem=problem, at_fault=changed)
