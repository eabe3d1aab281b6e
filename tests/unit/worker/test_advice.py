"""What to do about an error: by exactly what CUDA and NCCL write, and never by a number in somebody's own text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpucluster.cluster.unmeasurable import error_for
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.error_codes import ACTIONS
from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.plugin.outcome import blamed
from pytest_gpucluster.protocol.messages import Failure, Success
from pytest_gpucluster.worker.raised import FABRIC_TEXT, advice_of, failure_of, part_of
from tests.unit.worker.test_blame import accelerator_error

NCCL = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
NVLS = "Failed to {} NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error {} '{}'."
STATE = "the operation cannot be performed in the present state"
NOT_READY = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might "
    "have already set an error? Error 802: system not yet initialized"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError(NCCL + NVLS.format("bind", 401, STATE)),
        RuntimeError(NCCL + NVLS.format("bind", 401, STATE) + "\nThis is usually caused by a system or configuration error"),
        RuntimeError(NCCL + NVLS.format("create", 1, "invalid argument")),
        RuntimeError(f"NCCL failure: {NVLS.format('bind', 401, STATE)}"),
        RuntimeError(NVLS.format("bind", 800, "operation not permitted")),
        torch.distributed.DistBackendError(f"{NCCL}Cuda failure 802 'system not yet initialized'"),
        torch.distributed.DistBackendError(f"{NCCL}Cuda failure 401 '{STATE}'"),
        torch.distributed.DistBackendError(f"{NCCL}Cuda failure '{STATE}'"),
        RuntimeError(f"{NCCL}Cuda failure 'system not yet initialized'"),
        RuntimeError(f"[rank3]: {NCCL}{NVLS.format('bind', 401, STATE)}\r"),
        RuntimeError(f"[PG ID 0 Rank 3] {NCCL}Cuda failure 802 'system not yet initialized'"),
        RuntimeError(NOT_READY),
        RuntimeError("CUDA error: system not yet initialized\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: system not yet initialized"),
        RuntimeError("CUDA error 802: system not yet initialized"),
        RuntimeError("cudaGetDeviceCount failed: 802 (system not yet initialized)"),
        RuntimeError("cuInit failed: CUDA_ERROR_SYSTEM_NOT_READY"),
        RuntimeError("CUDA driver error: cuMulticastBindMem: operation not permitted"),
        accelerator_error(802),
    ],
    ids=lambda error: str(error)[-60:],
)
def test_the_nvlink_fabric_is_not_ready(error: BaseException) -> None:
    """The host is to blame: its Fabric Manager and NVSwitches."""
    assert (part_of(error), advice_of(error)) == ("host", FABRIC_TEXT)


@pytest.mark.parametrize(
    ("error", "part", "action"),
    [
        (accelerator_error(214), "gpu", "reset"),
        (accelerator_error(226), "gpu", "reset"),
        (accelerator_error(220), "link", "link"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ..."), "gpu", "reset"),
        (RuntimeError("CUDA error: GPU requires reset"), "gpu", "reset"),
        (torch.distributed.DistBackendError(f"{NCCL}Cuda failure 214 'uncorrectable ECC error encountered'"), "gpu", "reset"),
        (RuntimeError(f"{NCCL}Cuda failure 'uncorrectable ECC error encountered'"), "gpu", "reset"),
        (RuntimeError(f"{NCCL}CUDA error 220 'uncorrectable NVLink error detected'"), "link", "link"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_gpu_or_a_link_has_an_error(error: BaseException, part: str, action: str) -> None:
    """The next step is that of the driver's own code."""
    assert (part_of(error), advice_of(error)) == (part, ACTIONS["Xid"][action])


class OwnError(RuntimeError):
    """An error of somebody's own function, with a code of its own."""

    error_code = 802


