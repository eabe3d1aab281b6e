"""Checkpoints of adapters, optimiser and step that a crash at any moment leaves either whole or without a marker.

``DIR/step-N.tmp`` is written by torch.distributed.checkpoint (DCP) and synced, renamed to ``DIR/step-N``, and only
then gets ``_SUCCESS``: JSON with step, world size, digest of the adapters, sizes of the files and what it fits to.
Rows are a function of the step, so neither sampler nor random state is needed, and any number of ranks can resume.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from finetune_smoke import data
from finetune_smoke.checks import deterministic, digest, named, none_on_any_rank
from finetune_smoke.config import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.state import Run

MARKER = "_SUCCESS"


def open_folder(run: Run) -> None:
    """Make the checkpoint directory; raises InputError on every rank unless all ranks see the same one."""
    probe = _folder(run) / "starting.tmp"
    run.ranks.together(lambda: _make(probe) if run.ranks.rank == 0 else None)
    seen = run.ranks.gather([probe.is_dir()])
    blind = [rank for rank, (sees,) in enumerate(seen) if not sees]
    if blind:
        raise InputError(f"{named(blind)} cannot see what rank 0 writes to {_folder(run)}: it must be shared")
    if run.ranks.rank == 0:
        probe.rmdir()


def require_none(run: Run) -> None:
    """Raises InputError on every rank if the directory holds a checkpoint: another run's would be taken for this one's."""
    step = _newest_seen(run)
    if step >= 0:
        raise InputError(f"{_folder(run)} holds a checkpoint of step {step}: --resume auto goes on from it, or name another")


def save(run: Run, *, step: int, losses: list[float]) -> None:
    """Write the state after ``step`` steps, whose losses are ``losses``; returns when it is complete."""
    final = _folder(run) / f"step-{step}"
    draft = final.with_suffix(".tmp")
    if run.ranks.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
    mark = digest(run.adapters.values())
    run.ranks.gather([0])  # nobody writes before the remains of an earlier run are gone
    with _quiet():
        dcp.save(_state(run, losses), storage_writer=dcp.FileSystemWriter(draft, sync_files=True))
    if run.ranks.rank == 0:
        _sync(draft)
        draft.rename(final)
        sizes = {path.name: path.stat().st_size for path in final.iterdir()}
        content = {"step": step, "world_size": run.ranks.world_size, "digest": f"{mark:x}", "files": sizes}
        _write(final / MARKER, json.dumps({**content, "fits": _fits(run)}))
        _sync(final)
        _sync(final.parent)
    run.ranks.gather([0])


def resume(run: Run) -> tuple[int, list[float]]:
    """Load the newest complete checkpoint: (its step, the losses so far), or (0, []) if there is none.

    Raises InputError on every rank if it was made for another base or other adapters, or is not what was saved.
    """
    step = _newest_seen(run)
    if step < 0:
        return 0, []
    path = _folder(run) / f"step-{step}"
    marker = run.ranks.together(lambda: _fitting(run, path))
    state = _state(run, [0.0] * step)
    with _quiet():
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(ignore_frozen_params=True, strict=False),
    )
    run.ranks.together(lambda: _verify(run, path, marker["digest"]))
    losses: list[float] = state["losses"].tolist()
    return step, losses


def check_restore(run: Run) -> None:
    """``restore``: save the adapter, overwrite the weights, load it; the loss must come back to the bit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict  # noqa: PLC0415 -- slow import
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 -- as above

    model = run.model.model
    kept = [adapter.detach().clone() for adapter in run.adapters.values()]
    before = _probe_loss(run)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = str(Path(folder) / "adapter_model.safetensors")
        adapter = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
        save_file(run.fault.truncate(adapter), file)
        for parameter in run.adapters.values():
            parameter.fill_(0.5)
        set_peft_model_state_dict(model, load_file(file, device=str(run.ranks.device)))
    same = _probe_loss(run) == before
    with torch.no_grad():
        for parameter, value in zip(run.adapters.values(), kept, strict=True):
            parameter.copy_(value)
    what = "the loss of the adapter saved and loaded again is another one"
    none_on_any_rank(run.checks, "restore", count=int(not same), what=what)


@torch.no_grad()
def _probe_loss(run: Run) -> float:
    rows = [run.source.row(index) for index in range(min(run.rows, 16))]
    batch = data.batch(rows, run.source.pad_id).to(run.ranks.device)
    with deterministic(), run.autocast():
        return float(run.model(batch.ids, batch.positions, batch.targets))


def _folder(run: Run) -> Path:
    return Path(run.config.checkpoint_dir or "")


def _make(probe: Path) -> None:
    try:
        probe.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"checkpoint directory cannot be written: {error}") from error


def _state(run: Run, losses: list[float]) -> dict[str, Any]:
    """What a checkpoint holds; also the template that a load fills."""
    options = StateDictOptions(ignore_frozen_params=True)
    model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optimizer": optimizer, "losses": torch.tensor(losses, dtype=torch.float64)}


def _fits(run: Run) -> dict[str, object]:
    config = run.config
    return {"base": f"{run.base_digest:x}", "lora_rank": config.lora_rank, "lora_alpha": config.lora_alpha}


def _newest_seen(run: Run) -> int:
    """What rank 0 sees as the newest complete checkpoint: its step, or -1."""
    return run.ranks.gather([_newest(_folder(run)) if run.ranks.rank == 0 else 0])[0][0]


def _newest(folder: Path) -> int:
    """Highest step with a marker whose files are all there in full, or -1."""
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return max((step for step in steps if _complete(folder / f"step-{step}")), default=-1)


def _complete(path: Path) -> bool:
    try:
        sizes = json.loads((path / MARKER).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _fitting(run: Run, path: Path) -> dict[str, Any]:
    """The marker of ``path``; raises InputError if this run is not what it fits to."""
    marker: dict[str, Any] = json.loads((path / MARKER).read_text())
    found, wanted = marker["fits"], _fits(run)
    other = [f"{name} {found.get(name)} there, {value} here" for name, value in wanted.items() if found.get(name) != value]
    if other:
        raise InputError(f"checkpoint {path} does not fit this run: {'; '.join(other)}")
    return marker


def _verify(run: Run, path: Path, expected: str) -> None:
    found = f"{digest(run.adapters.values()):x}"
    if found != expected:
        raise InputError(f"checkpoint {path} is damaged: adapters have digest {found}, {expected} was saved")


def _write(path: Path, content: str) -> None:
    with path.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns where there is no process group; a run alone is meant to have none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
