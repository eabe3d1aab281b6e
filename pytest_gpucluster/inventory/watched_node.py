"""What the GPUs and ports of this node do right now, for people who watch: never judged. Loads no torch.

Rates are differences of counters. A driver that hangs stops the readings, and never the one who asks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pynvml

from pytest_gpucluster.inventory import gpu_index, nvml, nvml_calls
from pytest_gpucluster.inventory.nics import Nic, NicPort, read_nics
from pytest_gpucluster.inventory.nvml_calls import Nvml, NvmlPart, read_fields
from pytest_gpucluster.inventory.reading import NOBODY, NotAvailable, apply, or_none, row, rows
from pytest_gpucluster.inventory.sysfs import SYS

ALL_LINKS = 0xFFFFFFFF
"""The scope by which NVML adds the counters of all NVLinks of a GPU."""
KIB, GIB, WORD_BYTES = 2**10, 2**30, 4
FIELDS = {
    "nvlink_tx": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, KIB),
    "nvlink_rx": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, KIB),
    "pcie_tx": (getattr(pynvml, "NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 197), 0, 1),
    "pcie_rx": (getattr(pynvml, "NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 198), 0, 1),
}
"""Counters of a GPU: NVML's field, its scope, and bytes in one count. An older binding lacks the names of two."""
PORT_COUNTERS = {"tx": ("port_xmit_data", "tx_bytes"), "rx": ("port_rcv_data", "rx_bytes")}
"""Of a port: the counter of InfiniBand and RoCE, in words of 4 bytes, and that of EFA, in bytes."""


def _counted(part: NvmlPart) -> dict[str, int | NotAvailable]:
    counts = read_fields(part.handle, *((number, scope) for number, scope, _ in FIELDS.values()))
    return {
        name: apply(lambda many, bytes_each: int(many) * bytes_each, count, size)
        for (name, (_, _, size)), count in zip(FIELDS.items(), counts, strict=True)
    }


