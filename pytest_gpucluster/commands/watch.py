"""``gpucluster watch``: a live picture of this node, and of a run by its files. It reads only, and touches no run.

At a terminal each section is a box, and lines that do not fit are cut. In a log each is a heading with lines below it, and what
does not fit goes on in the next line.
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from pytest_gpucluster.commands.watch_screen import INDENT, WIDE_SPARK, Room, Shows, View, WatchSection, rendered, sections
from pytest_gpucluster.config.run_files import JOURNAL, RESULTS_DIR
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.watched_node import NodeReader, NodeReading
from pytest_gpucluster.reporting.watched_run import WatchedRun

PLAIN_WIDTH = 100
"""Columns of a log."""
READ_S = 10.0
"""How long one picture waits for the driver, beyond the interval between its two readings."""
STEP_BYTES = 2**21
"""Of a long journal this much is read before keys are looked at again."""
QUIT = b"qQ\x03\x04"
KEYS: Mapping[Shows, str] = {
    "all": "q quit   n node   l log",
    "node": "q quit   n all   l log",
    "log": "q quit   n node   l all",
}
SHOWN_BY: Mapping[int, Shows] = {ord("n"): "node", ord("l"): "log"}
"""Keys that show one part alone, and everything when they are pressed again."""


def live_lines(view: View, *, width: int, height: int | None, shows: Shows = "all") -> list[Text]:
    """The lines at a terminal. Boxes stand whole, the most important first; the last line has the keys, and what did not fit.

    Args:
        view: what is known at this moment.
        width: columns of the terminal.
        height: its lines; None where it may be as high as it has to be, and no key is read.
        shows: everything, this node alone, or the log alone.
    """
    room = Room(width=width, has_boxes=True)
    boxes = [(one.name, _box(one, room)) for one in sections(view, room, shows)]
    if height is None:
        return [line for _, lines in boxes for line in lines]
    shown: list[Text] = []
    hidden: list[str] = []
    for name, lines in boxes:
        if not hidden and len(shown) + len(lines) < height:
            shown += lines
        else:
            shown += [] if shown else lines[: height - 1]
            hidden.append(name)
    more = f"   below: {', '.join(hidden)} (a taller terminal shows all)" if hidden else ""
    foot = Text(f" {KEYS[shows]}{more}", style="dim")
    foot.truncate(width, overflow="ellipsis")
    return [*shown, foot]


def screen_lines(view: View, *, width: int) -> list[Text]:
    """The lines of a log. One that is too wide goes on below, set in; only those of the logs of a run are cut."""
    room = Room(width=width, has_boxes=False)
    lines: list[Text] = []
    for section in sections(view, room, "all"):
        lines += [Text(""), *_whole(Text(section.title, style="bold"), width)]
        for line in section.lines:
            if section.name == "log":
                line.truncate(room.inner, overflow="ellipsis")
            lines += _whole(Text(INDENT) + line, width)
    return lines[1:]


def plain_text(lines: Iterable[Text]) -> str:
    """The lines without colours and without any control character but newlines."""
    return "".join(f"{line.plain}\n" for line in lines)


def _box(section: WatchSection, room: Room) -> list[Text]:
    """A section in a frame, none of its lines broken."""
    for line in section.lines:
        line.rstrip()
        line.no_wrap, line.overflow = True, "ellipsis"
    title = Text(section.title, style="bold default")
    panel = Panel(Group(*section.lines), title=title, title_align="left", border_style=section.style)
    return rendered(panel, room.width)


def _whole(line: Text, width: int) -> list[Text]:
    parts = [line] if line.cell_len <= width else line.wrap(Console(width=width), width - len(INDENT) * 3)
    for one in parts:
        one.rstrip()
    for one in parts[1:]:
        one.pad_left(len(INDENT) * 3)
    return [*parts]


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
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, _end)
        with NodeReader(interval_s=chosen.interval_s) as reader:
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


def _end(number: int, _frame: Any) -> None:
    """Leave by an exception, so that the terminal is restored."""
    raise _EndedError(number)
