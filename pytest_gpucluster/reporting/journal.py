"""The journal of a run, and how it and pytest-xdist's reports carry a record."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.errors import Part
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.judging.verdict import OUTCOMES, PASSED, PENDING, Record
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD_ADVISORY = "advisory: "
NUMBER, TEXT = (int, float, type(None)), (str, type(None))
TYPES: dict[str, Any] = {
    "criterion": str,
    **dict.fromkeys(("culprits", "among"), tuple),
    "limit": (Limit, type(None)),
    "evidence": Mapping,
    "waiver": (Mapping, type(None)),
    **dict.fromkeys(("place", "reason", "headline", "teardown", "blames", "cause", "remark", "advice"), TEXT),
    **dict.fromkeys(("value", "margin_percent"), NUMBER),
    **dict.fromkeys(("advisory", "confirmed", "waivable", "started"), bool),
}
"""Of the fields of a record that comes from a file."""
RESUMED = ("run", "folder", "rounds", "elapsed_s", "away_s")
"""Of a soak that goes on: the run that had begun it, its folder in ``previous/``, its whole rounds, and their seconds."""


class Journal:
    """``journal.jsonl``: one event a line, flushed as it happens, never rewritten."""

    def __init__(self, path: Path, *, copy: Callable[[str], None] = lambda _line: None) -> None:
        """Open the file for appending; ``copy`` is called with every line."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o644), "a", encoding="utf-8")
        self._copy = copy
        self.failed: str | None = None

    def write(self, event: str, **facts: Any) -> None:
        """Append one event. A write that fails is remembered in ``failed`` and does not end the run."""
        line = json.dumps(strict_json({"at_s": round(time.time(), 3), "event": event, **facts}), allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.failed = error.strerror or str(error)
        self._copy(line)

    def close(self) -> None:
        """Close the file. A full disk fails here once more, and ``failed`` says so already."""
        with contextlib.suppress(OSError):
            self._file.close()


def record_facts(record: Record) -> dict[str, Any]:
    """A record as plain data but for its limit, a dataclass, and its evidence, which may be anything."""
    return {name: getattr(record, name) for name in record.__slots__}


def record_from_facts(facts: dict[str, Any]) -> Record:
    """The record that :func:`record_facts` described, from JSON.

    A journal of version 0.1.0 or older has the limit and the advisory remark as text, and ``refused`` where software is to
    blame.

    Raises:
        TypeError, KeyError, ValueError: these are not the facts of a record.
    """
    known = {name: facts[name] for name in Record.__slots__ if name in facts}
    limit, reason = facts.get("limit"), facts.get("reason") or ""
    known["culprits"], known["among"] = tuple(facts["culprits"]), tuple(facts.get("among", ()))
    if facts.get("refused"):
        known["blames"] = "software"
    if isinstance(limit, str):
        known["limit"] = _limit_from_text(limit)
    elif limit is not None:
        known["limit"] = Limit(**limit)
    if "advisory" not in facts and facts["outcome"] == PASSED and reason.startswith(OLD_ADVISORY):
        known.update(advisory=True, reason=reason.removeprefix(OLD_ADVISORY))
    return Record(**known)


def soak_remark(resumed: Mapping[str, Any]) -> str:
    """What the verdict says of a soak that another run had begun; ``resumed`` has the facts of :data:`RESUMED`."""
    return f"the soak was cut short after {in_words(resumed['elapsed_s'])} and went on {in_words(resumed['away_s'])} later"


def _limit_from_text(text: str) -> Limit:
    """The limit in ``> 700 TFLOPS``."""
    sign, number, unit = text.split(" ", 2)
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    return Limit(kind=kinds[sign], value=int(number) if number.isdecimal() else float(number), unit=unit)


def require_types(record: Record) -> None:
    """Check a record that comes from a file.

    Raises:
        TypeError: a field is not what reports can be made of.
        ValueError: there is no such outcome, or no such part to blame.
    """
    if record.outcome not in (*OUTCOMES, PENDING):
        raise ValueError(record.outcome)
    wrong = [name for name, kinds in TYPES.items() if not isinstance(getattr(record, name), kinds)]
    if wrong:
        raise TypeError(f"not a record: {', '.join(wrong)}")
    if record.blames not in (None, *get_args(Part)):
        raise ValueError(record.blames)
    parts: list[tuple[Any, Any]] = [(culprit, str) for culprit in (*record.culprits, *record.among)]
    if record.limit is not None:
        parts += [(record.limit.value, (int, float)), (record.limit.unit, str)]
    if not all(isinstance(part, kinds) for part, kinds in parts) or (record.limit and record.limit.kind not in SIGNS):
        raise TypeError("not a record: culprits or limit")
    strict_json([record.evidence, record.waiver])
