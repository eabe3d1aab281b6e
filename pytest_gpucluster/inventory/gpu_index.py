"""Which GPUs NVML lists, which of them CUDA shows, which one is this process's own, and who uses a GPU.

All but :func:`visible_gpus` and :func:`read_driver_version` are called inside a session of NVML.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pynvml

from pytest_gpucluster.inventory import nvml_calls
from pytest_gpucluster.inventory.pci_tree import read_nvidia_gpus
from pytest_gpucluster.inventory.reading import apply, or_none, yes_or_no
from pytest_gpucluster.text import counted

MOST_GPUS = 256
"""More than any host has; NVML's own numbers of GPUs are of 32 bits."""


def gpu_count() -> int:
    """Number of GPUs NVML knows.

    Raises:
        NvmlError: NVML does not say it, or says a number that no host has.
    """
    count = int(nvml_calls.required(pynvml.nvmlDeviceGetCount))
    if count > MOST_GPUS:
        raise nvml_calls.NvmlError(
            f"NVML counts {counted(count, 'GPU')}, and no host has more than {MOST_GPUS} (nvmlDeviceGetCount)"
        )
    return count


def is_in_mig_mode(index: int) -> bool:
    """Whether the GPU is divided into instances. No for one that does not say so.

    Raises:
        NvmlError: NVML lists the GPU and cannot open it.
    """
    modes = nvml_calls.optional("nvmlDeviceGetMigMode", nvml_calls.required(pynvml.nvmlDeviceGetHandleByIndex, index))
    return apply(lambda found: yes_or_no(found[0]), modes) is True


def read_uuids() -> list[str]:
    """UUIDs by index; empty text for a GPU that does not give one, so that the others keep their numbers."""
    return [_shown_by(index, pynvml.nvmlDeviceGetUUID) for index in range(gpu_count())]


def read_addresses() -> list[str]:
    """PCI addresses by index, as NVML spells them. A GPU that NVML refuses has the one that only the PCI bus still shows.

    Empty text where nothing shows it.
    """
    by_nvml = [_shown_by(index, lambda gpu: pynvml.nvmlDeviceGetPciInfo(gpu).busId) for index in range(gpu_count())]
    return by_nvml if all(by_nvml) else complete_addresses(by_nvml, or_none(read_nvidia_gpus()) or ())


def complete_addresses(by_nvml: Sequence[str], on_bus: Iterable[str]) -> list[str]:
    """NVML's addresses, in whose order it counts, with those of the bus in place of empty ones, where just as many fit."""
    found = list(by_nvml)
    left = sorted(set(map(_spelled, on_bus)) - set(map(_spelled, filter(None, found))))
    for is_known, run in itertools.groupby(range(len(found)), key=lambda index: bool(by_nvml[index])):
        if not is_known:
            indices = list(run)
            below = _spelled(found[indices[0] - 1]) if indices[0] else ""
            above = _spelled(found[indices[-1] + 1]) if indices[-1] + 1 < len(found) else "~"
            fitting = [address for address in left if below < address < above]
            found[indices[0] : indices[-1] + 1] = fitting if len(fitting) == len(indices) else [""] * len(indices)
    return found


def _spelled(address: str) -> str:
    """A PCI address with a domain of eight digits, as NVML has it, in lower case."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):08x}:{rest}"


def _shown_by(index: int, read: Callable[[Any], Any]) -> str:
    """What NVML gives of the GPU as text; empty where it refuses it."""
    handle = nvml_calls.value_or_none(pynvml.nvmlDeviceGetHandleByIndex, index)
    return str((None if handle is None else nvml_calls.value_or_none(read, handle)) or "")


def read_label(index: int) -> dict[str, str | None]:
    """Name, UUID, PCI address and serial, as far as NVML gives them, of a lost GPU too. The bus may know the address."""
    readers = {"gpu_name": pynvml.nvmlDeviceGetName, "uuid": pynvml.nvmlDeviceGetUUID, "serial": pynvml.nvmlDeviceGetSerial}
    label = {name: _shown_by(index, read) or None for name, read in readers.items()}
    return {**label, "pci": read_addresses()[index] or None}


def read_serial(handle: Any) -> str | None:
    """The board's serial number, None if NVML does not give it."""
    return or_none(nvml_calls.optional("nvmlDeviceGetSerial", handle))


