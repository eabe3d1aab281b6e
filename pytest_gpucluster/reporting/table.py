"""The closing report: a line a subject and the rows that somebody must read; with ``-v`` a row for each criterion.

How the screen of a run ends: the command that measures again, good nodes, nodes to drain, the verdict. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.culprits import HARDWARE, Culprit
from pytest_gpucluster.judging.forecast import clock
from pytest_gpucluster.judging.verdict import (
    BAD,
    ERROR,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    REJECTED,
    SKIPPED,
    WAIVED,
    Record,
    Verdict,
    counted_as,
)
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.columns import by_criterion
from pytest_gpucluster.reporting import table_rows
from pytest_gpucluster.reporting.at_a_glance import HANDOVER, SubjectLine, chosen_rows, measured_texts, subject_lines
from pytest_gpucluster.reporting.lines import (
    EXACT,
    hostlist,
    printed,
    safe,
    shell_command,
    short_names,
    tied,
    width_of,
    wrapped,
)
from pytest_gpucluster.reporting.table_rows import TableRow
from pytest_gpucluster.text import counted, shortlist

STYLES = {
    PASSED: "green",
    SKIPPED: "dim",
    NOT_SELECTED: "dim",
    FAILED: "red",
    ERROR: "red",
    MISSING: "red",
    NOISY: "yellow",
    WAIVED: "yellow",
}
COLUMNS = ("criterion", "unit", "worst", "where", "p1", "median", "limit", "headroom", "outcome")
DROPPED_FIRST = ("p1", "median", "headroom")
DROPPED = (*DROPPED_FIRST, "where", "unit", "limit", "worst")
"""Columns that a narrow screen goes without, the first one first."""
SHORTEST_NAME = 18
"""Columns for a name beside the other cells. Before there are less, a column is dropped."""
TO_THE_RIGHT = ("worst", "p1", "median", "headroom")
OTHERS, ALL_OK = "others", "all ok"
INDENT = "  "
MOST_MORE = 6
"""Names of bad criteria without a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the table is drawn.

    Attributes:
        width: columns of the screen.
        is_rehearsal: values say nothing about the hardware, so no headroom is shown.
        is_whole: every criterion has its own row, also one that does not apply, but none that was not selected.
        noise: the noise that an entry states, 0 to 1, by criterion; it says which values are near their limit.
    """

    width: int
    color: bool = False
    is_rehearsal: bool = False
    is_whole: bool = False
    noise: Mapping[str, float] = field(default_factory=dict)


def criteria_table(
    records: Iterable[Record], places: Mapping[str, Place], *, subjects: Mapping[str, str], layout: Layout
) -> list[str]:
    """The lines about all values: one for each subject, then the rows of what must be read; none about absent nodes.

    Without a known subject every criterion has a row, and so with ``is_whole``, where the rows stand by subject.

    Args:
        records: every outcome of the run.
        places: every expected GPU and node by id.
        subjects: the subject of each criterion, as far as known.
        layout: how it is drawn.
    """
    groups = by_criterion(records)
    names = table_rows.PlaceNames(places)
    absent = table_rows.without_absent_nodes(groups, places)
    left_out = {
        key: one for key, one in table_rows.without_result(groups).items() if one == NOT_SELECTED or not layout.is_whole
    }
    kept = {key: found for key, found in groups.items() if key not in left_out}
    unjudged = Counter({key: len(found) for key, found in absent.items()})
    for key, outcome in left_out.items():
        if outcome != SKIPPED:
            unjudged[key] += sum(record.outcome == MISSING for record in groups[key])
    if layout.is_whole or subjects.keys().isdisjoint(kept):
        rows = [(criterion, table_rows.row_of(criterion, found, names)) for criterion, found in kept.items()]
        lines = _draw(_grouped(rows, subjects, unjudged), layout) if rows else []
    else:
        of_each = {criterion: subjects.get(criterion, OTHERS) for criterion in groups}
        seen = subject_lines(kept, of_each, unjudged=unjudged, is_rehearsal=layout.is_rehearsal)
        every = {key: found for key, found in groups.items() if key in kept or (key in HANDOVER and left_out[key] == MISSING)}
        chosen = chosen_rows(every, names, noise=None if layout.is_rehearsal else layout.noise)
        lines = _at_a_glance(seen, chosen, [] if layout.is_rehearsal else measured_texts(kept), layout)
    reasons = table_rows.summary_lines([groups[key] for key in left_out if not table_rows.is_lost(groups[key], places)])
    not_here = ", ".join(key for key in HANDOVER if left_out.get(key) == SKIPPED)
    more = {SKIPPED: f"; of the handover {not_here}" if not_here else ""}
    left = [line for outcome, words in reasons for line in _texts(words + more.get(outcome, ""), layout, style=STYLES[outcome])]
    return [*lines, *printed(left, width=layout.width, color=layout.color)]


def _at_a_glance(
    seen: Sequence[SubjectLine], chosen: tuple[list[TableRow], list[str]], measured: Sequence[str], layout: Layout
) -> list[str]:
    """The lines of subjects, the chosen rows, what is bad besides, and what nothing judges."""
    columns = max(len(line.subject) for line in seen), max(len(line.state) for line in seen)
    texts = [_subject_text(line, columns, layout) for line in seen]
    rows, more = chosen
    drawn = ["", *_draw(rows, layout)] if rows else []
    below: list[Text] = []
    if more:
        count = counted(len(more), "more bad criterion", "more bad criteria")
        words = f"and {count}: {shortlist(more, most=MOST_MORE)}"
        below += _texts(f"{words}; -v shows all", layout, style=STYLES[FAILED])
    if measured:
        below += _texts(f"measured, not judged: {'; '.join(measured)}", layout)
    above, under = (printed(some, width=layout.width, color=layout.color) for some in (texts, below))
    return [*above, *drawn, *under]


def _texts(words: str, layout: Layout, *, style: str = "") -> list[Text]:
    return [Text(line, style=style) for line in wrapped(words, width=layout.width, indent="")]


def _subject_text(line: SubjectLine, columns: tuple[int, int], layout: Layout) -> Text:
    name, state, numbers = line.text(width=layout.width, columns=columns)
    return Text.assemble((safe(name), "bold"), (safe(state), STYLES.get(line.style, "")), safe(numbers))


def _grouped(rows: Sequence[tuple[str, TableRow]], subjects: Mapping[str, str], unjudged: Iterable[str]) -> list[TableRow]:
    """The rows by subject, in the order of their first row, each group below its subject.

    A subject is good if all of its rows are, and none of its criteria is among ``unjudged``.
    """
    groups = grouped((subjects.get(criterion, OTHERS), row) for criterion, row in rows)
    if [*groups] == [OTHERS]:
        return [*groups[OTHERS]]
    open_ones = {subjects.get(criterion, OTHERS) for criterion in unjudged}
    shown: list[TableRow] = []
    for subject, members in groups.items():
        is_good = subject not in open_ones and all(row.counted_as == PASSED and not row.misses for row in members)
        shown.append(TableRow(criterion=subject, outcome=ALL_OK if is_good else "", is_heading=True))
        shown += [replace(row, criterion=f"{INDENT}{row.criterion}") for row in members]
    return shown


def _draw(rows: Sequence[TableRow], layout: Layout) -> list[str]:
    """The lines of the table, with as many columns as fit. No cell is broken.

    Where too few columns would be left, a long name has a line of its own above the other cells.
    """
    results = [row for row in rows if not row.is_heading]
    empty = {"headroom"} if layout.is_rehearsal else set()
    empty |= {"p1"} if all(row.p1 == table_rows.NOTHING for row in results) else set()
    columns = [name for name in COLUMNS if name not in empty]
    for name in (*DROPPED, None):
        for table in (_table(rows, columns, gap=2), _table(rows, columns, gap=1)):
            if width_of(table) <= layout.width:
                return printed([table], width=layout.width, color=layout.color)
        room = layout.width - width_of(_table(results, columns[1:], gap=1)) - 1
        if not {*DROPPED_FIRST} & {*columns} and (room >= SHORTEST_NAME or name is None):
            break
        columns = [kept for kept in columns if kept != name]
    return _draw_compactly(rows, columns, max(room, SHORTEST_NAME), layout)


def _draw_compactly(rows: Sequence[TableRow], columns: Sequence[str], room: int, layout: Layout) -> list[str]:
    """The lines with one blank between columns. A name of more than ``room`` columns has a line of its own."""
    names = {number: safe(row.criterion) for number, row in enumerate(rows) if not row.is_heading}
    long = {number: name for number, name in names.items() if cell_len(name) > room}
    short = [replace(row, criterion="") if number in long else row for number, row in enumerate(rows)]
    table = _table(short, columns, gap=1)
    heading, *lines = printed([table], width=max(layout.width, width_of(table)), color=layout.color)
    return [heading, *(line for number, found in enumerate(lines) for line in (long.get(number), found) if line is not None)]


def _table(rows: Sequence[TableRow], columns: Sequence[str], *, gap: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap - 1, 0, 1), collapse_padding=gap == 1)
    for name in columns:
        table.add_column(name, justify="right" if name in TO_THE_RIGHT else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, columns))
    return table


def _cells(row: TableRow, columns: Sequence[str]) -> list[Text]:
    """The cells of one row. A bad value and its place have the colour of the outcome, which says so in words too.

    A value beside missing ones is good.
    """
    if row.is_heading:
        known = {"criterion": Text(row.criterion, style="bold"), "outcome": Text(row.outcome, style=STYLES[PASSED])}
        return [known.get(name, Text()) for name in columns]
    style = STYLES[NOISY] if row.misses and row.counted_as == PASSED else STYLES.get(row.counted_as, "")
    is_good = row.counted_as == PASSED or (row.counted_as == MISSING and row.worst != table_rows.NOTHING)
    coloured = ("outcome",) if is_good else ("outcome", "worst", "where")
    return [Text(safe(getattr(row, name)), style=style if name in coloured else "") for name in columns]


MOST_COMMANDS = 4
MOST_GOOD = 6
"""Lines of good nodes."""
MINUTE_S = 60.0
PARTS_OF_TIME = {"startup_s": "start-up", "measuring_s": "measuring", "other_s": "other"}
WIDTH_OF_THE_REST = len("drain: scontrol update 'nodename=' \\")


def again(arguments: Sequence[str], command: Sequence[str], *, width: int, indent: str) -> list[str]:
    """The command that measures just this again, as a shell reads it.

    Args:
        arguments: of pytest, which select what is measured.
        command: the words of the command of this run; empty where it is not known.
        width: columns of the screen.
        indent: stands before the first line.
    """
    start = indent if command else f"{indent}measure again: the same command with "
    return shell_command([*command, *arguments], width=width, indent=start, later=f"{indent}  ")


def good_hosts(records: Iterable[Record], culprits: Iterable[Culprit], places: Mapping[str, Place]) -> list[str]:
    """The hostnames of all nodes at which something passed and nothing points to a fault."""
    measured: set[int] = set()
    bad = {places[name].node for culprit in culprits for name in culprit.places}
    for record in records:
        place = places.get(record.place or "")
        if place is not None and record.outcome == PASSED:
            measured.add(place.node)
        if record.outcome in BAD:
            named = (*record.culprits, *record.among, record.place or "")
            bad |= {places[name].node for name in named if name in places}
    hosts = hosts_by_node(places)
    bad_hosts = {hosts[node] for node in bad if node in hosts}
    return [host for node, host in sorted(hosts.items()) if node in measured - bad and host not in bad_hosts]


def hosts_by_node(places: Mapping[str, Place]) -> dict[int, str]:
    """The hostname of each node that said hello."""
    return {place.node: place.hostname for place in places.values() if place.hostname is not None}


def good_lines(hosts: Sequence[str], places: Mapping[str, Place], *, width: int) -> list[str]:
    """The good nodes as one list of hosts."""
    names = short_names(hosts, among=hosts_by_node(places).values())
    text = hostlist(names) if names else "no node"
    lines = wrapped(text.replace(",", ", "), width=width, indent="good: ", later="      ")
    lines = [line.replace(", ", ",") for line in lines]  # a list that Slurm reads has no blanks
    if len(lines) > MOST_GOOD:
        return [*lines[: MOST_GOOD - 1], f"      ... {counted(len(hosts), 'node')} in all; each is in results.json"]
    return lines


def hosts_to_drain(culprits: Iterable[Culprit], places: Mapping[str, Place]) -> list[str]:
    """The hostnames of nodes with bad hardware or without any answer; software, settings and what is unknown drain nothing."""
    hosts = hosts_by_node(places)
    nodes = {
        places[culprit.place].node
        for culprit in culprits
        if culprit.place is not None
        and culprit.kind in HARDWARE
        and any(counted_as(record) != WAIVED for record in culprit.records)
    }
    names = short_names([hosts[node] for node in sorted(nodes) if node in hosts], among=hosts.values())
    return [name for name in dict.fromkeys(names) if EXACT.match(name)]


def drain_lines(hosts: Sequence[str], reason: str, *, width: int) -> list[str]:
    """Commands for Slurm that take these hosts out of service, as a shell reads them."""
    lines: list[str] = []
    commands = _in_chunks(list(hosts), max(width - WIDTH_OF_THE_REST, 20))
    for some in commands[:MOST_COMMANDS]:
        words = ("scontrol", "update", f"nodename={hostlist(some)}", "state=drain", f"reason={reason}")
        lines += shell_command(words, width=width, indent="drain: ", later="       ")
    more = sum(map(len, commands[MOST_COMMANDS:]))
    return [*lines, *([f"drain: # and {counted(more, 'more node')}, in results.json"] if more else [])]


def _in_chunks(hosts: list[str], longest: int) -> list[list[str]]:
    """The hosts in parts whose lists have at most ``longest`` characters each, where one name is not longer."""
    if len(hosts) <= 1 or len(hostlist(hosts)) <= longest:
        return [hosts] if hosts else []
    middle = len(hosts) // 2
    return [*_in_chunks(hosts[:middle], longest), *_in_chunks(hosts[middle:], longest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What stands around the verdict line.

    Attributes:
        mode: why this run accepts nothing, whatever it measured; None if it may accept.
        timings: seconds by name, as results.json has them.
        folder: the results directory.
        files: the names of the reports in it, and the paths of other reports.
    """

    mode: str | None
    timings: Mapping[str, float]
    folder: str
    files: Sequence[str]


