"""The parts of a run that was gone on with: when each was measured, and on which hardware. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.verdict import MISSING, NOT_SELECTED, PENDING, SKIPPED, Record
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.places import Place

UNMEASURED = (PENDING, MISSING, NOT_SELECTED, SKIPPED)
IDENTITY = {
    "hostname": "hostname",
    "uuid": "UUID",
    "serial": "serial number",
    "pci": "PCI address",
    "boot_id": "boot id",
    "driver": "driver",
    "board": "board",
}
"""By what a part is known to be the same one, and not booted since, with its word for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a run, from its begin to its last outcome; in seconds since 1970."""

    began_s: float
    ended_s: float

    @classmethod
    def until(cls, outcome_s: float, *, began_s: float) -> Part:
        """The part that began then; the last outcome may be of the part before it."""
        return cls(began_s=began_s, ended_s=max(began_s, outcome_s))


class RunParts:
    """The parts of a run that is measured now, as its recorder counts them."""

    def __init__(self) -> None:
        """It is a whole run, unless ``earlier`` has the parts before it."""
        self.earlier: tuple[Part, ...] = ()
        self._began_s = self._outcome_s = 0.0

    @property
    def number(self) -> int:
        """Which part this is, from 1."""
        return 1 + len(self.earlier)

    def begin(self) -> float:
        """This part begins; the time, as the journal has it."""
        self._began_s = _now_s()
        return self._began_s

    def outcome(self) -> float:
        """There is an outcome; the time, as the journal has it."""
        self._outcome_s = _now_s()
        return self._outcome_s

    def facts(self, records: Iterable[Record]) -> list[dict[str, Any]]:
        """When each part was measured, as results.json has it; empty for a run of one part."""
        return parts_facts((*self.earlier, Part.until(self._outcome_s, began_s=self._began_s)), records)


def _now_s() -> float:
    return round(time.time(), 3)


def parts_facts(parts: Sequence[Part], records: Iterable[Record]) -> list[dict[str, Any]]:
    """When each part was measured and how many outcomes stand from it, as results.json has it; empty for one part."""
    if len(parts) < 2:
        return []
    counts = Counter(record.part for record in records if record.outcome not in UNMEASURED)
    return [
        {"part": number, "began": utc(one.began_s), "ended": utc(one.ended_s), "outcomes": counts[number]}
        for number, one in enumerate(parts, start=1)
    ]


def parts_remarks(facts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the verdict says of the parts; ``facts`` are those of :func:`parts_facts`."""
    if not facts:
        return ()
    each = [f"part {number} {words}" for number, words in enumerate(words_of_parts({"parts": facts}), start=1)]
    return (f"measured in {counted(len(facts), 'part')}: {', '.join(each)}",)


def words_of_parts(facts: Mapping[str, Any]) -> list[str]:
    """When each part was measured and how many outcomes stand from it; ``facts`` are the members of results.json."""
    return [f"from {one['began']} to {one['ended']} ({counted(one['outcomes'], 'outcome')})" for one in facts.get("parts", ())]


def utc(at_s: float) -> str:
    """A moment in seconds since 1970 as ``2026-11-26T18:22:05Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def is_known(place: Place | None) -> bool:
    """Whether something has answered at this place, so that another part in its place can be told from it."""
    return place is not None and bool(place.uuid or place.serial or place.boot_id)


def last_known(before: Place | None, now: Place) -> Place:
    """The place as it is bound now; where nothing answers now, what answered there before, so that it stays known."""
    return replace(before, rank=None) if before is not None and is_known(before) and not is_known(now) else now


def why_other_parts(before: Mapping[str, Place], now: Mapping[str, Place]) -> str | None:
    """The first part that is not the one that was measured before, with the difference; None if all are the same.

    A place at which nothing answered in one of the two has no difference. Nodes are counted by the names of their hosts: a new
    host, which may have given others another number, comes first.
    """
    hosts, hosts_now = ({place.hostname for place in places.values() if place.hostname} for places in (before, now))
    gone = ", ".join(sorted(map(str, hosts - hosts_now)))
    for name, place in sorted(now.items(), key=lambda item: item[1].hostname in hosts):
        older = before.get(name)
        if older is None or not (is_known(older) or older.gpu is None):
            continue
        for field, word in IDENTITY.items():
            was, is_now = getattr(older, field), getattr(place, field)
            was = gone or was if field == "hostname" and is_now not in hosts else was
            is_absent = is_now is None if place.gpu is None else not is_known(place)
            if was != is_now and not is_absent and (was is not None or place.gpu is not None):
                return f"{place.on_host} has another {word}: it was {_words(was)}, and is {_words(is_now)}"
    return None


def _words(value: Any) -> str:
    if value is None:
        return "unknown"
    return ", ".join(f"{name} {one}" for name, one in value.items()) or "unknown" if hasattr(value, "items") else str(value)
