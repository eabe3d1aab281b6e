"""A real Slurm of a test's own: munged, slurmctld and slurmd in one folder, on loopback, with this host as every node.

The programs come from the PATH, or from the folder that ``GPUCLUSTER_TEST_SLURM`` names (``noxfile.py -s slurm`` unpacks
Debian's packages there; nothing is installed). The node has no GPU: without slurmdbd, the Slurm of Debian 12 takes no GRES.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = "GPUCLUSTER_TEST_SLURM"
HOST = platform.node().partition(".")[0]
MEMORY_MIB = 1000
COMES_UP_S = 60.0
ENDS_S = 60.0
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
CONF = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=60
SlurmdTimeout=30
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={memory_mib} State=UNKNOWN"


@dataclass(slots=True)
class RealSlurm:
    """The folder of a running Slurm, and the variables with which its commands find it."""

    folder: Path
    programs: dict[str, str]
    environment: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints; both streams."""
        answer = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=ENDS_S, check=False, cwd=self.folder
        )
        return answer.stdout + answer.stderr

    def begin(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon that stays in the foreground."""
        with (self.folder / f"{Path(command[0]).name}.log").open("ab") as log:
            child = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.running.append(child)
        return child

    def begin_node(self, name: str) -> None:
        """Start the slurmd of a node, under that hostname where this host has another one."""
        command = (
            self.programs["slurmd"],
            "-D",
            "-N",
            name,
            "-f",
            f"{self.folder}/slurm.conf",
            "-d",
            self.programs["slurmstepd"],
        )
        self.nodes[name] = self.begin(*own_host(name), *command)

    @contextmanager
    def lost_node(self, name: str) -> Iterator[None]:
        """Kill the slurmd of a node, and start it again afterwards."""
        slurmd = self.nodes.pop(name)
        slurmd.kill()
        slurmd.wait()
        try:
            yield
        finally:
            self.begin_node(name)
            self.ask("scontrol", "update", f"nodename={name}", "state=resume")
            self.until("State=IDLE ", "scontrol", "-o", "show", "node", name)

    def until(self, text: str, *command: str) -> None:
        """Wait until a command prints this text."""
        ends_s = time.monotonic() + COMES_UP_S
        while text not in (said := self.ask(*command)):
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < ends_s, f"no {text!r}: {said}\n{logs}"
            time.sleep(0.2)

    def end(self) -> None:
        """End the jobs, then the daemons, the last one first, each by its own number."""
        with suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--full", "--signal=KILL", f"--user={getuser()}")
            self.ask("scancel", f"--user={getuser()}")
            ends_s = time.monotonic() + ENDS_S
            while self.ask("squeue", "--noheader").strip() and time.monotonic() < ends_s:
                time.sleep(0.2)
        for child in reversed(self.running):
            child.terminate()
            try:
                child.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def own_host(name: str) -> tuple[str, ...]:
    """What stands before a command that is to run under this hostname."""
    return () if name == HOST else ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)


def find_programs() -> dict[str, str]:
    """Each daemon by name; Debian unpacks them with ``-wlm`` at the end. Skips the test where one is missing."""
    root = os.environ.get(ROOT)
    folders = [f"{root}/usr/sbin", f"{root}/usr/bin"] if root else [os.environ["PATH"], "/usr/sbin"]
    places = os.pathsep.join(folders)
    found = {name: shutil.which(name, path=places) or shutil.which(f"{name}-wlm", path=places) for name in DAEMONS}
    missing = [name for name, path in found.items() if path is None]
    if missing or shutil.which("srun", path=places) is None:
        pytest.skip(f"no Slurm here ({', '.join(missing) or 'srun'}): run noxfile.py -s slurm, or install slurm-wlm and munge")
    return {name: path for name, path in found.items() if path is not None}


@contextmanager
def running_slurm(*nodes: str, absent: tuple[str, ...] = ()) -> Iterator[RealSlurm]:
    """A Slurm whose nodes are idle; its folder goes with it. The folder is near the root: a socket's path has 107 characters.

    ``nodes``: their names, each a slurmd on this host with that hostname; without any, this host by its own name. ``absent``:
    nodes that Slurm knows, and that never come up.
    """
    programs = find_programs()
    if nodes and os.geteuid() != 0:
        pytest.skip("nodes with hostnames of their own need root (unshare --uts)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    slurm = RealSlurm(folder, programs, _environment(folder))
    try:
        names = nodes or (HOST,)
        _configure(folder, (*names, *absent))
        slurm.begin(programs["munged"], "--foreground", "--force", f"--socket={folder}/munge.socket", *_munge_files(folder))
        slurm.begin(programs["slurmctld"], "-D", "-f", f"{folder}/slurm.conf")
        for name in names:
            slurm.begin_node(name)
        for name in names:
            slurm.until("State=IDLE ", "scontrol", "-o", "show", "node", name)
        yield slurm
    finally:
        slurm.end()
        with suppress(OSError):
            shutil.rmtree(folder)


def _munge_files(folder: Path) -> list[str]:
    files = {"key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    return [f"--{option}={folder / name}" for option, name in files.items()]


def _configure(folder: Path, names: tuple[str, ...]) -> None:
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    for name in ("state", *(f"spool-{node}" for node in names)):
        (folder / name).mkdir(mode=0o700)
    root = os.environ.get(ROOT)
    plugins = f"PluginDir={_libraries(root)[1]}" if root else ""
    cpus = len(os.sched_getaffinity(0))
    nodes = [NODE.format(name=name, port=free_port(), cpus=cpus, memory_mib=MEMORY_MIB) for name in names]
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    # The port of a launch follows from the job's number (625 differ), and this host is every node of every Slurm of the tests.
    first_job = 1 + worker % 2 * 300 + secrets.randbelow(270)
    text = CONF.format(
        first_job=first_job, host=HOST, port=free_port(), user=getuser(), folder=folder, plugins=plugins, nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n", encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    made = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    made["SLURM_CONF"] = f"{folder}/slurm.conf"
    root = os.environ.get(ROOT)
    if root:
        made["PATH"] = f"{root}/usr/bin{os.pathsep}{made['PATH']}"
        made["LD_LIBRARY_PATH"] = os.pathsep.join([*_libraries(root), *filter(None, [made.get("LD_LIBRARY_PATH")])])
    return made


def _libraries(root: str) -> list[str]:
    """The folder of the libraries, and the one of Slurm's plugins below it."""
    (plugins,) = Path(root).glob("usr/lib/*/slurm-wlm")
    return [str(plugins.parent), str(plugins)]
