"""Outcomes into files: the directory, the journal, results.json, the table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging import failure_text
from pytest_gpucluster.judging.verdict import OUTCOMES, Record, Terms, decide
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.reporting.files import ResultsDirectory, write_atomically
from pytest_gpucluster.reporting.journal import Journal
from pytest_gpucluster.reporting.results import SCHEMA_FILE, ReportedTest, bound_facts, culprits, results_document, to_json
from pytest_gpucluster.thresholds.layers import KINDS
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.entries import limit, threshold

INVENTORY = Inventory(num_nodes=1, gpus_per_node=2, device="cuda")
PLACES = {place.id: place for place in (*INVENTORY.places, *INVENTORY.nodes)}
FACTS: dict[str, Any] = {
    "level": "standard",
    "profile": "h100-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 2},
    "thresholds_sha256": "0" * 64,
    "changed_limits": ["bf16_tflops"],
    "environment": {"versions": {}},
    "timings": {"total_s": 1.5},
}
TERMS = Terms(rehearsal=False, level_reached=True)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Evidence may be a dataclass."""

    median: float


class Unspeakable:
    """Neither its text nor its repr can be had."""

    def __str__(self) -> str:
        """Raise."""
        raise RuntimeError("no text")

    __repr__ = __str__


class UnreadableMapping(dict[str, float]):
    """Its items cannot be read."""

    def items(self) -> Any:
        """Raise."""
        raise RuntimeError("no items")


def nested(levels: int) -> list[Any]:
    """A list in a list, so many levels deep."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
EVIDENCES: list[dict[Any, Any]] = [
    {},
    {"nan": math.nan, "inf": [math.inf, {"deep": -math.inf}]},
    {"place": INVENTORY.places[0], "set": {1}, "tuple": (1, 2), "spread": Spread(median=math.nan), "path": Path("x")},
    {INVENTORY.places[0]: 1.0, 8192: 2.0, (1, 2): 3.0, None: 4.0},
    {"surrogate \ud800": "\ud800"},
    {"long": 10**5000, "longer": [-(10**20000)], "enum": IntEnum("Code", {"LONG": 10**5000}).LONG},
    {"object": Unspeakable(), Unspeakable(): 1.0, "in a list": [Unspeakable()], "dict": UnreadableMapping()},
    {"deep": nested(50), "deeper": nested(100_000), "own": CIRCLE, "field": Spread(median=Unspeakable())},  # type: ignore[arg-type]
]
KINDS_OF_EVIDENCE = ["none", "not finite", "objects", "keys", "surrogates", "long", "unspeakable", "deep"]


def record(**changes: Any) -> Record:
    """One outcome at node0-gpu1."""
    return Record(**{"criterion": "tflops", "place": "node0-gpu1", "outcome": "failed", "culprits": ("node0-gpu1",), **changes})


def strict(text: str) -> Any:
    """Parse JSON as other languages do: NaN and Infinity are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in strict JSON")

    return json.loads(text, parse_constant=refuse)


def cases(records: list[Record]) -> list[ReportedTest]:
    """Tests that are called as their criteria."""
    return [ReportedTest(nodeid=record.criterion, record=record) for record in records]


def document(records: list[Record], *, places: dict[str, Place] | None = None) -> Any:
    """What a program outside reads."""
    verdict = decide(records, TERMS)
    return strict(to_json(results_document(cases(records), places=places or PLACES, verdict=verdict, facts=FACTS)))


