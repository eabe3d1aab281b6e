"""Reads results.json again: of this version, of an older one, and large or small alike.

Which run it was: its id, when, by which command, who, where; and which limits it used, with their digest.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import pwd
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import ACCEPTED, OUTCOMES, PASSED, SKIPPED, VERDICTS, WAIVABLE, WAIVED, WITH_WAIVERS
from pytest_gpucluster.places import PLACE_FIELDS, Place
from pytest_gpucluster.protocol.rank import own_hostname
from pytest_gpucluster.records.columns import unpacked
from pytest_gpucluster.text import shortened
from pytest_gpucluster.thresholds.limit import SIGNS

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.resolve import Threshold


_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""Of a node, or of a GPU in its node: a page draws a cell for each."""


class _Place(msgspec.Struct, kw_only=True):
    """What every reader asks of a place."""

    id: str
    node: _Number
    gpu: _Number | None
    hostname: str | None = None
    uuid: str | None = None
    serial: str | None = None


class _Note(msgspec.Struct, kw_only=True):
    """What is said of some outcomes."""

    reason: str | None = None
    remark: str | None = None
    waiver: dict[str, Any] | None = None


class _Row(_Note, kw_only=True):
    """What every reader asks of an outcome."""

    criterion: str
    outcome: str
    place: _Place | None
    value: float | None
    unit: str | None
    limit: str | None
    limit_kind: str | None
    limit_value: float | None
    evidence: dict[str, Any]


class _Limit(msgspec.Struct, kw_only=True):
    """A limit in words."""

    text: str | None = None


class _Summary(msgspec.Struct, kw_only=True):
    """The worst of the outcomes of a criterion."""

    worst: float | None = None
    worst_margin_percent: float | None = None


class _Named(msgspec.Struct, kw_only=True):
    """A column of evidence."""

    key: str


class _Column(msgspec.Struct, kw_only=True):
    """The outcomes of a criterion."""

    criterion: str
    outcome: list[str]
    unit: str | None = None
    limit: _Limit | None = None
    summary: _Summary | None = None
    place: list[str | None] = []
    value: list[float | None] = []
    margin_percent: list[float | None] = []
    notes: list[_Note] = []
    other_limits: list[dict[str, Any]] = []
    evidence: list[_Named] = []


class _LimitUsed(msgspec.Struct, kw_only=True):
    """What a criterion asked."""

    noise: float | None = None
    ids: list[str] = []
    recipe: dict[str, Any] = {}


class _Run(msgspec.Struct, kw_only=True):
    """Which run it was."""

    started: str | None = None
    command: list[str] = []
    hosts: list[str] = []


class _Environment(msgspec.Struct, kw_only=True):
    """What was there."""

    versions: dict[str, Any] = {}
    variables: dict[str, Any] = {}
    overridden_variables: dict[str, Any] = {}
    gpus: list[Any] = []


class _Culprit(msgspec.Struct, kw_only=True):
    """What every reader asks of a culprit."""

    kind: str
    criteria: list[str]
    place: _Place | None = None
    places: list[str] = []
    evidence: list[str] = []


class _Document(msgspec.Struct, kw_only=True):
    """The members that readers take for granted, with their types."""

    verdict: str
    verdict_line: str
    criteria: list[_Row]
    values: list[_Column] = []
    culprits: list[_Culprit] = []
    places: list[_Place] = []
    profile: str | None = None
    level: str | None = None
    limits_sha256: str | None = None
    run: _Run = msgspec.field(default_factory=_Run)
    environment: _Environment = msgspec.field(default_factory=_Environment)
    expected: dict[str, int] = {}
    limits: dict[str, _LimitUsed] = {}
    changed_limits: list[str] = []
    changed_terms: list[str] = []
    objections: list[str] = []
    remarks: list[str] = []
    waivers: list[dict[str, Any]] = []
    timings: dict[str, Any] = {}


NEWEST = 2
"""The newest ``schema_version`` that this version reads."""
Key = tuple[str, "str | None"]


