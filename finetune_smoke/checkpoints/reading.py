"""Find checkpoints that are whole, and resume those that fit the run.

A crash at any moment leaves a checkpoint either whole or without a marker. ``DIR/step-N`` holds files of tensors and, written
last, the marker ``_SUCCESS`` (files.py). Nothing in it is believed before it was compared.

Rows are one endless sequence (data/batches.py), and a step takes ``step_rows`` of it. So a checkpoint needs neither sampler
nor random state: its place in the data is a number of rows, ``next_row``, whichever ranks read the rows before. A run with
another number of ranks keeps the rows of a step, and so the sequence, the losses and the learning rate of every step. Its
rows a pass and its number of passes change instead.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from finetune_smoke.checkpoints import files
from finetune_smoke.checkpoints.files import FORMAT, Flaw, FlawError, Marker, State
from finetune_smoke.checks.exact import deterministic, record_zero
from finetune_smoke.digests import as_hex, digest
from finetune_smoke.model.build import SummedLoss
from finetune_smoke.ranks import rank_list
from finetune_smoke.run import TrainingRun
from finetune_smoke.settings.config import InputError, as_input_error

FOLDER = re.compile(r"step-([1-9][0-9]{0,8})(\.tmp)?", re.ASCII)
"""The name of a checkpoint, or of one that is being written."""
FLAWS = list(Flaw)
"""By the numbers that ranks exchange. Of flaws that ranks see in one checkpoint, the last is said."""

SETTINGS = (
    "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "seed", "row_tokens", "packed",
    "steps", "learning_rate", "warmup_steps", "beta2", "clip_norm",
)  # fmt: skip
"""Settings that determine the losses, besides base, data and the rows of a step."""

BEFORE = {"lora_dropout": 0.0, "target_modules": "all-linear"}
"""What checkpoints were trained with that were written before these settings were there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a run continues: ``run`` with the rows a step of the checkpoint, its first ``step`` and the losses before it.

    ``notes`` say what was passed over and why, and which failures the resumed one carries. ``damaged`` are the steps of
    checkpoints that look whole by marker and sizes but are damaged.
    """

    run: TrainingRun
    step: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    damaged: frozenset[int] = frozenset()


def folder_of(run: TrainingRun) -> Path:
    """The checkpoint directory of ``run``, which must have one."""
    return Path(run.config.checkpoint_dir or "")


def open_folder(run: TrainingRun) -> None:
    """Make the checkpoint directory; raises InputError on every rank unless all ranks see the same one."""
    probe = folder_of(run) / "starting.tmp"

    def make() -> None:
        with as_input_error("checkpoint directory cannot be written"):
            probe.mkdir(parents=True, exist_ok=True)

    run.ranks.run_on_rank_0(make)
    blind = run.ranks.where(not probe.is_dir())
    if blind:
        raise InputError(f"{rank_list(blind)} cannot see what rank 0 writes to {folder_of(run)}: it must be shared")
    if run.ranks.rank == 0:
        with suppress(OSError):  # an unused empty folder: an error would stop rank 0 only
            probe.rmdir()


def require_none(run: TrainingRun) -> None:
    """Raises InputError on every rank if the directory holds a checkpoint, which may be another run's."""
    step = next((step for step, flaw in _scan_on_all_ranks(run) if flaw in {Flaw.NONE, Flaw.FORMAT}), None)
    if step is not None:
        raise InputError(f"{folder_of(run)} holds a checkpoint of step {step}: --resume auto goes on from it, or name another")


