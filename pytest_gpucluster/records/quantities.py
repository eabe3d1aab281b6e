"""What the keys of evidence mean: the quantity and its unit, so that a reader of results.json need not guess.

A measurement names its evidence as a message shows it (``SM 1290 MHz``, ``91 C``). In results.json no key is a unit
alone, and each column says quantity and unit beside its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

BY_UNIT = {
    "C": "temperature",
    "W": "power",
    "MHz": "clock",
    "us": "time of a call",
    "ms": "time",
    "s": "time",
    "GB/s": "bandwidth",
    "TB/s": "bandwidth",
    "TFLOPS": "rate of products",
    "TOPS": "rate of products",
    "tokens/s/GPU": "training rate",
    "GiB": "memory",
    "GB": "data",
    "bytes": "size",
    "%": "share",
    "nats/token": "loss",
    "ratio": "ratio",
}
"""What a key that is a unit alone is about. Each may stand at the end of a key too."""
BY_KEY: dict[str, tuple[str, str | None]] = {
    "SM MHz": ("SM clock", "MHz"),
    "counted SM MHz": ("SM clock counted on the GPU", "MHz"),
    "% busy": ("utilization", "%"),
    "MFU %": ("model FLOPS utilization", "%"),
    "GiB alone": ("memory of one GPU alone", "GiB"),
    "GiB each": ("memory of each buffer", "GiB"),
    "GiB in use": ("memory in use", "GiB"),
    "GiB sharded": ("memory of a sharded GPU", "GiB"),
    "GB sent a step": ("data sent a step", "GB"),
    "GB tested": ("memory tested", "GB"),
    "ms a step": ("time a step", "ms"),
    "s compiling": ("time of compiling", "s"),
    "s more or less": ("uncertainty of the clock", "s"),
    "rows a step": ("rows a step", "count"),
    "seconds": ("time watched", "s"),
    "seconds watched": ("time watched", "s"),
    "seconds held back by": ("time held back by", "s"),
    "hardware_thermal_s": ("time of hardware thermal slowdown", "s"),
    "software_thermal_s": ("time of software thermal slowdown", "s"),
    "thermal_s": ("time of thermal slowdown", "s"),
    "power_brake_s": ("time of power brake", "s"),
    "power_limit_w": ("power limit", "W"),
    "power_limit_default_w": ("default power limit", "W"),
    "memory_gib": ("memory", "GiB"),
    "lanes": ("PCIe width", "lanes"),
    "lanes promised": ("promised PCIe width", "lanes"),
    "PCIe width": ("PCIe width", "lanes"),
    "gen": ("PCIe generation", None),
    "gen promised": ("promised PCIe generation", None),
    "first": ("first value", None),
    "of peak at this clock": ("rate over the peak at this clock", "ratio"),
    "share of what was free": ("tested share of free memory", "ratio"),
    "their MAD": ("median absolute deviation of siblings", None),
    "NCCL": ("version of NCCL", None),
    "single GPU": ("rate of each GPU alone by place", "tokens/s/GPU"),
    "single node": ("bus bandwidth of each node alone by place", "GB/s"),
    "ranks": ("ranks", "count"),
    "rounds": ("rounds", "count"),
    "repeats": ("repeats", "count"),
    "siblings": ("siblings", "count"),
    "replays": ("PCIe replays", "count"),
    "corrected": ("corrected errors", "count"),
    "over its life": ("errors over its life", "count"),
    "files": ("files", "count"),
    "CPUs allowed": ("CPUs allowed", None),
    "memlock bytes": ("limit of locked memory", "bytes"),
    "open files": ("limit of open files", "count"),
    "curve [step, loss]": ("loss curve as [step, loss]", "nats/token"),
}
"""Keys whose words do not end in a unit, or do not name the quantity."""


@dataclass(frozen=True, slots=True)
class NamedQuantity:
    """What a key of evidence is about. ``unit`` is None for text, and where the key says no unit."""

    name: str
    unit: str | None


def quantity_of(key: str, *, unit: str | None = None) -> NamedQuantity:
    """The quantity and the unit of a key of evidence, as a measurement or a site's own test wrote it.

    ``unit``: of the criterion, for keys that are about its own value.
    """
    if key in BY_KEY:
        return NamedQuantity(*BY_KEY[key])
    if key in BY_UNIT:
        return NamedQuantity(BY_UNIT[key], key)
    if key.startswith("n=") and key[2:].isdecimal():
        return NamedQuantity(f"rate of products of size {key[2:]}", unit)
    own = next((one for one in BY_UNIT if key.endswith(f" {one}")), None)
    return NamedQuantity(key.removesuffix(f" {own}") if own is not None else key, own)


def described(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence, with ``temperature C`` where a key is a unit alone. A key that would be taken twice gets a number."""
    found: dict[str, Any] = {}
    for key, value in evidence.items():
        name = f"{BY_UNIT[key]} {key}" if key in BY_UNIT else key
        found[f"{name} ({len(found) + 1})" if name in found else name] = value
    return found
