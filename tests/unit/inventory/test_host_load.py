"""What others do on a host: by a planted /proc before, while and after, and by processes that really keep a CPU busy."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory import host_load
from pytest_gpucluster.inventory.host_load import HostLoad, HostProcess, HostWatch
from pytest_gpucluster.protocol.plain_data import from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OWN, AGENT, PYTEST, SHELL, OTHER_WORKER, CHILD, BURNER = 100, 101, 102, 50, 110, 120, 4711
TICKS = 100
STORE = json.dumps({"address": "10.0.0.1:29500"})


class PlantedHost:
    """A /proc whose clock the test moves: each process uses CPU seconds, and the host counts them all."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, cpus: int = 16) -> None:
        self.proc, self.cpus, self.now_s = folder / "proc", cpus, 0.0
        self.resctrl = folder / "resctrl"
        self.used: dict[int, float] = {}
        self.busy = self.stolen = self.memory_waited = 0.0
        self.memory_bytes = 0
        (self.proc / "pressure").mkdir(parents=True)
        monkeypatch.setattr("pytest_gpucluster.inventory.host_load.time.monotonic", lambda: self.now_s)
        self.rates: dict[int, float] = {}
        self.unseen = self.stealing = self.waiting = 0.0
        self.gb_s = 0.0
        monkeypatch.setattr(host_load.time, "sleep", self.run)
        for pid, parent, session in (
            (SHELL, 1, SHELL), (PYTEST, SHELL, SHELL), (AGENT, PYTEST, SHELL), (OWN, AGENT, OWN),
            (OTHER_WORKER, AGENT, OTHER_WORKER), (CHILD, OTHER_WORKER, OTHER_WORKER), (BURNER, SHELL, BURNER),
        ):  # fmt: skip
            self.start(pid, parent=parent, session=session)
        for pid in (AGENT, OWN, OTHER_WORKER):
            (self.proc / str(pid) / "cmdline").write_text(f"python\0-m\0pytest_gpucluster.agent.main\0{STORE}\0")
        monkeypatch.setattr(host_load.os, "getpid", lambda: 1 << 22)  # not the planted one, whose command line is in the folder
        self.write()

    def start(self, pid: int, *, parent: int, session: int, name: str = "stress (ng) x") -> None:
        """Plant a process."""
        self.used[pid] = 0.0
        folder = self.proc / str(pid)
        folder.mkdir()
        (folder / "cmdline").write_text("stress-ng\0")
        (folder / "head").write_text(f"{pid} ({name}) R {parent} {session} {session}")

    def end(self, pid: int) -> None:
        """A process ends; another one has its pid later."""
        for file in (self.proc / str(pid)).iterdir():
            file.unlink()
        (self.proc / str(pid)).rmdir()
        del self.used[pid]

    def run(self, seconds: float) -> None:
        """Let time pass at the planted rates."""
        self.now_s += seconds
        for pid, cpus in self.rates.items():
            if pid in self.used:
                self.used[pid] += cpus * seconds
            self.busy += cpus * seconds
        self.busy += self.unseen * seconds
        self.stolen += self.stealing * seconds
        self.memory_waited += self.waiting * seconds
        self.memory_bytes += int(self.gb_s * 1e9 * seconds)
        self.write()

    def write(self) -> None:
        """Write every file."""
        numbers = [int(value * TICKS) for value in (self.busy, 0, 0, 1000, 0, 0, 0, self.stolen, 0, 0)]
        lines = [f"cpu  {' '.join(map(str, numbers))}", *(f"cpu{number} 0 0 0 0" for number in range(self.cpus)), "intr 1"]
        (self.proc / "stat").write_text("\n".join(lines))
        (self.proc / "loadavg").write_text("1.0 1.0 1.0 9/300 4000")
        waited = int(self.memory_waited * 1e6)
        (self.proc / "pressure" / "memory").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited}\nfull total=0\n")
        for pid, seconds in self.used.items():
            folder = self.proc / str(pid)
            head = (folder / "head").read_text()
            times = f"{int(seconds * TICKS)} 0 0 0 20 0 1 0 777"
            (folder / "stat").write_text(f"{head} 0 -1 0 0 0 0 0 {times} 0 0\n")

    def count_memory(self, text: str | None = None) -> None:
        """Plant resctrl's counts of memory traffic."""
        folder = self.resctrl / "mon_data" / "mon_L3_00"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mbm_total_bytes").write_text(str(self.memory_bytes) if text is None else text)

    def watch(self, meanwhile: Callable[[], None] | None = None, *, seconds: float = 3.0) -> HostLoad:
        """The load round a measurement of 3 s."""
        with HostWatch(proc=self.proc, resctrl=self.resctrl, own_pid=OWN) as watch:
            if meanwhile is not None:
                meanwhile()
            self.run(seconds)
        assert watch.load is not None
        return watch.load


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlantedHost:
    """A planted host of 16 CPUs, on which nobody works."""
    return PlantedHost(tmp_path, monkeypatch)


