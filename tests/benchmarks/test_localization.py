"""The benchmark of the localisation: what it counts and writes, on small clusters."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from pytest_gpucluster.localization.parts import MemberGroup, Suspect
from tests.support.scripts import benchmark_module

if TYPE_CHECKING:
    from pathlib import Path


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed and written, with a picture that names both sizes."""
    words = "--nodes 9 30 --culprits 0 1 --trials 3 --others uplink host --other-parts 64 --out"
    monkeypatch.setattr(sys, "argv", ["localization.py", *words.split(), str(tmp_path)])
    with benchmark_module("localization") as benchmark:
        assert benchmark.main() == 0
        assert not set(range(3)) & set(range(benchmark.FIRST_SEED["held-out"], benchmark.FIRST_SEED["held-out"] + 3))
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["scene"], row["nodes"], row["culprits"]) for row in rows] == [
        ("nodes", 9, 0),
        ("nodes", 9, 1),
        ("nodes", 30, 0),
        ("nodes", 30, 1),
        ("uplink", 64, 1),
        ("host", 64, 1),
    ]
    drawn = [text.text for text in ET.parse(tmp_path / "plot.svg").getroot().iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314 -- our own
    assert {"9", "30", "0 bad", "1 bad", "nodes"} <= set(drawn)


@pytest.mark.parametrize(
    ("culprit", "fails"),
    [
        (Suspect("part", ("a",)), {"ab", "ac"}),
        (Suspect("whole", ("left",)), {"ab", "ac"}),
        (Suspect("edge", ("left",)), {"ac"}),
        (Suspect("between", ("a", "c")), {"ac"}),
        (Suspect("between", ("left", "right")), {"ac"}),
        (Suspect("between", ("c", "d")), {"cd"}),
    ],
)
def test_what_a_culprit_spoils(culprit: Suspect, fails: set[str]) -> None:
    """``a`` and ``b`` are left, ``c`` and ``d`` are right."""
    with benchmark_module("localization") as benchmark:
        parts = tuple(benchmark.SearchPart(name=name, within=("left" if name in "ab" else "right",)) for name in "abcd")
        cluster = benchmark.Cluster(parts=parts, bad=frozenset({culprit}), noise=0.0)
        groups = [MemberGroup(tuple(names), "suspect") for names in ("ab", "ac", "cd")]
        results = cluster.measure(groups, random.Random(1))
    assert {"".join(group.parts) for group, result in zip(groups, results, strict=True) if not result.passed} == fails
