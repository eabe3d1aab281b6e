"""A run, or a soak, that did not come to its end, as its journal shows it, and why no run may go on with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.judging.verdict import ERROR, FAILED, NOT_SELECTED, PASSED, PENDING, UNMEASURED, WAIVABLE, Record
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.reading import bytes_of
from pytest_gpucluster.reporting.files import SHELF
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT, JournalState, first_event, read_journal, state_of
from pytest_gpucluster.reporting.results import IDENTITY
from pytest_gpucluster.reporting.run_spans import Spans, read_spans
from pytest_gpucluster.text import shortlist

UNSETTLED = (PENDING, *UNMEASURED)
"""Outcomes that a new measurement can settle."""
SAME = {
    "level": "the level",
    "soak_s": "the duration of the soak",
    "profile": "the profile",
    "expected": "the number of nodes or GPUs",
    "thresholds_sha256": "the file of limits",
    "waivers": "the set of waivers",
    "simulated": "the simulated fleet",
}
"""Of the facts of a run: what must be the same in all its parts, in words."""
CHANGING = {"simulated": "faults", "waivers": "state"}
"""What may differ in one of those facts: which faults are planted, and whether a waiver was used."""
LATEST_S = 24 * 3600.0
"""A soak that was cut short longer ago is another soak's business: what happened meanwhile was seen by nobody."""
OF_ONE_SOAK = ("soak_s", "profile", "expected", "thresholds_sha256", "simulated")
"""Of them, what must be the same for one soak."""
HARDWARE = ("hostname", "uuid", "serial", "pci")
MOST_PARTS = 4
"""A soak that was cut more often is hardly one soak: the chips cooled down each time, and nobody watched in between."""
MOST_RUNS = 100


class NothingUnfinishedError(ConfigurationError):
    """There is no run to go on with: none at all, or one that has come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedRun:
    """A run that another one may go on with.

    Attributes:
        folder: its results directory.
        run: its id.
        state: what its journal says.
        size: the bytes of the journal's whole lines. A kill may have cut the last line.
        spans: what was read over its time, by reader.
    """

    folder: Path
    run: str
    state: JournalState
    size: int
    spans: Spans = field(default_factory=dict)

    @property
    def kept(self) -> dict[Key, Record]:
        """What is not measured again: what passed, and what somebody answers for."""
        found = self.state.records.items()
        return {key: one for key, one in found if one.outcome in (PASSED, *(WAIVABLE if one.waiver else ()))}

    def why_other(self, started: Mapping[str, Any]) -> str | None:
        """What a run asks for that this one did not, so that they cannot be one; None if they can.

        Args:
            started: of the new run, as a journal begins with it.
        """
        try:
            return next(self._differences(started), None)
        except NOT_AN_EVENT:
            return "its journal does not say how it was begun: it is damaged, or of another version"

    def _differences(self, started: Mapping[str, Any]) -> Iterator[str]:
        before = self.state.history.started
        yield from _other_values(before["versions"], started["versions"])
        for name, words in SAME.items():
            was, is_now = (_lasting(name, one["facts"].get(name)) for one in (before, json.loads(json.dumps(started))))
            if was != is_now:
                entries = _changed_in_one(before, started) if name == "thresholds_sha256" else ""
                yield f"{words} is another one{entries}: it was {_words(was)}, and is {_words(is_now)}"
        for name in ("inline", "selftest", "audit"):
            was, is_now = (str(one["settings"].get(name, False)) for one in (before, started))
            if was != is_now:
                yield f"--gpucluster-{name} was {'given' if was == 'True' else 'not given'} before"
        yield from _other_values(before.get("variables", {}), started["variables"])


def _changed_in_one(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The limits that only one of two files changes: `` (of hbm_bandwidth)``."""
    changed = {*before["facts"].get("changed_limits", ())} ^ {*now["facts"].get("changed_limits", ())}
    return f" (of {shortlist(sorted(changed), most=3)})" if changed else ""


