"""``gpucluster compare A B``: what has changed between two runs, as text, Markdown or a page.

The exit code is 1 where something is worse.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.machine import read_machine
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.verdict import WORDS
from pytest_gpucluster.page.document import html
from pytest_gpucluster.records.comparison import OutcomeChange, RunComparison, compare
from pytest_gpucluster.records.matching import Matching, PartKey, label_of
from pytest_gpucluster.records.parts_list import compare_with_order, parts_of, read_parts
from pytest_gpucluster.records.reading import read_results
from pytest_gpucluster.reporting.files import require_unread, require_writable, write_report
from pytest_gpucluster.reporting.lines import UNLIMITED, folded, hostlist, width_of_screen
from pytest_gpucluster.text import counted, one_line, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.records.changes import Change

    Part = Mapping[str, Any]

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
FEW = 4
"""So many parts, or nodes, have a line each."""


def lines_of(places: Sequence[Part], whole: Mapping[int, Sequence[Part]], *, still_there: Collection[str] = ()) -> list[str]:
    """Parts that one run lacks, those of nodes of which all GPUs are concerned together. ``still_there`` are hosts."""
    single = [place for place in places if place["node"] not in whole]
    return [*_single(single), *_whole(whole.values(), still_there=still_there)]


def renamed_lines(parts: Matching) -> list[str]:
    """The hosts that are called otherwise: their GPUs are those of a node of the earlier run."""
    pairs = [*parts.renamed.items()]
    if len(pairs) > FEW:
        return [f"{counted(len(pairs), 'host')}: {hostlist(old for old, _ in pairs)}, now {hostlist(new for _, new in pairs)}"]
    return [f"{old}, now {new}" for old, new in pairs]


def moved_lines(parts: Matching) -> list[str]:
    """The GPUs that are on another host, or elsewhere on the same one."""
    hosts = [(str(old.get("hostname")), str(new.get("hostname"))) for old, new in parts.moved]
    by_way = grouped(((parts.renamed.get(old, old), new), both) for (old, new), both in zip(hosts, parts.moved, strict=True))
    away = [line for way, some in by_way.items() if way[0] != way[1] for line in _away(some, parts)]
    return [*away, *_within([some for way, some in by_way.items() if way[0] == way[1]])]


def _away(some: Sequence[tuple[Part, Part]], parts: Matching) -> list[str]:
    """GPUs that went from one host to another one."""
    old, new = some[0]
    if len(some) == parts.sizes_before[old["node"]] > 1:
        return [f"{old.get('hostname')}: all of its {counted(len(some), 'GPU')}, now in {new.get('hostname')}"]
    return [f"{label_of(old)}, now {label_of(new)}" for old, new in some]


def _within(by_host: Sequence[Sequence[tuple[Part, Part]]]) -> list[str]:
    """GPUs at another address of the same host."""
    if sum(map(len, by_host)) <= FEW:
        return [f"{label_of(new)}: {_address(old, new)}" for some in by_host for old, new in some]
    numbers = grouped((len(some), str(some[0][1].get("hostname"))) for some in by_host)
    of_each = {number: f"{counted(number, 'GPU')}{' of each' if len(hosts) > 1 else ''}" for number, hosts in numbers.items()}
    return [f"{hostlist(hosts)}: {of_each[number]} at another PCI address or slot" for number, hosts in numbers.items()]


def _address(old: Part, new: Part) -> str:
    """What is another one: ``PCI 0000:10:00.0 -> 0000:ff:00.0``."""
    names = {"pci": "PCI", "slot": "slot"}
    others = [(word, old.get(name), new.get(name)) for name, word in names.items() if old.get(name) != new.get(name)]
    return ", ".join(f"{word} {before or 'unknown'} -> {after or 'unknown'}" for word, before, after in others)


def _single(places: Sequence[Part]) -> list[str]:
    """Parts of nodes that are there; of many GPUs the hosts, by which of their GPUs it is."""
    if len(places) <= FEW:
        return [label_of(place) for place in places]
    by_node = grouped((place["node"], place) for place in places if place["gpu"] is not None)
    hosts = grouped(
        (tuple(sorted(place["gpu"] for place in some)), str(some[0].get("hostname") or f"node{node}"))
        for node, some in by_node.items()
    )
    lines = []
    for gpus, names in hosts.items():
        text = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(map(str, gpus[:-1]))} and {gpus[-1]}"
        each = f" of each, {counted(len(gpus) * len(names), 'GPU')}" if len(names) > 1 else ""
        lines.append(f"{hostlist(names)}: {text}{each}")
    return [*(label_of(place) for place in places if place["gpu"] is None), *lines]


def _whole(nodes: Iterable[Sequence[Part]], *, still_there: Collection[str]) -> list[str]:
    """Nodes of which all GPUs are concerned."""
    alike = grouped(((str(gpus[0].get("hostname")) in still_there, len(gpus)), gpus[0]) for gpus in nodes)
    lines = []
    for (is_there, size), some in alike.items():
        if len(some) > FEW:
            names = hostlist(str(one.get("hostname") or f"node{one['node']}") for one in some)
            each = f"{counted(len(some), 'node')} with {counted(size, 'GPU')} each"
            lines.append(f"{names}: all of the {counted(size, 'GPU')} of each" if is_there else f"{names}: {each}")
            continue
        what = f"all of its {counted(size, 'GPU')}" if is_there else f"the node with its {counted(size, 'GPU')}"
        lines += [f"{one.get('hostname') or 'an unknown host'} (node{one['node']}): {what}" for one in some]
    return lines


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
    lines = markdown_lines(found) if chosen.markdown else text_lines(found, width=width_of_screen())
    sys.stdout.write("\n".join(lines) + "\n")
    return WORSE if found.is_worse else SAME


def _write_page(file: Path, found: RunComparison, *, runs: Sequence[Path]) -> None:
    folders = [run if run.is_dir() else run.parent for run in runs]
    records = [folder / name for folder in folders for name in (RESULTS, JOURNAL)]
    require_unread(file, (*runs, *records))
    require_writable(file)
    write_report(file, page_of(found))
    sys.stderr.write(f"page {file}\n")


def _compare_order(order: Path, inventories: Sequence[Path]) -> int:
    """Print what differs from an order, part by part; what could not be decided is never called good."""
    ordered = read_parts(order, is_order=True)
    found = [one for file in inventories for one in read_parts(file, is_order=False)]
    differs = compare_with_order(ordered, found if inventories else parts_of(read_machine()))
    counts = f"{counted(len(differs.wrong), 'difference')}, {len(differs.undecided)} unknown"
    lines = [f"{differs.same} of {counted(len(ordered), 'part')} as ordered, {counts}"]
    lines += [f"differs: {text}" for text in differs.wrong] + [f"unknown: {text}" for text in differs.undecided]
    sys.stdout.write("\n".join(lines) + "\n")
    return WORSE if differs.wrong else UNKNOWN if differs.undecided else SAME


def text_lines(found: RunComparison, *, width: int = UNLIMITED) -> list[str]:
    """The comparison for a terminal of so many columns."""
    head = [one_line(conclusion(found)), *(f"  {line}" for line in (*_runs(found), findable(found)))]
    lines = [*head, *_in_sections(found, lambda title: ["", f"{title}:"], lambda item: f"  {one_line(item)}")]
    return [part for line in lines for part in folded(line, width=width)]


def markdown_lines(found: RunComparison) -> list[str]:
    """The same for a page or a ticket. Foreign text is escaped."""
    head = [f"**{_escaped(conclusion(found))}**", "", *(f"- {_escaped(line)}" for line in (*_runs(found), findable(found)))]
    return [*head, *_in_sections(found, lambda title: ["", f"### {title}", ""], lambda item: f"- {_escaped(item)}")]


def _in_sections(found: RunComparison, head: Callable[[str], list[str]], line: Callable[[str], str]) -> Iterator[str]:
    for title, items in (*sections(found), (f"{FINDABLE}, by rate", _reach(found))):
        more = [f"... and {len(items) - MOST} more"] if len(items) > MOST else []
        yield from (*head(title), *map(line, [*items[:MOST], *more])) if items else ()


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
        ("parts that are gone", lines_of(parts.gone, parts.emptied, still_there=parts.heard)),
        ("better outcomes", [_outcome(one, label) for one in found.outcomes if not one.is_worse]),
        ("other changes of values", [_value(one, label) for one in found.other_values]),
        ("parts that are new", lines_of(parts.new, parts.filled)),
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
    low, high = (f"{100 * of(found.findable.values()):.2g}" for of in (min, max))
    above = [f"{one_line(name)} ({100 * share:.2g} %)" for name, share in found.findable.items() if share > AIM]
    said = f"; more than {100 * AIM:g} % in {shortlist(above, most=MOST_NAMES)}" if above else ""
    return f"{FINDABLE}: {low if low == high else f'{low} to {high}'} %{said}"


def _reach(found: RunComparison) -> list[str]:
    return [f"{name}: {100 * share:.2g} %" for name, share in found.findable.items()]


def _runs(found: RunComparison) -> Iterator[str]:
    for name, run in (("A", found.before), ("B", found.after)):
        facts = run.get("run", {})
        when = f"{facts.get('started') or 'no date'}, run {facts.get('id') or 'unknown'}"
        yield one_line(f"{name}: {run['verdict_line']} ({when})")


def _labels(found: RunComparison) -> Callable[[PartKey], str]:
    known = {**found.parts.places_before, **found.parts.places_after}
    return lambda part: label_of(known.get(part))


def _outcome(one: OutcomeChange, label: Callable[[PartKey], str], what: str | None = None) -> str:
    """Criterion and part once, although the reason begins with them; a reason that names another part is whole."""
    where, (head, colon, rest) = label(one.part), one.reason.partition(": ")
    place = PLACE_IN_REASON.search(head) if colon and head.startswith(f"{one.criterion} at ") else None
    is_same = place is not None and place[0] in where
    why = f": {rest if is_same else one.reason}" if one.reason else ""
    return f"{what or one.criterion} at {where}: {WORDS[one.before]} -> {WORDS[one.after]}{why}"


def _worse_outcomes(found: RunComparison, label: Callable[[PartKey], str]) -> list[str]:
    """A line for all criteria with one reason at one part, such as those that are missing with a node."""
    alike = grouped(((one.part, one.before, one.after, one.reason or one.criterion), one) for one in found.worse_outcomes)
    names = [[one.criterion for one in some] for some in alike.values()]
    whats = [", ".join(some) if len(some) <= FEW else counted(len(some), "criterion", "criteria") for some in names]
    return [_outcome(some[0], label, what) for some, what in zip(alike.values(), whats, strict=True)]


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
