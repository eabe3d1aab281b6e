"""What the reports of a run say, and ``results.json``: the whole outcome as strict JSON.

Its shape is that of ``results.schema.json`` beside this file.

The parts of a run that was gone on with: when each was measured, and on which hardware. Pure.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.selection import Selector
from pytest_gpucluster.judging.verdict import MISSING, NOT_SELECTED, OUTCOMES, PASSED, SEVERITY, SKIPPED, Record, Verdict
from pytest_gpucluster.places import PLACE_FIELDS, Place
from pytest_gpucluster.records.columns import evidence_of, values_in_columns
from pytest_gpucluster.records.reading import limits_digest
from pytest_gpucluster.text import counted

SCHEMA = 1
"""Of the keys that stay as they are."""
SCHEMA_VERSION = 2
"""Of the whole document. It grows when a reader of an older version would misread a newer file."""
MOST_WHOLE = 10_000
"""A run of more outcomes leaves the good ones out of ``criteria``; ``values`` has all of them."""
MOST_LISTED = 5_000
"""So many rows ``criteria`` has at most then, the worst first."""
STRICT = ("values",)
"""Members that are strict JSON already."""
SCHEMA_FILE = Path(__file__).with_name("results.schema.json")


def results_document(
    cases: Iterable[ReportedTest], *, places: Mapping[str, Place], verdict: Verdict, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The document of one run; ``facts`` are the other top-level members, as plain data."""
    known = list(cases)
    rows = [case.record for case in known]
    facts_of = {name: place_facts(place) for name, place in places.items()}
    listed = _listed(rows)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.word,
        "verdict_line": verdict.line,
        "objections": list(verdict.objections),
        **facts,
        **({"limits_sha256": limits_digest(facts["limits"])} if "limits" in facts else {}),
        "places": [{**facts_of[name], "slot": place.board.get("slot")} for name, place in places.items()],
        "hardware": [{"place": name, **place.board} for name, place in places.items() if place.board],
        "criteria": [_row(record, facts_of) for record in listed],
        "criteria_omitted": _omitted(rows, listed),
        "values": values_in_columns(rows),
        "culprits": culprits(known, places),
    }


def _listed(rows: Sequence[Record]) -> Sequence[Record]:
    """The outcomes that ``criteria`` has: all of them, or in a large run the worst of those that are not good."""
    if len(rows) <= MOST_WHOLE:
        return rows
    shown = [row for row in rows if row.outcome not in (PASSED, SKIPPED, NOT_SELECTED) or row.advisory or row.waiver]
    return sorted(shown, key=lambda row: -SEVERITY.index(row.outcome))[:MOST_LISTED]


def _omitted(rows: Sequence[Record], listed: Sequence[Record]) -> dict[str, int]:
    """How many outcomes ``criteria`` leaves out, by outcome."""
    left = Counter(row.outcome for row in rows)
    left.subtract(row.outcome for row in listed)
    return {outcome: left[outcome] for outcome in OUTCOMES if left[outcome]}


def to_json(document: Mapping[str, Any]) -> str:
    """Strict JSON, one line an outcome: a number that is not finite becomes null."""
    members = ",\n".join(f" {json.dumps(name)}: {_member(value, is_strict=name in STRICT)}" for name, value in document.items())
    return f"{{\n{members}\n}}\n"


def _member(value: Any, *, is_strict: bool) -> str:
    """A top-level member, each row of a list on one line. Python's encoder is slow where it sets in; msgspec is not."""
    facts = value if is_strict else strict_json(value)
    if not isinstance(value, list) or not value:
        return msgspec.json.format(json.dumps(facts, allow_nan=False), indent=1).replace("\n", "\n ")
    encode = json.JSONEncoder(allow_nan=False).encode
    return "[\n" + ",\n".join(f"  {encode(row)}" for row in facts) + "\n ]"


def place_facts(place: Place) -> dict[str, Any]:
    """A place as results.json describes it."""
    return {name: getattr(place, name) for name in PLACE_FIELDS}


def bound_facts(place: Place) -> dict[str, Any]:
    """A place as the journal describes it, from which it is built again."""
    more = {"board": dict(place.board), "boot_id": place.boot_id, "driver": place.driver}
    return {**place_facts(place), **{name: value for name, value in more.items() if value}}


def culprits(cases: Sequence[ReportedTest], places: Mapping[str, Place]) -> list[dict[str, Any]]:
    """Everything that the records blame, as results.json has it; confirmed failures first."""
    tests = Selector({(case.record.criterion, case.record.place): case.nodeid for case in cases})
    return [
        {
            "kind": one.kind,
            "place": place_facts(places[one.place]) if one.place is not None else None,
            "places": list(one.places),
            "criteria": one.criteria,
            "confidence": one.confidence,
            "evidence": one.evidence,
            "action": one.action(tests, places),
        }
        for one in find_culprits((case.record for case in cases), places)
    ]


