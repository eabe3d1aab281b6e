"""Coordinates of the pictures: dots in a strip, curves, matrices. Pure: numbers in, positions out; the template draws them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.siblings import MAD_TO_SIGMA
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.limit import Limit

WIDTH, STRIP_HEIGHT = 640.0, 64.0
BINS = 64
"""A strip of more values than this draws bins, and only what is bad or far from its siblings as dots."""
MOST_DOTS = 64
FAR_SIGMAS = 5.0
EDGE = 14.0
CHART_WIDTH, CHART_HEIGHT = 560.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 24.0, 10.0, 30.0
TICK_WIDTH = 46.0


class Dot(NamedTuple):
    """One value of a strip; ``title`` says which."""

    x: float
    y: float
    title: str
    is_bad: bool


class Bar(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """All values of one criterion on one line: bins or dots, the middle half of all siblings as a band, the limit as a line."""

    label: str
    dots: tuple[Dot, ...]
    bars: tuple[Bar, ...]
    band: Bar | None
    limit_x: float | None
    ticks: tuple[tuple[float, str], ...]


class Curve(NamedTuple):
    """One curve of a chart, as SVG's ``points``; ``kind`` is its class in the style sheet."""

    name: str
    kind: str
    points: str


class Mark(NamedTuple):
    """A point beside the curves, with its words."""

    x: float
    y: float
    text: str


class Value(NamedTuple):
    """A number of a strip, where it was measured, and whether it is bad."""

    value: float
    name: str
    is_bad: bool


def strip_of(values: Sequence[Value], *, limit: float | None, label: str) -> Strip | None:
    """The strip of these values; None without any."""
    if not values:
        return None
    numbers = [one.value for one in values]
    bounds = _range([*numbers, *([limit] if limit is not None else [])])
    at = partial(_along, bounds=bounds, ends=(EDGE, WIDTH - EDGE))
    is_large = len(values) > BINS
    shown = _remarkable(values) if is_large else list(values)
    return Strip(
        label=label,
        dots=tuple(_stacked(shown, at)),
        bars=tuple(_bins(numbers, at)) if is_large else (),
        band=_band(numbers, at),
        limit_x=at(limit) if limit is not None else None,
        ticks=tuple((at(value), format_number(value)) for value in _steps(*bounds, 5)),
    )


def _along(value: float, bounds: tuple[float, float], ends: tuple[float, float]) -> float:
    """Where a number between two bounds stands between two ends of a picture; in the middle where the bounds are one."""
    low, high = bounds
    share = (value - low) / (high - low) if high > low else 0.5
    return round(ends[0] + share * (ends[1] - ends[0]), 1)


def _range(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    if high == low:
        half = abs(low) * 0.05 or 1.0
        return low - half, high + half
    edge = (high - low) * 0.04
    return low - edge, high + edge


def _remarkable(values: Sequence[Value]) -> list[Value]:
    """What is bad, then what is farthest from the median, if that is far beyond the spread of all."""
    numbers = [one.value for one in values]
    middle = statistics.median(numbers)
    sigma = MAD_TO_SIGMA * statistics.median(abs(number - middle) for number in numbers)
    far = [one for one in values if one.is_bad or (sigma > 0 and abs(one.value - middle) > FAR_SIGMAS * sigma)]
    return sorted(far, key=lambda one: (not one.is_bad, -abs(one.value - middle)))[:MOST_DOTS]


def _stacked(values: Sequence[Value], at: Callable[[float], float]) -> list[Dot]:
    """Dots that stand above each other where they would hide each other."""
    columns: Counter[int] = Counter()
    dots = []
    for one in sorted(values, key=lambda one: one.value):
        x = at(one.value)
        column = round(x / 9)
        y = 36.0 - min(columns[column], 6) * 5.0
        columns[column] += 1
        dots.append(Dot(x=x, y=y, title=f"{one.name}: {format_number(one.value)}", is_bad=one.is_bad))
    return dots


def _bins(numbers: Sequence[float], at: Callable[[float], float]) -> list[Bar]:
    width = (WIDTH - 2 * EDGE) / BINS
    found = grouped((min(BINS - 1, int((at(number) - EDGE) / width)), number) for number in numbers)
    most = max(map(len, found.values()))
    bars = []
    for index, inside in sorted(found.items()):
        height = round(3.0 + 27.0 * math.sqrt(len(inside) / most), 1)
        low, high = format_number(min(inside)), format_number(max(inside))
        title = f"{counted(len(inside), 'value')}, {low}" + (f" to {high}" if high != low else "")
        x = round(EDGE + index * width, 1)
        bars.append(Bar(x=x, y=round(40.0 - height, 1), width=round(width - 1, 1), height=height, title=title))
    return bars


def _band(numbers: Sequence[float], at: Callable[[float], float]) -> Bar | None:
    """The middle half of all values; None of fewer than four."""
    if len(numbers) < 4:
        return None
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    x, end = at(first), at(third)
    title = f"half of all values: {format_number(first)} to {format_number(third)}"
    return Bar(x=round(x - 1, 1), y=4.0, width=round(end - x + 2, 1), height=40.0, title=title)


def _steps(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two bounds."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Axes:
    """Two scales; ``is_log`` is of the x axis. Numbers of x below 1 count as 1 there."""

    xs: tuple[float, float]
    ys: tuple[float, float]
    is_log: bool = False

    def x(self, value: float) -> float:
        """Where a number stands on the x axis."""
        low, high = self.xs
        if self.is_log:
            low, high, value = (math.log(max(number, 1.0)) for number in (low, high, value))
        return _along(value, (low, high), (LEFT, CHART_WIDTH - RIGHT))

    def y(self, value: float) -> float:
        """Where a number stands on the y axis."""
        return _along(value, self.ys, (CHART_HEIGHT - BOTTOM, TOP))

    def points(self, pairs: Sequence[tuple[float, float]]) -> str:
        """A curve as SVG's ``points``."""
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in pairs)

    def area(self, low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]]) -> str:
        """What lies between two curves."""
        return self.points([*low, *reversed(high)])

    @property
    def y_ticks(self) -> tuple[tuple[float, str], ...]:
        """Round numbers of the y axis."""
        return tuple((self.y(value), format_number(value)) for value in _steps(*self.ys, 5))

    @property
    def x_ticks(self) -> tuple[tuple[float, str], ...]:
        """Round numbers of the x axis."""
        return tuple((self.x(value), format_number(value)) for value in _steps(*self.xs, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves and bands over two axes."""

    label: str
    x_title: str
    y_title: str
    axes: Axes
    curves: tuple[Curve, ...]
    areas: tuple[Curve, ...] = ()
    marks: tuple[Mark, ...] = ()
    limit: Limit | None = None
    x_ticks: tuple[tuple[float, str], ...] = ()


def axes_over(xs: Sequence[float], ys: Sequence[float], *, is_log: bool = False, from_zero: bool = False) -> Axes:
    """Axes on which all these numbers have room."""
    low, high = _range(ys)
    return Axes((min(xs), max(xs)), (0.0 if from_zero else low, high), is_log)


def apart(ticks: Sequence[tuple[float, str]]) -> tuple[tuple[float, str], ...]:
    """The ticks whose words do not run into those before them."""
    kept: list[tuple[float, str]] = []
    for x, text in ticks:
        if not kept or x - kept[-1][0] >= TICK_WIDTH:
            kept.append((x, text))
    return tuple(kept)
