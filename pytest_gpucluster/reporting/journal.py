"""The journal of a run, and how it and pytest-xdist's reports carry a record."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.judging.verdict import OUTCOMES, PASSED, PENDING, Record
from pytest_gpucluster.thresholds.limit import SIGNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ENCODER = json.JSONEncoder(allow_nan=False)
OLD_ADVISORY = "advisory: "
FOUND_AT_END = ("environment", "timings")
"""Members of results.json that the last event repeats, so that a report made of a whole journal is the run's own."""
RESUMED = ("run", "folder", "rounds", "elapsed_s", "away_s")
"""Of a soak that goes on: the run that had begun it, its folder in ``previous/``, its whole rounds, and their seconds."""


class Journal:
    """``journal.jsonl``: one event a line, flushed as it happens, never rewritten."""

    def __init__(self, path: Path, *, copy: Callable[[str], None] = lambda _line: None, keep: int | None = None) -> None:
        """Open the file for appending; ``copy`` is called with every line.

        ``keep``: the bytes of the whole lines of a run that goes on. What a kill left behind them is cut off, and the lines are
        copied too.

        Raises:
            OSError: the file cannot be opened, read or cut.
        """
        if keep is not None:
            for line in path.read_bytes()[:keep].decode("utf-8", "backslashreplace").splitlines(keepends=True):
                copy(line)
            os.truncate(path, keep)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o644), "a", encoding="utf-8")
        self._copy = copy
        self.failed: str | None = None

    def write(self, event: str, **facts: Any) -> None:
        """Append one event. A write that fails is remembered in ``failed`` and does not end the run."""
        line = ENCODER.encode(strict_json({"at_s": round(time.time(), 3), "event": event, **facts})) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.failed = error.strerror or str(error)
        self._copy(line)

    def is_at(self, path: Path) -> bool:
        """Whether what was written lies there: nobody has removed, moved or replaced the file since it was opened."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file. A full disk fails here once more, and ``failed`` says so already."""
        with contextlib.suppress(OSError):
            self._file.close()


USUAL = {field.name: field.default for field in fields(Record) if field.name != "advisory"}
"""What a record is where nothing else is said. Records of version 0.1.0 know no ``advisory``, so that is always said."""


def record_facts(record: Record) -> dict[str, Any]:
    """A record as plain data but for its limit, a dataclass, and its evidence, which may be anything; less what is usual."""
    return {name: fact for name in record.__slots__ if (fact := getattr(record, name)) is not USUAL.get(name, MISSING)}


def record_from_facts(facts: Mapping[str, Any]) -> Record:
    """The record that :func:`record_facts` described, from JSON. Its fields have the types that the class declares.

    Raises:
        TypeError, KeyError, ValueError: these are not the facts of a record.
    """
    try:
        record = msgspec.convert(_of_today(facts), Record)
    except msgspec.ValidationError as wrong:
        raise TypeError(f"not a record: {wrong}") from None
    if record.outcome not in (*OUTCOMES, PENDING):
        raise ValueError(record.outcome)
    return record


def _of_today(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as this version writes them.

    A journal of version 0.1.0 or older has the limit and the advisory remark as text, and ``refused`` where software is to
    blame.
    """
    known = dict(facts)
    limit, reason = known.get("limit"), known.get("reason") or ""
    if known.get("refused"):
        known["blames"] = "software"
    if isinstance(limit, str):
        known["limit"] = _limit_from_text(limit)
    if "advisory" not in known and known["outcome"] == PASSED and reason.startswith(OLD_ADVISORY):
        known.update(advisory=True, reason=reason.removeprefix(OLD_ADVISORY))
    return known


def soak_remark(resumed: Mapping[str, Any]) -> str:
    """What the verdict says of a soak that another run had begun; ``resumed`` has the facts of :data:`RESUMED`."""
    return f"the soak was cut short after {in_words(resumed['elapsed_s'])} and went on {in_words(resumed['away_s'])} later"


def _limit_from_text(text: str) -> dict[str, Any]:
    """The limit in ``> 700 TFLOPS``."""
    sign, number, unit = text.split(" ", 2)
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    return {"kind": kinds[sign], "value": int(number) if number.isdecimal() else float(number), "unit": unit}
