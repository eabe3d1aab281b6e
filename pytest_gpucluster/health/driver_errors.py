"""The Xids of a GPU and the SXids of a host's NVSwitches during a run, judged by their meaning. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.error_codes import ACTIONS, sxid_of, xid_of
from pytest_gpucluster.judging.finding import HERE, Finding, gather

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.measurements.driver_errors import GpuXids, NodeSxids, SxidSeen, XidSeen

__all__ = ["judge_sxids", "judge_xids"]

XID_KINDS = ("hardware", "link", "driver", "unknown", "application", "test")
"""Kinds of codes: the advice for the first one that a GPU has is given."""
SXID_KINDS = ("system", "fatal", "unknown", "non-fatal", "cooling", "harmless")
"""Kinds of codes: the advice for the first one that a host has is given."""


def judge_xids(found: GpuXids) -> Finding:
    """The Xids of a GPU that no worker of this run caused, and its loss without an Xid.

    An Xid that both sources show counts once; one source is enough. A lost GPU that NVML does not list leaves each GPU of its
    host unknown: it may be one of them.
    """
    sources = (found.nvml, found.kernel_log)
    every = {xid.code for source in sources for xid in source}
    codes = sorted(every, key=lambda code: (XID_KINDS.index(xid_of(code).kind), code))
    counted = {code: _most(sources, code, is_own=False) for code in codes if xid_of(code).kind != "test"}
    bad = [code for code in counted if counted[code]]
    shown = {
        "of own workers": _texts({code: _most(sources, code, is_own=True) for code in codes}),
        "before the run": (*_texts(Counter(xid.code for xid in found.before)), *found.lost_before),
    }
    why = _why(found)
    doubts = (f"Xids could not be read: {why}",) if why is not None else ()
    lost = (f"the kernel log shows a lost GPU that NVML does not list: {line}" for line in found.lost_elsewhere)
    return Finding(
        bad={HERE: (*(f"the driver lost the GPU: {line}" for line in found.lost), *(_texts(counted) if bad else ()))},
        unknown={HERE: (*doubts, *lost)},
        value=sum(counted.values()) + len(found.lost) if bad or found.lost or not (why or found.lost_elsewhere) else None,
        kind="gpu",
        unknown_kind="node" if found.lost_elsewhere else "unknown",
        advice=_advice_on_loss(found.lost) if found.lost else xid_of(bad[0]).action if bad else None,
        evidence={name: texts for name, texts in shown.items() if texts},
    )


def _advice_on_loss(lines: Sequence[str]) -> str:
    """A reset where the driver itself requires one; other lost GPUs need what one needs that fell off the bus."""
    return ACTIONS["Xid"]["reset" if any("reset" in line.lower() for line in lines) else "reboot"]


def _most(sources: Iterable[Sequence[XidSeen]], code: int, *, is_own: bool) -> int:
    """How often the source that shows a code most often shows it."""
    return max(sum(xid.code == code and xid.is_own == is_own for xid in source) for source in sources)


def _texts(counts: Mapping[int, int]) -> tuple[str, ...]:
    return tuple(f"{xid_of(code)}{f', {count} times' if count > 1 else ''}" for code, count in counts.items() if count)


def _why(found: GpuXids) -> str | None:
    """Why Xids may be missing; None if at least one source shows all."""
    if found.nvml_why is None or found.kernel_log_why is None:
        return None
    return f"NVML's events: {found.nvml_why}; kernel log: {found.kernel_log_why}"


def judge_sxids(found: NodeSxids) -> Finding:
    """The errors of a host's NVSwitches that NVIDIA's guide does not call harmless; a code that is not in the guide counts."""
    errors = _errors(found.seen)
    bad = [one for one in errors if one.counts]
    shown = {
        "harmless": tuple(str(one) for one in errors if not one.counts),
        "before the run": tuple(map(str, _errors(found.before))),
    }
    why = found.kernel_log_why
    return Finding(
        bad=gather((one.switch, one.text) for one in bad),
        unknown={HERE: (f"SXids could not be read: {why}",)} if why is not None else {},
        value=sum(one.count for one in bad) if bad or why is None else None,
        kind="switch",
        unknown_kind="settings",
        advice=sxid_of(bad[0].code).action if bad else None,
        evidence={name: texts for name, texts in shown.items() if texts},
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
        """The error with its switch."""
        return f"{self.switch}: {self.text}"

    @property
    def text(self) -> str:
        """Code, meaning, severity, links and how often."""
        severity = f" ({', '.join(self.severities)})" if self.severities else ""
        where = f", link{'s' if len(self.links) > 1 else ''} {' '.join(map(str, self.links))}" if self.links else ""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{sxid_of(self.code)}{severity}{where}{times}"


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
