"""Lines of the screen as data: a text and the mark-up that pytest gives it where the screen has colours. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Line:
    """One line; ``markup`` are names that pytest's terminal writer knows: bold, red, green, yellow."""

    text: str
    markup: tuple[str, ...] = ()


def wrapped(text: str, *, width: int, indent: str, later: str | None = None, end: str = "") -> list[str]:
    """The text, broken at spaces into lines of at most ``width`` columns. A longer word is not broken.

    Args:
        text: foreign text too; it is made fit for a screen.
        width: columns of the screen.
        indent: stands before the first line.
        later: stands before all other lines; ``indent`` and two spaces by default.
        end: stands behind each line but the last.
    """
    further = f"{indent}  " if later is None else later
    lines: list[str] = []
    now = indent
    for word in one_line(text).split(" "):
        is_begun = now not in (indent, further)
        if is_begun and len(now) + 1 + len(word) + len(end) > width:
            lines.append(f"{now.rstrip()}{end}")
            now = f"{further}{word}"
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
