"""The tensors of a checkpoint in files of safetensors, which hold numbers and nothing that could be executed.

The state is whole and equal on every rank under each strategy. So each rank writes a share of the tensors to a file of its
own, and whoever resumes reads all files. What may be in them follows from the adapters of the run that reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from finetune_smoke.checkpoints import marker
from finetune_smoke.checkpoints.marker import FileEntry, Marker
from finetune_smoke.digests import as_hex, digest_bytes, file_digest

State = dict[str, torch.Tensor]
"""The tensors of a checkpoint: ``adapters/NAME``, ``optimizer/NAME/KEY`` and ``losses``."""

OF_ADAMW = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for a tensor: its count of steps, and two tensors in the tensor's shape."""


class OtherAdaptersError(ValueError):
    """The files hold tensors of other adapters."""


def file_of(rank: int) -> str:
    """The name of the file that ``rank`` writes."""
    return f"rank-{rank}.safetensors"


def content(state: State, rank: int, world_size: int) -> bytes:
    """The content of the file of ``rank``; the ranks' files get about the same number of bytes."""
    from safetensors.torch import save  # noqa: PLC0415 -- only where something is saved

    loads, share = [0] * world_size, {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        writer = loads.index(min(loads))
        loads[writer] += state[name].nbytes
        if writer == rank:
            share[name] = state[name].detach().cpu().contiguous()
    return save(share)


def plain_name(name: str) -> str:
    """The name of a parameter without the part that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def read(folder: Path, found: Marker, adapters: Mapping[str, torch.Tensor], device: torch.device) -> State:
    """The tensors in ``folder``, on ``device``; the losses stay on the CPU.

    Raises:
        OSError: a file cannot be read.
        OtherAdaptersError: the files hold other tensors than ``adapters``, their optimiser and the losses.
        ValueError: a file has another content than its marker says.
    """
    shapes = {plain_name(name): tuple(adapter.shape) for name, adapter in adapters.items()}
    due = _due(shapes, found.step, shapes)
    room = sum(dtype.itemsize * math.prod(shape) for dtype, shape in due.values())
    if sum(entry.size_bytes for entry in found.files.values()) > room + len(found.files) * marker.MAX_HEADER_BYTES:
        raise OtherAdaptersError("its files are larger than the state of these adapters")  # before anything is allocated
    state: State = {}
    for name, entry in found.files.items():
        state |= _checked(folder / name, entry)
    trained = [name for name in shapes if f"optimizer/{name}/step" in state]  # one that is frozen has no optimiser
    due = _due(shapes, found.step, trained)
    if {name: (each.dtype, tuple(each.shape)) for name, each in state.items()} != due:
        count = sum(name.startswith("adapters/") for name in state)
        raise OtherAdaptersError(f"it holds {count} adapter tensors of other names or sizes")
    # In the order of the adapters: that of safetensors differs between processes, and digests of the ranks are compared.
    return {name: state[name] if name == "losses" else state[name].to(device) for name in due}


def _due(
    shapes: Mapping[str, tuple[int, ...]], steps: int, trained: Iterable[str]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """(type, shape) of each tensor that goes with adapters of these ``shapes``, of which some were ``trained``."""
    due = {f"adapters/{name}": (torch.float32, shape) for name, shape in shapes.items()}
    for name in trained:
        due |= {f"optimizer/{name}/{key}": (torch.float32, () if key == "step" else shapes[name]) for key in OF_ADAMW}
    return {**due, "losses": (torch.float64, (steps,))}


def _checked(path: Path, entry: FileEntry) -> State:
    """The tensors in a file; raises OSError, and ValueError unless it has its size and digest and is one of safetensors."""
    from safetensors import SafetensorError  # noqa: PLC0415 -- only where something is read
    from safetensors.torch import load  # noqa: PLC0415 -- as above

    with marker.open_plain(path) as file:
        found = file.read(entry.size_bytes + 1)
    if len(found) != entry.size_bytes or as_hex(digest_bytes(found)) != entry.digest:
        raise ValueError(f"{path} has another content")
    try:
        return load(found)
    except (SafetensorError, KeyError) as error:  # KeyError: a type that torch does not have
        raise ValueError(f"no tensors in a file: {error}") from error


def are_unchanged(folder: Path, files: Mapping[str, FileEntry]) -> bool:
    """Whether all ``files`` can be read and have their digests; needs no memory, whatever their sizes."""
    try:
        for name, entry in files.items():
            with marker.open_plain(folder / name) as file:
                if file_digest(file, entry.size_bytes) != entry.digest:
                    return False
    except (OSError, ValueError):
        return False
    return True
