"""Text for a screen: wrapped at words, cut, written as a shell reads it; and what rich makes of tables, as lines. Pure."""

from __future__ import annotations

import io
import os
import re
import shlex
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from rich.console import RenderableType
    from rich.table import Column

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
