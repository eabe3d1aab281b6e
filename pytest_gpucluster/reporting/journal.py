"""Records as plain data: how the journal and pytest-xdist's reports carry them."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.judging.verdict import PASSED, Record
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

OLD_ADVISORY = "advisory: "


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
