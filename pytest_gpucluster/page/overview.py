"""What stands first on the page: the verdict and its reason, what is not proven, and the criteria of the handover. Pure."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.verdict import (
    ACCEPTED,
    ERROR,
    FAILED,
    INCOMPLETE,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    REHEARSED,
    REJECTED,
    SKIPPED,
    WAIVED,
    WITH_WAIVERS,
    Record,
    count_of,
    counted_as,
    is_only_measured,
)
from pytest_gpucluster.page.criteria_view import BAD, GOOD, NOT_RECORDED, OPEN, CriterionView, plain
from pytest_gpucluster.page.document import RunDocument
from pytest_gpucluster.page.drawing import Strip, Value, strip_of
from pytest_gpucluster.page.parts_view import name_of
from pytest_gpucluster.reporting.at_a_glance import HANDOVER
from pytest_gpucluster.reporting.bad_parts import CAUSES
from pytest_gpucluster.reporting.lines import hostlist
from pytest_gpucluster.reporting.table import duration
from pytest_gpucluster.reporting.table_rows import NOTHING, PlaceNames
from pytest_gpucluster.text import counted, first_line, shortlist

TONES, COUNT_TONES = {ACCEPTED: GOOD, REJECTED: BAD}, {PASSED: GOOD, FAILED: BAD, SKIPPED: "none"}
WITHOUT = (ERROR, MISSING, NOISY, NOT_SELECTED)
SHOWN = (PASSED, FAILED, ERROR, MISSING, NOISY, WAIVED, NOT_SELECTED, SKIPPED)
MOST_NAMED, MOST_OBJECTIONS, MOST_REASONS = 12, 2, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """The verdict. ``facts`` are pairs of a caption and what is known, or "not recorded"."""

    word: str
    tone: str
    reason: str
    line: str
    facts: tuple[tuple[str, str], ...]
    counts: tuple[tuple[str, int, str], ...]


class Gap(NamedTuple):
    """Something that the run does not prove: a sentence, and the details."""

    title: str
    text: str
    tone: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A criterion of the handover, with all of its values as a strip. ``outcome``: its own, or why nothing was measured."""

    title: str
    view: CriterionView
    outcome: str
    strip: Strip | None


def banner_of(run: RunDocument) -> Banner:
    """The verdict with everything that says what it is about."""
    counts = Counter(counted_as(record) for record in run.records)
    is_simulated = bool(run.facts.get("simulated"))
    return Banner(
        word=run.word.replace("_", " "),
        tone=OPEN if is_simulated and run.word != REJECTED else TONES.get(run.word, OPEN),
        reason=_reason(run, counts),
        line=str(run.facts.get("verdict_line", run.word)),
        facts=_facts(run),
        counts=tuple((_word(one, counts[one]), counts[one], COUNT_TONES.get(one, OPEN)) for one in SHOWN if counts[one]),
    )


def _word(outcome: str, number: int) -> str:
    return count_of(outcome, number).partition(" ")[2]


def _reason(run: RunDocument, counts: Counter[str]) -> str:
    """Why the verdict is what it is, in one sentence."""
    if not run.records:
        return "Nothing was expected, so nothing was measured."
    simulated = "In a simulated fleet, where no GPU was measured, " if run.facts.get("simulated") else ""
    applied = sum(counts.values()) - counts[SKIPPED]
    parts = [_named(one, run) for one in run.culprits if one.get("place") is not None]
    named = f"; named: {shortlist(parts, most=3)}" if parts else ""
    without = [f"{counts[one]:,} {_word(one, counts[one])}" for one in WITHOUT if counts[one]]
    text = {
        ACCEPTED: f"all that applies passed: {_checks(counts[PASSED])}",
        WITH_WAIVERS: f"{_checks(counts[PASSED])} passed and {counts[WAIVED]:,} failed that somebody answers for",
        REJECTED: f"{counts[FAILED]:,} of {_checks(applied)} failed{named}",
        INCOMPLETE: _open_text(applied, without, named, run),
        REHEARSED: "the tests ran without a GPU, which shows that they work and accepts nothing",
    }[run.word]
    sentence = f"{simulated}{text}."
    return sentence[:1].upper() + sentence[1:]


def _checks(number: int) -> str:
    return f"{number:,} {'check' if number == 1 else 'checks'}"


def _open_text(applied: int, without: Sequence[str], named: str, run: RunDocument) -> str:
    """What has no result, then what forbids an acceptance beside that."""
    counts = [f"of {_checks(applied)}: {', '.join(without)}"] if without else []
    objections = [str(text) for text in run.facts.get("objections") or ()]
    found = [*counts, *objections[:MOST_OBJECTIONS]]
    return f"{'; '.join(found)}{named}" if found else "the verdict line says what is open"


