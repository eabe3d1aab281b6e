"""What is simulated: the shape of the fleet, its GPU, its seed, and its planted faults. Pure data.

The hardware of a simulated fleet: what each GPU reaches in each quantity. Pure and seeded: equal seeds, equal parts.

Typical values and spreads are those of real parts (docs/results, docs/decisions/0011). A deviation is cut at two sigmas, so
that a healthy part of the model is never named. With real parts that happens in some of the largest runs.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.specs import GpuSpec

FaultKind: TypeAlias = Literal[
    "absent", "busy", "cable", "clique", "clock", "corrupt", "dead", "dimm", "disk", "ecc", "fast", "guest", "hbm", "hung",
    "late", "links", "loaded", "lost", "mig", "model", "noisy", "nvlink", "nvls", "odd", "pair", "pattern", "pcie", "rail",
    "reset", "shared", "slow", "sockets", "throttled", "trunk", "uplink", "versions", "xid",
]  # fmt: skip
FAULTS: Mapping[FaultKind, str] = {
    "absent": "never joins",
    "busy": "another program holds its memory",
    "cable": "one port of the node's NICs has no link",
    "clique": "the node is not in the NVLink domain of its rack (GB200 NVL72)",
    "clock": "the node's clock is late",
    "corrupt": "computes wrong bits",
    "dead": "its worker dies under lasting load",
    "dimm": "memory modules of the node are missing",
    "disk": "the node's scratch is half as fast as others",
    "ecc": "has uncorrected memory errors and a row that waits for a remap",
    "fast": "is measured ten times as fast as it is, by a wrong clock",
    "guest": "another program holds its memory, and has left when the others are measured",
    "hbm": "has 10 % less memory bandwidth",
    "hung": "hangs in the memory test",
    "late": "joins and answers late, and is healthy",
    "links": "its NVLinks carry half of their rate",
    "loaded": "others keep the node's CPUs busy when its links to the host are measured for the first time",
    "lost": "the node is gone from the test under lasting load on",
    "mig": "is in MIG mode",
    "model": "is of another model",
    "noisy": "its link to the host is disturbed until it is measured again",
    "nvlink": "one of its NVLinks is down",
    "nvls": "the all-reduce of the node runs without NVLink SHARP",
    "odd": "the node has another kernel",
    "pair": "speaks to the next GPU of its node through the host",
    "pattern": "loses bits of its memory",
    "pcie": "its link to the host came up at half its rate",
    "rail": "one adapter of the node carries half of its rate",
    "reset": "asks to be reset",
    "shared": "its rank uses the GPU of a neighbour, so that two ranks claim that one",
    "slow": "computes 30 % slower at the same clock",
    "sockets": "the node speaks to others over sockets",
    "throttled": "is slowed by heat under lasting load",
    "trunk": "the uplinks of the node's leaf switch carry half of their rate",
    "uplink": "the node's adapters carry half of their rate",
    "versions": "the node has another torch and another driver",
    "xid": "the driver reports during the run that it has fallen off the bus",
}
NODES_ONLY = (
    "cable", "clique", "clock", "dimm", "disk", "loaded", "lost", "nvls", "odd", "rail", "sockets", "trunk", "uplink",
    "versions",
)  # fmt: skip
OTHER_MODELS = ("h100-sxm", "h200-sxm")
"""The model of a GPU that is of another one: the first that is another."""
GPUS_ONLY = ("pair", "shared")
PART = re.compile(r"node(\d{1,6})(?:-gpu(\d{1,3}))?", re.ASCII)
FORM = "say PART:FAULT, for example node3-gpu5:slow or node7:absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """One planted fault. The node is the one with this number in its hostname; ``gpu`` None: all of the node."""

    node: int
    gpu: int | None
    kind: FaultKind

    def __str__(self) -> str:
        """The fault as it is written on the command line."""
        part = f"node{self.node}" if self.gpu is None else f"node{self.node}-gpu{self.gpu}"
        return f"{part}:{self.kind}"


def parse_fault(text: str) -> PlantedFault:
    """``node23-gpu3:slow`` as a :class:`PlantedFault`.

    Raises:
        ConfigurationError: no such form or fault, a fault of a node that names a GPU, or one of a GPU that names a node.
    """
    part, _, kind = text.partition(":")
    found = PART.fullmatch(part)
    if found is None:
        raise ConfigurationError(f"{text!r} names no part and fault; {FORM}")
    if kind not in FAULTS:
        known = ", ".join(FAULTS)
        raise ConfigurationError(f"{text!r}: there is no fault {kind!r}; faults: {known}.{did_you_mean(kind, [*FAULTS])}")
    if kind in NODES_ONLY and found[2] is not None:
        raise ConfigurationError(f"{text!r}: {kind} is a fault of a whole node; say node{found[1]}:{kind}")
    if kind in GPUS_ONLY and found[2] is None:
        raise ConfigurationError(f"{text!r}: {kind} is a fault of one GPU; say {part}-gpu3:{kind}")
    return PlantedFault(node=int(found[1]), gpu=None if found[2] is None else int(found[2]), kind=cast("FaultKind", kind))


MOST_GPUS = 65536
SHAPE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})", re.ASCII)
NODES_OF_A_LEAF = 4
JOIN_S = 3.0
"""How long a simulated run waits for absent ranks, once every present rank has joined."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A fleet of ``nodes`` times ``gpus_per_node`` GPUs that does not exist. What is derived from its faults is built once.

    ``gpu`` is the id of a GPU spec, ``fabric`` what connects the nodes, ``nodes_per_domain`` how many of them NVLink joins.
    Equal simulations give equal values.
    """

    nodes: int
    gpus_per_node: int
    gpu: str = "h200-sxm"
    fabric: str = "infiniband"
    nodes_per_domain: int = 1
    seed: int = 0
    faults: tuple[PlantedFault, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of GPUs, absent ones included."""
        return self.nodes * self.gpus_per_node

    @property
    def facts(self) -> dict[str, Any]:
        """The simulation as results.json and the journal have it."""
        shown = {name: getattr(self, name) for name in ("nodes", "gpus_per_node", "gpu", "seed")}
        return {**shown, "faults": [str(fault) for fault in self.faults]}

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hostname of each node, absent ones included."""
        return tuple(hostname_of(node) for node in range(self.nodes))

    def place_of(self, rank: int) -> tuple[int, int]:
        """(node, GPU) of a rank, both counted from 0."""
        return divmod(rank, self.gpus_per_node)

    def switch_of(self, node: int) -> str:
        """The leaf switch of a node."""
        return f"leaf{node // NODES_OF_A_LEAF}"

    def domain_of(self, node: int) -> str | None:
        """What the GPUs of a node's NVLink fabric have in common; None where NVLink ends at the node."""
        if self.nodes_per_domain == 1:
            return None
        alone = "clique" in self._kinds.get((node, None), ())
        return f"00000000-0000-0000-0000-{1 + node // self.nodes_per_domain:012d}/{node + 2 if alone else 1}"

    def has(self, rank: int, kind: FaultKind) -> bool:
        """Whether this fault is planted at this rank's GPU."""
        node, gpu = self.place_of(rank)
        return kind in self._kinds.get((node, gpu), ()) or kind in self._kinds.get((node, None), ())

    def gpu_of(self, rank: int) -> str:
        """The GPU spec of a rank's GPU."""
        if not self.has(rank, "model"):
            return self.gpu
        return OTHER_MODELS[self.gpu == OTHER_MODELS[0]]

    def rate(self, rank: int, quantity: str) -> float:
        """What the rank's GPU reaches, in the unit of :data:`TYPICAL`."""
        typical = TYPICAL[quantity]
        value = self.near(rank, quantity, usual(self.gpu_of(rank), quantity), chip=typical.chip, host=typical.host)
        for kind, losses in LOSSES.items():
            if quantity in losses and self.has(rank, kind):
                value *= losses[quantity]
        return value * TOO_FAST if quantity in TIMED and self.has(rank, "fast") else value

    def near(self, rank: int, quantity: str, usual: float, *, chip: float, host: float) -> float:
        """What a healthy GPU reaches; ``chip`` and ``host`` are the sigmas of :class:`Typical`."""
        node, gpu = self.place_of(rank)
        seed = f"{self.seed}/{quantity}/node{node}"
        return usual * (1 + _deviation(seed, host)) * (1 + _deviation(f"{seed}-gpu{gpu}", chip))

    @cached_property
    def _kinds(self) -> Mapping[tuple[int, int | None], list[FaultKind]]:
        """The kinds of fault at each GPU, and under GPU None those of a whole node."""
        return grouped(((fault.node, fault.gpu), fault.kind) for fault in self.faults)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The ranks that join."""
        return tuple(rank for rank in range(self.world_size) if not self.has(rank, "absent"))


def hostname_of(node: int) -> str:
    """The hostname of a node."""
    return f"gpu-node-{node}"


def parse_simulation(shape: str, *, seed: int = 0, faults: list[str]) -> Simulation:
    """``128x8`` and texts such as ``node23-gpu3:slow`` as a :class:`Simulation`.

    Raises:
        ConfigurationError: a shape or a fault that is not understood, or a fault outside of the fleet.
    """
    found = SHAPE.fullmatch(shape)
    nodes, gpus = map(int, found.groups()) if found is not None else (0, 0)
    if not 0 < nodes * gpus <= MOST_GPUS:
        raise ConfigurationError(f"{shape!r} is no fleet; say NODESxGPUS, for example 128x8, with at most {MOST_GPUS} GPUs")
    simulation = Simulation(nodes=nodes, gpus_per_node=gpus, seed=seed, faults=tuple(map(parse_fault, faults)))
    for fault in simulation.faults:
        if fault.node >= simulation.nodes or (fault.gpu or 0) >= simulation.gpus_per_node:
            last = f"node{simulation.nodes - 1}-gpu{simulation.gpus_per_node - 1}"
            raise ConfigurationError(f"{str(fault)!r} is outside of the fleet {shape}, whose last GPU is {last}")
        if fault.kind in GPUS_ONLY and simulation.gpus_per_node == 1:
            raise ConfigurationError(f"{str(fault)!r} needs a neighbour, and the nodes of the fleet {shape} have one GPU")
    if not simulation.present:
        raise ConfigurationError(f"nothing of the fleet {shape} is present: nobody would answer")
    return simulation


MODELS = ("h200-sxm", "h100-sxm", "b200-sxm", "gb200-nvl72")
CUT_SIGMAS = 2.0
PRODUCTS = ("bfloat16", "float16", "float8_e4m3fn", "tf32", "float32", "float64", "int8")
LINKS = ("h2d", "d2h", "h2d_all", "d2h_all")


@dataclass(frozen=True, slots=True)
class Typical:
    """The relative sigma among the GPUs of a host and among the means of hosts, and the typical value of each model."""

    chip: float
    host: float
    values: tuple[float, ...]


TYPICAL: Mapping[str, Typical] = {
    "bfloat16": Typical(0.011, 0.005, (785.0, 800.0, 1720.0, 1822.0)),
    "float16": Typical(0.011, 0.005, (768.0, 768.0, 1628.0, 1628.0)),
    "float8_e4m3fn": Typical(0.011, 0.005, (1550.0, 1523.0, 2850.0, 2850.0)),
    "tf32": Typical(0.011, 0.005, (405.0, 414.0, 850.0, 850.0)),
    "float32": Typical(0.0015, 0.001, (51.0, 51.6, 65.0, 65.0)),
    "float64": Typical(0.003, 0.001, (56.0, 57.0, 34.0, 34.0)),
    "int8": Typical(0.004, 0.002, (957.0, 980.0, 2800.0, 2800.0)),
    "sustained": Typical(0.009, 0.004, (664.0, 694.0, 1450.0, 1550.0)),
    "at_clock": Typical(0.004, 0.001, (0.913, 0.913, 0.913, 0.913)),
    "hbm": Typical(0.0015, 0.001, (4.35, 3.05, 6.3, 6.55)),
    "h2d": Typical(0.002, 0.004, (55.2, 55.2, 55.2, 200.0)),
    "d2h": Typical(0.002, 0.004, (55.1, 55.1, 55.1, 193.0)),
    "h2d_all": Typical(0.01, 0.01, (48.0, 48.0, 48.0, 170.0)),
    "d2h_all": Typical(0.01, 0.01, (39.0, 39.0, 39.0, 182.0)),
    "train": Typical(0.006, 0.002, (18900.0, 18488.0, 40000.0, 40000.0)),
    "triad": Typical(0.0, 0.005, (250.0, 250.0, 250.0, 250.0)),
    "write": Typical(0.0, 0.02, (5.6, 5.6, 5.6, 5.6)),
    "read": Typical(0.0, 0.02, (6.5, 6.5, 6.5, 6.5)),
}
"""By quantity, the values in the order of :data:`MODELS`. Of B200 and GB200 somebody published BF16, FP16 and HBM; the others
are guesses."""
APART: Mapping[tuple[str, str], float] = {("a100-sxm", "sustained"): 250.0}
"""Where a model holds more of its figure than the first one; a guess."""
LINKED_ALIKE: Mapping[str, str] = {"gh200": "gb200-nvl72", "gb300-nvl72": "gb200-nvl72"}
"""GPUs beside a Grace are linked to their host as this model is."""
FIGURES: Mapping[str, str] = {
    "bfloat16": "bf16_tflops",
    "float16": "fp16_tflops",
    "float8_e4m3fn": "fp8_tflops",
    "tf32": "tf32_tflops",
    "float32": "fp32_tflops",
    "float64": "fp64_tflops",
    "int8": "int8_tops",
    "sustained": "bf16_tflops",
    "hbm": "hbm_tb_s",
    "train": "bf16_tflops",
    **dict.fromkeys(LINKS, "pcie_gb_s"),
}
"""The figure of a sheet that bounds a quantity."""
LOSSES: Mapping[FaultKind, Mapping[str, float]] = {
    "slow": dict.fromkeys((*PRODUCTS, "sustained", "at_clock", "train"), 0.7),
    "hbm": {"hbm": 0.9},
    "throttled": {"sustained": 0.8},
    "pcie": dict.fromkeys(LINKS, 0.48),
    "dimm": {"triad": 0.75},
    "disk": {"write": 0.5, "read": 0.5},
}
"""What is left of a quantity at a GPU with this fault."""
TIMED = (*PRODUCTS, "sustained", "hbm", *LINKS, "train")
TOO_FAST = 10.0
"""By so much every quantity in :data:`TIMED` is too high where the clock is wrong (fault ``fast``)."""


def _specs() -> Mapping[str, GpuSpec]:
    from pytest_gpucluster.thresholds.specs import load_specs  # noqa: PLC0415 -- pydantic takes as long as a whole command

    return load_specs()


def require_model(gpu: str) -> None:
    """Check that the hardware of this GPU spec can be simulated.

    Raises:
        ConfigurationError: it cannot.
    """
    specs = _specs()
    if gpu not in specs:
        known = [*{**dict.fromkeys(MODELS), **specs}]
        hint = did_you_mean(gpu, known) or " Your own profile: -- --gpucluster-thresholds FILE --gpucluster-profile NAME"
        raise ConfigurationError(f"there is no simulated {gpu}; simulated GPUs: {', '.join(known)}.{hint}")


def usual(gpu: str, quantity: str) -> float:
    """What a model reaches: its column, else as much of its sheet's figure as the first of :data:`MODELS` does of its own."""
    values = TYPICAL[quantity].values
    like = LINKED_ALIKE.get(gpu, gpu) if quantity in LINKS else gpu
    if like in MODELS:
        return values[MODELS.index(like)]
    if (gpu, quantity) in APART:
        return APART[gpu, quantity]
    figure = FIGURES.get(quantity)
    mine, first = (getattr(_specs()[one], figure, None) if figure else None for one in (gpu, MODELS[0]))
    return float(values[0] * mine / first) if mine and first else values[0]


@functools.lru_cache(maxsize=65536)
def _deviation(seed: str, sigma: float) -> float:
    """A normal deviation, cut at :data:`CUT_SIGMAS`."""
    return max(-CUT_SIGMAS, min(CUT_SIGMAS, random.Random(seed).gauss(0.0, 1.0))) * sigma


def spread(value: float, number: int, *, relative: float = 0.003) -> list[float]:
    """``number`` repeats around ``value``, which is their median."""
    if number == 1:
        return [value]
    return [round(value * (1 + relative * (2 * at / (number - 1) - 1)), 6) for at in range(number)]
