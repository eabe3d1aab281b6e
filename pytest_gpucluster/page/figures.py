"""The pictures of a run: map of headroom, matrices, bandwidth by size, telemetry, loss, error growth, drift. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.verdict import FAILED, MISSING, PASSED, SKIPPED, UNMEASURED, Record, counted_as
from pytest_gpucluster.page.criteria_view import BAD, OPEN, TONES, Number, exact, host_of, plain
from pytest_gpucluster.page.document import RunDocument
from pytest_gpucluster.page.drawing import Axes, Chart, Curve, Mark, apart, axes_over
from pytest_gpucluster.page.parts_view import name_of
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.columns import number_of
from pytest_gpucluster.reporting.table_rows import COUNTS
from pytest_gpucluster.text import counted, shortlist

CELL, GAP, BLOCK = 18, 2, 32
"""Of the map: a cell and the space beside it in SVG's units, and nodes above each other."""
LABEL_WIDTH = 96
STEPS = ((1.0, "m1"), (5.0, "m2"), (15.0, "m3"))
"""Up to so many percent of headroom a cell has this class; beyond all of them, ``m4``."""
MOST_MATRICES = 4
MOST_PAIRS = 16
"""GPUs or nodes of a matrix."""
GROWTH = ("growth", "_errors", "errors_", "replays", "xid", "worsened", "held_back", "_soak")
BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
TELEMETRY = (
    ("SM clock", "MHz", ("SM MHz", "SM clock MHz")),
    ("Power", "W", ("W", "power W")),
    ("Temperature", "°C", ("C", "temperature C")),
)
REFERENCE = {
    ("busbw[all_reduce]", 1, 8): (1_048_576_000, 442.21),
    ("inter_node_busbw[all_reduce]", 2, 8): (1_048_576_000, 434.99),
}
"""GB/s that the hand-over's own report shows of 8 H100 in one node, and of two such nodes, by criterion, nodes and GPUs a
node: the size in bytes and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCell:
    """One GPU, or one node, on the map."""

    x: int
    y: int
    kind: str
    title: str
    is_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMap:
    """All places of the run; ``labels`` are the hosts, ``heads`` the GPUs."""

    width: int
    height: int
    cells: tuple[MapCell, ...]
    labels: tuple[tuple[int, int, str], ...]
    heads: tuple[tuple[int, int, str], ...]
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What was measured between each two of these; an empty cell was not measured."""

    title: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """A line of a table of facts; ``tone`` is its colour."""

    cells: tuple[str, ...]
    tone: str
    number: Number | None = None


def figures_of(run: RunDocument) -> dict[str, object]:
    """Everything that section 5 shows, by its name in the template; what a run did not measure is empty."""
    return {
        "map": _map(run),
        "matrices": _matrices(run),
        "busbw": _busbw(run),
        "telemetry": _telemetry(run),
        "loss": _loss(run),
        "growth": _growth(run),
        "drift": _drift(run),
        "stacks": _stacks(run),
    }


