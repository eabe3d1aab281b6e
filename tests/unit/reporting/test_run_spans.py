"""What a soak's journal keeps of the readings that are judged over a run, wherever its run was killed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.driver_errors import judge_xids_between
from pytest_gpucluster.judging.verdict import FAILED, Record
from pytest_gpucluster.measurements.health import GpuXids, XidSeen
from pytest_gpucluster.protocol.plain_data import to_plain
from pytest_gpucluster.reporting.journal import record_facts
from pytest_gpucluster.reporting.run_spans import (
    Snapshot,
    SnapshotRecord,
    Span,
    changed,
    changes,
    read_spans,
    spans_facts,
    why_not_joined,
    with_latest_known,
    with_now,
)
from tests.unit.reporting.test_interrupted_soak import GPU, find, round_over, turn, write

if TYPE_CHECKING:
    from pathlib import Path

READER = "pytest_gpucluster.measurements.health.gpu_xids gpu"
JUDGES = {READER: ["wear"]}
"""The plan of the journals of these tests has this criterion alone."""
DATA: list[Any] = [
    None, True, 0, 1.5, "text", [], [1, 2], [1, 3], [[1], 2], {}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": {"b": [1, {"c": 2}]}},
    {"a": {"b": [1, {"c": 3}]}}, {"is": 1}, {"in": {"at": 1}}, {"is": 2}, {"in": {"at": 2}}, {"a": [1]}, {"a": {"0": 1}},
]  # fmt: skip


def seen(*codes: int) -> list[XidSeen]:
    """Xids that no worker caused."""
    return [XidSeen(code=code, pid=None, is_own=False) for code in codes]


def xids(*heard: int, before: tuple[int, ...] = (), log_why: str | None = None) -> GpuXids:
    """What the kernel log has of a GPU."""
    return GpuXids(nvml=[], nvml_why=None, kernel_log=seen(*heard), kernel_log_why=log_why, before=seen(*before))


def reading(at_s: float, value: Any, *missing: str) -> Snapshot:
    """A reading of one GPU."""
    return Snapshot(at_s=at_s, values={GPU.id: to_plain(value)}, missing=missing)


def watched(last: Any, *, first: Any = None, until_s: float = 60.0) -> Span:
    """A run that began without an Xid."""
    first = xids() if first is None else first
    return Span(kind="watched", first=reading(0.0, first), last=reading(until_s, last), seconds=until_s)


def test_only_changes_are_written() -> None:
    """And they make the value again, through JSON."""
    for before, now in itertools.product(DATA, DATA):
        change = json.loads(json.dumps(changes(before, now)))
        assert changed(before, change) == now
        assert (change is None) == (before == now)


def test_changes_of_a_large_reading_are_small() -> None:
    """One number of 1,000."""
    before = {"links": [{"replays": 0, "recoveries": 0} for _ in range(500)]}
    now = {"links": [*before["links"][:-1], {"replays": 1, "recoveries": 0}]}
    assert len(json.dumps(changes(before, now))) < 100


def events_of(*values: Any) -> list[tuple[str, dict[str, Any]]]:
    """A soak that reads these values: the first before its first round, the others after a round each."""
    record = SnapshotRecord()
    first, *later = [("soak_reading", record.facts(READER, reading(60.0 * at, value))) for at, value in enumerate(values)]
    rounds = [[turn(at), one, round_over(at, 60.0 * at)] for at, one in enumerate(later, start=1)]
    return [("soak_earlier", {"spans": {}, "judges": JUDGES}), first, *itertools.chain(*rounds)]


EVENTS = events_of(xids(), xids(), xids(79), xids(79))


@pytest.mark.parametrize("number", range(len(EVENTS) + 1))
def test_a_kill_after_any_event(tmp_path: Path, number: int) -> None:
    """A round counts only with its reading, and what was read is kept even where the soak does not go on."""
    found = find(write(tmp_path / "20261124-100000", events=EVENTS[:number]))
    values = [facts for name, facts in EVENTS[:number] if name == "soak_reading"]
    if not values:
        assert found is None
        return
    assert found is not None
    whole = sum(name == "soak_round" for name, _ in EVENTS[:number])
    assert (found.num_whole_rounds, found.why_not) == (whole, None if whole else "no round of it was whole")
    (span,) = found.spans[READER]
    assert span.first == reading(0.0, xids())
    assert span.last == reading(60.0 * (len(values) - 1), xids() if len(values) < 3 else xids(79))
    assert span.last.at_s >= 60.0 * whole


def test_the_time_of_a_soak_was_over(tmp_path: Path) -> None:
    """Its run was killed before it judged the whole of it: the next one judges that, and soaks anew."""
    found = find(write(tmp_path / "20261124-100000", events=[*EVENTS, round_over(4, 600.0)]))
    assert found is not None
    assert found.why_not == "its time was over"
    assert found.spans[READER] == (watched(xids(79), until_s=180.0),)


def test_what_was_judged_is_not_judged_again(tmp_path: Path) -> None:
    """After an outcome, a repair may follow."""
    bad = Record(criterion="wear", place=GPU.id, outcome=FAILED, value=1, reason="Xid 79")
    judged = [*EVENTS, round_over(4, 600.0), ("outcome", {"record": record_facts(bad)})]
    assert find(write(tmp_path / "20261124-100000", events=judged)) is None


def test_after_a_day_nothing_is_kept(tmp_path: Path) -> None:
    """As the soak itself."""
    folder = write(tmp_path / "20261124-100000", events=EVENTS)
    found = find(folder, later_s=25 * 3600.0)
    assert found is not None
    assert (found.spans, found.why_not) == ({}, "it did not end within the last 24 h")


@pytest.mark.parametrize(("named", "is_kept"), [("20261124-100000", True), ("../20261124-100000", False), ("2026", False)])
def test_a_run_that_ended_before_its_soak_began(tmp_path: Path, named: str, *, is_kept: bool) -> None:
    """The one after it judges what the first run had read."""
    write(tmp_path / "20261124-100000", events=EVENTS)
    second = write(tmp_path / "20261124-110000", events=[], run="bb")
    first, *others = (second / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    started = {**json.loads(first), "follows": {"run": "aa", "folder": named}}
    (second / "journal.jsonl").write_text("\n".join([json.dumps(started), *others, ""]), encoding="utf-8")
    found = find(second)
    assert found is not None
    assert found.spans == ({READER: (watched(xids(79), until_s=180.0),)} if is_kept else {})
    assert found.why_not is not None


def test_spans_of_three_runs() -> None:
    """The second one goes on: what it took over stands in its own journal, and its own part follows."""
    now = reading(90.0, xids())
    spans = with_now({READER: (watched(xids(79)),)}, {READER: now}, kept={GPU.id}, goes_on=True)
    events = [
        {"event": "soak_earlier", "spans": json.loads(json.dumps(spans_facts(spans))), "judges": JUDGES},
        {"event": "soak_reading", "reader": READER, "read_s": 90.0, "missing": [], "values": now.values},
    ]
    found = read_spans(events, [Record(criterion="wear", place=GPU.id, outcome="missing")])[READER]
    assert [(one.kind, one.is_needed, one.seconds) for one in found] == [
        ("watched", True, 60.0),
        ("between", True, 90.0),
        ("watched", True, 0.0),
    ]
    assert found[0].last == reading(60.0, xids(79))


def test_a_new_soak_needs_nothing_of_the_old_one() -> None:
    """What was bad in it is judged all the same, where the hardware is the same."""
    before = {READER: (watched(xids(79)),)}
    found = with_now(before, {READER: reading(90.0, xids())}, kept={GPU.id}, goes_on=False)[READER]
    assert [(one.kind, one.is_needed) for one in found] == [("watched", False), ("between", False)]
    others = with_now(before, {}, kept=(), goes_on=False)[READER]
    assert [one.last.values for one in others] == [{}]


@pytest.mark.parametrize(
    "damage",
    [{"values": [1]}, {"values": None}, {"missing": 5}, {"read_s": "late"}, {"read_s": None}, {"changes": 3}],
    ids=str,
)  # fmt: skip
def test_a_damaged_reading(tmp_path: Path, damage: dict[str, Any]) -> None:
    """It is said, and a new soak begins."""
    events = [
        (name, {**facts, **damage} if name == "soak_reading" and damage.keys() <= facts.keys() else facts)
        for name, facts in EVENTS
    ]
    found = find(write(tmp_path / "20261124-100000", events=events))
    assert found is not None
    assert found.why_not == "its journal is damaged"


BETWEEN = {READER: judge_xids_between}


@pytest.mark.parametrize(
    ("spans", "now", "why"),
    [
        ({READER: (watched(xids()),)}, reading(90.0, xids()), None),
        ({READER: (watched(xids(79)),)}, reading(90.0, xids(before=(79,))), None),
        ({READER: (watched(xids()),)}, reading(90.0, xids(before=(79,))), None),
        ({}, reading(90.0, xids()), "gpu_xids was not read in it"),
        ({READER: (watched(xids()),)}, replace(reading(90.0, xids()), values={}, missing=(GPU.id,)), "not read at node0-gpu0"),
        ({READER: (replace(watched(xids()), last=reading(60.0, xids(), GPU.id)),)}, reading(90.0, xids()), "not read at node0"),
        ({READER: (watched(xids(log_why="no line")),)}, reading(90.0, xids()), "is not known (Xids could not be read"),
        ({READER: (watched(xids()),)}, reading(90.0, xids(log_why="no line")), "is not known (Xids could not be read"),
        ({READER: (watched(xids(79)),)}, reading(90.0, xids()), "the kernel log has lost what it had before"),
    ],
)  # fmt: skip
def test_when_a_soak_goes_on(spans: Any, now: Snapshot, why: str | None) -> None:
    """Where everything was read, and the time that nobody watched is known. What is bad goes on, and is judged at the end."""
    found = why_not_joined(spans, {READER: now}, BETWEEN)
    assert (found is None) == (why is None)
    assert why is None or why in str(found)


@pytest.mark.parametrize(
    ("before", "after", "bad"),
    [
        (xids(), xids(), 0),
        (xids(79, before=(31,)), xids(before=(31, 79)), 0),
        (xids(), xids(before=(79,)), 1),
        (xids(79), xids(before=(79, 79)), 1),
        (xids(before=(94,)), xids(before=(94, 48, 94)), 2),
        (xids(), xids(before=(43, 45, 31, 13)), 0),
        (xids(), xids(79), 0),
    ],
)
def test_xids_while_nobody_watched(before: GpuXids, after: GpuXids, bad: int) -> None:
    """Those that the kernel log has more of; what a program can cause is shown, and what follows is the next run's."""
    found = judge_xids_between(before, after)
    assert (found.judged, found.unknown) == (bad, {})


