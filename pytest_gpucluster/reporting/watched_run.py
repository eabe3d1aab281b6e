"""A run as its files show it while it goes on: journal and logs. Files are read, and nothing is written or locked."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.run_files import JOURNAL, LOGS
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.culprits import Culprit, find_culprits
from pytest_gpucluster.judging.verdict import ERROR, FAILED, MISSING, NOISY, PENDING, WAIVED, Record, counted_as
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.reading import contradiction_in
from pytest_gpucluster.reporting.files import LOCK
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT, JournalState, event_of, state_after, unbound_places

LOCKS = Path("/proc/locks")
HINTS = "environment_hints"
"""The criterion whose evidence has the variables of each node."""
TAIL_BYTES, NEWEST_LOGS, LINES_OF_A_LOG = 16384, 3, 3
COST_SHARE, CHEAP_S = 0.1, 0.05
"""What is worked out from the journal takes at most this part of the time, unless that is quick."""
TELEMETRY = ("SM MHz", "W", "C")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """One node of a run: outcomes of its places, and what its GPUs showed when each was measured last.

    ``hostname`` is None where no list names the host of an absent node. ``is_absent``: none of its GPUs answers, as is known.
    ``done`` counts no outcome that is ``missing``: what an ended run did not come to. ``bad`` is what failed, also where a
    waiver covers it; ``errors`` is what was not measured, or is too close to call.
    ``telemetry`` has the least and the most by ``SM MHz``, ``W`` and ``C``; ``reasons`` are the event reasons.
    """

    id: str
    hostname: str | None
    is_absent: bool
    done: int
    expected: int
    bad: int
    errors: int
    missing: int
    telemetry: Mapping[str, tuple[float, float]]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPicture:
    """A run at one moment.

    Attributes:
        source: the folder or the journal that was named.
        problem: why there is nothing to see, or to believe; None where there is a journal.
        holder: the process of this machine that holds the directory; None: no process that is visible here.
        verdict_line: the verdict of the run itself; None while it has none.
        silent_s: how long ago the last line was written; ``elapsed_s``: from its first line to that one.
        counts: how many outcomes there are of each kind, without those that are pending.
        next_criterion: the first one that has places without an outcome.
        variables: each ``NAME=value`` of NCCL and the nodes that have it; None where no node has answered yet.
        unread: how many lines of the journal could not be read.
        is_partial: more of the journal is there than was read so far.
    """

    source: str
    problem: str | None = None
    holder: int | None = None
    facts: Mapping[str, Any]
    shape: str = ""
    verdict_line: str | None = None
    silent_s: float = 0.0
    elapsed_s: float = 0.0
    counts: Mapping[str, int]
    expected: int = 0
    next_criterion: str | None = None
    soak_round: int | None = None
    nodes: tuple[NodeProgress, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    places: Mapping[str, Place]
    logs: tuple[tuple[str, str], ...] = ()
    variables: Mapping[str, tuple[str, ...]] | None = None
    unread: int = 0
    is_partial: bool = False

    @property
    def done(self) -> int:
        """How many checks have an outcome; what an ended run did not come to has none."""
        return sum(self.counts.values()) - self.counts.get(MISSING, 0)


class WatchedRun:
    """Follows the journal of a run: each picture reads what was written since the one before."""

    def __init__(self, source: Path) -> None:
        """``source`` is a results directory, or a journal: also a copy, or that of an older run."""
        self._source = source
        self._file: tuple[int, int] | None = None
        self._is_partial = False
        self._forget()

    def _forget(self) -> None:
        self._offset, self._rest = 0, b""
        self._state = JournalState()
        self._unread = 0
        self._verdict_line: str | None = None
        self._soak_round: int | None = None
        self._picture: RunPicture | None = None
        self._is_new, self._next_s = False, 0.0

    def picture(self, *, most_bytes: int | None = None) -> RunPicture:
        """The run now. Nothing is raised: what cannot be read is a ``problem``.

        Args:
            most_bytes: how much of the journal is read at once, so that a long one holds up nobody; all by default.
        """
        journal = self._source if self._source.is_file() else self._source / JOURNAL
        problem = self._read(journal, most_bytes)
        if problem is not None:
            return RunPicture(source=str(self._source), problem=problem, facts={}, counts={}, places={})
        if self._picture is None or (self._is_new and time.monotonic() >= self._next_s):
            self._picture = self._draw()
        return replace(
            self._picture,
            is_partial=self._is_partial,
            holder=holder_of(journal.with_name(LOCK)),
            silent_s=max(0.0, time.time() - self._state.ended_s),
            logs=tuple(last_lines(journal.with_name(LOGS))),
        )

    def _draw(self) -> RunPicture:
        """What the journal says. Of a large run this takes time, and is done less often: it may run on the node that runs."""
        began_s = time.monotonic()
        state = self._state
        places = state.places or unbound_places(state)
        records, word = list(state.records.values()), state.verdict_word
        counts = Counter(counted_as(record) for record in records if record.outcome != PENDING)
        wrong = None if word is None else contradiction_in(word, {*counts})
        picture = RunPicture(
            source=str(self._source),
            problem=wrong and f"{self._source} {wrong}",
            facts=state.facts,
            shape=state.terms.shape,
            verdict_line=self._verdict_line,
            elapsed_s=max(0.0, state.ended_s - state.began_s),
            counts=counts,
            expected=len(records),
            next_criterion=next((record.criterion for record in records if record.outcome == PENDING), None),
            soak_round=self._soak_round,
            nodes=tuple(_nodes(records, places, is_bound=bool(state.places))),
            culprits=tuple(find_culprits(records, places)),
            places=places,
            variables=_variables(records),
            unread=self._unread,
        )
        cost_s = time.monotonic() - began_s
        self._is_new, self._next_s = False, time.monotonic() + (cost_s / COST_SHARE if cost_s > CHEAP_S else 0.0)
        return picture

    def _read(self, journal: Path, most_bytes: int | None) -> str | None:
        """Take what was written since; what is wrong with the file, None if it is a journal."""
        try:
            content = self._new_bytes(journal, most_bytes)
        except OSError as error:
            self._file = None
            return f"there is no run to see: {journal}: {error.strerror}"
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            self._take(line)
        return None if self._state.began_s or not self._unread else f"{journal} is not the journal of a run"

    def _new_bytes(self, journal: Path, most_bytes: int | None) -> bytes:
        """What was written since; all of a file that is another one now, or that was cut.

        Raises:
            OSError: there is no such file.
        """
        status = journal.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for a writer
            raise OSError(errno.EINVAL, "not a file")
        with journal.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                self._forget()
                self._file = status.st_dev, status.st_ino
            file.seek(self._offset)
            content = file.read(most_bytes)
            self._is_partial = self._offset + len(content) < status.st_size
            return content

    def _take(self, line: bytes) -> None:
        """One whole line; the last one may still be written, and is taken when its end is there."""
        self._is_new = True
        try:
            event = event_of(line)
            self._state = state_after(self._state, event)
            if event["event"] == "verdict":
                self._verdict_line = str(event["line"])
            elif event["event"] == "resumed":
                self._verdict_line = None
            elif event["event"] == "soak_round":
                self._soak_round = int(event["round"])
        except NOT_AN_EVENT:
            self._unread += 1


def holder_of(lock: Path, *, locks: Path = LOCKS) -> int | None:
    """The process that has locked this file, as the kernel lists it; None where none is visible here.

    The lock itself is not tried: a run that starts at this moment would be refused.
    """
    try:
        status = lock.stat()
        rows = [row.split() for row in locks.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return None
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == name]
    return next((int(pid) for pid in pids if pid.isdecimal() and int(pid) > 0), None)


def last_lines(folder: Path) -> list[tuple[str, str]]:
    """The last lines of the logs that were written last, each with the name of its log; newest log first.

    A link, a pipe or a device is not read: it may lead anywhere, or wait.
    """
    try:
        with os.scandir(folder) as entries:
            files = [(entry.stat(follow_symlinks=False), entry) for entry in entries if entry.name.endswith(".log")]
    except OSError:
        return []
    written = [(status.st_mtime, entry.path) for status, entry in files if stat.S_ISREG(status.st_mode) and status.st_size]
    newest = sorted(written, reverse=True)[:NEWEST_LOGS]
    return [(Path(path).stem, line) for _, path in newest for line in _tail(path)]


def _tail(path: str) -> list[str]:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "backslashreplace")
    except OSError:
        return []
    return [line for line in text.split("\n") if line.strip()][-LINES_OF_A_LOG:]


def _nodes(records: Iterable[Record], places: Mapping[str, Place], *, is_bound: bool) -> list[NodeProgress]:
    """Every node in order; ``is_bound``: it is known which of them joined. An outcome of the whole cluster belongs to none."""
    placed = ((places.get(record.place or ""), record) for record in records)
    by_node = grouped((place.node, record) for place, record in placed if place is not None)
    hostnames = {place.node: place.hostname for place in places.values() if place.hostname is not None}
    nodes = {place.node for place in places.values()}
    absent = nodes - {place.node for place in places.values() if place.rank is not None} if is_bound else set()
    return [_node(node, by_node.get(node, []), hostnames.get(node), is_absent=node in absent) for node in sorted(nodes)]


def _node(node: int, records: Sequence[Record], hostname: str | None, *, is_absent: bool) -> NodeProgress:
    last: dict[str | None, Mapping[str, Any]] = {}
    for record in records:
        if isinstance(record.evidence.get("SM MHz"), (int, float)):
            last[record.place] = record.evidence
    seen = {name: [one[name] for one in last.values() if isinstance(one.get(name), (int, float))] for name in TELEMETRY}
    reasons = [reason for one in last.values() if isinstance(one.get("event reasons"), list) for reason in one["event reasons"]]
    kinds = Counter(map(counted_as, records))
    return NodeProgress(
        id=f"node{node}",
        hostname=hostname,
        is_absent=is_absent,
        done=len(records) - kinds[PENDING] - kinds[MISSING],
        expected=len(records),
        bad=kinds[FAILED] + kinds[WAIVED],
        errors=kinds[ERROR] + kinds[NOISY],
        missing=kinds[MISSING],
        telemetry={name: (min(values), max(values)) for name, values in seen.items() if values},
        reasons=tuple(dict.fromkeys(str(reason) for reason in reasons)),
    )


def _variables(records: Iterable[Record]) -> dict[str, tuple[str, ...]] | None:
    answers = [record for record in records if record.criterion == HINTS and isinstance(record.evidence.get("variables"), dict)]
    pairs = ((f"{name}={value}", record) for record in answers for name, value in record.evidence["variables"].items())
    found = grouped((pair, str(record.place)) for pair, record in pairs if pair.startswith("NCCL_"))
    return {name: tuple(found[name]) for name in sorted(found)} if answers else None
