"""The outcome of a run, as plain data that is the same on every rank, and the clock of its rates.

The clock is wall time over everything that a user waits for, by windows of steps. Rows, batching, copies, clipping, the
optimiser, saving and the waits between windows lie inside. Compiling, capturing and the checks, which are no training, lie
outside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from finetune_smoke import digests
from finetune_smoke.checks.exact import CheckResult
from finetune_smoke.model import flops
from finetune_smoke.parallel import strategy
from finetune_smoke.run import TrainingRun

LAST = 10
"""The loss of a run is the mean of this many last steps."""
ENOUGH_WINDOWS = 8
"""So many timed windows tell how far they lie apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps ``first`` to ``last`` - 1 on this rank: ``tokens`` without padding, ``positions`` with it.

    ``began_s`` and ``ended_s`` are of ``time.monotonic``. ``seconds`` is the time between, less what lay outside.
    """

    first: int
    last: int
    tokens: int
    positions: int
    seconds: float
    began_s: float
    ended_s: float

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.seconds / (self.last - self.first)


@dataclass(slots=True)
class Clock:
    """Runs from ``start`` on. Each ``close`` makes a Window of the time since the last one.

    ``ahead`` is the number of steps for which rows may lie ready: rows made while layers were compiled. ``enough_s``: what is
    trained for its rate alone ends early where its steps take longer in all; None for what has to learn.
    """

    ahead: int = 0
    enough_s: float | None = None
    windows: list[Window] = field(default_factory=list)
    _since_s: float = 0.0
    _outside_s: float = 0.0

    def start(self, *, ahead: int) -> None:
        """Begin the first window now."""
        self.ahead, self._since_s, self._outside_s = ahead, time.monotonic(), 0.0

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let the time of the block count for no window."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._outside_s += time.monotonic() - begin

    def close(self, steps: range, *, tokens: int, positions: int) -> Window:
        """End the window of ``steps``, whose work the device has finished, and begin the next one."""
        now = time.monotonic()
        window = Window(
            first=steps.start,
            last=steps.stop,
            tokens=tokens,
            positions=positions,
            seconds=now - self._since_s - self._outside_s,
            began_s=self._since_s,
            ended_s=now,
        )
        self.windows.append(window)
        self._since_s, self._outside_s = now, 0.0
        return window

    def is_enough(self, trained_s: float) -> bool:
        """Whether there are :data:`ENOUGH_WINDOWS` timed windows after ``trained_s``, which is the same on every rank."""
        return self.enough_s is not None and trained_s > self.enough_s and len(self.timed()) >= ENOUGH_WINDOWS

    def timed(self) -> Sequence[Window]:
        """The windows that a rate is made of.

        The first is left out, and those whose rows may have been made before it ended: they would hide a slow loader.
        A run too short for that leaves out the first alone, if there is another.
        """
        if len(self.windows) < 2:
            return self.windows
        settled = [window for window in self.windows[1:] if window.first >= self.windows[0].last + self.ahead]
        return settled or self.windows[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run: plain data, the same on every rank. Losses are global means in nats per predicted token.

    ``loss`` is the mean of the last 10 steps, ``step_below_limit`` the first step at which such a mean was below
    ``loss_limit``, noted ``seconds_below_limit`` after the first step of this process. ``exact_match`` is the share of
    held-out calls right to the last token, ``greedy_exact_match`` that of calls really generated. Seconds are those of the
    slowest rank. ``checks`` that compare ranks are absent for a single rank; ``left_out`` says why others do not apply. If
    a signal ``stopped`` the run, values that need a finished training are NaN or None. ``resumed_at`` is the step of the
    checkpoint that was resumed, ``saved_step`` that of the newest one saved or resumed. ``notes`` say which checkpoints
    were passed over or not saved, which failures a resumed one carried, and what was left out or changed. ``step_rows`` are
    the rows of all ranks and passes of a step, ``wire_gb_per_step`` (10^9 bytes) is what each GPU sends,
    ``memory_peak_gib`` the peak of each rank, None on a CPU, and ``rows_s`` how long training waited for rows. FSDP divides
    ``sharded_gib`` of frozen weights among the ranks, and gathers the ``layer_gib`` of a layer at once; 0 without FSDP.

    Rates are by the wall clock over everything but compiling, capturing and the checks (``Clock``), in ``timed_steps``
    steps of ``timed_s`` seconds, after the first windows. ``tokens_per_s_per_gpu`` counts no padding,
    ``positions_per_s_per_gpu`` does; both are the mean of the ranks, and ``window_rates`` has the first of each timed window.
    All are None or empty if no step was run; ``mfu``, which counts padding, also without a GPU or its peak rate.
    """

    loss: float
    first_loss: float
    losses: list[float]
    loss_limit: float | None
    step_below_limit: int | None
    seconds_below_limit: float | None
    blind_floor_nats: float | None
    exact_match: float | None
    greedy_exact_match: float | None
    heldout_loss: float
    steps: int
    world_size: int
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    step_ms: float | None = None
    adapter_digest: str
    checks: dict[str, CheckResult]
    train_s: float
    setup_s: float
    eval_s: float
    stopped: bool = False
    resumed_at: int | None = None
    notes: list[str] = field(default_factory=list)
    saved_step: int | None = None
    strategy: str = "none"
    step_rows: int = 0
    trained_parameters: int = 0
    wire_gb_per_step: float = 0.0
    memory_peak_gib: list[float] | None = None
    sharded_gib: float = 0.0
    layer_gib: float = 0.0
    compile_s: float | None = None
    rows_s: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)
    positions_per_s_per_gpu: float | None = None
    window_rates: list[float] = field(default_factory=list)
    timed_steps: int = 0
    timed_s: float = 0.0

    def problems(self) -> list[str]:
        """A line for each failed check and for a loss above its limit; empty if the run is good."""
        bad = [f"{name}: {check['detail']}" for name, check in self.checks.items() if not check["passed"]]
        if self.loss_limit is not None and not self.stopped and not self.loss < self.loss_limit:
            bad.insert(0, f"loss {self.loss:.4f} is not below {self.loss_limit}")
        return bad


