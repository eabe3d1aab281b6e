"""Names of hosts in Slurm's short form: ``gpu-node-[0-16,18-22]``. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpucluster.places import Place

NUMBERED = re.compile(r"(.*[A-Za-z._-][0-9]*?)([0-9]{1,9})\Z")
"""A name that ends with a number, after a beginning of its own. Of a longer row of digits the last 9 are the number."""
EXACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
"""A name that Slurm and a shell take as it is."""
SEPARATORS = " ,[]\\"


def hostlist(names: Iterable[str]) -> str:
    r"""The names in the shortest list that Slurm expands to just these; zeros before a number stay.

    Equal names count once. Names with the same beginning share one pair of brackets. A name has no brackets if it does not end
    with a number, or is nothing but a number. What no hostname has is escaped, as ``\x2c`` for a comma.
    """
    return ",".join(pieces(names))


def pieces(names: Iterable[str]) -> list[str]:
    """The parts of :func:`hostlist`, one for each beginning."""
    numbers: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        found = NUMBERED.match(name) if EXACT.match(name) else None
        prefix, number = found.groups() if found is not None else (_escaped(name), "")
        numbers[prefix].append(number)
    return [piece for prefix, found in sorted(numbers.items()) for piece in _folded(prefix, found)]


def names_of_absent(nodes: Sequence[Place]) -> str:
    """The hosts of absent nodes in Slurm's short form, as far as a list names them: ``gpu-node-[1,7], 2 unknown hosts``."""
    known = [node.hostname for node in nodes if node.hostname is not None]
    unknown = len(nodes) - len(known)
    rest = [counted(unknown, "unknown host")] if unknown else []
    return ", ".join([*([hostlist(known)] if known else []), *rest])


def short_names(hostnames: Sequence[str], *, among: Iterable[str]) -> list[str]:
    """Hostnames without their domains, as Slurm calls its nodes; unchanged where that is the name of several hosts.

    Args:
        hostnames: what to shorten.
        among: all hosts of the run.
    """
    hosts: dict[str, set[str]] = defaultdict(set)
    for name in (*hostnames, *among):
        hosts[_label(name).lower()].add(name.lower())
    return [_label(name) if len(hosts[_label(name).lower()]) == 1 else name for name in hostnames]


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
