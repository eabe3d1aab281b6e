"""Units that a thresholds file does not take, converted to one that it does take."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SMALL = {"m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
_DATA = re.compile(r"(?P<prefix>[kKMGTPE]?)(?P<binary>i?)(?P<base>B|b|[Bb]ytes?|[Bb]its?)(?P<rate>ps|/s|/sec|/second)?")
_BITS_IN_SMALL_LETTERS = re.compile(r"[kmgt](bps|bit/s|bits/s)")
_UNCLEAR = re.compile(r"[kmgtpe]i?b(/s|/sec)?")
"""Bits or bytes, milli or mega: nobody knows."""
_OTHER = re.compile(r"(?P<prefix>[kKMGTPEmuµn]?)(?P<base>FLOPS?|FLOPs|FLOP/s|flops?|OPS?|OP/s|Hz|W|s|sec|seconds?)")
_BASES = {"FLOP": "FLOPS", "OP": "OPS", "H": "Hz", "W": "W", "S": "s"}
_TIMES_S = {"min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0}
_TAKEN = {
    "B/s": {"GB/s": 1e9, "TB/s": 1e12},
    "B": {"GiB": 2.0**30},
    "FLOPS": {"TFLOPS": 1e12},
    "OPS": {"TOPS": 1e12},
    "Hz": {"MHz": 1e6},
    "W": {"W": 1.0},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
}
"""Units of a file by what they measure, each in the basic unit. Numbers are converted to the first one."""
_CLOSE = 0.8


def hint(unit: str, number: float | None, known: Sequence[str]) -> str:
    """What to write instead of a unit: a converted number, or a unit that differs in spelling alone; else nothing."""
    converted = conversion(unit, number)
    if converted is not None or _UNCLEAR.fullmatch(unit):
        return converted or ""
    by_small_letters = {one.lower(): one for one in known}
    near = by_small_letters.get(unit.lower()) or next(iter(get_close_matches(unit, known, n=1, cutoff=_CLOSE)), None)
    near = near or _taken_as(unit)
    return f" Did you mean {near!r}?" if near else ""


def conversion(unit: str, number: float | None) -> str | None:
    """`` For 500 MB/s say 0.5 GB/s.``; None where the file takes the unit, or it is none that can be converted.

    Args:
        unit: as the file has it.
        number: the limit in that unit; None where it is not one number.
    """
    found = _basic(unit)
    if found is None or _taken_as(unit) is not None:
        return None
    kind, factor = found
    target = "us" if kind == "s" and factor < 1e-3 else next(iter(_TAKEN[kind]))
    share = factor / _TAKEN[kind][target]
    if number is None:
        return f" 1 {unit} is {share:.10g} {target}."
    return f" For {number:.10g} {unit} say {number * share:.10g} {target}."


def _taken_as(unit: str) -> str | None:
    """The unit of a file that means the same: ``GB/s`` for ``GByte/s``."""
    found = _basic(unit)
    return None if found is None else next((name for name, factor in _TAKEN[found[0]].items() if factor == found[1]), None)


def _basic(unit: str) -> tuple[str, float] | None:
    """What a unit measures, and its size in the basic unit of that."""
    if unit in _TIMES_S:
        return "s", _TIMES_S[unit]
    if _BITS_IN_SMALL_LETTERS.fullmatch(unit):
        return "B/s", _PREFIXES[unit[0].upper()] / 8
    if match := _DATA.fullmatch(unit):
        factor = 1024.0 ** ("KMGTPE".index(match["prefix"].upper()) + 1) if match["binary"] and match["prefix"] else None
        factor = _PREFIXES[match["prefix"]] if factor is None else factor
        is_bits = match["base"] == "b" or match["base"].lower().startswith("bit")
        return "B/s" if match["rate"] else "B", factor / 8 if is_bits else factor
    if match := _OTHER.fullmatch(unit):
        kind = next(kind for start, kind in _BASES.items() if match["base"].upper().startswith(start))
        return kind, {**_PREFIXES, **_SMALL}[match["prefix"]]
    return None
