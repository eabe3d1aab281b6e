"""Which run may be gone on with, why not, and what the journal of several parts says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import Plan
from pytest_gpucluster.judging.verdict import Record, Terms
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.files import ResultsDirectory
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.rebuild import rebuild, take_over
from pytest_gpucluster.reporting.recorder import Recorder, RunStatus, planned_facts
from pytest_gpucluster.reporting.results import IDENTITY, bound_facts, last_known, parts_remarks, why_other_parts
from pytest_gpucluster.reporting.unfinished_run import NothingUnfinishedError, read_unfinished_run
from tests.support.entries import limit

if TYPE_CHECKING:
    from pathlib import Path

GPU = Place(
    id="node0-gpu0",
    node=0,
    gpu=0,
    rank=0,
    hostname="gpu-node-0",
    uuid="GPU-1",
    serial="1",
    pci="0000:01:00.0",
    boot_id="first",
    driver="580.1",
    board={"VBIOS": "96"},
)
NODE = Place(id="node0", node=0, hostname="gpu-node-0")
FACTS: dict[str, Any] = {
    "level": "standard",
    "profile": "h200-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 1},
    "thresholds_sha256": "0" * 64,
    "soak_s": None,
    "simulated": None,
    "waivers": [],
}
STARTED: dict[str, Any] = {
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "settings": {"inline": "False", "selftest": "False"},
    "facts": FACTS,
    "variables": {"NCCL_ALGO": "Ring"},
}
KEYS = ("one", "two", "three")
GOOD = {"one": "passed", "two": "passed", "three": "passed"}
TERMS = Terms(rehearsal=False, level_reached=True)
WAIVER = {"who": "a person", "until": "2099-01-01"}


def record(key: str, outcome: str, **changes: Any) -> Record:
    """An outcome at the one GPU."""
    value = {"passed": 701, "failed": 699}.get(outcome)
    return Record(criterion=key, place=GPU.id, outcome=outcome, value=value, limit=limit(), **changes)


def plan_of(*keys: str) -> Plan:
    """These criteria are expected."""
    plan = Plan()
    for key in keys:
        plan.expect(key, GPU.id, nodeid=f"test_it.py::test_{key}[node0-gpu0]")
    return plan


def write(
    folder: Path, *outcomes: Record, verdict: str | None = None, objections: tuple[str, ...] = (), **started: Any
) -> Path:
    """The results directory of a run with these outcomes; without a verdict its controller was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "journal.jsonl")
    journal.write("started", run="aa", **{**STARTED, **started})
    journal.write("planned", **planned_facts(plan_of(*KEYS), replace(TERMS, objections=objections)))
    journal.write("bound", places=[bound_facts(GPU)], nodes=[bound_facts(NODE)])
    for one in outcomes:
        journal.write("outcome", record=record_facts(one))
    if verdict is not None:
        journal.write("verdict", verdict=verdict, line=verdict, objections=objections)
    journal.close()
    return folder


def test_what_stays(tmp_path: Path) -> None:
    """What passed; an error is measured again, and so is what has no outcome."""
    found = read_unfinished_run(write(tmp_path, record("one", "passed"), record("two", "error")))
    assert [*found.kept] == [("one", GPU.id)]
    assert found.run == "aa"


@pytest.mark.parametrize("outcome", ["error", "noisy", "missing"])
def test_an_incomplete_run_is_unfinished(tmp_path: Path, outcome: str) -> None:
    """Where a new measurement can settle it."""
    others = (record("two", "passed"), record("three", "passed"))
    assert read_unfinished_run(write(tmp_path, record("one", outcome), *others, verdict="INCOMPLETE")).kept.keys() == {
        ("two", GPU.id),
        ("three", GPU.id),
    }


@pytest.mark.parametrize(
    ("outcomes", "verdict", "objections", "said"),
    [
        (GOOD, "ACCEPTED", (), "has ended (ACCEPTED): nothing in it is left to measure"),
        ({**GOOD, "one": "skipped"}, "ACCEPTED", (), "nothing in it is left to measure"),
        ({**GOOD, "one": "not_selected"}, "INCOMPLETE", (), "nothing in it is left to measure"),
        ({**GOOD, "one": "failed"}, "REJECTED", (), "one at node0-gpu0 FAILED in the run"),
        ({**GOOD, "one": "error"}, "INCOMPLETE", ("more GPUs than expected",), "objects to: more GPUs than expected"),
    ],
)
def test_a_run_that_has_ended(
    tmp_path: Path, outcomes: dict[str, str], verdict: str, objections: tuple[str, ...], said: str
) -> None:
    """There is nothing to go on with, and another run begins where nobody asked for that one."""
    write(tmp_path, *(record(*pair) for pair in outcomes.items()), verdict=verdict, objections=objections)
    with pytest.raises(NothingUnfinishedError) as refused:
        read_unfinished_run(tmp_path)
    assert said in str(refused.value)


