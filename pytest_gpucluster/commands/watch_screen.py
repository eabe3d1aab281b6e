"""The plain screen of ``gpucluster watch``, and the cells of any. Pure: readings in, lines out, none wider than the screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pytest_gpucluster.inventory.nvml import FAULT_REASONS
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none, split
from pytest_gpucluster.inventory.watched_node import LiveGpu, LivePort, NodeReading, rate_gb_s
from pytest_gpucluster.judging.forecast import clock
from pytest_gpucluster.judging.verdict import FAILED, OUTCOMES, WAIVED, count_of
from pytest_gpucluster.reporting.lines import hostlist, safe, wrapped
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.judging.culprits import Culprit
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.reporting.watched_run import NodeProgress, RunPicture

NOTHING = "-"
"""Stands where a value is not available, or where no rate can be said."""
INDENT = "  "
GBIT_IN_GB = 8
SILENT_S = 5.0
"""A reading that is later than this beyond its interval: the driver hangs."""
BAR_WIDTH = 20
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
GPU_COLUMNS = (
    ("GPU", 3), ("busy", 4), ("mem GiB", 8), ("C/mem", 7), ("W/limit", 9), ("SM", 4), ("mem", 4), ("NVLink", 7), ("PCIe", 7),
)  # fmt: skip
WIDE = 110


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


def screen_lines(view: View, *, width: int) -> list[Text]:
    """The lines from top to bottom. One that is too wide goes on below, set in; only lines of a log are cut."""
    lines = [] if view.run is None else [*_run_lines(view.run, width), Text("")]
    lines += _node_lines(view, width)
    logs: list[Text] = []
    if view.run is not None and view.run.problem is None:
        logs = log_lines(view.run)
        lines += [*logs, *variable_lines(view.run)]
    for line in logs:
        line.truncate(width, overflow="ellipsis")
    return [part for line in lines for part in _whole(line, width)]


def _whole(line: Text, width: int) -> list[Text]:
    parts = [line] if line.cell_len <= width else line.wrap(Console(width=width), width - len(INDENT) * 3)
    for one in parts:
        one.rstrip()
    for one in parts[1:]:
        one.pad_left(len(INDENT) * 3)
    return [*parts]


def plain_text(lines: Iterable[Text]) -> str:
    """The lines without colours and without any control character but newlines."""
    return "".join(f"{line.plain}\n" for line in lines)


def _head(text: str) -> Text:
    return Text(safe(text), style="bold")


# --- This node ---


def _node_lines(view: View, width: int) -> list[Text]:
    head, now = f"{view.hostname}  {view.at}", view.now
    if now is None:
        return [_head(head), *notes_of(view)]
    gpus = _gpu_lines(view.before, now, view.elapsed_s, width)
    ports = port_lines(view.before, now, view.elapsed_s, width)
    return [_head(f"{head}  {what_is_there(now)}"), *notes_of(view), *gpus, *ports]


def notes_of(view: View) -> list[Text]:
    """What stands above the values of this node, or in their place: none was read yet, they are old, there is no GPU."""
    now, silent = view.now, f"for {view.silent_s:.0f} s"
    if now is None:
        return [Text(f"{INDENT}waiting for the first reading{f', {silent} now' if view.silent_s > SILENT_S else ''}")]
    late = Text(f"{INDENT}the driver has not answered {silent}: the values are that old", style="bold red")
    notes = [late] if view.is_late else []
    if isinstance(now.gpus, NotAvailable):
        return [*notes, Text(safe(f"{INDENT}GPUs: {now.gpus.why}"))]
    return notes if now.gpus else [*notes, Text(f"{INDENT}NVML shows no GPU")]


def what_is_there(now: NodeReading) -> str:
    """The kinds of GPU of this node."""
    if isinstance(now.gpus, NotAvailable):
        return "no GPU to be seen"
    names = [words_of(gpu.name) for gpu in known_gpus(now).values()]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    lost = len(now.gpus) - len(names)
    return ", ".join([*kinds, *([f"{lost} cannot be read"] if lost else [])]) or "no GPU"


def _gpu_lines(before: NodeReading | None, now: NodeReading, elapsed_s: float, width: int) -> list[Text]:
    if isinstance(now.gpus, NotAvailable) or not now.gpus:
        return []
    columns, old = _columns(width), known_gpus(before)
    titles = " ".join(f"{name:>{size}}" for name, size in columns)
    units = "   (clocks in MHz, links in GB/s sent/received)" if width >= WIDE else ""
    lines = (
        lost_line(index, gpu)
        if isinstance(gpu, NotAvailable)
        else _gpu_line(index, gpu, rates_of(gpu, old.get(index), elapsed_s), columns)
        for index, gpu in enumerate(now.gpus)
    )
    return [Text(f"{titles} events{units}", style="dim"), *lines]


def lost_line(index: int, gpu: NotAvailable) -> Text:
    """The line of a GPU that cannot be read."""
    return Text(safe(f"{index:>3} cannot be read: {gpu.why}"), style="red")


def known_gpus(reading: NodeReading | None) -> dict[int, LiveGpu]:
    """The GPUs that could be read, by their number."""
    known, _ = split(dict(enumerate([] if reading is None else or_none(reading.gpus) or [])))
    return known


def _columns(width: int) -> Sequence[tuple[str, int]]:
    """A wide screen gives each column but the first more room."""
    return [(name, size + (4 if width >= WIDE and number else 0)) for number, (name, size) in enumerate(GPU_COLUMNS)]


def rates_of(gpu: LiveGpu | LivePort, before: LiveGpu | LivePort | None, elapsed_s: float) -> dict[str, float | None]:
    """What went over each of its links since an earlier reading, in GB/s."""
    old = {} if before is None else before.counted_bytes
    return {name: rate_gb_s(old.get(name), count, elapsed_s) for name, count in gpu.counted_bytes.items()}


def _gpu_line(index: int, gpu: LiveGpu, rates: Mapping[str, float | None], columns: Sequence[tuple[str, int]]) -> Text:
    cells = (
        str(index),
        words_of(apply("{}%".format, gpu.busy_percent)),
        f"{number_cell(gpu.memory_used_gib, 1)}/{number_cell(gpu.memory_gib)}",
        f"{number_cell(gpu.temperature_c)}/{number_cell(gpu.memory_temperature_c)}",
        f"{number_cell(gpu.power_w)}/{number_cell(gpu.power_limit_w)}",
        number_cell(gpu.sm_clock_mhz),
        number_cell(gpu.memory_clock_mhz),
        link_cell(rates, "nvlink"),
        link_cell(rates, "pcie"),
    )
    line = Text(" ".join(f"{cell:>{size}}" for cell, (_, size) in zip(cells, columns, strict=True)))
    is_wide = columns[1][1] > GPU_COLUMNS[1][1]
    return line.append(" ").append(reasons_of(gpu.event_reasons, is_wide=is_wide))


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


def port_lines(before: NodeReading | None, now: NodeReading, elapsed_s: float, width: int) -> list[Text]:
    """The ports of all adapters: a heading, then cells beside each other."""
    if isinstance(now.ports, NotAvailable) or not now.ports:
        return [Text(f"{INDENT}no InfiniBand, RoCE or EFA adapter is to be seen", style="dim")]
    old = {port.name: port for port in ([] if before is None else or_none(before.ports) or [])}
    cells = [_port_cell(port, old.get(port.name), elapsed_s) for port in now.ports]
    title = f"{'port':<12}{'state':<7}{'Gbit/s':>6}{'tx':>6}{'rx':>6}  "
    across = _across(width, PORT_CELL, len(cells))
    return [Text(title * across, style="dim"), *_rows(cells, across)]


def _port_cell(port: LivePort, before: LivePort | None, elapsed_s: float) -> Text:
    rates = rates_of(port, before, elapsed_s)
    tx, rx = (rate_cell(rate and rate * GBIT_IN_GB) for rate in (rates["tx"], rates["rx"]))
    state = words_of(port.state)[:6]
    text = f"{safe(port.name)[:11]:<12}{state:<7}{number_cell(port.rate_gbit_s):>6}{tx:>6}{rx:>6}  "
    return Text(text, style="" if port.state == "ACTIVE" else "yellow")


def _across(width: int, cell: int, number: int) -> int:
    return max(1, min((width + 2) // cell, number))


def _rows(cells: Sequence[Text], across: int) -> list[Text]:
    return [Text.assemble(*cells[start : start + across]) for start in range(0, len(cells), across)]


# --- The run ---


def _run_lines(run: RunPicture, width: int) -> list[Text]:
    head = _head(f"run  {run.source}")
    if run.problem is not None:
        return [head, Text(safe(f"{INDENT}{run.problem}"), style="yellow")]
    lines = [head, Text(INDENT) + run_head(run, has_names=True), *state_lines(run, width)]
    lines += [progress_line(run), *counts_lines(run)]
    if run.is_partial:
        lines.append(Text(f"{INDENT}the journal is being read: this is not the newest yet", style="yellow"))
    if run.unread:
        lines.append(Text(f"{INDENT}{counted(run.unread, 'line')} of the journal cannot be read", style="yellow"))
    return [*lines, *progress_of_nodes(run, width), *part_lines(run, width)]


def state_lines(run: RunPicture, width: int) -> list[Text]:
    """Whether the run goes on, ended, or was left."""
    ago = f"last entry {clock(run.silent_s)} ago"
    if run.verdict_line is not None:
        style = "bold red" if run.counts.get(FAILED) else "bold"
        return _folded(f"ended {clock(run.silent_s)} ago: {run.verdict_line}", width, indent=INDENT, style=style)
    if run.holder is not None:
        return [Text(f"{INDENT}running, process {run.holder}, {ago}")]
    text = f"no process of this machine runs it, and it has no verdict; {ago}"
    return _folded(text, width, indent=INDENT, style="yellow")


def progress_line(run: RunPicture) -> Text:
    """How far the run is, in one line."""
    full = BAR_WIDTH * run.done // max(run.expected, 1)
    return Text(f"{INDENT}[{'#' * full}{'-' * (BAR_WIDTH - full)}] {percent_of(run)} %, {progress_words(run)}")


def percent_of(run: RunPicture) -> int:
    """The share of checks that have an outcome."""
    return 100 * run.done // max(run.expected, 1)


def progress_words(run: RunPicture) -> str:
    """``45 of 64 checks after 1:03, next bf16_tflops``."""
    text = f"{run.done} of {run.expected} checks after {clock(run.elapsed_s)}"
    text += f", soak round {run.soak_round}" if run.soak_round is not None else ""
    is_open = run.verdict_line is None and run.next_criterion is not None
    return safe(f"{text}, next {run.next_criterion}" if is_open else text)


def run_head(run: RunPicture, *, has_names: bool) -> Text:
    """Which run it is; ``has_names``: level and profile stand behind these words."""
    simulated = "SIMULATED fleet: no GPU is measured" if run.facts.get("simulated") else ""
    facts = [f"{name} " * has_names + str(run.facts[name]) for name in ("level", "profile") if run.facts.get(name)]
    return Text(safe(", ".join(filter(None, [simulated, *facts, run.shape]))))


def counts_lines(run: RunPicture) -> list[Text]:
    """How many outcomes of each kind there are; no line where the verdict has said it."""
    if run.verdict_line is not None:
        return []
    words = [count_of(kind, run.counts[kind]) for kind in (*OUTCOMES, WAIVED) if run.counts.get(kind)]
    text = ", ".join(words) or "nothing is measured yet"
    return [Text(f"{INDENT}{text}", style="red" if run.counts.get(FAILED) else "")]


def progress_of_nodes(run: RunPicture, width: int) -> list[Text]:
    """A line for each of a few nodes, a cell for each of many: those with bad outcomes first."""
    if len(run.nodes) <= MOST_NODES:
        return [_node_line(node, is_bound=run.is_bound, width=width) for node in run.nodes]
    ordered = sorted(run.nodes, key=lambda node: not _is_notable(node, is_bound=run.is_bound))
    cells = [_node_cell(node, is_bound=run.is_bound) for node in ordered[:MOST_CELLS]]
    lines = _rows(cells, _across(width - len(INDENT), NODE_CELL, len(cells)))
    left = ordered[MOST_CELLS:]
    if left:
        bad = sum(_is_notable(node, is_bound=run.is_bound) for node in left)
        lines.append(Text(f"and {counted(len(left), 'more node')}, {bad} of them bad or absent"))
    return [Text(INDENT).append_text(line) for line in lines]


def _is_notable(node: NodeProgress, *, is_bound: bool) -> bool:
    return node.bad + node.missing > 0 or (is_bound and not node.answers)


def _share(node: NodeProgress) -> str:
    return f"{100 * node.done // node.expected} %" if node.expected else NOTHING


def _node_cell(node: NodeProgress, *, is_bound: bool) -> Text:
    state = "absent" if is_bound and not node.answers else f"{_share(node):>5}{f' {node.bad} bad' if node.bad else ''}"
    style = "red" if _is_notable(node, is_bound=is_bound) else ""
    return Text(f"{node.id:<9}{state}"[: NODE_CELL - 1].ljust(NODE_CELL), style=style)


def _node_line(node: NodeProgress, *, is_bound: bool, width: int) -> Text:
    name = node.id if node.hostname is None else f"{node.id} ({node.hostname})"
    counts = [f"{number} {word}" for number, word in ((node.bad, "bad"), (node.missing, "missing")) if number]
    state = "absent" if is_bound and not node.answers else f"{_share(node):>5}{', '.join(['', *counts])}"
    spans = "  ".join(f"{_span(span)} {'MHz' if unit == 'SM MHz' else unit}" for unit, span in node.telemetry.items())
    style = "red" if _is_notable(node, is_bound=is_bound) else ""
    line = Text().append(safe(f"{INDENT}{name}  {state}"), style=style)
    return line.append("  ").append(reasons_of([*node.reasons], is_wide=width >= WIDE)).append(f"  {spans}")


def _span(span: tuple[float, float]) -> str:
    low, high = (f"{value:.0f}" for value in span)
    return low if low == high else f"{low}-{high}"


def part_lines(run: RunPicture, width: int) -> list[Text]:
    """What is bad so far, a part or cause each."""
    if not (culprits := run.culprits):
        return []
    bad = "bad so far" if run.verdict_line is None else "bad"
    lines = [Text(f"{INDENT}{bad}: {counted(len(culprits), 'part or cause', 'parts or causes')}", style="bold red")]
    for culprit in culprits[:MOST_PARTS]:
        lines += _folded(_part(culprit, run.places), width, indent=INDENT * 2, style="red")
    more = len(culprits) - MOST_PARTS
    return [*lines, *([Text(f"{INDENT * 2}and {more} more")] if more > 0 else [])]


def _part(culprit: Culprit, places: Mapping[str, Place]) -> str:
    if culprit.place is None:
        where = counted(len(culprit.places), "place")
    else:
        place = places.get(culprit.place)
        is_nameless = culprit.is_absent_node and (place is None or place.hostname is None)
        where = "(unknown host)" if is_nameless else culprit.place if place is None else place.named
    criteria = culprit.criteria
    why = next(iter(culprit.evidence), ", ".join(criteria))
    number = f", {counted(len(criteria), 'criterion', 'criteria')}" if len(criteria) > 1 else ""
    return f"{culprit.kind} {where}{number}: {why}"


def _folded(text: str, width: int, *, indent: str, style: str) -> list[Text]:
    """A text that is worth a few lines, but no more."""
    lines = [Text(line, style=style) for line in wrapped(safe(text), width=width, indent=indent)]
    if len(lines) > MOST_FOLDED:
        lines[MOST_FOLDED - 1].append(" ...")
    return lines[:MOST_FOLDED]


def log_lines(run: RunPicture) -> list[Text]:
    """The last lines of the newest logs."""
    if not run.logs:
        return []
    lines = [Text(safe(f"{INDENT}{name} | {line}")) for name, line in run.logs[:MOST_LOG_LINES]]
    return [Text(""), _head("log, newest file first"), *lines]


def variable_lines(run: RunPicture) -> list[Text]:
    """The NCCL variables and the nodes that have them."""
    title = [Text(""), _head("NCCL variables of the run")]
    if run.variables is None:
        return [*title, Text(f"{INDENT}not read yet", style="dim")]
    lines = [Text(safe(f"{INDENT}{name}  {_who(nodes, run)}")) for name, nodes in run.variables.items()]
    more = [Text(f"{INDENT}and {len(lines) - MOST_VARIABLES} more")] if len(lines) > MOST_VARIABLES else []
    return [*title, *(lines[:MOST_VARIABLES] or [Text(f"{INDENT}none is set", style="dim")]), *more]


def _who(nodes: Sequence[str], run: RunPicture) -> str:
    return "on all nodes" if len(nodes) == len(run.nodes) > 1 else f"on {hostlist(nodes)}"
