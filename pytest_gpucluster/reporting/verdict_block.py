"""The verdict in a block of its own, as lines of the screen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.forecast import clock
from pytest_gpucluster.judging.verdict import REJECTED, Verdict
from pytest_gpucluster.reporting.lines import Line, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MINUTE_S = 60.0
PARTS = (("startup", "start-up"), ("measuring", "measuring"), ("other", "other"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What stands around the verdict line.

    Attributes:
        mode: why this run accepts nothing, whatever it measured; None if it may accept.
        timings: seconds by name, as results.json has them.
        folder: the results directory.
        files: the names of the reports in it, and the paths of other reports.
    """

    mode: str | None
    timings: Mapping[str, float]
    folder: str
    files: Sequence[str]


def verdict_block(verdict: Verdict, ending: Ending, *, width: int, quiet: bool) -> list[Line]:
    """A rule, the line that begins with ``verdict``, what it does not say, and a rule. Without rules if ``quiet``."""
    colour = ("green",) if verdict.is_acceptance else ("red",) if verdict.word == REJECTED else ("yellow",)
    rule = [] if quiet else [Line("=" * width, colour)]
    lines = [*rule, Line(f"verdict {verdict.line}", ("bold", *colour))]
    if ending.mode is not None:
        lines.append(Line(f"  {ending.mode}", ("bold", "yellow")))
    seconds = ending.timings
    parts = ", ".join(f"{_time(seconds[f'{name}_s'])} {words}" for name, words in PARTS)
    lines += [Line(text) for text in wrapped(f"took {_time(seconds['total_s'])}: {parts}", width=width, indent="  ")]
    files = f"  {', '.join(ending.files)}" if ending.files else ""
    lines += [Line(text) for text in wrapped(f"reports in {ending.folder}{files}", width=width, indent="  ")]
    return [*lines, *rule]


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < MINUTE_S else clock(seconds)
