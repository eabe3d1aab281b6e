"""``gpucluster launch``: prints torchrun for every node, or starts it here once all nodes are there.

Who is there, :mod:`pytest_gpucluster.protocol.rendezvous` finds out.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.commands.report import Absence, expect, read_options, write_reports
from pytest_gpucluster.commands.sweep import read_step
from pytest_gpucluster.config import host_list
from pytest_gpucluster.config.pod import INDEX, MEANINGS, read_pod, require_index
from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.page.outputs import Wanted, write_outputs
from pytest_gpucluster.protocol import rendezvous
from pytest_gpucluster.protocol.codec import SECRET_VARIABLE
from pytest_gpucluster.protocol.rank import own_hostname
from pytest_gpucluster.reporting.files import require_apart, require_unread
from pytest_gpucluster.reporting.lines import hostlist, hosts_from
from pytest_gpucluster.run_setup import require_torch
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import counted

NOT_GOOD = 1
ONE_HOST = "127.0.0.1"
"""The address of node 0 where it is the only node."""
DEFAULT_PORT = 29500
"""torchrun's own."""
THREADS = "OMP_NUM_THREADS"
NO_GPU = "Slurm gave this job no GPU (--gpus-per-node): say --nproc-per-node"
FILLED = ("nnodes", "nproc_per_node", "master_addr", "node_rank", "master_port")
SUITE = ("--pyargs", "tests_acceptance")
"""What pytest is given where nothing is: plain pytest would run other tests, or none, on each node by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be launched. ``hosts``: hostnames by node rank, empty where unknown; ``node_rank``: this node's.

    ``start`` tells the starts of one Slurm job apart; "" outside Slurm.
    """

    num_nodes: int
    num_local: int
    node_rank: int
    master_addr: str
    master_port: int
    hosts: tuple[str, ...]
    within_s: float
    pytest_arguments: tuple[str, ...]
    start: str = ""

    def torchrun(self, node_rank: int) -> list[str]:
        """The arguments of torchrun on one node."""
        where = (f"--node-rank={node_rank}", f"--master-addr={self.master_addr}", f"--master-port={self.master_port}")
        shape = (f"--nnodes={self.num_nodes}", f"--nproc-per-node={self.num_local}")
        return [*shape, *where, "-m", "pytest", *self.pytest_arguments]

    @property
    def rank_0(self) -> Launch:
        """The variables that torchrun would set for rank 0."""
        return Launch(
            rank=0,
            world_size=self.num_nodes * self.num_local,
            local_rank=0,
            local_world_size=self.num_local,
            master_addr=self.master_addr,
            master_port=self.master_port,
            agent_hosts_store=True,
        )


def main(chosen: argparse.Namespace) -> int:
    """Print the lines, or start this node's; 1 when not all nodes came.

    Raises:
        ConfigurationError: wrong usage.
    """
    job = read_job(chosen)
    if not chosen.run:
        sys.stdout.write("".join(f"{line}\n" for line in torchrun_lines(job)))
        say_variables(job)
        return 0
    require_torch()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigurationError("this is a process of torchrun already; start the launcher itself, once on each node")
    if job.node_rank != 0:
        return _follow(job)
    _require_apart(job, hosts=chosen.hosts)
    return _lead(job)


def torchrun_lines(job: Job) -> list[str]:
    """A line for each node, with its host as a comment where that is known."""
    threads = "".join(f"{name}={shlex.quote(value)} " for name, value in threads_of(job).items())
    hosts = [f"  # {host}" for host in job.hosts] or [""] * job.num_nodes
    return [f"{threads}torchrun {shlex.join(job.torchrun(node_rank))}{host}" for node_rank, host in enumerate(hosts)]


def say_variables(job: Job) -> None:
    """Print, beside the lines to be copied, what has to be in the environment of the nodes."""
    for name, value in hosts_variable(job.hosts).items():
        _say("so that each node keeps its number and its name, whoever is absent, enter this on node 0 before its line:")
        sys.stderr.write(f"export {name}={shlex.quote(value)}\n")
    if os.environ.get(SECRET_VARIABLE):  # no command line has it: other users can read those
        _say(f"give every node the {SECRET_VARIABLE} of this environment, before its line")
    else:
        _say("to sign the messages between ranks, enter this on every node before its line:")
        sys.stderr.write(f"export {SECRET_VARIABLE}={secrets.token_hex(32)}\n")


