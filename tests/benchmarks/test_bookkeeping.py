"""The benchmark of the bookkeeping: what it counts and writes, on the smallest fleets. Seconds are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.support.scripts import BENCHMARKS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_two_fleets(tmp_path: Path) -> None:
    """Twice the GPUs have more testcases; each number is there, and the picture names both sizes."""
    command = [sys.executable, str(BENCHMARKS / "bookkeeping.py"), "--fleet", "1x1", "1x2", "--repeats", "1", "--out", "out"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=550)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [fleet["places"] for fleet in found["fleets"]] == [1, 2]
    one, two = found["fleets"]
    assert two["testcases"] > one["testcases"] > 0
    for fleet in (one, two):
        assert all(fleet[what]["median"] > 0 for what in ("wall_s", "cpu_s", "peak_mib"))
        assert len(fleet["runs"]) == len(fleet["plain"]) == 1
    drawn = [text.text for text in ET.parse(tmp_path / "out" / "plot.svg").getroot().iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314 -- our own
    assert {"1", "2", "expected places"} <= set(drawn)
