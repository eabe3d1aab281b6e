"""A run by its files, while they are written: nothing is raised, and nothing is touched."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.commands.watch import plain_text, screen_lines
from pytest_gpucluster.commands.watch_screen import progress_line
from pytest_gpucluster.config.run_files import JOURNAL, LOGS
from pytest_gpucluster.reporting import watched_run
from pytest_gpucluster.reporting.journal import Journal
from pytest_gpucluster.reporting.watched_run import WatchedRun, holder_of, last_lines
from tests.support.fleet_records import fleet
from tests.support.watched import records_of, view, write_run


def content(folder: Path) -> dict[str, bytes]:
    """Every file by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_journal_that_grows_byte_by_byte(tmp_path: Path) -> None:
    """Each look sees what is whole; a line that is being written is neither lost nor damage."""
    write_run(tmp_path / "whole", nodes=1, verdict="REJECTED: 2 failed")
    text = (tmp_path / "whole" / JOURNAL).read_bytes()
    growing = tmp_path / "growing"
    growing.mkdir()
    run, done = WatchedRun(growing), [0]
    steps = [*range(0, len(text), 499), len(text)]
    for start, end in pairwise(steps):
        with (growing / JOURNAL).open("ab") as file:
            file.write(text[start:end])
        seen = run.picture()
        assert (seen.problem, seen.unread) == (None, 0)
        done.append(sum(seen.counts.values()))
    assert done == sorted(done)
    assert len(set(done)) > 10
    assert (done[-1], seen.expected, seen.verdict_line) == (25, 25, "REJECTED: 2 failed")


@pytest.mark.parametrize("word", ["ACCEPTED", "ACCEPTED_WITH_WAIVERS"])
def test_a_verdict_that_contradicts_its_outcomes_is_not_shown(tmp_path: Path, word: str) -> None:
    """A journal that says ACCEPTED beside a value that was not measured: it was believed where nobody counts."""
    run = write_run(tmp_path / "run", nodes=1)
    journal = Journal(tmp_path / "run" / JOURNAL)
    journal.write("outcome", record={"criterion": "environment_hints", "place": "node0", "outcome": "error", "culprits": []})
    journal.write("verdict", verdict=word, line=word, objections=[])
    journal.close()
    seen = run.picture()
    assert seen.problem == f"{tmp_path / 'run'} says {word} and has an outcome 'error': it was damaged or made up"


def test_a_long_journal_is_read_in_steps(tmp_path: Path) -> None:
    """Each look is short, says that there is more, and the last one has all."""
    run = write_run(tmp_path / "run", nodes=2)
    looks = [run.picture(most_bytes=4096)]
    while looks[-1].is_partial:
        looks.append(run.picture(most_bytes=4096))
    assert len(looks) > 5
    assert looks[0].expected == 0
    assert (sum(looks[-1].counts.values()), looks[-1].unread) == (50, 0)


