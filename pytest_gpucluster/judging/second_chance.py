"""What is measured once more when the rest of a run is over, and what both looks say together. Pure.

Undecided is what was too close to call, and what another process or the host kept from being measured. The second look
decides alone: a disturbance makes a part slower, so the first value says nothing against a healthy part. What the first look
decided stays decided: a failure is never measured again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pytest_gpucluster.judging.failure_text import format_number, unit_beside
from pytest_gpucluster.judging.verdict import ERROR, MISSING, NOISY, PASSED, WORDS, Record
from pytest_gpucluster.text import counted

AGAIN = "measured again at the end"
"""A key of the evidence (true), and the words on the screen. The keys ``first look...`` have what the first look showed."""
SHARE, LEAST_S = 0.5, 60.0
"""All second looks together begin within this share of the planned time of a run, and within so many seconds in any case."""
SHOWN, LONGEST = 6, 160
"""Criteria that are named, and characters of a first reason; all is in results.json."""


def budget_s(planned_s: float) -> float:
    """How many seconds the second looks of a run may use before the last one begins; ``planned_s``: of the whole run."""
    return max(LEAST_S, SHARE * planned_s)


def is_due(record: Record) -> bool:
    """Whether a test with this outcome is measured once more. A waived outcome has somebody who answers for it."""
    is_open = record.outcome == NOISY or (record.outcome == ERROR and record.is_disturbed)
    return is_open and record.waiver is None and record.teardown is None


def with_first_look(second: Record, first: Record) -> Record:
    """The outcome of the second look, with what the first one showed in its evidence and in its text.

    A second look that did not take place (the run was ended, a node was lost) leaves the first outcome.
    """
    if second.outcome == MISSING:
        return replace(first, reason=f"{first.reason}\n  not measured again: {second.message}")
    evidence = {
        **second.evidence,
        AGAIN: True,
        "first look": first.outcome,
        "first look value": first.value,
        "first look reason": first.message,
    }
    seen_first = _short(first) if first.value is None else _value(first)
    shown = f"{AGAIN}: {_value(second)}; first {WORDS[first.outcome]}: {seen_first}"
    if second.outcome == PASSED and not second.advisory:
        shown = f"{AGAIN}; first {WORDS[first.outcome]}: {first.cause}" if _has_cause(first) else shown
        return replace(second, evidence=evidence, remark="; ".join(filter(None, (second.remark, shown))))
    return replace(second, evidence=evidence, reason=f"{second.reason or second.outcome}\n  {shown}")


def in_words(records: Iterable[Record]) -> str:
    """What is measured again, by criterion: ``host_to_device 2, device_to_host``."""
    counts = Counter(record.criterion for record in records)
    shown = [name if number == 1 else f"{name} {number}" for name, number in counts.items()]
    more = [f"and {counted(len(shown) - SHOWN, 'more criterion', 'more criteria')}"] if len(shown) > SHOWN else []
    return ", ".join([*shown[:SHOWN], *more])


def _short(record: Record) -> str:
    """The cause of what software did, or the load of a host, which names no place; else the reason."""
    text = str(record.cause) if _has_cause(record) else record.message
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _has_cause(record: Record) -> bool:
    """Whether one cause disturbed many, so that all of them have one remark."""
    return record.cause is not None and record.blames in ("software", "host")


def _value(record: Record) -> str:
    if record.value is None:
        return WORDS[record.outcome]
    number = format_number(float(record.value))
    return f"{number}{unit_beside(record.unit or '', number)}"
