"""``results.json`` as data: records, places and facts, of this version and of older ones. What is absent stays absent."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import OUTCOMES, VERDICTS, Record
from pytest_gpucluster.places import PLACE_FIELDS, Place
from pytest_gpucluster.records.columns import by_criterion
from pytest_gpucluster.records.reading import NEWEST, evidence_values, require_file, require_outcomes
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

TABLES = ("criteria", "values", "culprits", "hardware", "places", "limits")
"""Members that become records, places and entries; all others are facts."""
NODE = re.compile(r"node(\d+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """One run as its results.json tells it.

    Attributes:
        facts: the members that are no tables: verdict, profile, versions, timings and so on.
        places: every GPU and node that the file names, by id.
        records: every outcome, in the order of the plan.
        entries: what the limits say of each criterion; empty for a file of version 1.
        culprits: what is to blame, as the file has it.
        content: the bytes of the file.
    """

    facts: Mapping[str, Any]
    places: Mapping[str, Place]
    records: tuple[Record, ...]
    entries: Mapping[str, Mapping[str, Any]]
    culprits: tuple[Mapping[str, Any], ...]
    content: bytes

    @property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def word(self) -> str:
        """The verdict in one word."""
        return str(self.facts["verdict"])

    @property
    def by_criterion(self) -> dict[str, list[Record]]:
        """The records of each criterion."""
        return by_criterion(self.records)


def read_document(path: Path) -> RunDocument:
    """The run that ``path``, a results.json, tells of.

    Raises:
        ConfigurationError: there is no such file, it is damaged, or a newer version wrote it.
    """
    require_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    return document_of(content, name=str(path))


def document_of(content: bytes, *, name: str = "results.json") -> RunDocument:
    """The run that the bytes of a results.json tell of; ``name`` stands in messages.

    Raises:
        ConfigurationError: it is damaged, or a newer version wrote it.
    """
    try:
        members = json.loads(content.decode("utf-8"), parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{name} is damaged: it is no whole JSON text") from None
    if not isinstance(members, dict) or members.get("verdict") not in VERDICTS or not _has_rows(members):
        raise ConfigurationError(f"{name} is no results.json of a run: it has no verdict, or no outcomes")
    oldest = members.get("schema", 1)
    version = members.get("schema_version", oldest) if oldest == 1 else oldest
    if not isinstance(version, int) or version > NEWEST or oldest != 1:
        raise ConfigurationError(f"{name} has schema_version {version}; this version of gpucluster reads up to {NEWEST}")
    require_outcomes(members, name)
    try:
        return _document(members, content)
    except (KeyError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigurationError(f"{name} is damaged: {type(error).__name__} {error}") from None


def _no_json(constant: str) -> None:
    raise ValueError(constant)


def _has_rows(members: Mapping[str, Any]) -> bool:
    return isinstance(members.get("criteria"), list) or isinstance(members.get("values"), list)


def _document(members: Mapping[str, Any], content: bytes) -> RunDocument:
    columns = members.get("values")
    records = tuple(_from_columns(columns) if columns else map(_from_row, members["criteria"]))
    return RunDocument(
        facts={name: value for name, value in members.items() if name not in TABLES},
        places=_places(members, records),
        records=records,
        entries=dict(members.get("limits") or {}),
        culprits=tuple(members.get("culprits") or ()),
        content=content,
    )


def _from_row(row: Mapping[str, Any]) -> Record:
    """A row of ``criteria``."""
    limit = None
    if row.get("limit_kind") is not None:
        limit = _limit({"kind": row["limit_kind"], "value": row["limit_value"], "unit": row["unit"]})
    place = row["place"]
    key = (row["criterion"], place["id"] if place is not None else None, row["outcome"])
    return _record(key, value=row["value"], limit=limit, note=row, evidence=row.get("evidence") or {})


def _from_columns(columns: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    """The records of ``values``, where each criterion has a column for everything."""
    for column in columns:
        places = column["place"]
        limit = _limit(column["limit"])
        limits = {name: _limit(other["limit"]) for other in column.get("other_limits", ()) for name in other["places"]}
        notes = {name: note for note in column.get("notes", ()) for name in note["places"]}
        seen = [(one["key"], evidence_values(one, len(places))) for one in column.get("evidence", ())]
        for index, (place, outcome, value) in enumerate(zip(places, column["outcome"], column["value"], strict=True)):
            yield _record(
                (column["criterion"], place, outcome),
                value=value,
                limit=limits.get(place, limit),
                note=notes.get(place, {}),
                evidence={key: found[index] for key, found in seen if found[index] is not None},
            )


def _record(
    key: tuple[str, Any, str], *, value: float | None, limit: Limit | None, note: Mapping[str, Any], evidence: Mapping[str, Any]
) -> Record:
    """The record of a criterion at a place with an outcome; ``note`` has its texts."""
    criterion, place, outcome = key
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome {outcome!r}")
    if not isinstance(evidence, dict) or not isinstance(place, str | None):
        raise TypeError(f"a row of {criterion} is none")
    waiver = note.get("waiver")
    return Record(
        criterion=str(criterion),
        place=place,
        outcome=outcome,
        value=None if value is None else value + 0,  # raises where it is a text
        limit=limit,
        reason=note.get("reason"),
        advisory=bool(note.get("advisory")),
        margin_percent=limit.margin_percent(value) if limit is not None and value is not None else None,
        evidence=evidence,
        waiver=waiver,
        waivable=waiver is not None,
        remark=note.get("remark"),
    )


def _limit(facts: Mapping[str, Any] | None) -> Limit | None:
    if facts is None:
        return None
    if facts["kind"] not in SIGNS:
        raise ValueError(f"limit {facts['kind']!r}")
    return Limit(kind=facts["kind"], value=facts["value"], unit=str(facts["unit"] or ""), basis=facts.get("basis"))


def _places(members: Mapping[str, Any], records: Iterable[Record]) -> dict[str, Place]:
    """Every place that the file names, nodes and GPUs in order."""
    boards = {
        row["place"]: {key: str(text) for key, text in row.items() if key != "place"} for row in members.get("hardware", ())
    }
    listed = [*(members.get("places") or ())]
    listed += [row["place"] for row in members.get("criteria") or () if row.get("place") is not None]
    listed += [one["place"] for one in members.get("culprits") or () if one.get("place") is not None]
    found: dict[str, Place] = {}
    for facts in listed:
        if facts["id"] not in found:
            slot = {"slot": str(facts["slot"])} if facts.get("slot") else {}
            board = {**slot, **boards.get(facts["id"], {})}
            found[facts["id"]] = Place(board=board, **{key: facts.get(key) for key in PLACE_FIELDS})
    for record in records:
        if record.place is not None and record.place not in found:
            found[record.place] = Place(id=record.place, node=_node_of(record.place))
    return dict(sorted(found.items(), key=lambda item: (item[1].node, -1 if item[1].gpu is None else item[1].gpu)))


def _node_of(name: str) -> int:
    match = NODE.match(name.partition("-")[0])
    return int(match[1]) if match is not None else 0
