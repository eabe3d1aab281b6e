"""Memory modules and disks of a host: which one is unlike its siblings, or says that it fails. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable, split
from pytest_gpucluster.judging.agreement import majority
from pytest_gpucluster.judging.finding import HERE, Finding, gather
from pytest_gpucluster.text import counted, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.measurements.host_parts import Disk, HostParts, MemoryModule

__all__ = ["judge_disks", "judge_modules", "why_no_logs", "why_no_modules"]

WARNINGS = (
    "the spare blocks are used up", "it is too hot or too cold", "it loses reliability", "it can only be read",
    "the backup of its cache failed", "its persistent memory region can only be read",
)  # fmt: skip
"""Bits of the critical warning (NVM Express base specification, SMART / health information log)."""
WORN_PERCENT = 100
"""At this the vendor's estimate of a disk's life is over (the same page)."""
CLOSED = ("nor nvme is installed", "Permission denied", "Operation not permitted", "No such file or directory")
"""Words of a health log that nobody can ask for here: there is no tool, no right, or a container hides the disk."""
NAMED = 4
NO_SPEED = "the firmware reports no speed of a memory module"


def why_no_modules(parts: HostParts) -> str | None:
    """Why nothing can be said of a host's memory modules: no table, no right to read it, or one without speeds."""
    if isinstance(parts.modules, NotAvailable):
        return parts.modules.why
    return NO_SPEED if all(isinstance(one.runs_at_mt_s, NotAvailable) for one in _present(parts.modules)) else None


def judge_modules(modules: Sequence[MemoryModule]) -> Finding:
    """A module that runs slower than most of its host; without a majority none is named. Sizes and empty slots are shown."""
    present = _present(modules)
    speeds, unread = split({one.slot: one.runs_at_mt_s for one in present})
    fastest, usual = max(speeds.values(), default=0), majority(speeds.values())
    sizes = Counter(f"{one.size_gib:g} GiB" for one in present if not isinstance(one.size_gib, NotAvailable))
    rated = [one for one in present if not isinstance(one.rated_mt_s, NotAvailable) and one.rated_mt_s > fastest]
    remarks = [f"modules of several sizes: {', '.join(f'{n} x {size}' for size, n in sizes.items())}"] if len(sizes) > 1 else []
    remarks += [f"{len(rated)} of {len(present)} modules run below their rated speed"] if rated and fastest else []
    faster = [slot for slot, speed in speeds.items() if usual is not None and speed > usual]
    remarks += [f"{shortlist(faster, most=NAMED)} faster than the others"] if faster else []
    return Finding(
        bad=_slower(speeds, usual),
        unknown={slot: (f"its speed is {why}",) for slot, why in unread.items()},
        kind="host",
        remark="; ".join(remarks) or None,
        advice="a module of another kind, or one that did not train at its speed: look at the firmware's log, seat it anew",
        evidence={"modules": dict(sizes), "slots": len(modules), "MT/s": sorted({*speeds.values()})},
    )


def _slower(speeds: Mapping[str, int], usual: int | None) -> dict[str, tuple[str, ...]]:
    """By slot, the modules below the speed that most have; the host itself where no speed has a majority."""
    counts = Counter(speeds.values())
    if usual is None:
        listed = ", ".join(f"{number} x {speed}" for speed, number in sorted(counts.items(), reverse=True))
        text = f"its modules run at different speeds: {listed} MT/s; which of them is right is not known"
        return {HERE: (text,)} if counts else {}
    others = f"{counts[usual]} others at {usual}"
    return {slot: (f"runs at {speed} MT/s, and {others}",) for slot, speed in speeds.items() if speed < usual}


def _present(modules: Sequence[MemoryModule]) -> list[MemoryModule]:
    return [one for one in modules if one.size_gib != 0]


def why_no_logs(disks: Sequence[Disk]) -> str | None:
    """Why no disk shows its health log here, where nobody can ask for any of them, and nothing else is wrong or unknown."""
    found = judge_disks(disks)
    is_read = any(not isinstance(one.health, NotAvailable) for one in disks)
    return None if is_read or found.bad or found.unknown else found.remark


def judge_disks(disks: Sequence[Disk]) -> Finding:
    """Disks that do not work, or whose own log says that they fail. Errors of the medium have no published limit: shown.

    A log that nobody can ask for here is a remark. One that was asked for and not read may hide a disk that fails: unknown.
    """
    read, unread = split({one.name: one.health for one in disks})
    closed = Counter(log.why for log in unread.values() if _is_closed(log.why))
    remarks = [f"health log of {n} of {len(disks)} disks not read: {why}" for why, n in closed.items()]
    errors = {name: one.media_errors for name, one in read.items() if one.media_errors}
    remarks += [f"{name} has counted {counted(number, 'error')} of its medium" for name, number in errors.items()]
    unknown = [(one.name, f"its state is {one.state}") for one in disks if isinstance(one.state, NotAvailable)]
    unknown += [(name, f"its health log was not read: {log.why}") for name, log in unread.items() if not _is_closed(log.why)]
    return Finding(
        bad={one.name: tuple(_faults(one)) for one in disks},
        unknown=gather(unknown),
        kind="host",
        remark="; ".join(remarks) or None,
        advice="replace the disk; what it holds may be lost",
        evidence={one.name: _shown(one) for one in disks},
    )


def _is_closed(why: str) -> bool:
    return any(words in why for words in CLOSED)


def _faults(disk: Disk) -> Iterator[str]:
    if isinstance(disk.state, str) and disk.state != "live":
        yield f"the kernel calls it {disk.state}"
    if isinstance(disk.health, NotAvailable):
        return
    log = disk.health
    yield from (text for bit, text in enumerate(WARNINGS) if log.critical_warning >> bit & 1)
    if log.spare_percent < log.spare_threshold_percent and not log.critical_warning & 1:
        yield f"{log.spare_percent} % of its spare blocks are left, and {log.spare_threshold_percent} % are the least"
    if log.used_percent >= WORN_PERCENT:
        yield f"{log.used_percent} % of its life are used"
    if log.passed is False and not log.critical_warning:
        yield "it fails its own test (smartctl)"


def _shown(disk: Disk) -> str:
    log = disk.health
    words = f"not read: {log.why}" if isinstance(log, NotAvailable) else f"{log.used_percent} % used, by {log.tool}"
    return f"{disk.model}, firmware {disk.firmware}, {disk.state}, {words}"
