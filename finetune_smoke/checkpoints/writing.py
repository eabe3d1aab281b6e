"""Write checkpoints, so that each is whole or has no marker.

Before anything is written, all ranks decide whether the state is worth saving. All ranks write and sync ``DIR/step-N.tmp``.
It is renamed to ``DIR/step-N``, and only then gets its marker; older checkpoints are removed after that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from finetune_smoke.checkpoints import files, reading
from finetune_smoke.checkpoints.files import FileEntry, FlawError, Marker, State
from finetune_smoke.checks.exact import difference, not_finite
from finetune_smoke.digests import as_hex, digest, digest_bytes
from finetune_smoke.ranks import Ranks, rank_list
from finetune_smoke.run import TrainingRun
from finetune_smoke.settings.config import as_input_error

STATE_CHECKS = ("lock_step", "graph_lock_step", "all_reduce", "adapter_digest", "finite")
"""Checks of the state and of the arithmetic that made it. The others concern base, data and speed."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Saver:
    """Saves the state of ``run``; ``damaged`` are steps of checkpoints that only look whole, ``saved`` is the newest saved."""

    run: TrainingRun
    damaged: frozenset[int] = frozenset()
    saved: int | None = None
    _unsaved: dict[int, str] = dataclasses.field(default_factory=dict)

    def save(self, *, step: int, losses: list[float], norms: Sequence[float] = ()) -> None:
        """Save the state after ``step`` steps if it is worth it; raises InputError on every rank if it cannot be written."""
        state = reading.state_of(self.run, losses)
        number = reading.state_number(state)
        flaws = self._why_not_saved(step, state, number, [*losses, *norms])
        if flaws:
            self._unsaved[step] = "; ".join(flaws)
            self.run.progress(f"checkpoint of step {step} is not saved: {self._unsaved[step]}", None)
            return
        self.saved, self.damaged = step, self.damaged - {step}
        _write(self.run, state, step, as_hex(number))
        keep, folder = self.run.config.keep_checkpoints, reading.folder_of(self.run)
        self.run.ranks.run_on_rank_0(functools.partial(_prune, folder, newest=step, keep=keep, damaged=self.damaged))

    def notes(self) -> list[str]:
        """A line with the steps that were not saved, and why the first of them was not; empty if all were saved."""
        if not self._unsaved:
            return []
        steps = ", ".join(map(str, self._unsaved))
        why = next(iter(self._unsaved.values()))
        return [f"state not fit to be saved, no checkpoint of step{'s' if len(self._unsaved) > 1 else ''} {steps}: {why}"]

    def _why_not_saved(self, step: int, state: State, number: int, values: Sequence[float]) -> list[str]:
        """Why ``state`` is not worth saving, empty if it is; the same on every rank. Problems found here fail their check."""
        seen = self.run.checks
        bad = not_finite(tensor for name, tensor in state.items() if name != "losses")
        bad += sum(not math.isfinite(value) for value in values)
        everyone = self.run.ranks.gather([bad, number])
        broken = [rank for rank, (count, _) in enumerate(everyone) if count]
        if broken:
            what = "values of adapters, optimiser, losses and gradient norms that are not finite"
            problem = f"step {step}: {what}: {everyone[broken[0]][0]} on {rank_list(broken)}"
            seen.record("finite", problem=problem, at_fault=broken)
        differs, odd = difference([digest_ for _, digest_ in everyone])
        if differs:
            seen.record("adapter_digest", problem=f"adapters and optimiser after step {step}: {differs}", at_fault=odd)
        return seen.latest_problems(STATE_CHECKS)


def _write(run: TrainingRun, state: State, step: int, state_digest: str) -> None:
    """Write ``state`` and, when all ranks have written it, its marker; raises InputError on every rank if one fails."""
    folder, ranks = reading.folder_of(run), run.ranks
    final = folder / f"step-{step}"
    draft = final.with_suffix(".tmp")
    ranks.run_on_rank_0(lambda: _make_draft(draft, final))
    written = ranks.run_on_all_ranks(lambda: _write_share(draft / files.file_of(ranks.rank), state, ranks))
    marker = Marker(
        step=step,
        next_row=step * run.step_rows,
        step_rows=run.step_rows,
        failures=run.checks.failures,
        world_size=ranks.world_size,
        digest=as_hex(digest(run.adapters.values())),
        state_digest=state_digest,
        fits=reading.fits(run),
        config=dataclasses.asdict(run.config),
        files={
            files.file_of(rank): FileEntry(bytes=size_bytes, digest=as_hex(number))
            for rank, (size_bytes, number) in enumerate(ranks.gather(written))
        },
    )
    ranks.run_on_rank_0(lambda: _complete(draft, final, marker))


def _make_draft(draft: Path, final: Path) -> None:
    """Make an empty folder, without the remains of an earlier run; raises InputError."""
    with as_input_error(f"checkpoint {draft} cannot be written"):
        for remains in [*draft.parent.glob("step-*.tmp"), final]:
            if remains.is_dir() and not remains.is_symlink():
                shutil.rmtree(remains, ignore_errors=True)
            else:
                remains.unlink(missing_ok=True)
        draft.mkdir()


def _write_share(path: Path, state: State, ranks: Ranks) -> list[int]:
    """Write this rank's file: [its size in bytes, its digest]. Raises InputError."""
    with as_input_error(f"checkpoint {path.parent} cannot be written by rank {ranks.rank}"):
        content = files.content(state, ranks.rank, ranks.world_size)
        path.parent.mkdir(exist_ok=True)  # a network file system may still remember that there was none
        write_synced(path, content)
    return [len(content), digest_bytes(content)]


def _complete(draft: Path, final: Path, marker: Marker) -> None:
    """Rename the synced ``draft`` to ``final``, then write the marker; raises InputError."""
    with as_input_error(f"checkpoint {final} cannot be written"):
        sync(draft)
        draft.rename(final)
        write_synced(final / files.MARKER, marker.model_dump_json(by_alias=True).encode())
        sync(final)
        sync(final.parent)


def _prune(folder: Path, *, newest: int, keep: int, damaged: frozenset[int]) -> None:
    """Remove all but ``keep`` complete checkpoints up to ``newest``; 0 keeps all. Raises InputError.

    The marker goes first, so that no half-removed checkpoint looks whole. Checkpoints that carry a failure are counted
    apart, so that they displace none without; ``damaged`` ones are not counted.
    """
    whole = [step for step, flaw in reading.scan(folder) if flaw is files.Flaw.NONE]
    older = [step for step in whole if step <= newest and step not in damaged]
    with as_input_error(f"checkpoints in {folder} cannot be read", FlawError):
        failed = {step for step in older if files.read_marker(folder / f"step-{step}").failures}
    good = [step for step in older if step not in failed]
    for step in [*good[keep:], *sorted(failed, reverse=True)[keep:]] if keep else []:
        path = folder / f"step-{step}"
        with as_input_error(f"checkpoint {path} cannot be written"):
            (path / files.MARKER).unlink()
        shutil.rmtree(path, ignore_errors=True)  # without its marker it is no checkpoint


def write_synced(path: Path, content: bytes) -> None:
    """Write ``content`` and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Wait until the names in ``folder``, or the content of a file, are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
