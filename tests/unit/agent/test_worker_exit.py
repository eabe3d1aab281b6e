"""What the end of a worker blames."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent import worker_exit

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's counters, in a file of this test."""
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 12\noom_kill 7\nnr_dirty 0\n")
    monkeypatch.setattr(worker_exit, "VMSTAT", file)
    return file


@pytest.mark.parametrize(("before", "part"), [(6, "host"), (5, "host"), (7, "unknown"), (None, "unknown")])
def test_sigkill_is_the_kernels_only_if_its_count_grew(vmstat: Path, before: int | None, part: str) -> None:
    """Otherwise somebody else killed it, and nobody knows who."""
    del vmstat
    words, blamed = worker_exit.describe_end(signal.SIGKILL, oom_kills_before=before)
    assert words.startswith("the worker died: SIGKILL")
    assert ("OOM killer" in words, blamed) == (part == "host", part)


@pytest.mark.parametrize("content", ["", "oom_kill\n", "oom_kill many\n", "nr_dirty 1\n", None])
def test_a_count_that_cannot_be_read(vmstat: Path, content: str | None) -> None:
    """An old kernel, another system: it cannot be told."""
    vmstat.unlink() if content is None else vmstat.write_text(content)
    assert worker_exit.read_oom_kills() is None
    assert worker_exit.describe_end(signal.SIGKILL, oom_kills_before=0)[1] == "unknown"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM])
def test_a_crash_blames_nobody(vmstat: Path, number: int) -> None:
    """Also beside the kernel's own kills of others."""
    del vmstat
    assert worker_exit.describe_end(number, oom_kills_before=0)[1] == "unknown"


def test_an_exit_code_is_the_functions_own(vmstat: Path) -> None:
    """Something called ``exit``."""
    del vmstat
    assert worker_exit.describe_end(3 << 8, oom_kills_before=7) == ("the worker left with exit code 3", "software")