@dataclass(slots=True)
class Log:
    """What training and evaluation measured on this rank; losses and shares of right answers are those of all ranks.

    Outcome has what has the same name. ``began_s``: when the training began, of ``time.monotonic``.
    """

    losses: list[float]
    resumed_at: int | None = None
    notes: list[str] = field(default_factory=list)
    saved_step: int | None = None
    stopped: bool = False
    compile_s: float | None = None
    rows_s: float = 0.0
    peak_gib: float | None = None
    norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    began_s: float = 0.0
    clock: Clock = field(default_factory=Clock)
    positions: int = 0
    predicted: int = 0
    rows: int = 0
    step_below_limit: int | None = None
    seconds_below_limit: float | None = None
    heldout_loss: float = float("nan")
    exact_match: float | None = None
    greedy_exact_match: float | None = None
    setup_s: float = 0.0
    train_s: float = 0.0
    eval_s: float = 0.0

    def note_limit(self, limit: float | None) -> None:
        """Note the first step whose mean of 10 is below ``limit``, and the seconds until now."""
        if limit is None or self.step_below_limit is not None:
            return
        for step in range(LAST - 1, len(self.losses)):
            if statistics.fmean(self.losses[step + 1 - LAST : step + 1]) < limit:
                self.step_below_limit, self.seconds_below_limit = step, time.monotonic() - self.began_s
                return


def mean_last(losses: list[float]) -> float:
    """The mean of the last 10 losses."""
    return statistics.fmean(losses[-LAST:])


