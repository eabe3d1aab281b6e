"""``gpucluster sweep``: submits the stages in which Slurm takes in many nodes; ``deploy/slurm/sweep.sbatch`` calls it.

First comes an array with a task for each node, and a job that starts when all tasks are over. That job merges the runs
(``gpucluster merge --exclude``), and has the last stage submitted, on the nodes that passed.

Which node an array's task gets is nobody's choice: Slurm puts two tasks on one node, one after the other, and none on another.
So the array is submitted held, each task is given one node (``scontrol update ReqNodeList``), and then the array is released.

What a launcher learns from the Slurm step that started it: nodes, hosts, ranks, GPUs, and a port of this start alone.

The variables are those of srun's manual, "OUTPUT ENVIRONMENT VARIABLES". A batch script has the job's, and no step.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.config.host_list import JOB, STEP, expand, hosts_in
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory import program, slurm
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.slurm import SlurmNode
from pytest_gpucluster.reporting.lines import hostlist
from pytest_gpucluster.reporting.node_runs import unusable
from pytest_gpucluster.text import counted, one_line

GOOD, BAD = 0, 1
WITHIN_S = 60.0
"""For one command of Slurm's that submits or cancels a job."""
OLDEST = (19, 5)
"""Brought ``--gpus-per-node`` (Slurm's release notes)."""
FOLLOWS = {name: f"SLURM_JOB_{name}" for name in ("PARTITION", "ACCOUNT", "QOS", "RESERVATION")}
"""What the jobs of later stages take over from the job that submits them, by sbatch's own variables, ``SBATCH_...``."""
KEPT = "SLURM_CONF"
STAGE = "STAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The file that runs every stage, its arguments, the folder of the sweep, and sbatch's options for jobs that measure."""

    file: Path
    arguments: tuple[str, ...]
    folder: Path
    measuring: tuple[str, ...]

    def submit(self, stage: str, *options: str) -> str:
        """The number of the new job.

        Raises:
            ConfigurationError: sbatch refused it.
        """
        name = (f"--job-name=gpucluster-{stage}", "--parsable")
        words = ("sbatch", *name, *options, str(self.file), *self.arguments)
        return _said(words, {STAGE: stage}).partition(";")[0]


def main(chosen: argparse.Namespace) -> int:
    """Submit the first two stages, or the last one; 0, or 1 where no node can take a job.

    Raises:
        ConfigurationError: wrong usage, or Slurm refused something; no job is left then.
    """
    _require_slurm()
    stages = Stages(
        file=chosen.file,
        arguments=tuple(chosen.beyond),
        folder=chosen.folder.absolute(),
        measuring=tuple(shlex.split(chosen.job)),
    )
    if chosen.fabric is None:
        return _start(stages, _wanted(chosen.nodes))
    place = shlex.split(chosen.fabric)
    job = stages.submit("fabric", *stages.measuring, *place, f"--output={stages.folder}/fabric.out")
    sys.stdout.write(f"job {job} runs on the nodes that passed: its reports are in {stages.folder}/fabric\n")
    return GOOD


def _require_slurm() -> None:
    """Check that Slurm's commands are here, and new enough."""
    missing = [name for name in ("sbatch", "scontrol", "scancel") if shutil.which(name) is None]
    if missing:
        raise ConfigurationError(f"{missing[0]} is not on the PATH: start this on a host of a Slurm cluster")
    version = _said(("sbatch", "--version"))
    found = re.search(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        raise ConfigurationError(f"{version} is too old: Slurm 19.05 brought --gpus-per-node; update Slurm")


def _wanted(text: str) -> list[str]:
    """The nodes by Slurm's names: those given, or all of the partition that this job is in."""
    partition = os.environ.get(FOLLOWS["PARTITION"])
    if not text.strip():
        if partition is None:
            raise ConfigurationError("which nodes? Say --nodes gpu-[001-256] (NODES in sweep.sbatch)")
        shown = slurm.ask("-o", "show", "partition", partition)
        found = re.search(r" Nodes=(\S+)", str(shown))
        if isinstance(shown, NotAvailable) or found is None or found[1] in slurm.NONE:
            raise ConfigurationError(f"partition {partition} names no nodes ({one_line(str(shown))[:200]}): say --nodes")
        text = found[1]
    try:
        return [*dict.fromkeys(expand(text))]
    except ValueError as error:
        raise ConfigurationError(f"--nodes {text!r} is no list of nodes: {error}") from None


def _start(stages: Stages, names: Sequence[str]) -> int:
    nodes = _known(names)
    gone = unusable(nodes)
    able = [name for name in names if name not in gone]
    for name, why in gone.items():
        sys.stdout.write(f"left out: {name} is {why}\n")
    if not able:
        sys.stdout.write(f"none of {counted(len(names), 'node')} can take a job: nothing was submitted\n")
        return BAD
    _make_folders(stages.folder, names)
    array = stages.submit(
        "node", *stages.measuring, f"--array=0-{len(able) - 1}", "--hold", "--nodes=1", f"--output={stages.folder}/node-%a.out"
    )
    try:
        _pin(array, able)
        merge = stages.submit("merge", f"--dependency=afterany:{array}", "--nodes=1", f"--output={stages.folder}/merge.out")
    except BaseException:
        _said(("scancel", array))
        raise
    sys.stdout.write(f"job {array} runs on each of {counted(len(able), 'node')} alone: {hostlist(able)}\n")
    sys.stdout.write(f"job {merge} then merges the runs and starts the fabric stage; all of it is in {stages.folder}\n")
    return GOOD


def _known(names: Sequence[str]) -> Mapping[str, SlurmNode]:
    nodes = slurm.read_nodes(names)
    if isinstance(nodes, NotAvailable):
        raise ConfigurationError(f"Slurm does not show these nodes: {one_line(nodes.why)}")
    unknown = [name for name in names if name not in nodes]
    if unknown:
        raise ConfigurationError(f"Slurm has no node {hostlist(unknown)}: correct --nodes (NODES in sweep.sbatch)")
    return nodes


def _make_folders(folder: Path, names: Sequence[str]) -> None:
    """A folder for each node, also for one that gets no task: whoever merges sees by it that the node was expected."""
    parent = folder / "nodes"
    advice = "choose another folder, which all nodes share and can write (RESULTS in sweep.sbatch)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parent.mkdir()
        for name in names:
            (parent / name).mkdir()
    except FileExistsError:
        raise ConfigurationError(f"{folder} holds a sweep already, perhaps of a job that runs: {advice}") from None
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error.strerror}; {advice}") from None


