"""The last lines of a run: the verdict, what it does not say, and where the reports lie."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.reporting.table import Ending, verdict_block

TIMINGS = {"total_s": 194.0, "startup_s": 8.2, "measuring_s": 181.0, "other_s": 4.8}


def block(outcome: str = "passed", *, width: int = 80, quiet: bool = False, **changes: Any) -> list[tuple[str, str]]:
    """The texts and the styles over one outcome."""
    mode = changes.pop("mode", None)
    verdict = decide(
        [Record(criterion="a", place=None, outcome=outcome)],
        Terms(**{"rehearsal": mode is not None, "level_reached": True, "shape": "1 node x 8 GPUs", **changes}),
    )
    ending = Ending(mode=mode, timings=TIMINGS, folder="gpucluster-results", files=["results.json", "junit.xml"])
    return [(line.plain, str(line.style)) for line in verdict_block(verdict, ending, width=width, quiet=quiet)]


@pytest.mark.parametrize("width", [80, 200])
def test_block(width: int) -> None:
    """Below a rule: verdict, seconds, files. pytest's own last line is the rule at the end."""
    lines = [text for text, _ in block(width=width)]
    assert lines == [
        "=" * width,
        "verdict ACCEPTED: 1 passed on 1 node x 8 GPUs",
        "  took 3:14: start-up 8.2 s, measuring 3:01, other 4.8 s",
        "  reports in gpucluster-results  results.json, junit.xml",
    ]


def test_how_long_all_ranks_waited() -> None:
    """Beside the parts of the time: they were there, and had nothing to do."""
    verdict = decide([Record(criterion="a", place=None, outcome="passed")], Terms(rehearsal=False, level_reached=True))
    ending = Ending(mode=None, timings={**TIMINGS, "waited_s": 3.21}, folder="gpucluster-results", files=[])
    lines = [line.plain for line in verdict_block(verdict, ending, width=100, quiet=False)]
    assert "  took 3:14: start-up 8.2 s, measuring 3:01, other 4.8 s; ranks waited 3.2 s" in lines


@pytest.mark.parametrize("width", range(40, 101))
def test_no_number_is_parted_from_its_unit(width: int) -> None:
    """A line may end anywhere but between a number and its seconds."""
    verdict = decide([Record(criterion="a", place=None, outcome="passed")], Terms(rehearsal=False, level_reached=True))
    ending = Ending(mode=None, timings={**TIMINGS, "waited_s": 3.21}, folder="gpucluster-results", files=[])
    lines = [line.plain for line in verdict_block(verdict, ending, width=width, quiet=False)]
    assert not any(line.strip().startswith(("s ", "s,", "s;")) or line.strip() == "s" for line in lines)


@pytest.mark.parametrize(
    ("outcome", "mode", "word", "colour"),
    [
        ("passed", None, "ACCEPTED", "green"),
        ("failed", None, "REJECTED", "red"),
        ("missing", None, "INCOMPLETE", "yellow"),
        ("passed", "REHEARSAL on the CPU: accepts nothing", "REHEARSED", "yellow"),
    ],
)
def test_one_line_is_the_verdict(outcome: str, mode: str | None, word: str, colour: str) -> None:
    """Bold and coloured; a rehearsal says again that it accepts nothing."""
    lines = block(outcome, mode=mode)
    found = [line for line in lines if line[0].startswith("verdict ")]
    assert len(found) == 1
    assert found[0][0].startswith(f"verdict {word}: ")
    assert found[0][1] == f"bold {colour}"
    assert (f"  {mode}" in [text for text, _ in lines]) == (mode is not None)


def test_quiet_has_no_rule() -> None:
    """With ``-q``."""
    assert not any("===" in text for text, _ in block(quiet=True))


def test_a_long_verdict_stays_one_line() -> None:
    """Whoever looks for it finds all of it."""
    (line,) = (text for text, _ in block(objections=["x" * 300]) if text.startswith("verdict "))
    assert "x" * 300 in line
