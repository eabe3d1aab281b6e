"""``gpucluster show``: what a results directory holds, for people, or as CSV for a spreadsheet."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from pytest_gpucluster.commands import criteria
from pytest_gpucluster.commands.info_tables import NOTHING, Shown, number_or_nothing, pairs, print_parts, table_by_heading
from pytest_gpucluster.config.process import collector_off
from pytest_gpucluster.config.run_files import RESULTS
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.verdict import MISSING, OUTCOMES, SEVERITY, SKIPPED, count_of
from pytest_gpucluster.records.matching import NAMES, where_of
from pytest_gpucluster.records.reading import place_of, read_results, rows_of
from pytest_gpucluster.records.spreadsheet import csv_text
from pytest_gpucluster.text import counted, framed, one_line

MOST_PLACES = 40
"""So many good places of a criterion are shown; those that are not good are all shown."""
MOST_REASONS = 12
RIGHT = ("worst", "value", "inside")
SPARE = ("inside", "worst at")
"""Columns that a narrow screen does without."""
GOOD = ("passed", "skipped", "not_selected")
DIGITS = 12


@collector_off()
def main(chosen: argparse.Namespace) -> int:
    """Print a run, one criterion or one place of it, or a criterion as the limits have it; 0 whatever the verdict.

    Raises:
        ConfigurationError: there are no results, or nothing in them is called so.
    """
    name = str(chosen.folder)
    is_alone = chosen.subject is None and not chosen.csv and not (chosen.folder / RESULTS).exists()
    if is_alone and (chosen.limits is not None or criteria.is_criterion(name) or not chosen.folder.exists()):
        return criteria.show(name, limits=chosen.limits)
    document = read_results(chosen.folder)
    rows = list(rows_of(document))
    picked = rows if chosen.subject is None else _picked(rows, chosen.subject)
    if chosen.csv:
        sys.stdout.write(csv_text(document, None if chosen.subject is None else picked))
        return 0
    print_parts(_of_run(document, rows) if chosen.subject is None else _of_subject(document, picked), spare=SPARE)
    return 0


def _picked(rows: Sequence[Mapping[str, Any]], subject: str) -> list[Mapping[str, Any]]:
    """The outcomes of a criterion (``busbw`` for all that are called ``busbw[...]``), or those at a place."""
    names = [*dict.fromkeys(row["criterion"] for row in rows)]
    if keys := criteria.keys_of(subject, names):
        return [row for row in rows if row["criterion"] in keys]
    found = [row for row in rows if row["place"] is not None and subject in map(row["place"].get, NAMES)]
    if found:
        return found
    places = [str(row["place"].get(key)) for key in ("hostname", "id") for row in rows if row["place"] is not None]
    hint = did_you_mean(subject, [*names, *places])
    raise ConfigurationError(f"{subject!r} is no criterion and no place (id, hostname, UUID, serial) of this run.{hint}")


def _of_run(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Shown]:
    by_criterion = grouped((row["criterion"], row) for row in rows)
    summaries = {values["criterion"]: values for values in document.get("values", ())}
    worst_first = sorted(by_criterion.items(), key=lambda item: -_severity(item[1]))
    left_out = [name for name, some in worst_first if all(row["outcome"] == SKIPPED for row in some)]
    lines = [_line_of(name, some, summaries.get(name, {})) for name, some in worst_first if name not in left_out]
    below = [Text(f"does not apply ({len(left_out)}): {one_line(', '.join(left_out))}")] if left_out else []
    below += [] if rows else [Text("no outcome is in these results: nothing was judged in that run")]
    return [
        Text(one_line(document["verdict_line"]), style="bold"),
        Text(""),
        pairs(_head(document)),
        Text(""),
        table_by_heading(lines, right=RIGHT),
        *below,
        Text(""),
        Text("gpucluster show RESULTS CRITERION|PLACE shows each value; --csv writes all of them"),
    ]


def _head(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    run, limits = document.get("run", {}), str(document.get("limits_sha256") or NOTHING)
    shown = {
        "run": f"{run.get('id') or NOTHING}   {run.get('started') or NOTHING} to {run.get('ended') or 'no end'}",
        "where": f"{run.get('user') or NOTHING} on {run.get('host') or NOTHING}; {counted(len(run.get('hosts', ())), 'host')}",
        "command": " ".join(run.get("command", ())) or NOTHING,
        "profile": f"{document.get('profile')}   level {document.get('level')}",
        "limits": f"{limits[:DIGITS]}   changed: {', '.join(document.get('changed_limits', ())) or 'none'}",
    }
    return [(name, one_line(text)) for name, text in shown.items()]


def _line_of(name: str, rows: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> dict[str, str]:
    summary = values.get("summary") or {}
    worst = next((row for row in rows if place_of(row) == summary.get("worst_place") and row["value"] is not None), None)
    where = NOTHING if worst is None else place_of(worst) or "the cluster"
    return {
        "criterion": one_line(name),
        "outcomes": _outcomes(rows),
        "worst": number_or_nothing(summary.get("worst")),
        "limit": _limit((values.get("limit") or {}).get("text")),
        "inside": _percent(summary.get("worst_margin_percent")),
        "worst at": one_line(where),
    }


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> str:
    """``64 passed``; ``1 failed of 64`` where something is not good."""
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    bad = [count_of(outcome, number) for outcome, number in counts.items() if number and outcome not in GOOD]
    if bad:
        return f"{', '.join(bad)} of {len(rows)}"
    return ", ".join(count_of(outcome, number) for outcome, number in counts.items() if number)


def _of_subject(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Shown]:
    names = list(dict.fromkeys(row["criterion"] for row in rows))
    places = list(dict.fromkeys(place_of(row) for row in rows))
    parts: list[Shown] = []
    if len(names) == 1:
        parts += [pairs(_limit_of(document, names[0], rows)), Text("")]
    if len(places) == 1 and rows[0]["place"] is not None:
        parts += [pairs([(key, one_line(str(fact))) for key, fact in rows[0]["place"].items() if fact is not None]), Text("")]
    ranked = sorted(rows, key=lambda row: (row["outcome"] == SKIPPED, -SEVERITY.index(row["outcome"]), _margin(row)))
    good = [row for row in ranked if row["outcome"] in GOOD]
    left = max(0, len(good) - MOST_PLACES) if len(places) > 1 else 0
    shown = [row for row in ranked if row["outcome"] not in GOOD] + good[: len(good) - left]
    same = {"criterion", "limit"} if len(names) == 1 else {"where", "part"} if len(places) == 1 else set()
    lines = [{heading: text for heading, text in _row(row).items() if heading not in same} for row in _by_node(shown)]
    parts.append(table_by_heading(lines, right=RIGHT))
    parts += [Text(f"... and {left} more that are good; --csv writes all")] if left else []
    return [*parts, Text(""), *_reasons(shown)]


def _by_node(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, with one for all GPUs of a node that are missing for one reason: an absent node is one fact."""
    nodes = (((row["place"] or {}).get("node") if row["outcome"] == MISSING else None, row) for row in rows)
    alike = grouped((id(row) if node is None else (row["criterion"], row["reason"], node), row) for node, row in nodes)
    return [some[0] if len(some) == 1 else _of_node(some[0], len(some)) for some in alike.values()]