def read_results(path: Path) -> dict[str, Any]:
    """The document in a results directory, or in a file.

    Raises:
        ConfigurationError: there is none, it is damaged, or a newer version wrote it.
    """
    file = path / RESULTS if path.is_dir() or not path.suffix else path
    if not file.exists():
        raise ConfigurationError(_absent(path))
    content = bytes_of(file)
    again = f"; 'gpucluster report {file.parent}' writes it again" if (file.parent / JOURNAL).is_file() else ""
    return checked(content, str(file), advice=again)


def _absent(path: Path) -> str:
    if not path.exists():
        return f"there is no {path}"
    if (path / JOURNAL).is_file():
        return f"{path} has a journal and no {RESULTS}: the run has not ended; 'gpucluster report {path}' writes {RESULTS}"
    return f"{path} has no {RESULTS}: it is no results directory"


def checked(content: bytes, file: str, *, advice: str = "") -> dict[str, Any]:
    """The members of a results.json, with the types that readers take for granted.

    Args:
        content: the bytes of the file.
        file: its name in messages.
        advice: ends the message about half a file.

    Raises:
        ConfigurationError: it is damaged, another file, or a newer version wrote it.
    """
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise ConfigurationError(f"{file} is damaged: it is not whole JSON{advice}") from None
    if not isinstance(document, dict) or not isinstance(document.get("criteria"), list) or "verdict" not in document:
        raise ConfigurationError(f"{file} holds no results of pytest-gpucluster")
    version = document.get("schema_version", 1)
    if not isinstance(version, int) or isinstance(version, bool):
        raise ConfigurationError(f"{file} has the schema_version {version!r}, which is no number")
    for name, number, newest in (("schema_version", version, NEWEST), ("schema", document.get("schema"), 1)):
        if isinstance(number, int) and number > newest:
            raise ConfigurationError(
                f"{file} has {name} {number}, which is newer than {newest}: read it with the pytest-gpucluster that "
                "wrote it, or a newer one"
            )
    if (schema := document.get("schema")) not in (1, None):
        raise ConfigurationError(f"{file} has the schema {schema!r}, and this program reads 1: another version wrote it")
    typed = with_types(document, file)
    if document["verdict"] not in VERDICTS:
        raise ConfigurationError(f"{file} is damaged: there is no verdict {shortened(document['verdict'])!r}")
    _require_places(typed, file)
    found = {WAIVED if row.outcome in WAIVABLE and row.waiver is not None else row.outcome for row in typed.criteria}
    columns = {outcome for column in typed.values for outcome in column.outcome}  # which know no waiver
    found |= columns.difference(WAIVABLE) if WAIVED in found else columns
    if (contradiction := contradiction_in(typed.verdict, found)) is not None:
        raise ConfigurationError(f"{file} {contradiction}")
    return document


def with_types(document: Mapping[str, Any], file: str) -> _Document:
    """The members that readers take for granted.

    Raises:
        ConfigurationError: one has another type.
    """
    try:
        return msgspec.convert(document, _Document)
    except msgspec.ValidationError as wrong:
        raise ConfigurationError(f"{file} is damaged: {wrong}") from None


def _require_places(typed: _Document, file: str) -> None:
    """Refuse columns with a part that the record does not describe, or with two outcomes of one criterion at one place."""
    described = {place.id for place in (*typed.places, *(row.place for row in typed.criteria)) if place is not None}
    keys = [(column.criterion, place) for column in typed.values for place in column.place]
    foreign = sorted({place for _, place in keys if place is not None} - described)
    if foreign:
        raise ConfigurationError(f"{file} is damaged: it has an outcome of {foreign[0]!r}, which is none of its places")
    if len({*keys}) < len(keys):
        raise ConfigurationError(f"{file} is damaged: one criterion has two outcomes at one place")


def contradiction_in(verdict: str, outcomes: set[str]) -> str | None:
    """Why no run wrote this verdict beside these outcomes, in words that follow a file's name; None if one may have.

    ``outcomes`` are words of :func:`~pytest_gpucluster.judging.verdict.counted_as`.
    """
    good = {ACCEPTED: (PASSED, SKIPPED), WITH_WAIVERS: (PASSED, SKIPPED, WAIVED)}.get(verdict)
    wrong = sorted(outcomes.difference(good or (*OUTCOMES, WAIVED)))
    if wrong or (good and not outcomes):
        holds = f"has an outcome {shortened(wrong[0])!r}" if wrong else "holds no outcome"
        return f"says {verdict} and {holds}: it was damaged or made up"
    return None