def test_xids_that_are_bad_and_not_all_known() -> None:
    """A log that lost its begin still shows what came."""
    found = judge_xids_between(xids(31), xids(before=(79,)))
    assert (found.judged, bool(found.unknown)) == (1, True)


def test_a_gpu_that_was_lost_while_nobody_watched() -> None:
    """A line without an Xid counts, if the part before it had not shown it; NVML opens the GPU again."""
    line = "GPU 0000:13:00.0: GPU has fallen off the bus"
    lost = replace(xids(), lost_before=[line])
    assert judge_xids_between(xids(), lost).judged == 1
    assert judge_xids_between(lost, lost).judged == 0
    assert judge_xids_between(replace(xids(), lost=[line]), lost).judged == 0


def test_readings_of_a_run_that_goes_on() -> None:
    """The next part writes what was read before, and reads anew: nothing counts twice, and all readers stay."""
    first = reading(0.0, xids())
    spans = {READER: (Span(kind="watched", first=first, last=reading(60.0, xids(79)), seconds=60.0),)}
    events = [
        {"event": "soak_reading", "reader": READER, "read_s": 0.0, "missing": [], "values": first.values},
        {"event": "soak_earlier", "spans": json.loads(json.dumps(spans_facts(spans))), "judges": JUDGES},
        {"event": "soak_reading", "reader": READER, "read_s": 90.0, "missing": [], "values": first.values},
    ]
    found = read_spans(events, None)[READER]
    assert [(one.first.at_s, one.last.at_s) for one in found] == [(0.0, 60.0), (90.0, 90.0)]


