"""The Xids of one GPU during a run, judged by their meaning. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.xids import xid_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.measurements.xids import GpuXids, XidSeen

URGENT = ("hardware", "link", "driver", "unknown", "application", "test")
"""Kinds of codes: the advice for the first one that a GPU has is given."""


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
    codes = sorted({xid.code for source in sources for xid in source}, key=lambda code: (URGENT.index(xid_of(code).kind), code))
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
