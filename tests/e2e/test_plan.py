"""The plan before the first test, and the progress that runs to it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE, PYTEST, environment
from tests.support.runs import run_pytest
from tests.support.terminal import at_terminal
from tests.support.thresholds_files import in_rehearsal, write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SELECTED = ("-k", "bf16 and not straggler or nodes_reachable")
HEAD = "plan: "


def test_the_plan_is_printed_first(tmp_path: Path) -> None:
    """What is asked, what will run and for how long; then what has joined, and a line as each subject ends."""
    ran = run_pytest(tmp_path, ACCEPTANCE, *SELECTED)
    lines = ran.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    facts = "   ".join(line.strip() for line in lines[first - 2 : first])
    kind = "REHEARSAL on the CPU: accepts nothing   1 node x 2 ranks"
    assert re.fullmatch(rf"gpucluster \S+   {kind}   level standard   profile rehearsal   limits packaged", facts)
    plan = " ".join(line.strip() for line in lines[first : first + 2])
    times = r"compute 0:\d\d, fabric 0:\d\d, start-up 0:04"
    assert re.match(rf"plan: 3 criteria, 5 checks, 1 not applicable, about 0:\d\d \({times}\)", plan)
    joined = next(line for line in lines if re.fullmatch(r".+: 2 ranks on the CPU, torch \S+", line))
    ends = [next(line for line in lines if line.startswith(subject)) for subject in ("compute ", "fabric ")]
    assert re.fullmatch(r"compute +2 criteria +4 passed +\d+\.\d s", ends[0])
    assert first < lines.index(joined) < lines.index(ends[0]) < lines.index(ends[1])


@pytest.mark.parametrize("option", ["-q", "--collect-only"])
def test_quiet_stays_quiet(tmp_path: Path, option: str) -> None:
    """Who asked for less is told less."""
    ran = run_pytest(tmp_path, ACCEPTANCE, "-k", "nodes_reachable", option)
    assert ran.returncode == 0
    assert not re.search(r"plan:|: 2 ranks|about \d|criterion +\d+ passed", ran.stdout)


@pytest.mark.slow
def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path: Path) -> None:
    """With the share of the whole run, and what is left."""
    ran = run_pytest(tmp_path, ACCEPTANCE, lasting(tmp_path, 12), "-k", "bf16_sustained and not straggler")
    line = r"(?m)^ +\d+ %  \d:\d\d, (about \d:\d\d left|longer than estimated)  bf16_sustained: rank \d: \d+\.\d of 12 s$"
    assert re.search(line, ran.stdout)


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """One line, rewritten in place: never wider than the terminal, never above 99 % before the end."""
    shown = in_terminal(tmp_path, ACCEPTANCE, lasting(tmp_path, 3), *SELECTED, columns=100)
    drawn = re.findall(r"\r([━╸ ]{10} +(\d+) %  [^\r\n]*)", shown)
    assert len(drawn) > 3
    assert max(len(line) for line, _ in drawn) <= 100  # erased to the end of the line
    assert all(int(percent) <= 99 for _, percent in drawn)
    percents = [int(percent) for _, percent in drawn]
    assert percents == sorted(percents)
    assert any(" bf16_sustained: rank " in line for line, _ in drawn)
    assert re.search(r"\d:\d\d, (about \d:\d\d left|longer than estimated) bf16_", shown)
    assert re.search(r"\r +\r[\r\n]*=+ ", shown)  # the bar is erased before the table
    assert not re.search(r"(?m)^(compute|bf16_tflops) +.* passed +\d", shown.partition("= gpucluster =")[0])


def lasting(folder: Path, seconds: int) -> str:
    """The option for limits under which one criterion takes so long."""
    recipe = {"seconds": seconds, "slice_s": 0.2}
    criteria = {"bf16_sustained": in_rehearsal(recipe=recipe, takes_s=seconds, above=1e-5)}
    return write_limits(folder / "lasting.yaml", criteria)


def in_terminal(folder: Path, *arguments: str, columns: int) -> str:
    """What a run writes to a terminal of this width."""
    variables = {**environment(measured=True), "COLUMNS": str(columns), "TERM": "xterm"}
    with at_terminal([*PYTEST, "--color=no", *arguments], cwd=folder, environment=variables) as terminal:
        assert terminal.end() == 0, terminal.seen
        return terminal.seen