def test_a_node_that_was_lost_meanwhile() -> None:
    """It is judged from its last reading to the next one, and not at all where it never had one."""
    lost = Snapshot(at_s=60.0, values={}, missing=(GPU.id,))
    spans = with_latest_known({READER: (Span(kind="watched", first=reading(0.0, xids()), last=lost, seconds=60.0),)})
    joined = with_now(spans, {READER: reading(90.0, xids(79))}, kept={GPU.id}, goes_on=True)[READER]
    assert [one.kind for one in joined] == ["watched", "between"]
    assert joined[1].first.values == reading(0.0, xids()).values
    assert joined[1].last.values == reading(90.0, xids(79)).values
    never = with_latest_known({READER: (Span(kind="watched", first=lost, last=lost, seconds=60.0),)})
    assert never[READER][0].last.values == {}


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0, -86400.0])
def test_a_clock_that_is_set_makes_no_time_longer(set_by_s: float) -> None:
    """By 120 errors an hour, 100 in 10 minutes are too many, also where the time of day says that 70 minutes went by."""
    record = SnapshotRecord()
    early, late = (replace(reading(at, xids()), clock=("boot", at)) for at in (1000.0, 1600.0))
    late = replace(late, at_s=late.at_s + set_by_s)
    events = [{"event": "soak_reading", **record.facts(READER, one)} for one in (early, late)]
    spans = read_spans(json.loads(json.dumps(events)), None)
    assert spans[READER] == (Span(kind="watched", first=early, last=late, seconds=600.0),)
    kept = json.loads(json.dumps(spans_facts(spans)))
    assert read_spans([{"event": "soak_earlier", "spans": kept, "judges": JUDGES}], None) == spans
    now = replace(reading(1900.0 + set_by_s, xids()), clock=("boot", 1900.0))
    assert with_now(spans, {READER: now}, kept={GPU.id}, goes_on=True)[READER][1].seconds == 900.0


@pytest.mark.parametrize("clock", [None, ("another boot", 5.0)])
def test_over_boots_the_time_of_day_counts(clock: tuple[str, float] | None) -> None:
    """As in a journal that has no other."""
    early, late = replace(reading(1000.0, xids()), clock=("boot", 1000.0)), replace(reading(1600.0, xids()), clock=clock)
    assert early.seconds_to(late) == late.seconds_to(replace(early, at_s=2200.0)) == 600.0
