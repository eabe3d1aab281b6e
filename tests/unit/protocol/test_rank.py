"""The state of a process, and sets of ranks in short form."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.protocol.rank import is_gone, ranges, spans, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RENAMED = """
import time
with open("/proc/self/comm", "w", encoding="utf-8") as name:
    name.write("Z) gr\\u00f6\\u00dfe")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def renamed() -> Iterator[subprocess.Popen[str]]:
    """A process that calls itself what no ASCII reader takes, and what looks like the state of one that has ended."""
    process = subprocess.Popen([sys.executable, "-c", RENAMED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_any_name(renamed: subprocess.Popen[str]) -> None:
    """A worker may call itself anything: the agent that looks at it goes on."""
    assert state_of(renamed.pid) in ("S", "R")
    assert not is_gone(renamed.pid)


def test_ended_and_not_reaped(renamed: subprocess.Popen[str]) -> None:
    """A zombie has ended, and so has a pid that nobody has."""
    renamed.kill()
    os.waitid(os.P_PID, renamed.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(renamed.pid) == "Z"
    assert is_gone(renamed.pid)
    renamed.wait()
    assert state_of(renamed.pid) is None
    assert is_gone(renamed.pid)


@given(st.sets(st.integers(min_value=0, max_value=40)))
def test_spans_name_the_ranks_and_no_others(ranks: set[int]) -> None:
    """In as few as there can be."""
    found = spans(ranks)
    assert {rank for first, last in found for rank in range(first, last + 1)} == ranks
    assert len(found) == sum(rank - 1 not in ranks for rank in ranks)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([5, 3, 8, 9, 10, 11, 12, 13, 14, 15], "3, 5, 8-15"), ([0, 1], "0-1")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    """Runs of whole numbers in the shortest form."""
    assert ranges(numbers) == text


@given(st.sets(st.integers(0, 300)))
def test_ranges_lose_nothing(numbers: set[int]) -> None:
    """Read back, they are the same numbers."""
    found: set[int] = set()
    for part in filter(None, ranges(list(numbers)).split(", ")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    assert found == numbers