def _map(run: RunDocument) -> ClusterMap:
    by_place = grouped((record.place, record) for record in run.records)
    nodes = sorted({place.node for place in run.places.values()})
    columns = max((place.gpu + 1 for place in run.places.values() if place.gpu is not None), default=0)
    block = LABEL_WIDTH + (columns + 1) * (CELL + GAP) + 3 * GAP
    at = {node: (index // BLOCK * (block + 4 * GAP), CELL + index % BLOCK * (CELL + GAP)) for index, node in enumerate(nodes)}
    hosts = {place.node: _short_host(host_of(place)) for place in run.places.values()}
    labels = tuple((x + LABEL_WIDTH - 2 * GAP, y + CELL - 5, hosts[node]) for node, (x, y) in at.items())
    cells = []
    for place in run.places.values():
        left, y = at[place.node]
        column = 0 if place.gpu is None else place.gpu + 1
        kind, title = _headroom(by_place.get(place.id, ()))
        x = left + LABEL_WIDTH + column * (CELL + GAP) + (GAP if column else 0)
        cells.append(MapCell(x=x, y=y, kind=kind, title=f"{name_of(place)}: {title}", is_bad=kind == "bad"))
    blocks = -(-len(nodes) // BLOCK)
    middle = LABEL_WIDTH + CELL // 2
    heads = tuple(
        (number * (block + 4 * GAP) + middle + column * (CELL + GAP), CELL - 6, str(column - 1) if column else "node")
        for number in range(blocks)
        for column in range(columns + 1)
    )
    bad = f"{sum(cell.is_bad for cell in cells)} bad of {counted(len(cells), 'place')}"
    return ClusterMap(
        width=max(1, blocks * (block + 4 * GAP)),
        height=CELL + min(len(nodes), BLOCK) * (CELL + GAP) + GAP,
        cells=tuple(cells),
        labels=labels,
        heads=heads,
        label=f"Map of {counted(len(nodes), 'node')} with up to {counted(columns, 'GPU')} each: {bad}",
    )


def _short_host(name: str) -> str:
    short = name.partition(".")[0]
    return short if len(short) <= 14 else f"{short[:6]}…{short[-7:]}"


def _headroom(records: Sequence[Record]) -> tuple[str, str]:
    """The class of a place on the map, and the words: what is bad there, else its least headroom."""
    outcomes = {counted_as(record) for record in records}
    failed = [one for one in records if counted_as(one) == FAILED]
    if failed:
        worst = min(failed, key=lambda one: one.margin_percent if one.margin_percent is not None else 0.0)
        return "bad", f"{len(failed)} failed: {_told(worst)}"
    if MISSING in outcomes and outcomes <= {MISSING, SKIPPED}:
        return "gone", "nothing answered"
    unknown = [one for one in records if counted_as(one) in UNMEASURED]
    if unknown:
        return "open", f"{len(unknown)} without a result: {unknown[0].criterion}"
    passed = [one for one in records if one.outcome == PASSED]
    measured = [one for one in passed if one.margin_percent is not None and one.limit and one.limit.unit not in COUNTS]
    if not measured:
        return ("m4", "all passed") if PASSED in outcomes else ("none", "nothing was measured")
    worst = min(measured, key=lambda one: one.margin_percent or 0.0)
    kind = next((name for bound, name in STEPS if (worst.margin_percent or 0.0) < bound), "m4")
    return kind, f"least headroom {_told(worst)}"


def _told(record: Record) -> str:
    if record.value is None or record.limit is None:
        return record.criterion
    margin = "" if record.margin_percent is None else f"{record.margin_percent:.1f} % "
    return f"{margin}at {record.criterion} ({format_number(record.value)}, {record.limit.text})"


def _matrices(run: RunDocument) -> tuple[Matrix, ...]:
    """Matrices of pairs: those with a bad pair, and of each kind one that is good."""
    found: list[tuple[bool, Matrix]] = []
    seen: set[tuple[str, str | None]] = set()
    for record in run.records:
        pairs = record.evidence.get("pairs")
        kind = record.criterion.partition("[")[0]
        if isinstance(pairs, list) and (kind, record.place) not in seen:
            seen.add((kind, record.place))
            if not (kind.startswith("slow_") and ("gpu_pairs", record.place) in seen):
                matrix = _matrix(record, pairs, run.places)
                found += [(record.outcome == PASSED, matrix)] if matrix is not None else []
    bad = [matrix for is_good, matrix in found if not is_good][:MOST_MATRICES]
    good = {matrix.title.partition(" at ")[0]: matrix for is_good, matrix in reversed(found) if is_good}
    return (*bad, *good.values())


def _matrix(record: Record, pairs: Sequence[Any], places: Mapping[str, Place]) -> Matrix | None:
    rates: dict[tuple[str, str], float] = {}
    for pair in pairs:
        if isinstance(pair, dict) and "source" in pair and "target" in pair:
            rate = next((value for key, value in pair.items() if str(key).replace("/", "_").lower().endswith("gb_s")), None)
            if isinstance(rate, (int, float)):
                rates[str(pair["source"]), str(pair["target"])] = rate
    names = sorted({name for ends in rates for name in ends}, key=lambda name: (len(name), name))[:MOST_PAIRS]
    if len(names) < 2:
        return None
    usual = statistics.median(rates.values())

    def shown(source: str, target: str) -> tuple[str, str]:
        rate = rates.get((source, target))
        if rate is None:
            return "", "none"
        return format_number(rate), "bad" if rate < 0.8 * usual else "m1" if rate < 0.95 * usual else "m3"

    where = host_of(places[record.place]) if record.place is not None else "the cluster"
    short = {name: name.partition("-")[2] if record.place in places and "-" in name else name for name in names}
    rows = tuple((short[one], tuple(shown(one, other) for other in names)) for one in names)
    return Matrix(title=f"{record.criterion} at {where}", names=tuple(short[name] for name in names), rows=rows)


def _busbw(run: RunDocument) -> tuple[Chart, ...]:
    charts = (_of_sizes(name, rows, run) for name, rows in run.by_criterion.items() if "busbw[" in name)
    return tuple(chart for chart in charts if chart is not None)


def _of_sizes(criterion: str, records: Sequence[Record], run: RunDocument) -> Chart | None:
    """The lowest and the median bus bandwidth of all places by message size, for 4-byte numbers."""
    listed = (sizes for record in records if isinstance(sizes := record.evidence.get("sizes"), list))
    rows = [one for sizes in listed for one in sizes if isinstance(one, dict) and one.get("dtype") in (None, "float32")]
    pairs = ((one.get("bytes"), one.get("busbw_gb_s", one.get("busbw GB/s"))) for one in rows)
    known = ((float(size), float(rate)) for size, rate in pairs if isinstance(size, int) and isinstance(rate, (int, float)))
    by_size = dict(sorted(grouped(known).items()))
    if len(by_size) < 2:
        return None
    expected = run.facts.get("expected") or {}
    shape = (expected.get("nodes") if "inter" in criterion else 1, expected.get("gpus_per_node"))
    reference = REFERENCE.get((criterion, *shape))  # type: ignore[arg-type]
    rates = [value for found in by_size.values() for value in found]
    limit = next((record.limit for record in records if record.limit is not None and not record.limit.is_none), None)
    more = [*([limit.value] if limit else []), *([reference[1]] if reference else [])]
    axes = axes_over([*by_size], [0.0, *rates, *more], is_log=True, from_zero=True)
    marks = (Mark(x=axes.x(reference[0]), y=axes.y(reference[1]), text=f"handover: {reference[1]}"),) if reference else ()
    middle, range_ = _spread(by_size, axes)
    return Chart(
        label=f"{criterion}: bus bandwidth by message size, {counted(len(records), 'place')}",
        x_title="message size",
        y_title="GB/s",
        curves=(middle,),
        areas=(range_,) if len(records) > 1 else (),
        marks=marks,
        limit=limit,
        x_ticks=apart([(axes.x(size), _bytes(size)) for size in by_size]),
        axes=axes,
    )


def _spread(values: Mapping[float, Sequence[float]], axes: Axes) -> tuple[Curve, Curve]:
    """The medians at each x, and the area between the lowest and the highest values."""
    low, high, middle = ([(x, of(some)) for x, some in values.items()] for of in (min, max, statistics.median))
    return Curve("median", "c1", axes.points(middle)), Curve("lowest to highest", "a1", axes.area(low, high))


def _bytes(size: float) -> str:
    unit, name = next(((unit, name) for unit, name in BYTES if size >= unit), (1, "B"))
    return f"{format_number(round(size / unit, 1))} {name}"


def _telemetry(run: RunDocument) -> tuple[Chart, ...]:
    """Clock, power and temperature of all GPUs at each measurement, in the order of the plan."""
    charts = []
    for title, unit, names in TELEMETRY:
        read = {criterion: _numbers(records, *names) for criterion, records in run.by_criterion.items()}
        seen = {criterion: found for criterion, found in read.items() if found and not criterion.startswith("straggler[")}
        if len(seen) > 1:
            charts.append(_bands(title, unit, seen))
    return tuple(charts)


def _numbers(records: Iterable[Record], name: str, described: str) -> list[float]:
    values = (number_of(one.evidence.get(name, one.evidence.get(described))) for one in records)
    return [float(value) for value in values if value is not None]


def _bands(title: str, unit: str, seen: Mapping[str, list[float]]) -> Chart:
    by_x = {float(number): found for number, found in enumerate(seen.values(), 1)}
    axes = axes_over([*by_x], [value for found in by_x.values() for value in found])
    middle, range_ = _spread(by_x, axes)
    most = max(map(len, by_x.values()))
    return Chart(
        label=f"{title} under load: median and range of up to {counted(most, 'GPU')} at {counted(len(seen), 'measurement')}",
        x_title=f"measurements in their order: {shortlist([*seen], most=5)}",
        y_title=unit,
        curves=(middle,),
        areas=(range_,),
        x_ticks=tuple((axes.x(x), format_number(x)) for x in [*by_x][:: max(1, len(seen) // 8)]),
        axes=axes,
    )


def _loss(run: RunDocument) -> Chart | None:
    for record in run.records:
        for key, curve in record.evidence.items():
            if "curve" in key and isinstance(curve, list):
                points = [one for one in curve if isinstance(one, list) and len(one) == 2 and None not in one]
                pairs = [(float(step), float(loss)) for step, loss in points]
                if len(pairs) > 1:
                    return _curve_of_loss(record, pairs)
    return None


def _curve_of_loss(record: Record, pairs: Sequence[tuple[float, float]]) -> Chart:
    limit = record.limit
    axes = axes_over([x for x, _ in pairs], [0.0, *(y for _, y in pairs)], from_zero=True)
    return Chart(
        label=f"{record.criterion}: loss by step",
        x_title="step",
        y_title=limit.unit if limit is not None else "loss",
        curves=(Curve(name="loss", kind="c1", points=axes.points(pairs)),),
        limit=limit,
        x_ticks=axes.x_ticks,
        axes=axes,
    )


def _growth(run: RunDocument) -> tuple[TableLine, ...]:
    """What was counted over the run: its worst value, and where anything was counted at all."""
    rows = []
    for criterion, records in run.by_criterion.items():
        judged = [one for one in records if one.value is not None and one.limit is not None and one.limit.unit in COUNTS]
        if not judged or not any(word in criterion for word in GROWTH):
            continue
        worst = max(judged, key=lambda one: one.value or 0.0)
        limit = worst.limit
        within = [plain(one.evidence["within"]) for one in judged if one.evidence.get("within")]
        bad = sum(counted_as(one) == FAILED for one in judged)
        cells = (
            criterion,
            f"{len(judged):,}",
            f"{limit.text if limit is not None else ''}",
            f"{bad} over the limit" if bad else "none over the limit",
            shortlist(within, most=2) or "nothing else counted",
        )
        number = exact(format_number(worst.value or 0.0), worst.value)
        rows.append(TableLine(cells=cells, tone=BAD if bad else OPEN if within else "good", number=number))
    return tuple(rows)


def _drift(run: RunDocument) -> tuple[TableLine, ...]:
    """Every compared fact: what differs first."""
    rows = []
    for record in run.records:
        facts = record.evidence.get("facts")
        for fact in facts if isinstance(facts, list) else ():
            if isinstance(fact, dict) and "name" in fact and "alike" in fact:
                odd = [f"{_whose(one)}: {one.get('value')}" for one in fact.get("outliers") or ()]
                unread = [_whose(one) for one in fact.get("unread") or ()]
                words = shortlist(odd, most=4) or (f"not read at {shortlist(unread, most=4)}" if unread else "none differs")
                name, usual = f"{fact.get('kind', '')}: {fact['name']}", str(fact.get("usual") or "not read")
                cells = (name, usual, str(fact["alike"]), words)
                rows.append(TableLine(cells=cells, tone=BAD if odd else OPEN if unread else "good"))
    order = {BAD: 0, OPEN: 1, "good": 2}
    return tuple(sorted(rows, key=lambda row: order[row.tone]))


def _whose(deviation: Mapping[str, Any]) -> str:
    """The node and the part of it, where it is not the node itself."""
    node, part = str(deviation.get("node")), str(deviation.get("part") or "")
    return f"{node} {part}" if part not in ("", node) else node


def _stacks(run: RunDocument) -> tuple[tuple[str, str], ...]:
    """The stacks of hung processes, where an outcome has them."""
    bad = [record for record in run.records if record.reason and TONES[counted_as(record)] != "good"]
    shown = [record for record in bad if any(word in str(record.reason) for word in ("Python stacks", "traceback"))]
    found = {str(record.reason): f"{record.criterion} at {record.place or 'the cluster'}" for record in shown}
    return tuple((where, reason) for reason, where in found.items())[:12]
