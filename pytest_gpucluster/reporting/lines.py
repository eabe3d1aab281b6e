"""Text for a screen: wrapped at words, cut, written as a shell reads it; and what rich makes of tables, as lines. Pure.

Lists of hosts: in Slurm's short form, ``gpu-node-[0-16,18-22]``; and those that an earlier run met.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import stat
import textwrap
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from pytest_gpucluster.config.host_list import expand, is_address, is_same_host
from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.files import PREVIOUS
from pytest_gpucluster.text import counted, one_line

CONTINUED = " \\"
"""Ends a line of a command that goes on."""
SHORT_OPTION = re.compile("-[a-zA-Z]")
TIE = "\N{NO-BREAK SPACE}"
UNLIMITED = 100_000
SET_IN = "  "
LEFT_OUT = ", ..."


def printed(parts: Iterable[RenderableType], *, width: int, color: bool = False) -> list[str]:
    """The lines of tables and texts. A table fills at most ``width`` columns; a line of text is neither folded nor cut."""
    console = Console(
        file=io.StringIO(),
        width=max(width, 1),
        color_system="standard" if color else None,
        force_terminal=color,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as shown:
        for part in parts:
            console.print(part, soft_wrap=True)
    return [line.rstrip() for line in shown.get().split("\n")[:-1]]


def width_of_screen() -> int:
    """Columns of the terminal, or of ``COLUMNS``; without either a line is as long as it is."""
    console = Console()
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else UNLIMITED


def width_of(table: Table) -> int:
    """Columns that the table needs if no cell is broken."""
    return Console(width=UNLIMITED).measure(table).maximum


def whole(table: Table, *, width: int, spare: Container[str] = ()) -> Table:
    """The table within ``width`` columns, without a cut cell: of each row as many cells stand in a line as fit.

    Args:
        table: its cells are texts.
        width: columns of the screen. A cell that is wider by itself is not broken.
        spare: headings of columns that are left out first, the last one first.
    """
    columns = [*table.columns]
    made = table
    while width_of(made) > width and (rest := [one for one in columns if one.header in spare]):
        columns.remove(rest[-1])
        made = _in_lines(table, columns, len(columns))
    for beside in range(len(columns) - 1, 0, -1):
        if width_of(made) <= width:
            break
        made = _in_lines(table, columns, beside)
    return made


def _in_lines(table: Table, columns: Sequence[Column], beside: int) -> Table:
    """These columns of the table, ``beside`` of them in a line; those of later lines are set in."""
    made = Table(box=None, pad_edge=False, padding=table.padding, header_style=table.header_style)
    heading, *rows = zip(*map(_aligned, columns), strict=True)
    for cells in _stacked(heading, beside):
        made.add_column(cells, no_wrap=True)
    for texts, row in zip(rows, table.rows, strict=True):
        made.add_row(*_stacked(texts, beside), style=row.style)
    return made


def _aligned(column: Column) -> list[Text]:
    """The heading and the cells, where they stand at the right with blanks before them."""
    cells = [one.copy() if isinstance(one, Text) else Text(str(one)) for one in (column.header, *column.cells)]
    widest = max(one.cell_len for one in cells)
    for one in cells if column.justify == "right" else ():
        one.pad_left(widest - one.cell_len)
    return cells


def _stacked(cells: Sequence[Text], beside: int) -> list[Text]:
    lines = [cells[start : start + beside] for start in range(0, len(cells), beside)]
    shown = [lines[0], *([Text(SET_IN) + line[0], *line[1:]] for line in lines[1:] if any(one.plain.strip() for one in line))]
    return [Text("\n").join(line[number] if number < len(line) else Text() for line in shown) for number in range(beside)]


def tied(text: str) -> str:
    """The text as one word: :func:`wrapped` breaks it nowhere, and shows its spaces."""
    return text.replace(" ", TIE)


def wrapped(text: str, *, width: int, indent: str, later: str | None = None) -> list[str]:
    """The text, broken at spaces into lines of at most ``width`` columns. A longer word is not broken.

    Args:
        text: foreign text too; it is made fit for a screen.
        width: columns of the screen.
        indent: stands before the first line.
        later: stands before all other lines; ``indent`` and two spaces by default.
    """
    lines = textwrap.wrap(
        one_line(text),
        max(width, 1),
        initial_indent=indent,
        subsequent_indent=f"{indent}  " if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(TIE, " ") for line in lines or [indent.rstrip()]]


def folded(text: str, *, width: int) -> list[str]:
    """A line that may be too wide, as :func:`wrapped` breaks it: as far set in as it is, and later lines by two more."""
    start = len(text) - len(text.lstrip(" "))
    return wrapped(text[start:], width=width, indent=text[:start]) if len(text) > width else [text]


def shell_command(words: Iterable[str], *, width: int, indent: str, later: str) -> list[str]:
    r"""A command as lines that a shell reads as just these words.

    A line ends with ``\`` and is broken between two words only: a word wider than the screen stays in one line. A short option
    and its value stay together where they fit.

    Args:
        words: the command and its arguments, not quoted.
        width: columns of the screen.
        indent: stands before the first line.
        later: spaces before all other lines.
    """
    room = width - len(CONTINUED)
    pieces: list[str] = []
    for word in map(quoted, words):
        is_value = bool(pieces) and SHORT_OPTION.fullmatch(pieces[-1]) is not None
        if is_value and len(f"{later}{pieces[-1]} {word}") <= room:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    *firsts, last = wrapped(" ".join(map(tied, pieces)), width=room, indent=indent, later=later)
    return [*(f"{line}{CONTINUED}" for line in firsts), last]


def quoted(word: str) -> str:
    r"""The word as a shell reads it, in one line: what no screen can show is ``$'\x1b'``, as bash and zsh read it."""
    if word.isprintable():
        return shlex.quote(word)
    plain = "".join(one if one.isprintable() and one not in "'\\" else _as_bytes(one) for one in word)
    return f"$'{plain}'"


def _as_bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def safe(text: str) -> str:
    """Foreign text in one line, with a blank for each tab: columns stay in line."""
    return one_line(text).replace("\t", " ")


def cut(text: str, width: int) -> str:
    """The text in one line of at most ``width`` columns."""
    line = one_line(text)
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."


def cut_list(text: str, width: int) -> str:
    """Items with commas between them in one line of at most ``width`` columns; the last ones are left out, and none is cut."""
    line = one_line(text)
    if len(line) <= width:
        return line
    kept, comma, _ = line[: max(0, width - len(LEFT_OUT) + 1)].rpartition(",")
    return f"{kept}{LEFT_OUT}" if comma else cut(line, width)


NUMBERED = re.compile(r"(.*[A-Za-z._-][0-9]*?)([0-9]{1,9})\Z")
"""A name that ends with a number, after a beginning of its own. Of a longer row of digits the last 9 are the number."""
EXACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
"""A name that Slurm and a shell take as it is."""
SEPARATORS = " ,[]\\"
MOST_RUNS = 20
"""So many runs of a results directory are looked at, the newest first: the last ones may have bound nothing."""
MOST_BYTES = 256 << 20
"""No journal has its line of bound places later, and no list of hosts is so long."""


def hostlist(names: Iterable[str]) -> str:
    r"""The names in the shortest list that Slurm expands to just these; zeros before a number stay.

    Equal names count once. Names with the same beginning share one pair of brackets. A name has no brackets if it does not end
    with a number, or is nothing but a number. What no hostname has is escaped, as ``\x2c`` for a comma.
    """
    return ",".join(pieces(names))


def pieces(names: Iterable[str]) -> list[str]:
    """The parts of :func:`hostlist`, one for each beginning."""
    parts = ((name, NUMBERED.match(name) if EXACT.match(name) else None) for name in dict.fromkeys(names))
    numbers = grouped((one[1], one[2]) if one is not None else (_escaped(name), "") for name, one in parts)
    return [piece for prefix, found in sorted(numbers.items()) for piece in _folded(prefix, found)]


def names_of_absent(nodes: Sequence[Place]) -> str:
    """The hosts of absent nodes in Slurm's short form, as far as a list names them: ``gpu-node-[1,7], 2 unknown hosts``."""
    known = [node.hostname for node in nodes if node.hostname is not None]
    unknown = len(nodes) - len(known)
    return ", ".join(filter(None, (hostlist(known), counted(unknown, "unknown host") if unknown else "")))


