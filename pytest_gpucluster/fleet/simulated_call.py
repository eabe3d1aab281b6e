"""A call as the model of a simulated fleet sees it, and what its answers are made of. Pure."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pytest_gpucluster.fleet.simulation import FaultKind, Simulation, spread
from pytest_gpucluster.inventory.host_load import HostLoad, HostProcess
from pytest_gpucluster.inventory.telemetry import Telemetry
from pytest_gpucluster.protocol.plain_data import MARK
from pytest_gpucluster.thresholds.specs import GpuSpec, load_specs

PACKAGE = "pytest_gpucluster"


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedGroup:
    """The ranks of a process group, or a rank without one. What all members ask of it is found once.

    Two groups are never equal, so that no table has to compare their ranks.
    """

    simulation: Simulation
    ranks: tuple[int, ...]

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of the group, each once."""
        return tuple(sorted({self.simulation.place_of(rank)[0] for rank in self.ranks}))

    @cached_property
    def domains(self) -> Mapping[str | None, int]:
        """How many nodes of the group are in each NVLink domain; None where NVLink ends at the node."""
        return Counter(self.simulation.domain_of(node) for node in self.nodes)

    @cached_property
    def leaves_a_bad_leaf(self) -> bool:
        """Whether the group reaches out of a leaf switch whose uplinks are bad."""
        simulation = self.simulation
        leaves = {simulation.switch_of(node) for node in self.nodes}
        bad = {simulation.switch_of(fault.node) for fault in simulation.faults if fault.kind == "trunk"}
        return len(leaves) > 1 and bool(leaves & bad)

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest rank."""
        return min(self.ranks), max(self.ranks)

    @cached_property
    def training_rate(self) -> float:
        """What the slowest GPU of the group reaches in a training."""
        return min(self.simulation.rate(rank, "train") for rank in self.ranks)

    def with_fault(self, kind: FaultKind) -> tuple[int, ...]:
        """The ranks of the group, as numbered in it, at whose GPUs this fault is planted."""
        return _with_fault(self, kind)


@functools.lru_cache(maxsize=64)
def _with_fault(group: SimulatedGroup, kind: FaultKind) -> tuple[int, ...]:
    return tuple(number for number, rank in enumerate(group.ranks) if group.simulation.has(rank, kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """The call of one rank: the ranks of its process group (itself without a group), and the arguments of the function.

    ``turn``: how often the rank was called with this function before.
    """

    group: SimulatedGroup
    rank: int
    kwargs: dict[str, Any]
    turn: int = 0

    @property
    def simulation(self) -> Simulation:
        """The fleet."""
        return self.group.simulation

    @property
    def place(self) -> tuple[int, int]:
        """(node, GPU) of the rank."""
        return self.simulation.place_of(self.rank)

    @property
    def spec(self) -> GpuSpec:
        """The data sheet of the GPU."""
        return load_specs()[self.simulation.gpu_of(self.rank)]

    @property
    def device(self) -> str:
        """The name of the GPU by NVML."""
        return self.spec.names[0]

    @property
    def claimed(self) -> tuple[int, int]:
        """(node, GPU) that the rank uses: its own GPU, unless it is planted that two ranks share one."""
        node, gpu = self.place
        return node, (gpu or 2) - 1 if self.has("shared") else gpu

    @property
    def uuid(self) -> str:
        """A UUID that no real GPU has."""
        node, gpu = self.claimed
        return f"GPU-SIMULATED-{node:05d}-{gpu:02d}"

    @property
    def serial(self) -> str:
        """A serial number that no real GPU has."""
        node, gpu = self.claimed
        return f"SIM-{node:05d}-{gpu:02d}"

    @property
    def pci(self) -> str:
        """The PCI address of the GPU."""
        return pci_of(self.claimed[1])

    def rate(self, quantity: str) -> float:
        """What the rank's GPU reaches."""
        return self.simulation.rate(self.rank, quantity)

    def near(self, usual: float, quantity: str, *, chip: float = 0.0, host: float = 0.0) -> float:
        """A value around the usual one, the same in each call: ``chip`` and ``host`` say by how much GPUs and hosts differ.

        Both are relative sigmas. ``quantity`` is any name; equal names give a GPU equal deviations.
        """
        return self.simulation.near(self.rank, quantity, usual, chip=chip, host=host)

    def repeats(self, value: float, number: int, *, relative: float = 0.003) -> list[float]:
        """``number`` repeats around ``value``, which is their median; the farthest are off by ``relative``."""
        return spread(value, number, relative=relative)

    def host_load(self, *, loaded: bool = False) -> HostLoad:
        """What others do on the host: nothing, or somebody keeps eight CPUs busy."""
        users = [HostProcess(pid=4712, name="stress-ng", user="alice", cpus=8.0)] if loaded else []
        others = 8.0 if loaded else 0.1
        return HostLoad(
            total_cpus=112,
            while_cpus=others,
            idle_cpus=others,
            stolen_cpus=0.0,
            own_cpus=1.0,
            running=len(users),
            cpu_pressure_percent=0.0,
            memory_pressure_percent=0.0,
            memory_gb_s=None,
            users=users,
        )

    def telemetry(self, *, clock_mhz: float = 1755.0, power_w: float = 420.0, hot: bool = False) -> Telemetry:
        """What NVML says while the GPU works; ``hot``: the heat slows it."""
        half = self.has("pcie")
        return Telemetry(
            samples=20,
            sm_clock_min_mhz=clock_mhz - 15,
            sm_clock_mean_mhz=clock_mhz,
            sm_clock_max_mhz=clock_mhz + 15,
            temperature_max_c=91.0 if hot else 58.0 + self.place[1],
            power_mean_w=power_w,
            power_max_w=power_w + 8,
            pcie_gen_max=self.spec.pcie_gen - half,
            pcie_width_min=self.spec.pcie_width,
            event_reasons=["hw_thermal_slowdown"] if hot else ["sw_power_cap"],
            fault_reasons=["hw_thermal_slowdown"] if hot else [],
        )

    def has(self, kind: FaultKind) -> bool:
        """Whether this fault is planted at the rank's GPU."""
        return self.simulation.has(self.rank, kind)


def made(name: str, /, **fields: Any) -> dict[str, Any]:
    """A dataclass of this package as plain data; ``name`` is ``module:Class`` below the package."""
    return {MARK: f"{PACKAGE}.{name}", "fields": fields}


def pci_of(gpu: int) -> str:
    """The PCI address of a GPU of a node, as NVML spells it."""
    return f"00000000:{0x10 + gpu:02x}:00.0"
