"""What the screen of ``gpucluster watch`` shows. Pure: readings in, sections of lines out.

At a terminal each section is a box, in a log a heading with lines below it (``watch.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich.table import Table
from rich.text import Text

from pytest_gpucluster.inventory.nvml import FAULT_REASONS
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none, split
from pytest_gpucluster.inventory.watched_node import LiveGpu, LivePort, NodeReading, rate_gb_s
from pytest_gpucluster.judging.forecast import clock
from pytest_gpucluster.judging.verdict import FAILED, OUTCOMES, UNMEASURED, WAIVED, count_of
from pytest_gpucluster.reporting.lines import hostlist, printed, safe, width_of, wrapped
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pytest_gpucluster.judging.culprits import Culprit
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.reporting.watched_run import NodeProgress, RunPicture

Shows: TypeAlias = Literal["all", "node", "log"]

NOTHING = "-"
"""Stands where a value is not available, or where no rate can be said."""
INDENT = "  "
"""Stands before each line below a heading of a log."""
EDGE = 4
"""Columns that a box takes on both sides."""
GBIT_IN_GB = 8
SILENT_S = 5.0
"""A reading that is later than this beyond its interval: the driver hangs."""
BAR_WIDTH = 16
MOST_NODES, MOST_CELLS, MOST_PARTS, MOST_LOG_LINES, MOST_VARIABLES, MOST_FOLDED = 8, 32, 8, 6, 8, 3
NODE_CELL, PORT_CELL = 26, 39
SHORT_REASONS = {
    "gpu_idle": "idle",
    "applications_clocks_setting": "app clocks",
    "sw_power_cap": "power cap",
    "hw_slowdown": "HW slow",
    "sync_boost": "sync boost",
    "sw_thermal_slowdown": "SW heat",
    "hw_thermal_slowdown": "HW heat",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display",
}
"""What fits a screen of 80 columns; a wider one has NVML's names."""
WIDE = 110
BLOCKS = "▁▂▃▄▅▆▇"
"""Of a sparkline. Without the whole block: lines below each other would run together."""
SPARK, WIDE_SPARK, LEAST_WIDTH = 6, 12, 80
"""Readings of a sparkline; a terminal of fewer columns has none."""
HOT_PERCENT, FULL_PERCENT = 95, 100
LEFT = ("", "events")
"""Columns of the GPUs that are aligned at the left: sparklines, which have no heading, and event reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that one screen shows.

    ``before`` and ``now`` are the last two readings of this node, ``silent_s`` the time since the last one, which is due every
    ``interval_s``; ``run`` is None where no run is watched. ``history`` has the readings so far, the oldest first.
    """

    hostname: str
    at: str
    before: NodeReading | None
    now: NodeReading | None
    silent_s: float
    interval_s: float
    run: RunPicture | None
    history: tuple[NodeReading, ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether the driver answers no more."""
        return self.silent_s > self.interval_s + SILENT_S

    @property
    def elapsed_s(self) -> float:
        """Between the two readings; 0 where there is one at most."""
        return 0.0 if self.before is None or self.now is None else self.now.at_s - self.before.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a line may take: ``width`` columns of the screen; with ``has_boxes`` it is a terminal, else a log."""

    width: int
    has_boxes: bool

    @property
    def inner(self) -> int:
        """Columns of a line inside its section."""
        return max(1, self.width - (EDGE if self.has_boxes else len(INDENT)))

    @property
    def is_wide(self) -> bool:
        """Whether there is room for NVML's own names."""
        return self.width >= WIDE

    @property
    def sparks(self) -> int:
        """Readings of a sparkline; 0 for none."""
        if not self.has_boxes or self.width < LEAST_WIDTH:
            return 0
        return WIDE_SPARK if self.is_wide else SPARK


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSection:
    """A part of the screen; ``name`` is what the last line calls a box that does not fit."""

    name: str
    title: str
    lines: Sequence[Text]
    style: str = "blue"


def rendered(part: RenderableType, width: int) -> list[Text]:
    """The lines of one of rich's renderables."""
    return [Text.from_ansi(line) for line in printed([part], width=width, color=True)]


def sections(view: View, room: Room, shows: Shows) -> list[WatchSection]:
    """What the screen shows, the most important first."""
    run = view.run
    read = run if run is not None and run.problem is None else None
    found: list[WatchSection] = []
    if shows == "all" and run is not None:
        found.append(_run_section(run, room))
    if shows != "log":
        found.append(_node_section(view, room))
    if shows == "all" and read is not None and read.culprits:
        found.append(_bad_parts(read, room))
    if shows != "log" and view.now is not None:
        found.append(WatchSection(name="ports", title="ports, Gbit/s", lines=_port_lines(view, view.now, room)))
    if shows != "node" and read is not None and read.logs:
        lines = [Text(safe(f"{name} | {line}")) for name, line in read.logs[:MOST_LOG_LINES]]
        found.append(WatchSection(name="log", title="log, newest file first", lines=lines))
    if shows == "all" and read is not None:
        found.append(WatchSection(name="variables", title="NCCL variables of the run", lines=_variable_lines(read)))
    nothing = Text("no run is watched, or none of its logs has a line yet", style="dim")
    return found or [WatchSection(name="log", title="log", lines=[nothing])]


# --- This node ---


def _node_section(view: View, room: Room) -> WatchSection:
    head, now = safe(f"{view.hostname}   {view.at}"), view.now
    if now is None:
        return WatchSection(name="node", title=head, lines=_notes_of(view))
    title = f"{head}   {_what_is_there(now)}"
    lines = [*_notes_of(view), *_gpu_lines(view, now, room)]
    return WatchSection(name="node", title=title, lines=lines, style="red" if view.is_late else "blue")


def _notes_of(view: View) -> list[Text]:
    """What stands above the values of this node, or in their place: none was read yet, they are old, there is no GPU."""
    now, silent = view.now, f"for {view.silent_s:.0f} s"
    if now is None:
        return [Text(f"waiting for the first reading{f', {silent} now' if view.silent_s > SILENT_S else ''}")]
    late = Text(f"the driver has not answered {silent}: the values are that old", style="bold red")
    notes = [late] if view.is_late else []
    if isinstance(now.gpus, NotAvailable):
        return [*notes, Text(safe(f"GPUs: {now.gpus.why}"))]
    return notes if now.gpus else [*notes, Text("NVML shows no GPU")]


def _what_is_there(now: NodeReading) -> str:
    """The kinds of GPU of this node."""
    if isinstance(now.gpus, NotAvailable):
        return "no GPU to be seen"
    names = Counter(words_of(gpu.name) for gpu in known_gpus(now).values())
    kinds = [f"{number} x {name}" for name, number in names.items()]
    lost = len(now.gpus) - names.total()
    return ", ".join([*kinds, *([f"{lost} cannot be read"] if lost else [])]) or "no GPU"


def _gpu_lines(view: View, now: NodeReading, room: Room) -> list[Text]:
    """The table of GPUs. The line of one that cannot be read says why, across all columns."""
    old = known_gpus(view.before)
    past = [known_gpus(reading) for reading in (view.history or (now,))[-room.sparks :]]
    rows = [
        [
            ("GPU", str(index)),
            *_cells(gpu, rates_of(gpu, old.get(index), view.elapsed_s), [one[index] for one in past if index in one], room),
        ]
        for index, gpu in known_gpus(now).items()
    ]
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading, _ in rows[0] if rows else ():
        made.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(cell for _, cell in row))
    lines = rendered(made, width_of(made)) if rows else []
    for index, gpu in enumerate(or_none(now.gpus) or []):
        if isinstance(gpu, NotAvailable):
            lines.insert(index + 1, Text(safe(f"{index:>3} cannot be read: {gpu.why}"), style="red"))
    return lines