def verdict_block(verdict: Verdict, ending: Ending, *, width: int, quiet: bool) -> list[Text]:
    """A rule, the line that begins with ``verdict``, and what it does not say. pytest's last line, a rule too, ends the block.

    Without a rule if ``quiet``.
    """
    colour = "green" if verdict.is_acceptance else "red" if verdict.word == REJECTED else "yellow"
    rule = [] if quiet else [Text("=" * width, colour)]
    mode = [] if ending.mode is None else [Text(f"  {ending.mode}", "bold yellow")]
    seconds = ending.timings
    parts = ", ".join(f"{words} {tied(duration(seconds[name]))}" for name, words in PARTS_OF_TIME.items())
    files = f"  {', '.join(ending.files)}" if ending.files else ""
    waited = f"; ranks waited {tied(duration(seconds['waited_s']))}" if "waited_s" in seconds else ""
    facts = (f"took {tied(duration(seconds['total_s']))}: {parts}{waited}", f"reports in {ending.folder}{files}")
    lines = [Text(line) for fact in facts for line in wrapped(fact, width=width, indent="  ")]
    return [*rule, Text(f"verdict {verdict.line}", f"bold {colour}"), *mode, *lines]


def duration(seconds: float) -> str:
    """``8.2 s``, or ``3:14`` from a minute on."""
    return f"{seconds:.1f} s" if seconds < MINUTE_S else clock(seconds)