def resume(run: TrainingRun) -> Resumed:
    """Load the newest whole checkpoint if there is one; damaged ones are passed over.

    Raises InputError on every rank if the checkpoint was made for another base, other data or settings. Nothing is
    overwritten.
    """
    notes: list[str] = []
    damaged: set[int] = set()
    for step, flaw in _scan_on_all_ranks(run):
        path = folder_of(run) / f"step-{step}"
        if flaw in {Flaw.NONE, Flaw.FORMAT}:
            marker = run.ranks.run_on_all_ranks(functools.partial(_fitting_marker, run, path))
            seen, state = _state_in(run, path, marker)
            flaw = FLAWS[max(run.ranks.gather([FLAWS.index(seen)]))[0]]  # noqa: PLW2901 -- that seen in the files
            if flaw is Flaw.NONE:
                _copy_state(run, state)
                run.checks.carry_over(marker.failures)
                same, kept = continued(run, marker, path)
                failed = f"checkpoint {path.name}, of {marker.world_size} ranks, carries a failure of"
                for note in (*kept, *(f"{failed} {name}" for name in sorted(marker.failures))):
                    notes.append(note)
                    run.progress(note, None)
                return Resumed(run=same, step=step, losses=state["losses"].tolist(), notes=notes, damaged=frozenset(damaged))
            damaged.add(step)
        notes.append(passed_over(step, flaw))
        run.progress(notes[-1], None)
    return Resumed(run=run, notes=notes, damaged=frozenset(damaged))


def passed_over(step: int, flaw: Flaw) -> str:
    """A line that says why a checkpoint is not used."""
    return f"checkpoint step-{step}{'.tmp' if flaw is Flaw.DRAFT else ''} is passed over: {flaw.value}"


def state_of(run: TrainingRun, losses: list[float]) -> State:
    """The state of ``run``; its tensors are the run's own, not copies."""
    state = {f"adapters/{name}": adapter.detach() for name, adapter in run.adapters.items()}
    for name, adapter in run.adapters.items():
        for key, value in run.optimizer.state.get(adapter, {}).items():
            state[f"optimizer/{name}/{key}"] = value
    return {**state, "losses": torch.tensor(losses, dtype=torch.float64)}


def state_number(state: State) -> int:
    """A signed 64-bit digest of all tensors of ``state`` but the losses, in the order of their names."""
    return digest(state[name] for name in sorted(state) if name != "losses")


def scan(folder: Path) -> list[tuple[int, Flaw]]:
    """(step, flaw by marker and sizes) of all checkpoints and drafts, newest first."""
    names = [match for path in folder.glob("step-*") if (match := FOLDER.fullmatch(path.name))]
    flaws = [(int(match[1]), Flaw.DRAFT if match[2] else _flaw_of(folder / match[0])) for match in names]
    return sorted(flaws, key=lambda found: (found[0], FLAWS.index(found[1])), reverse=True)


def _flaw_of(path: Path) -> Flaw:
    try:
        files.require_sizes(path, files.read_marker(path))
    except FlawError as error:
        return error.flaw
    return Flaw.NONE


@torch.no_grad()
def copy_adapters(adapters: Mapping[str, torch.nn.Parameter], state: State) -> None:
    """Copy the adapters of ``state``, which are the same tensors, into ``adapters``."""
    for name, adapter in adapters.items():
        adapter.copy_(state[f"adapters/{name}"])


def check_restore(run: TrainingRun) -> None:
    """Record ``restore``: save the adapter, overwrite the weights, load it. The loss must be the same to the bit."""
    before = probe_loss(run)
    with run.weights_kept():
        run.ranks.run_on_all_ranks(lambda: _save_and_load(run))
        same = probe_loss(run) == before
    what = "the loss of the adapter saved and loaded again is another one"
    record_zero(run.checks, "restore", count=int(not same), what=what)


@torch.no_grad()
def _save_and_load(run: TrainingRun) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict  # noqa: PLC0415 -- slow import
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 -- as above

    model = run.model.model
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "adapter_model.safetensors")
        adapter = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(model).items()}
        save_file(run.fault.truncate(adapter), file)
        for parameter in run.adapters.values():
            parameter.fill_(0.5)
        set_peft_model_state_dict(model, load_file(file, device=str(run.ranks.device)))


@torch.no_grad()
def probe_loss(run: TrainingRun, model: SummedLoss | None = None) -> float:
    """The loss of ``model``, or the run's own, without dropout, over a few rows of all ranks, by repeatable kernels."""
    model = model or run.model
    batch = run.batch_of(range(min(run.rows, 16)))
    was_training = model.training
    model.eval()
    try:
        with deterministic(), run.autocast():
            return float(model(batch.ids, batch.positions, batch.targets))
    finally:
        model.train(was_training)


