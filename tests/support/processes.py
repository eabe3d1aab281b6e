"""Processes that tests start: found by a mark in their environment, killed by pid; and free ports for them."""

from __future__ import annotations

import contextlib
import random
import socket
import time

import psutil

MARK = "GPUCLUSTER_TEST_LAUNCH"
"""Variable that every process of a launch inherits, so that none is overlooked when the launch is over."""
POLL_S = 0.05


def free_port() -> int:
    """A TCP port that no process uses now, below the ports that the kernel gives to outgoing connections.

    No other test process is given the same port as long as this one lives: each holds a name of the kernel for each of its
    ports. The program that is to use the port may take seconds to open it.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            claim.bind(f"\0gpucluster-test-port-{port}")
            with socket.create_server(("", port)):
                claim.detach()  # the name is free again when this process ends
                return port
        claim.close()
    raise OSError("no free port")


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with this mark; zombies do not count."""
    found = []
    for pid in psutil.pids():  # process_iter() keeps objects: one whose number another process has by now refuses to be killed
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_marked(mark: str) -> None:
    """SIGKILL every process with this mark until none is left."""
    while left := marked(mark):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)


def command_of(process: psutil.Process) -> str:
    """The command line; empty for a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).rstrip()  # behind that of a fork is room for a longer one
    return ""
