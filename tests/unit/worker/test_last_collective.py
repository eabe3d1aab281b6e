"""The last collective of a rank, written by the worker and read by its agent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from pytest_gpucluster.worker import last_collective
from pytest_gpucluster.worker.last_collective import LastCollective

if TYPE_CHECKING:
    from pathlib import Path


NOTHING = LastCollective()


class ProcessGroup:
    """Stands for PyTorch's."""


def test_collectives_are_counted(tmp_path: Path) -> None:
    """Counts what is entered, before it returns; starts again at each call; unreadable is zero, never an exception."""
    path = tmp_path / "collective"
    last_collective.create(path)
    assert last_collective.read(path) == NOTHING
    watch = last_collective.CollectiveRecorder(path)
    seen: list[LastCollective] = []
    half = ProcessGroup()
    module = SimpleNamespace(
        all_reduce=lambda *_more: seen.append(last_collective.read(path)),
        barrier=lambda value, **_more: value,
        other=lambda: 1,
        group=SimpleNamespace(WORLD=ProcessGroup()),
        get_process_group_ranks={half: [0, 1, 5]}.__getitem__,
        ProcessGroup=ProcessGroup,
    )
    untouched = module.other
    watch.watch(module)
    module.all_reduce()
    assert module.barrier(7) == 7
    assert module.other is untouched
    assert seen == [LastCollective(count=1, name="all_reduce")]
    assert last_collective.read(path) == LastCollective(count=2, name="barrier")
    assert module.barrier(7, group=half) == 7
    assert last_collective.read(path) == LastCollective(count=3, name="barrier", members=((0, 1), (5, 5)))
    module.all_reduce(0, half)
    module.all_reduce(0, module.group.WORLD)
    module.all_reduce(0, ProcessGroup())  # of which torch knows nothing any more
    assert [one.members for one in seen[1:]] == [((0, 1), (5, 5)), (), ()]
    watch.restart()
    assert last_collective.read(path) == NOTHING
    path.write_bytes(b"short")
    assert last_collective.read(path) == NOTHING
    assert last_collective.read(tmp_path / "none") == NOTHING
