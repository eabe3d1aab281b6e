"""What a journal keeps of each measurement of a soak, and the soak that is read back from it. Plain data; no file is touched.

A round of many GPUs is short in the journal: the value that most places have stands there once, and evidence only where the
value is the worst so far.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from pytest_gpucluster.cluster.soak import CLUSTER, Earlier, Keep, Kept, Seen
from pytest_gpucluster.judging.criterion import Parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.places import Place


class SoakRecord:
    """Makes the facts of each measurement. Remembers what it has said, so as not to say it again."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._places: dict[str, list[str]] = {}
        self._remarks: dict[tuple[str, str], str | None] = {}

    def facts(self, kept: Sequence[Kept]) -> dict[str, Any]:
        """What the measurement that ends now gave at each place that has a value; ``kept`` is of one criterion.

        ``places`` are said where they are others than the last time. ``values`` has those that are not ``usual``.
        """
        first, number = kept[0], max(one.latest_round for one in kept)
        measured = [one for one in kept if one.error is None and one.latest_round == number]
        counts = Counter(one.first_and_last[1] for one in measured)
        usual = counts.most_common(1)[0][0] if counts else None
        facts: dict[str, Any] = {"round": number, "criterion": first.criterion, "keep": first.keep, "usual": usual}
        places = [one.place.id for one in measured]
        if places != self._places.get(first.criterion):
            self._places[first.criterion] = facts["places"] = places
        facts["values"] = {one.place.id: one.first_and_last[1] for one in measured if one.first_and_last[1] != usual}
        details = {one.place.id: self._details(one) for one in measured}
        facts["details"] = {place: one for place, one in details.items() if one}
        return facts

    def _details(self, kept: Kept) -> dict[str, Any]:
        """The evidence where this round is the worst, and the remark where it is another one."""
        found: dict[str, Any] = {}
        if kept.worst is not None and kept.worst_round == kept.latest_round:
            found = {"evidence": dict(kept.worst.evidence), "parts": _parts_facts(kept.worst.parts)}
        key = (kept.criterion, kept.place.id)
        if kept.remark != self._remarks.get(key):
            self._remarks[key] = found["remark"] = kept.remark
        return found


def read_back(
    turns: Iterable[Mapping[str, Any]], *, places: Iterable[Place], num_whole_rounds: int, elapsed_s: float
) -> Earlier:
    """The soak after these measurements, each with the facts that :class:`SoakRecord` made.

    Args:
        turns: in the order in which they were measured.
        places: every GPU and node of this run.
        num_whole_rounds: how many rounds were whole.
        elapsed_s: up to the end of the last whole round.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: these are not such facts.
    """
    by_id = {place.id: place for place in (*places, CLUSTER)}
    kept: dict[tuple[str, str], Kept] = {}
    covered: dict[str, list[str]] = {}
    latest = num_whole_rounds
    for turn in turns:
        key, number = str(turn["criterion"]), int(turn["round"])
        latest = max(latest, number)
        covered[key] = [str(place) for place in turn.get("places", covered.get(key, ()))]
        for place in covered[key]:
            one = kept.setdefault((key, place), Kept(criterion=key, place=by_id[place], keep=_keep_of(turn)))
            one.add(number, _seen(turn, place, by_id))
    return Earlier(round=latest, num_whole_rounds=num_whole_rounds, elapsed_s=elapsed_s, kept=kept)


def _keep_of(turn: Mapping[str, Any]) -> Keep:
    for keep in get_args(Keep):
        if turn["keep"] == keep:
            return keep  # type: ignore[no-any-return]
    raise ValueError(f"no such way to keep values: {turn['keep']}")


def _seen(turn: Mapping[str, Any], place: str, by_id: Mapping[str, Place]) -> Seen:
    """What a measurement showed at a place.

    Raises:
        TypeError: the value is no number.
    """
    value = turn["values"].get(place, turn["usual"])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not the value of a round")
    details = turn["details"].get(place, {})
    return Seen(
        value=value,
        evidence=dict(details.get("evidence", {})),
        remark=details.get("remark"),
        parts=_parts(details.get("parts"), by_id),
    )


def _parts_facts(parts: Parts | None) -> dict[str, Any] | None:
    if parts is None:
        return None
    places = [place.id for place in parts.places]
    return {"kind": parts.kind, "names": list(parts.names), "places": places, "advice": parts.advice}


def _parts(facts: Mapping[str, Any] | None, by_id: Mapping[str, Place]) -> Parts | None:
    if facts is None:
        return None
    places = tuple(by_id[place] for place in facts["places"])
    found = Parts(kind=facts["kind"], names=tuple(map(str, facts["names"])), places=places)
    return replace(found, advice=None if facts["advice"] is None else str(facts["advice"]))
