"""The hardware of a simulated fleet: what each GPU reaches in each quantity. Pure and seeded: equal seeds, equal parts.

Typical values and spreads are those of real parts (docs/results, docs/decisions/0011). A deviation is cut at two sigmas, so
that a healthy part of the model is never named. With real parts that happens in some of the largest runs.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.fleet.simulation import FaultKind, Simulation

CUT_SIGMAS = 2.0
PRODUCTS = ("bfloat16", "float16", "float8_e4m3fn", "tf32", "float32", "float64", "int8")
LINKS = ("h2d", "d2h", "h2d_all", "d2h_all")


@dataclass(frozen=True, slots=True)
class Typical:
    """A typical value, and the relative sigma among the GPUs of a host and among the means of hosts."""

    value: float
    chip: float
    host: float


H200: Mapping[str, Typical] = {
    "bfloat16": Typical(785.0, 0.011, 0.005),
    "float16": Typical(768.0, 0.011, 0.005),
    "float8_e4m3fn": Typical(1550.0, 0.011, 0.005),
    "tf32": Typical(405.0, 0.011, 0.005),
    "float32": Typical(51.0, 0.0015, 0.001),
    "float64": Typical(56.0, 0.003, 0.001),
    "int8": Typical(957.0, 0.004, 0.002),
    "sustained": Typical(664.0, 0.009, 0.004),
    "at_clock": Typical(0.913, 0.004, 0.001),
    "hbm": Typical(4.35, 0.0015, 0.001),
    "h2d": Typical(55.2, 0.002, 0.004),
    "d2h": Typical(55.1, 0.002, 0.004),
    "h2d_all": Typical(48.0, 0.01, 0.01),
    "d2h_all": Typical(39.0, 0.01, 0.01),
    "train": Typical(18900.0, 0.006, 0.002),
    "triad": Typical(250.0, 0.0, 0.005),
    "write": Typical(5.6, 0.0, 0.02),
    "read": Typical(6.5, 0.0, 0.02),
}
TYPICAL: dict[str, Mapping[str, Typical]] = {
    "h200-sxm": H200,
    "h100-sxm": {
        **H200,
        "bfloat16": Typical(800.0, 0.011, 0.005),
        "float8_e4m3fn": Typical(1523.0, 0.011, 0.005),
        "tf32": Typical(414.0, 0.011, 0.005),
        "float32": Typical(51.6, 0.0015, 0.001),
        "float64": Typical(57.0, 0.003, 0.001),
        "int8": Typical(980.0, 0.004, 0.002),
        "sustained": Typical(694.0, 0.009, 0.004),
        "hbm": Typical(3.05, 0.0015, 0.001),
        "train": Typical(18488.0, 0.006, 0.002),
    },
}
BLACKWELL: Mapping[str, Typical] = {
    **H200,
    "bfloat16": Typical(1720.0, 0.011, 0.005),
    "float16": Typical(1628.0, 0.011, 0.005),
    "float8_e4m3fn": Typical(2850.0, 0.011, 0.005),
    "tf32": Typical(850.0, 0.011, 0.005),
    "float32": Typical(65.0, 0.0015, 0.001),
    "float64": Typical(34.0, 0.003, 0.001),
    "int8": Typical(2800.0, 0.004, 0.002),
    "sustained": Typical(1450.0, 0.009, 0.004),
    "hbm": Typical(6.3, 0.0015, 0.001),
    "train": Typical(40000.0, 0.006, 0.002),
}
"""BF16, FP16 and HBM as somebody published them of B200; the others are guesses."""
TYPICAL |= {
    "b200-sxm": BLACKWELL,
    "gb200-nvl72": {
        **BLACKWELL,
        "bfloat16": Typical(1822.0, 0.011, 0.005),
        "sustained": Typical(1550.0, 0.009, 0.004),
        "hbm": Typical(6.55, 0.0015, 0.001),
        "h2d": Typical(200.0, 0.002, 0.004),
        "d2h": Typical(193.0, 0.002, 0.004),
        "h2d_all": Typical(170.0, 0.01, 0.01),
        "d2h_all": Typical(182.0, 0.01, 0.01),
    },
}
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
    if gpu not in TYPICAL:
        raise ConfigurationError(f"there is no simulated {gpu}; simulated GPUs: {', '.join(TYPICAL)}")


@dataclass(frozen=True)
class Hardware:
    """The parts of a simulation."""

    simulation: Simulation

    def rate(self, rank: int, quantity: str) -> float:
        """What the rank's GPU reaches, in the unit of :data:`TYPICAL`."""
        node, gpu = self.simulation.place_of(rank)
        typical = TYPICAL[self.simulation.gpu][quantity]
        seed = f"{self.simulation.seed}/{quantity}/node{node}"
        value = typical.value * (1 + _deviation(seed, typical.host)) * (1 + _deviation(f"{seed}-gpu{gpu}", typical.chip))
        for kind, losses in LOSSES.items():
            if quantity in losses and self.simulation.has(rank, kind):
                value *= losses[quantity]
        return value * TOO_FAST if quantity in TIMED and self.simulation.has(rank, "fast") else value


@functools.lru_cache(maxsize=65536)
def _deviation(seed: str, sigma: float) -> float:
    """A normal deviation, cut at :data:`CUT_SIGMAS`."""
    return max(-CUT_SIGMAS, min(CUT_SIGMAS, random.Random(seed).gauss(0.0, 1.0))) * sigma


def spread(value: float, number: int, *, relative: float = 0.003) -> list[float]:
    """``number`` repeats around ``value``, which is their median."""
    if number == 1:
        return [value]
    return [round(value * (1 + relative * (2 * at / (number - 1) - 1)), 6) for at in range(number)]