def _other_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The names whose values differ: versions, or variables of the environment."""
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            was, is_now = (one.get(name, "not set") for one in (before, now))
            yield f"{name} is {is_now}, and was {was}"


def _lasting(name: str, value: Any) -> Any:
    """A fact without what may change in it."""
    if isinstance(value, list):
        return [_lasting(name, one) for one in value]
    return {key: one for key, one in value.items() if key != CHANGING.get(name)} if isinstance(value, dict) else value


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{key} {one}" for key, one in value.items())
    return "none" if value is None else f"{value}"[:80] if not isinstance(value, list) else f"{len(value)} of them"


def read_unfinished_run(folder: Path, *, completes: bool = False) -> UnfinishedRun:
    """The unfinished run whose results lie in a folder.

    ``completes``: a run of which only some tests were selected is unfinished too.

    Raises:
        NothingUnfinishedError: there is no run, or it has come to its end.
        ConfigurationError: it is unfinished, and no run may go on with it.
    """
    try:
        content = bytes_of(folder / JOURNAL)
    except ConfigurationError as error:
        raise NothingUnfinishedError(f"{folder} has no journal of a run: {error}") from None
    size = content.rfind(b"\n") + 1
    state = state_of(content[:size])
    _require_unfinished(folder, state, (*UNSETTLED, NOT_SELECTED) if completes else UNSETTLED)
    try:
        spans = read_spans(_own_events(content), None)
    except NOT_AN_EVENT:
        raise ConfigurationError(f"the journal in {folder} is damaged, so no run can go on with it") from None
    return UnfinishedRun(folder=folder, run=str(state.history.started["run"]), state=state, size=size, spans=spans)


def _require_unfinished(folder: Path, state: JournalState, unsettled: Collection[str]) -> None:
    """Refuse a run that has ended, and one that no measurement can settle."""
    failed = next((one for one in state.records.values() if one.outcome == FAILED and one.waiver is None), None)
    refusal: type[ConfigurationError] = NothingUnfinishedError if state.finished else ConfigurationError
    if not state.history.started:
        raise NothingUnfinishedError(f"the journal in {folder} has no beginning that can be read")
    if not state.history.started.get("run") or not state.records:
        raise NothingUnfinishedError(f"the run in {folder} ended before anything was planned: nothing of it can be kept")
    if failed is not None:
        where = failed.place or "the cluster"
        raise refusal(
            f"{failed.criterion} at {where} FAILED in the run in {folder}: it stays rejected, and what failed is not measured "
            "again. After a repair, begin a new run in another results directory"
        )
    for one in state.records.values():
        if one.outcome == PASSED and not one.advisory and one.limit is not None and not one.limit.holds(one.value):
            where, edited = one.place or "the cluster", f"passed in it with a value that is not {one.limit.text}: it was edited"
            raise refusal(f"no run can go on with the journal in {folder}: {one.criterion} at {where} {edited}")
    if state.unread:
        raise refusal(f"the journal in {folder} is damaged at line {state.unread[0]}, so no run can go on with it")
    if state.terms.objections:
        raise NothingUnfinishedError(f"no measurement settles what the run in {folder} objects to: {state.terms.objections[0]}")
    if state.finished and not any(one.outcome in unsettled and one.waiver is None for one in state.records.values()):
        raise NothingUnfinishedError(f"the run in {folder} has ended ({state.verdict_word}): nothing in it is left to measure")


def require_unchanged(unfinished: UnfinishedRun) -> int:
    """The bytes of the journal's whole lines, if nobody has written into it since it was read.

    Raises:
        ConfigurationError: another run has gone on with it meanwhile.
        OSError: it cannot be read.
    """
    content = (unfinished.folder / JOURNAL).read_bytes()
    if content.rfind(b"\n") + 1 != unfinished.size:
        raise ConfigurationError(f"another run has gone on with the run in {unfinished.folder} meanwhile")
    return unfinished.size


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedSoak:
    """A soak that was cut short.

    Attributes:
        folder: where the files of its run lie now.
        run: the id of that run.
        ended_s: when it was cut, in seconds since 1970.
        num_whole_rounds: of all its parts.
        elapsed_s: of all its parts, up to the end of the last whole round.
        places: the hardware that was found at each place.
        turns: the facts of each measurement, of all its parts.
        why_not: why no run goes on with it; None if one may.
        spans: what it had read and nobody judged; a run that does not go on with it judges that too.
        tests: the node id of each test, and the SHA-256 of its file.
    """

    folder: Path
    run: str
    ended_s: float
    num_whole_rounds: int
    elapsed_s: float
    places: Mapping[str, Place]
    turns: tuple[Mapping[str, Any], ...]
    why_not: str | None
    spans: Spans = field(default_factory=dict)
    tests: Mapping[Key, tuple[str, str | None]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Which soak it is."""
        return f"the soak that was cut short after round {self.num_whole_rounds} ({in_words(self.elapsed_s)})"

    def away_s(self, now_s: float) -> float:
        """How long ago it was cut; 0 where the clock was set back since it was found."""
        return max(0.0, now_s - self.ended_s)

    def why_not_here(self, places: Mapping[str, Place]) -> str | None:
        """Why it does not go on with these GPUs and nodes; None if they are the same."""
        every = ((name, _differences(self.places.get(name), place, IDENTITY)) for name, place in places.items())
        return next((f"{name} has another {differs[0].replace('_', ' ')}" for name, differs in every if differs), None)

    def beside(self, tests: Mapping[Key, tuple[str, str | None]]) -> InterruptedSoak:
        """The same; no run goes on with it where its rounds are of other tests than ``tests``, as its own are described."""
        soaked = {key: tests[key] for key in tests if any(turn.get("criterion") == key[0] for turn in self.turns)}
        other = next((key for key, test in soaked.items() if self.tests.get(key, test) != test), None)
        why_not = self.why_not if other is None else f"{other[0]} was measured by another test"
        return replace(self, why_not=why_not)

    def same_parts(self, places: Mapping[str, Place]) -> frozenset[str]:
        """The ids of the places where the hardware is the same, whether it was booted or not."""
        return frozenset(name for name, place in places.items() if not _differences(self.places.get(name), place, HARDWARE))


