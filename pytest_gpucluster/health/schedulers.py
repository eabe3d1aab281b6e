"""A host and a job as Slurm and Kubernetes see them, beside what is there. Pure: readings in, what is wrong out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.health.hosts import MIB
from pytest_gpucluster.inventory.host import NO_LIMIT_BYTES
from pytest_gpucluster.inventory.kubernetes import FORBIDDEN, UNNAMED, KubernetesCluster, KubernetesNode
from pytest_gpucluster.inventory.numa import parse_cpulist
from pytest_gpucluster.inventory.reading import NONE, NotAvailable, all_or_why, apply, or_none, split
from pytest_gpucluster.judging.finding import BAD, HERE, REMARK, UNKNOWN, Finding, Said, finding_of
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.slurm import SlurmConfig, SlurmNode, SlurmShare
    from pytest_gpucluster.measurements.host import RankBinding, SlurmState


__all__ = [
    "at_start_and_end",
    "judge_config",
    "judge_job",
    "judge_kubernetes",
    "judge_node",
    "judge_operators",
    "remark_on_blocks",
    "why_not_asked",
    "with_remark",
]

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


def judge_node(state: SlurmState) -> Finding:
    """What makes the host one that Slurm gives no jobs, and GPUs that Slurm and NVML do not count alike.

    What a site may have on purpose is a remark: Slurm counts no GPU of a host that has some; a partition takes no jobs.
    """
    return replace(finding_of(_of_node(state)), kind="host", evidence=_host_shown(state))


def _of_node(state: SlurmState) -> Iterator[Said]:
    node, seen = state.node, state.gpus_seen
    if isinstance(node, NotAvailable):
        yield HERE, UNKNOWN, f"the host's state is {node}"
        return
    because = f" (reason: {node.reason})" if node.reason else ""
    for word in node.states:
        if word in OUT_OF_SERVICE:
            yield HERE, BAD, f"{word}: {OUT_OF_SERVICE[word]}{because}"
        elif word not in IN_SERVICE:
            yield HERE, UNKNOWN, f"the state {word} does not say whether the host gets jobs"
    if not node.states:
        yield HERE, UNKNOWN, "Slurm shows no state of the host"
    if node.gpus != 0 and not state.mig_gpus:
        yield from _gpus_of_node(node, state)
    if node.gpus == 0 and isinstance(seen, int) and seen > 0:
        yield HERE, REMARK, f"Slurm counts no GPU of this host (Gres), and NVML shows {seen}"
    for name, found in (or_none(state.partitions) or {}).items():
        if found != "UP":
            yield HERE, REMARK, f"partition {name} is {found}, not UP"


def _gpus_of_node(node: SlurmNode, state: SlurmState) -> Iterator[Said]:
    has, seen = apply(lambda share: share.gpus, state.share), state.gpus_seen
    yield from _unread({"GPUs of the host's GRES": node.gpus, "GPUs of the job here": has, "GPUs that NVML shows": seen})
    if isinstance(has, NotAvailable) or isinstance(seen, NotAvailable):
        return
    if seen < has:
        yield HERE, BAD, f"NVML shows {counted(seen, 'GPU')}, and the job has {has} here"
    elif not isinstance(node.gpus, NotAvailable) and has == node.gpus < seen:
        yield HERE, BAD, f"NVML shows {counted(seen, 'GPU')}, and Slurm knows of {node.gpus} (Gres)"


def _unread(readings: Mapping[str, Any]) -> Iterator[Said]:
    """What of these readings is not available, and why."""
    yield from ((HERE, UNKNOWN, f"{name}: {why}") for name, why in split(readings)[1].items())


def _host_shown(state: SlurmState) -> dict[str, str]:
    """What Slurm says of a host and the job there, in words."""
    node = apply(lambda one: f"{one.name}: {'+'.join(one.states)}, GPUs {one.gpus}, Slurm {one.version}", state.node)
    share = apply(lambda one: f"{counted(one.cpus, 'CPU')}, {one.memory_mib} MiB, GPUs {one.gpus}", state.share)
    return {
        "node": str(node),
        "job": str(share),
        "partitions": str(apply(_words, state.partitions)),
        "controller": str(state.controller),
        "GPUs seen": f"{state.gpus_seen}{f', {state.mig_gpus} of them in MIG mode' if state.mig_gpus else ''}",
    }


def remark_on_blocks(node: str, blocks: Mapping[str, str | NotAvailable | None], domains: Mapping[str, str]) -> str | None:
    """What is odd about the host's block in Slurm (topology/block) beside the NVLink domains; None if nothing is.

    Slurm gives the hosts of one block to a job that asks for neighbours. A site may have chosen smaller blocks on purpose, so
    this is a remark.

    Args:
        node: the host's node.
        blocks: by node, the block in which Slurm has its host.
        domains: by node, the NVLink domain of its GPUs, where that spans nodes.
    """
    block, domain = blocks.get(node), domains.get(node)
    if not isinstance(block, str) or domain is None:
        return None
    in_block = sorted({domains[one] for one, name in blocks.items() if name == block and one in domains})
    of_domain = sorted({name for one, name in blocks.items() if isinstance(name, str) and domains.get(one) == domain})
    if len(in_block) > 1:
        return f"Slurm's block {block} has hosts of {len(in_block)} NVLink domains: jobs are cut across racks (topology.conf)"
    if len(of_domain) > 1:
        several = f"{counted(len(of_domain), 'block')} of Slurm: {', '.join(of_domain)}"
        return f"the host's NVLink domain is in {several} (topology.conf)"
    return None


def judge_config(state: SlurmState) -> Finding:
    """A Slurm that looks after no host by itself: no health check program, or one that never runs. The rest is shown."""
    config = state.config
    if isinstance(config, NotAvailable):
        return Finding(unknown={HERE: (f"the configuration of Slurm is {config}",)}, kind="settings")
    return replace(
        finding_of(_health_check(config)),
        kind="settings",
        advice="gpucluster healthcheck can be that program (deploy/slurm/healthcheck.sh)",
        evidence={
            "HealthCheckProgram": f"{config.health_check or 'none'}, every {config.interval_s} s",
            "Prolog": config.prolog or "none",
            "s from the job's start to its step, at most": str(config.prolog_most_s),
            "accounting": config.accounting or "none",
            "topology": config.topology or "none",
            "pyxis": str(config.pyxis),
            "enroot": config.enroot or "not on the PATH",
            "choice of nodes": config.packing or "none",
            "MPI by srun": str(config.mpi),
        },
    )


def _health_check(config: SlurmConfig) -> Iterator[Said]:
    if not config.health_check:
        yield HERE, BAD, "HealthCheckProgram is not set: a host that breaks keeps getting jobs"
    elif isinstance(config.interval_s, NotAvailable):
        yield HERE, UNKNOWN, f"how often HealthCheckProgram runs is {config.interval_s}"
    elif config.interval_s == 0:
        yield HERE, BAD, "HealthCheckInterval is 0: HealthCheckProgram never runs"


def with_remark(found: Finding, remark: str | None) -> Finding:
    """The finding with one more remark."""
    return replace(found, remark="; ".join(filter(None, (found.remark, remark))) or None)


def at_start_and_end(first: SlurmState, last: SlurmState) -> Finding:
    """The host at both ends of a run: what was wrong or unknown at the start counts, too."""
    before, now = judge_node(first), judge_node(last)
    bad = [*now.facts, *(f"{text}, at the start" for text in before.facts if text not in now.facts)]
    unknown = [*now.doubts, *(f"{text}, at the start" for text in before.doubts if text not in now.doubts)]
    evidence = {**now.evidence, "node at the start": before.evidence["node"]}
    return replace(now, bad={HERE: bad}, unknown={HERE: unknown}, evidence=evidence)


def judge_job(state: SlurmState, bindings: Mapping[str, RankBinding]) -> Finding:
    """What the ranks of a host (by their places' ids) may use beside what the job has there."""
    bound = [f"{rank}: CPUs {one.cpus} on NUMA nodes {one.numa_nodes}" for rank, one in bindings.items()]
    evidence = {**_host_shown(state), "ranks": bound}
    said = _of_job(state, [*bindings.values()])
    return replace(finding_of(said), kind="settings", unknown_kind="host", evidence=evidence)


def _of_job(state: SlurmState, ranks: Sequence[RankBinding]) -> Iterator[Said]:
    node, share = state.node, state.share
    for name, value in (("the host in Slurm", node), ("the job's share", share)):
        if isinstance(value, NotAvailable):
            yield HERE, UNKNOWN, f"{name} is {value}"
    if not ranks:
        yield HERE, UNKNOWN, "no rank of the host shows where it may run"
    if ranks and not isinstance(node, NotAvailable) and not isinstance(share, NotAvailable):
        yield from _cores(node, share, ranks)
        yield from _memory(node, share, ranks)
        yield from _foreign_gpus(node, share, state)


def _cores(node: SlurmNode, share: SlurmShare, ranks: Sequence[RankBinding]) -> Iterator[Said]:
    usable = len(frozenset[int]().union(*(parse_cpulist(one.cores) for one in ranks)))
    given = -(-share.cpus // node.threads_per_core)
    text = f"the ranks may use {counted(usable, 'core')}, and the job has {given} here"
    if usable < given:
        yield HERE, BAD, f"{text} (srun --cpus-per-task, --cpu-bind)"
    elif usable > given:
        yield HERE, BAD, f"{text}: nothing confines it (TaskPlugin)"


def _memory(node: SlurmNode, share: SlurmShare, ranks: Sequence[RankBinding]) -> Iterator[Said]:
    """A job that was given no number, or all memory of the host, needs no limit."""
    limits = all_or_why(one.memory_limit_bytes for one in ranks)
    if isinstance(limits, NotAvailable):
        yield HERE, UNKNOWN, f"the memory limit is {limits}"
        return
    limit, given_mib = min(limits), share.memory_mib
    if limit == NO_LIMIT_BYTES:
        if given_mib not in (0, node.memory_mib):
            yield HERE, BAD, f"the job has {given_mib} MiB here, and no cgroup holds it to that (ConstrainRAMSpace)"
    elif given_mib and abs(limit - given_mib * MIB) > PAGE_BYTES:
        text = f"the cgroups give the ranks {limit // MIB} MiB, and the job has {given_mib} MiB here (AllowedRAMSpace)"
        yield HERE, BAD, text


def _foreign_gpus(node: SlurmNode, share: SlurmShare, state: SlurmState) -> Iterator[Said]:
    counts = all_or_why((state.gpus_seen, share.gpus, node.gpus))
    if isinstance(counts, NotAvailable) or state.mig_gpus:
        return
    seen, has, every = counts
    if seen > has < every:
        yield HERE, BAD, f"the job has {has} of {every} GPUs here and sees {seen}: others' are not hidden (ConstrainDevices)"


READY = "Ready"
TROUBLES: Mapping[str, str] = {
    "MemoryPressure": "it is short of memory, and evicts Pods",
    "DiskPressure": "it is short of disk, and evicts Pods",
    "PIDPressure": "it is short of process numbers",
    "NetworkUnavailable": "its network is not set up",
    "KernelDeadlock": "node-problem-detector found a task that hangs in the kernel",
    "ReadonlyFilesystem": "node-problem-detector found a file system that became read-only",
}
"""Conditions that are bad where they are ``True``: Kubernetes' own, and those of node-problem-detector's packaged rules."""
ADVICE = "kubectl describe node; look at the device plugin's log and at the GPUs (gpucluster info)"
RIGHT_TO = "let the run read nodes, daemonsets and storageclasses (kubectl auth can-i --list), or run it without kubectl"


def why_not_asked(why_none: str | None, needed: Any) -> str | None:
    """Why nothing is judged: no cluster can be asked, not by this host's name, or not by this run. Silence is no reason."""
    may_not = isinstance(needed, NotAvailable) and needed.why.startswith((FORBIDDEN, UNNAMED))
    return needed.why if may_not else why_none


def judge_kubernetes(node: KubernetesNode | NotAvailable, gpus_on_bus: int | NotAvailable) -> Finding:
    """What keeps Pods from the host or from a GPU of it; a condition of others that is True is a remark."""
    if isinstance(node, NotAvailable):
        return Finding(unknown={HERE: (f"the host's record is {node}",)}, kind="host", unknown_advice=RIGHT_TO)
    said = (*_conditions(node), *_gpus_for_pods(node, gpus_on_bus))
    evidence = {**_shown(node), "GPUs on the PCI bus": str(gpus_on_bus)}
    return replace(finding_of(said), kind="host", advice=ADVICE, evidence=evidence)


def _conditions(node: KubernetesNode) -> Iterator[Said]:
    if isinstance(node.conditions, NotAvailable):
        yield HERE, UNKNOWN, f"its conditions are {node.conditions}"
        return
    ready = node.conditions.get(READY)
    if ready is None:
        yield HERE, UNKNOWN, "Kubernetes does not say whether it is Ready"
    elif ready != "True":
        yield HERE, BAD, f"Ready is {ready}: Kubernetes gives it no Pods"
    for name, state in node.conditions.items():
        if name in TROUBLES and state != "False":
            yield HERE, BAD if state == "True" else UNKNOWN, f"{name} is {state}: {TROUBLES[name]}"
        elif name not in TROUBLES and name != READY and state == "True":
            yield HERE, REMARK, f"the condition {name} is True, whose meaning is not known here"


def _gpus_for_pods(node: KubernetesNode, on_bus: int | NotAvailable) -> Iterator[Said]:
    yield from _unread({"GPUs for Pods": node.gpus, "GPUs of the host": node.all_gpus, "GPUs on the PCI bus": on_bus})
    if isinstance(node.gpus, NotAvailable) or isinstance(node.all_gpus, NotAvailable):
        return
    if node.gpus < node.all_gpus:
        text = f"Pods get {node.gpus} of {counted(node.all_gpus, 'GPU')}: the device plugin takes the others for bad"
        yield HERE, BAD, text
    if isinstance(on_bus, NotAvailable) or node.shared != NONE or not on_bus:
        return
    if not node.all_gpus:
        yield HERE, REMARK, f"Kubernetes counts no GPU of this host, and {counted(on_bus, 'GPU')} on the PCI bus"
    elif node.all_gpus < on_bus:
        yield HERE, BAD, f"Kubernetes counts {counted(node.all_gpus, 'GPU')}, and {on_bus} are on the PCI bus"


def judge_operators(cluster: KubernetesCluster) -> Finding:
    """DaemonSets for GPUs and adapters that lack a ready Pod somewhere."""
    return replace(
        finding_of(_operators(cluster)),
        kind="software",
        advice="kubectl get pods --all-namespaces -o wide; look at the Pods of these DaemonSets that are not ready",
        evidence=_shown(cluster),
        unknown_advice=RIGHT_TO,
    )


def _operators(cluster: KubernetesCluster) -> Iterator[Said]:
    sets = cluster.daemonsets
    for name, ready in (or_none(sets) or {}).items():
        counts = None if isinstance(ready, NotAvailable) else re.fullmatch(r"(\d+) of (\d+)", ready)
        if counts is None:
            yield HERE, UNKNOWN, f"the DaemonSet {name}: {ready}"
        elif int(counts[1]) < int(counts[2]):
            yield HERE, BAD, f"the DaemonSet {name} has {ready} Pods ready"
    operators = {"the GPU operator": cluster.gpu_operator, "the network operator": cluster.network_operator}
    yield from _unread({"the DaemonSets": sets, **operators})


def _shown(readings: Any) -> dict[str, str]:
    """Each reading in words."""
    return {field.name.replace("_", " "): _words(getattr(readings, field.name)) for field in dataclasses.fields(readings)}


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items()) or "none"
    words: Sequence[str] = value if isinstance(value, list) else [str(value)]
    return ", ".join(words) or "none"
