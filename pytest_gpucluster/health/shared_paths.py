"""What is wrong with a path that hosts share, and at which host, from what each of them wrote and saw. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.finding import HERE, Finding, gather
from pytest_gpucluster.text import counted, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.measurements.shared_paths import LockCount, MarksSeen, PathMark, Replaced

__all__ = ["PathObservations", "PathRequirements", "judge_path"]

NAMED = 4
"""So many hosts are named in one sentence; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathObservations:
    """What was seen of one path, by host: the files written first and rewritten, the files read after each, the counting.

    ``counted`` is by fcntl, ``flocked`` by flock; ``replaced`` is what each saw of a file that was replaced by rename.

    A host without an entry was not measured at that step. ``left`` says why a host could not remove its folder at the end.
    """

    marks: Mapping[str, PathMark]
    rewritten: Mapping[str, PathMark] = field(default_factory=dict)
    seen: Mapping[str, MarksSeen] = field(default_factory=dict)
    seen_again: Mapping[str, MarksSeen] = field(default_factory=dict)
    counted: Mapping[str, LockCount] = field(default_factory=dict)
    flocked: Mapping[str, LockCount] = field(default_factory=dict)
    replaced: Mapping[str, Replaced] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> list[str]:
        """The hosts that could write below the path."""
        return [host for host, mark in self.marks.items() if mark.problem is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRequirements:
    """What a path must offer each host: free GiB, free inodes where the file system counts them, and locks."""

    least_free_gib: float
    least_free_inodes: int
    locks: bool = True


def judge_path(path: str, seen: PathObservations, required: PathRequirements, *, hosts: Sequence[str]) -> dict[str, Finding]:
    """What is wrong at each host; ``hosts`` are all that should share the path, measured or not."""
    faults = gather((host, f"{path} {why}") for host, why in _faults(seen, required))
    found = {}
    for host in hosts:
        bad, is_usable = faults.get(host, ()), host in seen.usable and host not in faults
        doubt = _unknown(seen, required, host, is_one_of_many=len(hosts) > 1) if is_usable else None
        unknown = () if doubt is None else (f"{path}: {doubt}",)
        evidence = _evidence(path, seen, host)
        found[host] = Finding(bad={HERE: bad}, unknown={HERE: unknown}, kind=None if bad else "host", evidence=evidence)
    return found


def _evidence(path: str, seen: PathObservations, host: str) -> dict[str, object]:
    """The file system below a path as the host has it, free room, and how long the slowest file took to show."""
    mark, turns = seen.marks.get(host), (seen.seen.get(host), seen.seen_again.get(host))
    slowest = [turn.slowest_s for turn in turns if turn is not None and turn.slowest_s is not None]
    if mark is None:
        return {}
    found: dict[str, object] = {path: str(mark.mount)}
    if mark.problem is None:
        found |= {f"{path} free GiB": mark.free_gib, f"{path} free inodes": mark.free_inodes, f"{path} quota": mark.quota}
    if slowest:
        found[f"{path} s until seen"] = max(slowest)
    if (seen_here := seen.replaced.get(host)) is not None:
        found[f"{path} rename"] = f"{counted(seen_here.reads, 'read')}, {seen_here.stale} of them stale"
    if mark.leftovers:
        found[f"{path} leftovers removed"] = len(mark.leftovers)
    return found


def _faults(seen: PathObservations, required: PathRequirements) -> Iterator[tuple[str, str]]:
    for host, mark in seen.marks.items():
        yield from ((host, why) for why in _own(mark, required))
    for host, mark in seen.rewritten.items():
        if mark.problem is not None and seen.marks[host].problem is None:
            yield host, f"{mark.problem}, at the second writing"
    for host, why in seen.left.items():
        yield host, f"{why}, so this run's own folder could not be removed"
    apart, others = _apart(seen), len(seen.usable) - 1
    nothing = f"no file of the {others} other hosts shows here" if others > 1 else "the other host's file does not show here"
    for host in apart:
        yield host, f"is not shared: {nothing} ({seen.marks[host].mount})"
    yield from _unseen(seen, apart)
    yield from _locks_that_fail(seen.counted, "locks")
    yield from _locks_that_fail(seen.flocked, "locks by flock")
    yield from _renames_that_show(seen)


def _unknown(seen: PathObservations, required: PathRequirements, host: str, *, is_one_of_many: bool) -> str | None:
    """What could not be found out at a host where nothing is wrong."""
    if is_one_of_many and len(seen.usable) == 1:
        return "no other host could use it, so nothing says that it is shared"
    if host not in seen.seen_again:
        return "the files of the other hosts were not read"
    if not required.locks:
        return None
    if host not in seen.counted or (is_one_of_many and len(seen.counted) == 1):
        return "locks were not tried with another host"
    return next(_not_tried(seen, is_one_of_many=is_one_of_many), None)


def _not_tried(seen: PathObservations, *, is_one_of_many: bool) -> Iterator[str]:
    """Locks for which nobody waited, and a rename that nobody made."""
    for lock, hosts in (("lock", seen.counted), ("flock", seen.flocked)):
        if is_one_of_many and hosts and not any(its.waited for its in hosts.values()):
            yield f"no host ever had to wait for another one's {lock}, so nothing says that {lock}s hold"
    if seen.replaced and not any(its.replaced or its.problem is not None for its in seen.replaced.values()):
        yield "no host replaced a file while it was read, so nothing says that a rename is atomic"


def _own(mark: PathMark, required: PathRequirements) -> Iterator[str]:
    """What is wrong with a path whatever other hosts see."""
    if mark.problem is not None:
        yield mark.problem
        return
    if mark.free_gib is not None and mark.free_gib < required.least_free_gib:
        yield f"has {mark.free_gib:.3g} GiB free, and {required.least_free_gib:g} GiB are required"
    if mark.free_inodes is not None and mark.free_inodes < required.least_free_inodes:
        yield f"has room for {counted(mark.free_inodes, 'file')}, and {required.least_free_inodes} are required"


def _missed(seen: PathObservations) -> list[tuple[str, str, str, str]]:
    """Every file that a host did not see in time: reader, writer, which file, and what the reader saw."""
    found = []
    turns = (("the file", seen.marks, seen.seen), ("the file, written again,", seen.rewritten, seen.seen_again))
    for what, marks, read in turns:
        writer_of = {mark.folder: host for host, mark in marks.items() if mark.problem is None}
        for reader, its in read.items():
            missed = its.missed.items() if reader in seen.usable else ()
            found += [(reader, writer_of[folder], what, why) for folder, why in missed if folder in writer_of]
    return found


def _apart(seen: PathObservations) -> list[str]:
    """The hosts that see no other host's first file at all. Each writes to a file system of its own."""
    folders = {seen.marks[host].folder for host in seen.usable}
    if len(folders) < 2:
        return []
    absent = {host: seen.seen[host].absent if host in seen.seen else [] for host in seen.usable}
    return [host for host in seen.usable if folders - {seen.marks[host].folder} <= {*absent[host]}]


def _unseen(seen: PathObservations, apart: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Files that were missed where both hosts share the path: blamed on the reader or the writer, whichever misses more.

    Where both miss as much, nobody can tell, and both are named.
    """
    pairs: dict[tuple[str, str], str] = {}
    for reader, writer, what, why in _missed(seen):
        if reader not in apart and writer not in apart:
            pairs.setdefault((reader, writer), f"{what} {why}")
    as_reader, as_writer = Counter(reader for reader, _ in pairs), Counter(writer for _, writer in pairs)
    said: dict[tuple[str, str], list[str]] = {}
    for (reader, writer), why in pairs.items():
        if as_reader[reader] >= as_writer[writer]:
            said.setdefault((reader, f"{why} here, of"), []).append(writer)
        if as_writer[writer] >= as_reader[reader]:
            said.setdefault((writer, f"{why}, of this host, on"), []).append(reader)
    for (host, text), others in said.items():
        yield host, f"loses files: {text} {shortlist(others, most=NAMED)}"


def _locks_that_fail(counted: Mapping[str, LockCount], locks: str) -> Iterator[tuple[str, str]]:
    """Locks that were refused, at the host; updates that were lost under a lock, at all hosts: nobody can tell whose."""
    refused = {host: its.problem for host, its in counted.items() if its.problem is not None}
    for host, why in refused.items():
        yield host, f"gives no {locks.replace('locks', 'lock')}: {why}"
    updates = sum(its.updates for its in counted.values())
    last = max((its.last for its in counted.values()), default=0)
    if not refused and last != updates:
        for host in counted:
            yield host, f"has {locks} that do not hold between hosts: of {updates} updates under a lock {last} arrived"


def _renames_that_show(seen: PathObservations) -> Iterator[tuple[str, str]]:
    """A file that was replaced by rename, and was not there, or not whole, for a reader meanwhile."""
    for host, its in seen.replaced.items():
        if its.problem is not None:
            yield host, f"gives no rename over a file: {its.problem}"
        for what, times in its.faults.items():
            yield host, f"has a rename that is not atomic: {times} of {its.reads} reads saw {what}"
