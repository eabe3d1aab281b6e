"""``gpucluster compare A B``: what has changed between two runs, as text, Markdown or a page.

The exit code is 1 where something is worse.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from typing import TYPE_CHECKING

from pytest_gpucluster.commands.compare_parts import gone_lines, moved_lines, new_lines, renamed_lines
from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.machine import read_machine
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.verdict import MISSING, WORDS
from pytest_gpucluster.page.templating import html
from pytest_gpucluster.records.comparison import compare
from pytest_gpucluster.records.matching import label_of
from pytest_gpucluster.records.parts_list import compare_with_order, parts_of, read_parts
from pytest_gpucluster.records.reading import read_results
from pytest_gpucluster.reporting.files import require_writable, write_report
from pytest_gpucluster.reporting.lines import UNLIMITED, folded
from pytest_gpucluster.text import counted, one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from pytest_gpucluster.records.changes import Change
    from pytest_gpucluster.records.comparison import OutcomeChange, RunComparison
    from pytest_gpucluster.records.matching import PartKey

SAME, WORSE, UNKNOWN = 0, 1, 3
MOST = 20
"""So many lines a section has as text and Markdown."""
MOST_ON_PAGE = 1_000
"""So many it has on the page, those beyond :data:`MOST` behind a fold."""
AIM = 0.02
"""The loss of one part that a comparison should find. Where it cannot, its first lines say so."""
FINDABLE = "smallest loss that this comparison can find"
MOST_NAMES = 6
PLACE_IN_REASON = re.compile(r"\([^()\s]+\)$")
RUN_FACTS = ("id", "started", "ended", "host", "user")
MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_{}[]<>()#|!~"})

Section = tuple[str, list[str]]


def main(chosen: argparse.Namespace) -> int:
    """Print what has changed, and write the page where one is wanted; 0 where nothing is worse in B, else 1.

    Raises:
        ConfigurationError: a run cannot be read, the two cannot be compared, or the page cannot be written there.
        OSError: the disk refused the page.
    """
    if chosen.order is not None:
        if chosen.html is not None or chosen.markdown:
            chosen.error("--html and --markdown are for two runs; an order is compared as text")
        return _compare_order(chosen.order, chosen.runs)
    if len(chosen.runs) != 2:
        chosen.error(f"two results directories are required, A and B; given: {len(chosen.runs)}")
    found = compare(*map(read_results, chosen.runs))
    if chosen.html is not None:
        _write_page(chosen.html, found, runs=chosen.runs)
    is_screen = sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))
    width = shutil.get_terminal_size().columns if is_screen else UNLIMITED
    lines = markdown_lines(found) if chosen.markdown else text_lines(found, width=width)
    sys.stdout.write("\n".join(lines) + "\n")
    return WORSE if found.is_worse else SAME


def _write_page(file: Path, found: RunComparison, *, runs: Sequence[Path]) -> None:
    folders = [run if run.is_dir() else run.parent for run in runs]
    records = [folder / name for folder in folders for name in (RESULTS, JOURNAL)]
    if file.exists() and any(file.samefile(one) for one in (*runs, *records) if one.exists()):
        raise ConfigurationError(f"{file} is a record of a run, and is not replaced by a page")
    require_writable(file)
    write_report(file, page_of(found))
    sys.stderr.write(f"page {file}\n")


def _compare_order(order: Path, inventories: Sequence[Path]) -> int:
    """Print what differs from an order, part by part; what could not be decided is never called good."""
    ordered = read_parts(order, is_order=True)
    found = [one for file in inventories for one in read_parts(file, is_order=False)]
    differs = compare_with_order(ordered, found if inventories else parts_of(read_machine()))
    counts = f"{counted(len(differs.wrong), 'difference')}, {len(differs.undecided)} unknown"
    lines = [f"{differs.same} of {len(ordered)} parts as ordered, {counts}"]
    lines += [f"differs: {text}" for text in differs.wrong] + [f"unknown: {text}" for text in differs.undecided]
    sys.stdout.write("\n".join(lines) + "\n")
    return WORSE if differs.wrong else UNKNOWN if differs.undecided else SAME


def text_lines(found: RunComparison, *, width: int = UNLIMITED) -> list[str]:
    """The comparison for a terminal of so many columns."""
    lines = [one_line(conclusion(found)), *(f"  {line}" for line in (*_runs(found), findable(found)))]
    for title, items in (*sections(found), *_details(found)):
        lines += ["", f"{title}:", *(f"  {one_line(item)}" for item in items[:MOST])]
        lines += [f"  ... and {len(items) - MOST} more"] if len(items) > MOST else []
    return [part for line in lines for part in folded(line, width=width)]


def markdown_lines(found: RunComparison) -> list[str]:
    """The same for a page or a ticket. Foreign text is escaped."""
    lines = [f"**{_escaped(conclusion(found))}**", "", *(f"- {_escaped(line)}" for line in (*_runs(found), findable(found)))]
    for title, items in (*sections(found), *_details(found)):
        lines += ["", f"### {title}", "", *(f"- {_escaped(item)}" for item in items[:MOST])]
        lines += [f"- ... and {len(items) - MOST} more"] if len(items) > MOST else []
    return lines


def page_of(found: RunComparison) -> str:
    """The same as one HTML file without a script."""
    return html(
        "compare.html.j2",
        conclusion=conclusion(found),
        tone="bad" if found.is_worse else "good",
        runs=[(name, _facts(run)) for name, run in (("A", found.before), ("B", found.after))],
        sections=[(title.capitalize(), items[:MOST], items[MOST:MOST_ON_PAGE], len(items)) for title, items in sections(found)],
        most=MOST_ON_PAGE,
        findable=findable(found),
        reach=_reach(found),
    )


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader has to know of one run, beside its verdict line."""
    facts = {"verdict": run["verdict_line"], **{name: run.get("run", {}).get(name) for name in RUN_FACTS}}
    facts |= {name: run.get(name) for name in ("profile", "level")}
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def conclusion(found: RunComparison) -> str:
    """The comparison in one line."""
    worse = {
        "the verdict": int(found.verdict_is_worse),
        counted(len(found.worse_outcomes), "outcome"): len(found.worse_outcomes),
        counted(len(found.worse_values), "value"): len(found.worse_values),
        f"{counted(len(found.parts.gone), 'part')} gone": len(found.parts.gone),
    }
    named = [words for words, number in worse.items() if number]
    said = f"worse: {', '.join(named)}" if named else "nothing is worse"
    ids = [(run.get("run") or {}).get("id") for run in (found.before, found.after)]
    same = "; A and B are one and the same run" if ids[0] is not None and ids[0] == ids[1] else ""
    return f"{said}; {counted(found.compared, 'value')} compared{same}"


