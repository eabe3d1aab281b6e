"""Telemetry of a GPU under work, and that of a group in brief: clocks, power, temperature, event reasons.

A thread samples it (:class:`Sampler`); a window too short for a thread has one reading inside (:class:`Snapshots`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory import nvml, nvml_calls
from pytest_gpucluster.inventory.gpu_index import handle_of
from pytest_gpucluster.inventory.nvml import EVENT_REASONS, event_reason_names
from pytest_gpucluster.inventory.nvml_calls import NvmlPart
from pytest_gpucluster.inventory.reading import WATCHED, NotAvailable, all_or_why, apply, or_none, rows
from pytest_gpucluster.protocol.rank import ranges
from pytest_gpucluster.text import counted

SILENT_S = 3.0
"""NVML answers in milliseconds. A sampler that has heard nothing for so long has a driver that hangs."""
SAMPLED = ("sm_clock_mhz", "temperature_c", "power_w", "pcie_gen", "pcie_width")
"""Fields of :class:`~pytest_gpucluster.inventory.nvml.GpuState`."""
_OF_STATE = rows(nvml.GpuState)
JOIN_S = 5.0
"""So long the end of a block waits for the thread; one inside a driver that hangs is left to end with its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Telemetry of one GPU. None: the GPU does not give the value. Power is NVML's own average of about a second.

    The PCIe link is judged: it says why it is not available. ``pcie_gen_max`` is the fastest generation, because an idle link
    slows down to save power; its width stays.

    ``event_reasons`` is the union over all samples, so that a fault of one sample's length is not averaged away. It is
    judged, and ``fault_reasons`` too. So both are :class:`NotAvailable` if NVML refused them in any sample, or if sampling
    stopped half-way: a fault may lie in what was not read. ``due`` is how many samples there should be by the time that the
    sampler ran; 0 where nobody knows. Fewer come from a slow driver, or one that hangs.
    """

    samples: int
    due: int = 0
    sm_clock_min_mhz: float | None
    sm_clock_mean_mhz: float | None
    sm_clock_max_mhz: float | None
    temperature_max_c: float | None
    power_mean_w: float | None
    power_max_w: float | None
    pcie_gen_max: int | NotAvailable
    pcie_width_min: int | NotAvailable
    event_reasons: list[str] | NotAvailable
    fault_reasons: list[str] | NotAvailable

    @property
    def evidence(self) -> dict[str, Any]:
        """What explains a measured value, by the names that a report shows."""
        return {
            "SM MHz": self.sm_clock_mean_mhz,
            "W": self.power_mean_w,
            "C": self.temperature_max_c,
            "event reasons": str(self.event_reasons) if isinstance(self.event_reasons, NotAvailable) else self.event_reasons,
        }


def evidence(telemetry: Telemetry | GroupTelemetry | None) -> dict[str, Any]:
    """The evidence of one GPU's or a group's telemetry; empty without telemetry (a CPU, no NVML)."""
    return {} if telemetry is None else telemetry.evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A result with the telemetry of the time in which it was measured, for the report; None without NVML."""

    telemetry: Telemetry | GroupTelemetry | None = None

    @property
    def evidence(self) -> dict[str, Any]:
        """Clocks, power, temperature and event reasons meanwhile."""
        return evidence(self.telemetry)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    at_s: float
    reasons: int | NotAvailable
    values: dict[str, float | NotAvailable]


