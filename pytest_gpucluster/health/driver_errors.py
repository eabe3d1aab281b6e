"""The Xids of a GPU and the SXids of a host's NVSwitches during a run, judged by their meaning. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.error_codes import sxid_of, xid_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.measurements.driver_errors import GpuXids, NodeSxids, SxidSeen, XidSeen

XID_KINDS = ("hardware", "link", "driver", "unknown", "application", "test")
"""Kinds of codes: the advice for the first one that a GPU has is given."""
SXID_KINDS = ("system", "fatal", "unknown", "non-fatal", "cooling", "harmless")
"""Kinds of codes: the advice for the first one that a host has is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidsFound:
    """What is wrong with a GPU by its Xids.

    Attributes:
        over: how many count.
        facts: code, name and meaning of each that counts.
        advice: what to do about the worst of them; None where none counts.
        own: those that this run's own worker caused.
        before: those that the kernel logged before the run; they are not judged.
        unknown: why Xids may be missing; None if at least one source told all.
    """

    over: int
    facts: tuple[str, ...]
    advice: str | None
    own: tuple[str, ...]
    before: tuple[str, ...]
    unknown: str | None


def judge_xids(seen: GpuXids) -> XidsFound:
    """Count what is not a worker's own. An Xid that both sources told counts once."""
    sources = (seen.nvml, seen.kernel_log)
    codes = sorted(
        {xid.code for source in sources for xid in source}, key=lambda code: (XID_KINDS.index(xid_of(code).kind), code)
    )
    counted = {code: _most(sources, code, is_own=False) for code in codes if xid_of(code).kind != "test"}
    bad = [code for code in counted if counted[code]]
    return XidsFound(
        over=sum(counted.values()),
        facts=_texts(counted),
        advice=xid_of(bad[0]).action if bad else None,
        own=_texts({code: _most(sources, code, is_own=True) for code in codes}),
        before=_texts(Counter(xid.code for xid in seen.before)),
        unknown=_why(seen),
    )


def _most(sources: Iterable[Sequence[XidSeen]], code: int, *, is_own: bool) -> int:
    """How often the source that told most tells a code."""
    return max(sum(xid.code == code and xid.is_own == is_own for xid in source) for source in sources)


def _texts(counts: Mapping[int, int]) -> tuple[str, ...]:
    return tuple(f"{xid_of(code)}{f', {count} times' if count > 1 else ''}" for code, count in counts.items() if count)


def _why(seen: GpuXids) -> str | None:
    """One source that tells all is enough."""
    if seen.nvml_why is None or seen.kernel_log_why is None:
        return None
    return f"NVML's events: {seen.nvml_why}; kernel log: {seen.kernel_log_why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidsFound:
    """What is wrong with a host's NVSwitches by their SXids.

    Attributes:
        over: how many errors count.
        facts: switch, code, meaning and links of those that count.
        switches: the switches that have such errors.
        advice: what to do about the worst of them; None where none counts.
        harmless: those of which the guide says that nothing was lost.
        before: those that the kernel logged before the run; they are not judged.
    """

    over: int
    facts: tuple[str, ...]
    switches: tuple[str, ...]
    advice: str | None
    harmless: tuple[str, ...]
    before: tuple[str, ...]


def judge_sxids(found: NodeSxids) -> SxidsFound:
    """Count every error that is not harmless; a code that is not in the guide is not."""
    errors = _errors(found.seen)
    bad = [one for one in errors if one.counts]
    return SxidsFound(
        over=sum(one.count for one in bad),
        facts=tuple(map(str, bad)),
        switches=tuple(dict.fromkeys(one.switch for one in bad)),
        advice=sxid_of(bad[0].code).action if bad else None,
        harmless=tuple(str(one) for one in errors if not one.counts),
        before=tuple(map(str, _errors(found.before))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    """All errors of one code at one switch."""

    switch: str
    code: int
    severities: tuple[str, ...]
    links: tuple[int, ...]
    count: int

    @property
    def counts(self) -> bool:
        kind = sxid_of(self.code).kind
        if kind == "unknown":
            return self.severities != ("Correctable",)
        return kind != "harmless" or "Fatal" in self.severities

    def __str__(self) -> str:
        severity = f" ({', '.join(self.severities)})" if self.severities else ""
        where = f", link{'s' if len(self.links) > 1 else ''} {' '.join(map(str, self.links))}" if self.links else ""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.switch}: {sxid_of(self.code)}{severity}{where}{times}"


def _errors(lines: Iterable[SxidSeen]) -> list[_Error]:
    """One for each switch and code, the most urgent first."""
    by_code: defaultdict[tuple[str, int], list[SxidSeen]] = defaultdict(list)
    for line in lines:
        by_code[f"NVSwitch {line.switch} ({line.pci})", line.code].append(line)
    found = [_error(switch, code, of_code) for (switch, code), of_code in by_code.items()]
    return sorted(found, key=lambda one: (SXID_KINDS.index(sxid_of(one.code).kind), one.code, one.switch))


def _error(switch: str, code: int, lines: Sequence[SxidSeen]) -> _Error:
    """Lines of details tell one error where no other line does: the log may begin in the middle of it."""
    return _Error(
        switch=switch,
        code=code,
        severities=tuple(sorted({line.severity for line in lines if line.severity is not None})),
        links=tuple(sorted({line.link for line in lines if line.link is not None})),
        count=sum(line.count for line in lines if not line.is_detail) or 1,
    )
