"""Calls of NVML: a session, what each error of NVML means to a reader, and the sources of readings that NVML has."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pynvml

from pytest_gpucluster.errors import GpuclusterError, Part
from pytest_gpucluster.inventory.error_codes import ACTIONS
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none, read, rows, split

XID_ACTIONS = ACTIONS["Xid"]
"""What to do about a GPU that the driver lost, in the words of its Xids."""
LIBRARY = "libnvidia-ml.so.1"
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
)
"""Where drivers and containers put it, besides ``LD_LIBRARY_PATH``."""
Structure = TypeVar("Structure", bound=ctypes.Structure)
Value = TypeVar("Value")
_NO_VALUE = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
"""Errors by which NVML says that this GPU, driver or permission does not give the value."""
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where the value of a field stands, by ``nvmlValueType_t``."""
_MINUS_ONE = (2**32 - 1, 2**64 - 1)
"""NVML_VALUE_NOT_AVAILABLE (nvml.h), -1, in numbers without a sign."""


class NvmlError(GpuclusterError):
    """NVML answered with an error; the text is NVML's own, ``code`` its ``nvmlReturn_t`` (None: not NVML's)."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        """Keep NVML's text and code."""
        super().__init__(message)
        self.code = code


class NvmlLibraryNotFoundError(NvmlError):
    """There is no ``libnvidia-ml.so.1``: no NVIDIA driver on this machine, or none for this container."""


class GpuLostError(NvmlError):
    """The GPU has fallen off the bus or cannot be reached any more (``NVML_ERROR_GPU_IS_LOST``)."""

    blames: ClassVar[Part] = "gpu"
    advice: ClassVar[str] = XID_ACTIONS["reboot"]


class GpuNeedsResetError(NvmlError):
    """The GPU answers nothing more until it is reset (``NVML_ERROR_RESET_REQUIRED``)."""

    blames: ClassVar[Part] = "gpu"
    advice: ClassVar[str] = XID_ACTIONS["reset"]


@contextlib.contextmanager
def session() -> Iterator[None]:
    """NVML initialised for the length of the block; blocks may nest.

    Raises:
        NvmlLibraryNotFoundError: no driver library here.
        NvmlError: the library is there and cannot start, for example ``Driver Not Loaded``.
    """
    required(pynvml.nvmlInit)
    try:
        yield
    finally:
        required(pynvml.nvmlShutdown)


def required(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value; every error of NVML, and a text that is none, is raised as :class:`NvmlError`."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise _refused(error, function.__name__) from error
    except UnicodeDecodeError:
        raise NvmlError(f"its answer is no text ({function.__name__})", code=pynvml.NVML_ERROR_NO_DATA) from None


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value; :class:`NotAvailable` for every error of NVML."""
    try:
        return required(function, *arguments)
    except NvmlError as error:
        return NotAvailable(str(error))


def value_or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value; None for every error of NVML."""
    return or_none(attempt(function, *arguments))


def optional(name: str, *arguments: Any) -> Any:
    """What this function of NVML gives; :class:`NotAvailable` with NVML's text if NVML says that it does not give a value.

    A function that an older version of the binding lacks is not available either.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    function = getattr(pynvml, name, None)
    if function is None:
        return NotAvailable(f"this version of nvidia-ml-py does not know it ({name})")
    try:
        return _known(required(function, *arguments))
    except NvmlError as error:
        if error.code in _NO_VALUE:
            return NotAvailable(str(error))
        raise


def _known(number: Any) -> Any:
    """A number, unless it stands for none."""
    return NotAvailable("NVML answers -1, its word for no value") if type(number) is int and number in _MINUS_ONE else number


def read_fields(handle: Any, *fields: tuple[int, int]) -> list[float | NotAvailable]:
    """Values of NVML's numbered fields, each by its number and scope (the number of a link, otherwise 0).

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read a field for another reason.
    """
    answers = optional("nvmlDeviceGetFieldValues", handle, fields)
    return [answers] * len(fields) if isinstance(answers, NotAvailable) else [_field(answer) for answer in answers]


def _field(answer: Any) -> float | NotAvailable:
    """A driver that is older than a field calls its number an invalid argument."""
    if answer.nvmlReturn == pynvml.NVML_SUCCESS:
        kind = answer.valueType
        value = getattr(answer.value, _MEMBERS[kind]) if 0 <= kind < len(_MEMBERS) else math.nan
        is_number = math.isfinite(value)
        return apply(float, _known(value)) if is_number else NotAvailable(f"NVML answers no number (field {answer.fieldId})")
    error = _refused(pynvml.NVMLError(answer.nvmlReturn), f"nvmlDeviceGetFieldValues, field {answer.fieldId}")
    if error.code in _NO_VALUE or error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        return NotAvailable(str(error))
    raise error


def why_not_loaded() -> str | None:
    """Why NVML's library, which is there, does not work; None where there is none.

    The binding calls both "not found", and so does NVML where a library that it needs is missing.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        is_absent = str(error).startswith(f"{LIBRARY}:") and "No such file" in str(error)
        return _broken_link() if is_absent else str(error)
    return f"{LIBRARY} does not find a library that it needs"


def _broken_link() -> str | None:
    """The library's name as a link to a file that is missing, where the loader looks; None where there is none."""
    folders = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), *LIBRARY_FOLDERS]
    links = [path for folder in folders if (path := Path(folder) / LIBRARY).is_symlink()]
    return f"{links[0]} is a link to {links[0].readlink()}, which is not there" if links else None


