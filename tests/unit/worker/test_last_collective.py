"""The last collective of a rank, written by the worker and read by its agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from pytest_gpucluster.worker import last_collective

if TYPE_CHECKING:
    from pathlib import Path


def test_collectives_are_counted(tmp_path: Path) -> None:
    """Counts what is entered, before it returns; starts again at each call; unreadable is zero, never an exception."""
    path = tmp_path / "collective"
    last_collective.create(path)
    assert last_collective.read(path) == (0, "")
    watch = last_collective.CollectiveRecorder(path)
    seen: list[tuple[int, str]] = []
    module = SimpleNamespace(
        all_reduce=lambda: seen.append(last_collective.read(path)), barrier=lambda value: value, other=lambda: 1
    )
    untouched = module.other
    watch.watch(module)
    module.all_reduce()
    assert module.barrier(7) == 7
    assert module.other is untouched
    assert seen == [(1, "all_reduce")]
    assert last_collective.read(path) == (2, "barrier")
    watch.restart()
    assert last_collective.read(path) == (0, "")
    path.write_bytes(b"short")
    assert last_collective.read(path) == (0, "")
    assert last_collective.read(tmp_path / "none") == (0, "")
