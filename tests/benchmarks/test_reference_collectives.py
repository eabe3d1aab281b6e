"""Collectives beside nccl-tests' formulas: a rehearsal of all of them, and that a disagreement does not go unseen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.scripts import BENCHMARKS, benchmark_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = BENCHMARKS / "reference_collectives.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The script as a module."""
    with benchmark_module("reference_collectives") as module:
        yield module


@pytest.mark.parametrize(
    ("ours", "mib", "inside"),
    [(4.0, 1024, True), (3.95, 256, True), (3.9, 1024, False), (4.2, 1024, False), (3.0, 16, None)],
)
def test_what_is_inside(script: Any, ours: float, mib: int, *, inside: bool | None) -> None:
    """From 0.98 to 1.03, of 256 MiB and more."""
    found = script.row("all_gather", mib, (ours, 4.0, ours), judged=True)
    assert found.inside is inside
    assert ("OUTSIDE" in script.table([found])) == (inside is False)
    assert script.row("all_gather", mib, (ours, 4.0, ours), judged=False).inside is None


@pytest.mark.parametrize(("ours", "inside"), [(4.0, True), (3.85, True), (4.15, True), (3.7, False), (4.3, False)])
def test_what_is_inside_of_a_small_message(script: Any, ours: float, *, inside: bool) -> None:
    """From 0.95 to 1.05, by the medians: one turn that was disturbed says nothing."""
    found = script.small_row("all_gather", 8, [ours, 0.1, ours, ours], [4.0, 4.0, 1.0], judged=True)
    assert found.inside is inside
    assert script.small_row("all_gather", 8, [ours], [4.0], judged=False).inside is None
    assert " 8 B " in script.table([found])
    assert [script.size_text(size / 2**20) for size in (12, 65536, 1 << 30)] == ["12 B", "64 KiB", "1024 MiB"]


def test_one_rank_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to reduce."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        script.main([])
    assert "needs several ranks" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.e2e
def test_rehearsal_of_two_ranks(tmp_path: Path) -> None:
    """Every collective at every size, by ours and by the reference; rank 0 tells."""
    own = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), "--json", "out.json", "--mib", "1", "4"],
        cwd=tmp_path, env=own, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
    assert [(row["operation"], row["mib"]) for row in content["rows"]] == [(name, mib) for name in names for mib in (1, 4)]
    assert all(row["reference_gb_s"] > 0 and row["inside"] is None for row in content["rows"])
    assert content["ranks"] == 2
