"""The fine-tune: one readable loop.

CPU runs compute in float32, GPUs with a bf16 base, bf16 autocast and float32 adapters. Nothing waits for the device
inside a window of ``window_steps`` steps; losses and norms are collected there and read at its end. Audits, digests
and checkpoints lie between windows, outside the timed part.
"""

from __future__ import annotations

import functools
import math
import os
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from finetune_smoke import checkpoint, checks, data, evaluate, pace, ranks
from finetune_smoke.outcome import Log, Outcome, mean_last, settle
from finetune_smoke.setup import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.config import Config
    from finetune_smoke.state import Progress, Run

__all__ = ["Outcome", "finetune"]


def finetune(config: Config, *, progress: Progress | None = None) -> Outcome:
    """Run ``config`` on this rank and tell the outcome, equal on every rank.

    Uses an initialised default process group as it is; else makes one from torchrun's variables if WORLD_SIZE is
    above 1, and takes it down again; else runs alone. ``progress(step, fraction)`` hears what happens on this rank.
    Audits are repeatable on CUDA only if cuBLAS has not started without CUBLAS_WORKSPACE_CONFIG. Raises InputError
    (a ValueError) for a model, data set, checkpoint or setting that cannot be used, also if it concerns another rank.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with ranks.joined() as everyone:
        return _finetune(config, everyone, progress or (lambda _step, _fraction: None))


def _finetune(config: Config, everyone: ranks.Ranks, progress: Progress) -> Outcome:
    begin = time.monotonic()
    run = prepare(config, ranks=everyone, progress=progress)
    with _fewer_casts(run):
        first, losses = _start(run)
        log = Log(losses=losses, setup_s=time.monotonic() - begin)
        begin = time.monotonic()
        _train(run, first, log)
        log.train_s = time.monotonic() - begin
        begin = time.monotonic()
        run.progress("evaluating", None)
        log.heldout_loss, log.exact_match = evaluate.heldout(run)
        log.greedy_exact_match = evaluate.greedy(run)
        _last_checks(run, log)
        log.eval_s = time.monotonic() - begin
        return settle(run, log)


def _start(run: Run) -> tuple[int, list[float]]:
    """The first step to run, and the losses of those before it: from a checkpoint if one is asked for and there."""
    if run.config.checkpoint_dir is None:
        return 0, []
    checkpoint.open_folder(run)
    if run.config.resume != "auto":
        checkpoint.require_none(run)
        return 0, []
    first, losses = checkpoint.resume(run)
    run.progress(f"resumed at step {first}" if first else "no checkpoint to resume from", None)
    return first, losses


@contextmanager
def _fewer_casts(run: Run) -> Iterator[None]:
    """Under autocast peft's own cast of every input to float32 is undone at once: leave it out, it costs launches."""
    from peft.helpers import disable_input_dtype_casting  # noqa: PLC0415 -- peft is loaded only with a model

    with disable_input_dtype_casting(run.model.model, active=run.ranks.device.type == "cuda"):
        yield


