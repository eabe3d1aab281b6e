"""Jobs of the files in deploy/slurm, submitted to a real Slurm (:mod:`tests.support.real_slurm`)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.support import REPOSITORY
from tests.support.launching import DEADLINE_S, environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.real_slurm import RealSlurm

FILES = REPOSITORY / "deploy" / "slurm"
ENDS_S = 2 * DEADLINE_S
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0")
SOON_S = 10
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE")


class Job:
    """A job of ``accept.sbatch`` that rehearses on two nodes, and its folder of results. ``OPTIONS`` are more of sbatch's."""

    def __init__(self, slurm: RealSlurm, folder: Path, *arguments: str, file: str = "accept.sbatch", **variables: str) -> None:
        self.slurm, self.results, self.output = slurm, folder / "results", folder / "job.out"
        bin_folder = folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        for name, started in (("gpucluster", "-m pytest_gpucluster.cli"), ("python", "")):
            command = bin_folder / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} {started} "$@"\n', encoding="utf-8")
            command.chmod(0o755)
        kept = {name: value for name, value in environment(measured=False).items() if not name.startswith("SLURM")}
        given = {
            **kept,
            **slurm.environment,
            "PATH": f"{bin_folder}{os.pathsep}{slurm.environment['PATH']}",
            "PYTHONPATH": kept["PYTHONPATH"],
            "RESULTS": str(self.results),
            "PROFILE": "rehearsal",
            "GATE": "0",
            "MASTER_ADDR": "127.0.0.1",
            "LAUNCH_OPTIONS": "--nproc-per-node=1 --master-addr=127.0.0.1",
            **variables,
        }
        options = (f"--output={self.output}", *TWO_NODES, *given.pop("OPTIONS", "").split())
        answer = subprocess.run(
            ["sbatch", "--parsable", *options, str(FILES / file), *arguments],
            env=given, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        self.number = answer.stdout.strip()

    def record(self) -> str:
        """What Slurm says of it."""
        return self.slurm.ask("scontrol", "-o", "show", "job", self.number)

    @property
    def state(self) -> str:
        """``RUNNING``, ``COMPLETED`` and so on."""
        return self.record().partition(" JobState=")[2].split()[0]

    @classmethod
    def known(cls, slurm: RealSlurm, number: str, output: Path, results: Path) -> Job:
        """A job that another one has submitted."""
        job = cls.__new__(cls)
        job.slurm, job.number, job.output, job.results = slurm, number, output, results
        return job

    def wait(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until something holds."""
        ends_s = time.monotonic() + ENDS_S
        while not holds():
            assert time.monotonic() < ends_s, f"not {what}: {self.record()}\n{self.told()}"
            time.sleep(0.3)

    def end(self) -> str:
        """The state it ends in."""
        self.wait("ended", lambda: self.state in ENDED)
        return self.state

    def told(self) -> str:
        """Its output."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def requeued(self) -> None:
        """Wait until Slurm has requeued it and started it again, in 10 s where Slurm would wait 2 minutes.

        Slurm sets the time anew when the last process of the old start is gone, so it is changed until it stays. A start at
        once would fail: slurmd takes no credential of a job that it has revoked in the same seconds ("Job credential revoked").
        """

        def starts() -> bool:
            told = self.record()
            waits_s = _local_s(told.partition(" EligibleTime=")[2].split()[0]) - time.time()
            if " Restarts=0 " not in told and self.state == "PENDING" and waits_s > 2 * SOON_S:
                self.slurm.ask("scontrol", "update", f"JobId={self.number}", f"StartTime=now+{SOON_S}")
            return " Restarts=0 " not in told and self.state in ("RUNNING", "COMPLETED")

        self.wait("requeued and started", starts)

    def report(self) -> dict[str, Any]:
        """results.json."""
        read: dict[str, Any] = json.loads((self.results / "results.json").read_text(encoding="utf-8"))
        return read


def _local_s(text: str) -> float:
    """A time of Slurm's as seconds since the epoch; what is no time yet is far away."""
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) if text[:1].isdigit() else math.inf