def _cells(
    gpu: LiveGpu, rates: Mapping[str, float | None], seen: Sequence[LiveGpu], room: Room
) -> list[tuple[str, str | Text]]:
    """The cells of a GPU with their headings; use and power have their sparklines beside them."""
    limit_w, power_w = or_none(gpu.power_limit_w), or_none(gpu.power_w)
    is_capped = power_w is not None and limit_w is not None and 100 * power_w >= HOT_PERCENT * limit_w
    use, power = (
        [("", Text(sparkline(values, most=most).ljust(room.sparks), style=style))] if room.sparks else []
        for values, most, style in (
            ([or_none(one.busy_percent) for one in seen], FULL_PERCENT, "green"),
            ([or_none(one.power_w) for one in seen], limit_w, "yellow" if is_capped else "cyan"),
        )
    )
    unit = " GB/s" if room.is_wide else ""
    return [
        ("use", words_of(apply("{}%".format, gpu.busy_percent))),
        *use,
        ("W/limit", f"{number_cell(gpu.power_w)}/{number_cell(gpu.power_limit_w)}"),
        *power,
        ("GiB", f"{number_cell(gpu.memory_used_gib, 1)}/{number_cell(gpu.memory_gib)}"),
        ("C/mem", f"{number_cell(gpu.temperature_c)}/{number_cell(gpu.memory_temperature_c)}"),
        ("MHz", number_cell(gpu.sm_clock_mhz)),
        *([] if room.has_boxes else [("mem", number_cell(gpu.memory_clock_mhz))]),
        (f"NVLink{unit}", link_cell(rates, "nvlink")),
        *([(f"PCIe{unit}", link_cell(rates, "pcie"))] if room.is_wide or not room.has_boxes else []),
        ("events", reasons_of(gpu.event_reasons, is_wide=room.is_wide)),
    ]