def bytes_of(path: Path) -> bytes:
    """The content of a file; a pipe would be waited for without end.

    Raises:
        ConfigurationError: it is a folder, a pipe, a device, or cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"{path} is no file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None


def evidence_values(column: Mapping[str, Any], number: int) -> list[Any]:
    """The values of one column of evidence, one for each of ``number`` places; None where a place has none."""
    if "all" not in column:
        return [unpacked(value) if isinstance(value, dict) else value for value in column["values"]]
    without = set(column.get("without", ()))
    return [None if at in without else unpacked(column["all"]) for at in range(number)]


def rows_of(document: Mapping[str, Any], *, criterion: str | None = None) -> Iterator[dict[str, Any]]:
    """Every outcome as ``criteria`` describes it, in the order of the plan, from the rows or from the columns.

    A row in ``criteria`` comes before the columns. Each row also has ``margin_percent`` and ``operator``.

    Args:
        document: a results.json.
        criterion: the outcomes of this one alone; None: all.

    Raises:
        ConfigurationError: the document contradicts its own shape.
    """
    listed = {_key(row): row for row in document["criteria"] if criterion in (None, row["criterion"])}
    known = {place["id"]: {name: place.get(name) for name in PLACE_FIELDS} for place in document.get("places", ())}
    try:
        for values in document.get("values", ()):
            for row in _rows_of_criterion(values, known) if criterion in (None, values["criterion"]) else ():
                yield {**row, **listed.pop(_key(row), {})} if listed else row
    except (KeyError, TypeError, ValueError, IndexError) as wrong:
        raise ConfigurationError(f"results.json is damaged: {wrong!r}") from None
    for row in listed.values():
        yield {"margin_percent": None, "operator": None, **row}


def _rows_of_criterion(values: Mapping[str, Any], places: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    number = len(values["place"])
    limits = {place: other["limit"] for other in values["other_limits"] for place in other["places"]}
    notes = {place: note for note in values["notes"] for place in note["places"]}
    evidence = [(one["key"], evidence_values(one, number)) for one in values["evidence"]]
    columns = (values["place"], values["outcome"], values["value"], values["margin_percent"], values.get("part", [1] * number))
    alike = _alike(values["limit"] or {}, {})
    others = {place: _alike(limits.get(place, values["limit"]) or {}, notes.get(place, {})) for place in (*limits, *notes)}
    for at, (place, outcome, value, margin, part) in enumerate(zip(*columns, strict=True)):
        yield {
            "criterion": values["criterion"],
            "place": places.get(place, {"id": place}) if place is not None else None,
            "outcome": outcome,
            "value": value,
            **others.get(place, alike),
            "part": part,
            "evidence": {key: column[at] for key, column in evidence if column[at] is not None},
            "margin_percent": margin,
        }


def _alike(limit: Mapping[str, Any], note: Mapping[str, Any]) -> dict[str, Any]:
    """What most places of a criterion have alike."""
    of_limit = {"unit": "unit", "limit": "text", "limit_kind": "kind", "limit_value": "value", "operator": "operator"}
    return {
        **{name: limit.get(key) for name, key in of_limit.items()},
        "advisory": note.get("advisory", False),
        **{name: note.get(name) for name in ("remark", "reason", "waiver")},
    }


def place_of(row: Mapping[str, Any]) -> str | None:
    """The id of the place of an outcome; None for the cluster."""
    return row["place"]["id"] if row["place"] is not None else None


def _key(row: Mapping[str, Any]) -> Key:
    return row["criterion"], place_of(row)


HIDDEN = "***"
NAMES_OF_SECRETS = r"token(?!s)|secret|passw|passphrase|credential|authorization|api[-_]?key"
_SECRET_NAME = re.compile(rf"{NAMES_OF_SECRETS}|(?<![a-z0-9])(key|auth|pwd)(?![a-z0-9])", re.IGNORECASE)
_INSIDE = re.compile(
    rf"(?P<name>--[\w-]*(?:{NAMES_OF_SECRETS})[\w-]*[\s=]+|\w*(?:{NAMES_OF_SECRETS})\w*=)[^\s;&,]+", re.IGNORECASE
)
_OF_A_URL = re.compile(r"(?P<scheme>\w[\w+.-]*://)[^/@\s]+@")
_KNOWN_FORMS = re.compile(
    r"\b(hf_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|sk-|AKIA|nvapi-)[A-Za-z0-9_-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
)


def run_identity(run: str, *, now: dt.datetime | None = None) -> dict[str, Any]:
    """``run`` of results.json as far as it is known when a run begins.

    Args:
        run: the id that its journal has.
        now: when it begins, with a time zone; None: now.
    """
    started = now or dt.datetime.now(tz=dt.timezone.utc).astimezone()
    return {
        "id": run,
        "started": started.isoformat(timespec="milliseconds"),
        "command": without_secrets(sys.orig_argv),
        "user": _user(),
        "host": own_hostname() or None,
    }


def run_facts(run: Mapping[str, Any], places: Iterable[Place], *, last_s: float, has_ended: bool) -> dict[str, Any]:
    """``run`` of results.json at a moment.

    Args:
        run: what :func:`run_identity` made; without a start, as in a journal of an older version, it began at ``last_s``.
        places: the expected GPUs and nodes.
        last_s: when the last thing happened, in seconds since 1970.
        has_ended: whether that was the end of the run.
    """
    started = dt.datetime.fromisoformat(str(run.get("started") or zoned(last_s)))
    last = dt.datetime.fromtimestamp(last_s, tz=started.tzinfo)
    return {
        "id": run.get("id"),
        "started": started.isoformat(timespec="milliseconds"),
        "ended": last.isoformat(timespec="milliseconds") if has_ended else None,
        "duration_s": round(max(0.0, (last - started).total_seconds()), 3),
        "command": list(run.get("command") or ()),
        **{name: run.get(name) for name in ("user", "host")},
        "hosts": list(dict.fromkeys(place.hostname for place in places if place.hostname)),
    }


def zoned(at_s: float) -> str:
    """A moment in seconds since 1970 as ISO 8601 with the offset of this machine's time zone."""
    return dt.datetime.fromtimestamp(at_s, tz=dt.timezone.utc).astimezone().isoformat(timespec="milliseconds")


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with ``***`` in place of what looks like a secret, by its option's name or by its own form."""
    found: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _value = word.partition("=")
        if hide_next and not word.startswith("--"):
            found.append(HIDDEN)
            hide_next = False
            continue
        is_secret = _SECRET_NAME.search(name) is not None
        hide_next = is_secret and not equals and word.startswith("-")
        shown = f"{name}={HIDDEN}" if is_secret and equals else word
        shown = _INSIDE.sub(rf"\g<name>{HIDDEN}", _OF_A_URL.sub(rf"\g<scheme>{HIDDEN}@", shown))
        found.append(_KNOWN_FORMS.sub(HIDDEN, shown))
    return found


