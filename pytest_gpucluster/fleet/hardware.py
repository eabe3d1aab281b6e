"""The hardware of a simulated fleet: what each GPU reaches in each quantity. Pure and seeded: equal seeds, equal parts.

Typical values and spreads are those of real parts (docs/results, docs/decisions/0011). A deviation is cut at two sigmas, so
that a healthy part of the model is never named. With real parts that happens in some of the largest runs.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.specs import load_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.fleet.simulation import FaultKind, Simulation

MODELS = ("h200-sxm", "h100-sxm", "b200-sxm", "gb200-nvl72")
CUT_SIGMAS = 2.0
PRODUCTS = ("bfloat16", "float16", "float8_e4m3fn", "tf32", "float32", "float64", "int8")
LINKS = ("h2d", "d2h", "h2d_all", "d2h_all")


@dataclass(frozen=True, slots=True)
class Typical:
    """The relative sigma among the GPUs of a host and among the means of hosts, and the typical value of each model."""

    chip: float
    host: float
    values: tuple[float, ...]


TYPICAL: Mapping[str, Typical] = {
    "bfloat16": Typical(0.011, 0.005, (785.0, 800.0, 1720.0, 1822.0)),
    "float16": Typical(0.011, 0.005, (768.0, 768.0, 1628.0, 1628.0)),
    "float8_e4m3fn": Typical(0.011, 0.005, (1550.0, 1523.0, 2850.0, 2850.0)),
    "tf32": Typical(0.011, 0.005, (405.0, 414.0, 850.0, 850.0)),
    "float32": Typical(0.0015, 0.001, (51.0, 51.6, 65.0, 65.0)),
    "float64": Typical(0.003, 0.001, (56.0, 57.0, 34.0, 34.0)),
    "int8": Typical(0.004, 0.002, (957.0, 980.0, 2800.0, 2800.0)),
    "sustained": Typical(0.009, 0.004, (664.0, 694.0, 1450.0, 1550.0)),
    "at_clock": Typical(0.004, 0.001, (0.913, 0.913, 0.913, 0.913)),
    "hbm": Typical(0.0015, 0.001, (4.35, 3.05, 6.3, 6.55)),
    "h2d": Typical(0.002, 0.004, (55.2, 55.2, 55.2, 200.0)),
    "d2h": Typical(0.002, 0.004, (55.1, 55.1, 55.1, 193.0)),
    "h2d_all": Typical(0.01, 0.01, (48.0, 48.0, 48.0, 170.0)),
    "d2h_all": Typical(0.01, 0.01, (39.0, 39.0, 39.0, 182.0)),
    "train": Typical(0.006, 0.002, (18900.0, 18488.0, 40000.0, 40000.0)),
    "triad": Typical(0.0, 0.005, (250.0, 250.0, 250.0, 250.0)),
    "write": Typical(0.0, 0.02, (5.6, 5.6, 5.6, 5.6)),
    "read": Typical(0.0, 0.02, (6.5, 6.5, 6.5, 6.5)),
}
"""By quantity, the values in the order of :data:`MODELS`. Of B200 and GB200 somebody published BF16, FP16 and HBM; the others
are guesses."""
APART: Mapping[tuple[str, str], float] = {("a100-sxm", "sustained"): 250.0}
"""Where a model holds more of its figure than the first one; a guess."""
LINKED_ALIKE: Mapping[str, str] = {"gh200": "gb200-nvl72", "gb300-nvl72": "gb200-nvl72"}
"""GPUs beside a Grace are linked to their host as this model is."""
FIGURES: Mapping[str, str] = {
    "bfloat16": "bf16_tflops",
    "float16": "fp16_tflops",
    "float8_e4m3fn": "fp8_tflops",
    "tf32": "tf32_tflops",
    "float32": "fp32_tflops",
    "float64": "fp64_tflops",
    "int8": "int8_tops",
    "sustained": "bf16_tflops",
    "hbm": "hbm_tb_s",
    "train": "bf16_tflops",
    **dict.fromkeys(LINKS, "pcie_gb_s"),
}
"""The figure of a sheet that bounds a quantity."""
LOSSES: Mapping[FaultKind, Mapping[str, float]] = {
    "slow": dict.fromkeys((*PRODUCTS, "sustained", "at_clock", "train"), 0.7),
    "hbm": {"hbm": 0.9},
    "throttled": {"sustained": 0.8},
    "pcie": dict.fromkeys(LINKS, 0.48),
    "dimm": {"triad": 0.75},
    "disk": {"write": 0.5, "read": 0.5},
}
"""What is left of a quantity at a GPU with this fault."""
TIMED = (*PRODUCTS, "sustained", "hbm", *LINKS, "train")
TOO_FAST = 10.0
"""By so much every quantity in :data:`TIMED` is too high where the clock is wrong (fault ``fast``)."""


def require_model(gpu: str) -> None:
    """Check that the hardware of this GPU spec can be simulated.

    Raises:
        ConfigurationError: it cannot.
    """
    if gpu not in load_specs():
        known = [*{**dict.fromkeys(MODELS), **load_specs()}]
        hint = did_you_mean(gpu, known)
        raise ConfigurationError(f"there is no simulated {gpu}; simulated GPUs: {', '.join(known)}.{hint}")


def usual(gpu: str, quantity: str) -> float:
    """What a model reaches: its column, else as much of its sheet's figure as the first of :data:`MODELS` does of its own."""
    values = TYPICAL[quantity].values
    like = LINKED_ALIKE.get(gpu, gpu) if quantity in LINKS else gpu
    if like in MODELS:
        return values[MODELS.index(like)]
    if (gpu, quantity) in APART:
        return APART[gpu, quantity]
    figure = FIGURES.get(quantity)
    mine, first = (getattr(load_specs()[one], figure, None) if figure else None for one in (gpu, MODELS[0]))
    return float(values[0] * mine / first) if mine and first else values[0]


@dataclass(frozen=True)
class Hardware:
    """The parts of a simulation."""

    simulation: Simulation

    def rate(self, rank: int, quantity: str) -> float:
        """What the rank's GPU reaches, in the unit of :data:`TYPICAL`."""
        typical = TYPICAL[quantity]
        value = self.near(rank, quantity, usual(self.simulation.gpu_of(rank), quantity), chip=typical.chip, host=typical.host)
        for kind, losses in LOSSES.items():
            if quantity in losses and self.simulation.has(rank, kind):
                value *= losses[quantity]
        return value * TOO_FAST if quantity in TIMED and self.simulation.has(rank, "fast") else value

    def near(self, rank: int, quantity: str, usual: float, *, chip: float, host: float) -> float:
        """What a healthy GPU reaches; ``chip`` and ``host`` are the sigmas of :class:`Typical`."""
        node, gpu = self.simulation.place_of(rank)
        seed = f"{self.simulation.seed}/{quantity}/node{node}"
        return usual * (1 + _deviation(seed, host)) * (1 + _deviation(f"{seed}-gpu{gpu}", chip))


@functools.lru_cache(maxsize=65536)
def _deviation(seed: str, sigma: float) -> float:
    """A normal deviation, cut at :data:`CUT_SIGMAS`."""
    return max(-CUT_SIGMAS, min(CUT_SIGMAS, random.Random(seed).gauss(0.0, 1.0))) * sigma


def spread(value: float, number: int, *, relative: float = 0.003) -> list[float]:
    """``number`` repeats around ``value``, which is their median."""
    if number == 1:
        return [value]
    return [round(value * (1 + relative * (2 * at / (number - 1) - 1)), 6) for at in range(number)]