class Sampler:
    """Reads one GPU's clocks, power, temperature and event reasons at 10 Hz while its ``with`` block runs.

    A sampler never raises. Without NVML, without such a GPU or after an error it stops, and ``error`` says why. The
    summary covers the samples until then, None if there are none. A block that ends before NVML is ready has one sample.
    """

    def __init__(self, uuid: str | None, *, interval_s: float = 0.1) -> None:
        """Watch the GPU with this UUID; None: no GPU."""
        self.error: str | None = None
        self._uuid = uuid
        self._interval_s = interval_s
        self._samples: list[_Sample] = []
        self._started_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml-sampler", daemon=True)

    def __enter__(self) -> Sampler:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Start watching; the first sample is taken at once."""
        self._started_s = time.monotonic()
        if self._uuid is not None:
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Stop watching."""
        self._stop.set()
        if self._uuid is not None:
            self._thread.join(timeout=JOIN_S)

    def summary(self, *, since_s: float = 0.0) -> Telemetry | None:
        """Telemetry of the samples so far; None without a sample.

        Clocks, power, temperature and link cover the samples since ``since_s`` (of ``time.monotonic``); without such a
        sample, the last one. Event reasons cover all samples.
        """
        samples = list(self._samples)
        self._note_silence(samples[-1].at_s if samples else self._started_s)
        if not samples:
            return None
        window = [sample for sample in samples if sample.at_s >= since_s] or samples[-1:]
        due = int((time.monotonic() - max(since_s, self._started_s)) / self._interval_s)
        return replace(_summary(window, reasons_of=samples, stopped=self.error), due=max(1, due))

    def between(self, since_s: float, until_s: float) -> Telemetry | None:
        """Telemetry of the samples between two moments of ``time.monotonic``, event reasons too; None without a sample."""
        window = [sample for sample in list(self._samples) if since_s <= sample.at_s <= until_s]
        return _summary(window, reasons_of=window, stopped=self.error) if window else None

    def _note_silence(self, heard_s: float) -> None:
        """NVML that has hung raises nothing: what was seen before it stopped is not the whole."""
        silent_s = time.monotonic() - heard_s
        if self.error is None and self._thread.is_alive() and silent_s > max(SILENT_S, 10 * self._interval_s):
            self.error = f"NVML has not answered for {silent_s:.1f} s"

    def _run(self) -> None:
        try:
            with nvml_calls.session():
                handle = handle_of(str(self._uuid))
                while True:
                    due_s = time.monotonic() + self._interval_s  # the reading takes a part of the interval
                    self._samples.append(_sample(handle))
                    if self._stop.wait(max(0.0, due_s - time.monotonic())):
                        return
        except nvml_calls.NvmlError as error:
            self.error = str(error)