def link_to(cut: InterruptedSoak | None) -> dict[str, Any]:
    """Which earlier run's readings a run judges too, for the begin of its journal: it may end before it has them there."""
    return {"follows": {"run": cut.run, "folder": cut.folder.name}} if cut is not None and cut.spans else {}


def _differences(before: Place | None, now: Place, names: Iterable[str]) -> list[str]:
    return [what for what in names if before is None or getattr(before, what) != getattr(now, what)]


def find_interrupted_soak(
    folder: Path, *, facts: Mapping[str, Any], versions: Mapping[str, str], now_s: float
) -> InterruptedSoak | None:
    """The soak that the run whose files lie in ``folder`` left unfinished; None if there is none.

    Args:
        folder: an older run's, below ``previous/`` of a results directory.
        facts: of this run, as results.json has them.
        versions: of this run's software.
        now_s: the time in seconds since 1970.
    """
    try:
        state = read_journal(folder / JOURNAL)
    except ConfigurationError:
        return None
    if state.facts.get("level") != "soak":
        return None
    events: list[dict[str, Any]] = []
    spans: Spans = {}
    try:
        if now_s - state.ended_s <= LATEST_S:
            spans = _spans(folder, state, versions)
        events = _of_last_soak(_soak_events(folder, of=None))
        return _cut_soak(folder, state, events, spans, why_not=next(_whys(state, events, facts, versions, now_s), None))
    except (OSError, *NOT_AN_EVENT):
        return _cut_soak(folder, state, [], spans, why_not="its journal is damaged")


