"""What an exception blames: by its type, its error number, or CUDA's code, never as broken hardware without a word of it."""

from __future__ import annotations

import errno
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_smoke.settings.config import InputError, OwnInputError
from pytest_gpucluster.errors import ConfigurationError, GpuMemoryError, MeasurementError, Part
from pytest_gpucluster.inventory.nvml_calls import GpuLostError, NvmlError
from pytest_gpucluster.protocol.functions import RefusedError
from pytest_gpucluster.protocol.plain_data import NotPlainDataError
from pytest_gpucluster.worker.raised import HOST_ERRORS, NoGpuError, part_of

OWN = [
    KeyError("loss"),
    ValueError("x"),
    TypeError("x"),
    IndexError(3),
    AttributeError("x"),
    ZeroDivisionError("x"),
    ImportError("x"),
    NotImplementedError("x"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    StopIteration(),
    SystemExit(3),
    KeyboardInterrupt(),
    NotPlainDataError("torch.Tensor"),
    RefusedError("differs"),
    FileNotFoundError(errno.ENOENT, "no such file"),
    torch.OutOfMemoryError("CUDA out of memory"),
    GpuMemoryError("3 GiB are needed"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
def test_an_exception_of_a_function_is_software(error: BaseException) -> None:
    """Whatever it is: no hardware is suspected for a typo."""
    assert part_of(error) == "software"


@pytest.mark.parametrize("error", [InputError("33 rows"), OwnInputError("out of memory"), ConfigurationError("x")])
def test_settings(error: BaseException) -> None:
    """An input that cannot be used."""
    assert part_of(error) == "settings"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        *(OSError(number, "x") for number in sorted(HOST_ERRORS)),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
    ids=str,
)
def test_host(error: BaseException) -> None:
    """Memory, disk and process slots of the host."""
    assert part_of(error) == "host"


def accelerator_error(code: int) -> RuntimeError:
    """As torch raises it: the code is an attribute."""
    error = torch.AcceleratorError(f"CUDA error: {code}")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (accelerator_error(214), "gpu"),
        (accelerator_error(226), "gpu"),
        (accelerator_error(220), "link"),
        (accelerator_error(700), "unknown"),
        (accelerator_error(719), "unknown"),
        (accelerator_error(2), "software"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ..."), "gpu"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "unknown"),
        (torch.distributed.DistBackendError("NCCL error"), "unknown"),
        (GpuLostError("GPU is lost", code=15), "gpu"),
        (NoGpuError("torch sees 0 GPUs"), "unknown"),
        (ConnectionResetError("x"), "unknown"),
        (AssertionError("5 == 4"), "unknown"),
        (ArithmeticError("the product is wrong"), "unknown"),
        (MeasurementError("x"), "unknown"),
    ],
    ids=str,
)
def test_what_cannot_be_told_is_unknown(error: BaseException, part: Part) -> None:
    """Only an error of memory or of the bus speaks against a GPU; a wrong address may be anybody's."""
    assert part_of(error) == part


def test_an_error_of_nvml_that_is_no_loss() -> None:
    """The driver refuses: nothing speaks against the GPU."""
    assert part_of(NvmlError("Not Supported", code=3)) != "gpu"


def test_an_error_raised_inside_torch_distributed() -> None:
    """Gloo raises plain RuntimeErrors from within torch: a connection is no typo."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch.distributed.get_rank()
    error = RuntimeError("timed out").with_traceback(caught.value.__traceback__)
    assert part_of(error) == "unknown"


@given(st.text())
def test_no_text_is_ever_a_defect(text: str) -> None:
    """A text that a function chose blames no hardware, unless it is CUDA's own word."""
    assert part_of(ValueError(text)) == "software"
    if not text.startswith("CUDA"):
        assert part_of(RuntimeError(text)) in ("software", "unknown", "host")


@given(st.sampled_from(get_args(Part)) | st.text() | st.integers())
def test_what_an_exception_says_itself(said: object) -> None:
    """Its attribute counts if it is a kind of part; anything else there is the function's own business."""
    error = ValueError("x")
    error.blames = said  # type: ignore[attr-defined]  # as a training's own exceptions do
    assert part_of(error) == (said if said in get_args(Part) else "software")


class UnreadableError(RuntimeError):
    """Its class raises whenever it is read."""

    def __getattr__(self, name: str) -> object:
        """Raise."""
        raise KeyError(name)

    def __str__(self) -> str:
        """Raise."""
        raise ValueError("no text")


def test_an_exception_that_cannot_be_read_is_software() -> None:
    """Nothing that its class does escapes."""
    assert part_of(UnreadableError()) == "software"
