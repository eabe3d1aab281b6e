"""Steps, window by window: rows, forward, backward with all-reduces beside it, clip, optimiser.

Nothing waits for the device inside a window. Losses and norms stay on the device and are read at the window's end. The clock
of the rates (reporting/outcome.py) runs all the time; compiling, capturing and audits lie outside it.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from finetune_smoke.checks import exact
from finetune_smoke.data import batches
from finetune_smoke.model import gradients
from finetune_smoke.parallel import cuda_graphs, strategy
from finetune_smoke.reporting.outcome import Log
from finetune_smoke.run import TrainingRun

AUDITED_TOKENS = 4096
"""The most tokens of an audit, or one row: 2 rows of the 7B shape, whose eager pass must fit beside its training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """What this rank reads at a step: ``rows``, the number of the ``first`` one, and a batch for each pass in host memory."""

    rows: list[batches.Row]
    first: int
    batches: list[batches.Batch]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(row.tokens for row in self.rows)

    @property
    def positions(self) -> int:
        """Tokens that the kernels see, padding included."""
        return sum(batch.ids.numel() for batch in self.batches)

    @property
    def predicted(self) -> int:
        """Tokens that count in the loss."""
        return sum(batch.targets.numel() for batch in self.batches)


@dataclass(slots=True, kw_only=True)
class Steps:
    """What the windows of a run share: ``captured`` is None while there are no CUDA graphs, ``buckets`` for a single rank."""

    run: TrainingRun
    log: Log
    rows: batches.Loader[StepRows]
    buckets: gradients.Buckets | None
    capturing: bool
    captured: cuda_graphs.Captured | None = None


@contextmanager
def open_steps(run: TrainingRun, log: Log) -> Iterator[Steps]:
    """Bind the gradients, start the loader of rows and count the peak of memory; records the audits that never ran."""
    config = run.config
    why_not = cuda_graphs.obstacle(config, run.ranks) if config.cuda_graph else None
    if why_not:
        _without_graphs(run, log, why_not)
        run.progress(log.notes[-1], None)
    elif not config.cuda_graph:
        run.checks.leave_out("graph_lock_step", why="no CUDA graphs here: --cuda-graph is off")
    if config.compile == "layers":
        log.notes.append("steps run compiled decoder layers; lock-step audits and evaluation run them eagerly")
    run.gradients.bind()
    ranks, passes = run.ranks.world_size, config.accumulation
    batch = f"{ranks * run.rows * passes} rows a step: {ranks} ranks of {run.rows} rows in {passes} passes"
    run.progress(f"{batch}; {run.gradients.flat.numel():,} trained parameters, strategy {run.strategy}", None)
    if run.ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.ranks.device)
    capturing = config.cuda_graph and why_not is None
    make = functools.partial(step_rows, run, width=config.row_tokens if capturing else None)
    ahead = max(config.prefetch, config.window_steps) if config.loader_workers else 0
    # The loader's threads page-lock memory by this rank's GPU, not by the first one.
    begin = functools.partial(torch.cuda.set_device, run.ranks.device) if run.ranks.device.type == "cuda" else lambda: None
    with (
        batches.loading(make, workers=config.loader_workers, ahead=ahead, last=config.steps, begin=begin) as rows,
        gradients.in_buckets(run.gradients, run.ranks) as buckets,
    ):
        log.clock.start(ahead=ahead)
        yield Steps(run=run, log=log, rows=rows, buckets=buckets, capturing=capturing)
    _record_skipped_audits(run)


def _without_graphs(run: TrainingRun, log: Log, why: str) -> None:
    log.notes.append(f"no CUDA graph: {why}; steps run eagerly")
    run.checks.leave_out("graph_lock_step", why=f"no CUDA graphs here: {why}")


def _record_skipped_audits(run: TrainingRun) -> None:
    """Mark audits that never ran as left out, with the reason."""
    no_audit = None if run.config.audit_every else "--audit-every is 0"
    if run.config.lora_dropout:
        no_audit = "--lora-dropout draws other numbers on every rank"
    why = {"lock_step": no_audit, "graph_lock_step": no_audit or "no step was replayed before an audit"}
    if run.ranks.world_size > 1:
        why["all_reduce"] = no_audit
    for name, reason in why.items():
        if reason and not run.checks.has_result(name):
            run.checks.leave_out(name, why=reason)


def demanded_rows(run: TrainingRun, step: int) -> range:
    """The numbers of the rows that this rank has to read at ``step``, for all its passes."""
    rows = run.rows * run.config.accumulation
    return batches.indices(step, rank=run.ranks.rank, world_size=run.ranks.world_size, rows=rows)


