"""The numbers of the closing table: the limit without its unit, and the headroom. Pure."""

from __future__ import annotations

from pytest_gpucluster.judging.failure_text import format_beside
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

NONE, NOTHING = "none", "-"
COUNTS = ("GPUs", "nodes", "errors", "rows", "reasons", "links", "count")
"""Units of what is counted. A distance in percent says nothing about such a number."""
TWICE_PERCENT, WHOLE_PERCENT = 100.0, 9.95
MILLION = 1e6


def value_cells(limit: Limit, *values: float) -> tuple[str, ...]:
    """The limit without its unit, then each value: ``("> 700", "777.2")``, ``("none", "none")`` for a bound of zero."""
    bound, *shown = format_beside(limit, *values)
    if not allows_none(limit):
        return (f"{SIGNS[limit.kind]} {bound}", *shown)
    return (NONE, *(NONE if value == 0 else text for value, text in zip(values, shown, strict=True)))


def allows_none(limit: Limit) -> bool:
    """Whether the limit is an upper bound of zero."""
    return limit.kind == "max" and limit.value == 0


def headroom_cell(value: float, limit: Limit) -> str:
    """How far a value is from its limit, in percent of the limit: ``11 %``, ``-4.2 %``.

    A value of more than twice a lower limit is shown as its multiple: ``5.8 x``. Counts have no headroom, nor has a limit of 0.
    """
    percent = limit.margin_percent(value)
    if percent is None or limit.unit in COUNTS:
        return NOTHING
    if percent > TWICE_PERCENT and limit.is_floor and limit.value > 0:
        return f"{_short(value / limit.value)} x"
    return f"{_short(percent)} %"


def _short(number: float) -> str:
    """Two significant digits; every digit before the point up to a million."""
    return f"{number:.0f}" if WHOLE_PERCENT <= abs(number) < MILLION else f"{number:.2g}"