def limits_used(criteria: Iterable[Threshold]) -> dict[str, dict[str, Any]]:
    """``limits`` of results.json: what each criterion of the profile asks, and why."""
    return {one.key: _limit_used(one) for one in criteria}


def limits_digest(limits: Mapping[str, Mapping[str, Any]]) -> str:
    """SHA-256 of ``limits`` without the keys ``where``, as JSON with sorted keys and without spaces."""
    kept = {key: {name: value for name, value in facts.items() if name != "where"} for key, facts in limits.items()}
    text = json.dumps(strict_json(kept), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _limit_used(one: Threshold) -> dict[str, Any]:
    return {
        "title": one.criterion,
        **{name: getattr(one, name) for name in ("per", "level", "unit", "kind")},
        "operator": SIGNS[one.kind],
        "numbers": {str(size): number for size, number in one.numbers.items()},
        "shapes": dict(one.by_shape),
        "of": one.of if "of" in one.model_fields_set else None,
        "advisory": one.severity == "advisory",
        **{name: getattr(one, name) for name in ("noise", "why", "source")},
        "where": f"{one.file}:{one.line}",
        "ids": list(one.ids),
        "recipe": dict(one.recipe),
    }


def _user() -> str | None:
    """The account that runs this process; None where the system does not know its name, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER") or None
