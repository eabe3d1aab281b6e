"""A run that did not come to its end, as its journal shows it, and why no run may go on with it. No file is changed here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import ERROR, FAILED, MISSING, NOISY, NOT_SELECTED, PASSED, PENDING
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT, state_of
from pytest_gpucluster.reporting.run_spans import read_spans
from pytest_gpucluster.text import shortlist

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from pytest_gpucluster.judging.plan import Key
    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.reporting.parts import Part
    from pytest_gpucluster.reporting.rebuild import JournalState
    from pytest_gpucluster.reporting.run_spans import Spans

UNSETTLED = (PENDING, MISSING, ERROR, NOISY)
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
        found = self.state.records
        return {key: one for key, one in found.items() if one.outcome == PASSED or one.waiver is not None}

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its parts up to now."""
        return self.state.history.all_parts

    def why_other(self, started: Mapping[str, Any]) -> str | None:
        """What a run asks for that this one did not, so that they cannot be one; None if they can.

        Args:
            started: of the new run, as a journal begins with it.
        """
        return next(self._differences(started), None)

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
        content = (folder / JOURNAL).read_bytes()
    except OSError as error:
        raise NothingUnfinishedError(f"{folder} has no journal of a run: {error.strerror}") from None
    size = content.rfind(b"\n") + 1
    state = state_of(content[:size])
    _require_unfinished(folder, state, (*UNSETTLED, NOT_SELECTED) if completes else UNSETTLED)
    try:
        events = [json.loads(line) for line in content[:size].split(b"\n") if b'"event": "soak_' in line[:80]]
        spans = read_spans(events, None)
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