def test_a_selection_is_completed_where_that_is_asked_for(tmp_path: Path) -> None:
    """What was not selected is then unfinished."""
    outcomes = [record(*pair) for pair in {**GOOD, "one": "not_selected"}.items()]
    assert len(read_unfinished_run(write(tmp_path, *outcomes, verdict="INCOMPLETE"), completes=True).kept) == 2


def test_a_failure_is_never_measured_again(tmp_path: Path) -> None:
    """A killed run with one is refused, not begun anew; one that somebody answers for stays."""
    write(tmp_path / "bad", record("one", "failed"))
    with pytest.raises(ConfigurationError, match="one at node0-gpu0 FAILED") as refused:
        read_unfinished_run(tmp_path / "bad")
    assert not isinstance(refused.value, NothingUnfinishedError)
    waived = record("one", "failed", waiver=WAIVER, waivable=True)
    assert [*read_unfinished_run(write(tmp_path / "waived", waived)).kept] == [("one", GPU.id)]


@pytest.mark.parametrize("content", [None, b"", b'{"at_s": 1.0, "ev', b"no journal\n", b"\0\xff\n" * 3, b"[]\n{}\n"])
def test_no_journal(tmp_path: Path, content: bytes | None) -> None:
    """A folder without one, an empty one, one that has no beginning."""
    if content is not None:
        (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(NothingUnfinishedError):
        read_unfinished_run(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """A run into that directory, and ``gpucluster resume``, waited for a pipe, and read a device into all memory."""
    journal = tmp_path / "journal.jsonl"
    make = {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/null")}
    make[kind](journal)
    with pytest.raises(NothingUnfinishedError, match="is no file"):
        read_unfinished_run(tmp_path)
    if kind != "device":
        with pytest.raises(ConfigurationError, match="is no file"):
            take_over(tmp_path / "r", journal)


def test_a_half_line_at_the_end_is_no_damage(tmp_path: Path) -> None:
    """A kill may have cut it. It is cut off before the journal is continued."""
    write(tmp_path, record("one", "passed"))
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"at_s": 17, "event": "outc')
    found = read_unfinished_run(tmp_path)
    copied: list[str] = []
    Journal(journal, copy=copied.append, keep=found.size).close()
    assert journal.read_bytes() == whole
    assert "".join(copied).encode() == whole, "a replica on another node has all parts"


def test_a_damaged_line_is_refused(tmp_path: Path) -> None:
    """Nobody knows what stood there: perhaps a failure."""
    write(tmp_path, record("one", "passed"), record("two", "passed"))
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    lines[3] = lines[3][:-9]
    journal.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigurationError, match="damaged at line 4"):
        read_unfinished_run(tmp_path)


OTHERS = {
    "level": ("quick", "the level is another one: it was standard, and is quick"),
    "profile": ("h100-sxm", "the profile is another one"),
    "expected": ({"nodes": 2, "gpus_per_node": 8}, "it was nodes 1 and gpus_per_node 1, and is nodes 2 and gpus_per_node 8"),
    "thresholds_sha256": ("1" * 64, "the file of limits is another one"),
    "soak_s": (60.0, "the duration of the soak is another one"),
    "simulated": ({"nodes": 1, "seed": 1, "faults": []}, "the simulated fleet is another one"),
    "waivers": ([{"criterion": "one"}], "the set of waivers is another one"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run(tmp_path: Path, name: str) -> None:
    """Each difference is named, and no difference is none."""
    found = read_unfinished_run(write(tmp_path, record("one", "passed")))
    assert found.why_other(STARTED) is None
    value, said = OTHERS[name]
    assert said in str(found.why_other({**STARTED, "facts": {**FACTS, name: value}}))


def test_limits_that_one_file_changes_are_named(tmp_path: Path) -> None:
    """Beside the digests of both files."""
    found = read_unfinished_run(write(tmp_path, record("one", "passed"), facts={**FACTS, "changed_limits": ["bf16", "hbm"]}))
    now = {**FACTS, "thresholds_sha256": "1" * 64, "changed_limits": ["hbm", "triad"]}
    assert "the file of limits is another one (of bf16, triad): it was" in str(found.why_other({**STARTED, "facts": now}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"python": "3.12.3", "torch": "2.13.0"}}, "torch is 2.13.0, and was 2.11.0"),
        ({"versions": {"python": "3.12.3"}}, "torch is not set, and was 2.11.0"),
        ({"variables": {}}, "NCCL_ALGO is not set, and was Ring"),
        ({"variables": {"NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE is 1, and was not set"),
        ({"settings": {"inline": "True", "selftest": "False"}}, "--gpucluster-inline was not given before"),
    ],
)
def test_other_software(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Versions, variables and debugging modes are those of the first part."""
    found = read_unfinished_run(write(tmp_path, record("one", "passed")))
    assert found.why_other({**STARTED, **changes}) == said


def test_faults_of_a_fleet_may_differ(tmp_path: Path) -> None:
    """They are what happens to it, not what it is."""
    fleet = {"nodes": 1, "seed": 0, "faults": ["node0-gpu0:busy"]}
    found = read_unfinished_run(write(tmp_path, record("one", "passed"), facts={**FACTS, "simulated": fleet}))
    healed = {**STARTED, "facts": {**FACTS, "simulated": {**fleet, "faults": []}}}
    assert found.why_other(healed) is None


@pytest.mark.parametrize("name", IDENTITY)
def test_another_part(name: str) -> None:
    """Each by which a part is known; the message names the part and both values."""
    before = {GPU.id: GPU, NODE.id: NODE}
    assert why_other_parts(before, before) is None
    other: Any = {"VBIOS": "97"} if name == "board" else "another"
    said = why_other_parts(before, {**before, GPU.id: replace(GPU, **{name: other})})
    assert said is not None
    assert f"gpu 0 has another {IDENTITY[name]}: it was " in said
    assert said.endswith("VBIOS 97" if name == "board" else "another")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (("host10", "host11"), "host11 gpu 0 has another hostname: it was host9, and is host11"),
        (("host8", "host9"), "host8 gpu 0 has another hostname: it was host10, and is host8"),
        (("host1", "host2"), "host1 gpu 0 has another hostname: it was host10, host9, and is host1"),
        (("host9", "host10"), None),
    ],
)
def test_a_swapped_host_is_named_though_the_numbers_shift(hosts: tuple[str, str], said: str | None) -> None:
    """Nodes are counted by the names of their hosts: the swapped one is named, and not whoever has its number now."""

    def places(*names: str) -> dict[str, Place]:
        found = [replace(GPU, id=f"node{node}-gpu0", node=node, hostname=name) for node, name in enumerate(names)]
        return {one.id: one for one in found}

    assert why_other_parts(places("host9", "host10"), places(*hosts)) == said


def test_a_part_that_is_absent_has_no_difference() -> None:
    """Neither one that was absent, nor one that is. What was known of it stays known for the part after that."""
    absent = Place(id=GPU.id, node=0, gpu=0)
    assert why_other_parts({GPU.id: GPU}, {GPU.id: absent}) is None
    assert why_other_parts({GPU.id: absent}, {GPU.id: GPU}) is None
    assert last_known(GPU, absent) == replace(GPU, rank=None)
    assert last_known(GPU, absent).serial == "1"
    assert last_known(absent, GPU).rank == 0


def go_on(folder: Path, *outcomes: Record, verdict: str | None = "ACCEPTED") -> None:
    """The next part of the run, by the recorder itself."""
    found = read_unfinished_run(folder)
    plan = plan_of(*(key for key in KEYS if (key, GPU.id) not in found.kept))
    for one in found.kept.values():
        plan.keep(one, nodeid=f"test_it.py::test_{one.criterion}[node0-gpu0]")
    status = RunStatus(terms=TERMS, places={GPU.id: GPU}, facts={**FACTS, "environment": {}, "timings": {}})
    recorder = Recorder(plan, status=lambda: status)
    recorder.open(folder, junit=None, unfinished=found)
    recorder.record_plan()
    recorder.write("bound", places=[bound_facts(GPU)], nodes=[bound_facts(NODE)])
    for one in outcomes:
        recorder.record_outcome(one)
    if verdict is not None:
        recorder.write("verdict", verdict=verdict, line=verdict, objections=())
    recorder.close()


def test_one_verdict_over_both_parts(tmp_path: Path) -> None:
    """It counts what stayed and what is new, and says when which part was measured."""
    write(tmp_path, record("one", "passed"), record("two", "error"))
    go_on(tmp_path, record("two", "passed"), record("three", "passed"))
    verdict = rebuild(tmp_path)
    assert (verdict.word, verdict.counts["passed"]) == ("ACCEPTED", 3)
    assert verdict.line.count("measured in 2 parts: part 1 from ") == 1
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {one["criterion"]: one["part"] for one in results["criteria"]} == {"one": 1, "two": 2, "three": 2}
    assert [one["outcomes"] for one in results["parts"]] == [1, 2]
    assert 'name="part 2"' in (tmp_path / "junit.xml").read_text(encoding="utf-8")


def test_a_third_part(tmp_path: Path) -> None:
    """Killed again, and gone on with again: each outcome has its part."""
    write(tmp_path, record("one", "passed"))
    go_on(tmp_path, record("two", "passed"), verdict=None)
    go_on(tmp_path, record("three", "passed"))
    verdict = rebuild(tmp_path)
    assert verdict.word == "ACCEPTED"
    assert "measured in 3 parts" in verdict.line
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [one["part"] for one in results["criteria"]] == [1, 2, 3]


def test_a_failure_of_the_second_part_rejects(tmp_path: Path) -> None:
    """Whatever the first part had passed."""
    write(tmp_path, record("one", "passed"))
    go_on(tmp_path, record("two", "failed"), record("three", "passed"), verdict="REJECTED")
    assert rebuild(tmp_path).word == "REJECTED"


def test_a_kill_at_any_line(tmp_path: Path) -> None:
    """However much of a journal of two parts is there: no acceptance before its end, and what is kept had passed."""
    write(tmp_path / "run", record("one", "passed"), record("two", "error"), verdict="INCOMPLETE")
    go_on(tmp_path / "run", record("two", "passed"), record("three", "passed"))
    lines = (tmp_path / "run" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(len(lines)):
        folder = tmp_path / f"cut{number}"
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(b"".join(lines[:number]) + lines[number][:20])
        assert rebuild(folder).word == "INCOMPLETE"
        try:
            found = read_unfinished_run(folder)
        except NothingUnfinishedError:
            assert number < 2, "nothing was planned yet"
            continue
        assert {one.outcome for one in found.kept.values()} <= {"passed"}


def test_another_run_went_on_meanwhile(tmp_path: Path) -> None:
    """Between the look and the lock: it is refused."""
    found = read_unfinished_run(write(tmp_path, record("one", "passed")))
    go_on(tmp_path, record("two", "passed"), verdict=None)
    recorder = Recorder(plan_of(*KEYS), status=lambda: RunStatus(terms=TERMS, places={}, facts={}))
    with pytest.raises(ConfigurationError, match="another run has gone on with"):
        recorder.open(tmp_path, junit=None, unfinished=found)
    recorder.close()


def test_files_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Its journal and reports stay where they are; its logs move away."""
    write(tmp_path, record("one", "passed"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("of the first part", encoding="utf-8")
    ResultsDirectory(tmp_path, goes_on=True).close()
    assert (tmp_path / "journal.jsonl").exists()
    assert [one.name for one in (tmp_path / "previous").glob("*/logs/*")] == ["rank0.log"]
    assert not [*(tmp_path / "logs").iterdir()]


def test_the_replica_of_a_second_part_is_the_same_run(tmp_path: Path) -> None:
    """A node that keeps the journal of a lost controller puts back all parts, and moves nothing away."""
    write(tmp_path / "run", record("one", "passed"))
    first = (tmp_path / "run" / "journal.jsonl").read_bytes()
    go_on(tmp_path / "run", record("two", "passed"), record("three", "passed"))
    (tmp_path / "replica").write_bytes((tmp_path / "run" / "journal.jsonl").read_bytes())
    (tmp_path / "run" / "journal.jsonl").write_bytes(first)
    take_over(tmp_path / "run", tmp_path / "replica")
    assert rebuild(tmp_path / "run").word == "ACCEPTED"
    assert not (tmp_path / "run" / "previous" / "journal.jsonl").exists()


def test_a_run_of_one_part_says_nothing_of_parts() -> None:
    """Neither in its verdict."""
    assert parts_remarks([]) == ()
