"""What a launcher learns from the Slurm step that started it: nodes, hosts, ranks, GPUs, and a port of this start alone.

The variables are those of srun's manual, "OUTPUT ENVIRONMENT VARIABLES". A batch script has the job's, and no step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_gpucluster.config.host_list import JOB, STEP, expand
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import counted

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
    if "SLURM_STEP_ID" not in variables:
        if not whole_job and variables.get("SLURM_JOB_NUM_NODES", "1") != "1":
            raise ConfigurationError(
                "this job has several nodes and this is only the first: start it on each with "
                "srun --ntasks-per-node=1 gpucluster launch --run"
            )
        hosts = _hosts(variables, JOB)
    else:
        hosts = _hosts(variables, STEP)
        tasks = variables.get("SLURM_STEP_NUM_TASKS", str(len(hosts)))
        if tasks != str(len(hosts)):
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


def _hosts(variables: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = variables.get(name, "")
    try:
        hosts = expand(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text!r} is no list of hosts: {error}") from None
    if not hosts:
        raise ConfigurationError(f"Slurm set no {name}: say --nnodes, --hosts and --node-rank")
    return hosts


def _num_gpus(variables: Mapping[str, str]) -> int | None:
    """``8``, or the number in ``h100:8``, of the first variable that Slurm set."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        found = re.fullmatch(r"(?:.*:)?(\d+)", variables.get(name, ""))
        if found is not None:
            return int(found[1])
    return None
