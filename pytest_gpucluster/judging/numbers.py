"""Numbers as people read them: four significant digits, and as many more as it takes to tell a value from its limit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.thresholds.limit import SIGNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.thresholds.limit import Limit

DIGITS, ALL_DIGITS = 4, 17
WHOLE = 1e7
"""Whole numbers below this are shown with all of their digits: they may be counts."""


def format_number(value: float, *, digits: int = DIGITS) -> str:
    """A number with ``digits`` significant digits: ``771.0``, ``18910``, ``0.001311``; an exact one as it is: ``0.5``."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < WHOLE:
        return str(int(value))
    short = f"{value:.{digits}g}"
    if float(short) != value:
        short = f"{value:#.{digits}g}".removesuffix(".")
    if "e" in short and 1 <= abs(value) < WHOLE:
        return str(int(float(short)))
    return short


def format_miss(limit: Limit, value: float) -> str:
    """A value outside its limit, and the limit: ``699.99 TFLOPS, not above 700 TFLOPS``."""
    bound, shown = format_beside(limit, value)
    return f"{shown} {limit.unit}, {limit.missed_word} {bound} {limit.unit}"


def format_asked(limit: Limit, value: float) -> str:
    """A value and its limit, without a word on which is better: ``-42.26 %, <= 6 % asked``."""
    bound, shown = format_beside(limit, value)
    return f"{shown} {limit.unit}, {SIGNS[limit.kind]} {bound} {limit.unit} asked"


def format_beside(limit: Limit, *values: float) -> tuple[str, ...]:
    """The number of a limit, then each value, with enough digits that the texts compare as the numbers do.

    A value that misses its limit is never shown as equal to the limit or better, unless it is equal.
    """
    shown = _with_digits(limit, values, digits=DIGITS)
    for digits in range(DIGITS + 1, ALL_DIGITS + 1):
        if all(_is_true(text, shown[0], value, limit) for text, value in zip(shown[1:], values, strict=True)):
            break
        shown = _with_digits(limit, values, digits=digits)
    return shown


def _with_digits(limit: Limit, values: Sequence[float], *, digits: int) -> tuple[str, ...]:
    return tuple(format_number(number, digits=digits) for number in (limit.value, *values))


def _is_true(shown: str, shown_limit: str, value: float, limit: Limit) -> bool:
    """Whether the texts of a value and of its limit say whether the value holds."""
    seen, seen_limit = float(shown), float(shown_limit)
    holds = limit.holds(value)
    is_equal = (seen == seen_limit) == (value == limit.value)
    return replace(limit, value=seen_limit).holds(seen) == holds and (holds or is_equal)
