"""What has changed between two runs: verdict, outcomes, values beyond noise, parts, limits, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging import verdict
from pytest_gpucluster.records.changes import Change, JudgedValue, Pair, find_changes, relative_change, smallest_losses
from pytest_gpucluster.records.columns import number_of
from pytest_gpucluster.records.matching import Matching, PartKey, match
from pytest_gpucluster.records.reading import place_of, rows_of

Row = Mapping[str, Any]
RowKey = tuple[str, PartKey]

BADNESS = {verdict.PASSED: 0, verdict.SKIPPED: 0, verdict.NOISY: 1, verdict.ERROR: 1, verdict.MISSING: 1, verdict.FAILED: 2}
"""How bad an outcome is; what was not selected says nothing."""
VERDICTS = {verdict.ACCEPTED: 0, verdict.REHEARSED: 0, verdict.WITH_WAIVERS: 1, verdict.INCOMPLETE: 2, verdict.REJECTED: 3}
FLOORS = ("above", "min")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeChange:
    """An outcome that became better or worse. ``reason``: the first line of why it is what it is now."""

    criterion: str
    part: PartKey
    before: str
    after: str
    reason: str

    @property
    def is_worse(self) -> bool:
        """Whether it is worse than before."""
        return BADNESS[self.after] > BADNESS[self.before]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """What has changed from ``before`` to ``after``, two results.json.

    Attributes:
        parts: which part of one run is which of the other.
        outcomes: outcomes that are better or worse.
        values: changes of values beyond noise.
        settings: (what, before, after) of limits and environment, in words.
        only_before: criteria that were judged in the earlier run alone.
        only_after: the same for the later run.
        compared: how many values were compared.
        findable: the smallest loss of one part that would be found, as a share, by criterion, the largest first.
    """

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    parts: Matching
    outcomes: tuple[OutcomeChange, ...]
    values: tuple[Change, ...]
    settings: tuple[tuple[str, str, str], ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    compared: int
    findable: Mapping[str, float]

    @property
    def verdict_is_worse(self) -> bool:
        """Whether the verdict is a worse one."""
        return VERDICTS.get(self.after["verdict"], 0) > VERDICTS.get(self.before["verdict"], 0)

    @property
    def worse_values(self) -> list[Change]:
        """Losses beyond noise, the largest first; of all parts together only those that are too large."""
        return sorted((one for one in self.values if is_worse(one)), key=lambda one: one.change)

    @property
    def other_values(self) -> list[Change]:
        """Gains beyond noise, and what all parts have in common."""
        return sorted((one for one in self.values if not is_worse(one)), key=lambda one: one.change)

    @property
    def worse_outcomes(self) -> list[OutcomeChange]:
        """Outcomes that are worse."""
        return [one for one in self.outcomes if one.is_worse]

    @property
    def is_worse(self) -> bool:
        """Whether anything is worse: the verdict, an outcome, a value beyond noise, or a part that is gone."""
        return bool(self.verdict_is_worse or self.worse_outcomes or self.worse_values or self.parts.gone)


def is_worse(change: Change) -> bool:
    """Whether a change of values counts as worse."""
    return change.change < 0 if change.part is not None else change.change <= -change.allowed


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> RunComparison:
    """Compare two results.json.

    Raises:
        ConfigurationError: they are of different clusters, one was simulated or a rehearsal and the other was not, or no
            criterion was judged in both.
    """
    parts = match(before, after)
    old = {(row["criterion"], parts.before[place_of(row)]): row for row in rows_of(before)}
    new = {(row["criterion"], parts.after[place_of(row)]): row for row in rows_of(after)}
    pairs, criteria = _pairs(old, new, before.get("limits", {}))
    judged = [{row["criterion"] for row in rows.values() if row["outcome"] in BADNESS} for rows in (old, new)]
    if not judged[0] & judged[1]:
        raise ConfigurationError("no criterion was judged in both runs: there is nothing to compare")
    return RunComparison(
        before=before,
        after=after,
        parts=parts,
        outcomes=tuple(_outcomes(old, new)),
        values=tuple(find_changes(pairs, criteria)),
        settings=tuple(_settings(before, after, old, new)),
        only_before=tuple(sorted(judged[0] - judged[1])),
        only_after=tuple(sorted(judged[1] - judged[0])),
        compared=sum(map(len, pairs.values())),
        findable=dict(sorted(smallest_losses(pairs, criteria).items(), key=lambda item: -item[1])),
    )


def _outcomes(old: Mapping[RowKey, Row], new: Mapping[RowKey, Row]) -> Iterator[OutcomeChange]:
    for key, row in old.items():
        before, after = row["outcome"], new.get(key, row)["outcome"]
        if before in BADNESS and after in BADNESS and BADNESS[before] != BADNESS[after]:
            reason = str(new[key].get("reason") or "").partition("\n")[0]
            yield OutcomeChange(criterion=key[0], part=key[1], before=before, after=after, reason=reason)


def _pairs(
    old: Mapping[RowKey, Row], new: Mapping[RowKey, Row], limits: Mapping[str, Any]
) -> tuple[dict[str, list[Pair]], dict[str, JudgedValue]]:
    """The values of both runs by criterion; a value of another unit, or without a direction, has no partner."""
    pairs: dict[str, list[Pair]] = {}
    criteria: dict[str, JudgedValue] = {}
    for key, row in old.items():
        other = new.get(key)
        if other is None or row["unit"] != other["unit"] or not row["unit"] or row["limit_kind"] is None:
            continue
        before, after = number_of(row["value"]), number_of(other["value"])
        if before is None or after is None:
            continue
        noise = limits.get(key[0], {}).get("noise")
        known = criteria.get(key[0]) or JudgedValue(unit=row["unit"], is_floor=row["limit_kind"] in FLOORS, noise=noise)
        change = relative_change(before, after, criterion=known, limit=number_of(row["limit_value"]))
        if change is not None and known.unit == row["unit"]:
            criteria[key[0]] = known
            pairs.setdefault(key[0], []).append(Pair(part=key[1], before=before, after=after, change=change))
    return pairs, criteria


def _settings(
    before: Mapping[str, Any], after: Mapping[str, Any], old: Mapping[RowKey, Row], new: Mapping[RowKey, Row]
) -> Iterator[tuple[str, str, str]]:
    """What else differs: the run, its limits, its software, and what all nodes had in common."""
    for name in ("profile", "level", "expected", "simulated", "changed_terms"):
        if before.get(name) != after.get(name):
            yield name, _text(before.get(name)), _text(after.get(name))
    yield from _limits(before.get("limits", {}), after.get("limits", {}), old, new)
    groups = [{**_flat(run.get("environment", {})), **_usual(rows)} for run, rows in ((before, old), (after, new))]
    for name in dict.fromkeys((*groups[0], *groups[1])):
        if groups[0].get(name) != groups[1].get(name):
            yield name, _text(groups[0].get(name)), _text(groups[1].get(name))


def _limits(
    before: Mapping[str, Any], after: Mapping[str, Any], old: Mapping[RowKey, Row], new: Mapping[RowKey, Row]
) -> Iterator[tuple[str, str, str]]:
    """The criteria whose limit or recipe differs, each once."""
    texts = [{row["criterion"]: row["limit"] for row in rows.values() if row["limit"]} for rows in (old, new)]
    for criterion in sorted(set(texts[0]) & set(texts[1]) | set(before) & set(after)):
        limits = texts[0].get(criterion), texts[1].get(criterion)
        if None not in limits and limits[0] != limits[1]:
            yield f"limit of {criterion}", _text(limits[0]), _text(limits[1])
        elif any(before.get(criterion, {}).get(name) != after.get(criterion, {}).get(name) for name in ("recipe", "numbers")):
            recipes = (before.get(criterion, {}).get("recipe", {}), after.get(criterion, {}).get("recipe", {}))
            yield f"recipe of {criterion}", _text(recipes[0]), _text(recipes[1])


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The environment by name; what is in another mapping has both names."""
    found: dict[str, Any] = {}
    for name, value in environment.items():
        if name in ("rebuilt_from_journal", "unfinished"):
            continue
        found |= {f"{name}: {key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _usual(rows: Mapping[RowKey, Row]) -> dict[str, Any]:
    """What most nodes had in common, as far as the drift over nodes was judged: kernel, driver, firmware."""
    facts = [fact for row in rows.values() for fact in row["evidence"].get("facts", ()) if row["criterion"] == "drift_coverage"]
    return {f"{one['kind']} {one['name']} {one['among']}".strip(): one["usual"] for one in facts}


def _text(value: Any) -> str:
    if value in (None, "", [], {}):
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
