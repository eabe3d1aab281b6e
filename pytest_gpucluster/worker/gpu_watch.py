"""Who is on this worker's GPU: read before and after each measurement, and every half second while it runs."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pytest_gpucluster.inventory import gpu_index, nvml_calls
from pytest_gpucluster.inventory.occupancy import GpuProcess, OwnProcesses, belongs_to_run, describe_process
from pytest_gpucluster.protocol.messages import ForeignProcess

INTERVAL_S = 0.5
ANSWER_S = 3.0
"""NVML answers in less than a millisecond. A driver that has not answered for so long hangs, and is left alone."""
LOOKS, PAUSE_S = 5, 0.5
"""A process that has just ended, such as the worker before this one, is listed for another moment."""
When = Literal["before", "during", "after"]
Answer = queue.Queue[list[GpuProcess]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    """A call that is measuring, and the pids that were reported in it."""

    call: str
    reported: set[int] = field(default_factory=set)


class GpuWatch:
    """Reports the foreign processes on one GPU, each once in a measurement.

    NVML is read in a thread, so that a driver that hangs cannot hang the measurement. Where NVML does not give the processes
    or answers with an error, the worker prints that once, and measures without these readings.
    """

    def __init__(self, report: Callable[[ForeignProcess], None]) -> None:
        """``report`` gets each foreign process, from the caller's thread or from the one that reads NVML."""
        self._report = report
        self._own = OwnProcesses(os.getpid(), belongs_to_run)
        self._has_context = False
        self._has_given_up = False
        self._thread: threading.Thread | None = None
        self._requests: queue.Queue[Answer] = queue.Queue()
        self._measurement: _Measurement | None = None

    @contextlib.contextmanager
    def creating_context(self, uuid: str) -> Iterator[None]:
        """Around the creation of this process's CUDA context: what was on the GPU before it is not this process."""
        self._thread = threading.Thread(target=self._serve, args=(uuid,), name="gpu-watch", daemon=True)
        self._thread.start()
        self._look()
        yield
        self._has_context = True
        self._look()

    @contextlib.contextmanager
    def measuring(self, call: str) -> Iterator[None]:
        """Around the measurement of the call with this id; where somebody is there already, it begins up to 2 s later."""
        left = LOOKS - 1
        while (found := self._look()) and left:
            left -= 1
            time.sleep(PAUSE_S)
        self._measurement = measurement = _Measurement(call=call)
        self._report_each(found, "before", measurement)
        try:
            yield
        finally:
            self._report_each(self._look(), "after", measurement)
            self._measurement = None

    def _look(self) -> list[GpuProcess]:
        """The foreign processes right now; none if NVML does not answer."""
        if self._has_given_up or self._thread is None or not self._thread.is_alive():  # a forked copy has no threads
            return []
        answer: Answer = queue.Queue()
        self._requests.put(answer)
        try:
            return answer.get(timeout=ANSWER_S)
        except queue.Empty:
            self._give_up(f"NVML has not answered for {ANSWER_S:g} s")
            return []

    def _give_up(self, why: str) -> None:
        self._has_given_up = True
        print(f"gpucluster: who comes to this GPU is not known: {why}", flush=True)  # noqa: T201 -- goes to the rank's log

    def _report_each(self, found: list[GpuProcess], when: When, measurement: _Measurement) -> None:
        for process in found:
            if process.pid not in measurement.reported:
                measurement.reported.add(process.pid)
                self._report(ForeignProcess(call=measurement.call, when=when, **asdict(process)))

    # The thread.

    def _serve(self, uuid: str) -> None:
        try:
            with nvml_calls.session():
                handle = gpu_index.handle_of(uuid)
                while not self._has_given_up:
                    self._answer_or_sample(handle)
        except nvml_calls.NvmlError as error:
            self._give_up(str(error))
        while not self._requests.empty():
            self._requests.get().put([])

    def _answer_or_sample(self, handle: Any) -> None:
        try:
            answer = self._requests.get(timeout=INTERVAL_S)
        except queue.Empty:
            measurement = self._measurement
            if measurement is not None:
                self._report_each(self._read(handle), "during", measurement)
        else:
            answer.put(self._read(handle))

    def _read(self, handle: Any) -> list[GpuProcess]:
        try:
            listed = gpu_index.read_compute_processes(handle)
        except nvml_calls.NvmlError as error:
            self._give_up(str(error))
            return []
        if listed is None:
            self._give_up("NVML does not give the processes on it")
            return []
        foreign = self._own.foreign_among([pid for pid, _ in listed], has_context=self._has_context)
        return [describe_process(pid, held) for pid, held in listed if pid in foreign]