SHOWN = "shown to people; the criteria take readings of their own"
OF_STATE = rows(nvml.GpuState)
MEMORY = Nvml("nvmlDeviceGetMemoryInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGpu:
    """One GPU at one moment. ``busy_percent``: the share of NVML's last sample in which a kernel ran.

    ``counted_bytes`` are what the links have carried since the driver was loaded: ``nvlink_tx``, ``nvlink_rx``, ``pcie_tx``,
    ``pcie_rx``, seen from the GPU.
    """

    name: str | NotAvailable = row(Nvml("nvmlDeviceGetName"), None, NOBODY, SHOWN)
    busy_percent: int | NotAvailable = row(
        Nvml("nvmlDeviceGetUtilizationRates"), None, NOBODY, SHOWN, convert=lambda rates: int(rates.gpu)
    )
    memory_used_gib: float | NotAvailable = row(MEMORY, None, NOBODY, SHOWN, convert=lambda memory: memory.used / GIB)
    memory_gib: float | NotAvailable = row(MEMORY, None, NOBODY, SHOWN, convert=lambda memory: memory.total / GIB)
    temperature_c: int | NotAvailable = row(OF_STATE["temperature_c"].read, None, NOBODY, SHOWN)
    memory_temperature_c: float | NotAvailable = row(OF_STATE["memory_temperature_c"].read, None, NOBODY, SHOWN)
    power_w: float | NotAvailable = row(OF_STATE["power_w"].read, None, NOBODY, SHOWN)
    power_limit_w: float | NotAvailable = row(OF_STATE["power_limit_w"].read, None, NOBODY, SHOWN)
    sm_clock_mhz: int | NotAvailable = row(OF_STATE["sm_clock_mhz"].read, None, NOBODY, SHOWN)
    memory_clock_mhz: int | NotAvailable = row(Nvml("nvmlDeviceGetClockInfo", (pynvml.NVML_CLOCK_MEM,)), None, NOBODY, SHOWN)
    event_reasons: list[str] | NotAvailable = row(OF_STATE["clocks_event_reasons"].read, None, NOBODY, SHOWN)
    counted_bytes: Mapping[str, int | NotAvailable] = row(_counted, None, NOBODY, SHOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePort:
    """One port of an adapter. ``counted_bytes`` are what it has sent (``tx``) and received (``rx``)."""

    name: str
    state: str | NotAvailable
    rate_gbit_s: float | NotAvailable
    counted_bytes: Mapping[str, int | NotAvailable]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """GPUs in NVML's order and ports by name, at ``at_s`` of ``time.monotonic``. A GPU that cannot be read says why."""

    at_s: float
    gpus: list[LiveGpu | NotAvailable] | NotAvailable
    ports: list[LivePort] | NotAvailable


def rate_gb_s(before: int | NotAvailable | None, now: int | NotAvailable | None, elapsed_s: float) -> float | None:
    """10^9 bytes/s between two readings of a counter of bytes; None where one is absent, or where the counter was reset."""
    if not isinstance(before, int) or not isinstance(now, int) or elapsed_s <= 0 or now < before:
        return None
    return (now - before) / elapsed_s / 1e9


class NodeReader:
    """Reads this node every ``interval_s`` in a thread. It reads only, and never raises."""

    def __init__(self, *, interval_s: float, root: Path = SYS, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is read before the ``with`` block."""
        self._interval_s = interval_s
        self._root = root
        self._clock = clock
        self.last: tuple[NodeReading | None, NodeReading | None] = (None, None)
        """The reading before the last one, and the last one."""
        self._began_s = clock()
        self._stop, self._changed = threading.Event(), threading.Event()

        self._thread = threading.Thread(target=self._run, name="node-reader", daemon=True)

    def __enter__(self) -> NodeReader:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Start reading; the first reading is taken at once."""
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop; a thread inside a driver that hangs ends with the process."""
        self._stop.set()
        self._thread.join(timeout=1)

    @property
    def silent_s(self) -> float:
        """How long ago the last reading ended."""
        _, now = self.last
        return self._clock() - (self._began_s if now is None else now.at_s)

    def wait_for_two(self, deadline_s: float) -> None:
        """Wait until rates can be shown, at most so long."""
        until_s = self._clock() + deadline_s
        while self.last[0] is None and (left_s := until_s - self._clock()) > 0:
            self._changed.wait(left_s)
            self._changed.clear()

    def _run(self) -> None:
        """NVML stays open between readings: to open it may wake sleeping GPUs. After an error it is opened again."""
        while not self._stop.is_set():
            try:
                with nvml_calls.session():
                    while not self._stop.is_set():
                        self._keep([nvml_calls.attempt(_read_gpu, index) for index in range(gpu_index.gpu_count())])
            except nvml_calls.NvmlLibraryNotFoundError:
                self._keep(NotAvailable("there is no NVIDIA driver library (libnvidia-ml.so.1) here"))
            except nvml_calls.NvmlError as error:
                self._keep(NotAvailable(str(error)))

    def _keep(self, gpus: list[LiveGpu | NotAvailable] | NotAvailable) -> None:
        """Keep these GPUs, and the ports, as the last reading; then wait for the next one."""
        self.last = (self.last[1], NodeReading(at_s=self._clock(), gpus=gpus, ports=read_ports(root=self._root)))
        self._changed.set()
        self._stop.wait(self._interval_s)


def _read_gpu(index: int) -> LiveGpu:
    return nvml_calls.read_part(LiveGpu, NvmlPart(nvml_calls.required(pynvml.nvmlDeviceGetHandleByIndex, index)))


def read_ports(*, root: Path = SYS) -> list[LivePort] | NotAvailable:
    """Every port of every RDMA adapter; one adapter that hides its ports does not hide the others."""
    return apply(lambda nics: [_port(nic, port) for nic in nics for port in or_none(nic.ports) or ()], read_nics(root=root))


def _port(nic: Nic, port: NicPort) -> LivePort:
    counted = {way: _port_bytes(port, *names) for way, names in PORT_COUNTERS.items()}
    name = f"{nic.device}/{port.number}"
    return LivePort(name=name, state=port.state, rate_gbit_s=port.rate_gbit_s, counted_bytes=counted)


def _port_bytes(port: NicPort, in_words: str, in_bytes: str) -> int | NotAvailable:
    for counters, name, size in ((port.counters, in_words, WORD_BYTES), (port.hw_counters, in_bytes, 1)):
        count = (or_none(counters) or {}).get(name)
        if isinstance(count, int):
            return count * size
    return NotAvailable(f"the port has no counter {in_words} or {in_bytes}")
