"""What is to blame for the bad outcomes of a run. Pure: records in, culprits out.

A place is blamed once, with all criteria that point at it. What most places share is not theirs: it is one systemic culprit
without a place. Only a failure that was confirmed asks to replace something.
Outcomes that share a cause or a remark are shown once, with all that it took along.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_gpucluster.errors import Part
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.judging.selection import Selector
from pytest_gpucluster.judging.verdict import ERROR, FAILED, MISSING, NOISY, PASSED, Record
from pytest_gpucluster.places import UNKNOWN_HOST, Place
from pytest_gpucluster.text import counted, first_line, shortlist, text_of

BAD = (FAILED, ERROR, MISSING)
MEASURED = (PASSED, FAILED, NOISY)
HARDWARE: tuple[Part, ...] = ("gpu", "link", "nic", "switch", "path", "node")
HEAVIEST_FIRST: tuple[Part, ...] = (*HARDWARE, "host", "unknown", "settings", "software")
"""Of several parts that are blamed at one place: a suspicion of hardware is not lost behind one of software."""
OF_A_NODE: tuple[Part, ...] = ("node", "settings", "software")
"""What all GPUs of a node may share. A process that died is blamed at its GPU, also if all of a node's did."""
FEWEST_OF_MOST = 3
SHOWN_EVIDENCE = 8
LONGEST_SELECTION = 300
"""Characters of the arguments that select the tests of a culprit, in reports without a terminal's width."""
REPLACE: Mapping[Part, str] = {
    "gpu": "take the GPU out of service; measure it once more, and replace it if it fails again",
    "link": "look at both ends, the cable and the switch between them; replace what fails again",
    "nic": "look at the port, its cable and the switch's end of it; replace what fails again, the cable first",
    "node": "take the node out of service; look at its power, cabling and driver",
    "switch": "look at the switch and its uplinks that the evidence names: port counters, cables, firmware",
}
NEXT: Mapping[Part, str] = {
    "gpu": "look at the GPU: nvidia-smi, kernel log (Xid)",
    "node": "look at the node: power, network, kernel log",
    "link": "look at the connection between the two places",
    "nic": "look at the port that the evidence names: ibstat, kernel log, cable and switch port",
    "switch": "look at the switch that the evidence names: port counters, cables, firmware",
    "software": (
        "correct the function that raised, bring the software of this node in line with the others, or end what holds the "
        "GPU; the evidence says which"
    ),
    "settings": "correct the setting that the evidence names",
    "host": (
        "look at what the evidence names, then at the host: kernel log (oom-kill), memory and limits of the container, disk "
        "space, processes"
    ),
    "unknown": "run the health criteria there (-m health); kernel log (Xid, oom-kill)",
}
"""What to do first, where nothing confirmed that a part is defective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A part that is to blame.

    Attributes:
        place: the id of the one place that is blamed; None where most places share the fault, or nobody can be named.
        places: the ids of all places concerned.
        records: the bad outcomes that blame it.
        headline: the finding in one line, where it is more than the reasons of the records.
        is_systemic: most places have it alike, so that no place is to blame.
        is_confirmed: a measured failure, and a repeat or another criterion confirmed it.
    """

    kind: Part
    place: str | None
    places: tuple[str, ...]
    records: tuple[Record, ...]
    headline: str | None = None
    is_systemic: bool = False
    is_confirmed: bool = False

    @property
    def criteria(self) -> list[str]:
        """The criteria that did not pass because of it."""
        return sorted({record.criterion for record in self.records})

    @property
    def confidence(self) -> Literal["high", "medium"]:
        """High only for a confirmed failure."""
        return "high" if self.is_confirmed else "medium"

    @property
    def evidence(self) -> list[str]:
        """The headline, the first line of each reason, measured failures first, and what was found of this place in them."""
        measured_first = sorted(self.records, key=lambda record: record.outcome != FAILED)
        reasons = [first_line(record.reason) for record in measured_first if record.reason]
        name = self.place or ""
        shown = [f"{name}: {text_of(record.evidence[name])}" for record in self.records if name in record.evidence]
        return list(dict.fromkeys([*([self.headline] if self.headline else []), *shown, *reasons]))[:SHOWN_EVIDENCE]

    @property
    def is_measured(self) -> bool:
        """Whether a measured failure blames it."""
        return any(record.outcome == FAILED for record in self.records)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Criterion and place id of all that is to be measured again; none where a node is absent, as that is the whole run."""
        return () if self.is_absent_node else tuple(map(_key, self.records))

    def action(self, tests: Selector, places: Mapping[str, Place]) -> str:
        """What to do next. Only a confirmed failure of a place asks to replace anything."""
        if self.is_confirmed:
            return self.advice
        arguments = self._selection(tests, places.get(self.place or ""))
        again = f"measure it again: the same command{f' with {arguments}' if arguments else ''}"
        if self.is_measured and not self._asked and self.kind in (*HARDWARE, "unknown"):
            return f"{again}; {self.advice}"
        return f"{self.advice}; then {again}"

    def _selection(self, tests: Selector, part: Place | None) -> str:
        """What selects its tests; where that is long, those of the part alone, as the terminal does."""
        at_part = [key for key in self.keys if part is not None and key[1] == part.id]
        every = shlex.join(tests.arguments(self.keys, part))
        return every if len(every) <= LONGEST_SELECTION or not at_part else shlex.join(tests.arguments(at_part, part))

    @property
    def advice(self) -> str:
        """What to do, without the command that measures again. What a part asks for comes before what is usual."""
        if self._asked:
            return "; ".join(self._asked)
        return REPLACE.get(self.kind, REPLACE["node"]) if self.is_confirmed else NEXT.get(self.kind, NEXT["unknown"])

    @property
    def _asked(self) -> tuple[str, ...]:
        """What the parts that are blamed ask for."""
        return tuple(dict.fromkeys(record.advice for record in self.records if record.advice is not None))

    @property
    def is_absent_node(self) -> bool:
        """Whether nothing but absence is known of it."""
        return self.kind == "node" and all(record.outcome == MISSING for record in self.records)


def find_culprits(records: Iterable[Record], places: Mapping[str, Place]) -> list[Culprit]:
    """Everything that the records blame: confirmed failures first, then other failures, then errors.

    Args:
        records: all expected outcomes of the run.
        places: every expected GPU and node by id, with a rank where one answers.
    """
    rows = list(records)
    bad = [record for record in rows if record.outcome in BAD]
    shared = [*_failed_at_most(rows, places), *_raised_at_most(bad, places)]
    covered = {_key(record) for culprit in shared for record in culprit.records}
    left = [record for record in bad if _key(record) not in covered]
    keys = {record.criterion for record in rows}
    found = [*shared, *_whole_nodes(_by_place(left, places, keys), places), *_among_several(left, places)]
    return sorted(found, key=lambda culprit: (not culprit.is_confirmed, not culprit.is_measured))


def is_most(number: int, total: int) -> bool:
    """Whether so many of the measured places share a fault that it is not theirs: most of them and at least 3, or 2 of 2."""
    return 2 * number > total and (number >= FEWEST_OF_MOST or number == total == FEWEST_OF_MOST - 1)


def _failed_at_most(rows: Sequence[Record], places: Mapping[str, Place]) -> Iterator[Culprit]:
    """Criteria that most of the measured places failed: one culprit for all criteria that the same places failed."""
    known = (one for one in rows if one.place in places and one.limit is not None and one.outcome in MEASURED)
    shared: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    totals: dict[tuple[str, ...], int] = {}
    for one in grouped((record.criterion, record) for record in known).values():
        failed = [record for record in one if record.outcome == FAILED and not _is_explained(record, places)]
        if is_most(len(failed), len(one)):
            names = tuple(str(record.place) for record in failed)
            shared[names] += failed
            totals[names] = len(one)
    for names, records in shared.items():
        headline = _describe_shared([places[name] for name in names], totals[names], records)
        yield _systemic("unknown", names, records, headline)


def _systemic(kind: Part, places: tuple[str, ...], records: Iterable[Record], headline: str) -> Culprit:
    """What most places have alike."""
    return Culprit(kind=kind, place=None, places=places, records=tuple(records), headline=headline, is_systemic=True)


def _is_explained(record: Record, places: Mapping[str, Place]) -> bool:
    """Whether the failure of a GPU is the consequence of one of other GPUs, which are to blame."""
    is_gpu = places[str(record.place)].gpu is not None
    return is_gpu and bool(record.culprits) and record.place not in record.culprits


def _describe_shared(shared: Sequence[Place], total: int, failed: Sequence[Record]) -> str:
    number, has_gpus = len(shared), any(place.uuid is not None for place in shared)
    noun = "nodes" if shared[0].gpu is None else "GPUs" if has_gpus else "ranks"
    suspects = "the code or the limit?" if noun == "ranks" else "power cap, clocks, driver or limit?"
    sides = {record.limit.is_floor for record in failed if record.limit is not None}
    side = "below" if sides == {True} else "above" if sides == {False} else "outside"
    if total < FEWEST_OF_MOST:
        return f"{number} of {total} {noun} {side} the limit: nothing shows which of them is to blame, if any; or the limit is"
    return f"{number} of {total} {noun} {side} the limit: not the {noun}: {suspects}"


def _raised_at_most(bad: Sequence[Record], places: Mapping[str, Place]) -> Iterator[Culprit]:
    """Errors of software or settings that hit most GPUs, or most nodes, alike: one culprit for each such error."""
    gpus = [place for place in places.values() if place.gpu is not None]
    answering = [place for place in gpus if place.rank is not None]
    raised = (one for one in bad if one.cause is not None and one.outcome == ERROR)
    alike = grouped(((one.blames, one.cause), one) for one in raised if one.blames in ("software", "settings"))
    for (part, cause), records in alike.items():
        names = tuple(dict.fromkeys(name for record in records for name in record.culprits))
        nodes = [name for name in names if name in places and places[name].gpu is None]
        number, total, noun = len(names) - len(nodes), len(answering or gpus), "ranks"
        if not number:
            number, total, noun = len(nodes), len({place.node for place in answering or gpus}), "nodes"
        if is_most(number, total):
            headline = f"{number} of {total} {noun} alike: {cause}"
            yield _systemic(part, names, records, headline)


def _by_place(left: Sequence[Record], places: Mapping[str, Place], keys: set[str]) -> list[Culprit]:
    """One culprit for each place that is blamed. ``keys``: the criteria of the run."""
    node_of = absent_nodes(places)
    missing = {_key(one): (node_of[one.place],) for one in left if one.outcome == MISSING and one.place in node_of}
    blamed = ((name, record) for record in left for name in record.culprits or missing.get(_key(record), ()))
    blaming = grouped((name, record) for name, record in blamed if name in places)
    return [_culprit_at(places[name], records, keys, places) for name, records in blaming.items()]


def _culprit_at(place: Place, records: Sequence[Record], keys: set[str], places: Mapping[str, Place]) -> Culprit:
    kinds = {_part_of(record, place) for record in records}
    failed = [record for record in records if record.outcome == FAILED and _part_of(record, place) in HARDWARE]
    quantities = {_quantity(record.criterion, keys) for record in failed}
    is_confirmed = any(record.confirmed for record in failed) or len(quantities) > 1
    found = Culprit(
        kind=min(kinds, key=HEAVIEST_FIRST.index),
        place=place.id,
        places=(place.id,),
        records=tuple(records),
        is_confirmed=is_confirmed and not (_is_alone(place, places) and all(one.place not in places for one in failed)),
    )
    outcomes = counted(len(records), "expected outcome is", "expected outcomes are")
    headline = f"{place.hostname or UNKNOWN_HOST} is absent: {outcomes} missing with it"
    return replace(found, headline=headline) if found.is_absent_node else found


def _is_alone(place: Place, places: Mapping[str, Place]) -> bool:
    """Whether a node, of several, shares its switch or NVLink domain with none: what leaves that looks the same."""
    shared = {one.node: one.shared for one in places.values() if one.gpu is not None}
    own = shared.get(place.node)
    return place.gpu is None and own is not None and len(shared) > 1 and [*shared.values()].count(own) == 1


def _whole_nodes(found: Sequence[Culprit], places: Mapping[str, Place]) -> list[Culprit]:
    """The culprits, with one in place of all GPUs of a node that answer where one cause of :data:`OF_A_NODE` took them.

    What that cause did to the node itself goes with them.
    """
    answering = Counter(place.node for place in places.values() if place.gpu is not None and place.rank is not None)
    nodes = {place.node: place.id for place in places.values() if place.gpu is None}
    alike: dict[tuple[int, Part, str], list[Culprit]] = defaultdict(list)
    for culprit in found:
        causes = {record.cause for record in culprit.records if record.outcome == ERROR}
        cause = causes.pop() if len(causes) == 1 else None
        place = places[str(culprit.place)]
        is_whole = cause is not None and all(record.outcome == ERROR for record in culprit.records)
        if is_whole and culprit.kind in OF_A_NODE:
            alike[place.node, culprit.kind, str(cause)].append(culprit)
    merged: list[Culprit] = []
    covered: set[int] = set()
    for (node, kind, cause), same in alike.items():
        ranks = [str(culprit.place) for culprit in same if culprit.place != nodes.get(node)]
        if node in nodes and len(ranks) == answering[node] > 1:
            records = {_key(record): record for culprit in same for record in culprit.records}
            headline = f"all {counted(len(ranks), 'rank')} alike: {cause}"
            every = tuple(records.values())
            merged.append(Culprit(kind=kind, place=nodes[node], places=tuple(ranks), records=every, headline=headline))
            covered |= set(map(id, same))
    return [*(culprit for culprit in found if id(culprit) not in covered), *merged]


def _among_several(left: Sequence[Record], places: Mapping[str, Place]) -> list[Culprit]:
    """Errors of several places of which none can be named, and failures of what several places share, beside bad places."""
    alike: dict[tuple[str | None, tuple[str, ...]], list[Record]] = defaultdict(list)
    for record in left:
        is_measured = record.outcome == FAILED and (bool(record.culprits) or record.blames == "software")
        is_shared = record.blames == "switch" or is_measured
        parts = record.behind if is_shared and record.behind else {record.cause if is_shared else None: record.among}
        for part, sharing in parts.items() if is_shared or not record.culprits else ():
            if names := tuple(name for name in sharing if name in places):
                alike[part, names].append(record)
    return [
        Culprit(
            kind="unknown" if shared is None else "software" if records[0].blames == "software" else "switch",
            place=None,
            places=names,
            records=tuple(records),
            headline=f"{shared or 'nothing shows which of these'} is to blame: {', '.join(places[one].named for one in names)}",
            is_confirmed=shared is not None and any(map(_is_confirmed_part, records)),
        )
        for (shared, names), records in alike.items()
    ]


def _is_confirmed_part(record: Record) -> bool:
    """Whether a failure was confirmed, and is that of a part that somebody can replace."""
    return record.confirmed and record.outcome == FAILED and record.blames != "software"


def absent_nodes(places: Mapping[str, Place]) -> dict[str, str]:
    """The node of each place of a node at which no rank answers; empty while no rank answers anywhere."""
    gpus = [place for place in places.values() if place.gpu is not None]
    present = {place.node for place in gpus if place.rank is not None}
    nodes = {place.node: place.id for place in places.values() if place.gpu is None and place.node not in present}
    return {place.id: nodes[place.node] for place in places.values() if place.node in nodes} if present else {}


def _part_of(record: Record, place: Place) -> Part:
    """What a record blames; a record of an older run does not say it."""
    if record.blames is not None:
        return record.blames
    by_place: Part = "node" if place.gpu is None else "gpu"
    return by_place if record.outcome in (FAILED, MISSING) else "unknown"


def _quantity(key: str, keys: set[str]) -> str:
    """What a criterion measures: ``straggler[hbm_bandwidth]`` compares the values of ``hbm_bandwidth``."""
    inner = key.partition("[")[2].removesuffix("]")
    return inner if inner in keys else key


def _key(record: Record) -> Key:
    return record.criterion, record.place


SHOWN_NAMES = 16
UNMEASURED = (ERROR, MISSING)


def first_seen(records: Iterable[Record]) -> dict[Key, Record]:
    """By criterion and place, the record that first had the same error: one call failed, and several criteria read it.

    The first one itself is left out, and so is everything whose error no measurement raised.
    """
    firsts: dict[str, Record] = {}
    found: dict[Key, Record] = {}
    for record in records:
        if record.outcome in UNMEASURED and record.cause is not None and record.reason is not None:
            first = firsts.setdefault(record.reason, record)
            if first is not record:
                found[_key(record)] = first
    return found


def name_of(record: Record) -> str:
    """The criterion and its place: ``busbw[all_reduce] at node0``."""
    return f"{record.criterion} at {record.place}" if record.place is not None else record.criterion


def describe_remarks(records: Iterable[Record]) -> list[str]:
    """What passed values could not show; one line for each remark, with all criteria and places that have it."""
    alike = grouped((record.remark, record) for record in records if record.remark is not None)
    return [f"remark: {shortlist(_in_short(some), most=SHOWN_NAMES)}: {remark}" for remark, some in alike.items()]


def _in_short(records: Sequence[Record]) -> list[str]:
    """``a at node0, b at 8 places``: the names of the records, those of more than two places of a criterion counted."""
    by_criterion = grouped((record.criterion, name_of(record)) for record in records)
    shown = (names if len(names) < 3 else [f"{key} at {len(names)} places"] for key, names in by_criterion.items())
    return [name for names in shown for name in names]
