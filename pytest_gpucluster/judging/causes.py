"""Outcomes that share a cause or a remark: each is shown once, with all that it took along. Pure: records in, text out."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import ERROR, MISSING, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHOWN_NAMES = 16
UNMEASURED = (ERROR, MISSING)


def first_seen(records: Iterable[Record]) -> dict[tuple[str, str | None], Record]:
    """By criterion and place, the record that first had the same error: one call failed, and several criteria read it.

    The first one itself is left out, and so is everything whose error no measurement raised.
    """
    firsts: dict[str, Record] = {}
    found: dict[tuple[str, str | None], Record] = {}
    for record in records:
        if record.outcome in UNMEASURED and record.cause is not None and record.reason is not None:
            first = firsts.setdefault(record.reason, record)
            if first is not record:
                found[record.criterion, record.place] = first
    return found


def name_of(record: Record) -> str:
    """The criterion and its place: ``busbw[all_reduce] at node0``."""
    return f"{record.criterion} at {record.place}" if record.place is not None else record.criterion


def describe_remarks(records: Iterable[Record]) -> list[str]:
    """What passed values could not show; one line for each remark, with all criteria and places that have it."""
    alike: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record.remark is not None:
            alike[record.remark].append(name_of(record))
    return [f"remark: {_listed(names)}: {remark}" for remark, names in alike.items()]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
