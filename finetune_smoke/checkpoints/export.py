"""The trained adapter in peft's own layout: ``final/`` in the checkpoint directory, or ``--output``.

``peft.PeftModel.from_pretrained`` reads ``adapter_model.safetensors`` and ``adapter_config.json``. ``finetune_smoke.json``
says which run made them, ``config.yaml`` starts that run again, and ``summary.txt`` is its summary.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic_core

from finetune_smoke import digests
from finetune_smoke.checkpoints import reading, writing
from finetune_smoke.checks import exact
from finetune_smoke.model import build
from finetune_smoke.reporting import report
from finetune_smoke.settings import configfile
from finetune_smoke.settings.config import Config, InputError, as_input_error

if TYPE_CHECKING:
    from finetune_smoke.reporting.outcome import Outcome
    from finetune_smoke.run import TrainingRun

MAX_JSON_BYTES = 1 << 20
"""The largest file of settings that is read."""
ORIGIN = "finetune_smoke.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "adapter_config.json"
SUMMARY = "summary.txt"
TOLERANCE = {"cpu": 1e-4, "cuda": 0.1}
"""By device: how far the loss through peft's modules may be from that of training, times (1 + loss), in nats. Training
may use other kernels, in bf16. Without the adapter, or with another scale, the loss is whole nats away."""


def destination(config: Config) -> Path | None:
    """The folder of the adapter, None if it is not written."""
    if config.output is not None:
        return Path(config.output)
    return None if config.checkpoint_dir is None else Path(config.checkpoint_dir) / "final"


def claim_folder(run: TrainingRun) -> None:
    """Raises InputError on every rank if the adapter of ``run`` would overwrite anything but its own earlier version."""
    folder = destination(run.config)
    if folder is not None:
        run.ranks.run_on_rank_0(lambda: _claim(run, folder))


def _draft_and_old(folder: Path) -> tuple[Path, Path]:
    """(where a new adapter is written before it takes the name ``folder``, where the older one lies meanwhile).

    Only this program uses such names, so it may remove what lies there.
    """
    return folder.with_name(f".{folder.name}.finetune_smoke-new"), folder.with_name(f".{folder.name}.finetune_smoke-old")


def _repair(folder: Path) -> None:
    """Undo an interrupted replacement; raises OSError.

    If ``folder`` is missing, the older adapter had just been moved aside: move it back. Otherwise the older one was being
    removed, or the new one written.
    """
    new, old = _draft_and_old(folder)
    if not folder.exists() and _json_of(old / ORIGIN) is not None:
        old.rename(folder)
    for remains in (new, old):
        shutil.rmtree(remains, ignore_errors=True)


def write_final(run: TrainingRun) -> None:
    """Write the adapter, and with ``restore_check`` load it back; raises InputError if it cannot be written."""
    folder = destination(run.config)
    if folder is None:
        return
    run.progress(f"writing the adapter to {folder}", None)
    run.ranks.run_on_rank_0(lambda: _write(run, folder))
    if run.config.restore_check:
        _check(run, folder)


def write_summary(run: TrainingRun, outcome: Outcome) -> None:
    """Write the summary beside the adapter."""
    folder = destination(run.config)
    if folder is not None and run.ranks.rank == 0:
        try:
            writing.write_synced(folder / SUMMARY, f"{report.summary(run.config, outcome)}\n".encode())
        except OSError as error:  # the adapter is complete, and RESULT is still to be printed
            run.progress(f"{folder / SUMMARY} cannot be written: {error}", None)


def origin_of(folder: Path) -> dict[str, Any] | None:
    """Settings and ``fits`` of the run that made the adapter in ``folder``; None for an adapter from elsewhere."""
    origin = _json_of(folder / ORIGIN)
    whole = isinstance(origin, dict) and all(isinstance(origin.get(name), dict) for name in ("fits", "config"))
    return origin if whole else None


def _json_of(path: Path) -> Any:
    """The content of a JSON file, None if it is none, too large, too deep, or no regular file."""
    if not path.is_file():  # a pipe would never end
        return None
    try:
        with path.open("rb") as file:
            return pydantic_core.from_json(file.read(MAX_JSON_BYTES + 1)[:MAX_JSON_BYTES])
    except (OSError, ValueError):
        return None


def _claim(run: TrainingRun, folder: Path) -> None:
    """Raises InputError unless ``folder`` can be written and is empty, or holds this run's own earlier adapter."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: the adapter needs a directory")
    with as_input_error("directory for the adapter cannot be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent):
            pass  # the folder is writable: known now, not after hours of training
        _repair(folder)
        filled = folder.is_dir() and any(folder.iterdir())
    if not filled:
        return
    origin = origin_of(folder)
    if origin is None or run.config.resume != "auto":
        raise InputError(f"{folder} is not empty: name another, or move it away (--resume auto replaces its own adapter)")
    if other := reading.differences(origin["fits"], run):
        raise InputError(f"{folder} holds the adapter of another run: {other}")


def _write(run: TrainingRun, folder: Path) -> None:
    """Write the adapter under a hidden name, then rename: what lies under the name ``folder`` is always whole.

    If a kill leaves hidden names behind, the next run repairs the folder (``_repair``).
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415 -- slow import
    from safetensors import SafetensorError  # noqa: PLC0415 -- as above
    from safetensors.torch import save_file  # noqa: PLC0415 -- as above

    inside = {name.removeprefix("model."): value.detach().cpu().contiguous() for name, value in run.adapters.items()}
    weights = get_peft_model_state_dict(run.model.model, state_dict=inside, save_embedding_layers=False)
    draft, old = _draft_and_old(folder)
    settings = copy.copy(run.model.model.peft_config["default"])
    settings.inference_mode = True
    origin = {"fits": reading.fits(run), "config": dataclasses.asdict(run.config), "world_size": run.ranks.world_size}
    # safetensors raises its own error on a full disk
    with as_input_error(f"the adapter cannot be written to {folder}", (OSError, SafetensorError)):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        save_file(run.fault.truncate(weights), str(draft / WEIGHTS), metadata={"format": "pt"})
        settings.save_pretrained(str(draft))
        writing.write_synced(draft / configfile.NAME, configfile.text(run.config).encode())
        writing.write_synced(draft / ORIGIN, f"{json.dumps(origin, indent=1)}\n".encode())
        for path in draft.iterdir():
            writing.sync(path)
        writing.sync(draft)
        _replace(folder, draft, old)


def _replace(folder: Path, draft: Path, old: Path) -> None:
    """Rename ``draft`` to ``folder``; after a kill at any moment ``_repair`` finds a whole adapter."""
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    writing.sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check(run: TrainingRun, folder: Path) -> None:
    """Record ``export``: rank 0 loads the adapter onto a new base, as a user would. Bits and loss must be those trained."""
    trained = reading.probe_loss(run)
    expected = digests.digest(run.adapters.values())

    def differs() -> bool:
        loaded = load(build.base_of(run.config, run.ranks.device), folder)
        found = [value for name, value in loaded.named_parameters() if ".lora_" in name]
        loss = reading.probe_loss(run, build.SummedLoss(loaded))
        tolerance = TOLERANCE[run.ranks.device.type] * (1 + trained)
        return digests.digest(found) != expected or not abs(loss - trained) <= tolerance

    problems = int(bool(run.ranks.run_on_rank_0(differs)))
    what = f"the adapter in {folder}, loaded by peft, is not the one that was trained"
    exact.record_zero(run.checks, "export", count=problems, what=what)


def require_plain(folder: Path) -> None:
    """Raises InputError unless ``folder`` has the files of a plain LoRA adapter in peft's layout; loads no weight."""
    missing = [name for name in (WEIGHTS, ADAPTER) if not (folder / name).is_file()]
    if missing:
        raise InputError(f"no adapter in {folder}: {' and '.join(missing)} missing")
    settings = _json_of(folder / ADAPTER)
    # Other kinds load further files, which may be pickles; Megatron's names a module to import.
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA" or settings.get("megatron_config") is not None:
        raise InputError(f"{folder / ADAPTER} does not describe a plain LoRA adapter")


def load(base: Any, folder: Path) -> Any:
    """``base`` with the adapter in ``folder``, by peft's own loader, in float32; raises InputError."""
    from peft import PeftModel  # noqa: PLC0415 -- slow import
    from safetensors import SafetensorError  # noqa: PLC0415 -- as above

    require_plain(folder)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # ``require_whole`` and the digest see them
            return PeftModel.from_pretrained(base, str(folder))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:  # TypeError: settings of another type
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])  # torch names the first tensor in the second
        raise InputError(f"adapter {folder} cannot be loaded onto this base: {reason}") from error


def require_whole(adapted: Any, folder: Path) -> None:
    """Raises InputError if the file in ``folder`` misses a tensor of ``adapted``: peft leaves it as it was drawn."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 -- slow import
    from safetensors import safe_open  # noqa: PLC0415 -- as above

    with safe_open(folder / WEIGHTS, "pt") as file:
        missing = sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - file.keys())
    if missing:
        raise InputError(f"{folder / WEIGHTS} misses {len(missing)} tensors of the adapter, the first is {missing[0]}")
