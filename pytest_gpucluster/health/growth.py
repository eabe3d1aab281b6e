"""What a GPU's error counters grew by, and what of its state became worse, between two readings. Pure.

A counter that fell was reset: nothing is known of what it counted, which is never green.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.health.gpu import HEALTHY
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpucluster.inventory.nvlinks import GpuFabric, LinkCounters, NvLink
    from pytest_gpucluster.inventory.nvml import GpuCounters, GpuState

MINUTE_S = 60.0
TEXTS = ("facts", "within", "unknown")
EVENTS = ("replays", "recoveries")
"""Counters of an NVLink whose every growth counts."""
RATES = ("crc_flits", "crc_data")
"""Counters that a healthy link counts too: the rate of all links of a GPU counts."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What one GPU counted on its links, and in its memory, between two readings.

    Attributes:
        over: growth of counters that may not grow, and one for each rate beyond its limit.
        facts: what is beyond its limit.
        within: rates within their limit.
        unknown: why nothing can be said of some counters.
    """

    over: int = 0
    facts: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def grown(first: int | NotAvailable, last: int | NotAvailable) -> int | NotAvailable:
    """By how much a counter grew; not available where one reading is not, or where the counter was reset in between."""
    if isinstance(first, NotAvailable):
        return first
    if isinstance(last, NotAvailable):
        return last
    if last < first:
        return NotAvailable(f"the counter was reset during the run: {first} at its begin, {last} at its end")
    return last - first


def pcie_growth(first: GpuCounters, last: GpuCounters) -> dict[str, int]:
    """What else the PCIe link counted, by name; what was reset or not told is left out. Nobody publishes limits for it."""
    growth = {name: last.pcie_errors.get(name, 0) - before for name, before in first.pcie_errors.items()}
    return {name: grew for name, grew in growth.items() if grew > 0}


def per_minute(growth: int, seconds: float) -> float:
    """Growth a minute; a shorter time counts as a minute, so that one error in a second is not sixty a minute."""
    return growth / max(1.0, seconds / MINUTE_S)


def nvlink_growth(first: GpuCounters, last: GpuCounters, *, seconds: float, crc_per_s: float) -> Growth:
    """What happened on a GPU's NVLinks in ``seconds``; ``crc_per_s``: from so many CRC errors a second on, a GPU is faulty."""
    if isinstance(first.nvlinks, NotAvailable) or isinstance(last.nvlinks, NotAvailable):
        why = first.nvlinks if isinstance(first.nvlinks, NotAvailable) else last.nvlinks
        return Growth(unknown=(f"the NVLinks are {why}",))
    if seconds <= 0:
        return Growth(unknown=("no time passed between the two readings",))
    after = {one.link: one for one in last.nvlinks}
    found = _Found()
    for before in first.nvlinks:
        _compare(before, after.pop(before.link, None), found)
    found.unknown += [f"link {link} came during the run" for link in after]
    return found.judged(seconds, crc_per_s)


def gpu_growth(first: GpuCounters, last: GpuCounters, *, seconds: float, replays_per_min: float) -> Growth:
    """What a GPU's memory and its PCIe link counted in ``seconds``; more PCIe replays a minute than that count as one."""
    over = 0
    facts: list[str] = []
    within: list[str] = []
    unknown: list[str] = []
    errors = grown(first.ecc_uncorrected, last.ecc_uncorrected)
    if isinstance(errors, NotAvailable):
        unknown.append(f"uncorrected memory errors: {errors.why}")
    elif errors:
        over += errors
        facts.append(f"uncorrected memory errors +{errors}")
    replays = grown(first.pcie_replays, last.pcie_replays)
    if isinstance(replays, NotAvailable):
        unknown.append(f"PCIe replays: {replays.why}")
    elif replays:
        rate = per_minute(replays, seconds)
        over += rate > replays_per_min
        (facts if rate > replays_per_min else within).append(f"PCIe replays +{replays}, {rate:.4g} a minute")
    return Growth(over, tuple(facts), tuple(within), tuple(unknown))


def together(growths: Iterable[Growth]) -> Growth:
    """Several kinds of growth as one."""
    found = list(growths)
    facts, within, unknown = (tuple(text for one in found for text in getattr(one, name)) for name in TEXTS)
    return Growth(sum(one.over for one in found), facts, within, unknown)


@dataclass(slots=True)
class _Found:
    """What is collected over the links of one GPU; ``rates``: the growth of each counter by link."""

    over: int = 0
    facts: list[str] = field(default_factory=list)
    rates: dict[str, dict[int, int]] = field(default_factory=lambda: {counter: {} for counter in RATES})
    unknown: list[str] = field(default_factory=list)

    def judged(self, seconds: float, crc_per_s: float) -> Growth:
        """With the rates of the whole GPU beside their limit."""
        within = []
        over, facts = self.over, [*self.facts]
        for counter, by_link in self.rates.items():
            total = sum(by_link.values())
            rate = total / seconds
            text = f"{_words(counter)} +{total}, {rate:.4g} a second"
            if rate >= crc_per_s:
                most = max(by_link, key=by_link.__getitem__)
                over += 1
                facts.append(f"{text}, most on link {most} (+{by_link[most]})")
            elif total:
                within.append(text)
        return Growth(over=over, facts=tuple(facts), within=tuple(within), unknown=tuple(self.unknown))


def _compare(first: LinkCounters, last: LinkCounters | None, found: _Found) -> None:
    name = f"link {first.link}"
    if last is None:
        found.unknown.append(f"{name} is gone at the end")
        return
    old = (*EVENTS, *RATES)
    if not isinstance(first.nvlink5, NotAvailable) and not isinstance(last.nvlink5, NotAvailable):
        _compare_nvlink5(name, first.nvlink5, last.nvlink5, found)
        if all(isinstance(getattr(first, counter), NotAvailable) for counter in old):
            return  # generation 5 counts these in place of the old ones
    for counter in old:
        growth = grown(getattr(first, counter), getattr(last, counter))
        if isinstance(growth, NotAvailable):
            found.unknown.append(f"{name} {_words(counter)}: {growth.why}")
        elif counter in RATES:
            found.rates[counter][first.link] = growth
        elif growth:
            found.over += growth
            found.facts.append(f"{name} {_words(counter)} +{growth}")


def _compare_nvlink5(
    name: str, first: Mapping[str, int | NotAvailable], last: Mapping[str, int | NotAvailable], found: _Found
) -> None:
    """Every growth counts, as DCGM has it."""
    for counter, before in first.items():
        growth = grown(before, last.get(counter, NotAvailable("gone at the end")))
        if isinstance(growth, NotAvailable):
            found.unknown.append(f"{name} {counter}: {growth.why}")
        elif growth:
            found.over += growth
            found.facts.append(f"{name} {counter} +{growth}")


def _words(counter: str) -> str:
    return {"crc_flits": "CRC errors of flits", "crc_data": "CRC errors of data"}.get(counter, counter)


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
    before, now = first.throttled_s, last.throttled_s
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