def _row(record: Record, facts_of: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    return {
        "criterion": record.criterion,
        "place": facts_of.get(record.place) if record.place is not None else None,
        "outcome": record.outcome,
        "value": record.value,
        "unit": record.unit,
        "limit": record.limit_text,
        "limit_kind": record.limit.kind if record.limit is not None else None,
        "limit_value": record.limit.value if record.limit is not None else None,
        "advisory": record.advisory,
        "part": record.part,
        "remark": record.remark,
        "reason": record.text,
        "waiver": dict(record.waiver) if record.waiver is not None else None,
        "evidence": evidence_of(record),
    }


def selftest_lines(facts: Mapping[str, Any]) -> list[str]:
    """The lines about a self-test, for the terminal and its testcase: statement, remarks, objections."""
    return [facts["statement"], *facts["remarks"], *facts["objections"]]


class ReportedTest(NamedTuple):
    """One outcome and the node id of its test; the criterion itself where no test was selected."""

    nodeid: str
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class JunitForm:
    """What was asked of the JUnit file.

    Attributes:
        form: ``place``, ``node`` or ``criterion``; None: by the number of testcases.
        is_strict: without what the xUnit schema of Jenkins forbids, such as properties inside a testcase.
    """

    form: str | None = None
    is_strict: bool = False


BY_NUMBER = JunitForm()
"""Nothing was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that results.json and a JUnit file are made from.

    Attributes:
        cases: all expected outcomes, in the order of the plan.
        places: the expected GPUs and nodes by id.
        facts: the other top-level members of results.json.
        is_rebuilt: made from a journal after the run, not by the run itself.
        junit: what was asked of the JUnit file.
    """

    cases: tuple[ReportedTest, ...]
    verdict: Verdict
    places: Mapping[str, Place]
    facts: Mapping[str, Any]
    is_rehearsal: bool
    is_rebuilt: bool = False
    junit: JunitForm = BY_NUMBER


MEASURED = tuple(outcome for outcome in OUTCOMES if outcome not in (SKIPPED, MISSING, NOT_SELECTED))
"""Outcomes of what was measured, or was tried."""
IDENTITY = {
    "hostname": "hostname",
    "uuid": "UUID",
    "serial": "serial number",
    "pci": "PCI address",
    "boot_id": "boot id",
    "driver": "driver",
    "board": "board",
}
"""By what a part is known to be the same one, and not booted since, with its word for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a run, from its begin to its last outcome; in seconds since 1970."""

    began_s: float
    ended_s: float


class RunParts(NamedTuple):
    """The parts of a run: ``earlier``, and the last one. Its begin and the last outcome are in seconds since 1970."""

    earlier: tuple[Part, ...] = ()
    began_s: float = 0.0
    outcome_s: float = 0.0

    @property
    def number(self) -> int:
        """Which part the last one is, from 1."""
        return 1 + len(self.earlier)

    @property
    def all(self) -> tuple[Part, ...]:
        """Every part. The last outcome may be of the part before the last one."""
        return (*self.earlier, Part(began_s=self.began_s, ended_s=max(self.began_s, self.outcome_s)))

    def facts(self, records: Iterable[Record]) -> list[dict[str, Any]]:
        """When each part was measured and how many outcomes stand from it, as results.json has it; empty for one part."""
        if not self.earlier:
            return []
        counts = Counter(record.part for record in records if record.outcome in MEASURED)
        return [
            {"part": number, "began": utc(one.began_s), "ended": utc(one.ended_s), "outcomes": counts[number]}
            for number, one in enumerate(self.all, start=1)
        ]


def parts_remarks(facts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the verdict says of the parts; ``facts`` are those of :meth:`RunParts.facts`."""
    if not facts:
        return ()
    each = [f"part {number} {words}" for number, words in enumerate(words_of_parts({"parts": facts}), start=1)]
    return (f"measured in {counted(len(facts), 'part')}: {', '.join(each)}",)


def words_of_parts(facts: Mapping[str, Any]) -> list[str]:
    """When each part was measured and how many outcomes stand from it; ``facts`` are the members of results.json."""
    return [f"from {one['began']} to {one['ended']} ({counted(one['outcomes'], 'outcome')})" for one in facts.get("parts", ())]


def utc(at_s: float) -> str:
    """A moment in seconds since 1970 as ``2026-11-26T18:22:05Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def is_known(place: Place | None) -> bool:
    """Whether something has answered at this place, so that another part in its place can be told from it."""
    return place is not None and bool(place.uuid or place.serial or place.boot_id)


def last_known(before: Place | None, now: Place) -> Place:
    """The place as it is bound now; where nothing answers now, what answered there before, so that it stays known."""
    return replace(before, rank=None) if before is not None and is_known(before) and not is_known(now) else now


def why_other_parts(before: Mapping[str, Place], now: Mapping[str, Place]) -> str | None:
    """The first part that is not the one that was measured before, with the difference; None if all are the same.

    A place at which nothing answered in one of the two has no difference. Nodes are counted by the names of their hosts: a new
    host, which may have given others another number, comes first.
    """
    hosts, hosts_now = ({place.hostname for place in places.values() if place.hostname} for places in (before, now))
    gone = ", ".join(sorted(map(str, hosts - hosts_now)))
    for name, place in sorted(now.items(), key=lambda item: item[1].hostname in hosts):
        older = before.get(name)
        if older is None or not (is_known(older) or older.gpu is None):
            continue
        for field, word in IDENTITY.items():
            was, is_now = getattr(older, field), getattr(place, field)
            was = gone or was if field == "hostname" and is_now not in hosts else was
            is_absent = is_now is None if place.gpu is None else not is_known(place)
            if was != is_now and not is_absent and (was is not None or place.gpu is not None):
                return f"{place.on_host} has another {word}: it was {_words(was)}, and is {_words(is_now)}"
    return None


def _words(value: Any) -> str:
    if value is None:
        return "unknown"
    return ", ".join(f"{name} {one}" for name, one in value.items()) or "unknown" if hasattr(value, "items") else str(value)