def collect_outcome(run: TrainingRun, log: Log) -> Outcome:
    """The Outcome of all ranks' logs: seconds are those of the slowest rank, rates the mean of the ranks. A collective."""
    shared = {each.name for each in fields(Outcome)} & {each.name for each in fields(Log)}
    measured = {name: getattr(log, name) for name in sorted(shared)}
    timed = [name for name in measured if name == "seconds_below_limit" or name.endswith("_s")]
    everyone = run.ranks.gather_floats([measured[name] or 0.0 for name in timed])
    for name, column in zip(timed, zip(*everyone, strict=True), strict=True):
        measured[name] = None if measured[name] is None else max(column)
    peak = log.peak_gib
    peaks = None if peak is None else [one for (one,) in run.ranks.gather_floats([peak])]
    rates = _rates(run, log)
    layers = _sharded_bytes(run)
    return Outcome(
        loss=mean_last(log.losses),
        first_loss=log.losses[0],
        loss_limit=run.config.loss_limit,
        blind_floor_nats=run.source.blind_floor_nats,
        steps=len(log.losses),
        world_size=run.ranks.world_size,
        mfu=_mfu(run, log, rates.get("positions_per_s_per_gpu")),
        adapter_digest=digests.as_hex(run.ranks.gather([digests.digest(run.adapters.values())])[0][0]),
        checks=run.checks.results(),
        strategy=run.strategy,
        step_rows=run.step_rows,
        trained_parameters=run.gradients.flat.numel(),
        wire_gb_per_step=_wire_gb(run, sum(layers)),
        memory_peak_gib=peaks,
        sharded_gib=sum(layers) / 2**30,
        layer_gib=max(layers, default=0) / 2**30,
        left_out=run.checks.left_out(),
        **measured,
        **rates,
    )


def _sharded_bytes(run: TrainingRun) -> list[int]:
    """Bytes of frozen weights of each layer that FSDP shards, over all ranks; empty without FSDP."""
    layers = strategy.layers_of(run.model) if run.strategy == "fsdp" else []
    frozen = [set(layer.parameters()) - set(run.adapters.values()) for layer in layers]
    return [sum(parameter.numel() * parameter.element_size() for parameter in layer) for layer in frozen]


def _wire_gb(run: TrainingRun, sharded: int) -> float:
    """What a GPU sends in a step, in GB."""
    reduced = run.gradients.flat.numel() * run.gradients.flat.element_size()
    gathers = 2 * run.config.accumulation  # before each forward and before each backward
    return flops.wire_bytes(reduced, world_size=run.ranks.world_size, sharded_bytes=sharded, gathers=gathers) / 1e9


def _rates(run: TrainingRun, log: Log) -> dict[str, Any]:
    """Fields of Outcome for the timed windows: rates are the mean of the ranks, seconds the slowest rank's. A collective."""
    timed = log.clock.timed()
    if not timed:
        return {}
    seconds, steps = sum(window.seconds for window in timed), sum(window.last - window.first for window in timed)
    sums = [sum(window.tokens for window in timed) / seconds, sum(window.positions for window in timed) / seconds, seconds]
    everyone = run.ranks.gather_floats([*sums, *(window.tokens / window.seconds for window in timed)])
    tokens, positions, _, *windows = (statistics.fmean(column) for column in zip(*everyone, strict=True))
    slowest_s = max(row[2] for row in everyone)
    return {
        "tokens_per_s_per_gpu": tokens,
        "positions_per_s_per_gpu": positions,
        "step_ms": 1e3 * slowest_s / steps,
        "window_rates": windows,
        "timed_steps": steps,
        "timed_s": slowest_s,
    }


def _mfu(run: TrainingRun, log: Log, rate: float | None) -> float | None:
    """Model FLOPs utilization by ``flops.flops_per_token`` over the given dense bf16 peak."""
    peak = run.config.peak_bf16_tflops
    if rate is None or peak is None or run.shape is None or run.ranks.device.type != "cuda":
        return None
    counts = run.ranks.gather([log.positions, log.predicted, log.rows])
    positions, predicted, rows = map(sum, zip(*counts, strict=True))
    rank = run.config.lora_rank
    per_token = flops.flops_per_token(run.shape, row_tokens=positions / rows, rank=rank, predicted=predicted / positions)
    return rate * per_token / (peak * 1e12)
