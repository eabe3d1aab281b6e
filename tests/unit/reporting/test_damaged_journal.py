"""A damaged journal: rebuilt from every line that can be read, the damage is said, and nothing becomes better of it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.page.document import read_document
from pytest_gpucluster.reporting.journal import record_facts, record_from_facts
from pytest_gpucluster.reporting.rebuild import event_of, rebuild, require_journal_of, take_over
from tests.support import reports

if TYPE_CHECKING:
    from pathlib import Path

ROW = {"criterion": "tflops", "place": None}
PLACE = {"id": "node0-gpu0", "node": 0, "hostname": "h", "gpu": 0, "rank": 0, "uuid": "GPU-1", "serial": "1", "pci": "61:0"}
EVENTS: tuple[dict[str, Any], ...] = (
    {
        "event": "started",
        "run": "4711",
        "versions": {},
        "facts": {"level": "quick", "expected": {"nodes": 1, "gpus_per_node": 1}, "waivers": []},
    },
    {
        "event": "planned",
        "terms": {"rehearsal": False, "level_reached": True, "objections": [], "changed_limits": []},
        "expected": [{**ROW, "nodeid": "t", "outcome": "pending", "reason": None}],
    },
    {"event": "bound", "places": [PLACE], "nodes": [], "unheard": {}},
    {"event": "outcome", "record": record_facts(Record(**ROW, outcome="passed", value=1.0))},
    {"event": "verdict", "verdict": "ACCEPTED", "objections": []},
)
LINES = tuple(json.dumps({"at_s": float(number), **event}).encode() + b"\n" for number, event in enumerate(EVENTS))
FRAGMENTS = (
    b"\xff\xfe\n",
    b"\n",
    b"   \n",
    b"{\n",
    b'{"at_s": 1.0, "event": "outco\n',
    b"null\n",
    b"[]\n",
    b"4711\n",
    b'"verdict"\n',
    b"{}\n",
    b'{"at_s": "soon", "event": "verdict", "objections": []}\n',
    b'{"at_s": 1.0, "event": ["verdict"]}\n',
    b'{"at_s": 1.0, "event": "verdict", "objections": 7}\n',
    b'{"at_s": 1.0, "event": "outcome", "record": {"criterion": "a", "place": null, "outcome": "good", "culprits": []}}\n',
    b'{"at_s": 1.0, "event": "outcome", "record": {"criterion": [], "place": null, "outcome": "passed", "culprits": []}}\n',
    b'{"at_s": 1.0, "event": "planned", "terms": {}, "expected": [{}]}\n',
    b'{"at_s": 1.0, "event": "bound", "places": [7]}\n',
    b'{"at_s": 1.0, "event": "started", "facts": {"waivers": [{}]}, "versions": {}}\n',
    b'{"at_s": 1.0, "event": "started", "facts": [], "versions": {}}\n',
    b'{"at_s": 1.0, "event": "selftest", "selftest": {"objections": 1}}\n',
    b"[" * 100_000 + b"\n",
    b"9" * 10_000 + b"\n",
    b"\x00" * 1_000_000 + b"\n",
    bytes(range(11, 256)) + b"\n",
)


def rebuilt(folder: Path, content: bytes) -> tuple[str, str]:
    """The word and the line of the verdict; both reports are well formed and say it too."""
    (folder / "journal.jsonl").write_bytes(content)
    verdict = rebuild(folder)
    results = reports.read_results(folder)
    assert (results["verdict"], results["verdict_line"]) == (verdict.word, verdict.line)
    last = reports.cases_of(reports.read_suite(folder / "junit.xml"))[-1]
    assert last.properties["verdict"] == verdict.word
    return verdict.word, verdict.line


def test_a_whole_journal(tmp_path: Path) -> None:
    """Says nothing of damage."""
    word, line = rebuilt(tmp_path, b"".join(LINES))
    assert (word, "damaged" in line) == ("ACCEPTED", False)
    assert rebuilt(tmp_path, b"".join(LINES).rstrip(b"\n"))[0] == "ACCEPTED"


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda fragment: repr(fragment[:40]))
@pytest.mark.parametrize("number", range(1, len(LINES) + 2))
def test_a_line_that_is_none(tmp_path: Path, fragment: bytes, number: int) -> None:
    """Wherever it stands: all others are read, and it is said where it stands."""
    lines = [*LINES[: number - 1], fragment, *LINES[number - 1 :]]
    word, line = rebuilt(tmp_path, b"".join(lines))
    assert word == "INCOMPLETE"
    assert f"the journal is damaged at line {number}; 1 line was not read" in line
    assert [row["outcome"] for row in reports.read_results(tmp_path)["criteria"]] == ["passed"]


@pytest.mark.parametrize("number", range(len(LINES)))
@pytest.mark.parametrize("damaged", [b"\xe9", b"\n", b"\x00"])
def test_a_damaged_byte(tmp_path: Path, number: int, damaged: bytes) -> None:
    """In the middle of a line that decides, or of one that does not."""
    half = len(LINES[number]) // 2
    broken = LINES[number][:half] + damaged + LINES[number][half + 1 :]
    word, line = rebuilt(tmp_path, b"".join([*LINES[:number], broken, *LINES[number + 1 :]]))
    assert word == "INCOMPLETE"
    assert f"the journal is damaged at line {number + 1}; " in line


def test_a_journal_that_ends_anywhere(tmp_path: Path) -> None:
    """Cut at each byte, as by a full disk: never an acceptance before its last line."""
    content = b"".join(LINES)
    for end in range(0, len(content) - 1, 7):
        assert rebuilt(tmp_path, content[:end])[0] == "INCOMPLETE", end


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, sum(map(len, LINES)) - 2), damage=st.binary(min_size=1, max_size=40))
def test_any_damage(tmp_path: Path, start: int, damage: bytes) -> None:
    """No bytes end in a traceback, and a lost line is never an acceptance."""
    content = b"".join(LINES)
    broken = content[:start] + damage + content[start + len(damage) :]
    word, line = rebuilt(tmp_path, broken)
    if word == "ACCEPTED":
        assert broken.count(b"\n") >= content.count(b"\n") - broken.endswith(b"\n") - 1
        assert "damaged" not in line


def test_what_failed_stays_so(tmp_path: Path) -> None:
    """A failure beside the damage rejects; a verdict whose failure was lost is named."""
    failed = json.dumps({"at_s": 1.0, "event": "outcome", "record": record_facts(Record(**ROW, outcome="failed"))}).encode()
    rejected = json.dumps({"at_s": 9.0, "event": "verdict", "verdict": "REJECTED", "objections": []}).encode()
    assert rebuilt(tmp_path, b"".join([*LINES[:3], b"\xff\n", failed, b"\n", rejected, b"\n"]))[0] == "REJECTED"
    word, line = rebuilt(tmp_path, b"".join([*LINES[:4], b"\xff\n", rejected, b"\n"]))
    assert (word, "the run itself said REJECTED" in line) == ("INCOMPLETE", True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 1; 2 where there is no journal at all."""
    (tmp_path / "journal.jsonl").write_bytes(LINES[0] + b"\xff\n" + b"".join(LINES[1:]))
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("verdict INCOMPLETE: 1 passed (the journal is damaged at line 2; 1 line was not read)")
    assert said.err == ""
    assert main(["report", str(tmp_path / "nowhere")]) == 4
    assert "cannot be read" in capsys.readouterr().err


