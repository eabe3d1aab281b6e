"""Telemetry of all GPUs of a group in brief: as small for a thousand ranks as for two. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.nvml import EVENT_REASONS, event_reason_names
from pytest_gpucluster.inventory.reading import or_none
from pytest_gpucluster.protocol.rank import ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.inventory.telemetry import Telemetry

UNKNOWN = "unknown_"
_BITS = {name: bit for bit, name in EVENT_REASONS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTelemetry:
    """Lowest and highest of all ranks' means (temperature: highest maximum), with the rank of the slowest and the hottest.

    ``event_reasons`` holds the ranks of each reason, for example ``0-3, 7``. None: no GPU gives the value.
    """

    sm_clock_lowest_mhz: float | None
    sm_clock_highest_mhz: float | None
    lowest_clock_rank: int | None
    power_lowest_w: float | None
    power_highest_w: float | None
    temperature_highest_c: float | None
    hottest_rank: int | None
    event_reasons: dict[str, str]

    @property
    def evidence(self) -> dict[str, Any]:
        """What explains a value: the slowest clock, the hottest GPU, and the ranks of each event reason."""
        found: dict[str, Any] = {}
        if self.sm_clock_lowest_mhz is not None:
            found["SM MHz"] = (
                f"{self.sm_clock_lowest_mhz:.0f} (rank {self.lowest_clock_rank}) to {self.sm_clock_highest_mhz:.0f}"
            )
        if self.power_lowest_w is not None:
            found["W"] = f"{self.power_lowest_w:.0f} to {self.power_highest_w:.0f}"
        if self.temperature_highest_c is not None:
            found["C"] = f"up to {self.temperature_highest_c:.0f} (rank {self.hottest_rank})"
        found["event reasons"] = [f"{name} (rank {ranks})" for name, ranks in self.event_reasons.items()]
        return found


def to_row(rank: int, telemetry: Telemetry | None) -> list[float]:
    """One rank's telemetry as numbers, for a collective; NaN for a missing value."""
    if telemetry is None:
        return [float(rank), 0.0, *[math.nan] * 4]
    reasons = or_none(telemetry.event_reasons) or []  # evidence of a rate, which no criterion judges
    bits = sum(_BITS.get(name) or int(name.removeprefix(UNKNOWN), 16) for name in reasons)
    values = (telemetry.sm_clock_mean_mhz, telemetry.power_mean_w, telemetry.temperature_max_c)
    return [float(rank), 1.0, float(bits), *(math.nan if value is None else float(value) for value in values)]


def from_rows(rows: Sequence[Sequence[float]]) -> GroupTelemetry | None:
    """All ranks' rows in brief; None if no rank has telemetry."""
    watched = [row for row in rows if row[1]]
    if not watched:
        return None
    clocks, power, temperature = ({int(row[0]): row[at] for row in watched if not math.isnan(row[at])} for at in (3, 4, 5))
    reasons: dict[str, list[int]] = {}
    for rank, _, bits, *_ in watched:
        for name in event_reason_names(int(bits)):
            reasons.setdefault(name, []).append(int(rank))
    slowest = min(clocks, key=lambda rank: clocks[rank], default=None)
    hottest = max(temperature, key=lambda rank: temperature[rank], default=None)
    return GroupTelemetry(
        sm_clock_lowest_mhz=_at(clocks, slowest),
        sm_clock_highest_mhz=max(clocks.values(), default=None),
        lowest_clock_rank=slowest,
        power_lowest_w=min(power.values(), default=None),
        power_highest_w=max(power.values(), default=None),
        temperature_highest_c=_at(temperature, hottest),
        hottest_rank=hottest,
        event_reasons={name: ranges(ranks) for name, ranks in reasons.items()},
    )


def _at(values: Mapping[int, float], rank: int | None) -> float | None:
    return None if rank is None else values[rank]
