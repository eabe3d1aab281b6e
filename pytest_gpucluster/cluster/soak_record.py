"""What a journal keeps of each measurement of a soak, and the soak that is read back from it. Plain data; no file is touched.

A round of many GPUs is short in the journal: the value that most places have stands there once, and evidence only where the
value is the worst so far.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

from pytest_gpucluster.cluster.soak import CLUSTER, Earlier, Keep, RoundResult
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.judging.finding import Facts


class SoakRecord:
    """Makes the facts of each measurement. Remembers what it has said, so as not to say it again."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._places: dict[str, list[str]] = {}
        self._remarks: dict[tuple[str, str], str | None] = {}
        self._doubtful: set[tuple[str, str]] = set()

    def facts(self, kept: Sequence[RoundResult]) -> dict[str, Any]:
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

    def _details(self, kept: RoundResult) -> dict[str, Any]:
        """The finding where this round is the worst, what is unknown, and the remark where it is another one."""
        found: dict[str, Any] = {}
        if kept.worst is not None and kept.worst_round == kept.latest_round:
            found = {"finding": _plain(kept.worst)}
        key = (kept.criterion, kept.place.id)
        if kept.unknown and key not in self._doubtful:
            self._doubtful.add(key)
            found["unknown"] = _plain_texts(kept.unknown)
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
    kept: dict[tuple[str, str], RoundResult] = {}
    covered: dict[str, list[str]] = {}
    latest = num_whole_rounds
    for turn in turns:
        key, number = str(turn["criterion"]), int(turn["round"])
        latest = max(latest, number)
        covered[key] = [str(place) for place in turn.get("places", covered.get(key, ()))]
        for place in covered[key]:
            one = kept.setdefault((key, place), RoundResult(criterion=key, place=by_id[place], keep=_keep_of(turn)))
            one.add(number, _found(turn, place, by_id))
            one.unknown = _texts(turn["details"].get(place, {}).get("unknown", ()), by_id) or one.unknown
    return Earlier(round=latest, num_whole_rounds=num_whole_rounds, elapsed_s=elapsed_s, kept=kept)


def _keep_of(turn: Mapping[str, Any]) -> Keep:
    for keep in get_args(Keep):
        if turn["keep"] == keep:
            return keep  # type: ignore[no-any-return]
    raise ValueError(f"no such way to keep values: {turn['keep']}")


def _found(turn: Mapping[str, Any], place: str, by_id: Mapping[str, Place]) -> Finding:
    """What a measurement showed at a place.

    Raises:
        TypeError: the value is no number.
    """
    value = turn["values"].get(place, turn["usual"])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not the value of a round")
    details = turn["details"].get(place, {})
    facts = details.get("finding", {})
    return Finding(
        value=value,
        bad=_texts(facts.get("bad", ()), by_id),
        evidence=dict(facts.get("evidence", {})),
        remark=details.get("remark"),
        kind=facts.get("kind"),
        unknown_kind=facts.get("unknown_kind"),
        advice=facts.get("advice"),
    )


def _plain(finding: Finding) -> dict[str, Any]:
    found = {
        "bad": _plain_texts(finding.bad),
        "evidence": dict(finding.evidence),
        "kind": finding.kind,
        "unknown_kind": finding.unknown_kind,
        "advice": finding.advice,
    }
    return {name: value for name, value in found.items() if value}


def _plain_texts(facts: Facts) -> list[list[Any]]:
    """Texts by subject as rows: whether the subject is a place, its id or name, the texts."""
    return [[isinstance(part, Place), str(part), list(texts)] for part, texts in facts.items()]


def _texts(rows: Iterable[Sequence[Any]], by_id: Mapping[str, Place]) -> Facts:
    return {by_id[name] if is_place else str(name): [str(text) for text in texts] for is_place, name, texts in rows}
