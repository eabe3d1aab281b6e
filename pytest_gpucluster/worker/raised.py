"""What a function raised, as a failure: type, text, first cause and traceback, whatever the exception does when it is read.

Which kind of part it blames is decided where it is caught, by its type, error number or CUDA error code.
"""

from __future__ import annotations

import errno
import itertools
import re
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from pytest_gpucluster.errors import Part
from pytest_gpucluster.inventory.error_codes import ACTIONS
from pytest_gpucluster.protocol.functions import RefusedError
from pytest_gpucluster.protocol.messages import Failure
from pytest_gpucluster.text import counted

OURS = str(Path(__file__).parent)
"""The frames with which a traceback begins; as pytest, it is shown from the test's own on."""
HOST_ERRORS = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EAGAIN}

FABRIC = 802
FABRIC_TEXT = (
    "look at the Fabric Manager of this host (systemctl status nvidia-fabricmanager, and its log) and its NVSwitches (kernel "
    "log: SXid); in a container also at /dev/nvidia-caps; on a rack at IMEX"
)
CUDA_CODES: dict[int, tuple[Part, str | None]] = {
    2: ("software", None),
    214: ("gpu", ACTIONS["Xid"]["reset"]),
    220: ("link", ACTIONS["Xid"]["link"]),
    226: ("gpu", ACTIONS["Xid"]["reset"]),
    FABRIC: ("host", FABRIC_TEXT),
}
"""The part, and what to do next, by cudaError_t: out of memory, uncorrectable ECC error, uncorrectable NVLink error, contained
memory error, and a system that is not yet initialised: its NVSwitches are not ready. Advice on memory errors is as after Xid 95
and 94, on NVLink errors as after Xid 74."""
CUDA_STATES: dict[str, int] = {
    r"CUDA (?:driver )?error: uncorrectable ECC error": 214,
    r"CUDA (?:driver )?error: GPU requires (?:a )?(?:reset|restart)": 214,
    r"CUDA (?:driver )?error: uncorrectable NVLink error": 220,
    r"CUDA (?:driver )?error: system not yet initialized": FABRIC,
    r"(?:Unexpected error from )?(?:CUDA|cuda|cu[A-Z])[^\n]*\b802\b[^\n]{1,3}system not yet initialized": FABRIC,
    r"(?:CUDA|cuda|cu[A-Z])[^\n]*\b(?:cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY)\b": FABRIC,
    r"CUDA driver error: [^\n]*\b(?:[Mm]ulticast|cuMulticast)": FABRIC,
    **{
        rf"NCCL error(?s:.*)\b(?:CUDA error|Cuda failure) (?:{code}\b|'{words})": FABRIC if code == 401 else code
        for code, words in {
            214: "uncorrectable ECC error",
            220: "uncorrectable NVLink error",
            226: "contained",
            401: "the operation cannot be performed in the present state",
            FABRIC: "system not yet initialized",
        }.items()
    },
    r"(?s:NCCL.*\n)?(?:NCCL [\w ]+: )?Failed to \w+ NVLink SHARP \(NVLS\)[^\n]* (?:CUDA error|Cuda failure) (?!2\b)\d": FABRIC,
}
"""How texts of torch and NCCL begin that name a state of a GPU or of the NVLink fabric, and the code of it.

NVLink SHARP that cannot be bound (CUDA error 401 and others, but for too little memory) has the cause of 802, as NCCL says.
An older NCCL writes the words of an error of CUDA alone, and no word of NVLink SHARP beside a 401.
"""
RANK = re.compile(r"(?:\[[^\]\n]{1,80}\]:?\s*)*")
"""What torch may write before a text: ``[rank3]: ``, ``[PG ID 0 PG GUID 0 Rank 3] ``."""
OF_CUDA = (
    "CUDA error: ", "CUDA driver error: ", "NCCL error", "Unexpected error from cuda", "cuDNN error", "CUDNN_STATUS",
    "No CUDA GPUs are available", "CUDA unknown error", "CUDA driver initialization failed", "Found no NVIDIA driver",
)  # fmt: skip
OF_HOST_MEMORY = "[enforce fail at alloc_cpu.cpp"
"""How a ``RuntimeError`` of torch begins where it carries no code: of a part that is not known, and of the host."""


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


def advice_of(error: BaseException) -> str | None:
    """What to do about ``error``: what it says in an attribute ``advice`` beside ``blames``, else by CUDA's code; or None."""
    try:
        if getattr(error, "blames", None) in get_args(Part):
            said = getattr(error, "advice", None)
            return said if isinstance(said, str) else None
        code = _cuda_code(error) if isinstance(error, RuntimeError) else None
        return CUDA_CODES[code][1] if code in CUDA_CODES else None
    except BaseException:  # noqa: BLE001 -- the function's own code, which may raise anything
        return None


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
    code = _cuda_code(error)
    if code is not None:
        return CUDA_CODES[code][0] if code in CUDA_CODES else "unknown"
    is_of_torch = isinstance(error, (torch.AcceleratorError, dist.DistError)) or str(error).startswith(OF_CUDA)
    if is_of_torch or _is_of_torch_distributed(error.__traceback__):
        return "unknown"
    return "host" if str(error).startswith(OF_HOST_MEMORY) else "software"