def _named(culprit: Mapping[str, Any], run: RunDocument) -> str:
    """``gpu-node-3 GPU 5``; ``vm (the host is to blame)`` where no part is."""
    name, cause = name_of(run.places[culprit["place"]["id"]]), CAUSES.get(str(culprit["kind"]))
    return name if cause is None else f"{name} ({cause})"


def _facts(run: RunDocument) -> tuple[tuple[str, str], ...]:
    facts = run.facts
    ran = facts.get("run") or {}
    expected = facts.get("expected") or {}
    found_gpus = [place for place in run.places.values() if place.gpu is not None and place.rank is not None]
    found_nodes = {place.node for place in found_gpus}
    environment = facts.get("environment") or {}
    seconds = ran.get("duration_s", (facts.get("timings") or {}).get("total_s"))
    nodes, gpus = expected.get("nodes"), expected.get("gpus_per_node")
    noun = "CPU rank" if any("-cpu" in place.id for place in found_gpus) else "GPU"
    hosts = sorted({place.hostname for place in run.places.values() if place.hostname})
    found = {
        "Cluster": facts.get("cluster"),
        "Hardware": ", ".join(map(str, environment.get("gpus") or ())) or None,
        "Expected": f"{counted(nodes, 'node')} with {counted(gpus, noun)}{' each' * (nodes > 1)}" if nodes and gpus else None,
        "Found": f"{counted(len(found_nodes), 'node')}, {counted(len(found_gpus), noun)}"
        + _short_of(nodes, gpus, len(found_gpus)),
        "Hosts": hostlist(hosts) or None,
        "Started": str(ran.get("started") or "").replace("T", " "),  # a line of a narrow column breaks there
        "Ended": str(ran.get("ended") or ("did not end" if ran else "")).replace("T", " "),
        "Duration": duration(float(seconds)) if isinstance(seconds, (int, float)) else None,
        "Run by": ran.get("user"),
        "Started on": ran.get("host"),
        "Run id": ran.get("id"),
        "Profile and level": f"{facts.get('profile')}, {facts.get('level')}" if facts.get("profile") else None,
        "Limits (SHA-256)": facts.get("limits_sha256") or facts.get("thresholds_sha256"),
        "results.json (SHA-256)": run.digest,
        "Command": shlex.join(map(str, ran.get("command") or ())) or None,
    }
    return tuple((name, str(text) if text else NOT_RECORDED) for name, text in found.items())


def _short_of(nodes: Any, gpus: Any, found: int) -> str:
    if not isinstance(nodes, int) or not isinstance(gpus, int) or found == nodes * gpus:
        return ""
    return f" ({abs(nodes * gpus - found)} {'fewer' if found < nodes * gpus else 'more'} than expected)"


def gaps_of(run: RunDocument) -> tuple[Gap, ...]:
    """Everything that this run does not prove, the gravest first."""
    kinds = (_of_the_mode, _without_result, _not_judged, _other_terms, _selftest, _left_out)
    return tuple(gap for of_kind in kinds for gap in of_kind(run))


def _of_the_mode(run: RunDocument) -> Iterator[Gap]:
    if run.facts.get("simulated"):
        words = "A model of a fleet gave every value. The page shows how a report looks, and says nothing about hardware."
        yield Gap("Simulated", words, BAD, (plain(run.facts["simulated"]),))
    elif run.word == REHEARSED or run.facts.get("profile") == "rehearsal":
        yield Gap("Rehearsal", "A rehearsal runs the tests on a CPU. It asks only that a value is there.", OPEN)
    environment = run.facts.get("environment") or {}
    if environment.get("unfinished"):
        yield Gap("Not ended", "The run had not ended when this was written, or was killed.", BAD)
    if environment.get("rebuilt_from_journal"):
        words = "The report was made from the journal afterwards, and not by the run itself."
        yield Gap("Rebuilt from the journal", words, OPEN)


def _without_result(run: RunDocument) -> Iterator[Gap]:
    """What has no result although it applies, each outcome with its reasons."""
    by_outcome = grouped((counted_as(record), record) for record in run.records)
    for outcome in (one for one in WITHOUT if one in by_outcome):
        open_ = by_outcome[outcome]
        criteria = list(dict.fromkeys(record.criterion for record in open_))
        words = f"{counted(len(open_), 'check')} of {counted(len(criteria), 'criterion', 'criteria')}."
        items = (shortlist(criteria, most=MOST_NAMED), *_reasons(open_))
        yield Gap(_word(outcome, len(open_)).capitalize(), words, OPEN, items)


def _reasons(records: Sequence[Record]) -> list[str]:
    """The reasons, most frequent first, each with its number."""
    counts = Counter(first_line(record.reason) for record in records if record.reason)
    return [f"{number:,} times: {reason}" if number > 1 else reason for reason, number in counts.most_common(6)]