def read_rows(run: TrainingRun, step: int) -> list[batches.Row]:
    """The rows that this rank reads at ``step``."""
    due = demanded_rows(run, step)
    rows = [run.source.row(number) for number in run.fault.wrong_indices(due, run.ranks.rank)]
    return run.fault.wrong_answers(rows, due, run.source)


def step_rows(run: TrainingRun, step: int, *, width: int | None) -> StepRows:
    """What this rank reads at ``step``, filled to ``width`` tokens or to a common one; page-locked for a GPU."""
    rows = read_rows(run, step)
    first = run.fault.wrong_indices(demanded_rows(run, step), run.ranks.rank).start
    passes = [rows[at : at + run.rows] for at in range(0, len(rows), run.rows)]
    most = run.config.row_tokens
    made = [batches.batch(each, run.source.pad_id, width or batches.common_width(each, most=most)) for each in passes]
    if run.ranks.device.type == "cuda":
        made = [batch.pinned() for batch in made]
    return StepRows(rows=rows, first=first, batches=made)


def window(at: Steps, steps: range) -> float:
    """Train on the rows of ``steps`` without waiting in between, log losses and times; returns the slowest rank's s a step."""
    run, log = at.run, at.log
    taken = run.ranks.run_on_all_ranks(lambda: _take(at, steps))
    digests = at.rows.beside(functools.partial(_digests, run, steps.start, taken[0]))
    passes = [[batch.to(run.ranks.device) for batch in each.batches] for each in taken]
    counts = run.ranks.sum_(torch.tensor([each.predicted for each in taken], dtype=torch.float64).to(run.ranks.device))
    scales = (1.0 / counts).float()
    with log.clock.outside():
        _compile(at, passes[0], scales[0])
        _capture(at, [batch for each in passes for batch in each])
    if at.captured is not None:
        room = len(at.captured.batch.targets)
        passes = [[cuda_graphs.padded(batch, room) if at.captured.fits(batch) else batch for batch in each] for each in passes]
    done = [_step(at, step, its_batches, scale) for step, its_batches, scale in zip(steps, passes, scales, strict=True)]
    sums, norms = zip(*done, strict=True)
    log.losses += (run.ranks.sum_(torch.stack(sums).double()) / counts).tolist()
    log.norms += torch.stack(norms).tolist()
    log.learning_rates += [learning_rate(run, step) for step in steps]
    run.ranks.wait()
    return _close(at, steps, taken, digests())


def _close(at: Steps, steps: range, taken: list[StepRows], digests: tuple[int, int]) -> float:
    """Log the times and counts of a window whose work is done, record ``data_digest``; returns the slowest rank's s a step."""
    run, log = at.run, at.log
    due = demanded_rows(run, steps.start)
    exact.record_rows_read(run.checks, step=steps.start, read=(taken[0].first, digests[0]), demanded=(due.start, digests[1]))
    log.predicted += sum(each.predicted for each in taken)
    log.rows += sum(len(each.rows) for each in taken)
    tokens, positions = (sum(getattr(each, kind) for each in taken) for kind in ("tokens", "positions"))
    log.positions += positions
    closed = log.clock.close(steps, tokens=tokens, positions=positions)
    return max(step_s for (step_s,) in run.ranks.gather_floats([closed.step_s]))


def _take(at: Steps, steps: range) -> list[StepRows]:
    """What this rank reads at ``steps``. The wait counts as ``rows_s``."""
    begin = time.monotonic()
    taken = [at.rows.take(step) for step in steps]
    at.log.rows_s += time.monotonic() - begin
    return taken


def _digests(run: TrainingRun, step: int, taken: StepRows) -> tuple[int, int]:
    """Digests of the rows that were ``taken`` at ``step``, and of those that are due."""
    again = [run.source.row(number) for number in demanded_rows(run, step)]
    return batches.digest_rows(taken.rows), batches.digest_rows(again)


def _compile(at: Steps, batches: Sequence[batches.Batch], scale: torch.Tensor) -> None:
    """In the first window, if layers are compiled: run one pass, discard its gradients, and log how long it took."""
    if at.run.config.compile == "off" or at.log.compile_s is not None:
        return
    at.run.progress("compiling the decoder layers", None)
    begin = time.monotonic()
    _forward_backward(at, batches[0], scale)
    at.run.ranks.wait()
    at.log.compile_s = time.monotonic() - begin


def _capture(at: Steps, batches: Sequence[batches.Batch]) -> None:
    """Before the second window, if graphs are wanted: capture a step. The optimiser has its state by then."""
    if not at.capturing or at.captured is not None or not at.log.clock.windows:
        return
    # All ranks need the same shape: other shapes may round differently, and replays are compared.
    room = max(most for (most,) in at.run.ranks.gather([cuda_graphs.capacity(batches, at.run.rows)]))
    at.run.progress("capturing the step as CUDA graphs", None)
    captured, why_not = cuda_graphs.try_capture(at.run, cuda_graphs.padded(batches[0], room))
    if captured is None:
        at.capturing = False
        _without_graphs(at.run, at.log, str(why_not))
        return
    at.captured = captured
    at.log.notes.append("steps run as CUDA graphs after the first window; lock-step audits run eagerly, and replay them too")


