"""NVML's state of this worker's own GPU, idle and under load."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pynvml
import torch

from pytest_gpucluster.inventory import gpu_index, nvml, nvml_calls, pci_tree
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.telemetry import Sampler, Watched
from pytest_gpucluster.measurements import gemm, progress, timing
from pytest_gpucluster.protocol.functions import simulated_by, without_device

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.simulated_call import SimulatedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """This worker's GPU as NVML and torch see it.

    ``gpu`` is what NVML says of it; not available on a machine without NVML, where ``nvml_device_count`` is None too, and
    for a GPU that NVML cannot read. ``lost``: it has fallen off the bus or waits for a reset, and ``advice`` says what to do.
    ``torch_sees``: torch can use this very GPU.
    ``pci_gpus`` are the host's GPUs, also those that a container was not given: the name of its driver by PCI address.
    ``nvml_pci`` are the addresses that NVML gives.
    """

    gpu: nvml.GpuState | NotAvailable
    torch_sees: bool
    torch_device_count: int
    nvml_device_count: int | None
    pci_gpus: dict[str, str] | NotAvailable
    nvml_pci: list[str]
    torch_device_name: str | None
    lost: bool = False
    advice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClocksUnderLoad(Watched):
    """What NVML reported of the GPU while a bfloat16 product kept it busy.

    ``telemetry`` is None without NVML; on a GPU ``nvml_error`` says why. ``tflops`` is the mean rate over all
    ``seconds`` by the host's clock.
    """

    seconds: float
    tflops: float
    nvml_error: str | None


@without_device
def gpu_state() -> GpuHealth:
    """Read NVML for this worker's own GPU: torch's current GPU, otherwise the ``LOCAL_RANK``-th that CUDA should show.

    A GPU that NVML lists and cannot read (lost from the bus) is not available, in NVML's words. The values of its node
    still count.

    Raises:
        NvmlError: the driver cannot be read at all.
    """
    uuid = timing.gpu_uuid()
    of_torch: dict[str, Any] = {
        "torch_sees": uuid is not None,
        "torch_device_count": torch.cuda.device_count(),
        "pci_gpus": pci_tree.read_nvidia_gpus(),
        "torch_device_name": torch.cuda.get_device_name() if uuid else None,
    }
    try:
        with nvml_calls.session():
            addresses = gpu_index.read_addresses()
            of_node = {**of_torch, "nvml_device_count": len(addresses), "nvml_pci": list(filter(None, addresses))}
            try:
                state = nvml.read_gpu(gpu_index.own_index(uuid, timing.gpu_uuids()))
            except nvml_calls.NvmlError as error:
                lost = isinstance(error, (nvml_calls.GpuLostError, nvml_calls.GpuNeedsResetError))
                return GpuHealth(gpu=NotAvailable(str(error)), lost=lost, advice=getattr(error, "advice", None), **of_node)
    except nvml_calls.NvmlLibraryNotFoundError:
        if uuid is not None:
            raise
        return GpuHealth(gpu=NotAvailable("no NVML"), nvml_device_count=None, nvml_pci=[], **of_torch)
    return GpuHealth(gpu=state, **of_node)


@without_device
def gpu_counters() -> nvml.GpuCounters:
    """Read the error counters of this worker's own GPU, the one of :func:`gpu_state`.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: there is no driver, or NVML cannot read the GPU.
    """
    uuid = timing.gpu_uuid()
    with nvml_calls.session():
        index = gpu_index.own_index(uuid, timing.gpu_uuids())
        with nvml_calls.naming(f"GPU {index}"):
            return nvml.read_counters(nvml_calls.required(pynvml.nvmlDeviceGetHandleByIndex, index))


def _simulated_clocks(call: SimulatedCall) -> ClocksUnderLoad:
    """NVML's event reasons under load."""
    hot = call.has("throttled")
    seen = call.telemetry(clock_mhz=1290.0 if hot else 1620.0, power_w=540.0 if hot else 692.0, hot=hot)
    return ClocksUnderLoad(seconds=call.kwargs["seconds"], tflops=call.rate("sustained"), nvml_error=None, telemetry=seen)


@simulated_by(_simulated_clocks)
def clocks_under_load(*, seconds: float, size: int = 8192) -> ClocksUnderLoad:
    """Run bfloat16 products of order ``size`` back to back for ``seconds`` while NVML is sampled at 10 Hz."""
    product = gemm.bf16_product(size)
    product()
    timing.synchronize()
    progress.report(f"size {size} for {seconds:g} s", 0.0)
    with Sampler(timing.gpu_uuid()) as sampler:
        start_s = time.perf_counter()
        launched = timing.keep_busy(product, seconds=seconds)
        timing.synchronize()
        elapsed_s = time.perf_counter() - start_s
        telemetry = sampler.summary()
    return ClocksUnderLoad(
        seconds=elapsed_s,
        tflops=launched * 2 * size**3 / elapsed_s / 1e12,
        nvml_error=sampler.error,
        telemetry=telemetry,
    )
