"""What a Pod of an Indexed Job knows of itself: index, number of Pods, their GPUs, and how to reach the first. Pure.

Kubernetes sets the index in every container of such a Job. All else stands in the manifest, as deploy/kubernetes has it;
Kubeflow's Trainer sets torchrun's own variables instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import counted

INDEX = "JOB_COMPLETION_INDEX"
NODES = ("GPUCLUSTER_NODES", "PET_NNODES")
GPUS = ("GPUCLUSTER_GPUS", "PET_NPROC_PER_NODE")
SERVICE, MASTER, PORT = "GPUCLUSTER_SERVICE", "PET_MASTER_ADDR", "PET_MASTER_PORT"
START = "GPUCLUSTER_START"
"""What all Pods of one Job share and no other Job has: its UID."""
MEANINGS = {
    "nnodes": f"{NODES[0]} (the Job's completions)",
    "nproc_per_node": f"{GPUS[0]} (the container's limit of nvidia.com/gpu)",
    "master_addr": f"{SERVICE} (the headless Service)",
}
"""By option of ``gpucluster launch``: what the manifest says instead of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOfJob:
    """One Pod of an Indexed Job. What nobody said is None. ``start`` is "" where the manifest does not give it."""

    index: int
    num_nodes: int | None
    num_gpus: int | None
    master_addr: str | None
    port: int | None
    start: str


def read_pod(variables: Mapping[str, str], *, hostname: str) -> PodOfJob | None:
    """The Pod that these variables belong to; None where no Indexed Job started this process.

    Raises:
        ConfigurationError: a number that is none, a Job that gives no index, or a hostname that does not end in the index.
    """
    if INDEX not in variables:
        return None
    index = _number(variables, INDEX)
    if index is None:
        raise ConfigurationError(f"{INDEX} is empty: the Job has to say completionMode: Indexed")
    num_nodes = next((found for name in NODES if (found := _number(variables, name)) is not None), None)
    # Trainer's torchrun may be left to count: "auto", "gpu".
    counts = (_number(variables, name) for name in GPUS if name in GPUS[:1] or variables.get(name, "").isdecimal())
    return PodOfJob(
        index=index,
        num_nodes=num_nodes,
        num_gpus=next((found for found in counts if found is not None), None),
        master_addr=_address(variables, hostname, index=index, num_nodes=num_nodes),
        port=_number(variables, PORT),
        start=variables.get(START, ""),
    )


def require_index(index: int, num_nodes: int | None) -> None:
    """Whether a Pod of this index belongs to a run of so many nodes.

    Raises:
        ConfigurationError: the Job has more completions than the run has nodes.
    """
    if num_nodes is not None and index >= max(1, num_nodes):
        raise ConfigurationError(
            f"this is the Pod with index {index}, and the run has {counted(num_nodes, 'node')} ({NODES[0]}): set "
            "completions and "
            f"parallelism of the Job to {num_nodes}, or {NODES[0]} to the number of completions"
        )


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise ConfigurationError(f"{name}={text!r} is no whole number: correct it in the manifest")
    return int(text)


def _address(variables: Mapping[str, str], hostname: str, *, index: int, num_nodes: int | None) -> str | None:
    """The name of the first Pod: this Pod's own with another index, in the headless Service."""
    if variables.get(MASTER):
        return variables[MASTER]
    if num_nodes == 1:
        return hostname
    service, own = variables.get(SERVICE, ""), f"-{index}"
    if not service:
        return None
    if not hostname.endswith(own):
        raise ConfigurationError(
            f"this Pod is called {hostname!r}, which does not end in {own!r}, so the first Pod's name is not known: give the "
            f"Pod template the subdomain {service!r} and no hostNetwork, or say --master-addr"
        )
    return f"{hostname.removesuffix(own)}-0.{service}"
