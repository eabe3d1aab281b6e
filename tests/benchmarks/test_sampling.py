"""What the benchmark of reading a GPU meanwhile concludes, and that it runs on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.scripts import BENCHMARKS, benchmark_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = BENCHMARKS / "sampling.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The benchmark as a module."""
    with benchmark_module("sampling") as module:
        yield module


@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (15, 4, 12), (20, 6, 15)])
def test_the_interval_of_a_median(script: Any, count: int, low: int, high: int) -> None:
    """The published ranks of the sign test's interval at 95 %; too few values: all of them."""
    assert script.interval([float(number) for number in range(count, 0, -1)]) == (low, high)


def test_the_table(script: Any) -> None:
    """One row for each work and reader."""
    result = {"device": "H", "torch": "2", "pairs": 3, "ratios": {"BF16 products, Sampler at 10 Hz": [0.99, 1.0, 1.01]}}
    assert script.table(result).splitlines()[-1] == "| BF16 products | Sampler at 10 Hz | 1.0000 | 0.9900 to 1.0100 |"


@pytest.mark.slow
def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    """Every work with every reader, and the file renders again."""
    file = tmp_path / "found.json"
    subprocess.run([sys.executable, SCRIPT, "--pairs", "1", "--json", file], check=True, timeout=300, stdout=subprocess.PIPE)
    found = json.loads(file.read_text())
    assert len(found["ratios"]) == 12
    assert all(ratio > 0 for ratios in found["ratios"].values() for ratio in ratios)
    again = subprocess.run([sys.executable, SCRIPT, "--from", file], check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    assert again.stdout.count("\n| ") == 13
