"""A host and a job as Slurm sees them, beside what is there. Pure: readings in, what is wrong out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.health.hosts import MIB, Found
from pytest_gpucluster.inventory.host import NO_LIMIT_BYTES
from pytest_gpucluster.inventory.numa import parse_cpulist
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpucluster.inventory.slurm import SlurmNode, SlurmShare
    from pytest_gpucluster.measurements.slurm import RankBinding, SlurmState

OUT_OF_SERVICE: Mapping[str, str] = {
    "DOWN": "Slurm gives it no jobs",
    "ERROR": "a part of it is in error",
    "FUTURE": "it is configured for later",
    "DRAIN": "it gets no new jobs",
    "FAIL": "it is expected to fail, and gets no new jobs",
    "NOT_RESPONDING": "its slurmd does not answer the controller",
    "INVALID_REG": "it registered with less than slurm.conf promises",
    "POWER_DOWN": "it is to be powered down",
    "POWERING_DOWN": "it is being powered down",
    "POWERED_DOWN": "it is powered down",
}
"""States in which a host serves no new job, with what each means."""
IN_SERVICE = (
    "IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED", "MAINTENANCE", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE",
    "POWER_UP", "POWERING_UP", "PERFCTRS", "REBOOT_REQUESTED", "REBOOT_ISSUED", "RESUME", "BLOCKED",
)  # fmt: skip
"""States that take no host from service, or not yet. ``UNKNOWN`` is neither: a controller that has just started says it."""
PAGE_BYTES = 65536
"""The kernel cuts a limit of memory to whole pages, which have up to so many bytes."""


def judge_node(state: SlurmState) -> Found:
    """What makes the host one that Slurm gives no jobs, and GPUs that Slurm and NVML do not count alike."""
    found = Found()
    node = state.node
    if isinstance(node, NotAvailable):
        found.unknown.append(f"the host's state is {node}")
        return found
    because = f" (reason: {node.reason})" if node.reason else ""
    found.wrong.extend(f"{word}: {OUT_OF_SERVICE[word]}{because}" for word in node.states if word in OUT_OF_SERVICE)
    odd = [word for word in node.states if word not in OUT_OF_SERVICE and word not in IN_SERVICE]
    found.unknown.extend(f"the state {word} does not say whether the host gets jobs" for word in odd)
    if not node.states:
        found.unknown.append("Slurm tells no state of the host")
    if node.gpus != 0 and not state.mig_gpus:
        _judge_gpus(node, state, found)
    return found


def _judge_gpus(node: SlurmNode, state: SlurmState, found: Found) -> None:
    share, seen = state.share, state.gpus_seen
    has = share if isinstance(share, NotAvailable) else share.gpus
    told = {"GPUs of the host's GRES": node.gpus, "GPUs of the job here": has, "GPUs that NVML shows": seen}
    hidden = [f"{name}: {value}" for name, value in told.items() if isinstance(value, NotAvailable)]
    found.unknown.extend(hidden)
    if isinstance(has, NotAvailable) or isinstance(seen, NotAvailable):
        return
    if seen < has:
        found.wrong.append(f"NVML shows {seen} GPUs, and the job has {has} here")
    elif not isinstance(node.gpus, NotAvailable) and has == node.gpus < seen:
        found.wrong.append(f"NVML shows {seen} GPUs, and Slurm knows of {node.gpus} (Gres)")


def judge_job(state: SlurmState, bindings: Sequence[RankBinding]) -> Found:
    """What the ranks of a host may use beside what the job has there; ``unknown`` is what cannot be compared."""
    found = Found()
    node, share = state.node, state.share
    if isinstance(node, NotAvailable) or isinstance(share, NotAvailable) or not bindings:
        said = {"the host in Slurm": node, "the job's share": share}
        found.unknown.extend(f"{name} is {value}" for name, value in said.items() if isinstance(value, NotAvailable))
        if not bindings:
            found.unknown.append("no rank of the host told where it may run")
        return found
    found.wrong.extend(_wrong_cores(node, share, bindings))
    found.wrong.extend(_wrong_memory(node, share, bindings, found.unknown))
    found.wrong.extend(_foreign_gpus(node, share, state))
    return found


def _wrong_cores(node: SlurmNode, share: SlurmShare, bindings: Sequence[RankBinding]) -> Iterator[str]:
    usable = len(frozenset[int]().union(*(parse_cpulist(one.cores) for one in bindings)))
    given = -(-share.cpus // node.threads_per_core)
    if usable < given:
        yield f"the ranks may use {usable} cores, and the job has {given} here (srun --cpus-per-task, --cpu-bind)"
    elif usable > given:
        yield f"the ranks may use {usable} cores, and the job has {given} here: nothing confines it (TaskPlugin)"


def _wrong_memory(node: SlurmNode, share: SlurmShare, bindings: Sequence[RankBinding], unknown: list[str]) -> Iterator[str]:
    """A job that was given no number, or all memory of the host, needs no limit."""
    limits = [one.memory_limit_bytes for one in bindings]
    hidden = [limit for limit in limits if isinstance(limit, NotAvailable)]
    is_all = not share.memory_mib or share.memory_mib == node.memory_mib
    if hidden:
        unknown.append(f"the memory limit is {hidden[0]}")
        return
    limit = min(limit for limit in limits if not isinstance(limit, NotAvailable))
    if limit == NO_LIMIT_BYTES and not is_all:
        yield f"the job has {share.memory_mib} MiB here, and no cgroup holds it to that (ConstrainRAMSpace)"
    elif limit != NO_LIMIT_BYTES and share.memory_mib and abs(limit - share.memory_mib * MIB) > PAGE_BYTES:
        yield f"the cgroups give the ranks {limit // MIB} MiB, and the job has {share.memory_mib} MiB here (AllowedRAMSpace)"


def _foreign_gpus(node: SlurmNode, share: SlurmShare, state: SlurmState) -> Iterator[str]:
    seen, has = state.gpus_seen, share.gpus
    if isinstance(seen, NotAvailable) or isinstance(has, NotAvailable) or isinstance(node.gpus, NotAvailable):
        return
    if not state.mig_gpus and has < node.gpus and seen > has:
        yield f"the job has {has} of {node.gpus} GPUs here and sees {seen}: others' are not hidden (ConstrainDevices)"