def sections(found: RunComparison) -> list[Section]:
    """What has changed, by kind; a kind without a change is left out."""
    label = _labels(found)
    parts = found.parts
    known: list[Section] = [
        ("worse outcomes", _worse_outcomes(found, label)),
        ("values lost beyond noise", [_value(one, label) for one in found.worse_values]),
        ("parts that are gone", gone_lines(parts)),
        ("better outcomes", [_outcome(one, label) for one in found.outcomes if not one.is_worse]),
        ("other changes of values", [_value(one, label) for one in found.other_values]),
        ("parts that are new", new_lines(parts)),
        ("hosts with other names", renamed_lines(parts)),
        ("parts that moved", moved_lines(parts)),
        ("limits and environment", [f"{name}: {before} -> {after}" for name, before, after in found.settings]),
        ("judged in A only", list(found.only_before)),
        ("judged in B only", list(found.only_after)),
    ]
    return [(title, items) for title, items in known if items]


def findable(found: RunComparison) -> str:
    """The smallest loss of one part that would be named in 99 of 100 cases, and where it is more than 2 %."""
    if not found.findable:
        return f"{FINDABLE}: none, no rate is in both runs"
    shares = sorted(found.findable.values())
    low, high = (f"{100 * share:.2g}" for share in (shares[0], shares[-1]))
    above = [f"{one_line(name)} ({100 * share:.2g} %)" for name, share in _by_share(found) if share > AIM]
    more = f" and {len(above) - MOST_NAMES} more" if len(above) > MOST_NAMES else ""
    said = f"; more than {100 * AIM:g} % in {', '.join(above[:MOST_NAMES])}{more}" if above else ""
    return f"{FINDABLE}: {low if low == high else f'{low} to {high}'} %{said}"