def threads_of(job: Job) -> dict[str, str]:
    """The threads of each of several ranks: what torchrun would set, which it does with four lines of warning."""
    return {THREADS: os.environ.get(THREADS) or "1"} if job.num_local > 1 else {}


def hosts_variable(hosts: Sequence[str]) -> dict[str, str]:
    """The variable by which rank 0 knows which host each node is, in Slurm's short form where that keeps their order."""
    if not hosts or "" in hosts:
        return {}
    short = hostlist(hosts)
    return {host_list.VARIABLE: short if host_list.expand(short) == tuple(hosts) else ",".join(hosts)}


def read_job(chosen: argparse.Namespace) -> Job:
    """Check the options; what is not given comes from the Slurm step that this process belongs to.

    Raises:
        ConfigurationError: a number out of its range, not as many hosts as nodes, or a number that nothing says.
    """
    given = dict(vars(chosen))
    hosts = hosts_from(chosen.hosts) if chosen.hosts else ()
    needed = ("nnodes", "nproc_per_node", "master_addr", *(["node_rank"] if chosen.run else []))
    lacks = any(given[name] is None for name in needed)
    step = read_step(os.environ) if lacks else None
    if step is not None:
        hosts = hosts or step.hosts
        fill(given, len(step.hosts), step.num_gpus, hosts[0], step.node_rank, step.port)
    pod = read_pod(os.environ, hostname=socket.gethostname()) if lacks and step is None else None
    if pod is not None:
        fill(given, pod.num_nodes, pod.num_gpus, pod.master_addr, pod.index, pod.port)
        require_index(given["node_rank"], given["nnodes"])
    if step is None and pod is None:
        alone = given["nnodes"] == 1  # node 0 is the first host; a node alone is node 0, and meets itself
        address = hosts[0] if hosts else ONE_HOST if alone else None
        fill(given, None, None, address, 0 if alone else None, None)
    _require(given, hosts, in_slurm=step is not None, in_pod=pod is not None)
    return Job(
        num_nodes=given["nnodes"],
        num_local=given["nproc_per_node"],
        node_rank=given["node_rank"] or 0,
        master_addr=given["master_addr"],
        master_port=given["master_port"] or DEFAULT_PORT,
        hosts=hosts,
        within_s=chosen.join_deadline_s,
        pytest_arguments=tuple(chosen.beyond) or SUITE,
        start=pod.start if pod is not None else "" if step is None else step.start,
    )


def fill(given: dict[str, Any], *said: str | int | None) -> None:
    """Take from the surroundings, which say the first of :data:`FILLED` or None for each, what no option gave."""
    given.update({name: value for name, value in zip(FILLED, said, strict=False) if given[name] is None})


def _require(given: Mapping[str, Any], hosts: Sequence[str], *, in_slurm: bool, in_pod: bool) -> None:
    nodes, port, deadline_s = given["nnodes"], given["master_port"], given["join_deadline_s"]
    if in_slurm and given["nproc_per_node"] is None:
        raise ConfigurationError(NO_GPU)
    for option in ("nnodes", "nproc_per_node", "master_addr"):
        if given[option] is None:
            where = f"in a Pod without {MEANINGS[option]}" if in_pod else "outside a Slurm job"
            raise ConfigurationError(f"--{option.replace('_', '-')} is needed {where}")
    for option in ("nnodes", "nproc_per_node"):
        if given[option] < 1:
            raise ConfigurationError(f"--{option.replace('_', '-')} {given[option]} is not a number above zero")
    if hosts and len(hosts) != nodes:
        raise ConfigurationError(f"--hosts names {counted(len(hosts), 'host')}, --nnodes says {nodes}")
    if given["run"] and (given["node_rank"] is None or not 0 <= given["node_rank"] < nodes):
        raise ConfigurationError(f"--run needs --node-rank, from 0 to {nodes - 1}, another one on each node")
    if port is not None and not 0 < port < 65536:
        raise ConfigurationError(f"--master-port {port} is no TCP port")
    if not 0 < deadline_s <= rendezvous.MAX_WAIT_S:
        raise ConfigurationError(f"--join-deadline-s {deadline_s:g} is not a time above zero (a week at most)")


def _own_hello(job: Job) -> rendezvous.Hello:
    return rendezvous.Hello(
        node_rank=job.node_rank,
        hostname=own_hostname(),
        num_nodes=job.num_nodes,
        num_local=job.num_local,
        start=job.start,
    )


def _say(text: str) -> None:
    sys.stderr.write(f"gpucluster launch: {text}\n")
    sys.stderr.flush()