def _train(run: Run, first: int, log: Log) -> None:
    """All steps from ``first`` on, window by window, with what is due between them."""
    config, begin = run.config, time.monotonic()
    while first < config.steps:
        if _due(first, config.audit_every):
            checks.audit(run.checks, step=first, work=functools.partial(_lock_step_pass, run, first))
        last = _window_end(config, first)
        _window(run, range(first, last), log)
        log.note_limit(config.loss_limit, seconds=time.monotonic() - begin)
        if last == config.steps or _due(last, config.digest_every):
            _compare_adapters(run, last)
        if config.checkpoint_dir is not None and (last == config.steps or _due(last, config.checkpoint_every)):
            checkpoint.save(run, step=last, losses=log.losses)
        run.progress(f"step {last} of {config.steps}: loss {mean_last(log.losses):.4f}", last / config.steps)
        first = last


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _window_end(config: Config, first: int) -> int:
    """The next step at which something is due."""
    intervals = (config.window_steps, config.audit_every, config.digest_every, config.checkpoint_every)
    return min(config.steps, *((first // every + 1) * every for every in intervals if every))


def _window(run: Run, steps: range, log: Log) -> None:
    """Make the rows of ``steps``, train on them without waiting in between, and note losses and times."""
    device, world_size = run.ranks.device, run.ranks.world_size
    batches = [data.batch(_rows(run, step, check=step == steps[0]), run.source.pad_id) for step in steps]
    counts = torch.tensor([batch.targets.numel() for batch in batches], dtype=torch.float64)
    log.predicted += int(counts.sum())
    log.rows += sum(len(batch.ids) for batch in batches)
    counts = run.ranks.sum_(counts.to(device))
    scales = (world_size / counts).float()  # DDP divides by the ranks; the mean is over all their tokens
    batches = [batch.to(device) for batch in batches]
    tokens = sum(batch.ids.numel() for batch in batches)
    sums: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    marks: list[tuple[Any, Any]] = []
    run.ranks.wait()
    begin = time.monotonic()
    for step, batch, scale in zip(steps, batches, scales, strict=True):
        loss, mark = _forward_backward(run, batch, scale, log)
        run.fault.spoil_averages(run.adapters, step)
        norms.append(torch.nn.utils.clip_grad_norm_(run.adapters.values(), run.config.clip_norm))
        _set_learning_rate(run, step)
        run.optimizer.step()
        run.optimizer.zero_grad()
        sums.append(loss.detach())
        marks.append(mark)
    run.ranks.wait()
    seconds = time.monotonic() - begin
    log.losses += (run.ranks.sum_(torch.stack(sums).double()) / counts).tolist()
    log.norms += torch.stack(norms).tolist()
    log.forward_ms += [_elapsed_ms(*mark) for mark in marks]
    log.step_s.append(seconds / len(steps))
    log.tokens_per_s.append(tokens / seconds)
    log.tokens += tokens


def _forward_backward(run: Run, batch: data.Batch, scale: torch.Tensor, log: Log) -> tuple[torch.Tensor, tuple[Any, Any]]:
    """Gradients of one step, averaged over the ranks; the summed loss of this rank and when its forward ran."""
    network = run.network
    never_reduced = run.fault.name == "noallreduce"
    with network.no_sync() if isinstance(network, DistributedDataParallel) and never_reduced else nullcontext():
        before = _mark(run.ranks.device)
        run.fault.slow_down(log.forward_ms[-1] / 1e3 if log.forward_ms else 0.0, run.ranks.device)
        with run.autocast():
            loss = network(batch.ids, batch.positions, batch.targets)
        after = _mark(run.ranks.device)
        (loss * scale).backward()
    return loss, (before, after)


def _mark(device: torch.device) -> Any:
    """This moment: an event on the GPU's own time line, or seconds on a CPU."""
    if device.type != "cuda":
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record()
    return event


def _elapsed_ms(before: Any, after: Any) -> float:
    return 1e3 * (after - before) if isinstance(before, float) else float(before.elapsed_time(after))


def _set_learning_rate(run: Run, step: int) -> None:
    """Linear warm-up, then cosine to a tenth of the peak at the last step."""
    config = run.config
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / config.steps))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0 if run.fault.name == "lr0" else config.learning_rate * warmup * cosine


def _rows(run: Run, step: int, *, check: bool) -> list[data.Row]:
    """The rows of this rank at ``step``; with ``check`` they are compared with what the step demands of every rank."""
    rank, world_size = run.ranks.rank, run.ranks.world_size
    demanded = data.indices(step, rank=rank, world_size=world_size, rows=run.rows)
    rows = [run.source.row(index) for index in run.fault.wrong_indices(demanded, rank)]
    rows = run.fault.wrong_answers(rows, demanded, run.source)
    if check:
        again = data.digest_rows([run.source.row(index) for index in demanded])
        checks.rows_read(run.checks, step=step, read=data.digest_rows(rows), demanded=again)
    return rows


def _lock_step_pass(run: Run, step: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and this rank's own gradients over rows that are the same on every rank; leaves the model as it was."""
    count = min(run.rows, 16)
    rows = [run.source.row(step * count + number) for number in range(count)]
    batch = data.batch(rows, run.source.pad_id).to(run.ranks.device)
    trained = [adapter for adapter in run.adapters.values() if adapter.requires_grad]
    with run.autocast():
        loss = run.model(batch.ids, batch.positions, batch.targets)
    return loss.detach(), list(torch.autograd.grad(loss / batch.targets.numel(), trained))


def _compare_adapters(run: Run, step: int) -> None:
    """``adapter_digest``: bits of the adapters on every rank; at the end those of the optimiser's state too."""
    mine = [checks.digest(run.adapters.values())]
    what = f"adapters after step {step}"
    if step == run.config.steps:
        state = run.optimizer.state_dict()["state"].values()
        mine.append(checks.digest(value for entry in state for value in entry.values()))
        what = f"adapters and optimiser after step {step}"
    checks.equal(run.checks, "adapter_digest", values=mine, what=what)


def _last_checks(run: Run, log: Log) -> None:
    """What can be told only at the end."""
    checks.finite(run.checks, values=[*log.losses, *log.norms])
    if run.config.steps > 1:  # the first step moves only the B matrices: A has no gradient while B is 0
        checks.moved(run.checks, before=run.start, now=checks.fingerprints(run.adapters.values()))
    if run.config.restore_check:
        checkpoint.check_restore(run)
    if log.forward_ms:
        checks.spread(run.checks, forward_ms=pace.forward_ms(run, log.forward_ms), limit=run.config.spread_limit)