def _cuda_code(error: RuntimeError) -> int | None:
    """The cudaError_t behind an error of torch: its attribute, else by exactly what CUDA or NCCL writes; None otherwise."""
    import torch

    code = getattr(error, "error_code", None)
    if isinstance(code, int) and isinstance(error, torch.AcceleratorError):
        return code
    text = str(error)
    text = text[RANK.match(text).end() :]  # type: ignore[union-attr]  # it matches an empty text too
    return next((code for start, code in CUDA_STATES.items() if re.match(start, text)), None)


def _is_of_torch_distributed(frames: types.TracebackType | None) -> bool:
    """Whether the innermost frame of a traceback belongs to this package."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(frames)]
    return f"{modules[-1]}.".startswith("torch.distributed.") if modules else False


TEXT_CHARACTERS = 4000
NAME_CHARACTERS = 200
LINE_CHARACTERS = 400
FRAMES = 4
"""Of each exception the frames nearest to where it was raised."""
LINES = 17
"""The title, the frames with up to three lines each, and four lines of the message."""
MAX_LINKS = 100
DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"


def failure_of(error: BaseException) -> Failure:
    """The failure of a call in which the function raised ``error``. Nothing that the exception's class does escapes."""
    chain = _chain_of(error)
    return Failure(
        kind="refused" if issubclass(type(error), RefusedError) else "raised",
        type=_name_of(error),
        error=_text_of(error),
        blames=part_of(error),
        advice=advice_of(error),
        cause=_describe(chain[0]) if len(chain) > 1 else "",
        traceback="\n".join(_traceback(chain)),
    )


def _chain_of(error: BaseException) -> list[BaseException]:
    """The exceptions that led to this one, the first cause first."""
    chain: list[BaseException] = []
    following: Any = error
    while isinstance(following, BaseException) and len(chain) < MAX_LINKS and all(following is not one for one in chain):
        chain.insert(0, following)
        cause = _read("__cause__", following)
        hides_context = cause is not None or _read("__suppress_context__", following)
        following = cause if hides_context else _read("__context__", following)
    return chain


def _read(name: str, error: BaseException) -> Any:
    """An attribute as BaseException has it, whatever the class made of it."""
    return BaseException.__dict__[name].__get__(error)


def _name_of(error: BaseException) -> str:
    name: str = type.__dict__["__name__"].__get__(type(error))
    return name[:NAME_CHARACTERS]


def _text_of(error: BaseException) -> str:
    try:
        return str.__getitem__(str(error), slice(TEXT_CHARACTERS))
    except BaseException as failed:  # noqa: BLE001 -- the function's own code, which may raise anything
        return f"(no text: str() of it raised {_name_of(failed)})"


def _describe(error: BaseException) -> str:
    text = _text_of(error)
    return f"{_name_of(error)}: {text}" if text else _name_of(error)


def _traceback(chain: Sequence[BaseException]) -> list[str]:
    """The first cause, and the last two exceptions; what lies between them is counted."""
    lines = _lines_of(chain[0])
    shown = chain[1:] if len(chain) <= 3 else chain[-2:]
    if len(shown) < len(chain) - 1:
        lines += ["", f"... {counted(len(chain) - 1 - len(shown), 'more exception')}, each raised because of the one before"]
    for error in shown:
        lines += ["", DIRECT if _read("__cause__", error) is not None else HANDLING, "", *_lines_of(error)]
    return lines


def _lines_of(error: BaseException) -> list[str]:
    """One exception without its causes: its last frames, and its message. Long ones are cut at the end."""
    try:
        found = traceback.TracebackException(type(error), error, _read("__traceback__", error))
        ours = sum(1 for _ in itertools.takewhile(lambda frame: frame.filename.startswith(OURS), found.stack))
        del found.stack[: ours if ours < len(found.stack) else 0]
        del found.stack[:-FRAMES]
        lines = "".join(itertools.islice(found.format(chain=False), 10 * LINES)).splitlines()
    except BaseException:  # noqa: BLE001 -- it reads attributes that the function's own code may have made
        lines = _describe(error).splitlines()
    cut = [f"  ... {counted(len(lines) - LINES, 'more line')}"] if len(lines) > LINES else []
    return [line[:LINE_CHARACTERS] for line in lines[:LINES]] + cut
