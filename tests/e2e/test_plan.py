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
HEAD = "gpucluster: plan: "


def test_the_plan_is_printed_first(tmp_path: Path) -> None:
    """Criteria and tests that apply, the level, the time; by subject; before anything was measured."""
    ran = run_pytest(tmp_path, ACCEPTANCE, *SELECTED)
    lines = ran.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    assert re.fullmatch(
        r"gpucluster: plan: 3 criteria at 2 ranks on the CPU, 5 tests, level standard: about \d s", lines[first]
    )
    assert re.fullmatch(r"gpucluster:   compute +2 criteria +4 tests  about +\d s", lines[first + 1])
    assert re.fullmatch(r"gpucluster:   fabric +1 criterion +1 test  about +\d s", lines[first + 2])
    assert lines[first + 3].startswith("bf16_tflops")


@pytest.mark.parametrize("option", ["-q", "--collect-only"])
def test_quiet_stays_quiet(tmp_path: Path, option: str) -> None:
    """Who asked for less is told less."""
    ran = run_pytest(tmp_path, ACCEPTANCE, "-k", "nodes_reachable", option)
    assert ran.returncode == 0
    assert "plan:" not in ran.stdout


def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path: Path) -> None:
    """With the share of the whole run, and what is left."""
    ran = run_pytest(tmp_path, ACCEPTANCE, lasting(tmp_path, 7), "-k", "bf16_sustained and not straggler")
    line = r"(?m)^bf16_sustained +rank \d: \d\.\d of 7 s +\d+ %; \d+ % of all, (about \d:\d\d left|longer than estimated)$"
    assert re.search(line, ran.stdout)


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """One line, rewritten in place: never wider than the terminal, never above 99 % before the end."""
    shown = in_terminal(tmp_path, ACCEPTANCE, lasting(tmp_path, 3), *SELECTED, columns=100)
    drawn = re.findall(r"\r([━╸ ]{10} +(\d+) % (\d+)/5 [^\r\n]*)", shown)
    assert len(drawn) > 3
    assert max(len(line) for line, *_ in drawn) <= 100  # erased to the end of the line
    assert all(int(percent) <= 99 for _, percent, _ in drawn)
    counts = [int(done) for *_, done in drawn]
    assert counts == sorted(counts)
    assert any(" bf16_sustained rank " in line for line, *_ in drawn)
    assert re.search(r"\d:\d\d, (about \d:\d\d left|longer than estimated) bf16_", shown)
    assert re.search(r"\r +\rbf16_tflops +2 passed", shown)  # the bar is erased first


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