def test_a_damaged_replica_or_first_line(tmp_path: Path) -> None:
    """What an agent does with them when the controller died."""
    (tmp_path / "run").mkdir()
    (tmp_path / "copy").write_bytes(LINES[0] + b"\xff\n")
    take_over(tmp_path / "run", tmp_path / "copy")
    assert "damaged at line 2" in rebuild(tmp_path / "run").line
    require_journal_of("4711", tmp_path / "run")
    (tmp_path / "run" / "journal.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ConfigurationError, match="the first line of the journal"):
        require_journal_of("4711", tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        *[
            (0, {"facts": {"expected": {"nodes": 1, "gpus_per_node": 1}, **facts}})
            for facts in (
                {"expected": {"nodes": 10**30, "gpus_per_node": 1}},
                {"run": {"command": [None]}},
                {"changed_limits": None},
                {"limits": {"a": {"noise": "x"}}},
            )
        ],
        (2, {"places": [{**PLACE, "uuid": 7}]}),
        (2, {"places": [{**PLACE, "gpu": 10**30}]}),
        (4, {"timings": [1]}),
    ],
    ids=repr,
)
def test_an_event_that_no_reader_could_read(tmp_path: Path, number: int, changes: dict[str, Any]) -> None:
    """It is damage, and results.json can be read. One of 10^30 nodes had no end."""
    event = json.dumps({"at_s": float(number), **EVENTS[number], **changes}).encode() + b"\n"
    word, line = rebuilt(tmp_path, b"".join([*LINES[:number], event, *LINES[number + 1 :]]))
    assert (word, f"the journal is damaged at line {number + 1}" in line) == ("INCOMPLETE", True), line
    assert read_document(tmp_path / "results.json").word == word


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Record)])
def test_every_field_of_a_record_is_checked(field: str) -> None:
    """A value of a type that it never has."""
    facts = record_facts(Record(**ROW, outcome="failed"))
    assert record_from_facts(facts) == Record(**ROW, outcome="failed")
    with pytest.raises((TypeError, ValueError)):
        record_from_facts({**facts, field: object()})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("criterion", "outcome") for value in (None, 1, ["a"])],
        *[
            (name, value)
            for name in ("place", "reason", "headline", "teardown", "cause", "remark", "advice")
            for value in (1, {})
        ],
        *[(name, value) for name in ("value", "margin_percent") for value in ("1", [1.0], {"a": 1}, True)],
        *[(name, value) for name in ("advisory", "confirmed", "waivable", "started") for value in (1, "true", None)],
        *[(name, value) for name in ("culprits", "among") for value in ("node0", [1], [None], {"a": 1}, None)],
        *[(name, value) for name in ("evidence", "waiver") for value in ("a", [1], 1)],
        ("evidence", None),
        ("blames", "gpus"),
        ("blames", 1),
        ("outcome", "good"),
        ("limit", {"kind": "above", "value": "1", "unit": "W"}),
        ("limit", {"kind": "above", "value": 1, "unit": None}),
        ("limit", {"kind": "over", "value": 1, "unit": "W"}),
        ("limit", {"kind": "above", "value": 1}),
        ("limit", [1]),
        ("limit", "> 700 TFLOPS"),
    ],
    ids=repr,
)
def test_a_field_of_another_type(field: str, value: Any) -> None:
    """Reports could not be made of it, or would say something else."""
    facts = record_facts(Record(**ROW, outcome="failed"))
    with pytest.raises((TypeError, ValueError, KeyError)):
        record_from_facts({**facts, field: value})
    with pytest.raises((TypeError, ValueError, KeyError)):
        event_of(line_of({**facts, field: value}))