def _details(found: RunComparison) -> list[Section]:
    return [(f"{FINDABLE}, by rate", _reach(found))] if found.findable else []


def _reach(found: RunComparison) -> list[str]:
    return [f"{name}: {100 * share:.2g} %" for name, share in _by_share(found)]


def _by_share(found: RunComparison) -> list[tuple[str, float]]:
    """The rates, worst first."""
    return sorted(found.findable.items(), key=lambda item: -item[1])


def _runs(found: RunComparison) -> Iterator[str]:
    for name, run in (("A", found.before), ("B", found.after)):
        facts = run.get("run", {})
        when = f"{facts.get('started') or 'no date'}, run {facts.get('id') or 'unknown'}"
        yield f"{name}: {one_line(run['verdict_line'])} ({when})"


def _labels(found: RunComparison) -> Callable[[PartKey], str]:
    known = {**found.parts.places_before, **found.parts.places_after}
    return lambda part: label_of(known.get(part))


def _outcome(one: OutcomeChange, label: Callable[[PartKey], str]) -> str:
    """Criterion and part once, although the reason begins with them; a reason that names another part is whole."""
    where, (head, colon, rest) = label(one.part), one.reason.partition(": ")
    place = PLACE_IN_REASON.search(head) if colon and head.startswith(f"{one.criterion} at ") else None
    is_same = place is not None and place[0] in where
    why = f": {rest if is_same else one.reason}" if one.reason else ""
    return f"{one.criterion} at {where}: {WORDS[one.before]} -> {WORDS[one.after]}{why}"


def _worse_outcomes(found: RunComparison, label: Callable[[PartKey], str]) -> list[str]:
    """A line an outcome; what is missing with a node that did not answer is one line of that node."""
    lines, silent, places = [], found.parts.silent, found.parts.places_after
    lost: dict[PartKey, list[OutcomeChange]] = {}
    for one in found.worse_outcomes:
        if one.after == MISSING and str(places.get(one.part, {}).get("hostname")) in silent:
            lost.setdefault(one.part, []).append(one)
        else:
            lines.append(_outcome(one, label))
    for part, some in lost.items():
        what = some[0].criterion if len(some) == 1 else counted(len(some), "criterion", "criteria")
        lines.append(f"{what} at {label(part)}: {WORDS[some[0].before]} -> {WORDS[MISSING]}: {some[0].reason}")
    return lines


def _value(one: Change, label: Callable[[PartKey], str]) -> str:
    if one.part is None:
        return f"{one.criterion}: {_percent(one.change)} at all parts together, {_numbers((one.before, one.after))} (medians)"
    beside = f"{_percent(one.change)} beside its siblings, {100 * one.allowed:.2g} % may be noise"
    members = counted(len(one.members), "criterion", "criteria")
    numbers = f"over {members}" if one.members else _numbers((one.before, one.after))
    return f"{one.criterion} at {label(one.part)}: {beside}, {numbers}"


def _numbers(values: Sequence[Any]) -> str:
    return " -> ".join(format_number(value) for value in values if value is not None)


def _percent(change: float) -> str:
    """A relative change; above 0 is better."""
    return f"{abs(100 * change):.2f} % {'better' if change > 0 else 'worse'}"


def _escaped(text: str) -> str:
    return one_line(text).translate(MARKDOWN)
