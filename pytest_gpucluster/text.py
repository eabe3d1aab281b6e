r"""Text from ranks, hosts, environment and files, made fit for XML, JSON and terminals. Imports nothing of this package.

A character that one of the three cannot hold, or that acts on a screen, is written as Python writes it in a string: ``\x1b``,
``\udce9``, ``\u202e``. So all reports show the same text, and it can be encoded as UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_NONCHARACTERS = "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
UNPRINTABLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline
    "\u2028\u2029"  # line and paragraph separators
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of writing
    "\ud800-\udfff"  # surrogates: a byte that is not UTF-8, or half a character
    f"\ufdd0-\ufdef\ufeff{_NONCHARACTERS}"
    "]"
)
BAR = "  | "
"""Stands before each line of text that somebody else wrote, so that it cannot be taken for a line of ours."""
LONGEST = 100_000
"""Characters of one reason in a report: pytest shows the arguments of a frame in full, however many MiB they have."""
MOST_BITS = 2000
OWN = ("verdict", "gpucluster")
"""How the lines begin that only a run itself writes."""


def text_of(value: object, form: Callable[[object], str] = str) -> str:
    """The value as Python writes it, by str or repr; what it is where its class or its length forbids that. Nothing is raised.

    An integer beyond :data:`MOST_BITS` is not written: Python refuses from 640 or 4,300 digits on, other readers sooner.
    """
    try:
        if isinstance(value, int) and int.bit_length(value) > MOST_BITS:
            return f"an integer of {int.bit_length(value)} bits"
        return str.__str__(form(value))
    except Exception:  # noqa: BLE001 -- it is foreign code
        return f"{type(value).__name__} that cannot be written"


def visible(text: str) -> str:
    r"""The text with unfit characters escaped. Newlines and tabs stay; ``\r\n`` counts as a newline."""
    return text if text.isprintable() else UNPRINTABLE.sub(_escape, text.replace("\r\n", "\n"))  # none of them is printable


def shortened(text: str) -> str:
    """The text, or its beginning and end if it is longer than :data:`LONGEST`, with the number of characters between."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def one_line(text: str) -> str:
    """The text in one line: newlines are escaped too."""
    return visible(text).replace("\n", r"\n")


def first_line(text: str) -> str:
    """The first line of the text."""
    return visible(text).partition("\n")[0]


def lines(text: str) -> list[str]:
    """The lines of the text, none of an empty one."""
    return visible(text).removesuffix("\n").split("\n") if text else []


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 check``, ``3 checks``."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def with_commas(pieces: Sequence[str]) -> list[str]:
    """The pieces of a list, each but the last with its comma: they may be wrapped between any two."""
    return [*(f"{piece}," for piece in pieces[:-1]), *pieces[-1:]]


def shortlist(names: Sequence[str], *, most: int) -> str:
    """``node0, node1 and 5 more``: the first ``most`` names, and how many others there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def within_bytes(text: str, most: int) -> str:
    """The text in at most so many bytes of UTF-8, no character cut in two; ``...`` where some of it is left out."""
    content = text.encode()
    return text if len(content) <= most else content[: most - 3].decode(errors="ignore") + "..."


def barred(text: str) -> str:
    """Every line of the text behind :data:`BAR`."""
    return "\n".join(f"{BAR}{line}" for line in visible(text).split("\n"))


def barred_below(text: str) -> str:
    """The text with every line but the first behind :data:`BAR`, to stand within a line of ours."""
    first, newline, rest = visible(text).partition("\n")
    return f"{first}{newline}{barred(rest)}" if newline else first


def framed(text: str) -> str:
    """A text of several lines that begins a line of the screen: its first line is a sentence, all others are set in.

    A line that is not set in, or that begins as a line of ours does, comes behind :data:`BAR`.
    """
    first, *others = visible(text).split("\n")
    begins_as_ours = first.lstrip().lower().startswith(OWN)
    set_in = (line if not line or line.startswith("  ") else f"{BAR}{line}" for line in others)
    return "\n".join((f"{BAR}{first}" if begins_as_ours else first, *set_in))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