@pytest.mark.parametrize(
    "error",
    [
        AssertionError(NOT_READY),
        ValueError(NOT_READY),
        AssertionError("CUDA error: system not yet initialized"),
        KeyError(802),
        OwnError("802"),
        RuntimeError("expected 802 rows"),
        RuntimeError("CUDA tests need 802 files"),
        RuntimeError(f"the log has: {NOT_READY}"),
        RuntimeError("my NCCL error: CUDA error 802"),
        RuntimeError("NCCL error in: x.cpp:802, unhandled system error"),
        RuntimeError("see: Failed to bind NVLink SHARP (NVLS) Multicast memory: CUDA error 401"),
        RuntimeError(NCCL + NVLS.format("allocate", 2, "out of memory")),
        RuntimeError(f"{NCCL}Cuda failure 4010 'x'"),
        RuntimeError(f"{NCCL}Cuda failure 'out of memory'"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.distributed.DistBackendError(f"{NCCL}Cuda failure 700 'an illegal memory access was encountered'"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 802 MiB"),
        accelerator_error(700),
        ConfigurationError("802"),
    ],
    ids=lambda error: repr(error)[:60],
)
def test_other_errors(error: BaseException) -> None:
    """Nobody's own text, and no other error of CUDA, is taken for it."""
    assert advice_of(error) is None
    assert part_of(error) not in ("host", "gpu", "link")


@pytest.mark.parametrize(
    "text",
    [
        "No CUDA GPUs are available",
        "CUDA unknown error - this may be due to an incorrectly set up environment",
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
        "Found no NVIDIA driver on your system.",
    ],
)
def test_torch_finds_no_gpu(text: str) -> None:
    """Whether GPU, driver or container is to blame cannot be told; the function that asked torch is not."""
    assert (part_of(RuntimeError(text)), advice_of(RuntimeError(text))) == ("unknown", None)


PLACES = [
    Place(id=place.id, node=place.node, gpu=place.gpu, rank=rank, hostname=f"host{place.node}")
    for rank, place in enumerate(Inventory(num_nodes=2, gpus_per_node=2, device="cuda").places)
]
KNOWN = {
    **{place.id: place for place in PLACES},
    **{place.id: place for place in Inventory(num_nodes=2, gpus_per_node=2, device="cuda").nodes},
}


def culprits_of(*errors: BaseException | None) -> list[Any]:
    """Who is to blame where these ranks raise these errors; None: the rank has a value."""
    replies = {rank: Success(value=1) if error is None else failure_of(error) for rank, error in enumerate(errors)}
    error = error_for(replies, PLACES[: len(errors)], what="f was not measured")
    failed = [place.id for place, reply in zip(PLACES, replies.values(), strict=False) if isinstance(reply, Failure)]
    records = [blamed(Record(criterion="f", place=name, outcome="error", reason=str(error)), error) for name in failed]
    return find_culprits(records, KNOWN)


BIND = RuntimeError(NCCL + NVLS.format("bind", 401, STATE))
CLOSED = torch.distributed.DistBackendError("NCCL error in: x, remote process exited or there was a network error")


@pytest.mark.parametrize(
    ("errors", "blames"),
    [
        ((BIND, BIND), ["node0"]),
        ((RuntimeError(NOT_READY), None), ["node0"]),
        ((None, RuntimeError(NOT_READY)), ["node0"]),
        ((CLOSED, CLOSED, BIND, BIND), ["node1"]),
        ((BIND, BIND, BIND, BIND), ["node0", "node1"]),
    ],
)
def test_the_host_is_named(errors: tuple[BaseException | None, ...], blames: list[str]) -> None:
    """Not the GPUs of the ranks that met it, and not "unknown": the host, with the next step."""
    found = culprits_of(*errors)
    assert [(one.place, one.kind) for one in found] == [(name, "host") for name in blames]
    assert all(FABRIC_TEXT in one.advice for one in found)


def test_an_error_of_a_function_has_the_usual_next_step() -> None:
    """Its own GPU's rank, and software."""
    (found,) = culprits_of(None, ValueError("802"))
    assert (found.place, found.kind) == ("node0-gpu1", "software")
    assert "correct the function" in found.advice