def _not_judged(run: RunDocument) -> Iterator[Gap]:
    unlimited = [name for name, records in run.by_criterion.items() if any(map(is_only_measured, records))]
    if unlimited:
        words = f"{counted(len(unlimited), 'criterion', 'criteria')} measured a value that no number judges: any value passes."
        yield Gap("Without a limit", words, OPEN, (shortlist(unlimited, most=MOST_NAMED),))
    misses = [record for record in run.records if record.advisory]
    if misses:
        words = f"{counted(len(misses), 'value')} missed an advisory limit. An advisory limit rejects nothing."
        yield Gap("Advisory misses", words, OPEN, tuple(_reasons(misses)))
    waived = [record for record in run.records if counted_as(record) == WAIVED]
    if waived:
        items = (f"{one.criterion} at {one.place or 'the cluster'}: {plain(one.waiver)}" for one in waived[:MOST_NAMED])
        words = f"{counted(len(waived), 'failure')} counted as waived: somebody answers for them."
        yield Gap("Waived", words, OPEN, tuple(items))


def _other_terms(run: RunDocument) -> Iterator[Gap]:
    changed, terms, remarks = (tuple(run.facts.get(name) or ()) for name in ("changed_limits", "changed_terms", "remarks"))
    if changed:
        entries = run.facts.get("changed_entries") or {}
        items = tuple(f"{name}: {plain(entries[name]) if name in entries else 'changed'}" for name in changed[:40])
        words = f"{counted(len(changed), 'limit differs', 'limits differ')} from what is packaged."
        yield Gap("Changed limits", words, OPEN, items)
    if terms:
        yield Gap("Changed terms", "The run asked for something else than promised.", OPEN, terms)
    if remarks:
        words = "What a reader of the verdict must know, such as limits that were never tried on this hardware."
        yield Gap("Remarks", words, OPEN, remarks)


def _selftest(run: RunDocument) -> Iterator[Gap]:
    facts = run.facts.get("selftest")
    if not facts:
        yield Gap("No self-test", "No faults were planted, so the run does not show what it would have found.", "none")
        return
    unshown = [f"{one['kind']}: {one['why']}" for one in facts.get("unshown") or ()]
    items = (*map(str, facts.get("remarks") or ()), *map(str, facts.get("objections") or ()), *unshown)
    said = str(facts.get("statement", ""))
    tone = BAD if facts.get("objections") else OPEN if unshown else GOOD
    yield Gap("Self-test", said[:1].upper() + said[1:], tone, items)


def _left_out(run: RunDocument) -> Iterator[Gap]:
    """What does not apply by rule, by its cause."""
    skipped = [record for record in run.records if record.outcome == SKIPPED]
    causes = grouped((first_line(record.reason or "no reason is recorded"), record.criterion) for record in skipped)
    if causes:
        items = [f"{cause}: {shortlist([*dict.fromkeys(names)], most=MOST_NAMED)}" for cause, names in causes.items()]
        if len(items) > MOST_REASONS:  # most name one host of many
            more = counted(len(items) - MOST_REASONS, "other reason")
            items = [*items[:MOST_REASONS], f"{more}, each with its criterion below"]
        yield Gap("Does not apply", f"{counted(len(skipped), 'check')} left out by rule.", "none", tuple(items))


def headlines_of(run: RunDocument, views: Sequence[CriterionView]) -> tuple[Headline, ...]:
    """The criteria of the handover that the run knows, in the handover's order."""
    by_name, by_criterion = {view.row.criterion: view for view in views}, run.by_criterion
    names = PlaceNames(run.places)
    return tuple(
        _headline(title, by_criterion[name], by_name[name], names) for name, title in HANDOVER.items() if name in by_criterion
    )


def _headline(title: str, records: Sequence[Record], view: CriterionView, names: PlaceNames) -> Headline:
    limit = next((record.limit for record in records if record.limit is not None), None)
    values = [
        Value(float(one.value), names.name(one.place), counted_as(one) in (FAILED, WAIVED))
        for one in records
        if one.value is not None and math.isfinite(one.value)
    ]
    asked = f"limit {view.limit.text} {view.unit or NOTHING}"
    label = f"{title}: {counted(len(values), 'value')}, worst {view.worst.text} at {view.row.where}, {asked}"
    return Headline(
        title=title,
        view=view,
        outcome=_absence(records) or view.row.outcome,
        strip=strip_of(values, limit=float(limit.value) if limit is not None else None, label=label),
    )


def _absence(records: Sequence[Record]) -> str:
    """Why nothing was measured, where that is so."""
    if any(record.value is not None for record in records):
        return ""
    first = records[0]
    return first_line(first.reason or "") or ("not selected" if first.outcome == NOT_SELECTED else first.outcome)
