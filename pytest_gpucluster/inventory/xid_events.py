"""NVML's events of Xids, heard in a thread for as long as the process lives."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import NvmlError, naming, required, session, text

WAIT_MS = 1000
SILENT_S = 30.0
"""A wait that does not return for so long hangs."""


@dataclass(slots=True)
class WatchedGpu:
    """One GPU of the node. ``why``: why NVML does not tell its events; None where it does."""

    index: int
    uuid: str = ""
    pci: str = ""
    why: str | None = None


@dataclass(frozen=True, slots=True)
class HeardXid:
    """One event: the GPU's index by NVML, the code, and when it came by the monotonic clock."""

    gpu: int
    code: int
    at_s: float


class XidEvents:
    """Listens to all GPUs of the node. Only Xids are asked for: events of clocks come in floods."""

    def __init__(self) -> None:
        """Prepare to listen; :meth:`start` begins."""
        self._why: str | None = "NVML has not answered yet"
        self._is_ready = threading.Event()
        self._returned_s = time.monotonic()
        self._gpus: dict[int, WatchedGpu] = {}
        self._heard: list[HeardXid] = []
        self._thread = threading.Thread(target=self._run, name="xid-events", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether every later Xid is heard, or it is known why not."""
        return self._is_ready.is_set()

    @property
    def gpus(self) -> list[WatchedGpu]:
        """The GPUs by index."""
        return list(self._gpus.values())

    @property
    def heard(self) -> list[HeardXid]:
        """What came so far."""
        return list(self._heard)

    @property
    def why(self) -> str | None:
        """Why events may be missing; None if all that came are known."""
        if self._why is not None:
            return self._why
        silent_s = time.monotonic() - self._returned_s
        if silent_s > SILENT_S:
            return f"NVML has not answered for {silent_s:.0f} s"
        return None if self._thread.is_alive() else "the thread that listens has ended"

    def _run(self) -> None:
        try:
            with session():
                self._listen()
        except NvmlError as error:
            self._why = str(error)
        except Exception as error:  # noqa: BLE001 -- a listener that ends in silence would look like a healthy GPU
            self._why = f"the listener failed: {error!r}"
        finally:
            self._is_ready.set()

    def _listen(self) -> None:
        events = required(pynvml.nvmlEventSetCreate)
        by_handle = {}
        for index in range(required(pynvml.nvmlDeviceGetCount)):
            gpu = self._gpus[index] = WatchedGpu(index)
            try:
                with naming(f"GPU {index}"):
                    handle = required(pynvml.nvmlDeviceGetHandleByIndex, index)
                    by_handle[_address_of(handle)] = index
                    gpu.uuid = text(required(pynvml.nvmlDeviceGetUUID, handle))
                    gpu.pci = text(required(pynvml.nvmlDeviceGetPciInfo, handle).busId)
                    required(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except NvmlError as error:
                gpu.why = str(error)
        self._why = None
        self._is_ready.set()
        while True:
            self._wait(events, by_handle)

    def _wait(self, events: Any, by_handle: dict[int | None, int]) -> None:
        """Wait for the next event. An error other than the end of the time ends the listening: events may be lost."""
        try:
            event = required(pynvml.nvmlEventSetWait_v2, events, WAIT_MS)
        except NvmlError as error:
            if error.code != pynvml.NVML_ERROR_TIMEOUT:
                raise
        else:
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                gpu = by_handle[_address_of(event.device)]
                self._heard.append(HeardXid(gpu, int(event.eventData), time.monotonic()))
        self._returned_s = time.monotonic()


def _address_of(handle: Any) -> int | None:
    """A handle is a pointer; the same GPU always has the same one."""
    return ctypes.cast(handle, ctypes.c_void_p).value
