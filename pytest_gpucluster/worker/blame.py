"""Which kind of part an exception blames. Decided where it is caught, by its type, error number or CUDA error code."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, ClassVar, get_args

from pytest_gpucluster.errors import Part

if TYPE_CHECKING:
    import types

HOST_ERRORS = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EAGAIN}
CUDA_PARTS: dict[int, Part] = {2: "software", 214: "gpu", 220: "link", 226: "gpu"}
"""By cudaError_t: out of memory, uncorrectable ECC error, uncorrectable NVLink error, contained memory error."""
CUDA_TEXTS: dict[str, Part] = {
    "CUDA error: uncorrectable ECC error": "gpu",
    "CUDA error: uncorrectable NVLink error": "link",
    "CUDA error: ": "unknown",
    "CUDA driver error: ": "unknown",
    "NCCL error": "unknown",
    "cuDNN error": "unknown",
    "CUDNN_STATUS": "unknown",
    "[enforce fail at alloc_cpu.cpp": "host",
}
"""How a ``RuntimeError`` of torch begins where it carries no code. The first that fits decides."""


class NoGpuError(RuntimeError):
    """torch cannot use the GPU of this rank; whether GPU, driver or container is to blame cannot be told."""

    blames: ClassVar[Part] = "unknown"


def part_of(error: BaseException) -> Part:
    """The kind of part that ``error`` blames.

    An exception may say so in an attribute ``blames``. Any other of a function is that function's own: ``software``. So is
    one whose class raises when it is read.
    """
    try:
        return _part_of(error)
    except BaseException:  # noqa: BLE001 -- the function's own code, which may raise anything
        return "software"


def _part_of(error: BaseException) -> Part:
    said: Part | None = getattr(error, "blames", None)
    if said is not None and said in get_args(Part):
        return said
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in HOST_ERRORS):
        return "host"
    if isinstance(error, (AssertionError, ConnectionError, TimeoutError)) or type(error) is ArithmeticError:
        return "unknown"  # a wrong number, or a connection: any of several parts may be to blame
    return _of_torch(error) if isinstance(error, RuntimeError) else "software"


def _of_torch(error: RuntimeError) -> Part:
    """The part behind torch's errors: its own types, else how the text of CUDA or of its allocator begins."""
    import torch
    import torch.distributed as dist

    if isinstance(error, torch.OutOfMemoryError):
        return "software"
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return CUDA_PARTS.get(code, "unknown")
    if isinstance(error, (torch.AcceleratorError, dist.DistError)) or _is_raised_by(error.__traceback__, "torch.distributed"):
        return "unknown"
    return next((part for start, part in CUDA_TEXTS.items() if str(error).startswith(start)), "software")


def _is_raised_by(frames: types.TracebackType | None, package: str) -> bool:
    """Whether the innermost frame of a traceback belongs to a package."""
    name = ""
    while frames is not None:
        name, frames = frames.tb_frame.f_globals.get("__name__", ""), frames.tb_next
    return name == package or name.startswith(f"{package}.")
