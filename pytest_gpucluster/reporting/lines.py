"""Lines of the screen as data: a text and the mark-up that pytest gives it where the screen has colours. Pure."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


CONTINUED = " \\"
"""Behind a line of a command that goes on."""
SHORT_OPTION = re.compile("-[a-zA-Z]")


@dataclass(frozen=True, slots=True)
class Line:
    """One line; ``markup`` are names that pytest's terminal writer knows: bold, red, green, yellow."""

    text: str
    markup: tuple[str, ...] = ()


def wrapped(text: str, *, width: int, indent: str, later: str | None = None) -> list[str]:
    """The text, broken at spaces into lines of at most ``width`` columns. A longer word is not broken.

    Args:
        text: foreign text too; it is made fit for a screen.
        width: columns of the screen.
        indent: stands before the first line.
        later: stands before all other lines; ``indent`` and two spaces by default.
    """
    further = f"{indent}  " if later is None else later
    return [line.rstrip() for line in _filled(one_line(text).split(" "), width=width, indent=indent, later=further)]


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
    *firsts, last = _filled(pieces, width=room, indent=indent, later=later)
    return [*(f"{line}{CONTINUED}" for line in firsts), last]


def quoted(word: str) -> str:
    r"""The word as a shell reads it, in one line: what no screen can show is ``$'\x1b'``, as bash and zsh read it."""
    if word.isprintable():
        return shlex.quote(word)
    plain = "".join(one if one.isprintable() and one not in "'\\" else _as_bytes(one) for one in word)
    return f"$'{plain}'"


def _as_bytes(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _filled(words: Iterable[str], *, width: int, indent: str, later: str) -> list[str]:
    """The words in lines of at most ``width`` columns; a longer one is not broken."""
    lines: list[str] = []
    now = indent
    for word in words:
        is_begun = now not in (indent, later)
        if is_begun and len(now) + 1 + len(word) > width:
            lines.append(now)
            now = f"{later}{word}"
        else:
            now += f" {word}" if is_begun else word
    return [*lines, now]


def cut(text: str, width: int) -> str:
    """The text in one line of at most ``width`` columns."""
    line = one_line(text)
    return line if len(line) <= width else f"{line[: max(0, width - 3)]}..."


def listed(names: Sequence[str], *, most: int) -> str:
    """The names, and how many more there are than ``most``."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def fitting(items: Iterable[str], width: int) -> str:
    """As many items as fit into ``width`` columns, at least one, and how many more there are."""
    every = list(items)
    for number in range(len(every), 1, -1):
        text = listed(every, most=number)
        if len(text) <= width:
            return text
    return listed(every, most=1)