TODAY = record_facts(Record(**ROW, outcome="failed", value=1.5, evidence={"C": 61}))


@pytest.mark.parametrize(
    "facts",
    [
        TODAY,
        {**TODAY, "value": 10**40, "evidence": {"big": 10**400, "far": 1e300, "deep": [[{"a": None}]]}},
        {**TODAY, "evidence": {"not finite": float("nan"), "beyond": float("inf")}},
        {**TODAY, "evidence": {"half a character": "\ud800", "\udc00": 1}},
        {**TODAY, "outcome": "pending"},
        {**TODAY, "of a newer version": {"a": 1}},
        {**TODAY, "reason": 'connection "refused"'},
        {**TODAY, "refused": True},
        {**TODAY, "limit": {"kind": "above", "value": 1, "unit": "W"}},
        {"criterion": "tflops", "place": None, "outcome": "passed", "reason": "advisory: low"},
    ],
    ids=repr,
)
def test_an_outcome_is_read_alike_by_its_types_and_by_its_facts(facts: dict[str, Any]) -> None:
    """The short way to a record is taken for what this version writes; it never gives another record than the long one."""
    record = record_from_facts(json.loads(json.dumps(facts)))
    assert repr(event_of(line_of(facts))) == repr({"at_s": 4.0, "event": "outcome", "record": record})


def line_of(facts: dict[str, Any]) -> bytes:
    """The line of an outcome."""
    return json.dumps({"at_s": 4.0, "event": "outcome", "record": facts}).encode()