def test_a_large_run_is_worked_out_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch may run on the node that runs: it takes a tenth of the time, and the newest lines come later."""
    run = write_run(tmp_path / "run", nodes=1, done=0.2)
    monkeypatch.setattr(watched_run, "CHEAP_S", -1.0)
    monkeypatch.setattr(watched_run, "COST_SHARE", 1e-9)
    assert sum(run.picture().counts.values()) == 5
    journal = Journal(tmp_path / "run" / JOURNAL)
    journal.write("outcome", record={"criterion": "environment_hints", "place": "node0", "outcome": "passed", "culprits": []})
    journal.close()
    assert sum(run.picture().counts.values()) == 5
    monkeypatch.setattr(run, "_next_s", 0.0)
    assert sum(run.picture().counts.values()) == 6


def test_progress_parts_logs_and_variables(tmp_path: Path) -> None:
    """What a run has shown so far, by node."""
    seen = write_run(tmp_path / "run", nodes=2, done=0.6).picture()
    assert seen.counts == {"passed": 29, "failed": 1}
    assert (seen.expected, seen.next_criterion, seen.verdict_line, seen.variables) == (50, "hbm_bandwidth", None, None)
    assert [(node.id, node.hostname, node.bad) for node in seen.nodes] == [
        ("node0", "gpu-node-0", 1),
        ("node1", "gpu-node-1", 0),
    ]
    assert seen.nodes[0].telemetry["C"] == (61.0, 91.0)
    assert set(seen.nodes[0].reasons) == {"sw_power_cap", "hw_thermal_slowdown"}
    assert [culprit.place for culprit in seen.culprits] == ["node0-gpu3"]
    assert seen.done == 30
    assert seen.logs[-1] == ("rank3", "clocks 1290 MHz, 91 C")


def test_variables_are_those_of_nccl(tmp_path: Path) -> None:
    """With the nodes that have them."""
    seen = write_run(tmp_path / "run", nodes=3, absent=[1]).picture()
    assert seen.variables == {"NCCL_DEBUG=INFO": ("node0", "node2"), "NCCL_IB_HCA=mlx5": ("node0", "node2")}
    assert [node.hostname for node in seen.nodes] == ["gpu-node-0", None, "gpu-node-2"]


@pytest.mark.parametrize("kept", [-1, -40])
def test_a_killed_run_has_no_verdict(tmp_path: Path, kept: int) -> None:
    """Its last line may be cut: all others count."""
    run = write_run(tmp_path / "run", nodes=1)
    journal = tmp_path / "run" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:kept])
    seen = run.picture()
    assert (sum(seen.counts.values()), seen.unread, seen.verdict_line, seen.holder) == (24, 0, None, None)


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    """And the rest is seen."""
    run = write_run(tmp_path / "run", nodes=1)
    with (tmp_path / "run" / JOURNAL).open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"event": "verdict"}\n{"at_s": 1, "event": "outcome", "record": {}}\n')
    seen = run.picture()
    assert (sum(seen.counts.values()), seen.unread) == (25, 4)


def test_a_new_run_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    """Also where the file was cut to nothing and written again."""
    run = write_run(tmp_path / "run", nodes=2)
    assert run.picture().expected == 50
    (tmp_path / "run").rename(tmp_path / "previous")
    assert "there is no run to see" in str(run.picture().problem)
    write_run(tmp_path / "run", nodes=1, done=0.2)
    assert run.picture().expected == 25
    (tmp_path / "run" / JOURNAL).write_bytes(b"")
    seen = run.picture()
    assert (seen.problem, seen.expected) == (None, 0)


def test_a_journal_by_its_name(tmp_path: Path) -> None:
    """A copy, or that of an older run."""
    write_run(tmp_path / "run", nodes=1)
    (tmp_path / "copy").write_bytes((tmp_path / "run" / JOURNAL).read_bytes())
    assert WatchedRun(tmp_path / "copy").picture().expected == 25


def make(folder: Path, kind: str) -> Path:
    """Something that is no directory of a run."""
    if kind == "folder of something else":
        (folder / "README").write_text("nothing\n")
    elif kind == "fifo":
        os.mkfifo(folder / JOURNAL)
    elif kind == "folder":
        (folder / JOURNAL).mkdir()
    elif kind == "other file":
        (folder / JOURNAL).write_bytes(b"hello\nworld\n")
    elif kind == "other lines":
        (folder / JOURNAL).write_bytes(b'{"a": 1}\n')
    return folder / "absent" if kind == "absent" else folder


@pytest.mark.parametrize("kind", ["absent", "folder of something else", "fifo", "folder", "other file", "other lines"])
def test_a_directory_that_is_none(tmp_path: Path, kind: str) -> None:
    """The reason is said, and nothing waits."""
    seen = WatchedRun(make(tmp_path, kind)).picture()
    assert seen.problem is not None
    assert JOURNAL in seen.problem


def test_nothing_is_written_or_locked(tmp_path: Path) -> None:
    """A run that starts at the same moment gets its lock; no file is made or changed."""
    run = write_run(tmp_path / "run", nodes=1)
    before = content(tmp_path)
    run.picture()
    assert content(tmp_path) == before


def test_the_process_that_holds_the_directory(tmp_path: Path) -> None:
    """By the kernel's list of locks, where the system has one."""
    lock = tmp_path / ".lock"
    assert holder_of(lock) is None
    with lock.open("w") as file:
        assert holder_of(lock) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        status = os.fstat(file.fileno())
        name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        if f" {name} " in Path("/proc/locks").read_text(encoding="ascii"):
            assert holder_of(lock) == os.getpid()
        made = tmp_path / "locks"
        made.write_text(f"1: POSIX  ADVISORY  WRITE 12 {name} 0 EOF\n2: FLOCK  ADVISORY  WRITE 4711 {name} 0 EOF\n")
        assert holder_of(lock, locks=made) == 4711
    assert holder_of(lock, locks=tmp_path / "absent") is None


