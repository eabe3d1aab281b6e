"""Real training as a measurement: the LoRA fine-tune of ``finetune_smoke`` on the ranks of the current group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_smoke.settings import config as finetune_config
from pytest_gpucluster.inventory.telemetry import Sampler, Watched, evidence
from pytest_gpucluster.measurements import collectives, progress, timing
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from finetune_smoke.settings.config import Config
    from finetune_smoke.training.loop import Outcome

require_limit_below_floor = finetune_config.require_limit_below_floor
SPREAD = "step_time_spread"
"""The one check of a fine-tune that finds a slow rank, not a wrong one."""

ENOUGH_S = 30.0
"""A training for its rate alone ends early where its steps take longer: 19 of them take 10 s on two H100, 124 s where FSDP2
sends 26 GB a step at 3 GB/s (docs/results/2026-11-28-h100x2-9984421)."""

CURVE_POINTS = 100
"""The most points of a loss curve in the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuned(Watched):
    """The outcome of a fine-tune, the same on every rank, and what all GPUs did while it was timed (None without NVML).

    ``device`` is the model of this rank's GPU, as torch names it.
    """

    outcome: Outcome
    device: str = ""

    @property
    def evidence(self) -> dict[str, Any]:
        """Where the time went, and the telemetry of all ranks' GPUs, for the report."""
        return {**_seconds(self.outcome), **evidence(self.telemetry)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Finetuned):
    """A training that was made for its rate. Its outcome has a rate and a step time: at least two windows were run.

    ``peak_tflops`` is the dense BF16 rate that its MFU is a part of; None without one.
    """

    peak_tflops: float | None = None

    @property
    def product_tflops(self) -> float | None:
        """What the products of this rate take of a GPU, in TFLOPS; None without an MFU."""
        return None if self.outcome.mfu is None or self.peak_tflops is None else self.outcome.mfu * self.peak_tflops

    @property
    def shortened(self) -> str | None:
        """How many steps were made, where they took so long that the rest was left out."""
        return self.outcome.notes[-1] if self.outcome.stopped else None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and GPU without padding, by the wall clock over all but compiling and the checks."""
        assert self.outcome.tokens_per_s_per_gpu is not None
        return self.outcome.tokens_per_s_per_gpu

    @property
    def peak_gib(self) -> float:
        """The highest peak of all ranks' memory, in GiB (2^30), which this training needed of it.

        Raises:
            RuntimeError: there is no GPU whose memory could be counted.
        """
        if self.outcome.memory_peak_gib is None:
            raise RuntimeError("torch counts the memory of GPUs only, and there is none")
        return max(self.outcome.memory_peak_gib)

    @property
    def evidence(self) -> dict[str, Any]:
        """What a rate has to be read with: how the steps ran, and the telemetry of all ranks' GPUs, for the report."""
        outcome, rates = self.outcome, self.outcome.window_rates
        known = {
            "MFU %": None if outcome.mfu is None else 100 * outcome.mfu,
            "ms a step": outcome.step_ms,
            "tokens/s/GPU with padding": outcome.positions_per_s_per_gpu,
            "lowest to highest window": f"{min(rates):.0f} to {max(rates):.0f} tokens/s/GPU" if rates else None,
            "timed": f"{counted(outcome.timed_steps, 'step')}, {outcome.timed_s:.1f} s, {counted(len(rates), 'window')}",
            "s waiting for rows": outcome.rows_s,
            "peak GiB": None if outcome.memory_peak_gib is None else max(outcome.memory_peak_gib),
            "GB sent a step": outcome.wire_gb_per_step,
            "strategy": outcome.strategy,
            "ranks": outcome.world_size,
            "rows a step": outcome.step_rows,
            "notes": outcome.notes,
            "checks left out": outcome.left_out,
        }
        shown = {name: value for name, value in known.items() if value is not None}
        return {**shown, **_seconds(outcome), **evidence(self.telemetry)}


def _seconds(outcome: Outcome) -> dict[str, float]:
    parts = {"setting up": outcome.setup_s, "compiling": outcome.compile_s, "training": outcome.train_s}
    parts["evaluating"] = outcome.eval_s
    return {f"s {part}": seconds for part, seconds in parts.items() if seconds is not None}


def curve(losses: Sequence[float]) -> list[list[float]]:
    """[step, loss in nats per predicted token] of at most CURVE_POINTS steps, evenly spread, first and last among them."""
    last = len(losses) - 1
    kept = range(last + 1) if last < CURVE_POINTS else [round(at * last / (CURVE_POINTS - 1)) for at in range(CURVE_POINTS)]
    return [[step, losses[step]] for step in kept]


def finetune(*, preset: str, **overrides: Any) -> Finetuned:
    """Fine-tune with LoRA on all ranks of the default process group; every rank returns the same.

    Args:
        preset: one of ``finetune_smoke.settings.config.PRESETS``.
        overrides: further fields of ``finetune_smoke.settings.config.Config``.

    Raises:
        finetune_smoke.settings.config.InputError: no such preset or field.
    """
    return _run(finetune_config.preset(preset, **overrides))


def train(*, preset: str, single_rank: bool = False, **overrides: Any) -> Trained:
    """Train at full speed on all ranks of the default process group.

    Args:
        preset: one of ``finetune_smoke.settings.config.PRESETS``.
        single_rank: this rank by itself, whatever group it is in.
        overrides: further fields of ``finetune_smoke.settings.config.Config``.

    Raises:
        finetune_smoke.settings.config.InputError: no such preset or field.
        ValueError: fewer steps than two windows.
        ArithmeticError: the training went wrong (values that are not finite, ranks that differ), so its rate is meaningless.
    """
    config = finetune_config.preset(preset, **overrides)
    if config.steps < 2 * config.window_steps:
        raise ValueError(f"steps = {config.steps} is less than two windows of {config.window_steps}: the first is left out")
    found = _run(config, single_rank=single_rank, enough_s=ENOUGH_S)
    checks = found.outcome.checks
    wrong = [f"{name}: {check['detail']}" for name, check in checks.items() if not check["passed"] and name != SPREAD]
    if wrong:
        raise ArithmeticError(f"the training went wrong: {'; '.join(wrong)}")
    return Trained(outcome=found.outcome, telemetry=found.telemetry, device=found.device, peak_tflops=config.peak_bf16_tflops)


def _run(config: Config, *, single_rank: bool = False, enough_s: float | None = None) -> Finetuned:
    from finetune_smoke.reporting.outcome import Clock
    from finetune_smoke.training.loop import finetune as run

    clock = Clock(enough_s=enough_s)
    with Sampler(timing.gpu_uuid()) as sampler:  # about a millisecond ten times a second, hardly ever with the GIL
        outcome = run(config, progress=progress.report, single_rank=single_rank, clock=clock)
    timed = clock.timed()
    mine = sampler.between(timed[0].began_s, timed[-1].ended_s) if timed else None
    return Finetuned(
        outcome=outcome,
        telemetry=collectives.gather_telemetry(mine, single_rank=single_rank),
        device=timing.device_name(),
    )
