"""``evaluate``: compare an adapter with its base by calls that are really generated.

The adapter is one in peft's layout (``--adapter``), loaded by peft, or that of the newest whole checkpoint
(``--checkpoint-dir``). Its settings lie beside it, so no others are needed; settings on the command line override them.
Several ranks share the prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from finetune_smoke import digests
from finetune_smoke.checkpoints import export, files, reading
from finetune_smoke.checkpoints.files import Flaw, FlawError, Marker
from finetune_smoke.data import hub
from finetune_smoke.digests import digest_bytes
from finetune_smoke.evaluation import heldout
from finetune_smoke.evaluation.heldout import Shares
from finetune_smoke.model import build
from finetune_smoke.ranks import Ranks, require_same_settings
from finetune_smoke.settings import configfile, options
from finetune_smoke.settings.config import Config, InputError, preset

UNUSED = (
    "checkpoint_dir", "checkpoint_every", "keep_checkpoints", "resume", "output", "tensorboard", "fault",
    "base_dtype", "fsdp_gather", "attention", "checkpoint_async",
)  # fmt: skip
"""Settings of a training that an evaluation ignores; the last four existed until November 2026."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """An adapter in peft's layout (``marker`` is None), or in a checkpoint.

    ``base`` is the digest of the base that the adapter was trained on, None if that is unknown.
    """

    path: Path
    settings: dict[str, Any]
    base: object
    marker: Marker | None
    notes: list[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The shares of right answers of base and adapter for the same prompts."""

    source: str
    step: int | None
    base: Shares
    adapter: Shares
    adapter_digest: str
    world_size: int
    notes: list[str]


def find_adapter(given: dict[str, Any]) -> AdapterSource:
    """The adapter that the settings ``given`` name; raises InputError unless it is exactly one."""
    adapter, folder = given.pop("adapter", None), given.pop("checkpoint_dir", None)
    if (adapter is None) == (folder is None):
        raise InputError("evaluate needs --adapter DIR or --checkpoint-dir DIR, one of them")
    if adapter is not None:
        path = Path(adapter)
        if not path.is_dir():
            raise InputError(f"no such adapter directory: {path}")
        origin = export.origin_of(path) or {}
        if not origin and not {"preset", "model"} & set(given):
            raise InputError(
                f"{path} does not say which base its adapter is for: --model or --preset and its settings are needed"
            )
        export.require_plain(path)
        base = origin["fits"].get("base") if origin else None
        return AdapterSource(path=path, settings=origin.get("config", {}), base=base, marker=None, notes=[])
    return _newest_checkpoint(Path(folder))


def config_of(source: AdapterSource, given: dict[str, Any]) -> Config:
    """The settings of the adapter's training, overridden by those ``given``; raises InputError."""
    if not source.settings:
        return options.config_of(dict(given))
    kept = {name: value for name, value in source.settings.items() if name not in {*UNUSED, "preset"}}
    named = given.get("preset", source.settings.get("preset"))
    checked = {**kept, "preset": named}
    wrong = next((found for name, value in checked.items() if (found := configfile.flaw_of(name, value))), None)
    if wrong is not None:
        raise InputError(f"{source.path} holds settings that cannot be used: {wrong}")
    return preset(str(named), **{**kept, **{name: value for name, value in given.items() if name != "preset"}})


def score(config: Config, source: AdapterSource, ranks: Ranks, *, progress: Callable[[str, float | None], None]) -> Scores:
    """Generate with the base, then with the adapter. Before that raises InputError on every rank for what does not fit."""
    require_same_settings(config, ranks)
    progress("preparing the base model", None)
    codec = ranks.run_on_all_ranks(lambda: hub.codec_of(config))
    asked, left_out = ranks.run_on_all_ranks(lambda: heldout.held_out(config, codec))
    base = ranks.run_on_all_ranks(lambda: _base(config, source, ranks.device)).eval()

    def shares(model: Any) -> Shares:
        with torch.autocast("cuda", dtype=torch.bfloat16) if ranks.device.type == "cuda" else nullcontext():
            return heldout.score(model, asked, codec, ranks)

    model, trained = _adapted(config, source, base, ranks)
    model.eval()
    step = None if source.marker is None else source.marker.step
    everyone = ranks.gather([digests.digest(trained), digest_bytes(repr(asked).encode()), step or 0])
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise InputError(f"rank {other} has another adapter, or other prompts, than rank 0: a stale folder on its node?")
    progress(f"generating {len(asked)} calls with the base", None)
    with model.disable_adapter():
        before = shares(model)
    progress(f"generating {len(asked)} calls with the adapter", None)
    return Scores(
        source=str(source.path),
        step=step,
        base=before,
        adapter=shares(model),
        adapter_digest=digests.as_hex(digests.digest(trained)),
        world_size=ranks.world_size,
        notes=[*source.notes, *([left_out] if left_out else [])],
    )


