"""Writing checkpoints, at once or beside the training, so that each is whole or has no marker.

``DIR/step-N.tmp`` is written and synced by all ranks, renamed to ``DIR/step-N``, and only then gets its marker; older
ones are removed after that. Beside the training means: copied to host memory, and written by a thread of its own over
a gloo group of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from finetune_smoke import checkpoint
from finetune_smoke.checks import digest
from finetune_smoke.config import InputError
from finetune_smoke.ranks import SETUP_DEADLINE_S, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from finetune_smoke.state import Run


@dataclasses.dataclass(slots=True, kw_only=True)
class Saver:
    """Saves the state of ``run``; ``ranks`` is how the ranks speak while they write."""

    run: Run
    ranks: Ranks
    _writing: Future[None] | None = None

    def save(self, *, step: int, losses: list[float]) -> None:
        """Save the state after ``step`` steps, whose losses are ``losses``; waits for the one before.

        Returns when it is complete or, with ``checkpoint_async``, when it is copied. Raises InputError if it cannot be
        written, of an asynchronous one the next time that anything is saved or waited for.
        """
        self.wait()
        state = checkpoint.content(self.run, losses)
        marker = self._marker(step, state)
        if not self.run.config.checkpoint_async:
            _write(self.run, self.ranks, state, marker)
            return
        copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        self._writing = _in_background(functools.partial(_write, self.run, self.ranks, copy, marker))

    def wait(self) -> None:
        """Wait until what was saved last is complete on every rank."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _marker(self, step: int, state: checkpoint.State) -> dict[str, Any]:
        """The marker, but for the files."""
        return {
            "step": step,
            "world_size": self.run.ranks.world_size,
            "digest": f"{digest(self.run.adapters.values()) % 2**64:016x}",
            "state_digest": checkpoint.state_digest(state),
            "fits": checkpoint.fits(self.run),
            "config": dataclasses.asdict(self.run.config),
        }


@contextmanager
def saver(run: Run) -> Iterator[Saver | None]:
    """What saves the checkpoints of ``run``, None if it has no directory; waits for the last one at the end."""
    if run.config.checkpoint_dir is None:
        yield None
        return
    group = None
    if run.config.checkpoint_async and run.ranks.world_size > 1:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SETUP_DEADLINE_S))
    beside = dataclasses.replace(run.ranks, device=torch.device("cpu"), group=group)
    made = Saver(run=run, ranks=run.ranks if group is None else beside)
    with checkpoint.quiet():  # around the thread too: filters of warnings belong to the process
        yield made
        made.wait()
    if group is not None:
        dist.destroy_process_group(group)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """``work`` in a thread that does not keep the process alive: after an error nobody waits for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- raised again where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _write(run: Run, ranks: Ranks, state: checkpoint.State, marker: dict[str, Any]) -> None:
    """Write ``state`` and, when all ranks have, its marker; then remove what is older than is to be kept."""
    folder = checkpoint.folder_of(run)
    final = folder / f"step-{marker['step']}"
    draft = final.with_suffix(".tmp")
    if ranks.rank == 0:
        for remains in [*folder.glob("step-*.tmp"), final]:
            shutil.rmtree(remains, ignore_errors=True)
    ranks.gather([0])  # nobody writes before the remains of an earlier run are gone
    _write_files(draft, state, ranks)
    files = _files(draft, ranks)
    if ranks.rank == 0:
        sync(draft)
        draft.rename(final)
        write_synced(final / checkpoint.MARKER, json.dumps({**marker, "files": files}))
        sync(final)
        sync(folder)
        _prune(folder, newest=marker["step"], keep=run.config.keep_checkpoints)
    ranks.gather([0])


def _write_files(draft: Path, state: checkpoint.State, ranks: Ranks) -> None:
    """This rank's share of ``state``; raises InputError on every rank if the files of one cannot be written."""
    try:
        writer = dcp.FileSystemWriter(draft, sync_files=True)
        dcp.save(state, storage_writer=writer, process_group=ranks.group)
    except CheckpointException as error:
        causes = {rank: failure[0] for rank, failure in error.failures.items()}
        if not all(isinstance(cause, OSError) for cause in causes.values()):
            raise
        rank, cause = min(causes.items())
        raise InputError(f"checkpoint {draft} cannot be written by rank {rank}: {cause}") from error


def _files(draft: Path, ranks: Ranks) -> dict[str, dict[str, object]]:
    """Size and digest of each file, on rank 0; every rank reads its own back."""
    name = f"__{ranks.rank}_0.distcp"  # as DCP's writer calls it where one thread writes one file
    mine = draft / name
    digests = ranks.gather([checkpoint.file_digest(mine) if mine.exists() else 0])
    if ranks.rank > 0:
        return {}
    known = {f"__{rank}_0.distcp": found for rank, (found,) in enumerate(digests)}
    result: dict[str, dict[str, object]] = {}
    for path in sorted(draft.iterdir()):
        found = known[path.name] if path.name in known else checkpoint.file_digest(path)
        result[path.name] = {"bytes": path.stat().st_size, "digest": f"{found % 2**64:016x}"}
    return result


def _prune(folder: Path, *, newest: int, keep: int) -> None:
    """Remove all but ``keep`` complete checkpoints up to ``newest``; 0 keeps all. Markers first: no half one looks whole."""
    older = [step for step in checkpoint.steps_in(folder) if step <= newest]
    for step in older[keep:] if keep else []:
        path = folder / f"step-{step}"
        (path / checkpoint.MARKER).unlink()
        shutil.rmtree(path)


def write_synced(path: Path, text: str) -> None:
    """Write ``text`` and wait until it is on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
