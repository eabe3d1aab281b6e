"""What the repeatability benchmark concludes from its rounds, and that it runs on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.noise import Repeats
from tests.support.scripts import BENCHMARKS, benchmark_module
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SCRIPT = BENCHMARKS / "repeatability.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The benchmark as a module."""
    with benchmark_module("repeatability") as module:
        yield module


def rows_of(script: Any, *rounds: Sequence[float]) -> dict[str, Any]:
    """The conclusion about BF16 rounds whose repeats are these."""
    file = packaged()
    criteria = file.criteria(file.profiles["h200-sxm"])
    found = [{"bf16_tflops": Repeats(value=sorted(samples)[len(samples) // 2], samples=samples)} for samples in rounds]
    (row,) = script.spread_over(found, criteria)
    return dict(row)


def test_quiet_rounds(script: Any) -> None:
    """Nothing would have been measured again."""
    row = rows_of(script, (799.0, 800.0, 801.0), (801.0, 802.0, 803.0))
    assert row["median"] == 801
    assert (row["least"], row["most"]) == (800, 802)
    assert row["sigma_percent"] == pytest.approx(0.1766, rel=1e-3)
    assert row["widest_repeats_percent"] == pytest.approx(0.2, rel=1e-2)
    assert row["measured_again"] == 0


def test_a_round_outside_the_allowance(script: Any) -> None:
    """Repeats that lie 6 % apart near the limit, and a limit among the repeats: each is counted."""
    row = rows_of(script, (799.0, 800.0, 801.0), (730.0, 760.0, 790.0), (698.0, 699.0, 702.0))
    assert row["measured_again"] == 2
    assert row["widest_repeats_percent"] > row["allowed_percent"]


def test_every_rate_of_quick_is_repeated(script: Any) -> None:
    """A new criterion with an allowance per GPU has to be named here too, or said why not."""
    file = packaged()
    criteria = file.criteria(file.profiles["h200-sxm"])
    with_noise = {key for key, entry in criteria.items() if entry.noise is not None and entry.per == "gpu"}
    elsewhere = {"bf16_sustained", "host_to_device_all", "device_to_host_all"}  # 20 s each; all GPUs of a node
    soak = {key for key in with_noise if criteria[key].level == "soak"}
    assert with_noise - elsewhere - soak == set(script.SOURCES)


@pytest.mark.long
def test_on_a_cpu(tmp_path: Path) -> None:
    """Two rounds of the rehearsal's recipes: a table and a file."""
    command = [sys.executable, str(SCRIPT), "--json", str(tmp_path / "out.json"), "--rounds", "2", "--profile", "rehearsal"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    keys = [row["criterion"] for row in content["criteria"]]
    assert "bf16_tflops" in keys
    assert "fp8_tflops" not in keys  # skipped by the profile's rule
    assert len(content["rounds"]) == 2
    assert "| `host_to_device` |" in (tmp_path / "out.md").read_text()
