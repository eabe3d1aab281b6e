"""Occupancy of a GPU: the real binding over the simulated NVML, in processes of their own."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory import occupancy
from pytest_gpucluster.inventory.occupancy import GpuProcess, Occupancy
from pytest_gpucluster.protocol import plain_data
from tests.support.nvml_simulator import Readers, build, readers

if TYPE_CHECKING:
    from collections.abc import Iterator

READING = """
import dataclasses, sys, time
from pytest_gpucluster.inventory import nvml_calls
from pytest_gpucluster.inventory.occupancy import read_occupancy
start_s = time.monotonic()
try:
    found = dataclasses.asdict(read_occupancy(**arguments))
except nvml_calls.NvmlError as error:
    found = {"raised": str(error)}
answer = [found, time.monotonic() - start_s, "torch" in sys.modules]
"""
GIB = 2**30
HIDDEN = "held by nobody who can be seen from here (another container?)"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    """One process that reads all scenarios."""
    with readers(build(tmp_path_factory.mktemp("nvml"))) as started:
        yield started


def read(simulated: Readers, scenario: str, *, code: str = READING, local_rank: int = 3, **arguments: Any) -> tuple[Any, float]:
    """The Occupancy that the worker of ``local_rank`` reads, or the error's text; and the seconds that it took."""
    code = f"arguments = { {'pause_s': 0.05, **arguments}!r}\n{code}"
    found, seconds, torch_loaded = simulated.answer(code, scenario, LOCAL_RANK=str(local_rank))
    assert not torch_loaded
    if "raised" in found:
        return found["raised"], seconds
    found["processes"] = found["processes"] and [GpuProcess(**process) for process in found["processes"]]
    return Occupancy(**found), seconds


def test_idle(simulated: Readers) -> None:
    """The driver's own memory is no occupancy; one reading is enough."""
    found, seconds = read(simulated, "", pause_s=30)
    assert (found.holders, found.text, found.processes, found.utilization_percent) == (0, "", [], 0)
    assert found.memory_used_gib < 0.01 < found.memory_limit_gib == 0.25
    assert found.uuid.startswith("GPU-00000003")
    assert seconds < 30  # no pause


def test_process_is_named(simulated: Readers) -> None:
    """By pid, program and memory; the neighbours are idle."""
    scenario = f"3.process.0 4711 {25 * GIB}\nprogram.4711 /usr/bin/python3 train.py\n3.mem.used {26 * GIB}\n3.util 97"
    found, _ = read(simulated, scenario)
    assert found.holders == 1
    assert found.text == ", ".join(("25.0 GiB held by pid 4711 (python3)", f"1.0 GiB {HIDDEN}", "97 % busy"))
    assert read(simulated, scenario, local_rank=2)[0].holders == 0


def test_a_client_of_mps_is_a_process(simulated: Readers) -> None:
    """NVML lists the clients of an MPS daemon apart; one that is in both lists counts once."""
    scenario = f"3.mps.0 4711 {GIB}\nprogram.4711 /usr/bin/python3 serve.py"
    assert read(simulated, scenario)[0].text == "1.0 GiB held by pid 4711 (python3)"
    assert read(simulated, f"{scenario}\n3.process.0 4711 {GIB}")[0].holders == 1
    refused = f"{scenario}\nerr.nvmlDeviceGetMPSComputeRunningProcesses 3"
    assert read(simulated, refused)[0].holders == 0


def test_processes_that_nvml_does_not_tell(simulated: Readers) -> None:
    """In a container: memory in use decides."""
    found, _ = read(simulated, f"3.mem.used {24 * GIB}\nerr.nvmlDeviceGetComputeRunningProcesses 3")
    assert (found.processes, found.holders) == (None, 1)
    assert found.text == f"24.0 GiB {HIDDEN}"


def test_process_of_which_little_is_told(simulated: Readers) -> None:
    """Neither program nor memory: the pid is enough, and memory is not blamed on anybody else."""
    found, _ = read(simulated, f"3.process.0 4711 -1\n3.mem.used {24 * GIB}")
    assert found.holders == 1
    assert found.text == "memory held by pid 4711 (its program cannot be seen from here)"


