"""What a GPU does while something runs on it: clocks, power, temperature, event reasons.

Sampled by a thread (:class:`Sampler`) or, in windows too short for that, read once inside each (:class:`Snapshots`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory import nvml

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.inventory.group_telemetry import GroupTelemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What was seen of one GPU. None: the GPU does not give the value. Power is NVML's own average of about a second.

    ``event_reasons`` is the union over all samples, so that a fault of one sample's length is not averaged away. Of the
    PCIe link the fastest generation counts (an idle link slows down to save power) and the narrowest width.
    """

    samples: int
    sm_clock_min_mhz: float | None
    sm_clock_mean_mhz: float | None
    sm_clock_max_mhz: float | None
    temperature_max_c: float | None
    power_mean_w: float | None
    power_max_w: float | None
    pcie_gen_max: int | None
    pcie_width_min: int | None
    event_reasons: list[str]
    fault_reasons: list[str]

    @property
    def evidence(self) -> dict[str, Any]:
        """What explains a measured value, by the names that a report shows."""
        return {
            "SM MHz": self.sm_clock_mean_mhz,
            "W": self.power_mean_w,
            "C": self.temperature_max_c,
            "event reasons": self.event_reasons,
        }


def evidence(telemetry: Telemetry | GroupTelemetry | None) -> dict[str, Any]:
    """The evidence of one GPU's or a group's telemetry; empty without telemetry (a CPU, no NVML)."""
    return {} if telemetry is None else telemetry.evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    at_s: float
    reasons: int
    values: dict[str, float | None]


class Sampler:
    """Reads one GPU's clocks, power, temperature and event reasons at 10 Hz while its ``with`` block runs.

    It only watches: without NVML, without such a GPU or after an error it stops quietly, ``error`` says why, and the
    summary is of what was seen until then, None if nothing was. A block that is over before NVML is ready is seen once, at
    its end.
    """

    def __init__(self, uuid: str | None, *, interval_s: float = 0.1) -> None:
        """Watch the GPU with this UUID; None watches nothing."""
        self.error: str | None = None
        self._uuid = uuid
        self._interval_s = interval_s
        self._samples: list[_Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml-sampler", daemon=True)

    def __enter__(self) -> Sampler:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Start watching; the first sample is taken at once."""
        if self._uuid is not None:
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop watching."""
        self._stop.set()
        if self._uuid is not None:
            self._thread.join(timeout=5)

    def summary(self, *, since_s: float = 0.0) -> Telemetry | None:
        """What was seen, or None.

        Clocks, power, temperature, link are of the samples taken since ``since_s`` (of ``time.monotonic``), or of the
        last one before if there are none; event reasons are always those of all samples.
        """
        samples = list(self._samples)
        if not samples:
            return None
        window = [sample for sample in samples if sample.at_s >= since_s] or samples[-1:]
        return _summary(window, reasons_of=samples)

    def _run(self) -> None:
        try:
            with nvml.session():
                handle = nvml.handle_of(str(self._uuid))
                while True:
                    self._samples.append(_sample(handle))
                    if self._stop.wait(self._interval_s):
                        return
        except nvml.NvmlError as error:
            self.error = str(error)


class Snapshots:
    """Reads one GPU by windows, whenever it is told to; for windows of milliseconds, which a thread would miss.

    A reading takes a millisecond or so of the calling thread. Call it when all work of the window is queued and the GPU
    is at it: then nothing waits for the thread, and the reading cannot disturb what is timed. Quiet as :class:`Sampler`:
    without NVML or after an error it reads nothing more, and ``error`` says why.
    """

    def __init__(self, uuid: str | None) -> None:
        """Watch the GPU with this UUID; None watches nothing."""
        self.error: str | None = None
        self._uuid = uuid
        self._handle: Any = None
        self._session = contextlib.ExitStack()
        self._samples: dict[str, list[_Sample]] = {}

    def __enter__(self) -> Snapshots:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Get NVML ready, so that a reading is short."""
        if self._uuid is not None:
            try:
                self._session.enter_context(nvml.session())
                self._handle = nvml.handle_of(self._uuid)
            except nvml.NvmlError as error:
                self.error = str(error)
        return self

    def __exit__(self, *_exception: object) -> None:
        """Let NVML go."""
        self._handle = None
        self._session.close()

    def of(self, window: str) -> Callable[[], None]:
        """What takes one reading of ``window`` when it is called."""
        return lambda: self._take(window)

    def summary(self, window: str) -> Telemetry | None:
        """What was seen in all windows of this name, or None."""
        samples = self._samples.get(window)
        return _summary(samples, reasons_of=samples) if samples else None

    def _take(self, window: str) -> None:
        if self._handle is None:
            return
        try:
            self._samples.setdefault(window, []).append(_sample(self._handle))
        except nvml.NvmlError as error:
            self.error, self._handle = str(error), None


def _summary(window: list[_Sample], *, reasons_of: list[_Sample]) -> Telemetry:
    clocks, power, temperature = (_seen(window, key) for key in ("sm_clock_mhz", "power_w", "temperature_c"))
    generations, widths = (_seen(window, key) for key in ("pcie_gen", "pcie_width"))
    reasons = nvml.event_reason_names(functools.reduce(operator.or_, (sample.reasons for sample in reasons_of)))
    return Telemetry(
        samples=len(window),
        sm_clock_min_mhz=min(clocks, default=None),
        sm_clock_mean_mhz=statistics.fmean(clocks) if clocks else None,
        sm_clock_max_mhz=max(clocks, default=None),
        temperature_max_c=max(temperature, default=None),
        power_mean_w=statistics.fmean(power) if power else None,
        power_max_w=max(power, default=None),
        pcie_gen_max=int(max(generations)) if generations else None,
        pcie_width_min=int(min(widths)) if widths else None,
        event_reasons=reasons,
        fault_reasons=nvml.fault_reasons(reasons),
    )


def _sample(handle: Any) -> _Sample:
    reasons = nvml.read_event_reasons(handle) or 0
    return _Sample(at_s=time.monotonic(), reasons=reasons, values={**nvml.read_clocks(handle), **nvml.read_link(handle)})


def _seen(samples: list[_Sample], key: str) -> list[float]:
    return [value for sample in samples if (value := sample.values[key]) is not None]