def test_an_idle_host_has_nobody(host: PlantedHost) -> None:
    """A monitor that takes half a CPU is no load."""
    host.rates = {BURNER: 0.5}
    load = host.watch()
    assert load.disturbed_by is None
    assert load.text == "idle: 0.5 of 16 CPUs busy with others"


def test_who_keeps_it_busy_is_named(host: PlantedHost) -> None:
    """Name, pid, owner and share of CPU; also a name with brackets and blanks."""
    host.rates = {BURNER: 8.0}
    load = host.watch()
    assert load.users[0].pid == BURNER
    assert load.users[0].name == "stress (ng) x"
    assert load.users[0].cpus == pytest.approx(8.0, abs=0.2)
    assert load.disturbed_by is not None
    assert f"stress (ng) x (pid {BURNER}, " in load.disturbed_by
    assert "8.0 of 16 CPUs busy with others" in load.disturbed_by


@pytest.mark.parametrize("pid", [OWN, AGENT, PYTEST, OTHER_WORKER, CHILD])
def test_what_this_run_does_is_no_load(host: PlantedHost, pid: int) -> None:
    """Its worker, its agent, another worker, what that one started, and the pytest that started the agents."""
    host.rates = {pid: 15.0}
    load = host.watch()
    assert load.disturbed_by is None, load
    assert load.users == []
    assert load.own_cpus == pytest.approx(15.0, abs=0.2)


def test_what_was_started_from_the_same_shell_is_of_others(host: PlantedHost) -> None:
    """The burner is a child of the shell in which pytest was started: still not of this run."""
    host.rates = {OWN: 10.0, BURNER: 4.0}
    load = host.watch()
    assert [one.pid for one in load.users] == [BURNER]
    assert load.disturbed_by is not None


def test_a_competitor_that_leaves_meanwhile_was_there(host: PlantedHost) -> None:
    """Also where nothing is left of it at the end."""
    host.rates = {BURNER: 8.0}

    def leave() -> None:
        host.run(3.0)
        host.rates.clear()
        host.end(BURNER)

    load = host.watch(leave)
    assert load.disturbed_by is not None
    assert "somebody who cannot be seen from here" in load.disturbed_by


def test_a_competitor_that_comes_meanwhile_is_named(host: PlantedHost) -> None:
    """A new process is counted from its begin; so is one that has the pid of another that ended."""

    def come() -> None:
        host.end(BURNER)
        host.start(9000, parent=1, session=9000, name="late")
        host.rates = {9000: 6.0}

    load = host.watch(come)
    assert load.users[0].name == "late"
    assert load.disturbed_by is not None


def test_a_moment_of_work_beside_the_measurement_is_no_load(host: PlantedHost) -> None:
    """Somebody who works before it alone did not disturb it."""
    host.rates = {BURNER: 8.0}
    load = host.watch(host.rates.clear, seconds=3.0)
    assert load.disturbed_by is None


def test_who_is_in_another_container_is_not_named(host: PlantedHost) -> None:
    """The kernel counts CPUs that no visible process has used."""
    host.unseen = 8.0
    load = host.watch()
    assert load.disturbed_by is not None
    assert load.disturbed_by.startswith("somebody who cannot be seen from here (8.0 of 16 CPUs")


