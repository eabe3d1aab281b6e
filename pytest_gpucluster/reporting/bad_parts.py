"""What is bad, grouped by part, as lines of the screen: each failure once, its cause, and what to do next. Pure."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.culprits import HARDWARE, Culprit, describe_remarks, find_culprits
from pytest_gpucluster.judging.failure_text import format_miss, format_number, show_evidence, unit_beside
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.judging.selection import ONLY, Selector, identity_of
from pytest_gpucluster.judging.verdict import FAILED, MISSING, PASSED, UNMEASURED, WAIVED, WORDS, Record, counted_as
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.columns import by_criterion
from pytest_gpucluster.reporting import table
from pytest_gpucluster.reporting.at_a_glance import MOST_ROWS_OF_A_CAUSE, GoodPeers, rows_beside, sentence_of
from pytest_gpucluster.reporting.lines import CONTINUED, cut, cut_list, folded, names_of_absent, quoted, tied, wrapped
from pytest_gpucluster.reporting.table_rows import allows_nothing, missing_reasons, value_cells
from pytest_gpucluster.text import BAR, counted, first_line, framed, one_line, shortlist

MOST_LINES = 48
MOST_DETAILED = 6
"""More parts have a line of findings each, and no command; where that does not fit either, one line."""
MOST_PARTS = 20
MOST_ADVISORY, MOST_REMARKS = 10, 10
SHOWN_CAUSES = 3
"""Criteria of a shared cause whose findings are shown, at one place each."""
MOST_CRITERIA = 16
"""Of one part, with a line each."""
WIDEST_NAME = 32
LEAST_ROOM = 30
"""Columns for what is bad, and between the columns; with less there are none."""
INDENT_OF_COMMAND = len("        ") + len(CONTINUED)
NAME_COLUMN = 25
"""A longer name of a criterion moves its own line only."""
NO_CULPRIT = "no culprit"
CHECK, NUMBER_OF_CHECKS = "finetune_check[", "finetune_checks"
"""The second one says how many of the first failed, so it is no failure besides them."""
CAUSES: Mapping[str, str] = {
    "software": "software is to blame",
    "settings": "a setting is to blame",
    "host": "the host is to blame",
    "unknown": "the cause is not known",
}
"""What is to blame where no part is, which is counted apart from bad parts."""
BOARD = {"part_number": "part", "module": "module", "chassis_serial": "chassis", "slot": "slot", "tray": "tray"}
"""What of a GPU's board whoever replaces it has to know, each with its word."""
REASONS = {
    "hw_thermal_slowdown": "heat throttles it: look at its cooling",
    "sw_thermal_slowdown": "heat throttles it: look at its cooling",
    "hw_power_brake_slowdown": "the power supply of the node holds it back",
    "sw_power_cap": "its power cap holds it back: compare the cap with that of its siblings",
}
"""What an event reason means that a bad GPU reports and no sibling that passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the lines depend on besides the records.

    Attributes:
        places: every expected GPU and node by id.
        tests: the tests of the run.
        device: ``cuda``, or ``cpu`` in a rehearsal.
        width: columns of the screen.
        whole: show the whole text of an error; its first line otherwise.
        is_whole: each value that misses its limit has a row, also where one sentence says it.
        command: the words of the command of this run; empty where it is not known.
        report: where the reports lie.
        drain_reason: what Slurm shows as the reason; None where no real GPU was measured.
    """

    places: Mapping[str, Place]
    tests: Selector
    device: str
    width: int
    whole: bool = True
    is_whole: bool = False
    command: tuple[str, ...] = ()
    report: str = "results.json"
    drain_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadGroup:
    """What is shown together: a part, absent nodes, a cause that several places share, or what blames nobody."""

    name: str
    where: tuple[str, ...]
    records: tuple[Record, ...]
    headline: str | None = None
    advice: str | None = None
    keys: tuple[Key, ...] = ()
    part: Place | None = None
    is_absent: bool = False

    @property
    def is_waived(self) -> bool:
        """Whether somebody answers for all of it."""
        return all(counted_as(record) == WAIVED for record in self.records)


