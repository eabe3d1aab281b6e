"""How much counters grew between two readings, beside their limits; and what of a state became worse. Pure.

One mechanism for GPUs, NVLinks, ports of NICs and soak rounds. A counter that fell was reset, and one that stands at its
greatest value cannot grow any more: what is unknown of them is never green.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.health.gpu import HEALTHY, judge_recovery, judge_repair
from pytest_gpucluster.health.nvlink import JOINED
from pytest_gpucluster.inventory.reading import NotAvailable, all_or_why, apply, or_none
from pytest_gpucluster.judging.agreement import is_majority
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.finding import BAD, HERE, UNKNOWN, Finding, Said, Subject, finding_of, gather, merge
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.thresholds.limit import is_finite

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nvlinks import GpuFabric, LinkCounters, NvLink
    from pytest_gpucluster.inventory.nvml import GpuCounters, GpuState

__all__ = [
    "judge_counters",
    "judge_earlier_recoveries",
    "judge_gpu_counters",
    "judge_memory_errors",
    "judge_nvlink_counters",
    "judge_replays",
    "read_limits",
    "state_changes",
    "throttled_s",
]

Counters: TypeAlias = "Mapping[str, int | float | NotAvailable]"
PERIODS_S: Mapping[str, float | None] = {"total": None, "per_s": 1.0, "per_min": 60.0, "per_hour": 3600.0}
PERIOD_WORDS = {None: "", 1.0: " a second", 60.0: " a minute", 3600.0: " an hour"}
MINUTE_S = 60.0
OF_GPU = ("ecc_uncorrected", "pcie_replays")
PCIE_GREATEST: Mapping[str, int] = {"pcie_replays": 0xFFFF_FFFF}
"""NVML gives the PCIe replays as 32 bits (nvml.h, nvmlDeviceGetPcieReplayCounter)."""
ENDS = (2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
"""Where counters of 32 and 64 bits end, whoever counts; -1 is also NVML's word for a value that it does not have."""
OF_LINK = ("replays", "recoveries", "crc_flits", "crc_data")
ON_ALL_LINKS = ("crc_flits", "crc_data")
"""Counters that a healthy NVLink counts too: the limit is for all links of a GPU together."""
STANDS_OUT = 10
"""Recoveries of one link before the run that are many, where most others have counted at most a tenth of them."""
RECOVERIES_ADVICE = "look at this NVLink and what it ends at; after a repair load the driver anew, so that it counts from zero"
ROWS = ("remapped_rows_pending", "remapped_rows_failed")
GOOD = (HEALTHY, False)
"""What the readings of repairs and rows are of a healthy GPU."""
SETTINGS = {"ecc_enabled": True, "mig": False, "compute_mode": "default"}
"""What somebody may set while the run goes on, each with its good value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterLimit:
    """The most by which a counter may grow: in all, or in ``period_s`` seconds."""

    most: float
    period_s: float | None

    def holds(self, growth: float, seconds: float) -> bool:
        """Whether so much growth in so many seconds is within the limit.

        For a limit a second or a minute, that is the shortest time: two errors in 10 ms are not 200 a second.
        """
        if self.period_s is None:
            return growth <= self.most
        shortest_s = self.period_s if self.period_s <= MINUTE_S else 0
        return growth * self.period_s <= self.most * max(seconds, shortest_s)

    @property
    def text(self) -> str:
        """``120 an hour allowed``."""
        return f"{self.most:g}{PERIOD_WORDS[self.period_s]} allowed"


Limits: TypeAlias = "Mapping[str, CounterLimit]"


def read_limits(recipe: Mapping[str, Mapping[str, float]]) -> dict[str, CounterLimit]:
    """The limits of a recipe such as ``{link_downed: {total: 0}, symbol_error: {per_hour: 120}}``.

    Raises:
        ConfigurationError: a limit of another form, or none at all.
    """
    found = {}
    for counter, limit in recipe.items():
        ((period, most),) = limit.items() if isinstance(limit, dict) and len(limit) == 1 else (("", None),)
        if period not in PERIODS_S or not is_finite(most) or most < 0:
            form = f"write one of {', '.join(PERIODS_S)} and a number: {{per_hour: 120}}"
            raise ConfigurationError(f"limits: {counter}: {limit!r} is not a limit; {form}")
        found[counter] = CounterLimit(most=most, period_s=PERIODS_S[period])
    if not found:
        raise ConfigurationError("limits: no counter has a limit, so nothing would be judged")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterGroup:
    """Counters of one part at the start and at the end. They are reset together.

    Attributes:
        part: the part that counts.
        first: the counters at the start, by name.
        last: the counters at the end.
        label: what inside the part counts, such as ``link 4``.
        greatest: by counter, the value at which it stops.
        wraps_at: where the other counters begin anew; None: nowhere.
    """

    part: Subject = HERE
    first: Counters
    last: Counters
    label: str = ""
    greatest: Mapping[str, int] = field(default_factory=dict)
    wraps_at: int | None = None

    @property
    def prefix(self) -> str:
        """The label before the name of a counter."""
        return f"{self.label} " if self.label else ""

    def resets(self) -> Iterator[str]:
        """Every counter that fell, in words."""
        for name, before in self.first.items():
            after = self.last.get(name, before)
            if not isinstance(before, NotAvailable) and not isinstance(after, NotAvailable) and self._fell(name, before, after):
                yield f"{name} fell from {before} to {after}"

    def _fell(self, name: str, before: float, after: float) -> bool:
        """Whether a counter is lower than before. From the last quarter of its range into the first, it went over its end."""
        end = None if name in self.greatest else self.wraps_at
        went_over = end is not None and 3 * end // 4 <= before < end and after < end // 4
        return after < before and not went_over

    def growth(self, name: str) -> float | NotAvailable:
        """How much a counter grew, at least; not available if a reading is not."""
        both = all_or_why(one.get(name, NotAvailable("the counter is not there")) for one in (self.first, self.last))
        if isinstance(both, NotAvailable):
            return both
        before, after = both
        if after in ENDS:
            return _at_its_end(after)
        if self._fell(name, before, after):
            return after
        return after - before + (self.wraps_at or 0 if after < before else 0)

    def full(self, name: str) -> str | None:
        """Why a counter may have grown by more than it shows; None if it may not have."""
        values = [value for one in (self.first, self.last) if not isinstance(value := one.get(name, 0), NotAvailable)]
        end = self.greatest.get(name, math.inf)
        return f"stands at its greatest value, {end}: clear it (perfquery -R)" if max(values, default=0) >= end else None


def growth_of(first: float | NotAvailable, last: float | NotAvailable, *, greatest: float = math.inf) -> float | NotAvailable:
    """By how much one counter grew; not available if a reading is not, if it was reset, or stands at its greatest value."""
    both = all_or_why((first, last))
    if isinstance(both, NotAvailable):
        return both
    before, after = both
    if after < before:
        return NotAvailable(f"the counter was reset during the run: {before} at its begin, {after} at its end")
    if after >= greatest:
        return NotAvailable(f"the counter stands at its greatest value, {after}, so it cannot show growth")
    return _at_its_end(after) if after in ENDS else after - before


def _at_its_end(value: float) -> NotAvailable:
    return NotAvailable(f"the counter stands at {value}, where it ends or is not counted, so it cannot show growth")


def compare_counters(
    groups: Iterable[CounterGroup], *, seconds: float, limits: Limits, shown: Iterable[str] = (), summed: Collection[str] = ()
) -> Finding:
    """What grew beyond its limit in ``seconds``, by part; in ``evidence["within"]`` what grew and is not judged as bad.

    Args:
        groups: the counters.
        seconds: between the two readings.
        limits: by counter. A counter that a part does not have is passed over.
        shown: counters without a limit.
        summed: counters whose limit is for all groups of a part together.
    """
    if seconds <= 0:
        return Finding(unknown={HERE: ("no time passed between the two readings",)})
    every = list(groups)
    resets = [(group.part, f"{group.prefix}{text}") for group in every if (text := next(group.resets(), None)) is not None]
    said: list[Said] = [(part, UNKNOWN, f"{text}: the counters were reset during the run") for part, text in resets]
    within: list[tuple[Subject, str]] = []
    for part, counter, name, growth, full in _growths(every, (*limits, *shown), summed):
        limit = limits.get(counter)
        if isinstance(growth, NotAvailable):
            said += [(part, UNKNOWN, f"{name} is {growth}")] if limit is not None else []
            continue
        number = f"{growth:.6g}" if growth % 1 else f"{int(growth)}"
        text = f"{name} +{number} in {in_words(seconds)} ({format_number(growth * 3600 / seconds)} an hour)"
        if limit is not None and not limit.holds(growth, seconds):
            said.append((part, BAD, f"{text}, {limit.text}"))
        elif limit is not None and full is not None:
            said.append((part, UNKNOWN, f"{name} {full}"))
        elif growth != 0:
            within.append((part, text))
    shown_texts = Finding(bad=gather(within)).facts
    return replace(finding_of(said), evidence={"within": shown_texts} if shown_texts else {})


def _growths(
    groups: Iterable[CounterGroup], names: Iterable[str], summed: Collection[str]
) -> Iterator[tuple[Subject, str, str, float | NotAvailable, str | None]]:
    """Each counter that a group has: its part, the counter, its name with the label, its growth, and why it may be more."""
    wanted = tuple(dict.fromkeys(names))
    sums: dict[tuple[Subject, str], dict[str, float]] = {}
    for group in groups:
        for name in wanted:
            if name not in group.first and name not in group.last:
                continue
            growth = group.growth(name)
            if name in summed and not isinstance(growth, NotAvailable):
                sums.setdefault((group.part, name), {})[group.label] = growth
            else:
                yield group.part, name, f"{group.prefix}{name}", growth, group.full(name)
    for (part, name), by_label in sums.items():
        most = max(by_label, key=by_label.__getitem__)
        yield part, name, f"{name}, most on {most},", sum(by_label.values()), None


def per_minute(growth: float, seconds: float) -> float:
    """Growth a minute; a shorter time counts as a minute, so that one error in a second is not sixty a minute."""
    return growth / max(1.0, seconds / MINUTE_S)


def judge_replays(first: GpuCounters, last: GpuCounters, *, seconds: float) -> Finding:
    """PCIe replays of a GPU a minute. What else its link counted is evidence: nobody publishes limits for it."""
    replays = growth_of(first.pcie_replays, last.pcie_replays, greatest=PCIE_GREATEST["pcie_replays"])
    if isinstance(replays, NotAvailable):
        return Finding(unknown={HERE: (f"pcie_replays is {replays}",)}, kind="gpu")
    others = {name: last.pcie_errors.get(name, 0) - before for name, before in first.pcie_errors.items()}
    evidence = {"replays": replays, "seconds": seconds, **{name: grew for name, grew in others.items() if grew > 0}}
    return Finding(value=per_minute(replays, seconds), kind="gpu", evidence=evidence)


def judge_memory_errors(first: GpuCounters, last: GpuCounters) -> Finding:
    """Uncorrected errors of a GPU's memory. Corrected ones are evidence: nobody publishes a limit for them.

    The counter of the GPU's whole life counts too, where it grew: a new driver or a boot does not clear it.
    """
    errors = growth_of(first.ecc_uncorrected, last.ecc_uncorrected)
    ever = growth_of(first.ecc_uncorrected_aggregate, last.ecc_uncorrected_aggregate)
    grown = max([one for one in (errors, ever) if not isinstance(one, NotAvailable)], default=0)
    corrected = {"corrected": str(growth_of(first.ecc_corrected, last.ecc_corrected))}
    if isinstance(errors, NotAvailable):
        unknown = {HERE: (f"ecc_uncorrected is {errors}",)}
        return Finding(unknown=unknown, value=grown or None, kind="gpu", evidence=corrected if grown else {})
    return Finding(value=grown, kind="gpu", evidence=corrected)


def judge_gpu_counters(first: GpuCounters, last: GpuCounters, *, seconds: float, limits: Limits, has_peers: bool) -> Finding:
    """All that a GPU counted: memory, PCIe link, and NVLinks where it has peers."""
    before, after = ({name: getattr(one, name) for name in OF_GPU} for one in (first, last))
    group = CounterGroup(first=before, last=after, greatest=PCIE_GREATEST)
    own = compare_counters([group], seconds=seconds, limits=limits)
    links = [judge_nvlink_counters({HERE: (first, last)}, seconds=seconds, limits=limits)] if has_peers else []
    return merge([own, *links])


def judge_counters(first: Counters | NotAvailable, last: Counters | NotAvailable, *, seconds: float, limits: Limits) -> Finding:
    """Counters of one part, by name: those that grew beyond their limit are bad. Those without a limit are shown.

    A part need not have each counter with a limit, but without any of them nothing is known.
    """
    both = all_or_why((first, last))
    if isinstance(both, NotAvailable):
        return Finding(unknown={HERE: (f"the counters are {both}",)}, kind="gpu")
    before, after = both
    if not limits.keys() & (before.keys() | after.keys()):
        return Finding(unknown={HERE: (f"none of the counters {', '.join(limits)} is given",)}, kind="gpu")
    group = CounterGroup(first=before, last=after)
    shown = [name for name in after if name not in limits]
    return merge([Finding(kind="gpu"), compare_counters([group], seconds=seconds, limits=limits, shown=shown)])


def judge_nvlink_counters(
    counters: Mapping[Any, tuple[GpuCounters, GpuCounters]], *, seconds: float, limits: Limits
) -> Finding:
    """What the NVLinks of each GPU counted.

    Args:
        counters: by GPU, those at the start and at the end.
        seconds: between the two.
        limits: of each counter of a link; those of :data:`ON_ALL_LINKS` are for all links of a GPU together.
    """
    found = [Finding(kind="gpu")]
    for gpu, (first, last) in counters.items():
        both = all_or_why((first.nvlinks, last.nvlinks))
        if isinstance(both, NotAvailable):
            found.append(Finding(unknown={gpu: (f"the NVLinks are {both}",)}))
            continue
        before, after = ({one.link: one for one in links} for links in both)
        odd = [f"link {link} is gone at the end" for link in before if link not in after]
        odd += [f"link {link} came during the run" for link in after if link not in before]
        groups = [_link_group(gpu, before[link], after[link]) for link in before if link in after]
        found.append(Finding(unknown={gpu: odd}))
        found.append(compare_counters(groups, seconds=seconds, limits=limits, summed=ON_ALL_LINKS))
    return merge(found)


def judge_earlier_recoveries(counters: Mapping[Any, GpuCounters]) -> Finding:
    """NVLinks that had been trained again and again before the run, since the driver was loaded, while most others were not.

    A marginal link may recover at no time of a short run: one of a rack had counted 505, and no other link of 320 GPUs any,
    five days before it took the whole rack along (docs/decisions/0038).

    Args:
        counters: at the start, by GPU of one node.
    """
    counts = {
        (gpu, link.link): count
        for gpu, one in counters.items()
        for link in or_none(one.nvlinks) or ()
        if (count := or_none(_recoveries(link))) not in (None, *ENDS)
    }
    bad: list[tuple[Subject, str]] = []
    for (gpu, link), count in counts.items():
        usual = [one for one in counts.values() if one * STANDS_OUT <= count]
        if count >= STANDS_OUT and is_majority(len(usual), len(counts)):
            others = f"most links at most {max(usual)}"
            bad.append((gpu, f"link {link} had been trained again {count} times before the run, {others}"))
    return Finding(bad=gather(bad), kind="gpu", advice=RECOVERIES_ADVICE if bad else None)


def _recoveries(link: LinkCounters) -> int | NotAvailable:
    """How often a link was trained again; NVLinks of generation 5 count it under their own name."""
    if isinstance(link.recoveries, NotAvailable) and isinstance(link.nvlink5, dict):
        return link.nvlink5.get("recoveries", link.recoveries)
    return link.recoveries


def _link_group(gpu: Any, first: LinkCounters, last: LinkCounters) -> CounterGroup:
    """The counters of a link. Links of generation 5 have others in place of the old ones, which they refuse."""
    before, after = ({name: getattr(one, name) for name in OF_LINK} for one in (first, last))
    names = [*(or_none(first.nvlink5) or {}), *(or_none(last.nvlink5) or {})]
    if names:
        refuses_old = all(isinstance(value, NotAvailable) for value in before.values())
        before, after = ({} if refuses_old else one for one in (before, after))
        new = [one if isinstance(one, dict) else dict.fromkeys(names, one) for one in (first.nvlink5, last.nvlink5)]
        before, after = {**before, **new[0]}, {**after, **new[1]}
    return CounterGroup(part=gpu, label=f"link {first.link}", first=before, last=after)


def state_changes(first: GpuState, last: GpuState) -> Finding:
    """Links that went down, repairs and recoveries that came to be needed, the fabric that was left, settings that changed.

    What was refused or bad at the first reading already is judged there. What is refused only at the last one is not known.
    """
    flags = [(one.name, getattr(first.repair, one.name), getattr(last.repair, one.name)) for one in fields(first.repair)]
    flags += [(name, getattr(first, name), getattr(last, name)) for name in ROWS]
    changes = [*(_flag(*flag) for flag in flags), _links(first.nvlinks, last.nvlinks), _fabric(first.fabric, last.fabric)]
    changed = [_flag(name, getattr(first, name), getattr(last, name), good=(good,)) for name, good in SETTINGS.items()]
    is_set = any(one.bad for one in changed) and not any(one.bad for one in changes)
    advice = judge_recovery(last.repair).advice or judge_repair(last.repair).advice
    return merge([Finding(kind="settings" if is_set else "gpu", advice=advice), *changes, *changed])


def throttled_s(first: GpuState, last: GpuState) -> dict[str, float] | NotAvailable:
    """Seconds between two readings in which each limiter held the clocks; one whose count shrank is left out."""

    def grown(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
        return {name: now[name] - before[name] for name in now if now[name] >= before.get(name, math.inf)}

    return apply(grown, first.throttled_s, last.throttled_s)


def _worse(*texts: str) -> Finding:
    return Finding(bad={HERE: texts})


def _unclear(text: str) -> Finding:
    return Finding(unknown={HERE: (text,)})


def _flag(name: str, before: Any, now: Any, good: Collection[Any] = GOOD) -> Finding:
    if isinstance(before, NotAvailable) or now == before:
        return Finding()
    if isinstance(now, NotAvailable):
        return _unclear(f"{name} is {now}")
    return Finding() if now in good else _worse(f"{name} is {now}, was {before}")


def _links(before: list[NvLink] | NotAvailable, now: list[NvLink] | NotAvailable) -> Finding:
    if isinstance(before, NotAvailable):
        return Finding()
    if isinstance(now, NotAvailable):
        return _unclear(f"the NVLinks are {now}")
    left = {one.link: one for one in now}
    return merge(_link(one, left.get(one.link)) for one in before)


def _link(before: NvLink, now: NvLink | None) -> Finding:
    name = f"link {before.link}"
    if before.is_up is not True or before == now:
        return Finding()
    if now is None or now.is_up is False:
        return _worse(f"{name} went down")
    if isinstance(now.is_up, NotAvailable):
        return _unclear(f"{name} is {now.is_up}")
    if isinstance(now.speed_gb_s, NotAvailable):
        return _unclear(f"the rate of {name} is {now.speed_gb_s}")
    if isinstance(before.speed_gb_s, NotAvailable) or now.speed_gb_s >= before.speed_gb_s:
        return Finding()
    return _worse(f"{name} at {now.speed_gb_s:g} GB/s, was at {before.speed_gb_s:g}")


def _fabric(before: GpuFabric | NotAvailable, now: GpuFabric | NotAvailable) -> Finding:
    if isinstance(before, NotAvailable) or now == before:
        return Finding()
    if isinstance(now, NotAvailable):
        return _unclear(f"the fabric is {now}")
    facts = []
    for name in ("state", "error", "cluster_uuid", "clique"):
        was, value = getattr(before, name), getattr(now, name)
        if value != was and (name, value) not in (("state", JOINED), ("error", None)):
            facts.append(f"fabric {name} is {value}, was {was}")
    known = or_none(before.troubles) or ()
    facts += [f"fabric: {trouble}" for trouble in or_none(now.troubles) or () if trouble not in known]
    is_unclear = isinstance(now.troubles, NotAvailable) and now.troubles != before.troubles
    return merge([_worse(*facts), _unclear(f"the fabric's health is {now.troubles}") if is_unclear else Finding()])
