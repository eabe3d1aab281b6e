"""``results.json`` as data: records, places and facts, of this version and of older ones. What is absent stays absent.

Templates of this folder: HTML that allows nothing but its own style and script, and Markdown in which text stays text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.failure_text import unit_beside
from pytest_gpucluster.judging.verdict import OUTCOMES, Record
from pytest_gpucluster.places import PLACE_FIELDS, Place
from pytest_gpucluster.records.columns import by_criterion
from pytest_gpucluster.records.reading import bytes_of, checked, place_of, rows_of
from pytest_gpucluster.text import one_line, shortlist, visible
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

TABLES = ("criteria", "values", "culprits", "hardware", "places", "limits")
"""Members that become records, places and entries; all others are facts."""


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def word(self) -> str:
        """The verdict in one word."""
        return str(self.facts["verdict"])

    @cached_property
    def by_criterion(self) -> dict[str, list[Record]]:
        """The records of each criterion."""
        return by_criterion(self.records)


def read_document(path: Path) -> RunDocument:
    """The run that ``path``, a results.json, tells of.

    Raises:
        ConfigurationError: there is no such file, it is damaged, or a newer version wrote it.
    """
    return document_of(bytes_of(path), name=str(path))


def document_of(content: bytes, *, name: str = "results.json") -> RunDocument:
    """The run that the bytes of a results.json tell of; ``name`` stands in messages.

    Raises:
        ConfigurationError: it is damaged, or a newer version wrote it.
    """
    members = checked(content, name)
    listed: list[Any] = [] if members.get("values") else members["criteria"]
    try:
        records = tuple(map(_record, rows_of({**members, "criteria": listed})))
        return RunDocument(
            facts={name: value for name, value in members.items() if name not in TABLES},
            places=_places(members),
            records=records,
            entries=dict(members.get("limits") or {}),
            culprits=tuple(members.get("culprits") or ()),
            content=content,
        )
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigurationError(f"{name} is damaged: {type(error).__name__} {error}") from None


def _record(row: Mapping[str, Any]) -> Record:
    """The record of a row of :func:`rows_of`."""
    if row["outcome"] not in OUTCOMES:
        raise ValueError(f"outcome {row['outcome']!r}")
    place = place_of(row)
    if not isinstance(row["evidence"], dict) or not (place is None or isinstance(place, str)):
        raise TypeError(f"a row of {row['criterion']} is none")
    value, waiver = row["value"], row.get("waiver")
    limit = _limit(row["limit_kind"], row["limit_value"], row["unit"]) if row["limit_kind"] is not None else None
    return Record(
        criterion=str(row["criterion"]),
        place=place,
        outcome=row["outcome"],
        value=None if value is None else value + 0,  # raises where it is a text
        limit=limit,
        reason=row.get("reason"),
        advisory=bool(row.get("advisory")),
        margin_percent=limit.margin_percent(value) if limit is not None and value is not None else None,
        evidence=row["evidence"],
        waiver=waiver,
        waivable=waiver is not None,
        remark=row.get("remark"),
    )


@lru_cache(maxsize=1 << 10)
def _limit(kind: Any, value: float, unit: str | None) -> Limit:
    if kind not in SIGNS:
        raise ValueError(f"limit {kind!r}")
    return Limit(kind=kind, value=value, unit=unit or "")


def _places(members: Mapping[str, Any]) -> dict[str, Place]:
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
    return dict(sorted(found.items(), key=lambda item: (item[1].node, -1 if item[1].gpu is None else item[1].gpu)))


TEMPLATES = Path(__file__).with_name("templates")
LONGEST = 12_000
"""Characters of one text on the page. The whole of a longer one is in results.json."""
MOST_CHARACTERS = 500
"""Of one text in a summary."""
IN_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "\\`", "[": "\\[", "@": "@&#8203;"})


def html(template: str, *, script: str | None = None, **view: object) -> str:
    """A page with the one style, and with a script of this folder or none."""
    js = {"js": _asset(script)} if script is not None else {}
    return _template(template).render(**view, **js, css=_asset("style.css"), csp=_policy(script))


def markdown(template: str, **view: object) -> str:
    """A text in Markdown. The filter ``cell`` makes foreign text fit, and ``short`` cuts it too."""
    return _template(template).render(**view)


def cell(text: str) -> str:
    """The text in one line that stays text in Markdown: neither HTML nor a column, link or mention."""
    return one_line(text).translate(IN_MARKDOWN)


def _short(text: str) -> str:
    shown = cell(text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}..."


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(("html.j2",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_fit if name.endswith(".html.j2") else None,
    )
    environment.filters.update(cell=cell, short=_short, shortlist=shortlist)
    environment.globals["beside"] = lambda unit, number: unit_beside(unit, number.text.rpartition(" ")[2])
    return environment.get_template(name)


def _fit(value: object) -> object:
    """Foreign text as a reader sees it: no control characters, none that change the direction of writing, no endless text."""
    if type(value) is not str:
        return value
    if len(value) > LONGEST:
        value = f"{value[: LONGEST // 2]}\n[{len(value) - LONGEST} characters left out]\n{value[-LONGEST // 2 :]}"
    return visible(value)


@cache
def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8").strip()


def _policy(script: str | None) -> str:
    """The content security policy: nothing from anywhere, and of what is inside only our style and our script, if any."""
    allowed = [f"style-src '{_digest('style.css')}'", *([f"script-src '{_digest(script)}'"] if script is not None else [])]
    return "; ".join(("default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"))


def _digest(asset: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_asset(asset).encode()).digest()).decode()}"
