"""The marker of a checkpoint, and its files, read as if an attacker had written them.

The marker is JSON with a strict schema. Names of files cannot leave the folder, and sizes have limits. A link, a device or
a pipe is never opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import AliasPath, BaseModel, ConfigDict, Field, model_validator

FORMAT = 4
NAME = "_SUCCESS"
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


class NotPlainError(ValueError):
    """A link, a device or a pipe lies where a file or a folder is expected."""


class OtherFormatError(ValueError):
    """The marker was written by a version of this program with another format."""


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

    @model_validator(mode="after")
    def _agrees(self) -> Marker:
        """Raises ValueError unless step and rows agree, and the files are of a possible size."""
        if self.next_row != self.step * self.step_rows:
            raise ValueError(f"next row {self.next_row} after {self.step} steps of {self.step_rows} rows")
        if sum(file.size_bytes for file in self.files.values()) > MAX_STATE_BYTES:
            raise ValueError(f"its files are larger than {MAX_STATE_BYTES} bytes")
        return self


class _AnyFormat(BaseModel):
    """What markers of all formats have."""

    model_config = ConfigDict(strict=True, extra="ignore")
    format: int = Field(validation_alias=AliasPath("fits", "format"))


def read(folder: Path) -> Marker:
    """The marker in ``folder``.

    Raises:
        OSError: there is none, or it cannot be read.
        NotPlainError: the folder or the marker is a link, a device or a pipe.
        OtherFormatError: another version wrote it.
        ValueError: it is damaged.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotPlainError(f"{folder} is no folder")
    with open_plain(folder / NAME) as file:
        content = file.read(MAX_MARKER_BYTES + 1)
    if len(content) > MAX_MARKER_BYTES:
        raise ValueError(f"more than {MAX_MARKER_BYTES} bytes")
    found = _AnyFormat.model_validate_json(content).format
    if found != FORMAT:
        raise OtherFormatError(f"format {found} there, {FORMAT} here")
    marker = Marker.model_validate_json(content)
    if folder.name != f"step-{marker.step}":
        raise ValueError(f"of step {marker.step} in {folder.name}")
    return marker


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError, and NotPlainError for anything else, without opening it."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise NotPlainError(f"{path} is no regular file")
    # A pipe or link may have taken its place since: neither waits here.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise NotPlainError(f"{path} is no regular file")
    return file


def sizes_differ(folder: Path, files: Mapping[str, FileEntry]) -> bool:
    """Whether one of ``files`` has another size; raises OSError if one is missing, NotPlainError if one is no file."""
    found = {name: (folder / name).lstat() for name in files}
    odd = [name for name, status in found.items() if not stat.S_ISREG(status.st_mode)]
    if odd:
        raise NotPlainError(f"{odd[0]} is no regular file")
    return any(status.st_size != files[name].size_bytes for name, status in found.items())