def _refused(error: Any, call: str) -> NvmlError:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and (why := why_not_loaded()) is not None:
        return NvmlError(f"{why} ({call})", code=error.value)
    kinds: dict[int, Callable[..., NvmlError]] = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NvmlLibraryNotFoundError,
        pynvml.NVML_ERROR_GPU_IS_LOST: GpuLostError,
        pynvml.NVML_ERROR_RESET_REQUIRED: GpuNeedsResetError,
    }
    return kinds.get(error.value, NvmlError)(f"{error} ({call})", code=error.value)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put the GPU's name before NVML's text."""
    try:
        yield
    except NvmlError as error:
        raise type(error)(f"{what}: {error}", code=error.code) from error


@dataclass(frozen=True, slots=True)
class NvmlPart:
    """A GPU, or one of its NVLinks, during one reading: no call is made twice."""

    handle: Any
    link: int | None = None
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def call(self, name: str, *arguments: int) -> Any:
        """What a function of NVML gives of this GPU."""
        key = (name, *arguments)
        if key not in self.answers:
            self.answers[key] = optional(name, self.handle, *arguments)
        return self.answers[key]

    def call_by_link(self, name: str) -> dict[int, Any]:
        """What a function of NVML gives of each NVLink, without those whose number it refuses: the GPU has fewer."""
        found: dict[int, Any] = {}
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                found[link] = self.call(name, link)
            except NvmlError as error:
                if error.code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
                    raise
        return found

    def fill(self, name: str, structure: Structure) -> Structure | NotAvailable:
        """A structure with a version that a function of NVML fills in."""
        return apply(lambda _: structure, optional(name, self.handle, ctypes.byref(structure)))

    def fields(self, numbers: Sequence[int]) -> dict[int, float | NotAvailable]:
        """Numbered fields of NVML by number, those that are not known yet in one call."""
        scope = self.link or 0
        new = [(number, scope) for number in numbers if (number, scope) not in self.answers]
        if new:
            self.answers.update(zip(new, read_fields(self.handle, *new), strict=True))
        return {number: self.answers[number, scope] for number in numbers}


@dataclass(frozen=True, slots=True)
class Nvml:
    """A source: a function of NVML that takes a GPU, where the part is a link its number too, and then ``arguments``.

    Without a value of a ``required`` one nothing can be said of a GPU: each of its errors is one of the GPU. ``older``: what
    drivers call the function that do not know its name.
    """

    name: str
    arguments: tuple[int, ...] = ()
    required: bool = False
    older: str | None = None

    def __call__(self, part: NvmlPart) -> Any:
        """NVML's answer, or why there is none.

        Raises:
            GpuLostError: the GPU has fallen off the bus.
            NvmlError: NVML cannot read the GPU for another reason.
        """
        if self.required:
            return required(getattr(pynvml, self.name), part.handle)
        arguments = self.arguments if part.link is None else (part.link, *self.arguments)
        answer = part.call(self.name, *arguments)
        if self.older is None or not isinstance(answer, NotAvailable):
            return answer
        older = part.call(self.older, *arguments)
        return answer if isinstance(older, NotAvailable) else older


@dataclass(frozen=True, slots=True)
class NvmlField:
    """A source: a numbered field of NVML, of a link or of the whole GPU."""

    number: int

    def __call__(self, part: NvmlPart) -> float | NotAvailable:
        """NVML's answer, or why there is none."""
        return part.fields([self.number])[self.number]


@dataclass(frozen=True, slots=True)
class NvmlFieldsByName:
    """A source: numbered fields that are counters, by name, in one call. Not available where NVML refuses all of them."""

    by_name: Mapping[str, int]

    def __call__(self, part: NvmlPart) -> dict[str, int | NotAvailable] | NotAvailable:
        """Each counter, or why there is none."""
        values = part.fields([*self.by_name.values()])
        found = {name: apply(int, values[number]) for name, number in self.by_name.items()}
        known, refused = split(found)
        return found if known else next(iter(refused.values()))


def read_links(kind: type[Value], part: NvmlPart) -> list[Value] | NotAvailable:
    """A dataclass of rows for each NVLink of a GPU, whose number is its field ``link``.

    Not available where NVML refuses all of them.
    """
    states = part.call_by_link("nvmlDeviceGetNvLinkState")
    known, refused = split(states)
    if not known:
        return next(iter(refused.values()), NotAvailable("NVML shows no NVLink"))
    return [read_part(kind, dataclasses.replace(part, link=link), link=link) for link in states]


def read_part(kind: type[Value], part: NvmlPart, **given: Any) -> Value:
    """The dataclass of a GPU or a link; inside :func:`session`. All fields that are :class:`NvmlField` are read in one call.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    part.fields([one.source.number for one in rows(kind).values() if isinstance(one.source, NvmlField)])
    return read(kind, part, **given)