def test_logs_that_may_lead_anywhere_are_not_read(tmp_path: Path) -> None:
    """Links and pipes; of a log that is no UTF-8 the bytes are shown."""
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / LOGS).mkdir()
    (tmp_path / LOGS / "rank0.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / LOGS / "rank1.log")
    (tmp_path / LOGS / "rank2.log").write_bytes(b"\xff one\n\n\ntwo\n")
    assert last_lines(tmp_path / LOGS) == [("rank2", "\\xff one"), ("rank2", "two")]
    assert last_lines(tmp_path / "absent") == []


@pytest.mark.parametrize("evidence", [{"variables": [1]}, {"variables": {"NCCL_A": None}}, {"SM MHz": "x", "event reasons": 3}])
def test_evidence_of_any_kind_is_survived(tmp_path: Path, evidence: dict[str, Any]) -> None:
    """It comes from a file."""
    run = write_run(tmp_path / "run", nodes=1)
    record = {"criterion": "environment_hints", "place": "node0", "outcome": "passed", "culprits": [], "evidence": evidence}
    journal = Journal(tmp_path / "run" / JOURNAL)
    journal.write("outcome", record=record)
    journal.close()
    assert run.picture().unread == 0


@pytest.mark.parametrize(("outcome", "place"), [("error", 1), ("noisy", 1), ("failed", 0), ("missing", 2)])
def test_what_was_not_measured_is_not_bad(tmp_path: Path, outcome: str, place: int) -> None:
    """A part is bad where a value of it failed; a hung call or siblings that differ may have any cause."""
    folder = tmp_path / "run"
    write_run(folder, nodes=1)
    journal = Journal(folder / JOURNAL)
    record = records_of(fleet(1, 8), bad=[])[0]
    row = {"criterion": record.criterion, "place": record.place, "outcome": outcome, "reason": "r", "culprits": []}
    journal.write("outcome", record=row)
    journal.close()
    seen = WatchedRun(folder).picture()
    (node,) = seen.nodes
    before = 2  # of the bad GPU in every such run
    found = [node.bad - before, node.errors, node.missing]
    assert found == [int(at == place) for at in range(3)]
    assert ", 1 error" in plain_text(screen_lines(replace(view(), run=seen), width=100)) or outcome in ("failed", "missing")
    assert [one.style for one in progress_line(seen).spans] == ["red"]
    some = progress_line(replace(seen, counts={"passed": seen.expected - 1, outcome: 1}))
    assert [one.style for one in some.spans] == ["red" if outcome == "failed" else "yellow"]


def test_what_an_ended_run_did_not_come_to_is_not_done_and_not_bad(tmp_path: Path) -> None:
    """An interrupted run is not at 100 %, and nothing that it left out is bad."""
    folder = tmp_path / "run"
    write_run(folder, nodes=1, done=0.6)
    journal = Journal(folder / JOURNAL)
    left = records_of(fleet(1, 8), bad=[])[15:]
    for record in left:
        row = {"criterion": record.criterion, "place": record.place, "outcome": "missing", "reason": "not run: interrupted"}
        journal.write("outcome", record={**row, "culprits": []})
    journal.close()
    seen = WatchedRun(folder).picture()
    (node,) = seen.nodes
    assert (node.bad, node.errors, node.missing, node.done) == (1, 0, len(left), node.expected - len(left))
    assert seen.done == seen.expected - len(left)
