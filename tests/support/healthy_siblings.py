"""Readings of healthy GPUs by host, which simulated siblings are drawn from: docs/decisions/0011."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from pytest_gpucluster.thresholds.resolve import Threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Readings of healthy H200, host by host (docs/results of 2026-11-20 to 22, and reference tools on that day).

    ``found_from``: the slowdown in per cent that has to be found in 95 of 100 runs, on one host and on several.
    """

    hosts: Sequence[Sequence[float]]
    found_from: tuple[float, float]

    @property
    def within(self) -> float:
        """Relative standard deviation among the GPUs of a host, over all hosts."""
        squares = [(rate / statistics.fmean(host) - 1) ** 2 for host in self.hosts for rate in host]
        return math.sqrt(sum(squares) / (len(squares) - len(self.hosts)))

    @property
    def between(self) -> float:
        """Relative standard deviation of the hosts' means, which holds what is left of ``within`` too: on the safe side."""
        means = [statistics.fmean(host) for host in self.hosts]
        return statistics.stdev(means) / statistics.fmean(means)


SEEN = {
    "bf16_tflops": Seen(
        hosts=[
            (789.4, 791.7, 784.4, 768.6),  # each the mean of 12 rounds, which moved by 0.1 %
            (794.1, 784.8, 794.6, 769.6),
            (794.3, 794.2, 781.6, 793.9),
            (804.3, 814.5, 797.6, 812.5),
            (777.2, 797.6, 778.1, 789.7),
            (795.7, 785.9, 813.6, 799.4),
        ],
        found_from=(11, 14),
    ),
    "bf16_sustained": Seen(
        hosts=[
            (664.28, 661.55, 664.84, 657.37),
            (677.77, 664.74, 668.75, 677.30),
            (650.09, 657.83, 651.20, 654.92),
            (673.39, 663.50, 655.58, 676.97),
        ],
        found_from=(7, 11),
    ),
    "bf16_at_clock": Seen(  # by the counted clock; the last is an H100, which has the same SMs
        hosts=[
            (0.9150, 0.9060),
            (0.9130,),
            (0.9130,),
        ],
        found_from=(7, 7),
    ),
    "fp32_tflops": Seen(  # of the first two each the median of 10 clean rounds
        hosts=[
            (50.996, 51.034, 51.079, 51.127),
            (51.219, 51.272, 51.217, 51.268),
            (51.294, 51.286, 51.290, 51.310),
            (51.297, 51.094, 51.258, 51.008),
        ],
        found_from=(4, 5),
    ),
    "hbm_bandwidth": Seen(
        hosts=[
            (4.3732, 4.3737, 4.3734, 4.3731),
            (4.3930, 4.3930, 4.3925, 4.3937),
            (4.3696, 4.3707, 4.3717, 4.3701),
            (4.3712, 4.3701, 4.3706, 4.3702),
            (4.3683, 4.3932, 4.3693, 4.3935),
        ],
        found_from=(4, 5),
    ),
    "training_throughput_gpu": Seen(  # without loading
        hosts=[
            (18729.4, 18834.5),
            (19173.9, 19147.2),
            (19121.3, 19126.8),
            (18463.1, 18722.1, 18545.3, 18586.1),
            (19119.8, 18978.5, 18883.2, 19505.9),
            (18864.7, 18718.0, 18781.7, 18603.8),
            (18798.7, 18878.3),
        ],
        found_from=(7, 11),
    ),
    "host_to_device": Seen(  # the memory of the last two hosts was in use by others
        hosts=[
            (55.334, 55.505, 55.469, 55.388),
            (55.387, 55.480, 55.471, 55.435),
            (51.925, 53.661, 54.056, 54.262),
            (55.076, 54.891, 55.082, 55.010),
        ],
        found_from=(10, 15),
    ),
    "device_to_host": Seen(
        hosts=[
            (55.367, 55.370, 55.376, 55.378),
            (55.371, 55.376, 55.352, 55.381),
            (54.077, 54.134, 54.635, 54.683),
            (54.648, 53.616, 54.740, 53.448),
        ],
        found_from=(10, 12),
    ),
}


def draw_hosts(seen: Seen, shape: tuple[int, int], draw: random.Random) -> list[list[float]]:
    """Rates of healthy GPUs around 1, host by host: ``shape`` is the number of hosts and of GPUs of each."""
    means = [1 + draw.gauss(0, seen.between) for _ in range(shape[0])]
    return [[mean * (1 + draw.gauss(0, seen.within)) for _ in range(shape[1])] for mean in means]


@functools.cache
def straggler_entries() -> dict[str, Threshold]:
    """The packaged entries, by what they compare."""
    file = packaged()
    entries = file.criteria(file.profiles["h200-sxm"])
    return {key[len("straggler[") : -1]: entry for key, entry in entries.items() if key.startswith("straggler[")}