@cache
def validator() -> Any:
    """Of the schema that is shipped, which is itself checked once."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def validate(found: Any) -> None:
    """Against the schema that is shipped."""
    validator().validate(found)


@pytest.mark.parametrize("evidence", EVIDENCES, ids=KINDS_OF_EVIDENCE)
def test_evidence_of_any_kind_is_strict_json(evidence: dict[Any, Any]) -> None:
    """Whatever a test hands over as evidence, results.json can be read by everybody."""
    validate(document([record(evidence=evidence, value=1.5, limit=limit(value=2), reason="r")]))


@pytest.mark.parametrize("evidence", EVIDENCES, ids=KINDS_OF_EVIDENCE)
def test_evidence_of_any_kind_stands_in_a_failure(evidence: dict[Any, Any]) -> None:
    """The text of the failure is made, whatever the evidence is."""
    text = failure_text.describe_failure(
        threshold("tflops"), limit(value=2), 1.0, at=failure_text.Located([]), evidence=evidence
    )
    assert text.startswith("tflops at the cluster: 1 TFLOPS")


RECORDS = st.builds(
    Record,
    criterion=st.text(min_size=1),
    place=st.none() | st.sampled_from(sorted(PLACES)),
    outcome=st.sampled_from(OUTCOMES),
    value=st.none() | st.floats(),
    limit=st.none() | st.builds(Limit, kind=st.sampled_from(KINDS), value=st.floats(), unit=st.text()),
    reason=st.none() | st.text(),
    culprits=st.lists(st.sampled_from([*sorted(PLACES), "nobody"]), max_size=2).map(tuple),
    evidence=st.dictionaries(st.text(), st.floats() | st.text() | st.lists(st.integers()), max_size=2),
)


@settings(max_examples=50)  # each is read against the whole schema
@given(st.lists(RECORDS, max_size=4))
def test_every_run_fits_the_schema(records: list[Record]) -> None:
    """Any outcomes whatever."""
    validate(document(records))


def test_rows() -> None:
    """Place with its hardware, null for the cluster; number, unit, limit, reason as they are."""
    bound = {**PLACES, "node0-gpu1": Place(id="node0-gpu1", node=0, gpu=1, rank=1, hostname="h", uuid="GPU-1", pci="p")}
    rows = [record(value=498.0, limit=limit()), record(criterion="loss", place=None, culprits=())]
    found = results_document(cases(rows), places=bound, verdict=decide(rows, TERMS), facts=FACTS)
    first, second = found["criteria"]
    assert first["place"] == {
        "id": "node0-gpu1",
        "node": 0,
        "hostname": "h",
        "gpu": 1,
        "rank": 1,
        "uuid": "GPU-1",
        "serial": None,
        "pci": "p",
    }
    assert (first["value"], first["unit"], first["limit"]) == (498.0, "TFLOPS", "> 700 TFLOPS")
    assert (first["limit_kind"], first["limit_value"], first["advisory"]) == ("above", 700, False)
    assert second["place"] is None
    assert (found["verdict"], found["schema"]) == ("REJECTED", 1)


def test_boards_stand_once_for_each_gpu() -> None:
    """Apart from the rows, which are many; a GPU of which the driver tells no board has none."""
    board = {"part_number": "692-2G520-0282-001", "module": "4"}
    bound = {**PLACES, "node0-gpu1": dataclasses.replace(PLACES["node0-gpu1"], board=board)}
    found = document([record()], places=bound)
    validate(found)
    assert found["hardware"] == [{"place": "node0-gpu1", **board}]
    assert "board" not in found["criteria"][0]["place"]
    again = Place(**json.loads(json.dumps(bound_facts(bound["node0-gpu1"]))))
    assert (again, again.board) == (bound["node0-gpu1"], board)
    assert "board" not in bound_facts(PLACES["node0-gpu0"])


def test_culprits_measured_ones_first() -> None:
    """One row a place with all that points at it; a measured finding weighs more than an error; passed ones never."""
    rows = [
        record(criterion="a", outcome="error", place="node0-gpu0", culprits=("node0-gpu0",), reason="died\nmore"),
        record(criterion="b", reason="498 TFLOPS"),
        record(criterion="c", outcome="missing", reason="gone"),
        record(criterion="d", outcome="passed", culprits=("node0",)),
    ]
    first, second = culprits(cases(rows), PLACES)
    assert (first["place"]["id"], first["confidence"], first["criteria"]) == ("node0-gpu1", "medium", ["b", "c"])
    assert (second["place"]["id"], second["confidence"], second["evidence"]) == ("node0-gpu0", "medium", ["died"])
    assert (first["kind"], second["kind"]) == ("gpu", "unknown")


def test_an_older_run_is_kept_apart(tmp_path: Path) -> None:
    """Its files move together, byte for byte; a person's own stay; a second older run gets a folder of its own."""
    folder = tmp_path / "results"
    (folder / "logs").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    for text in ("first", "second", "third"):
        for name in ("journal.jsonl", "results.json", "report.html", "logs/agents.log"):
            (folder / name).write_text(text, encoding="utf-8")
            os.utime(folder / name, (1_800_000_000, 1_800_000_000))  # equal times, so equal names but for a number
        held = ResultsDirectory(folder)
        assert {path.name for path in folder.iterdir()} == {"previous", "notes.txt", "logs", ".lock"}
        assert not list((folder / "logs").iterdir())
        held.close()
    shelves = sorted((folder / "previous").iterdir())
    assert len(shelves) == 3
    told = {(shelf / "journal.jsonl").read_text(encoding="utf-8") for shelf in shelves}
    assert told == {"first", "second", "third"}
    for shelf in shelves:
        texts = {path.read_text(encoding="utf-8") for path in shelf.rglob("*") if path.is_file()}
        assert len(texts) == 1, shelf  # never mixed


def test_nothing_older_makes_no_shelf(tmp_path: Path) -> None:
    """A first run has no predecessor."""
    ResultsDirectory(tmp_path / "a" / "b").close()
    assert not (tmp_path / "a" / "b" / "previous").exists()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """The second is refused and touches nothing; after the first has closed it may."""
    first = ResultsDirectory(tmp_path)
    (tmp_path / "journal.jsonl").write_text("first", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="in use by another run; give this one its own: --gpucluster-results"):
        ResultsDirectory(tmp_path)
    assert (tmp_path / "journal.jsonl").read_text(encoding="utf-8") == "first"
    first.close()
    ResultsDirectory(tmp_path).close()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    """A file in its place, a file above it, a file system that takes none: refused by path, with the system's reason."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/gpucluster")):
        with pytest.raises(ConfigurationError, match=re.escape(f"{path} cannot be written: ")):
            ResultsDirectory(path)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_full_disk_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the verdict is due; and the directory is free again afterwards."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigurationError, match="No space left on device"):
            ResultsDirectory(tmp_path)
    assert not (tmp_path / ".probe").exists()
    ResultsDirectory(tmp_path).close()


def test_a_file_is_old_or_new_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves what was there, and no half file beside it."""
    path = tmp_path / "results.json"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert [(entry.name, entry.read_text(encoding="utf-8")) for entry in tmp_path.iterdir()] == [("results.json", "old")]


@pytest.mark.parametrize("evidence", EVIDENCES, ids=KINDS_OF_EVIDENCE)
def test_the_journal_takes_any_evidence(tmp_path: Path, evidence: dict[Any, Any]) -> None:
    """It is written while tests run: what one test hands over must not end the run of all."""
    journal = Journal(tmp_path / "journal.jsonl")
    with contextlib.closing(journal):
        journal.write("outcome", record={"evidence": evidence})
        journal.write("verdict", verdict="REJECTED")
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["outcome", "verdict"]
    assert journal.failed is None


def test_a_journal_that_can_no_more_be_written_is_remembered() -> None:
    """A disk that fills up does not end the run, and is said at the end."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    journal = Journal(full)
    journal.write("started")
    journal.write("outcome")
    journal.close()
    assert journal.failed == "No space left on device"