def visible_gpus(uuids: list[str], setting: str | None) -> list[int]:
    """Indices of the GPUs that CUDA shows, in CUDA's order, for this value of ``CUDA_VISIBLE_DEVICES``.

    As CUDA reads it: None shows all, the list ends at its first invalid entry, a repeated entry shows none, and a
    ``GPU-`` entry may be any unambiguous beginning of a UUID. Integers count in PCI order
    (``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and the default wherever all GPUs are alike).
    """
    if setting is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in setting.split(","):
        index = _index_of(entry.strip(), uuids)
        if index is None:
            break
        if index in shown:
            return []
        shown.append(index)
    return shown


def read_driver_version() -> str | None:
    """The driver's version, None on a machine without one.

    Raises:
        NvmlError: there is a driver library and it does not answer.
    """
    try:
        with nvml_calls.session():
            return str(nvml_calls.required(pynvml.nvmlSystemGetDriverVersion))
    except nvml_calls.NvmlLibraryNotFoundError:
        return None


def handle_of(uuid: str) -> Any:
    """NVML's handle of the GPU with this UUID (``GPU-...``).

    Raises:
        NvmlError: no such GPU.
    """
    uuids = read_uuids()
    if uuid not in uuids:
        raise nvml_calls.NvmlError(f"NVML shows no GPU {uuid}")
    return nvml_calls.required(pynvml.nvmlDeviceGetHandleByIndex, uuids.index(uuid))


def expected_index(uuids: Sequence[str], local_rank: int, taken: Collection[str] = ()) -> int | None:
    """NVML index of the GPU that a rank should have; None if there is none.

    ``taken``: the UUIDs of the GPUs that torch shows. They are those of the first ranks: where CUDA leaves out a GPU that is
    lost, the last ranks have those that are left.
    """
    shown = visible_gpus(list(uuids), os.environ.get("CUDA_VISIBLE_DEVICES"))
    left = [index for index in shown if not uuids[index] or uuids[index] not in taken]
    number = local_rank - len(taken)
    return left[number] if 0 <= number < len(left) else None


def own_index(uuid: str | None, taken: Collection[str] = ()) -> int:
    """NVML index of this process's GPU: ``uuid``, else the one of :func:`expected_index`.

    Raises:
        NvmlError: NVML does not show it.
    """
    uuids = read_uuids()
    if uuid is not None:
        if uuid not in uuids:
            is_cut = any(is_in_mig_mode(index) for index, shown in enumerate(uuids) if shown)
            why = "; in MIG mode torch sees an instance of a GPU" if is_cut else ""
            raise nvml_calls.NvmlError(f"torch uses GPU {uuid}, which NVML does not show{why}")
        return uuids.index(uuid)
    shown = visible_gpus(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    index = expected_index(uuids, local_rank, taken)
    if index is None:
        raise nvml_calls.NvmlError(f"LOCAL_RANK {local_rank} has no GPU: NVML shows {len(uuids)}, CUDA may use {len(shown)}")
    return index


def _index_of(entry: str, uuids: list[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


# --- Who uses a GPU ---


def read_used_bytes(handle: Any) -> tuple[int, bool] | None:
    """Bytes in use, and whether they include the driver's own (before driver 510); None if NVML gives neither."""
    for version in ((pynvml.nvmlMemory_v2,), ()):
        memory = or_none(nvml_calls.optional("nvmlDeviceGetMemoryInfo", handle, *version))
        if memory is not None and memory.used <= memory.total:
            return int(memory.used), not version
    return None


def read_compute_processes(handle: Any) -> list[tuple[int, int | None]] | None:
    """(pid, bytes) of each process with a CUDA context on the GPU; None instead of what NVML does not give.

    Clients of an MPS daemon are in a list of their own. In a container the lists may be empty, and the pids are the host's.
    """
    found = or_none(nvml_calls.optional("nvmlDeviceGetComputeRunningProcesses_v3", handle))
    clients = or_none(nvml_calls.optional("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle))
    if found is None and not clients:
        return None
    return [*{int(one.pid): (int(one.pid), one.usedGpuMemory) for one in (*(clients or ()), *(found or ()))}.values()]


def read_process_name(pid: int) -> str | None:
    """The file name of the program that a process runs; None if NVML cannot see the program."""
    words = (nvml_calls.value_or_none(pynvml.nvmlSystemGetProcessName, pid) or "").split()
    return words[0].rpartition("/")[2] if words else None


def read_utilization_percent(handle: Any) -> int | None:
    """Share of the last 1/6 s to 1 s in which a kernel ran; None if NVML does not give it, or gives more than 100 %."""
    rates = or_none(nvml_calls.optional("nvmlDeviceGetUtilizationRates", handle))
    return None if rates is None or rates.gpu > 100 else int(rates.gpu)
