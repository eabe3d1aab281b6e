"""Bad outcomes grouped by their cause: each cause is shown once, with all that it took along. Pure: records in, text out."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import ERROR, FAILED, MISSING, NOISY, Record
from pytest_gpucluster.text import framed, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.judging.culprits import Culprit
    from pytest_gpucluster.places import Place

SHOWN_CULPRITS = 20
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


def describe_causes(
    culprits: Sequence[Culprit], records: Iterable[Record], places: Mapping[str, Place], *, whole: bool
) -> list[str]:
    """One block for each culprit, then one for each cause that blames nobody; empty if nothing is bad.

    Args:
        culprits: what :func:`culprits.find_culprits` found in ``records``.
        records: all outcomes of the run.
        places: every expected place by id.
        whole: show the whole text of each error, traceback included; the first line otherwise.
    """
    writer = _Writer(places, whole=whole)
    absent = [culprit for culprit in culprits if culprit.is_absent_node]
    present = [culprit for culprit in culprits if not culprit.is_absent_node]
    for culprit in present[:SHOWN_CULPRITS]:
        writer.add_culprit(culprit)
    if len(present) > SHOWN_CULPRITS:
        writer.lines.append(f"and {len(present) - SHOWN_CULPRITS} more culprits, in results.json")
    writer.add_absent(absent)
    blamed = {id(record) for culprit in culprits for record in culprit.records}
    writer.add_others([record for record in records if id(record) not in blamed])
    return [one_line(line) for line in writer.lines]


class _Writer:
    """Collects lines; the text of an error appears once, however many records and places share it."""

    def __init__(self, places: Mapping[str, Place], *, whole: bool) -> None:
        self.lines: list[str] = []
        self._places = places
        self._whole = whole
        self._shown: set[str] = set()

    def add_culprit(self, culprit: Culprit) -> None:
        self.lines.append(f"{culprit.kind}: {self._where(culprit)} ({culprit.confidence} confidence)")
        if culprit.headline is not None:
            self.lines.append(f"  {culprit.headline}")
        measured = [record for record in culprit.records if _is_measured(record)]
        self.lines += [f"  {line}" for line in dict.fromkeys(record.message for record in measured)]
        self._add_texts([record for record in culprit.records if not _is_measured(record)])
        self.lines.append(f"  {_criteria(culprit.criteria)}")
        self.lines.append(f"  next: {culprit.action}")

    def add_absent(self, culprits: Sequence[Culprit]) -> None:
        if not culprits:
            return
        names = _listed([self._name(str(culprit.place)) for culprit in culprits])
        number = sum(len(culprit.records) for culprit in culprits)
        verb = "is" if len(culprits) == 1 else "are"
        self.lines.append(f"node: {names} {verb} absent: {number} expected outcomes are missing with it")
        self.lines.append(f"  {next(iter(record.message for record in culprits[0].records), '')}")
        self.lines.append(f"  next: {culprits[0].action.partition('; then ')[0]}")

    def add_others(self, records: Iterable[Record]) -> None:
        """Add what blames nobody: too close to call, never run, not measured. pytest shows what crashed in a test itself."""
        alike: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            is_open = record.outcome in (*UNMEASURED, NOISY) or (record.outcome == FAILED and record.limit is None)
            if is_open and record.headline is None:
                alike[record.reason or record.outcome].append(record)
        for same in alike.values():
            self.lines.append(f"no culprit: {_criteria(sorted({record.criterion for record in same}))}")
            self._add_texts(same)

    def _add_texts(self, records: Iterable[Record]) -> None:
        causes: set[str] = set()
        for record in records:
            text, cause = record.reason or record.outcome, record.cause
            if text not in self._shown:
                is_whole = self._whole and record.outcome != MISSING and record.headline is None and cause not in causes
                lines = framed(text).split("\n") if is_whole else [record.message]
                self.lines += [f"  {line}" for line in lines]
                self._shown.add(text)
                causes |= {cause} if cause is not None else set()

    def _where(self, culprit: Culprit) -> str:
        if culprit.place is None:
            return _listed([self._name(place) for place in culprit.places])
        place = self._places[culprit.place]
        return f"{place.label}{f', serial {place.serial}' if place.serial else ''}"

    def _name(self, place: str) -> str:
        hostname = self._places[place].hostname
        return f"{place} ({hostname})" if hostname and self._places[place].gpu is None else place


def _is_measured(record: Record) -> bool:
    return record.outcome == FAILED and record.limit is not None


def _criteria(names: Sequence[str]) -> str:
    return f"{len(names)} {'criterion' if len(names) == 1 else 'criteria'}: {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
