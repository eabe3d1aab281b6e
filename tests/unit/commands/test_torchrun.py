"""torchrun without a traceback below the verdict."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import Launch, environment

if TYPE_CHECKING:
    from pathlib import Path

TORCHRUN = (sys.executable, "-m", "pytest_gpucluster.commands.torchrun", "--standalone", "--nproc-per-node=1")
SAYS_WHY = """\
from pytest_gpucluster.config.torchrun import write_error_file
write_error_file("verdict REJECTED", {code})
raise SystemExit({code})
"""
WORKERS = [
    ("raise SystemExit(0)", 0, ""),
    (SAYS_WHY.format(code=1), 1, ""),
    (SAYS_WHY.format(code=4), 4, ""),
    ("import os; os.kill(os.getpid(), 9)", 137, "Signal 9 (SIGKILL)"),
    ("raise SystemExit(3)", 3, "exitcode  : 3"),
]
"""What a rank does; what the shell sees; what is shown, where the rank itself could show nothing."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_without_a_traceback(number: signal.Signals, tmp_path: Path) -> None:
    """As from a scheduler, or by Ctrl-C: the shell sees 128 and the signal, and one line says which."""
    quiet = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    worker = f"{quiet}; import pathlib, time; pathlib.Path('begun').touch(); time.sleep(600)"
    (tmp_path / "worker.py").write_text(worker, encoding="utf-8")
    running = Launch(command=[*TORCHRUN, "worker.py"], cwd=tmp_path, environment=environment(measured=False)).start()
    running.until((tmp_path / "begun").exists, what="worker")
    os.kill(running.pid, number)
    assert running.end() == 128 + number, running.output
    assert "Traceback" not in running.output
    assert running.output.splitlines()[-1] == f"torchrun: ended by {number.name}"
    running.gone()


@pytest.mark.parametrize(("worker", "code", "shown"), WORKERS)
def test_torchrun_ends_without_a_traceback(worker: str, code: int, shown: str, tmp_path: Path) -> None:
    """The verdict stays the last thing on the screen, and the exit code is that of the rank."""
    (tmp_path / "worker.py").write_text(worker, encoding="utf-8")
    launch = Launch(command=[*TORCHRUN, "worker.py"], cwd=tmp_path, environment=environment(measured=False)).start()
    assert launch.end() == code, launch.output
    assert "Traceback" not in launch.output
    assert shown in launch.output
    assert bool(shown) == ("Root Cause" in launch.output)