def test_other_virtual_machines_show_by_stolen_time(host: PlantedHost) -> None:
    """As far as the hypervisor tells it."""
    host.stealing = 3.0
    load = host.watch()
    assert load.disturbed_by is not None
    assert "3.0 of them with other virtual machines" in load.disturbed_by


def test_the_two_ways_of_counting_differ(host: PlantedHost) -> None:
    """A triad on all CPUs is counted some per cent differently; that is nobody's load."""
    host.rates = {OWN: 15.0}
    host.unseen = 0.6
    assert host.watch().disturbed_by is None


def test_memory_traffic_and_pressure(host: PlantedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel counts them."""
    host.count_memory()
    run = host.run
    monkeypatch.setattr(host_load.time, "sleep", lambda seconds: (run(seconds), host.count_memory()))
    host.gb_s = 80.0
    assert "memory traffic of 80.0 GB/s" in str(host.watch().disturbed_by)
    host.gb_s = 0.0
    host.waiting = 0.5
    assert "tasks waited for memory 50 % of the time" in str(host.watch().disturbed_by)


def test_what_the_kernel_does_not_count_is_not_known(host: PlantedHost) -> None:
    """No PSI, no resctrl, or one that says so; without counts of CPUs there is no load at all."""
    (host.proc / "pressure" / "memory").unlink()
    host.write = lambda: None  # type: ignore[method-assign]
    load = host.watch()
    assert (load.memory_pressure_percent, load.cpu_pressure_percent, load.memory_gb_s) == (None, None, None)
    host.count_memory("Unavailable\n")
    assert host.watch().memory_gb_s is None
    (host.proc / "loadavg").unlink()
    assert host.watch().running is None
    (host.proc / "stat").unlink()
    with HostWatch(proc=host.proc, own_pid=OWN) as watch:
        pass
    assert watch.load is None


@pytest.mark.parametrize(
    ("cpus", "used", "busy"), [(2, 0.6, True), (2, 0.3, False), (8, 2.1, True), (128, 1.5, False), (128, 2.5, True)]
)
def test_how_much_is_busy(cpus: int, used: float, busy: bool) -> None:  # noqa: FBT001 -- a parameter
    """Two CPUs, or a quarter of a small host."""
    load = HostLoad(
        total_cpus=cpus, while_cpus=used, idle_cpus=0.0, stolen_cpus=0.0, own_cpus=1.0, running=0, cpu_pressure_percent=None,
        memory_pressure_percent=None, memory_gb_s=None, users=[],
    )  # fmt: skip
    assert (load.disturbed_by is not None) is busy


def test_it_crosses_to_the_controller() -> None:
    """As plain data."""
    load = HostLoad(
        total_cpus=2, while_cpus=1.0, idle_cpus=0.5, stolen_cpus=0.0, own_cpus=1.0, running=None, cpu_pressure_percent=1.0,
        memory_pressure_percent=None, memory_gb_s=None, users=[HostProcess(pid=1, name="a", user="root", cpus=1.0)],
    )  # fmt: skip
    assert from_plain(json.loads(json.dumps(to_plain(load)))) == load


# Processes that really work: the reader is a process of its own, because what this one starts is its own.

READER = """
import json, sys, time
from pytest_gpucluster.inventory.host_load import HostWatch
deadline_s = time.monotonic() + 60
found = []
while time.monotonic() < deadline_s and not set(map(int, sys.argv[1:])) <= set(found):
    with HostWatch() as watch:
        time.sleep(0.5)
    found = [one.pid for one in watch.load.users]
print(json.dumps([found, watch.load.disturbed_by]))
"""
BURN = "import threading\nfor _ in range(2):\n    threading.Thread(target=lambda: [x for x in iter(int, 1)]).start()\n"


@pytest.fixture
def burner() -> Iterator[Any]:
    """A process whose threads keep a CPU busy."""
    process = subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_threads_that_keep_a_cpu_busy_are_found(burner: Any) -> None:
    """A real process of another session is named; the reader's own work is not."""
    command = [sys.executable, "-c", READER, str(burner.pid)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True)
    found, disturbed_by = json.loads(ran.stdout)
    assert burner.pid in found
    assert disturbed_by is not None
