"""What became worse of a GPU between two readings of its state. Pure."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.gpu_growth import Growth, together
from pytest_gpucluster.judging.gpu_repair import HEALTHY

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.gpu_fabric import GpuFabric
    from pytest_gpucluster.inventory.nvlinks import NvLink
    from pytest_gpucluster.inventory.nvml import GpuState

ROWS = ("remapped_rows_pending", "remapped_rows_failed")
GOOD = (HEALTHY, False)
"""What the readings of repairs and rows are of a healthy GPU."""


def worsened(first: GpuState, last: GpuState) -> Growth:
    """Links that went down, repairs and recoveries that came to be needed, the fabric that was left.

    What was refused or bad at the first reading already is judged there. What is refused only at the last one is not known.
    """
    flags = [(one.name, getattr(first.repair, one.name), getattr(last.repair, one.name)) for one in fields(first.repair)]
    flags += [(name, getattr(first, name), getattr(last, name)) for name in ROWS]
    return together(
        [*(_flag(*flag) for flag in flags), _links(first.nvlinks, last.nvlinks), _fabric(first.fabric, last.fabric)]
    )


def held_back(first: GpuState, last: GpuState) -> dict[str, float] | NotAvailable:
    """Seconds between two readings in which each limiter held the clocks back; one whose count shrank is left out."""
    before, now = first.held_back_s, last.held_back_s
    if isinstance(before, NotAvailable):
        return before
    if isinstance(now, NotAvailable):
        return now
    return {name: now[name] - before[name] for name in now if now[name] >= before.get(name, float("inf"))}


def _flag(name: str, before: Any, now: Any) -> Growth:
    if isinstance(before, NotAvailable) or now == before:
        return Growth()
    if isinstance(now, NotAvailable):
        return Growth(unknown=(f"{name} is {now}",))
    return Growth() if now in GOOD else Growth(1, (f"{name} is {now}, was {before}",))


def _links(before: list[NvLink] | NotAvailable, now: list[NvLink] | NotAvailable) -> Growth:
    if isinstance(before, NotAvailable):
        return Growth()
    if isinstance(now, NotAvailable):
        return Growth(unknown=(f"the NVLinks are {now}",))
    left = {one.link: one for one in now}
    return together(_link(one, left.get(one.link)) for one in before)


def _link(before: NvLink, now: NvLink | None) -> Growth:
    name = f"link {before.link}"
    if before.is_up is not True or before == now:
        return Growth()
    if now is None or now.is_up is False:
        return Growth(1, (f"{name} went down",))
    if isinstance(now.is_up, NotAvailable):
        return Growth(unknown=(f"{name} is {now.is_up}",))
    if isinstance(now.speed_gb_s, NotAvailable):
        return Growth(unknown=(f"the rate of {name} is {now.speed_gb_s}",))
    if isinstance(before.speed_gb_s, NotAvailable) or now.speed_gb_s >= before.speed_gb_s:
        return Growth()
    return Growth(1, (f"{name} at {now.speed_gb_s:g} GB/s, was at {before.speed_gb_s:g}",))


def _fabric(before: GpuFabric | NotAvailable, now: GpuFabric | NotAvailable) -> Growth:
    if isinstance(before, NotAvailable) or now == before:
        return Growth()
    if isinstance(now, NotAvailable):
        return Growth(unknown=(f"the fabric is {now}",))
    changed = [name for name in ("state", "error", "clique") if _differs(before, now, name)]
    facts = [f"fabric {name} is {getattr(now, name)}, was {getattr(before, name)}" for name in changed]
    facts += [f"fabric: {trouble}" for trouble in now.troubles if trouble not in before.troubles]
    return Growth(len(facts), tuple(facts))


def _differs(before: GpuFabric, now: GpuFabric, name: str) -> bool:
    """Whether a part of the fabric is another one, and not the good one."""
    good = {"state": "completed", "error": None}
    value = getattr(now, name)
    return value != getattr(before, name) and not (name in good and value == good[name])