def _step(at: Steps, step: int, batches: Sequence[batches.Batch], scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step over ``batches``, one for each pass: (summed loss of this rank, norm of the averaged gradients)."""
    run = at.run
    run.fault.enter_step(run.adapters, strategy.frozen(run.model, run.adapters), step=step, last=run.config.steps - 1)
    run.gradients.zero()
    sums = []
    # With graphs the whole buffer is sent: which passes are replayed differs between ranks.
    buckets = None if at.captured is not None or run.fault.name == "noallreduce" else at.buckets
    for number, batch in enumerate(batches, start=1):
        if buckets is not None and number == len(batches):
            buckets.expect()
        if at.captured is not None and at.captured.fits(batch):
            sums.append(_replayed(run, at.captured, batch, scale))
        else:
            sums.append(_forward_backward(at, batch, scale))
    if buckets is not None:
        buckets.finish()
    elif run.fault.name != "noallreduce":
        run.ranks.sum_(run.gradients.flat)
    if at.captured is not None:
        return sum(sums[1:], sums[0]), at.captured.run_update(learning_rate(run, step))
    run.fault.spoil_averages(run.adapters, step)
    norm = run.gradients.clip(run.config.clip_norm)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run, step)
    run.optimizer.step()
    return sum(sums[1:], sums[0]), norm


def _forward_backward(at: Steps, batch: batches.Batch, scale: torch.Tensor) -> torch.Tensor:
    """Add this rank's gradients of one pass; returns the summed loss. The forward's CPU time of this thread is logged."""
    run, seen_ms = at.run, at.log.forward_ms
    begin_s = time.thread_time()
    run.fault.slow_down(seen_ms, run.ranks.device)
    with run.autocast():
        loss: torch.Tensor = run.model(batch.ids, batch.positions, batch.targets)
    seen_ms.append(1e3 * (time.thread_time() - begin_s))
    torch.autograd.backward(loss * scale, inputs=run.gradients.parameters)  # adds to parameter.grad, which is the view
    return loss.detach()


def _replayed(run: TrainingRun, captured: cuda_graphs.Captured, batch: batches.Batch, scale: torch.Tensor) -> torch.Tensor:
    """Replay one pass and add this rank's gradients; returns the summed loss."""
    summed = captured.run_backward(batch, scale)
    run.fault.spoil_replay(run.gradients.flat)
    return summed


def learning_rate(run: TrainingRun, step: int) -> float:
    """Linear warm-up to the whole peak, then cosine, which would reach 0 one step after the last, as in transformers."""
    config = run.config
    if run.fault.name == "lr0":
        return 0.0
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    falling = max(1, config.steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - config.warmup_steps) / falling))


def lock_step_pass(run: TrainingRun, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and this rank's own gradients over rows that are the same on every rank; changes nothing in the model.

    The pass runs eagerly: a compiled layer would be compiled again for the repeatable kernels.
    """
    count = min(run.rows, 16, max(1, AUDITED_TOKENS // run.config.row_tokens))
    batch = run.batch_of(range(step * count, (step + 1) * count))
    with strategy.eager(run), run.autocast():
        loss = run.model(batch.ids, batch.positions, batch.targets)
        found = torch.autograd.grad(loss / batch.targets.numel(), run.gradients.parameters)
    return loss.detach(), list(found)


def audit(at: Steps, step: int) -> None:
    """Run ``lock_step`` and ``all_reduce``, and ``graph_lock_step`` once steps are replayed."""
    exact.audit(at.run.checks, step=step, work=functools.partial(lock_step_pass, at.run, step))
    if at.captured is not None:
        exact.audit_replays(at.run.checks, step=step, work=functools.partial(replayed_pass, at.run, at.captured, step))


def replayed_pass(run: TrainingRun, captured: cuda_graphs.Captured, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """As ``lock_step_pass``, by replaying the captured graph over as many rows as it holds."""
    batch = run.batch_of(range(step * run.rows, (step + 1) * run.rows), captured.batch.ids.shape[1])
    full = cuda_graphs.padded(batch, len(captured.batch.targets))
    run.gradients.zero()
    loss = _replayed(run, captured, full, torch.full((), 1 / len(full.targets), device=run.ranks.device))
    found = run.gradients.flat.clone()
    run.gradients.zero()
    return loss, [found]