def _become_torchrun(job: Job, *, secret: str | None, hosts: Sequence[str] = ()) -> int:
    """Replace this process by torchrun, whose ranks inherit the secret of this run, or the one that the user has set.

    ``hosts``: those of all nodes by node rank, where they are known here.
    """
    if secret is not None:
        os.environ[SECRET_VARIABLE] = secret
    os.environ.update({**hosts_variable(hosts), **threads_of(job)})
    command = [sys.executable, "-m", "pytest_gpucluster.commands.torchrun", *job.torchrun(job.node_rank)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 -- this very interpreter


# Node 0.


def _lead(job: Job) -> int:
    """Wait for the other nodes; become torchrun if all came, write reports if not."""
    settings, junit = read_options(job.pytest_arguments)
    expected = expect(job.rank_0, settings)  # here, so that wrong options are said before anybody waits
    meeting = rendezvous.Meeting(_own_hello(job), host=job.master_addr, port=job.master_port, notice=_say)
    if not meeting.is_complete:
        _say(f"waiting for {counted(job.num_nodes - 1, 'other node')} on port {job.master_port}, at most {job.within_s:g} s")
    began_s = time.monotonic()
    ended_by = _gather(meeting, within_s=job.within_s)
    if ended_by is None and meeting.is_complete:
        secret = None if os.environ.get(SECRET_VARIABLE) else secrets.token_hex(32)
        # All are here. A name of Slurm's may be another than the hostname.
        hosts = job.hosts if job.hosts and not job.start else [meeting.hostnames[rank] for rank in range(job.num_nodes)]
        meeting.end({"t": "go"} if secret is None else {"t": "go", "secret": secret})
        return _become_torchrun(job, secret=secret, hosts=hosts)
    absence = Absence(
        hostnames=meeting.hostnames,
        num_nodes=job.num_nodes,
        hosts=job.hosts,
        waited_s=job.within_s if ended_by is None else round(time.monotonic() - began_s, 1),
        ended_by=ended_by,
    )
    meeting.end({"t": "end", "why": absence.text})
    _say(absence.text)
    if ended_by is None:
        _say(f"on a node that is absent: does its launcher run, and does it reach {job.master_addr}:{job.master_port}?")
        if INDEX in os.environ:
            _say(f"a node is the Pod with that index: completions and parallelism of the Job have to be {job.num_nodes} each")
    return _report(expected, absence, junit=junit)


def _require_apart(job: Job, *, hosts: str | None) -> None:
    """Check that no report replaces the limits, or what ``--hosts`` names: a list, or an earlier run, which may be moved."""
    settings, junit = read_options(job.pytest_arguments)
    read = [settings.thresholds] if settings.thresholds is not None else []
    listed = [Path(hosts, name) for name in ("", JOURNAL, RESULTS)] if hosts else []
    wanted = [one for one in (junit, settings.summary, settings.metrics, settings.termination) if one is not None]
    require_apart(wanted, folder=settings.results_dir, read=read)
    for file in wanted:
        require_unread(file, listed)


def _gather(meeting: rendezvous.Meeting, *, within_s: float) -> str | None:
    """Wait for the other nodes; the name of the signal that ended the wait, None without one."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        meeting.gather(within_s=within_s)
    except KeyboardInterrupt as interrupt:
        return str(interrupt) or "SIGINT"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return None


def _interrupt(number: int, _frame: Any) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _report(expected: Session, absence: Absence, *, junit: Path | None) -> int:
    """Write the reports of a run that never began. A full disk does not change the outcome."""
    try:
        written = write_reports(expected, absence, junit=junit)
    except (ConfigurationError, OSError) as error:
        _say(f"no reports: {error}")
        return NOT_GOOD
    settings = expected.setup.settings
    wanted = Wanted(summary=settings.summary, metrics=settings.metrics, termination=settings.termination)
    for problem in write_outputs(settings.results_dir, wanted).problems:
        _say(problem)
    _say(f"reports in {settings.results_dir}")
    sys.stdout.write(f"verdict {written.line}\n")
    return NOT_GOOD


# The others.


def _follow(job: Job) -> int:
    """Say hello to node 0; become torchrun if all nodes came."""
    try:
        secret = rendezvous.join(
            _own_hello(job), host=job.master_addr, port=job.master_port, within_s=job.within_s, notice=_say
        )
    except rendezvous.NotJoinedError as error:
        _say(str(error))
        return NOT_GOOD
    return _become_torchrun(job, secret=secret)