def describe_bad_parts(records: Iterable[Record], shown: Shown) -> list[Text]:
    """All lines of the block, at most 48 rows of the screen; none if nothing is bad. What does not fit is counted."""
    rows = list(records)
    culprits = find_culprits(rows, shown.places)
    said = frozenset[str]() if shown.is_whole else missing_reasons(by_criterion(rows))
    entries = [*_blamed(culprits, shown.places), *_unblamed(culprits, rows, said, shown.places)]
    if not entries:
        return []
    counts = wrapped(f"BAD PARTS  {_counts(culprits, shown)}", width=shown.width, indent="")
    head = [Text(""), *(Text(line, "bold red") for line in counts)]
    tail = _tail(rows, culprits, shown)
    room = MOST_LINES - len(head) - len(tail)
    writer = _Writer(rows, shown)
    are_few = sum(culprit.place is not None and not culprit.is_absent_node for culprit in culprits) <= MOST_DETAILED
    forms = ((shown.whole, shown.command), (False, shown.command), (False, ())) if are_few else ()
    detailed = (writer.detailed(entries, whole=whole, command=command) for whole, command in forms)
    short = (writer.in_short(found) for found in [entries] if 2 * len(found) <= room)
    for body in itertools.chain(detailed, short):
        if sum(max(1, -(-len(line.plain) // shown.width)) for line in body) <= room:
            return [*head, *body, *tail]
    return [*head, *writer.brief(entries), *tail]


def advisory_lines(records: Iterable[Record], places: Mapping[str, Place], *, width: int) -> list[str]:
    """A line for each advisory limit that was missed, at most 10: where, the value, what was found; no raw data.

    What a part misses by itself that BAD PARTS shows with its evidence has one line, with values alone.
    """
    rows = list(records)
    missed = [record for record in rows if record.advisory]
    bad = {record.culprits for record in rows if record.outcome == FAILED}
    texts = grouped(_advisory(record, places, bad, width) for record in missed[:MOST_ADVISORY])
    shown = [f"advisory: {start}{'; '.join(values)}" for start, values in texts.items()]
    lines = [line for text in shown for line in wrapped(text, width=width, indent="")]
    more = len(missed) - MOST_ADVISORY
    return [*lines, *([f"and {more} more advisory misses, in results.json"] if more > 0 else [])]


def _advisory(record: Record, places: Mapping[str, Place], bad: Container[tuple[str, ...]], width: int) -> tuple[str, str]:
    """How the line of an advisory miss starts, and what stands there of it. ``bad``: the culprits of what failed."""
    limit, value, name = record.limit, record.value, record.place or ""
    if limit and value is not None and not allows_nothing(limit) and record.culprits == (name,) and record.culprits in bad:
        return f"{places[name].on_host} ({name}): ", f"{record.criterion} {format_miss(limit, value)}"
    found = {name: value for name, value in record.evidence.items() if not isinstance(value, dict)}
    text = first_line(record.reason or record.outcome).replace(" count", "")
    return (f"{text}; ", cut_list(show_evidence(found), width)) if found else (text, "")


def remark_lines(records: Iterable[Record], *, width: int, is_whole: bool) -> list[str]:
    """What passed values could not show, wrapped: 10 remarks at most, or with ``is_whole`` all."""
    every = describe_remarks(records)
    shown = every if is_whole else every[:MOST_REMARKS]
    more = len(every) - len(shown)
    lines = [line for text in shown for line in wrapped(text, width=width, indent="")]
    return [*lines, *([f"and {counted(more, 'more remark')}, in results.json"] if more else [])]


def _counts(culprits: Sequence[Culprit], shown: Shown) -> str:
    """``3 of 512 GPUs, 1 of 64 nodes, 1 node absent``, then what is no fault of a part."""
    places, noun = shown.places, "GPU" if shown.device == "cuda" else "rank"
    gpus = sum(place.gpu is not None for place in places.values())
    kinds: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for culprit in culprits:
        if culprit.place is None:
            kinds["shared"] += 1
        elif culprit.is_absent_node:
            kinds["absent"] += 1
        elif culprit.kind in HARDWARE:
            kinds["gpu" if places[culprit.place].gpu is not None else "node"] += 1
        else:
            causes[culprit.kind] += 1
    found = [f"{kinds['gpu']} of {counted(gpus, noun)}"] if kinds["gpu"] else []
    found += [f"{kinds['node']} of {counted(len(places) - gpus, 'node')}"] if kinds["node"] else []
    found += [f"{counted(kinds['absent'], 'node')} absent"] if kinds["absent"] else []
    found += [f"{counted(kinds['shared'], 'cause')} that several places share"] if kinds["shared"] else []
    others = [f"{CAUSES[kind]} at {counted(number, 'place')}" for kind, number in causes.items()]
    return "; ".join(filter(None, [", ".join(found) or ("0" if others else "none is named"), *others]))


def _tail(rows: Sequence[Record], culprits: Sequence[Culprit], shown: Shown) -> list[Text]:
    """Good nodes and nodes to drain, of several nodes. Where most places share a cause, no node is good or bad by it."""
    if sum(place.gpu is None for place in shown.places.values()) <= 1 or not culprits:
        return []
    lines: list[str] = []
    if not any(culprit.is_systemic for culprit in culprits):
        lines += table.good_lines(table.good_hosts(rows, culprits, shown.places), shown.places, width=shown.width)
    if shown.drain_reason is not None:
        lines += table.drain_lines(table.hosts_to_drain(culprits, shown.places), shown.drain_reason, width=shown.width)
    return [Text(line) for line in lines]


def _blamed(culprits: Sequence[Culprit], places: Mapping[str, Place]) -> list[BadGroup]:
    """What most places share, then one entry a part, then all absent nodes."""
    shared = [_entry(one, _name_of(one.places, places), ()) for one in culprits if one.place is None]
    here = [(one, places[one.place]) for one in culprits if one.place is not None and not one.is_absent_node]
    parts = [replace(_entry(one, place.hostname or place.id, _where(place)), part=place) for one, place in here]
    absent = [one for one in culprits if one.place is not None and one.is_absent_node]
    if not absent:
        return [*shared, *parts]
    lost = tuple(record for one in absent for record in one.records)
    names = names_of_absent([places[str(one.place)] for one in absent])
    counts = f"{counted(len(absent), 'node')}, {counted(len(lost), 'expected outcome')} missing"
    headline = next(iter(record.message for record in lost), "")
    advice = absent[0].advice
    gone = BadGroup(name="absent", where=(names, counts), records=lost, headline=headline, advice=advice, is_absent=True)
    return [*shared, *parts, gone]


def _entry(culprit: Culprit, name: str, where: tuple[str, ...]) -> BadGroup:
    advice = f"{culprit.kind}, {culprit.confidence} confidence: {culprit.advice}"
    return BadGroup(
        name=name, where=where, records=culprit.records, headline=culprit.headline, advice=advice, keys=culprit.keys
    )


def _name_of(names: Sequence[str], places: Mapping[str, Place]) -> str:
    is_node = all(places[name].gpu is None for name in names)
    return counted(len(names), "node" if is_node else "place")


def _where(place: Place) -> tuple[str, ...]:
    """What tells the part from others, its place, PCI address, board and UUID, as far as they are known."""
    known = (
        place.part,
        place.id if place.hostname else None,
        f"PCI {place.pci}" if place.pci else None,
        *(f"{word} {place.board[name]}" for name, word in BOARD.items() if name in place.board),
        place.uuid if place.serial else None,
    )
    return tuple(part for part in known if part)


def _unblamed(
    culprits: Sequence[Culprit], rows: Sequence[Record], said: frozenset[str], places: Mapping[str, Place]
) -> list[BadGroup]:
    """Failures of the whole cluster, then what was not measured, is too close to call, or failed in a plain test.

    What blames nobody is one entry for each place where it was found, and for each reason that several places share.
    ``said``: why something is missing, as the table above says it.
    """
    blamed = {id(record) for culprit in culprits for record in culprit.records}
    are_shown = any(record.outcome == FAILED and record.criterion.startswith(CHECK) for record in rows)
    alike: dict[tuple[str, str | None], list[Record]] = defaultdict(list)
    for record in rows:
        is_failed = record.outcome == FAILED
        is_open = record.outcome in UNMEASURED or is_failed
        if id(record) in blamed or not is_open or record.headline is not None:
            continue  # pytest shows what crashed in a test itself
        is_number = is_failed and are_shown and record.criterion == NUMBER_OF_CHECKS
        if is_number or (record.outcome == MISSING and record.reason in said):
            continue
        is_by_value = is_failed and record.limit is not None
        key = (record.place or "cluster", None) if is_by_value else (NO_CULPRIT, record.reason or record.outcome)
        alike[key].append(record)
    joined: dict[tuple[str, str, str | None], list[Record]] = defaultdict(list)
    for (name, reason), found in alike.items():
        at = found[0].place if name == NO_CULPRIT and len({record.place for record in found}) == 1 else None
        place = places.get(at or "")
        joined[(name, place.named, None) if place is not None else (name, "", reason)] += found
    return [
        BadGroup(name=name, where=(where,) if where else (), records=tuple(found)) for (name, where, _), found in joined.items()
    ]


class _Writer:
    """Makes lines of entries; knows what the siblings of a bad part measured."""

    def __init__(self, rows: Sequence[Record], shown: Shown) -> None:
        self._shown = shown
        self._texts: set[str] = set()
        self._above: str | None = None
        self._siblings = GoodPeers(record for record in rows if record.outcome == PASSED)
        self._reasons: dict[str, set[str]] = defaultdict(set)
        for record in rows:
            if record.outcome == PASSED:
                self._reasons[record.criterion].update(_event_reasons(record) or ())

    def detailed(self, entries: Iterable[BadGroup], *, whole: bool, command: Sequence[str]) -> list[Text]:
        """Several lines for each entry. Without the words of a ``command``, what to do next says "the same command"."""
        self._texts, self._above = set(), None
        lines: list[Text] = []
        for entry in entries:
            texts = self._body(entry, whole=whole, is_short=not command)
            if entry.keys:
                texts += table.again(self._again(entry), command, width=self._shown.width, indent="      ")
            lines += [*self._head(entry), *map(Text, texts)]
        return lines

    def in_short(self, entries: Iterable[BadGroup]) -> list[Text]:
        """Which part each entry is, of what is bad as much as a line holds, and what to do."""
        self._above = None
        lines: list[Text] = []
        for entry in entries:
            found = one_line(entry.headline or "") if entry.is_absent else self._in_brief(entry)
            lines += [*self._head(entry), _ended(f"    {found}", "", self._shown.width), *map(Text, self._advice(entry.advice))]
        return lines

    def _head(self, entry: BadGroup) -> list[Text]:
        colour, width = "yellow" if entry.is_waived else "red", self._shown.width
        below = len(entry.name) + 4 if len(entry.name) <= min(WIDEST_NAME, width // 3) else 6
        head = wrapped("  ".join((entry.name, *entry.where)), width=width, indent="  ", later=" " * below)
        if entry.part and entry.part.serial and head[-1].strip() == entry.part.uuid:
            head.pop()  # the serial number is enough
        return [Text(text, f"bold {colour}") for text in head]

    def _again(self, entry: BadGroup) -> list[str]:
        """What selects the tests of an entry in words that fit a line; where none does, all of the part, or the whole run."""
        tests, part, room = self._shown.tests, entry.part, self._shown.width - INDENT_OF_COMMAND
        at_part = [] if part is None else [key for key in entry.keys if key[1] == part.id]
        name = None if part is None else identity_of(part)
        choices = (tests.arguments(entry.keys, part), tests.arguments(at_part, part), [ONLY, name] if name else [])
        return next((one for one in choices if one and max(map(len, map(quoted, one))) <= room), [])

    def _body(self, entry: BadGroup, *, whole: bool, is_short: bool) -> list[str]:
        width = self._shown.width
        lines = wrapped(entry.headline, width=width, indent="    ") if entry.headline is not None else []
        measured = [record for record in entry.records if _is_measured(record)]
        is_shared = entry.headline is not None and bool(measured)
        if is_shared:
            lines += [*self._criteria(measured), *self._found_first(measured)]
        elif self._is_one_cause(entry, measured):
            lines += wrapped(sentence_of(measured, self._siblings), width=width, indent="    ")
            shown = rows_beside(measured, has_first=not is_short)
            more = f"    {counted(len(measured) - len(shown), 'other value')}: -v shows them, and so does results.json"
            lines += [*self._values_of(shown), *([] if is_short else [more])]
        else:
            lines += self._values_of(measured)
        if not entry.is_absent:
            lines += self._texts_of([one for one in entry.records if not _is_measured(one)], whole=whole)
        seen = self._event_cause(measured)
        lines += wrapped(seen, width=width, indent="    ") if seen is not None else []
        return [*lines, *self._advice(entry.advice)]

    def _advice(self, advice: str | None) -> list[str]:
        """What to do, in full for the first of several parts in a row that ask for the same."""
        if advice is None:
            return []
        what, colon, _ = advice.partition(": ")
        is_known, self._above = advice == self._above, advice
        return wrapped(f"{what}{colon}as above" if is_known else advice, width=self._shown.width, indent="    ")

    def _is_one_cause(self, entry: BadGroup, measured: Sequence[Record]) -> bool:
        return entry.part is not None and len(measured) > MOST_ROWS_OF_A_CAUSE and not self._shown.is_whole

    def _values_of(self, measured: Sequence[Record]) -> list[str]:
        column = min(NAME_COLUMN, 1 + max((len(record.criterion) for record in measured), default=0))
        lines: list[str] = []
        for record in measured[:MOST_CRITERIA]:
            start = f"    {cut(record.criterion, WIDEST_NAME):<{column}} "
            lines += wrapped(self._measured(record), width=self._shown.width, indent=start, later=" " * min(len(start), 8))
        more = len(measured) - MOST_CRITERIA
        rest = f"    and {counted(more, 'more criterion', 'more criteria')}, in {self._shown.report}"
        return [*lines, rest] if more > 0 else lines

    def _criteria(self, records: Sequence[Record]) -> list[str]:
        names = list(dict.fromkeys(record.criterion for record in records))
        text = f"{counted(len(names), 'criterion', 'criteria')}: {shortlist(names, most=MOST_CRITERIA)}"
        return wrapped(text, width=self._shown.width, indent="    ")

    def _found_first(self, records: Sequence[Record]) -> list[str]:
        """What was found at the first place of a shared cause, for each criterion that allows nothing to be found."""
        first = {record.criterion: record for record in reversed(records)}
        lines: list[str] = []
        for record in [*reversed(first.values())][:SHOWN_CAUSES]:
            if record.limit is not None and allows_nothing(record.limit) and record.evidence:
                found = cut_list(show_evidence(record.evidence), 2 * self._shown.width)
                lines += wrapped(f"{record.place}: {found}", width=self._shown.width, indent="    ")
        return lines

    def _texts_of(self, records: Sequence[Record], *, whole: bool) -> list[str]:
        """What was not measured and why; the text of an error once, however many records share it.

        Of what others disturbed, the first place and how many more: what was found beside it is no value of a part.
        """
        lines: list[str] = self._criteria(records) if records else []
        causes: set[str] = set()
        disturbed = Counter(record.cause for record in records if record.is_disturbed and record.cause is not None)
        for record in records:
            text, cause = record.reason or record.outcome, record.cause
            if text in self._texts or (record.is_disturbed and cause in causes):
                continue
            self._texts.add(text)
            is_whole = record.outcome not in (FAILED, MISSING) and not record.is_disturbed  # pytest shows a plain test's
            if whole and is_whole and record.headline is None and cause not in causes:
                lines += self._framed(text)
            else:
                more = disturbed[cause] - 1 if cause is not None else 0
                words = f"{record.message}; the same at {counted(more, 'more outcome')}" if more > 0 else record.message
                lines += wrapped(words, width=self._shown.width, indent="    ")
            causes |= {cause} if cause is not None else set()
        return lines

    def _framed(self, text: str) -> list[str]:
        """A whole text. Lines that others wrote stay as they are: paths and code are copied from there."""
        lines: list[str] = []
        for line in (f"    {line}" for line in framed(text).split("\n")):
            is_foreign = line.lstrip().startswith(BAR.lstrip())
            lines += [line] if is_foreign else folded(line, width=self._shown.width)
        return lines

    def _measured(self, record: Record) -> str:
        """``498 TFLOPS, limit > 700; its siblings 778 to 798``."""
        limit = record.limit
        assert limit is not None
        if record.value is None:
            return record.message
        waived = " (waived)" if counted_as(record) == WAIVED else ""
        others = self._siblings.values.get(record.criterion, []) if record.place is not None else []
        bound, value, *ends = value_cells(limit, record.value, *((min(others), max(others)) if others else ()))
        text = f"{value}{unit_beside(limit.unit, value)}, limit {bound}{waived}"
        if ends:
            text += f"; {tied('siblings ' + ' to '.join(dict.fromkeys(ends)))}"
        is_of_a_part = bool(record.culprits) and record.place not in record.culprits
        if (allows_nothing(limit) or is_of_a_part) and record.evidence:
            text += f"; {cut_list(show_evidence(record.evidence), 2 * self._shown.width)}"
        return text

    def _event_cause(self, measured: Sequence[Record]) -> str | None:
        """What all bad values of a part have in common, and no good value of a sibling has."""
        found = [(record, reasons) for record in measured if (reasons := _event_reasons(record)) is not None]
        common = set.intersection(*(reasons for _, reasons in found)) if found else set()
        own = sorted(common.difference(*(self._reasons[record.criterion] for record, _ in found)))
        if not own:
            return None
        meaning = next((REASONS[name] for name in own if name in REASONS), "no sibling reports this")
        return f"event reasons {', '.join(own)}: {meaning}"

    def brief(self, entries: Sequence[BadGroup]) -> list[Text]:
        """One line for each entry, 20 at most: its host, which part, and of what is bad as much as fits."""
        shown = entries[:MOST_PARTS]
        rows = [(cut(entry.name, WIDEST_NAME), self._host(entry), self._in_brief(entry)) for entry in shown]
        name, host = (max(len(row[column]) for row in rows) for column in (0, 1))
        if name + host + LEAST_ROOM <= self._shown.width:
            texts = [f"  {one[0]:<{name}}  {one[1]:<{host}}  {one[2]}" for one in rows]
        else:
            texts = [self._narrowly(entry) for entry in shown]
        paired = zip(shown, texts, strict=True)
        lines = [_ended(text, "yellow" if entry.is_waived else "red", self._shown.width) for entry, text in paired]
        if len(entries) > MOST_PARTS:
            lines.append(Text(f"  and {len(entries) - MOST_PARTS} more, in {self._shown.report}", "bold"))
        return lines

    def _host(self, entry: BadGroup) -> str:
        return "  ".join(cut(word, WIDEST_NAME) for word in entry.where[: 1 if entry.is_absent else 2])

    def _narrowly(self, entry: BadGroup) -> str:
        """Where no columns fit: of the part only its place, before the name of its host, and after it what is bad."""
        if entry.part is None:
            return f"  {'  '.join(filter(None, (entry.name, self._host(entry), self._in_brief(entry))))}"
        name = [cut(entry.name, self._shown.width // 3)] if entry.part.hostname else []
        return f"  {'  '.join((entry.part.id, *name, self._in_brief(entry)))}"

    def _in_brief(self, entry: BadGroup) -> str:
        """What is bad at one entry, in few words each."""
        names = list(dict.fromkeys(record.criterion for record in entry.records))
        count = f"{len(names)} bad: " if entry.part and len(entry.records) > 1 else ""
        if entry.is_absent:
            return one_line(", ".join(entry.where[1:]))
        if entry.headline is not None:
            return one_line(f"{count}{shortlist(names, most=1)}: {entry.headline}")
        measured = [record for record in entry.records if _is_measured(record)]
        is_one = self._is_one_cause(entry, measured)
        found = [sentence_of(measured, self._siblings)] if is_one else [*map(self._briefly, measured)]
        alike = Counter(f"{WORDS[one.outcome]}: {one.cause or one.message}" for one in entry.records if not _is_measured(one))
        return one_line(count + ", ".join([*found, *(f"{number} {text}" for text, number in alike.items())]))

    def _briefly(self, record: Record) -> str:
        """``bf16_tflops -29 %``; without a percentage the criterion with an event reason that no sibling has, or its value."""
        waived = " (waived)" if counted_as(record) == WAIVED else ""
        if record.margin_percent is not None:
            return f"{record.criterion} {record.margin_percent:+.0f} %{waived}"
        if reasons := sorted((_event_reasons(record) or set()) - self._reasons[record.criterion]):
            return f"{record.criterion} ({', '.join(reasons)}){waived}"
        return f"{record.criterion} {format_number(record.value)}{waived}" if record.value is not None else record.criterion


def _ended(line: str, style: str, width: int) -> Text:
    text = Text(line.rstrip(), style)
    text.truncate(width, overflow="ellipsis")
    return text


def _is_measured(record: Record) -> bool:
    """Whether a value is outside its limit; a plain test that failed has no limit."""
    return record.outcome == FAILED and record.limit is not None


def _event_reasons(record: Record) -> set[str] | None:
    """The event reasons of one GPU; None where they are not known."""
    found = record.evidence.get("event reasons")
    return {str(one) for one in found if str(one).isidentifier()} if isinstance(found, (list, tuple)) else None
