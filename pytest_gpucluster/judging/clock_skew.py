"""How far the clock of a host is from those of the others, by what it showed while it was asked. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FEWEST_FOR_MEDIAN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A host's clock as it was shown at some moment between two moments of the asking host's clock, all in seconds."""

    shown_s: float
    asked_s: float
    answered_s: float

    @property
    def offset_s(self) -> float:
        """How far the host's clock is ahead of the asking one, up to :attr:`doubt_s` more or less."""
        return self.shown_s - (self.asked_s + self.answered_s) / 2

    @property
    def doubt_s(self) -> float:
        """Half the time that the question took: when the host looked at its clock is not known better."""
        return max(0.0, self.answered_s - self.asked_s) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How far a clock is from the others, in seconds, and how much of that is not known."""

    skew_s: float
    doubt_s: float

    def is_known(self, limit_s: float) -> bool:
        """Whether the doubt leaves no question which side of the limit the skew is on."""
        return abs(self.skew_s - limit_s) > self.doubt_s

    def is_within(self, limit_s: float) -> bool:
        """Whether the skew is surely within the limit."""
        return self.skew_s < limit_s and self.is_known(limit_s)


def skews(looks: Mapping[str, Look]) -> dict[str, Skew]:
    """The skew of each host: from the median of all, or of two hosts from the other one. A single host has none."""
    offsets = {host: look.offset_s for host, look in looks.items()}
    found = {}
    for host, offset_s in offsets.items():
        others = [other for other in offsets if other != host]
        if not others:
            continue
        beside = list(offsets.values()) if len(offsets) >= FEWEST_FOR_MEDIAN else [offsets[others[0]]]
        doubt_s = looks[host].doubt_s + statistics.median(looks[other].doubt_s for other in others)
        found[host] = Skew(skew_s=abs(offset_s - statistics.median(beside)), doubt_s=doubt_s)
    return found
