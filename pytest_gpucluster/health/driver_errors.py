"""The Xids of a GPU and the SXids of a host's NVSwitches during a run, judged by their meaning. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.health.gpu import HEALTHY, advice_for
from pytest_gpucluster.inventory import error_codes
from pytest_gpucluster.judging.finding import HERE, NOBODY, Finding, gather

if TYPE_CHECKING:
    from pytest_gpucluster.measurements.health import GpuXids, NodeSxids, XidSeen
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.protocol.node_events import NodeSxid, XidDetail

__all__ = ["judge_sxids", "judge_sxids_between", "judge_xids", "judge_xids_between"]

Line = TypeVar("Line", "XidSeen", "NodeSxid")
XID_KINDS = ("hardware", "link", "driver", "unknown", "application", "test")
"""Kinds of codes: the advice for the first one that a GPU has is given."""
FEWEST = 3
"""GPUs of an NVLink domain, of which one can be told from all others."""
ONE_EVENT_S = 60.0
"""Xids of one event in an NVLink domain come within so many seconds: nodes are asked one after the other."""
SXID_KINDS = ("system", "fatal", "unknown", "non-fatal", "cooling", "harmless")
"""Kinds of codes: the advice for the first one that a host has is given."""


def judge_xids(found: GpuXids, peers: Callable[[], Mapping[Place, GpuXids]] | None = None) -> Finding:
    """The Xids of a GPU that no worker of this run caused, and its loss without an Xid.

    An Xid that both sources show counts once; one source is enough. Of an NVLink error the kernel log alone tells whether it is
    fatal. Where that is unknown, so is the GPU, and nobody is named, unless the whole domain shows which link went down
    (docs/decisions/0087). A lost GPU that NVML does not list leaves each GPU of its host unknown: it may be one of them.
    ``peers``: the Xids of the other GPUs of its NVLink domain, called where these may be the consequence of a link of theirs.
    """
    every = _xids(found)
    if peers is not None and any(xid.unread for xid in every) and _is_link_gone([found, *peers().values()]):
        every = _all_counted(every)
    roots = {} if peers is None or found.lost else _roots(found, [xid for xid in every if xid.count or xid.unread], peers)
    every = _all_counted(every) if roots else every
    bad = [xid for xid in every if xid.count]
    lost = tuple(f"the driver lost the GPU: {line}" for line in found.lost)
    shown = {
        "of own workers": tuple(xid.text(xid.own) for xid in every if xid.own),
        **{place.id: text for place, (text, _) in roots.items()},
        "before the run": (*(xid.text(xid.before) for xid in every if xid.before), *found.lost_before),
    }
    remarks = tuple(xid.text(xid.harmless) for xid in every if xid.harmless)
    unknown = _unknown(found, every)
    return Finding(
        bad={**{place: (f"{text}: the cause",) for place, (text, _) in roots.items()}, HERE: (*lost, *(map(str, bad)))},
        unknown=unknown,
        value=sum(xid.count for xid in bad) + len(lost) if bad or lost or not any(unknown.values()) else None,
        kind="gpu",
        unknown_kind="node" if found.lost_elsewhere else "unknown",
        advice=next((advice for _, advice in roots.values()), None) or _advice(found, bad),
        remark=f"no failure, by the driver's own word: {'; '.join(remarks)}" if remarks else None,
        unknown_advice=SEVERITY_ADVICE if unknown[NOBODY] else None,
        evidence={name: texts for name, texts in {**shown, "harmless": remarks}.items() if texts},
    )


def _unknown(found: GpuXids, every: Sequence[_Xid]) -> dict[str, list[str]]:
    """What may be missing, lost GPUs that may be this one, and NVLink errors that may be without harm: these name nobody."""
    why, log_why = _why(found), found.kernel_log_why
    here = [f"Xids could not be read: {why}"] if why is not None else []
    here += [f"the kernel log shows a lost GPU that NVML does not list: {line}" for line in found.lost_elsewhere]
    no_log = "the kernel log does not say it" if log_why is None else f"not readable without the kernel log ({log_why})"
    severity = [f"{xid.text(xid.unread, is_harmless=False)}: its severity is unknown, {no_log}" for xid in every if xid.unread]
    return {HERE: here, NOBODY: severity}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Xid:
    """All Xids of one code of a GPU: those that count, of own workers, without harm, and from before the run.

    ``unread``: those of NVLinks that count or not, by a severity which nothing tells.
    """

    code: int
    details: tuple[XidDetail, ...]
    count: int
    unread: int
    own: int
    harmless: int
    before: int

    @property
    def cause(self) -> error_codes.ErrorCode:
        """The meaning that decides what to do: that of the Xid that caused it, if its lines name one."""
        causes = [error_codes.xid_of(one.cause) for one in self.details if one.cause is not None]
        return min(causes, key=lambda one: XID_KINDS.index(one.kind), default=error_codes.xid_of(self.code))

    @property
    def action(self) -> str | None:
        """What the driver asks for, by the last line that says it."""
        return next((one.action for one in reversed(self.details) if one.action is not None), None)

    @property
    def advice(self) -> str:
        """What to do about it."""
        return (None if self.action is None else advice_for(self.action)) or self.cause.action

    def __str__(self) -> str:
        """Those that count."""
        return self.text(self.count, is_harmless=False)

    def text(self, count: int, *, is_harmless: bool | None = None) -> str:
        """Code, meaning, what the lines say more, and how often."""
        alike = [one for one in self.details if is_harmless is None or _is_harmless(self.code, one) is is_harmless]
        words = _describe(alike)
        return f"{error_codes.xid_of(self.code)}{words}{f', {count} times' if count > 1 else ''}"


def _describe(details: Sequence[XidDetail]) -> str:
    """Units, severities, links and error statuses of several lines, the Xids that caused them, and what the GPU asks for."""
    each: dict[str, list[object]] = {
        "": [" ".join(filter(None, (one.unit, one.severity))) for one in details],
        "link ": [one.link for one in details],
        "error status ": [one.status for one in details],
        "caused by Xid ": [one.cause for one in details],
        "recovery action ": [one.action for one in details],
    }
    found = {name: dict.fromkeys(str(one) for one in values if one not in (None, "")) for name, values in each.items()}
    return "".join(f", {name}{' '.join(values)}" for name, values in found.items() if values)


def _xids(found: GpuXids) -> list[_Xid]:
    """One for each code, the most urgent first: those with a recovery action, then by kind. A test message counts nowhere."""
    codes = {xid.code for source in (found.nvml, found.kernel_log, found.before) for xid in source}
    known = [_of_code(code, found) for code in codes]
    return sorted(known, key=lambda one: (one.action is None, XID_KINDS.index(one.cause.kind), one.code))


def _of_code(code: int, found: GpuXids) -> _Xid:
    """Counts of a code: of two sources, the one that has more of it. The log alone tells what is harmless and whose it is."""
    nvml, log = ([xid for xid in source if xid.code == code] for source in (found.nvml, found.kernel_log))
    harmless = _sum(xid for xid in log if _is_harmless(code, xid.detail))
    foreign = _sum(xid for xid in log if not xid.is_own) - harmless
    is_test = error_codes.xid_of(code).kind == "test"
    count = 0 if is_test else max(_sum(xid for xid in nvml if not xid.is_own) - harmless, foreign)
    fatal = _sum(xid for xid in log if xid.detail is not None and xid.detail.severity is not None) - harmless
    unread = count - fatal if code in error_codes.NVLINK_XIDS else 0
    return _Xid(
        code=code,
        details=tuple(dict.fromkeys(xid.detail for xid in (log or _of(found.before, code)) if xid.detail is not None)),
        count=count - unread,
        unread=unread,
        own=_sum(xid for xid in log or nvml if xid.is_own),
        harmless=harmless,
        before=_sum(_of(found.before, code)),
    )


def _all_counted(every: Iterable[_Xid]) -> list[_Xid]:
    """Those of unknown severity count too."""
    return [replace(xid, count=xid.count + xid.unread, unread=0) for xid in every]


def _is_link_gone(domain: Sequence[GpuXids]) -> bool:
    """Whether a link of one GPU went down and took all others of its NVLink domain along: no error without harm does that."""
    down = [gpu for gpu in domain if _ages(gpu, error_codes.LINK_DOWN)]
    if len(down) != 1 or len(domain) < FEWEST:
        return False
    others = [gpu for gpu in domain if gpu is not down[0]]
    return all(_is_near(_ages(gpu, error_codes.LINK_SUFFERED), _ages(down[0], error_codes.LINK_DOWN)) for gpu in others)


def _ages(found: GpuXids, code: int) -> list[float | None]:
    """When a GPU had Xids of this code, if any of them counts, or may count: NVML has those without harm too."""
    known = _of_code(code, found)
    return [xid.age_s for xid in _of((*found.nvml, *found.kernel_log), code)] if known.count or known.unread else []


def _of(xids: Iterable[XidSeen], code: int) -> list[XidSeen]:
    return [xid for xid in xids if xid.code == code]


def _sum(xids: Iterable[XidSeen]) -> int:
    return sum(xid.count for xid in xids)


def _is_harmless(code: int, detail: XidDetail | None) -> bool:
    """Whether the driver goes on as before: an NVLink error that is not fatal, or the end of a recovery."""
    if detail is None:
        return False
    is_over = code == error_codes.ACTION_CHANGED and detail.action == HEALTHY
    return is_over or (code in error_codes.NVLINK_XIDS and detail.severity == "Nonfatal")


def _advice(found: GpuXids, bad: Sequence[_Xid]) -> str | None:
    """What the driver asks for itself; a reset of a lost GPU that requires one; else by the most urgent Xid."""
    if found.lost and not (bad and bad[0].action is not None):
        return error_codes.ACTIONS["Xid"]["reset" if any("reset" in line.lower() for line in found.lost) else "reboot"]
    return bad[0].advice if bad else None


def _roots(found: GpuXids, bad: Sequence[_Xid], peers: Callable[[], Mapping[Place, GpuXids]]) -> dict[Place, tuple[str, str]]:
    """The GPUs whose link went down at that time, with the text and the advice, where a GPU only suffered from it.

    The severity of one of the two has to be known: both may be without harm.
    """
    if not any(_suffers(xid) for xid in bad) or not all(_suffers(xid) or _follows(xid) for xid in bad):
        return {}
    at_s = [xid.age_s for xid in (*found.nvml, *found.kernel_log) if xid.code in {one.code for one in bad}]
    roots = {}
    is_fatal = any(xid.count and _suffers(xid) for xid in bad)
    for place, other in peers().items():
        theirs = [xid for xid in _xids(other) if xid.count or (is_fatal and xid.unread)]
        down = next((xid for xid in theirs if xid.code == error_codes.LINK_DOWN), None)
        if down is not None and _is_near(at_s, _ages(other, error_codes.LINK_DOWN)):
            roots[place] = down.text(down.count + down.unread, is_harmless=False), theirs[0].advice
    return roots


def _suffers(xid: _Xid) -> bool:
    """Whether a GPU gets such an Xid when a link of another one goes down."""
    code = xid.cause.code if xid.code == error_codes.REMOVED else xid.code
    return code == error_codes.LINK_SUFFERED or (xid.code == error_codes.REMOVED and code == error_codes.LINK_DOWN)


def _follows(xid: _Xid) -> bool:
    """Whether an Xid is the end of another one, whichever: older drivers do not say which one removed a program."""
    return xid.code == error_codes.ACTION_CHANGED or (xid.code == error_codes.REMOVED and xid.cause.code == error_codes.REMOVED)


def _is_near(one: Iterable[float | None], other: Iterable[float | None]) -> bool:
    """Whether two of these ages, in seconds, are of one event."""
    pairs = [(first, second) for first in one for second in other]
    return any(first is None or second is None or abs(first - second) <= ONE_EVENT_S for first, second in pairs)


def _why(found: GpuXids) -> str | None:
    """Why Xids may be missing; None if at least one source shows all."""
    if found.nvml_why is None or found.kernel_log_why is None:
        return None
    return f"NVML's events: {found.nvml_why}; kernel log: {found.kernel_log_why}"


SEVERITY_ADVICE = (
    "let the run read /dev/kmsg there (root, or the capability SYSLOG), or look for the Xids in the kernel log of the host: "
    "Nonfatal ones are no fault; gpu_worsened and nvlink_links judge the links by NVML"
)
"""What to do where NVML reports an NVLink error and nothing tells its severity."""
LOST = "the kernel log has lost what it had before"


def judge_xids_between(before: GpuXids, after: GpuXids) -> Finding:
    """The Xids of a GPU after the last reading of one run and before the first one of another, by the kernel log.

    The end of a run can cause those of programs, and other programs may have run since then: they are shown.
    """
    same = {"pid": None, "is_own": False, "age_s": None}
    known, logged = _counted((*before.before, *before.kernel_log), **same), _counted(after.before, **same)
    kinds = {xid.code: error_codes.xid_of(xid.code).kind for xid in logged}
    seen = [replace(xid, is_own=kinds[xid.code] == "application", count=n) for xid, n in (logged - known).items()]
    lost = [line for line in after.lost_before if line not in (*before.lost, *before.lost_before)]
    why = before.kernel_log_why or after.kernel_log_why or (LOST if known - logged else None)
    logs = replace(after, kernel_log=seen, kernel_log_why=why, before=[], lost=lost, lost_before=[], lost_elsewhere=[])
    return judge_xids(replace(logs, nvml=[], nvml_why="nobody listened"))


def judge_sxids_between(before: NodeSxids, after: NodeSxids) -> Finding:
    """The SXids of a host after the last reading of one run and before the first one of another."""
    known, logged = _counted((*before.before, *before.seen), is_before=False), _counted(after.before, is_before=False)
    seen = [replace(line, count=count) for line, count in (logged - known).items()]
    why = before.kernel_log_why or after.kernel_log_why or (LOST if known - logged else None)
    return judge_sxids(replace(after, seen=seen, before=[], kernel_log_why=why))


def _counted(lines: Iterable[Line], **same: Any) -> Counter[Line]:
    """How often each line was seen; ``same``: fields that tell no lines apart, each with its one value."""
    counts: Counter[Line] = Counter()
    for line in lines:
        counts[replace(line, count=1, **same)] += line.count
    return counts


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
        advice=error_codes.sxid_of(bad[0].code).action if bad else None,
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
        kind = error_codes.sxid_of(self.code).kind
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
        return f"{error_codes.sxid_of(self.code)}{severity}{where}{times}"


def _errors(lines: Iterable[NodeSxid]) -> list[_Error]:
    """One for each switch and code, the most urgent first."""
    by_code = grouped(((f"NVSwitch {line.switch} ({line.pci})", line.code), line) for line in lines)
    found = [
        _Error(
            switch=switch,
            code=code,
            severities=tuple(sorted({line.severity for line in alike if line.severity is not None})),
            links=tuple(sorted({line.link for line in alike if line.link is not None})),
            # Lines of details tell one error where no other line does: the log may begin in the middle of it.
            count=sum(line.count for line in alike if not line.is_detail) or 1,
        )
        for (switch, code), alike in by_code.items()
    ]
    return sorted(found, key=lambda one: (SXID_KINDS.index(error_codes.sxid_of(one.code).kind), one.code, one.switch))
