"""The journal of a run, and how it and pytest-xdist's reports carry a record."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.judging.verdict import PASSED, Record
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD_ADVISORY = "advisory: "


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

    A journal of version 0.1.0 or older has the limit and the advisory remark as text.

    Raises:
        TypeError, KeyError, ValueError: these are not the facts of a record.
    """
    known = {name: facts[name] for name in Record.__slots__ if name in facts}
    limit, reason = facts.get("limit"), facts.get("reason") or ""
    known["culprits"] = tuple(facts["culprits"])
    if isinstance(limit, str):
        known["limit"] = _limit_from_text(limit)
    elif limit is not None:
        known["limit"] = Limit(**limit)
    if "advisory" not in facts and facts["outcome"] == PASSED and reason.startswith(OLD_ADVISORY):
        known.update(advisory=True, reason=reason.removeprefix(OLD_ADVISORY))
    return Record(**known)


def _limit_from_text(text: str) -> Limit:
    """The limit in ``> 700 TFLOPS``."""
    sign, number, unit = text.split(" ", 2)
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    return Limit(kind=kinds[sign], value=int(number) if number.isdecimal() else float(number), unit=unit)