def _of_node(row: Mapping[str, Any], gpus: int) -> Mapping[str, Any]:
    return {**row, "place": {**row["place"], "id": f"node{row['place']['node']}", "serial": counted(gpus, "GPU")}}


def _reasons(rows: Iterable[Mapping[str, Any]]) -> list[Shown]:
    """Why outcomes are what they are, the worst first; equal reasons once."""
    reasons = list(dict.fromkeys(row["reason"] or row["remark"] for row in rows if row["reason"] or row["remark"]))
    left_out = len(reasons) - MOST_REASONS
    more = [Text(f"... and {counted(left_out, 'more reason')}; --csv writes all")] if left_out > 0 else []
    return [*(Text(framed(reason)) for reason in reasons[:MOST_REASONS]), *more]


def _limit_of(document: Mapping[str, Any], criterion: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    limit = document.get("limits", {}).get(criterion, {})
    known: dict[str, Any] = {"limit": ", ".join(dict.fromkeys(_limit(row["limit"]) for row in rows if row["limit"]))}
    known |= {name: limit.get(name) for name in ("title", "per", "level", "why", "source", "where")}
    known["ids"] = ", ".join(limit.get("ids", ()))
    return [("criterion", one_line(criterion)), *((name, one_line(str(text))) for name, text in known.items() if text)]


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    place = row["place"] or {}
    return {
        "criterion": one_line(row["criterion"]),
        "where": one_line(where_of(place)) if place else "the cluster",
        "part": one_line(str(place.get("serial") or place.get("uuid") or NOTHING)),
        "outcome": count_of(row["outcome"], 1).partition(" ")[2],
        "value": number_or_nothing(row["value"]),
        "limit": _limit(row["limit"]),
        "inside": _percent(row.get("margin_percent")),
    }


def _limit(text: str | None) -> str:
    return NOTHING if text is None else one_line(text.removesuffix(" count"))


def _severity(rows: Iterable[Mapping[str, Any]]) -> int:
    return max((SEVERITY.index(row["outcome"]) for row in rows if row["outcome"] not in GOOD), default=0)


def _margin(row: Mapping[str, Any]) -> float:
    margin: float | None = row.get("margin_percent")
    return float("inf") if margin is None else margin


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.1f} %"
