"""Text for a screen: wrapped at words, cut, written as a shell reads it; and what rich makes of tables, as lines. Pure."""

from __future__ import annotations

import io
import os
import re
import shlex
import textwrap
from typing import TYPE_CHECKING

from rich.console import Console

from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

CONTINUED = " \\"
"""Ends a line of a command that goes on."""
SHORT_OPTION = re.compile("-[a-zA-Z]")
TIE = "\N{NO-BREAK SPACE}"


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
