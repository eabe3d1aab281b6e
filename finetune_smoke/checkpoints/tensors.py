"""The tensors of a checkpoint in files of safetensors, which hold numbers and nothing that could be executed.

The state is whole and equal on every rank under each strategy. So each rank writes a share of the tensors to a file of its
own, and whoever resumes reads all files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from finetune_smoke.checkpoints import marker
from finetune_smoke.digests import as_hex, digest_bytes, file_digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from finetune_smoke.checkpoints.marker import FileEntry, Marker, TensorEntry

State = dict[str, torch.Tensor]
"""The tensors of a checkpoint: ``adapters/NAME``, ``optimizer/NAME/KEY`` and ``losses``."""

DTYPES = {"F32": torch.float32, "F64": torch.float64}
NAMES: dict[torch.dtype, Literal["F32", "F64"]] = {torch.float32: "F32", torch.float64: "F64"}


def file_of(rank: int) -> str:
    """The name of the file that ``rank`` writes."""
    return f"rank-{rank}.safetensors"


def shares(state: State, world_size: int) -> dict[str, TensorEntry]:
    """The entry of each tensor; the ranks' files get about the same number of bytes."""
    loads = [0] * world_size
    entries = {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        rank = loads.index(min(loads))
        loads[rank] += state[name].nbytes
        tensor = state[name]
        entries[name] = marker.TensorEntry(file=file_of(rank), dtype=NAMES[tensor.dtype], shape=list(tensor.shape))
    return entries


def content(state: State, entries: Mapping[str, TensorEntry], file: str) -> bytes:
    """The content of ``file``."""
    from safetensors.torch import save  # noqa: PLC0415 -- only where something is saved

    share = {name: state[name].detach().cpu().contiguous() for name, entry in entries.items() if entry.file == file}
    return save(share)


def read(folder: Path, read_marker: Marker, device: torch.device, *, prefix: str = "") -> State:
    """The tensors whose names begin with ``prefix``, on ``device``; the losses stay on the CPU.

    Compare the shapes in the marker with those expected before: as many bytes are allocated.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file has another content than its marker says.
    """
    state: State = {}
    for name, entry in read_marker.files.items():
        wanted = {tensor: e for tensor, e in read_marker.tensors.items() if e.file == name}
        if not any(tensor.startswith(prefix) for tensor in wanted):
            continue
        found = _parsed(_unchanged_content(folder / name, entry), wanted)
        for tensor in [tensor for tensor in found if tensor.startswith(prefix)]:
            state[tensor] = found[tensor] if tensor == "losses" else found[tensor].to(device)
    return state


def _unchanged_content(path: Path, entry: FileEntry) -> bytes:
    """The content of a file; raises OSError, and ValueError if its size or its digest is another one."""
    with marker.open_plain(path) as file:
        read_bytes = file.read(entry.size_bytes + 1)
    if len(read_bytes) != entry.size_bytes or as_hex(digest_bytes(read_bytes)) != entry.digest:
        raise ValueError(f"{path} has another content")
    return read_bytes


def _parsed(file_content: bytes, wanted: Mapping[str, TensorEntry]) -> State:
    """The tensors in a file; raises ValueError unless they are those ``wanted``."""
    from safetensors import SafetensorError, deserialize  # noqa: PLC0415 -- only where something is read

    try:
        parts = dict(deserialize(file_content))  # type: ignore[no-untyped-call]  # safetensors'
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if {name: (part["dtype"], list(part["shape"])) for name, part in parts.items()} != {
        name: (entry.dtype, entry.shape) for name, entry in wanted.items()
    }:
        raise ValueError("it holds other tensors than its marker says")
    return {
        name: torch.frombuffer(parts[name]["data"], dtype=DTYPES[entry.dtype]).reshape(entry.shape)
        for name, entry in wanted.items()
    }


def are_unchanged(folder: Path, files: Mapping[str, FileEntry]) -> bool:
    """Whether all ``files`` can be read and have their digests; needs no memory, whatever their sizes."""
    try:
        return all(_has_digest(folder / name, entry) for name, entry in files.items())
    except (OSError, ValueError):
        return False


def _has_digest(path: Path, entry: FileEntry) -> bool:
    with marker.open_plain(path) as file:
        return file_digest(file, entry.size_bytes) == entry.digest