def table(scores: Scores) -> str:
    """Base and adapter side by side, for people."""
    what = f"adapter of step {scores.step}" if scores.step is not None else "adapter"
    lines = [f"{what} in {scores.source}, {scores.base.prompts} held-out prompts", *scores.notes]
    lines.append(f"{'':24}{'base':>8}{'adapter':>9}")
    titles = {"json_valid": "calls in JSON", "name": "right name", "arguments": "right arguments", "exact": "both: exact"}
    for name, title in titles.items():
        lines.append(f"{title:24}{getattr(scores.base, name):8.1%}{getattr(scores.adapter, name):9.1%}")
    if scores.base.no_call is not None and scores.adapter.no_call is not None:
        title = f"no call, {scores.base.without_call} prompts"
        lines.append(f"{title:24}{scores.base.no_call:8.1%}{scores.adapter.no_call:9.1%}")
    return "\n".join(lines)


def _newest_checkpoint(folder: Path) -> AdapterSource:
    """The newest undamaged checkpoint in ``folder``; raises InputError if there is none."""
    notes: list[str] = []
    for step, flaw in reading.scan(folder):
        path = folder / f"step-{step}"
        if flaw is Flaw.FORMAT:
            raise InputError(f"checkpoint {path} was written by another version of this tool")
        if flaw is Flaw.NONE:
            try:
                marker = files.read_marker(path)
                files.require_digests(path, marker)
            except FlawError as error:
                flaw = error.flaw  # noqa: PLW2901 -- the flaw seen in the files
            else:
                base = marker.fits.get("base")
                return AdapterSource(path=path, settings=marker.config, base=base, marker=marker, notes=notes)
        notes.append(reading.passed_over(step, flaw))
    raise InputError(f"no complete checkpoint in {folder}" + "".join(f"; {note}" for note in notes))


def _base(config: Config, source: AdapterSource, device: torch.device) -> Any:
    """The base that the adapter was trained on; raises InputError for another one, or if there is no memory for it."""
    held = math.inf if source.marker is None else source.marker.size_bytes
    if config.model is None and config.layers > held:
        raise InputError(f"{source.path} does not fit this base: it has fewer bytes than {config.layers} layers")
    try:
        base = build.base_of(config, device)
    except (RuntimeError, MemoryError) as error:  # torch has no type of its own for an allocation that failed on a CPU
        reason = str(error).partition("\n")[0]
        raise InputError(f"the base that {source.path} asks for cannot be made: {reason}") from error
    wanted, found = source.base, digests.as_hex(digests.digest(base.parameters()))
    if wanted is not None and wanted != found:
        raise InputError(
            f"{source.path} does not fit this base: it has digest {found}, the adapter was trained on {wanted} (a random base "
            "is another one on a CPU than on a GPU)"
        )
    return base


def _adapted(config: Config, source: AdapterSource, base: Any, ranks: Ranks) -> tuple[Any, Sequence[torch.Tensor]]:
    """The base with the adapter, and the adapter's tensors; raises InputError on every rank."""
    marker = source.marker
    if marker is None:
        model = ranks.run_on_all_ranks(lambda: export.load(base, source.path))
        ranks.run_on_all_ranks(lambda: export.require_whole(model, source.path))
        return model, [value for name, value in model.named_parameters() if ".lora_" in name]
    wrapped = build.SummedLoss(build.add_adapters(base, config))
    adapters = {name: value for name, value in wrapped.named_parameters() if value.requires_grad}
    ranks.run_on_all_ranks(lambda: _load(adapters, source.path, marker))
    return wrapped.model, list(adapters.values())


def _load(adapters: dict[str, torch.nn.Parameter], path: Path, marker: Marker) -> None:
    """Copy the adapters of a checkpoint into ``adapters``; raises InputError if they are others, or damaged."""
    try:
        state = files.read_state(path, marker, adapters, torch.device("cpu"))
    except FlawError as error:
        what = "does not fit this run" if error.flaw is Flaw.TENSORS else "is damaged"
        raise InputError(f"checkpoint {path} {what}: {error}") from error
    reading.copy_adapters(adapters, state)
    if digests.as_hex(digests.digest(adapters.values())) != marker.digest:
        raise InputError(f"checkpoint {path} is damaged: its adapters have another digest than was saved")