def test_bare_context_of_another(simulated: Readers) -> None:
    """Half a GiB is a CUDA context: its process may begin to compute at any moment."""
    assert read(simulated, f"3.mem.used {GIB // 2}")[0].holders == 1
    assert read(simulated, f"3.mem.used {GIB // 5}")[0].holders == 0


def test_work_without_memory(simulated: Readers) -> None:
    """Utilization alone decides where nothing else is seen; a monitor's few per cent do not."""
    assert read(simulated, "3.util 60")[0].text == "60 % busy"
    assert read(simulated, "3.util 4")[0].holders == 0


def test_driver_that_counts_its_own_as_used(simulated: Readers) -> None:
    """Before 510 there is one number for both: the limit allows for it."""
    old = "err.nvmlDeviceGetMemoryInfo_v2 13\n"
    found, _ = read(simulated, old)
    assert (found.holders, found.memory_limit_gib) == (0, 1.25)
    assert found.memory_used_gib > 0.5
    assert read(simulated, f"{old}3.mem.used {GIB}")[0].holders == 1


def test_nothing_is_told(simulated: Readers) -> None:
    """Unknown is not idle; and a GPU that is lost is NVML's error."""
    silent = "".join(f"err.nvmlDeviceGet{name} 3\n" for name in ("MemoryInfo", "ComputeRunningProcesses", "UtilizationRates"))
    assert "gives neither memory in use" in read(simulated, silent)[0]
    assert "GPU is lost" in read(simulated, "3.err.nvmlDeviceGetMemoryInfo 15")[0]


def test_busy_gpu_is_looked_at_again(simulated: Readers) -> None:
    """A process that has just ended holds memory a moment longer: three readings with two pauses, no more."""
    found, seconds = read(simulated, f"3.mem.used {24 * GIB}", looks=3, pause_s=0.3)
    assert found.holders == 1
    assert 0.6 <= seconds < 60


def test_gpu_that_becomes_idle_is_idle(simulated: Readers) -> None:
    """The last look counts."""
    frees = "import os, threading; threading.Timer(0.5, lambda: open(os.environ['FAKE_NVML'], 'w').close()).start()\n" + READING
    found, seconds = read(simulated, f"3.mem.used {24 * GIB}", code=frees, looks=200, pause_s=0.1)
    assert found.memory_used_gib < 0.01
    assert 0.3 < seconds < 60


def test_many_processes_are_counted() -> None:
    """All count, three are named; the value crosses as plain data and back."""
    processes = [GpuProcess(pid=pid, name="python3", memory_gib=1.0) for pid in range(1, 6)]
    found = Occupancy(uuid="GPU-1", memory_used_gib=5.0, memory_limit_gib=0.25, processes=processes, utilization_percent=None)
    again = plain_data.from_plain(json.loads(json.dumps(plain_data.to_plain(found))))
    assert dataclasses.asdict(again) == dataclasses.asdict(found)
    assert again.holders == 5
    assert again.text.endswith("1.0 GiB held by pid 3 (python3), 2 more processes")


@pytest.mark.parametrize(
    ("memory_gib", "text"),
    [(None, "memory held by pid 861"), (0.001, "less than 0.1 GiB held by pid 861"), (23.44, "23.4 GiB held by pid 861")],
)
def test_no_process_holds_nothing(memory_gib: float | None, text: str) -> None:
    """Where NVML does not give the bytes, no number is shown; a small one is not shown as zero."""
    assert GpuProcess(pid=861, name="python3", memory_gib=memory_gib).text == f"{text} (python3)"


@pytest.mark.parametrize(("held", "memory_gib"), [(None, None), (0, None), (2**30, 1.0)])
def test_zero_bytes_are_not_known(held: int | None, memory_gib: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVML says them in a virtual machine: a process with a CUDA context holds some."""
    monkeypatch.setattr("pytest_gpucluster.inventory.gpu_index.read_process_name", lambda _pid: "python3")
    assert occupancy.describe_process(861, held).memory_gib == memory_gib
