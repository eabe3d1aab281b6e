"""``gpucluster watch``: a live picture of this node, and of a run by its files. It reads only, and touches no run.

On a terminal it has boxes with bars, sparklines and colours, as many as fit.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.commands import watch_screen as plain
from pytest_gpucluster.commands.watch_screen import View, plain_text, screen_lines
from pytest_gpucluster.config.run_files import JOURNAL, RESULTS_DIR
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none
from pytest_gpucluster.inventory.watched_node import LiveGpu, NodeReader, NodeReading
from pytest_gpucluster.judging.verdict import BAD, FAILED, WAIVED
from pytest_gpucluster.reporting.lines import printed, safe
from pytest_gpucluster.reporting.watched_run import RunPicture, WatchedRun
from pytest_gpucluster.text import counted

Shows: TypeAlias = Literal["all", "node", "log"]

BLOCKS = "▁▂▃▄▅▆▇"
"""Without the whole block: lines below each other would run together."""
SPARK, WIDE_SPARK, LEAST_WIDTH = 6, 12, 80
"""Readings of a sparkline; a terminal of fewer columns has none."""
EDGE = 4
"""Columns that a box takes on both sides."""
HOT_PERCENT, FULL_PERCENT = 95, 100
COLUMNS = (("GPU", "right"), ("use", "right"), ("", "left"), ("W/limit", "right"), ("", "left"), ("GiB", "right"))
MORE_COLUMNS = (("C/mem", "right"), ("MHz", "right"))
KEYS = {"all": "q quit   n node   l log", "node": "q quit   n all   l log", "log": "q quit   n node   l all"}
PLAIN_WIDTH = 100
"""Columns of a log."""
READ_S = 10.0
"""How long one picture waits for the driver, beyond the interval between its two readings."""
STEP_BYTES = 2**21
"""Of a long journal this much is read before keys are looked at again."""
QUIT = b"qQ\x03\x04"
SHOWN_BY: Mapping[int, Shows] = {ord("n"): "node", ord("l"): "log"}
"""Keys that show one part alone, and everything when they are pressed again."""


def live_lines(view: View, *, width: int, height: int | None, shows: Shows = "all") -> list[Text]:
    """The lines of the screen. Boxes stand whole, the most important first; the last line has the keys, and what did not fit.

    Args:
        view: what is known at this moment.
        width: columns of the terminal.
        height: its lines; None where it may be as high as it has to be, and no key is read.
        shows: everything, this node alone, or the log alone.
    """
    boxes = [(name, _rendered(box, width)) for name, box in _boxes(view, width, shows)]
    if height is None:
        return [line for _, lines in boxes for line in lines]
    shown: list[Text] = []
    hidden: list[str] = []
    for name, lines in boxes:
        if not hidden and len(shown) + len(lines) < height:
            shown += lines
        elif not shown:
            shown += lines[: height - 1]
            hidden.append(name)
        else:
            hidden.append(name)
    more = f"   below: {', '.join(hidden)} (a taller terminal shows all)" if hidden else ""
    foot = Text(f" {KEYS[shows]}{more}", style="dim")
    foot.truncate(width, overflow="ellipsis")
    return [*shown, foot]


def _rendered(box: RenderableType, width: int) -> list[Text]:
    return [Text.from_ansi(line) for line in printed([box], width=width, color=True)]


def _boxes(view: View, width: int, shows: Shows) -> list[tuple[str, RenderableType]]:
    """The boxes by name, the most important first."""
    inner = max(1, width - EDGE)
    run = view.run
    boxes: list[tuple[str, RenderableType]] = []
    is_known = run is not None and run.problem is None
    if run is not None and shows == "all":
        boxes.append(("run", _run_box(run, inner)))
    if shows != "log":
        boxes.append(("node", _node_box(view, inner, width)))
    if run is not None and is_known and shows == "all" and (bad := plain.part_lines(run, inner)):
        boxes.append(("bad parts", _box(bad[0].plain.strip(), bad[1:], style="red")))
    if shows != "log" and view.now is not None:
        boxes.append(("ports", _box("ports, Gbit/s", plain.port_lines(view.before, view.now, view.elapsed_s, inner))))
    if run is not None and is_known and (shows != "node") and (lines := plain.log_lines(run)):
        boxes.append(("log", _box("log, newest file first", lines[2:])))
    if run is not None and is_known and shows == "all":
        boxes.append(("variables", _box("NCCL variables of the run", plain.variable_lines(run)[2:])))
    return boxes or [("log", _box("log", [Text("no run is watched, or none of its logs has a line yet", style="dim")]))]


def _box(title: str, lines: Sequence[RenderableType], *, style: str = "blue") -> Panel:
    """The lines in a frame, without the indent that they have on the plain screen, and none broken."""
    inside: list[RenderableType] = [_cut(line) if isinstance(line, Text) else line for line in lines]
    return Panel(Group(*inside), title=Text(safe(title), style="bold default"), title_align="left", border_style=style)


def _cut(line: Text) -> Text:
    kept = line[len(plain.INDENT) :] if line.plain.startswith(plain.INDENT) and len(line) > len(plain.INDENT) else line
    kept.rstrip()
    kept.no_wrap, kept.overflow = True, "ellipsis"
    return kept


def _run_box(run: RunPicture, inner: int) -> Panel:
    title = f"run {run.source}"
    if run.problem is not None:
        return _box(title, [Text(safe(run.problem), style="yellow")], style="yellow")
    head = plain.run_head(run, has_names=False)
    bad = any(run.counts.get(kind) for kind in (*BAD, WAIVED))
    lines: list[RenderableType] = [head, *plain.state_lines(run, inner), _bar(run, inner, is_bad=bad), *plain.counts_lines(run)]
    lines += [Text(f"{counted(run.unread, 'line')} of the journal cannot be read", style="yellow")] if run.unread else []
    return _box(title, [*lines, *plain.progress_of_nodes(run, inner)], style="red" if run.counts.get(FAILED) else "green")


def _bar(run: RunPicture, inner: int, *, is_bad: bool) -> Table:
    """The share of checks that have an outcome as a bar, then in words."""
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=max(10, inner // 4))
    row.add_column(no_wrap=True, overflow="ellipsis")
    style = "red" if is_bad else "green"
    bar = ProgressBar(total=max(run.expected, 1), completed=run.done, complete_style=style, finished_style=style)
    row.add_row(bar, Text(f"{plain.percent_of(run)} %  {plain.progress_words(run)}"))
    return row


def _node_box(view: View, inner: int, width: int) -> Panel:
    """The GPUs of this node, a line each, with how use and power went."""
    now, head = view.now, f"{view.hostname}   {view.at}"
    if now is None:
        return _box(head, plain.notes_of(view))
    has_gpus = not isinstance(now.gpus, NotAvailable) and bool(now.gpus)
    tables = [Group(*_gpu_lines(view, now, inner, width))] if has_gpus else []
    style = "red" if view.is_late and has_gpus else "blue"
    return _box(f"{head}   {plain.what_is_there(now)}", [*plain.notes_of(view), *tables], style=style)


def _gpu_lines(view: View, now: NodeReading, inner: int, width: int) -> list[Text]:
    """The table of GPUs. The line of one that cannot be read says why, across all columns."""
    is_wide = width >= plain.WIDE
    size = WIDE_SPARK if is_wide else SPARK if width >= LEAST_WIDTH else 0
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", width=inner)
    rates = (("NVLink GB/s", "right"), ("PCIe GB/s", "right")) if is_wide else (("NV GB/s", "right"),)
    for name, side in (*COLUMNS, *MORE_COLUMNS, *rates):
        made.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    made.add_column("events", no_wrap=True, overflow="ellipsis", ratio=1)
    old = plain.known_gpus(view.before)
    past = [plain.known_gpus(reading) for reading in (view.history or (now,))[-size:]] if size else []
    for index, gpu in plain.known_gpus(now).items():
        link_rates = plain.rates_of(gpu, old.get(index), view.elapsed_s)
        links = [plain.link_cell(link_rates, name) for name in (("nvlink", "pcie") if is_wide else ("nvlink",))]
        seen = [one[index] for one in past if index in one]
        made.add_row(str(index), *_cells(gpu, seen, size), *links, plain.reasons_of(gpu.event_reasons, is_wide=is_wide))
    rows, gpus = iter(_rendered(made, inner)), enumerate(or_none(now.gpus) or [])
    return [next(rows), *(plain.lost_line(one, gpu) if isinstance(gpu, NotAvailable) else next(rows) for one, gpu in gpus)]


def _cells(gpu: LiveGpu, seen: Sequence[LiveGpu], size: int) -> list[Text | str]:
    """Use and power, each with its sparkline beside it, memory, temperatures and clock."""
    limit = or_none(gpu.power_limit_w)
    power = or_none(gpu.power_w)
    is_capped = power is not None and limit is not None and 100 * power >= HOT_PERCENT * limit
    return [
        plain.words_of(apply("{}%".format, gpu.busy_percent)),
        Text(sparkline([or_none(one.busy_percent) for one in seen], most=FULL_PERCENT).ljust(size), style="green"),
        f"{plain.number_cell(gpu.power_w)}/{plain.number_cell(gpu.power_limit_w)}",
        Text(
            sparkline([or_none(one.power_w) for one in seen], most=limit).ljust(size), style="yellow" if is_capped else "cyan"
        ),
        f"{plain.number_cell(gpu.memory_used_gib)}/{plain.number_cell(gpu.memory_gib)}",
        f"{plain.number_cell(gpu.temperature_c)}/{plain.number_cell(gpu.memory_temperature_c)}",
        plain.number_cell(gpu.sm_clock_mhz),
    ]


def sparkline(values: Sequence[float | None], *, most: float | None) -> str:
    """A block for each value, from nothing to ``most`` (by default the largest one); a dot where a value is not known."""
    top = most or max((value for value in values if value is not None), default=0.0) or 1.0
    last = len(BLOCKS) - 1
    return "".join("·" if one is None else BLOCKS[min(last, max(0, round(last * one / top)))] for one in values)


class _EndedError(Exception):
    """A signal asks to end; the argument is its number."""


def main(chosen: argparse.Namespace) -> int:
    """Watch until somebody ends it; 0, or 128 and the number of the signal that ended it.

    Raises:
        ConfigurationError: an interval that is none, or a folder that does not exist.
    """
    if chosen.source is not None and not chosen.source.exists():
        raise ConfigurationError(f"{chosen.source} does not exist; say the results directory of a run, or leave it out")
    if not (0.1 <= chosen.interval_s <= 3600 and math.isfinite(chosen.interval_s)):
        raise ConfigurationError(f"--interval-s {chosen.interval_s:g} is not a time from 0.1 to 3600 s")
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with _ended_by(signal.SIGTERM, signal.SIGHUP), NodeReader(interval_s=chosen.interval_s) as reader:
            _watch(_Watch(reader, chosen), chosen)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of the log has gone; what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except _EndedError as ended:
        return 128 + int(ended.args[0])
    return 0


def _watch(watch: _Watch, chosen: argparse.Namespace) -> None:
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    has_boxes = is_terminal and not chosen.plain and not os.environ.get("NO_COLOR")
    if chosen.once:
        watch.reader.wait_for_two(chosen.interval_s + READ_S)
        watch.print_once(has_boxes=has_boxes)
    elif chosen.plain or not is_terminal:
        watch.print_blocks()
    else:
        watch.live()


class _Watch:
    """What is watched, and the ways to show it."""

    def __init__(self, reader: NodeReader, chosen: argparse.Namespace) -> None:
        self.reader = reader
        self._interval_s = float(chosen.interval_s)
        source = chosen.source
        if source is None and Path(RESULTS_DIR, JOURNAL).exists():
            source = Path(RESULTS_DIR)
        self._run = None if source is None else WatchedRun(source)
        self._history: tuple[NodeReading, ...] = ()

    def view(self, *, most_bytes: int | None = None) -> View:
        """The picture of this moment, after so many bytes more of the journal."""
        before, now = self.reader.last
        if now is not None and (not self._history or self._history[-1] is not now):
            self._history = (*self._history, now)[-WIDE_SPARK:]
        return View(
            hostname=socket.gethostname(),
            at=time.strftime("%Y-%m-%d %H:%M:%S"),
            before=before,
            now=now,
            silent_s=self.reader.silent_s,
            interval_s=self._interval_s,
            run=None if self._run is None else self._run.picture(most_bytes=most_bytes),
            history=self._history,
        )

    def print_once(self, *, has_boxes: bool) -> None:
        """One picture, whatever the height of the screen."""
        width = _plain_width()
        if has_boxes:
            Console(legacy_windows=False, highlight=False).print(Group(*live_lines(self.view(), width=width, height=None)))
        else:
            sys.stdout.write(plain_text(screen_lines(self.view(), width=width)))
        sys.stdout.flush()

    def print_blocks(self) -> None:
        """A block every interval, for a log; the first one as soon as there are rates."""
        self.reader.wait_for_two(self._interval_s + READ_S)
        while True:
            sys.stdout.write(plain_text(screen_lines(self.view(), width=_plain_width())) + "\n")
            sys.stdout.flush()
            time.sleep(self._interval_s)

    def live(self) -> None:
        """The whole terminal, drawn again every interval, until a key ends it."""
        console = Console(legacy_windows=False, highlight=False)
        shows: Shows = "all"
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live:
            while True:
                width, height = console.size
                view = self.view(most_bytes=STEP_BYTES)
                live.update(Group(*live_lines(view, width=width, height=height, shows=shows)), refresh=True)
                typed = _typed(keys, 0.0 if view.run is not None and view.run.is_partial else self._interval_s)
                if typed is None or any(byte in QUIT for byte in typed):
                    return
                for key in typed.lower():
                    shows = "all" if shows == SHOWN_BY.get(key) else SHOWN_BY.get(key, shows)


def _plain_width() -> int:
    """Columns of a terminal; without one ``COLUMNS``, or those of a log."""
    with contextlib.suppress(OSError, ValueError):
        return max(40, int(os.environ["COLUMNS"]) if "COLUMNS" in os.environ else os.get_terminal_size(1).columns)
    return PLAIN_WIDTH


def _typed(keys: int | None, wait_s: float) -> bytes | None:
    """The keys that are pressed within this time, none of them if no terminal has any; None where the terminal has gone.

    Letters that a function or cursor key sends are no keys.
    """
    if keys is None:
        time.sleep(wait_s)
        return b""
    ready, _, _ = select.select([keys], [], [], wait_s)
    return (typed.partition(b"\x1b")[0] if (typed := os.read(keys, 64)) else None) if ready else b""


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Single keys of the terminal, which are not shown; None without one. The terminal is afterwards as it was before.

    Ctrl-Z has no effect: a stopped process would leave the terminal as it is.
    """
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        now = termios.tcgetattr(keys)
        now[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(keys, termios.TCSANOW, now)
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """Leave the block when one of these comes, so that the terminal is restored."""

    def end(number: int, _frame: Any) -> None:
        raise _EndedError(number)

    before = {one: signal.signal(one, end) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