def _pin(array: str, names: Sequence[str]) -> None:
    """Give each task of a held array its node, then release the array."""
    changes = [("update", f"JobId={array}_{number}", f"ReqNodeList={name}") for number, name in enumerate(names)]
    for words in (*changes, ("release", array)):
        refused = slurm.change(*words)
        if refused is not None:
            raise ConfigurationError(f"the array was cancelled, because Slurm refused a change: {one_line(refused.why)}")


def _said(words: Sequence[str], added: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm's prints. It gets no variable of the job around it: they would be options of the new job.

    Raises:
        ConfigurationError: it failed, or gave no answer.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == KEPT}
    follows = {f"SBATCH_{name}": os.environ[given] for name, given in FOLLOWS.items() if os.environ.get(given)}
    try:
        ended = program.run(
            words[0], words[1:], within_s=WITHIN_S, environment={**follows, **kept, **(added or {}), "LC_ALL": "C"}
        )
    except program.ProgramError:
        raise ConfigurationError(f"{words[0]}: no answer within {WITHIN_S:g} s; does slurmctld run (scontrol ping)?") from None
    if ended.exit_code != 0:
        complaint = one_line((ended.complained.strip() or ended.printed.strip())[: slurm.LONGEST])
        raise ConfigurationError(f"{words[0]} refused it: {complaint}")
    return ended.printed.strip()


FIRST_PORT, PORTS = 20000, 10000
"""Below the ports that Linux gives to outgoing connections (32768 and up)."""
STARTS = 16
"""So many starts of one job have ports of their own; Slurm counts a requeue in SLURM_RESTART_COUNT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """This task of a step. ``num_gpus`` of this node: None where Slurm gave none. ``start`` differs after a requeue."""

    hosts: tuple[str, ...]
    node_rank: int
    num_gpus: int | None
    port: int
    start: str


def read_step(variables: Mapping[str, str], *, whole_job: bool = False) -> SlurmStep | None:
    """The step that these variables belong to; None outside Slurm. ``whole_job``: a job without a step will do.

    Raises:
        ConfigurationError: a job of several nodes without a step, several tasks on one node, or variables that contradict
            each other.
    """
    if "SLURM_JOB_ID" not in variables:
        return None
    is_step = "SLURM_STEP_ID" in variables
    if not (is_step or whole_job) and variables.get("SLURM_JOB_NUM_NODES", "1") != "1":
        raise ConfigurationError(
            "this job has several nodes and this is only the first: start it on each with "
            "srun --ntasks-per-node=1 gpucluster launch --run"
        )
    name = STEP if is_step else JOB
    hosts = hosts_in(variables, name)
    if not hosts:
        raise ConfigurationError(f"Slurm set no {name}: say --nnodes, --hosts and --node-rank")
    tasks = variables.get("SLURM_STEP_NUM_TASKS", str(len(hosts)))
    if is_step and tasks != str(len(hosts)):
        raise ConfigurationError(
            f"the step has {tasks} {'task' if tasks == '1' else 'tasks'} on {counted(len(hosts), 'node')}: one task a node "
            "starts all of its ranks (srun --ntasks-per-node=1)"
        )
    job, restarts = int(variables["SLURM_JOB_ID"]), int(variables.get("SLURM_RESTART_COUNT") or 0)
    return SlurmStep(
        hosts=hosts,
        node_rank=int(variables.get("SLURM_NODEID") or 0),
        num_gpus=_num_gpus(variables),
        port=FIRST_PORT + (job * STARTS + restarts % STARTS) % PORTS,
        start=f"{job}.{restarts}",
    )


def _num_gpus(variables: Mapping[str, str]) -> int | None:
    """``8``, or the number in ``h100:8``, of the first variable that Slurm set."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        found = re.fullmatch(r"(?:.*:)?(\d+)", variables.get(name, ""))
        if found is not None:
            return int(found[1])
    return None
