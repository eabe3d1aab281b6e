"""What a run writes to a screen of a known width, and to one without colours; the command that it says to type next."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import REPOSITORY
from tests.support.launching import Launch, environment
from tests.support.reports import read_results
from tests.support.terminal import at_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.long]

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DEMO = [sys.executable, "-m", "pytest_gpucluster.cli"]
SELECTION = "-m", "health or compute"
FAILED = {"clocks_under_load", "bf16_sustained", "straggler[bf16_sustained]"}


def demo(folder: Path, *words: str, **variables: str) -> str:
    """What ``gpucluster`` with these words writes where there is no terminal."""
    run = Launch(command=[*DEMO, *words], cwd=folder, environment={**environment(measured=True), **variables}).start()
    run.end()
    run.gone()
    return run.output


def ours(shown: str) -> list[str]:
    """The lines from our first one on, but those with a path, which is not broken."""
    lines = shown.splitlines()
    first = next(number for number, line in enumerate(lines) if re.search(r"(^| )gpucluster \d", line))
    return [line for line in lines[first:] if not line.startswith("  reports in ")]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the demo ran, and runs again; a path of more than a line would take two."""
    with tempfile.TemporaryDirectory() as short:
        yield Path(short)


@pytest.fixture(scope="module")
def narrow(folder: Path) -> list[str]:
    """A log of 80 columns: one GPU of 16 is hot."""
    return ours(demo(folder, "demo", "--fleet", "2x8", "--bad", "node1-gpu3:throttled", "--", *SELECTION, COLUMNS="80"))


def command_in(lines: list[str]) -> str:
    """The first command below the bad parts, as a shell reads it."""
    first = next(number for number, line in enumerate(lines) if line.startswith("      gpucluster demo "))
    last = next(number for number in range(first, len(lines)) if not lines[number].endswith("\\"))
    return "\n".join(lines[first : last + 1])


def test_a_log_of_80_columns(narrow: list[str]) -> None:
    """No line is wider but a command, which is copied, and the verdict and failures, which are searched."""
    whole = (*command_in(narrow).split("\n"), *(line for line in narrow if line.startswith(("verdict ", "failed: "))))
    assert [line for line in narrow if len(line) > 80 and line not in whole] == []
    (verdict,) = (line for line in narrow if line.startswith("verdict "))
    assert verdict.startswith("verdict REJECTED: SIMULATED fleet, no GPU was measured: ")
    assert verdict.endswith(" on 2 nodes x 8 NVIDIA H200")
    assert not any("\x1b" in line or "\r" in line for line in narrow)


def test_the_next_command_is_the_demo(narrow: list[str], folder: Path) -> None:
    """As it was typed; in 80 columns the part alone is chosen, and it fails as before."""
    words = shlex.split(command_in(narrow).replace("\\\n", ""))
    part = ["--gpucluster-only", "gpu-node-1:GPU-SIMULATED-00001-03"]
    assert words == ["gpucluster", "demo", "--fleet", "2x8", "--bad", "node1-gpu3:throttled", "--", *SELECTION, *part]
    demo(folder, *words[1:])
    rows = read_results(folder / "gpucluster-demo")["criteria"]
    failed = {(row["criterion"], row["place"]["id"]) for row in rows if row["outcome"] == "failed"}
    assert failed == {(name, "node1-gpu3") for name in FAILED}
    assert {row["place"]["node"] for row in rows if row["outcome"] == "passed" and row["place"] is not None} <= {1}


@pytest.mark.parametrize(
    ("without", "words", "most_rows"),
    [
        ({"NO_COLOR": "1"}, ["--", *SELECTION], 40),
        ({}, [], 40),
        ({}, ["--bad", "node0-gpu3:throttled"], 60),
        ({}, ["--bad", "node0-gpu3:slow"], 60),
    ],
)
def test_a_terminal_of_80_columns(without: dict[str, str], words: list[str], most_rows: int) -> None:
    """Colours, but not where ``NO_COLOR`` is set. A healthy node of 8 takes 40 rows, a bad one 60, from our first line on."""
    variables = {**environment(measured=True), "COLUMNS": "80", "TERM": "xterm", **without}
    with (
        tempfile.TemporaryDirectory() as short,  # a path of more than a line would take two
        at_terminal([*DEMO, "demo", *words], cwd=Path(short), environment=variables) as terminal,
    ):
        assert terminal.end() == ("--bad" in words), terminal.seen
    assert bool(COLOUR.search(terminal.seen)) == (not without)
    lines = [COLOUR.sub("", line.rstrip("\r")).rpartition("\r")[2] for line in terminal.seen.rstrip().split("\n")]
    first = next(number for number, line in enumerate(lines) if line.startswith("gpucluster "))
    assert re.match(r"collected \d+ items", lines[first - 1])  # ours begin below pytest's, however slow the machine is
    shown = [line for line in lines[first:] if not re.match(r" +\d+ %  ", line)]  # a busy machine shows more of its progress
    assert sum(max(1, -(-len(line) // 80)) for line in shown) <= most_rows, shown


FIVE_BAD = "node0:absent", "node1-gpu3:slow", "node2-gpu6:hbm", "node3:cable", "node4-gpu1:ecc", "node5-gpu4:pcie"


def test_five_bad_parts_and_an_absent_node_fit_80_rows(folder: Path) -> None:
    """Of 100 columns, from the report on: 7 nodes take as many as 128, since only the numbers differ."""
    lines = demo(folder, "demo", "--fleet", "7x8", *(word for one in FIVE_BAD for word in ("--bad", one)), COLUMNS="100")
    end = lines.rstrip().partition("= gpucluster =")[2].splitlines()
    shown = ["  reports in" if line.startswith("  reports in ") else line for line in end]  # of a path of any length
    assert sum(max(1, -(-len(line) // 100)) for line in shown) <= 80, shown
    parts = {line.split()[0] for line in shown if line.startswith("  gpu-node-")}
    assert parts == {f"gpu-node-{number}" for number in (1, 2, 3, 4, 5)}


SKEW = r"clock_skew[&#160;s]+[\d.]+&#160;node\d+[&#160;]*"  # of this machine's clock: the only value that is measured
SECONDS = re.compile(rf"{SKEW}|\d+\.\d+&#160;s|\d+\.\d+s|\(?\d*:\d+:?\d*\)?|=+|textLength=\"[\d.]+\"|x=\"[\d.]+\"")


@pytest.mark.parametrize("name", ["demo-1x8", "usage-error", pytest.param("demo-128x8", marks=[pytest.mark.slow])])
def test_pictures_of_demos_show_what_they_show_today(name: str) -> None:
    """Drawn anew, but for seconds and what they move. A picture loads nothing from elsewhere."""
    spec = importlib.util.spec_from_file_location("draw", REPOSITORY / "docs" / "images" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    kept = (draw.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert SECONDS.sub("", draw.demo_picture(name)) == SECONDS.sub("", kept)
    assert "url(http" not in kept
