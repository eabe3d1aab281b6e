"""Places (GPUs and nodes) and the inventory that was promised, as data. Imports nothing of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

Device: TypeAlias = Literal["cuda", "cpu"]
UNKNOWN_HOST = "an unknown host"
"""What messages call the host of a node that is absent and that no list names. Its number points to no host."""

PLACE_FIELDS = ("id", "node", "hostname", "gpu", "rank", "uuid", "serial", "pci")
"""What a report says of a place, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU of the expected inventory (or one node, with ``gpu`` None), bound to hardware once that said hello.

    Two places are equal when their ids are. ``rank`` is None while the place is unbound: nothing answers there. ``hostname`` is
    that of the host which answers, else of the host which is expected there; None where no list names one. ``board`` is
    which part the GPU is, as text: part number, VBIOS, module, and where in the rack, as far as the driver tells it.
    ``fabric`` is what the GPUs of an NVLink fabric have in common that spans nodes; None where NVLink ends at the node.
    ``switch`` is the node's leaf switch, None where nothing tells it. ``boot_id`` is the kernel's id of this boot of its host,
    ``driver`` the version of NVIDIA's driver there.
    """

    id: str
    node: int = field(compare=False)
    gpu: int | None = field(compare=False, default=None)
    rank: int | None = field(compare=False, default=None)
    hostname: str | None = field(compare=False, default=None)
    uuid: str | None = field(compare=False, default=None)
    serial: str | None = field(compare=False, default=None)
    pci: str | None = field(compare=False, default=None)
    board: Mapping[str, str] = field(compare=False, default_factory=dict)
    fabric: str | None = field(compare=False, default=None)
    switch: str | None = field(compare=False, default=None)
    boot_id: str | None = field(compare=False, default=None)
    driver: str | None = field(compare=False, default=None)

    def __str__(self) -> str:
        """The id, as in testcase names."""
        return self.id

    @property
    def on_host(self) -> str:
        """``gpu-node-0 gpu 3``; the id where the hostname is not known."""
        if self.hostname is None:
            return self.id
        return self.hostname if self.gpu is None else f"{self.hostname} {self.kind} {self.gpu}"

    @property
    def kind(self) -> str:
        """``gpu``, in a rehearsal ``cpu``; ``node``."""
        return "node" if self.gpu is None else "cpu" if self.id.endswith(f"-cpu{self.gpu}") else "gpu"

    @property
    def of_node(self) -> Place:
        """The node of this GPU as a place; a node itself."""
        return self if self.gpu is None else Place(id=f"node{self.node}", node=self.node, hostname=self.hostname)

    @property
    def shared(self) -> str | None:
        """What its node may share with other nodes, in words: its leaf switch, else its NVLink domain, if any is told."""
        domain = None if self.fabric is None else f"NVLink domain {self.fabric}"
        return domain if self.switch is None else f"switch {self.switch}"

    @property
    def part(self) -> str | None:
        """By what a person tells this GPU from others: its serial number, else its UUID; None where neither is known."""
        return f"serial {self.serial}" if self.serial else self.uuid

    @property
    def named(self) -> str:
        """For messages: ``gpu-node-0 gpu 3 serial 165 (node0-gpu3)``; the id where the hostname is not known."""
        if self.hostname is None:
            return self.id
        return f"{' '.join(filter(None, (self.on_host, self.part)))} ({self.id})"

    @property
    def label(self) -> str:
        """For messages, all by which the part is known: host, id, rank, serial number, UUID, PCI address."""
        known = (
            self.id if self.hostname is not None else None,
            f"rank {self.rank}" if self.rank is not None else "no rank" if self.gpu is not None else None,
            f"serial {self.serial}" if self.serial else None,
            self.uuid,
            f"PCI {self.pci}" if self.pci else None,
        )
        return f"{self.on_host} ({', '.join(part for part in known if part)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """The links that a GPU is promised to have. ``nvlink_gb_s`` is one NVLink's rate one way, in 10^9 bytes a second."""

    nvlink_gb_s: float
    pcie_gen: int
    pcie_width: int


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What was promised: ``num_nodes`` times ``gpus_per_node`` places, ids counted from 0. Places are built once.

    ``device`` is ``cuda``, or ``cpu`` in a rehearsal; ``fabric`` is what connects the nodes (the profile's word);
    ``gpu_names`` are the names by which NVML may call the promised GPU, ``gpu_links`` its links (None in a rehearsal),
    ``node_gb_s`` what the ports of a node carry one way, in 10^9 bytes/s (None where the profile does not say it),
    ``ring_gb_s`` the bus bandwidth of rings over all nodes (None where the profile does not say what its ports carry),
    ``shared_paths`` the folders that all nodes share, ``slurm_job`` the number of Slurm's job in which the run was started.
    ``gpus_are_stated``: options or limits state ``gpus_per_node``; otherwise it is what torchrun or NVML shows.
    ``requires_kernel_log``: every node has to be able to read its kernel log. ``measures_rails``: each adapter is measured by
    itself. ``nodes_per_domain``: how many nodes an NVLink domain has; 1 where NVLink ends at the node.
    ``hosts``: the expected host of each node, in the order of their numbers, as far as some list names them.
    ``hosts_are_remembered``: nobody gave that list, an earlier run met these hosts; it counts for them alone.
    ``versions``: by component, the faults that are known of its versions (``thresholds.schema.KnownFault``).
    """

    num_nodes: int
    gpus_per_node: int
    device: Device
    fabric: str = "none"
    gpu_names: tuple[str, ...] = ()
    gpu_links: GpuLinks | None = None
    node_gb_s: float | None = None
    ring_gb_s: float | None = None
    shared_paths: tuple[str, ...] = ()
    slurm_job: str | None = None
    gpus_are_stated: bool = False
    requires_kernel_log: bool = False
    measures_rails: bool = False
    nodes_per_domain: int = 1
    hosts: tuple[str, ...] = ()
    hosts_are_remembered: bool = False
    versions: Mapping[str, Sequence[Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_domains(self) -> int:
        """How many NVLink domains that span nodes the nodes are in, at least; 0 where NVLink ends at the node."""
        return 0 if 1 in (self.nodes_per_domain, self.num_nodes) else -(-self.num_nodes // self.nodes_per_domain)

    @property
    def fabric_between_nodes(self) -> str:
        """The promised fabric; ``none`` for one node, which has nothing to talk to."""
        return self.fabric if self.num_nodes > 1 else "none"

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """One place for each expected GPU (for each rank of a rehearsal), unbound."""
        kind = "cpu" if self.device == "cpu" else "gpu"
        return tuple(
            Place(id=f"node{node}-{kind}{gpu}", node=node, gpu=gpu, hostname=self.host_of(node))
            for node in range(self.num_nodes)
            for gpu in range(self.gpus_per_node)
        )

    @cached_property
    def nodes(self) -> tuple[Place, ...]:
        """One place for each expected node."""
        return tuple(Place(id=f"node{node}", node=node, hostname=self.host_of(node)) for node in range(self.num_nodes))

    def host_of(self, node: int) -> str | None:
        """The expected host of a node; None where no list names it."""
        return self.hosts[node] if node < len(self.hosts) else None

    @cached_property
    def by_id(self) -> Mapping[str, Place]:
        """Every GPU and node by id."""
        return {place.id: place for place in self.everything}

    @cached_property
    def members(self) -> Mapping[int, tuple[Place, ...]]:
        """The GPUs of each node and then the node itself, by its number."""
        each = self.gpus_per_node
        return {node.node: (*self.places[node.node * each : (node.node + 1) * each], node) for node in self.nodes}

    @cached_property
    def everything(self) -> tuple[Place, ...]:
        """Every GPU, then every node."""
        return (*self.places, *self.nodes)

    @property
    def facts(self) -> dict[str, int]:
        """What a limit may refer to as ``cluster.<name>``."""
        return {
            "nodes": self.num_nodes,
            "gpus_per_node": self.gpus_per_node,
            "world_size": self.num_nodes * self.gpus_per_node,
        }