class Snapshots:
    """Reads one GPU on request, by windows of milliseconds, which a sampling thread would miss.

    A reading takes about a millisecond of the calling thread. Take it when all work of the window is queued and the GPU
    runs: then nothing waits for the thread, and the reading cannot disturb the timing. Like :class:`Sampler` it never
    raises: without NVML or after an error it reads nothing, and ``error`` says why.
    """

    def __init__(self, uuid: str | None) -> None:
        """Watch the GPU with this UUID; None: no GPU."""
        self.error: str | None = None
        self._uuid = uuid
        self._handle: Any = None
        self._session = contextlib.ExitStack()
        self._samples: dict[str, list[_Sample]] = {}

    def __enter__(self) -> Snapshots:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Initialise NVML now, so that a reading is short."""
        if self._uuid is not None:
            try:
                self._session.enter_context(nvml_calls.session())
                self._handle = handle_of(self._uuid)
            except nvml_calls.NvmlError as error:
                self.error = str(error)
        return self

    def __exit__(self, *_exception: object) -> None:
        """Shut NVML down."""
        self._handle = None
        self._session.close()

    def of(self, window: str) -> Callable[[], None]:
        """A function that takes one reading of ``window`` when it is called."""
        return lambda: self._take(window)

    def summary(self, window: str) -> Telemetry | None:
        """Telemetry of all windows of this name; None without a reading."""
        samples = self._samples.get(window)
        return _summary(samples, reasons_of=samples, stopped=self.error) if samples else None

    def _take(self, window: str) -> None:
        if self._handle is None:
            return
        try:
            self._samples.setdefault(window, []).append(_sample(self._handle))
        except nvml_calls.NvmlError as error:
            self.error, self._handle = str(error), None


def _summary(window: list[_Sample], *, reasons_of: list[_Sample], stopped: str | None) -> Telemetry:
    clocks, power, temperature = (_seen(window, key) for key in ("sm_clock_mhz", "power_w", "temperature_c"))
    reasons = _reasons(reasons_of, stopped)
    return Telemetry(
        samples=len(window),
        sm_clock_min_mhz=min(clocks, default=None),
        sm_clock_mean_mhz=statistics.fmean(clocks) if clocks else None,
        sm_clock_max_mhz=max(clocks, default=None),
        temperature_max_c=max(temperature, default=None),
        power_mean_w=statistics.fmean(power) if power else None,
        power_max_w=max(power, default=None),
        pcie_gen_max=_extreme(window, "pcie_gen", max),
        pcie_width_min=_extreme(window, "pcie_width", min),
        event_reasons=reasons,
        fault_reasons=apply(nvml.fault_reasons, reasons),
    )


def _reasons(samples: list[_Sample], stopped: str | None) -> list[str] | NotAvailable:
    """The event reasons of all samples together; not available if one sample lacks them or sampling was cut short."""
    if stopped is not None:
        return NotAvailable(f"NVML stopped after {counted(len(samples), 'sample')}: {stopped}")
    union = apply(lambda bits: functools.reduce(operator.or_, bits, 0), all_or_why(sample.reasons for sample in samples))
    return apply(nvml.event_reason_names, union)


def _sample(handle: Any) -> _Sample:
    part = NvmlPart(handle)
    reasons = nvml.EVENT_REASONS_NOW(part)
    return _Sample(at_s=time.monotonic(), reasons=reasons, values={name: _OF_STATE[name].read(part) for name in SAMPLED})


def _extreme(samples: list[_Sample], key: str, choose: Callable[[list[float]], float]) -> int | NotAvailable:
    """The most or the least of what was given; not available where too many samples were refused."""
    given = _seen(samples, key)
    if len(given) >= WATCHED * len(samples):
        return int(choose(given))
    return next(value for sample in samples if isinstance(value := sample.values[key], NotAvailable))


def _seen(samples: list[_Sample], key: str) -> list[float]:
    return [value for sample in samples if not isinstance(value := sample.values[key], NotAvailable)]


# --- A group in brief: as small for a thousand ranks as for two ---

UNKNOWN = "unknown_"
_BITS = {name: bit for bit, name in EVENT_REASONS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTelemetry:
    """Lowest and highest of all ranks' means (temperature: highest maximum), with the rank of the slowest and the hottest.

    ``event_reasons`` holds the ranks of each reason, for example ``0-3, 7``. None: no GPU gives the value.
    """

    sm_clock_lowest_mhz: float | None
    sm_clock_highest_mhz: float | None
    lowest_clock_rank: int | None
    power_lowest_w: float | None
    power_highest_w: float | None
    temperature_highest_c: float | None
    hottest_rank: int | None
    event_reasons: dict[str, str]

    @property
    def evidence(self) -> dict[str, Any]:
        """What explains a value: the slowest clock, the hottest GPU, and the ranks of each event reason."""
        found: dict[str, Any] = {}
        if self.sm_clock_lowest_mhz is not None:
            slowest = f"{self.sm_clock_lowest_mhz:.0f} (rank {self.lowest_clock_rank})"
            found["SM MHz"] = f"{slowest} to {self.sm_clock_highest_mhz:.0f}"
        if self.power_lowest_w is not None:
            found["W"] = f"{self.power_lowest_w:.0f} to {self.power_highest_w:.0f}"
        if self.temperature_highest_c is not None:
            found["C"] = f"up to {self.temperature_highest_c:.0f} (rank {self.hottest_rank})"
        found["event reasons"] = [f"{name} (rank {ranks})" for name, ranks in self.event_reasons.items()]
        return found


def to_row(rank: int, telemetry: Telemetry | None) -> list[float]:
    """One rank's telemetry as numbers, for a collective; NaN for a missing value."""
    if telemetry is None:
        return [float(rank), 0.0, *[math.nan] * 4]
    reasons = or_none(telemetry.event_reasons) or []  # evidence of a rate, which no criterion judges
    bits = sum(_BITS.get(name) or int(name.removeprefix(UNKNOWN), 16) for name in reasons)
    values = (telemetry.sm_clock_mean_mhz, telemetry.power_mean_w, telemetry.temperature_max_c)
    return [float(rank), 1.0, float(bits), *(math.nan if value is None else float(value) for value in values)]


def from_rows(rows: Sequence[Sequence[float]]) -> GroupTelemetry | None:
    """All ranks' rows in brief; None if no rank has telemetry."""
    watched = [row for row in rows if row[1]]
    if not watched:
        return None
    clocks, power, temperature = ({int(row[0]): row[at] for row in watched if not math.isnan(row[at])} for at in (3, 4, 5))
    reasons = grouped((name, int(rank)) for rank, _, bits, *_ in watched for name in event_reason_names(int(bits)))
    slowest = min(clocks, key=lambda rank: clocks[rank], default=None)
    hottest = max(temperature, key=lambda rank: temperature[rank], default=None)
    return GroupTelemetry(
        sm_clock_lowest_mhz=min(clocks.values(), default=None),
        sm_clock_highest_mhz=max(clocks.values(), default=None),
        lowest_clock_rank=slowest,
        power_lowest_w=min(power.values(), default=None),
        power_highest_w=max(power.values(), default=None),
        temperature_highest_c=max(temperature.values(), default=None),
        hottest_rank=hottest,
        event_reasons={name: ranges(ranks) for name, ranks in reasons.items()},
    )
