"""Calls of NVML: a session, and what each error of NVML means to a reader."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import pynvml

from pytest_gpucluster.errors import GpuclusterError
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpucluster.errors import Part

_NO_VALUE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
"""Errors by which NVML says that this GPU, driver or permission does not give the value."""
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Where the value of a field stands, by ``nvmlValueType_t``."""


class NvmlError(GpuclusterError):
    """NVML answered with an error; the text is NVML's own, ``code`` its ``nvmlReturn_t`` (None: not NVML's)."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        """Keep NVML's text and code."""
        super().__init__(message)
        self.code = code


class NvmlLibraryNotFoundError(NvmlError):
    """There is no ``libnvidia-ml.so.1``: no NVIDIA driver on this machine."""


class GpuLostError(NvmlError):
    """The GPU has fallen off the bus or cannot be reached any more (``NVML_ERROR_GPU_IS_LOST``)."""

    blames: ClassVar[Part] = "gpu"


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
    """The function's value; every error of NVML is raised as :class:`NvmlError`."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise _refused(error, function.__name__) from error


def value_or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's value; None for every error of NVML."""
    try:
        return required(function, *arguments)
    except NvmlError:
        return None


def optional(function: Callable[..., Any], *arguments: Any, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """The function's value, converted; :class:`NotAvailable` with NVML's text if NVML says that it does not give one."""
    try:
        return convert(required(function, *arguments))
    except NvmlError as error:
        if error.code in _NO_VALUE:
            return NotAvailable(str(error))
        raise


def newer(name: str, *arguments: Any, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """As :func:`optional`, for a function that older versions of the binding lack."""
    function = getattr(pynvml, name, None)
    if function is None:
        return NotAvailable(f"this version of nvidia-ml-py does not know it ({name})")
    return optional(function, *arguments, convert=convert)


def read_fields(handle: Any, *fields: tuple[int, int]) -> list[float | NotAvailable]:
    """Values of NVML's numbered fields, each asked by its number and scope (the number of a link, otherwise 0).

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read a field for another reason.
    """
    answers = optional(pynvml.nvmlDeviceGetFieldValues, handle, fields)
    return [answers] * len(fields) if isinstance(answers, NotAvailable) else [_field(answer) for answer in answers]


def _field(answer: Any) -> float | NotAvailable:
    """A driver that is older than a field calls its number an invalid argument."""
    if answer.nvmlReturn == pynvml.NVML_SUCCESS:
        return float(getattr(answer.value, _MEMBERS[answer.valueType]))
    error = _refused(pynvml.NVMLError(answer.nvmlReturn), f"nvmlDeviceGetFieldValues, field {answer.fieldId}")
    if error.code in _NO_VALUE or error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        return NotAvailable(str(error))
    raise error


def _refused(error: Any, call: str) -> NvmlError:
    kinds: dict[int, Callable[..., NvmlError]] = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NvmlLibraryNotFoundError,
        pynvml.NVML_ERROR_GPU_IS_LOST: GpuLostError,
    }
    return kinds.get(error.value, NvmlError)(f"{error} ({call})", code=error.value)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put the GPU's name before NVML's text."""
    try:
        yield
    except NvmlError as error:
        raise type(error)(f"{what}: {error}", code=error.code) from error


def text(value: str | bytes) -> str:
    """The text that NVML gave; the binding returns bytes for some calls."""
    return value.decode() if isinstance(value, bytes) else value