def sparkline(values: Sequence[float | None], *, most: float | None) -> str:
    """A block for each value, from nothing to ``most`` (by default the largest one); a dot where a value is not known."""
    top = most or max((value for value in values if value is not None), default=0.0) or 1.0
    last = len(BLOCKS) - 1
    return "".join("·" if one is None else BLOCKS[min(last, max(0, round(last * one / top)))] for one in values)


def known_gpus(reading: NodeReading | None) -> dict[int, LiveGpu]:
    """The GPUs that could be read, by their number."""
    known, _ = split(dict(enumerate([] if reading is None else or_none(reading.gpus) or [])))
    return known


def rates_of(gpu: LiveGpu | LivePort, before: LiveGpu | LivePort | None, elapsed_s: float) -> dict[str, float | None]:
    """What went over each of its links since an earlier reading, in GB/s."""
    old = {} if before is None else before.counted_bytes
    return {name: rate_gb_s(old.get(name), count, elapsed_s) for name, count in gpu.counted_bytes.items()}


def reasons_of(names: list[str] | NotAvailable, *, is_wide: bool) -> Text:
    """Event reasons, faults first and red: what is cut off is never a fault after what is normal."""
    if isinstance(names, NotAvailable):
        return Text(NOTHING)
    ordered = sorted(names, key=lambda name: name not in FAULT_REASONS)
    shown = ordered if is_wide else [SHORT_REASONS.get(name, name) for name in ordered]
    return Text(safe(", ".join(shown)), style="bold red" if FAULT_REASONS & {*names} else "")


def number_cell(value: float | NotAvailable, digits: int = 0) -> str:
    """A number, or a dash where it is not available."""
    known = or_none(value)
    if known is None:
        return NOTHING
    return f"{known:.{0 if known >= 100 else digits}f}"


def rate_cell(gb_s: float | None) -> str:
    """Three columns: ``0.0``, ``9.9``, ``450``."""
    if gb_s is None:
        return NOTHING
    return f"{gb_s:.1f}" if gb_s < 9.95 else f"{gb_s:.0f}"


def link_cell(rates: Mapping[str, float | None], name: str) -> str:
    """Sent and received over one kind of link."""
    return f"{rate_cell(rates.get(f'{name}_tx'))}/{rate_cell(rates.get(f'{name}_rx'))}"


def words_of(value: str | NotAvailable) -> str:
    """A text, or a dash where it is not available."""
    return NOTHING if isinstance(value, NotAvailable) else safe(value)


def _port_lines(view: View, now: NodeReading, room: Room) -> list[Text]:
    """The ports of all adapters: a heading, then cells beside each other."""
    if isinstance(now.ports, NotAvailable) or not now.ports:
        return [Text("no InfiniBand, RoCE or EFA adapter is to be seen", style="dim")]
    old = {port.name: port for port in ([] if view.before is None else or_none(view.before.ports) or [])}
    cells = [_port_cell(port, old.get(port.name), view.elapsed_s) for port in now.ports]
    title = f"{'port':<12}{'state':<7}{'Gbit/s':>6}{'tx':>6}{'rx':>6}  "
    across = _across(room, PORT_CELL, len(cells))
    return [Text(title * across, style="dim"), *_rows(cells, across)]