def short_names(hostnames: Sequence[str], *, among: Iterable[str]) -> list[str]:
    """Hostnames without their domains, as Slurm calls its nodes; unchanged where that is the name of several hosts.

    Args:
        hostnames: what to shorten.
        among: all hosts of the run.
    """
    labels = Counter(map(_label, {name.lower() for name in (*hostnames, *among)}))
    return [_label(name) if labels[_label(name.lower())] == 1 else name for name in hostnames]


def _label(hostname: str) -> str:
    """The first label; an address as it is."""
    first = hostname.partition(".")[0]
    return first if first and not first.isdigit() else hostname


def _escaped(name: str) -> str:
    return "".join(one if one.isprintable() and one not in SEPARATORS else _escape(one) for one in name)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _folded(prefix: str, numbers: Sequence[str]) -> list[str]:
    """One beginning with all its numbers; the name without a number apart."""
    unnumbered = [prefix] if "" in numbers else []
    given = sorted((number for number in numbers if number), key=lambda number: (int(number), len(number)))
    if len(given) <= 1:
        return [*unnumbered, *(f"{prefix}{number}" for number in given)]
    left = set(given)
    ranges: list[str] = []
    for first in given:
        if first not in left:
            continue
        last = first
        left.remove(first)
        while (following := str(int(last) + 1).zfill(len(first))) in left:
            last = following
            left.remove(last)
        ranges.append(first if first == last else f"{first}-{last}")
    return [*unnumbered, f"{prefix}[{','.join(ranges)}]"]


