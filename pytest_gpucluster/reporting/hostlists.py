"""Names of hosts in Slurm's short form: ``gpu-node-[0-16,18-22]``. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NUMBERED = re.compile(r"(?s)(.*?)([0-9]{1,15})\Z")
"""A name that ends with a number. A longer row of digits is a part of the name."""
EXACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
"""A name that Slurm and a shell take as it is."""


def hostlist(names: Iterable[str]) -> str:
    """The names in the shortest list that Slurm expands to just these; zeros before a number stay.

    Equal names count once. Names with the same beginning share one pair of brackets; a name without a number stands alone.
    """
    return ",".join(pieces(names))


def pieces(names: Iterable[str]) -> list[str]:
    """The parts of :func:`hostlist`, one for each beginning."""
    numbers: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        found = NUMBERED.match(name)
        prefix, number = found.groups() if found is not None else (name, "")
        numbers.setdefault(prefix, []).append(number)
    return [piece for prefix, found in sorted(numbers.items()) for piece in _folded(prefix, found)]


def expand(text: str) -> list[str]:
    """The names of a list that :func:`hostlist` made."""
    found: list[str] = []
    for prefix, ranges in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?", text):
        for one in ranges.split(",") if ranges else ():
            first, _, last = one.partition("-")
            found += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
        found += [] if ranges else [prefix]
    return found


def short_names(hostnames: Sequence[str]) -> list[str]:
    """Hostnames without their domains, as Slurm calls its nodes; unchanged where two would become one."""
    short = [name if name.partition(".")[0].isdigit() else name.partition(".")[0] for name in hostnames]
    return short if len(set(short)) == len(set(hostnames)) else list(hostnames)


def _folded(prefix: str, numbers: Sequence[str]) -> list[str]:
    """One beginning with all its numbers; the name without a number apart."""
    alone = [prefix] if "" in numbers else []
    given = sorted((number for number in numbers if number), key=lambda number: (int(number), len(number)))
    if len(given) <= 1:
        return [*alone, *(f"{prefix}{number}" for number in given)]
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
    return [*alone, f"{prefix}[{','.join(ranges)}]"]
