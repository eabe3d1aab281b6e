"""The errors of a host's NVSwitches (SXids) during a run, judged by their meaning. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.sxids import sxid_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpucluster.measurements.sxids import NodeSxids, SxidSeen

URGENT = ("system", "fatal", "unknown", "non-fatal", "cooling", "harmless")
"""Kinds of codes: the advice for the first one that a host has is given."""


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
    return sorted(found, key=lambda one: (URGENT.index(sxid_of(one.code).kind), one.code, one.switch))


def _error(switch: str, code: int, lines: Sequence[SxidSeen]) -> _Error:
    """Lines of details tell one error where no other line does: the log may begin in the middle of it."""
    return _Error(
        switch=switch,
        code=code,
        severities=tuple(sorted({line.severity for line in lines if line.severity is not None})),
        links=tuple(sorted({line.link for line in lines if line.link is not None})),
        count=sum(line.count for line in lines if not line.is_detail) or 1,
    )
