"""The marker of a checkpoint and its files of tensors, read as if an attacker had written them.

The marker is JSON with a strict schema; tensors lie in files of safetensors, which hold nothing that could be executed. A
link, a device or a pipe is never opened. The state is whole and equal on every rank under each strategy. So each rank writes
a share of the tensors, and whoever resumes reads all files. What may be in them follows from the adapters of that run.
"""

from __future__ import annotations

import enum
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import AliasPath, BaseModel, ConfigDict, Field, model_validator

from finetune_smoke.digests import as_hex, digest_bytes, file_digest

FORMAT = 4
MARKER = "_SUCCESS"
MAX_MARKER_BYTES = 1 << 25
MAX_HEADER_BYTES = 1 << 25
"""The longest header of a file of tensors."""
MAX_STATE_BYTES = 1 << 38
"""The largest checkpoint, 256 GiB: LoRA of rank 64 on 7 B weights needs 2 GiB."""
MAX_STEPS = 10**8

Count = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{1,6}\.safetensors$")]
Scalar = bool | int | float | str | None

State = dict[str, torch.Tensor]
"""The tensors of a checkpoint: ``adapters/NAME``, ``optimizer/NAME/KEY`` and ``losses``."""
OF_ADAMW = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for a tensor: its count of steps, and two tensors in the tensor's shape."""


class Flaw(enum.Enum):
    """Why a checkpoint is unusable, as a message says it."""

    NONE = ""
    DRAFT = "its saving was cut short"
    MARKER = f"it has no {MARKER} or a damaged one: its saving was cut short"
    FILES = "files are missing or have another size than was written"
    CHANGED = "damaged: files cannot be read or have another content than was written"
    STATE = "damaged: adapters or optimiser have another digest than was saved"
    LINKED = "it is or holds a link, a device or a pipe"
    TENSORS = "damaged: its adapters or steps are not those of this run"
    FORMAT = "another version of this tool wrote it"


class FlawError(ValueError):
    """A checkpoint has this ``flaw``; the message is what was seen, in a line."""

    def __init__(self, flaw: Flaw, seen: str) -> None:
        """``seen`` may have more lines, as pydantic's errors have."""
        super().__init__(seen.partition("\n")[0])
        self.flaw = flaw


@contextmanager
def _as_flaw(flaw: Flaw) -> Iterator[None]:
    """Raise FlawError with this ``flaw`` for an error within the block that names none itself."""
    try:
        yield
    except FlawError:
        raise
    except (OSError, ValueError) as error:
        raise FlawError(flaw, str(error)) from error


class _Strict(BaseModel):
    """Knows no other fields and converts no types."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class FileEntry(_Strict):
    """A file: its size and its digest."""

    size_bytes: Count = Field(alias="bytes")
    digest: str


class Marker(_Strict):
    """The content of the marker. ``digest`` is that of the adapters, ``state_digest`` that of all tensors but the losses.

    ``tensors`` listed what is in the files until November 2026; nothing reads it.
    """

    step: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    next_row: Positive
    step_rows: Positive
    failures: dict[str, list[tuple[str, list[Count]]]]
    world_size: Positive
    digest: str
    state_digest: str
    fits: dict[str, Scalar]
    config: dict[str, Scalar]
    files: dict[FileName, FileEntry]
    tensors: Any = Field(default=None, exclude=True)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files.values())

    @model_validator(mode="after")
    def _agrees(self) -> Marker:
        if self.next_row != self.step * self.step_rows:
            raise ValueError(f"next row {self.next_row} after {self.step} steps of {self.step_rows} rows")
        if self.size_bytes > MAX_STATE_BYTES:
            raise ValueError(f"its files are larger than {MAX_STATE_BYTES} bytes")
        return self


class _AnyFormat(BaseModel):
    """What markers of all formats have."""

    model_config = ConfigDict(strict=True, extra="ignore")
    format: int = Field(validation_alias=AliasPath("fits", "format"))


def read_marker(folder: Path) -> Marker:
    """The marker in ``folder``; raises FlawError."""
    with _as_flaw(Flaw.MARKER):
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise FlawError(Flaw.LINKED, f"{folder} is no folder")
        with _open_plain(folder / MARKER) as file:
            content = file.read(MAX_MARKER_BYTES + 1)
        if len(content) > MAX_MARKER_BYTES:
            raise ValueError(f"more than {MAX_MARKER_BYTES} bytes")
        found = _AnyFormat.model_validate_json(content).format
        if found != FORMAT:
            raise FlawError(Flaw.FORMAT, f"format {found} there, {FORMAT} here")
        marker = Marker.model_validate_json(content)
        if folder.name != f"step-{marker.step}":
            raise ValueError(f"of step {marker.step} in {folder.name}")
    return marker


def _open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError, and FlawError for anything else, without opening it."""
    linked = FlawError(Flaw.LINKED, f"{path} is no regular file")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise linked
    # A pipe or link may have taken its place since: neither waits here.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise linked
    return file


def require_sizes(folder: Path, marker: Marker) -> None:
    """Raises FlawError unless the files are there, plain, and as large as was written."""
    with _as_flaw(Flaw.FILES):
        for name, entry in marker.files.items():
            status = (folder / name).lstat()
            if not stat.S_ISREG(status.st_mode):
                raise FlawError(Flaw.LINKED, f"{name} is no regular file")
            if status.st_size != entry.size_bytes:
                raise ValueError(f"{name} has another size")


def require_digests(folder: Path, marker: Marker) -> None:
    """Raises FlawError unless the files have the content that was written; needs no memory, whatever their sizes."""
    with _as_flaw(Flaw.CHANGED):
        for name, entry in marker.files.items():
            with _open_plain(folder / name) as file:
                if file_digest(file, entry.size_bytes) != entry.digest:
                    raise ValueError(f"{name} has another content")


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


def read_state(folder: Path, marker: Marker, adapters: Mapping[str, torch.Tensor], device: torch.device) -> State:
    """The tensors in ``folder``, on ``device``; the losses stay on the CPU.

    Raises FlawError: TENSORS if they are not ``adapters``, their optimiser and the losses, CHANGED if a file cannot be read
    or has another content than its marker says.
    """
    shapes = {name: tuple(adapter.shape) for name, adapter in adapters.items()}
    room = sum(dtype.itemsize * math.prod(shape) for dtype, shape in _due(shapes, marker.step, shapes).values())
    if marker.size_bytes > room + len(marker.files) * MAX_HEADER_BYTES:  # before anything is allocated
        raise FlawError(Flaw.TENSORS, "its files are larger than the state of these adapters")
    state: State = {}
    with _as_flaw(Flaw.CHANGED):
        for name, entry in marker.files.items():
            state |= _checked(folder / name, entry)
    trained = [name for name in shapes if f"optimizer/{name}/step" in state]  # one that is frozen has no optimiser
    due = _due(shapes, marker.step, trained)
    if {name: (each.dtype, tuple(each.shape)) for name, each in state.items()} != due:
        count = sum(name.startswith("adapters/") for name in state)
        raise FlawError(Flaw.TENSORS, f"it holds {count} adapter tensors of other names or sizes")
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

    with _open_plain(path) as file:
        found = file.read(entry.size_bytes + 1)
    if len(found) != entry.size_bytes or as_hex(digest_bytes(found)) != entry.digest:
        raise ValueError(f"{path} has another content")
    try:
        return load(found)
    except (SafetensorError, KeyError) as error:  # KeyError: a type that torch does not have
        raise ValueError(f"no tensors in a file: {error}") from error
