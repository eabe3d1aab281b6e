"""docs/scaling.md: each figure that follows from the code is the one that the code gives today."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands.launch import DEFAULT_PORT
from pytest_gpucluster.commands.sweep import FIRST_PORT, PORTS
from pytest_gpucluster.config.process import SPARE_FILES
from pytest_gpucluster.evidence.archive import MOST_BYTES, MOST_PACKED_BYTES
from pytest_gpucluster.page.render import MOST_EMBEDDED
from pytest_gpucluster.protocol.channel import most_connections
from pytest_gpucluster.reporting.files import KEPT_RUNS
from pytest_gpucluster.reporting.junit import MOST_BY_PLACE, MOST_ELEMENTS, form_of
from pytest_gpucluster.reporting.results import MOST_LISTED
from tests.support import REPOSITORY
from tests.support.junit_readers import BUILDKITE_TESTCASES, GITLAB_BYTES, GITLAB_OBJECTS

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = REPOSITORY / "docs" / "scaling.md"
GPUS = 8
USUAL_FILES = 1024
"""The limit of open files that most systems set."""


def rows_below(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    table = text[text.index(head) :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def strayed(text: str) -> list[str]:
    """What the page says otherwise than the code."""
    found: list[str] = []
    a_node, more = map(int, re.findall(r"\*\*Testcases\*\*: (\d+) a node and (\d+) more", text)[0])
    for cells in rows_below(text, "| nodes | ranks | connections"):
        nodes = int(cells[0].replace(",", ""))
        found += [f"{nodes} nodes: {cells[1:]}, not {right}" for right in [_right(nodes, a_node, more)] if cells[1:] != right]
    return [*found, *(f"the page lacks {words!r}" for words in _said() if words not in " ".join(text.split()))]


def _right(nodes: int, a_node: int, more: int) -> list[str]:
    testcases = a_node * nodes + more
    numbers = (nodes * GPUS, _files(nodes) - SPARE_FILES, _files(nodes), testcases)
    return [*(f"{number:,}" for number in numbers), form_of(None, testcases)]


def _files(nodes: int) -> int:
    return most_connections(world_size=nodes * GPUS, num_nodes=nodes) + SPARE_FILES


def _said() -> Sequence[str]:
    """What the prose says of constants."""
    first = next(nodes for nodes in range(1, 1024) if _files(nodes) > USUAL_FILES)
    return (
        f"{SPARE_FILES} more, in the process that hosts the store",
        f"Above {MOST_BY_PLACE:,} the JUnit file",
        f"above {MOST_ELEMENTS:,} elements",
        f"{DEFAULT_PORT}, or between {FIRST_PORT} and {FIRST_PORT + PORTS - 1}",
        f"| {first} nodes | {USUAL_FILES:,} open files",
        f"Buildkite's {BUILDKITE_TESTCASES:,} testcases",
        f"below {GITLAB_BYTES // 1_000_000} MB and {GITLAB_OBJECTS:,} elements",
        f"at most {MOST_LISTED:,} bad outcomes",
        f"up to {MOST_EMBEDDED:,} characters",
        f"{MOST_PACKED_BYTES >> 20} MiB packed and {MOST_BYTES >> 30} GiB unpacked",
        f"the last {KEPT_RUNS} runs",
    )


def test_figures_are_those_of_the_code() -> None:
    """Connections, open files, ports, forms of JUnit, limits of reports."""
    text = PAGE.read_text(encoding="utf-8")
    assert len(rows_below(text, "| nodes | ranks | connections")) >= 8
    assert strayed(text) == []


STALE = {"2,499": "2,500", "| 22 |": "| 21 |", "29500": "29400", "| 20,360 | node |": "| 20,360 | place |", "5,000": "4,000"}


@pytest.mark.parametrize(("old", "new"), STALE.items())
def test_a_stale_figure_is_seen(old: str, new: str) -> None:
    """A figure that the code no longer gives is named."""
    text = PAGE.read_text(encoding="utf-8")
    assert old in text
    assert strayed(text.replace(old, new)) != []


def test_the_kept_fleet_has_the_testcases_of_the_page() -> None:
    """462 a node and 32 more is what the kept run of 128 x 8 had."""
    kept = (REPOSITORY / "docs" / "results" / "2026-11-26-fleet-128x8" / "README.md").read_text(encoding="utf-8")
    cells = next(cells for cells in rows_below(PAGE.read_text(encoding="utf-8"), "| nodes | ranks |") if cells[0] == "128")
    assert cells[4] in kept
