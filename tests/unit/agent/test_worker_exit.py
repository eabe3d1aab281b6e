"""What the end of a worker blames."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pytest_gpucluster.agent import spawner, worker_process
from pytest_gpucluster.agent.worker_process import OomKills

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's counters, in a file of this test."""
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 12\noom_kill 7\nnr_dirty 0\n")
    monkeypatch.setattr(worker_process, "VMSTAT", file)
    monkeypatch.setattr(worker_process, "OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(worker_process, "CGROUPS", tmp_path / "cgroups")
    return file


def count(host: int | None, cgroup: int | None = None) -> OomKills:
    """What was counted."""
    return OomKills(host=host, cgroup=cgroup)


@pytest.mark.parametrize(("before", "part"), [(6, "host"), (5, "host"), (7, "unknown"), (None, "unknown")])
def test_sigkill_is_the_kernels_only_if_its_count_grew(vmstat: Path, before: int | None, part: str) -> None:
    """Otherwise somebody else killed it, and nobody knows who."""
    del vmstat
    words, blamed = worker_process.describe_end(signal.SIGKILL, oom_kills_before=count(before))
    assert words.startswith("the worker died: SIGKILL")
    assert ("OOM killer" in words, blamed) == (part == "host", part)


@pytest.mark.parametrize("content", ["", "oom_kill\n", "oom_kill many\n", "nr_dirty 1\n", None])
def test_a_count_that_cannot_be_read(vmstat: Path, content: str | None) -> None:
    """An old kernel, another system: it cannot be told."""
    vmstat.unlink() if content is None else vmstat.write_text(content)
    assert worker_process.read_oom_kills() == count(None)
    assert worker_process.describe_end(signal.SIGKILL, oom_kills_before=count(0))[1] == "unknown"


V2, V1 = "0::/pod/box\n", "12:pids:/pod\n4:cpu,memory:/pod/box\n0::/\n"
CASES = {
    "v2": (V2, "pod/box/memory.events", "low 0\noom 3\noom_kill 2\n"),
    "v2, seen from a container": (V2, "memory.events", "oom_kill 2\n"),
    "v2, a root of its own": ("0::/\n", "memory.events", "oom_kill 2\n"),
    "v1": (V1, "memory/pod/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    "v1, seen from a container": (V1, "memory/memory.oom_control", "oom_kill 2\n"),
}


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_kill_in_the_own_cgroup(vmstat: Path, tmp_path: Path, case: str, host: bool) -> None:  # noqa: FBT001
    """Told as such, also where the host's count cannot be read; an unchanged count blames nobody."""
    cgroup, name, content = CASES[case]
    file = tmp_path / "cgroups" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "cgroup").write_text(cgroup)
    file.write_text(content)
    if not host:
        vmstat.unlink()
    now = count(7 if host else None, 2)
    assert worker_process.read_oom_kills() == now
    assert worker_process.describe_end(signal.SIGKILL, oom_kills_before=now)[1] == "unknown"
    words, part = worker_process.describe_end(signal.SIGKILL, oom_kills_before=count(now.host, 1))
    assert ("out of host memory" in words, "ended 1 in this cgroup" in words, part) == (True, True, "host")


@pytest.mark.parametrize("content", ["", "what\n", "0::\n", "4:memory\n", "0::/../../etc\n", "4:memory:/\udce9\n"])
def test_a_cgroup_that_cannot_be_read(vmstat: Path, tmp_path: Path, content: str) -> None:
    """The host's count remains."""
    del vmstat
    (tmp_path / "cgroup").write_text(content, encoding="utf-8", errors="surrogateescape")
    assert worker_process.read_oom_kills() == count(7)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM])
def test_a_crash_blames_nobody(vmstat: Path, number: int) -> None:
    """Also beside the kernel's own kills of others."""
    del vmstat
    assert worker_process.describe_end(number, oom_kills_before=count(0))[1] == "unknown"


def test_an_exit_code_is_the_functions_own(vmstat: Path) -> None:
    """Something called ``exit``."""
    del vmstat
    assert worker_process.describe_end(3 << 8, oom_kills_before=count(7)) == ("the worker left with exit code 3", "software")


def test_a_pause_is_no_worker_that_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stood still while a worker was killed: its rank was lost for the run, with "does not end on SIGKILL"."""
    now_s = [100.0]
    looks: list[list[tuple[int, int]]] = [[], [(4711, 9)]]

    def exits(*, within_s: float) -> list[tuple[int, int]]:
        now_s[0] += within_s + 30.0
        return looks.pop(0) if looks else []

    monkeypatch.setattr(spawner, "kill_worker", lambda _pid: None)
    stopped = cast("spawner.Spawner", SimpleNamespace(exits=exits))
    beats: list[float] = []
    assert spawner.kill_and_reap(stopped, 4711, within_s=10.0, meanwhile=lambda: beats.append(now_s[0])) == 9
    assert spawner.kill_and_reap(stopped, 4711, within_s=10.0, meanwhile=lambda: beats.append(now_s[0])) is None
    assert len(beats) == 2 + 10.0 / spawner.POLL_S
