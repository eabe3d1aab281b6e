"""``waivers.yaml``: failures that somebody answers for, each at one part and until one day. Pure but for reading the file.

A waiver names hardware, never a place id: a GPU's UUID or serial number, a node's hostname. Only measured values can be
waived that failed or were too close to call (``Record.waivable``).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pytest_gpucluster.config.schema_errors import FileSection, did_you_mean, listed, shape_problems
from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem, read
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import WAIVED, Record, counted_as, may_be_waived
from pytest_gpucluster.places import Place
from pytest_gpucluster.thresholds.layers import shown
from pytest_gpucluster.thresholds.schema import Form, Text, Words, expecting

NAME = "waivers.yaml"
PLACE_ID = re.compile(r"node\d+(-(gpu|cpu)\d+)?\Z")

WORDS = {
    "used": "waived",
    "unused": "waiver not needed",
    "expired": "waiver has expired, as if absent",
    "ambiguous": "waiver names more than one part, as if absent",
}
State = Literal["used", "unused", "expired", "ambiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiver:
    """One waiver. ``place`` is a UUID, serial number or hostname, None for criteria of the whole cluster."""

    criterion: str
    place: str | None
    until: str
    who: str
    why: str
    where: str

    @property
    def text(self) -> str:
        """The waiver in one line."""
        at = f" at {self.place}" if self.place is not None else ""
        return f"{self.criterion}{at} until {self.until} by {self.who}: {self.why} ({self.where})"

    def covers(self, record: Record, place: Place | None) -> bool:
        """Whether the waiver is for this outcome at this hardware."""
        if record.criterion != self.criterion or not may_be_waived(record):
            return False
        return self.place is None if record.place is None else place is not None and self.names(place)

    def names(self, place: Place) -> bool:
        """Whether the waiver names this GPU by UUID or serial number, or this node by its hostname."""
        names = (place.uuid, place.serial) if place.gpu is not None else (place.hostname,)
        return self.place is not None and self.place in names


class Waivers:
    """The waivers of one run, and which of them were used."""

    def __init__(self, waivers: Sequence[Waiver], *, today: dt.date) -> None:
        """Keep every waiver for the reports; one whose last day is over covers nothing."""
        self._all = tuple(waivers)
        self._valid = [waiver for waiver in waivers if dt.date.fromisoformat(waiver.until) >= today]
        self._used: set[Waiver] = set()
        self._ambiguous: set[Waiver] = set()

    def bind(self, places: Iterable[Place]) -> list[str]:
        """Find the waivers that name more than one part, which cover none; the objections to an acceptance that they are.

        ``places`` are all expected GPUs and nodes, bound to their hardware.
        """
        parts, objections = list(places), []
        for waiver in self._valid:
            named = [place.id if place.gpu is None else place.on_host for place in parts if waiver.names(place)]
            if len(named) > 1:
                self._ambiguous.add(waiver)
                covers = f"covers {'neither' if len(named) == 2 else 'none'}"
                objections.append(f"a waiver for {waiver.criterion} ({waiver.where}) names {' and '.join(named)}, and {covers}")
        self._valid = [waiver for waiver in self._valid if waiver not in self._ambiguous]
        return objections

    def apply(self, record: Record, place: Place | None) -> Record:
        """The record, waived if a valid waiver covers it."""
        waiver = next((waiver for waiver in self._valid if waiver.covers(record, place)), None)
        if waiver is None:
            return record
        self._used.add(waiver)
        return replace(record, waiver=asdict(waiver), reason=f"waived: {waiver.text}\n{record.reason or ''}".rstrip())

    def state(self, waiver: Waiver) -> State:
        """Whether a waiver was used, was not needed, or has expired."""
        if waiver in self._ambiguous:
            return "ambiguous"
        return "used" if waiver in self._used else "unused" if waiver in self._valid else "expired"

    @property
    def facts(self) -> list[dict[str, Any]]:
        """The waivers for results.json, used ones first."""
        rows = [{**asdict(waiver), "state": self.state(waiver)} for waiver in self._all]
        return sorted(rows, key=lambda row: row["state"] != "used")

    @property
    def lines(self) -> list[str]:
        """The waivers for the terminal, used ones first."""
        return lines_of(self.facts)


def lines_of(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line for each waiver of a results.json."""
    return [f"{WORDS[row['state']]}: {Waiver(**{name: row[name] for name in Waiver.__slots__}).text}" for row in facts]