def _scan_on_all_ranks(run: TrainingRun) -> list[tuple[int, Flaw]]:
    """``scan`` of rank 0, on every rank."""
    found = scan(folder_of(run)) if run.ranks.rank == 0 else []
    count = run.ranks.gather([len(found)])[0][0]
    numbers = [number for step, flaw in found for number in (step, FLAWS.index(flaw))] or [0] * 2 * count
    numbers = run.ranks.gather(numbers)[0] if count else []
    return [(step, FLAWS[flaw]) for step, flaw in zip(numbers[::2], numbers[1::2], strict=True)]


def _fitting_marker(run: TrainingRun, path: Path) -> Marker:
    """The marker of ``path``; raises InputError if the checkpoint does not fit this run."""
    try:
        marker = files.read_marker(path)
    except FlawError as error:
        if error.flaw is Flaw.FORMAT:
            raise InputError(f"checkpoint {path} does not fit this run: {error}") from error
        raise InputError(f"checkpoint {path} changed while it was read") from error
    other = differences(marker.fits, run)
    if other:
        raise InputError(f"checkpoint {path} does not fit this run: {other}")
    continued(run, marker, path)  # raises before anything is read
    return marker


def _state_in(run: TrainingRun, path: Path, marker: Marker) -> tuple[Flaw, State]:
    """(flaw seen by this rank, the state)."""
    if marker.step > run.config.steps:
        return Flaw.TENSORS, {}
    try:
        state = files.read_state(path, marker, run.adapters, run.ranks.device)
    except FlawError as error:
        return error.flaw, {}
    return (Flaw.NONE if as_hex(state_number(state)) == marker.state_digest else Flaw.STATE), state


def _copy_state(run: TrainingRun, state: State) -> None:
    """Copy ``state``, which holds the run's own tensors, into adapters and optimiser."""
    copy_adapters(run.adapters, state)
    for name, adapter in run.adapters.items():
        if f"optimizer/{name}/step" in state:
            run.optimizer.state[adapter] = {key: state[f"optimizer/{name}/{key}"] for key in files.OF_ADAMW}


def fits(run: TrainingRun) -> dict[str, Any]:
    """What a run has to have in common with a checkpoint that it resumes or an adapter that it replaces."""
    return {
        "format": FORMAT,
        "base": as_hex(run.initial.base),
        "data": as_hex(run.initial.data),
        # They decide which rows of a data set are trained on. Synthetic calls are drawn for each split separately.
        "heldout_rows": None if run.config.dataset is None else len(run.source.heldout),
        **{name: getattr(run.config, name) for name in SETTINGS},
    }


def differences(found: Mapping[str, object], run: TrainingRun) -> str:
    """How ``found``, an earlier result of ``fits``, differs from that of ``run``; empty if it does not."""
    wanted, found = fits(run), {**BEFORE, **found}
    names = ("format",) if found.get("format") != FORMAT else tuple(wanted)  # another format has other fields
    return "; ".join(
        f"{name} {found.get(name)} there, {wanted[name]} here" for name in names if found.get(name) != wanted[name]
    )


def continued(run: TrainingRun, marker: Marker, path: Path) -> tuple[TrainingRun, list[str]]:
    """(``run`` with the checkpoint's rows a step, a line if that changed it).

    No rank takes more rows a pass than ``run`` has. Raises InputError if the ranks cannot share the rows of a step.
    """
    rows, ranks = marker.step_rows, run.ranks.world_size
    if rows == run.step_rows:
        return run, []
    if rows % ranks:
        raise InputError(
            f"checkpoint {path} was trained on {rows} rows a step, which {ranks} ranks cannot share: resume it with a number "
            f"of ranks that divides {rows}"
        )
    share = rows // ranks
    passes = next(count for count in range(-(-share // run.rows), share + 1) if share % count == 0)
    note = (
        f"checkpoint {path.name} was trained on {rows} rows a step, these settings make {run.step_rows}: kept at {rows}, by "
        f"{share // passes} rows a rank in {passes} passes"
    )
    whole = share // passes * (ranks if run.config.rows_shared else 1)
    config = dataclasses.replace(run.config, rows=whole, accumulation=passes)
    return dataclasses.replace(run, config=config, rows=share // passes), [note]