def hosts_of_earlier_run(folder: Path) -> tuple[str, ...]:
    """The host of each node in the newest run of a results directory that knew all of them; empty where none did.

    A simulated run tells nothing of real hosts.
    """
    shelves = sorted((folder / PREVIOUS).glob("*"), reverse=True)
    known = (_bound_hosts(run / JOURNAL) for run in [folder, *shelves][:MOST_RUNS])
    return next(filter(None, known), ())


def remembered_hosts(folder: Path, *, num_nodes: int, own: str) -> tuple[str, ...]:
    """The same, where that run had as many nodes, and this host, ``own``, among them: else it was another cluster."""
    hosts = hosts_of_earlier_run(folder)
    return hosts if len(hosts) == num_nodes and any(is_same_host(own, host) for host in hosts) else ()


def hosts_from(text: str) -> tuple[str, ...]:
    """The hosts that ``--hosts`` names: names with commas between, as Slurm writes them too, or a path of what has them.

    A path has a ``/``. A folder is the results directory of an earlier run. A file has the names, a line each or with commas.

    Raises:
        ConfigurationError: no hosts are there, or the text is no list of hosts.
    """
    path = Path(text)
    if "/" not in text and not all(one.strip() for one in text.split(",")):
        raise ConfigurationError(f"--hosts {text!r} names an empty host; say A,B,...")
    if "/" in text and path.is_dir():
        hosts = hosts_of_earlier_run(path)
        if not hosts:
            raise ConfigurationError(f"--hosts {text}: no run in this folder knew the hosts of all its nodes")
        return hosts
    try:
        written = path.read_text(encoding="utf-8").splitlines() if "/" in text else [text]
        hosts = expand(",".join(line.partition("#")[0] for line in written))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--hosts {text}: {getattr(error, 'strerror', None) or error}") from None
    for host, number in Counter(hosts).items():
        if number > 1 or not (EXACT.match(host) or is_address(host)):
            raise ConfigurationError(f"--hosts {text}: {host!r} is {'there twice' if number > 1 else 'no hostname'}")
    if not hosts:
        raise ConfigurationError(f"--hosts {text}: it names no host")
    return hosts


def _bound_hosts(journal: Path) -> tuple[str, ...]:
    for event in _events(journal):
        facts = event.get("facts")
        if event.get("event") == "started" and isinstance(facts, dict) and facts.get("simulated"):
            return ()
        if event.get("event") == "bound":
            return _hosts(event.get("nodes"))
    return ()


def _hosts(nodes: Any) -> tuple[str, ...]:
    """The hostnames by node number; empty where one is not known."""
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        return ()
    by_number = {node.get("node"): node.get("hostname") for node in nodes}
    hosts = [by_number.get(number) for number in range(len(nodes))]
    return tuple(map(str, hosts)) if all(isinstance(host, str) and host for host in hosts) else ()


def _events(journal: Path) -> Iterator[dict[str, Any]]:
    """The events at the begin of a journal; what is no event is passed over. A link or a pipe is not read."""
    try:
        descriptor = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        for line in file:
            if file.tell() > MOST_BYTES:
                return
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