def _of_last_soak(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events since a soak began anew in a run that went on, if one did."""
    every = [*events]
    begins = [number for number, event in enumerate(every) if event["event"] == "soak_anew"]
    return every[begins[-1] :] if begins else every


def _cut_soak(
    folder: Path, state: JournalState, events: list[dict[str, Any]], spans: Spans, *, why_not: str | None
) -> InterruptedSoak | None:
    """The soak; None where its time was over, or no whole round was measured, and nothing that it read is left to judge."""
    rounds = [event for event in events if event["event"] == "soak_round"]
    is_damaged = why_not is not None and not events
    if not is_damaged and (not rounds or rounds[-1]["elapsed_s"] >= rounds[-1]["duration_s"]):
        if not spans:
            return None
        why_not = "its time was over" if rounds else "no round of it was whole"
    last: Mapping[str, Any] = rounds[-1] if rounds else {"round": 0, "elapsed_s": 0.0}
    return InterruptedSoak(
        folder=folder,
        run=run_of(folder),
        ended_s=state.ended_s,
        num_whole_rounds=int(last["round"]),
        elapsed_s=float(last["elapsed_s"]),
        places=state.places,
        turns=tuple(event for event in events if event["event"] == "soak_turn"),
        why_not=why_not,
        spans=spans,
        tests={key: (nodeid, state.history.files.get(nodeid.partition("::")[0])) for key, nodeid in state.nodeids.items()},
    )


def _spans(folder: Path, state: JournalState, versions: Mapping[str, str], *, left: int = MOST_RUNS) -> Spans:
    """What a run had read and nobody judged; of a run that ended before its soak began, what the run before it left.

    Nothing where the software is another one: what it had read may have other fields.

    Raises:
        ConfigurationError, OSError, LookupError, TypeError, ValueError: a journal is damaged, or is not there.
    """
    if state.versions != versions or left == 0:
        return {}
    own = list(_own_events(bytes_of(folder / JOURNAL)))
    before = first_event(folder).get("follows")
    if before is None or any(event["event"] in ("soak_earlier", "soak_reading") for event in own):
        return read_spans(own, state.records.values())
    older = _part(folder, before)
    return _spans(older, read_journal(older / JOURNAL), versions, left=left - 1)


def _whys(
    state: JournalState,
    events: Iterable[Mapping[str, Any]],
    facts: Mapping[str, Any],
    versions: Mapping[str, str],
    now_s: float,
) -> Iterator[str]:
    if not 0 <= now_s - state.ended_s <= LATEST_S:
        yield f"it did not end within the last {LATEST_S / 3600:.0f} h"
    for name in OF_ONE_SOAK:
        if state.facts.get(name) != facts[name]:
            yield f"{SAME[name]} is another one"
    yield from _other_values(state.versions, versions)
    num_parts = 1 + sum(event["event"] == "soak_resumed" for event in events)
    if num_parts >= MOST_PARTS:
        yield f"it was cut short {num_parts} times"
    for record in state.records.values():
        if record.outcome in (FAILED, ERROR) and record.waiver is None:
            yield f"{record.criterion} at {record.place or 'the cluster'} is {record.outcome} in it"


def run_of(folder: Path) -> str:
    """The id of the run whose journal lies in a folder.

    Raises:
        OSError, LookupError, TypeError, ValueError: there is none.
    """
    return str(first_event(folder)["run"])


def _part(folder: Path, named: Mapping[str, Any]) -> Path:
    """The folder of an earlier run that a run names.

    Raises:
        OSError, LookupError, TypeError, ValueError: it is no folder of an older run, or another run's.
    """
    older = folder.parent / str(named["folder"])
    if SHELF.match(named["folder"]) is None or run_of(older) != named["run"]:
        raise ValueError(f"{named['folder']} has no part of this soak")
    return older


def _own_events(journal: bytes) -> Iterator[dict[str, Any]]:
    """The events of a soak in the journal of one run.

    Raises:
        ValueError: one cannot be read.
    """
    for line in journal.split(b"\n")[:-1]:  # a kill may have cut the last one
        if line.startswith(b'{"at_s"') and b'"event": "soak_' in line[:80]:
            yield json.loads(line)


def _soak_events(folder: Path, *, of: str | None, left: int = MOST_RUNS) -> Iterator[dict[str, Any]]:
    """The events of a soak, those of its earlier parts first. ``of``: the run whose part it has to be.

    Raises:
        OSError, LookupError, TypeError, ValueError: a part is not there, or is another run's.
    """
    if (of is not None and run_of(folder) != of) or left == 0:
        raise ValueError(f"{folder} has no part of this soak")
    for event in _own_events(bytes_of(folder / JOURNAL)):
        if event["event"] == "soak_resumed" and event["folder"]:
            yield from _soak_events(_part(folder, event), of=event["run"], left=left - 1)
        yield event