def _port_cell(port: LivePort, before: LivePort | None, elapsed_s: float) -> Text:
    rates = rates_of(port, before, elapsed_s)
    tx, rx = (rate_cell(rate and rate * GBIT_IN_GB) for rate in (rates["tx"], rates["rx"]))
    state = words_of(port.state)[:6]
    text = f"{safe(port.name)[:11]:<12}{state:<7}{number_cell(port.rate_gbit_s):>6}{tx:>6}{rx:>6}  "
    return Text(text, style="" if port.state == "ACTIVE" else "yellow")


def _across(room: Room, cell: int, number: int) -> int:
    """How many cells of that width stand beside each other; the last one needs no gap behind it."""
    return max(1, min((room.inner + 2) // cell, number))


def _rows(cells: Sequence[Text], across: int) -> list[Text]:
    return [Text.assemble(*cells[start : start + across]) for start in range(0, len(cells), across)]


# --- The run ---


def _run_section(run: RunPicture, room: Room) -> WatchSection:
    title = safe(f"run {run.source}")
    if run.problem is not None:
        return WatchSection(name="run", title=title, lines=[Text(safe(run.problem), style="yellow")], style="yellow")
    lines = [_run_head(run), *_state_lines(run, room), progress_line(run), *_counts_lines(run)]
    if run.is_partial:
        lines.append(Text("the journal is being read: this is not the newest yet", style="yellow"))
    if run.unread:
        lines.append(Text(f"{counted(run.unread, 'line')} of the journal cannot be read", style="yellow"))
    lines += _progress_of_nodes(run, room)
    return WatchSection(name="run", title=title, lines=lines, style="red" if run.counts.get(FAILED) else "green")


def _run_head(run: RunPicture) -> Text:
    """Which run it is."""
    simulated = "SIMULATED fleet: no GPU is measured" if run.facts.get("simulated") else ""
    facts = [f"{name} {run.facts[name]}" for name in ("level", "profile") if run.facts.get(name)]
    return Text(safe(", ".join(filter(None, [simulated, *facts, run.shape]))))


def _state_lines(run: RunPicture, room: Room) -> list[Text]:
    """Whether the run goes on, ended, or was left."""
    ago = f"last entry {clock(run.silent_s)} ago"
    if run.verdict_line is not None:
        style = "bold red" if run.counts.get(FAILED) else "bold"
        return _folded(f"ended {clock(run.silent_s)} ago: {run.verdict_line}", room, style=style)
    if run.holder is not None:
        return [Text(f"running, process {run.holder}, {ago}")]
    return _folded(f"no process of this machine runs it, and it has no verdict; {ago}", room, style="yellow")


def progress_line(run: RunPicture) -> Text:
    """``[#######---------] 45 %, 45 of 100 checks after 1:03, next bf16_tflops``."""
    full, percent = (parts * run.done // max(run.expected, 1) for parts in (BAR_WIDTH, 100))
    bad, open_ = (sum(run.counts.get(kind, 0) for kind in kinds) for kinds in ((FAILED, WAIVED), UNMEASURED))
    text = f"] {percent} %, {run.done} of {run.expected} checks after {clock(run.elapsed_s)}"
    text += f", soak round {run.soak_round}" if run.soak_round is not None else ""
    is_open = run.verdict_line is None and run.next_criterion is not None
    text += f", next {run.next_criterion}" if is_open else ""
    return Text.assemble("[", ("#" * full, _colour(bad, open_) or "green"), "-" * (BAR_WIDTH - full), safe(text))


def _counts_lines(run: RunPicture) -> list[Text]:
    """How many outcomes of each kind there are; no line where the verdict has said it."""
    if run.verdict_line is not None:
        return []
    words = [count_of(kind, run.counts[kind]) for kind in (*OUTCOMES, WAIVED) if run.counts.get(kind)]
    return [Text(", ".join(words) or "nothing is measured yet", style="red" if run.counts.get(FAILED) else "")]


def _progress_of_nodes(run: RunPicture, room: Room) -> list[Text]:
    """A line for each of a few nodes, a cell for each of many: those with bad outcomes first."""
    if len(run.nodes) <= MOST_NODES:
        return [_node_line(node, is_wide=room.is_wide) for node in run.nodes]
    ordered = sorted(run.nodes, key=lambda node: ("red", "yellow", "").index(_style(node)))
    cells = [_node_cell(node) for node in ordered[:MOST_CELLS]]
    lines = _rows(cells, _across(room, NODE_CELL, len(cells)))
    if left := ordered[MOST_CELLS:]:
        bad = sum(_style(node) != "" for node in left)
        lines.append(Text(f"and {counted(len(left), 'more node')}, {bad} of them bad, absent or not measured"))
    return lines


def _colour(bad: int, unmeasured: int) -> str:
    return "red" if bad else "yellow" if unmeasured else ""


def _style(node: NodeProgress) -> str:
    """Red for what is bad or absent, yellow for what was not measured, empty for all other nodes."""
    return _colour(node.is_absent + node.bad, node.errors + node.missing)


def _state(node: NodeProgress) -> str:
    """How far a node is: ``  96 %, 2 bad, 1 error, 1 missing``."""
    if node.is_absent:
        return "absent"
    share = f"{100 * node.done // node.expected} %" if node.expected else NOTHING
    counts = (f"{node.bad} bad", counted(node.errors, "error"), f"{node.missing} missing")
    return ", ".join([f"{share:>5}", *(one for one in counts if not one.startswith("0 "))])


def _node_cell(node: NodeProgress) -> Text:
    text = f"{node.id:<9}{_state(node)}"[: NODE_CELL - 1].ljust(NODE_CELL)
    return Text(text, style=_style(node))


def _node_line(node: NodeProgress, *, is_wide: bool) -> Text:
    name = node.id if node.hostname is None else f"{node.id} ({node.hostname})"
    spans = "  ".join(f"{_span(span)} {'MHz' if unit == 'SM MHz' else unit}" for unit, span in node.telemetry.items())
    line = Text().append(safe(f"{name}  {_state(node)}"), style=_style(node))
    return line.append("  ").append(reasons_of([*node.reasons], is_wide=is_wide)).append(f"  {spans}")


def _span(span: tuple[float, float]) -> str:
    low, high = (f"{value:.0f}" for value in span)
    return low if low == high else f"{low}-{high}"


def _bad_parts(run: RunPicture, room: Room) -> WatchSection:
    """What is bad so far, a part or cause each."""
    bad, culprits = "bad so far" if run.verdict_line is None else "bad", run.culprits
    lines = [line for culprit in culprits[:MOST_PARTS] for line in _folded(_part(culprit, run.places), room, style="red")]
    more = [Text(f"and {len(culprits) - MOST_PARTS} more")] if len(culprits) > MOST_PARTS else []
    title = f"{bad}: {counted(len(culprits), 'part or cause', 'parts or causes')}"
    return WatchSection(name="bad parts", title=title, lines=[*lines, *more], style="red")


def _part(culprit: Culprit, places: Mapping[str, Place]) -> str:
    where = culprit.place or counted(len(culprit.places), "place")
    place = places.get(where)
    if culprit.place is not None and culprit.is_absent_node and (place is None or place.hostname is None):
        where = "(unknown host)"
    elif place is not None:
        where = place.named
    criteria = culprit.criteria
    why = next(iter(culprit.evidence), ", ".join(criteria))
    number = f", {counted(len(criteria), 'criterion', 'criteria')}" if len(criteria) > 1 else ""
    return f"{culprit.kind} {where}{number}: {why}"


def _folded(text: str, room: Room, *, style: str) -> list[Text]:
    """A text that is worth a few lines, but no more."""
    lines = [Text(line, style=style) for line in wrapped(safe(text), width=room.inner, indent="")]
    if len(lines) > MOST_FOLDED:
        lines[MOST_FOLDED - 1].append(" ...")
    return lines[:MOST_FOLDED]


def _variable_lines(run: RunPicture) -> list[Text]:
    """The NCCL variables and the nodes that have them."""
    if run.variables is None:
        return [Text("not read yet", style="dim")]
    lines = [Text(safe(f"{name}  {_who(nodes, run)}")) for name, nodes in run.variables.items()]
    more = [Text(f"and {len(lines) - MOST_VARIABLES} more")] if len(lines) > MOST_VARIABLES else []
    return [*(lines[:MOST_VARIABLES] or [Text("none is set", style="dim")]), *more]


def _who(nodes: Sequence[str], run: RunPicture) -> str:
    return "on all nodes" if len(nodes) == len(run.nodes) > 1 else f"on {hostlist(nodes)}"