def states_from(facts: Iterable[Mapping[str, Any]], records: Iterable[Record]) -> list[dict[str, Any]]:
    """The waivers of a journal, with their states after its records; used ones first."""
    needed = [dict(record.waiver or {}) for record in records if counted_as(record) == WAIVED]
    rows = [
        {**row, "state": "used"} if {name: row[name] for name in Waiver.__slots__} in needed else dict(row) for row in facts
    ]
    return sorted(rows, key=lambda row: row["state"] != "used")


def find(thresholds: Path | None, start: Path) -> Path | None:
    """Find the run's waivers.yaml, beside its thresholds file or in the folder where the run starts; None if there is none.

    Raises:
        ConfigurationError: both are there, and are not the same file.
    """
    folders = [start] if thresholds is None else [thresholds.absolute().parent, start]
    files = {(folder / NAME).resolve(): folder / NAME for folder in folders if (folder / NAME).exists()}
    if len(files) > 1:
        both = " and ".join(shown(file) for file in files.values())
        raise ConfigurationError(f"two files with waivers: {both}. Keep one of them")
    return next(iter(files.values()), None)


def check(path: Path, *, criteria: Collection[str]) -> tuple[Document, tuple[Problem, ...]]:
    """Read a file of waivers, and find everything that is wrong with it; ``criteria``: the names that the limits have."""
    document = read(path, file=shown(path))
    return document, document.problems or tuple(_check(document, criteria))


def load(path: Path, *, criteria: Collection[str]) -> list[Waiver]:
    """Read and check a file of waivers.

    Raises:
        ConfigurationError: one line per problem, ``file:line`` first.
    """
    document, problems = check(path, criteria=criteria)
    if problems:
        raise ConfigurationError(listed(problems))
    return [
        Waiver(**{"place": None, **row}, where=f"{path.name}:{document.find(('waivers', index)).line}")
        for index, row in enumerate(document.data["waivers"])
    ]


def _a_day(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise ValueError("a day")
    dt.date.fromisoformat(text)
    return text


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    criterion: Text
    place: Text | None = None
    until: Annotated[str, AfterValidator(_a_day), expecting("a day like 2026-12-31")]
    who: Words
    why: Words


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    schema_: Annotated[Form, Field(alias="schema")]
    waivers: list[_Entry]


def _check(document: Document, criteria: Collection[str]) -> Iterator[Problem]:
    try:
        _File.model_validate(document.data)
    except ValidationError as error:
        yield from shape_problems(error.errors(), document, part_of=_part_of)
        return
    for index, row in enumerate(document.data["waivers"]):
        if row["criterion"] not in criteria:
            hint = did_you_mean(row["criterion"], list(criteria))
            yield document.problem(("waivers", index, "criterion"), f"there is no criterion {row['criterion']!r}.{hint}")
        if PLACE_ID.match(row.get("place") or ""):
            message = "a place id may mean another part tomorrow: say the GPU's UUID or serial number, the node's hostname."
            yield document.problem(("waivers", index, "place"), message)


def _part_of(path: KeyPath) -> FileSection:
    if path[:1] == ("waivers",):
        inside = f" (in waiver {int(path[1]) + 1})" if len(path) > 1 else ""
        return FileSection(noun="a waiver", inside=inside, keys=tuple(_Entry.model_fields))
    return FileSection(noun="a file of waivers", inside="", keys=("schema", "waivers"))
