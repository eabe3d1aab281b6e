"""What differs between parts that should be alike: hosts, GPUs of one model, NICs of one kind. Pure: facts in, names out.

A fact is compared among all parts of a kind. What more than half of them have is usual; the others are outliers. Of two parts
that differ, and where no value has the majority, nobody can say which is right: all of them are named.
"""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.reading import NotAvailable, all_or_why, apply, or_none
from pytest_gpucluster.judging.agreement import majority
from pytest_gpucluster.judging.finding import HERE, Finding
from pytest_gpucluster.text import counted, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.inventory.nvml import GpuState
    from pytest_gpucluster.measurements.host import HostState

__all__ = ["DriftRules", "compare_facts", "facts_of_gpus", "facts_of_hosts", "facts_of_nics", "judge_drift", "summary"]

Value: TypeAlias = str | int | float | bool
PartKind: TypeAlias = Literal["host", "gpu", "nic"]
AT_LEAST = ">="
NAMED = 4
"""So many parts are named in the summary; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact of one part. ``among`` is what the part is compared with: parts of the same kind and the same ``among``."""

    kind: PartKind
    name: str
    node: str
    part: str
    value: Value | NotAvailable
    among: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A part whose fact is not as it should be; ``value`` in words."""

    node: str
    part: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FactRow:
    """One fact over all parts.

    ``usual`` is what the majority has; None without one. ``alike`` parts have it. ``demanded`` is what the recipe asks for,
    None for nothing. ``outliers`` have something else, ``unread`` did not give the value. ``is_judged`` is false for a fact
    that is shown only.
    """

    kind: PartKind
    name: str
    among: str
    usual: str | None
    alike: int
    demanded: str | None
    outliers: tuple[Deviation, ...]
    unread: tuple[Deviation, ...]
    is_judged: bool = True

    @property
    def is_compared(self) -> bool:
        """Whether any part gave the value."""
        return self.usual is not None or bool(self.outliers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRules:
    """How facts are compared.

    Attributes:
        ignore: names of facts that are not compared, as shell patterns.
        shown: names of facts that may differ, as shell patterns: whose do is shown. One that is demanded is judged.
        demanded: by name of a fact what it must be: a shell pattern, or ``>= 570.86`` for a version at least.
        percent: numbers that differ by no more are alike.
    """

    ignore: Collection[str] = ()
    shown: Collection[str] = ()
    demanded: Mapping[str, str] | None = None
    percent: float = 0.0


def compare_facts(facts: Iterable[Fact], rules: DriftRules) -> list[FactRow]:
    """Every fact over all parts that should be alike, in the order given.

    Raises:
        ValueError: a demanded fact is not among those that are known.
    """
    groups = grouped(((one.kind, one.name, one.among), one) for one in facts if not _fits(one.name, rules.ignore))
    demanded = rules.demanded or {}
    known = sorted({name for _, name, _ in groups})
    if unknown := sorted({*demanded}.difference(known)):
        what = f"nothing is known of {', '.join(unknown)}, which the recipe demands"
        raise ValueError(f"{what}; known are {', '.join(known)}")
    return [_row(group, demanded.get(name), rules) for (_, name, _), group in groups.items()]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _row(group: Sequence[Fact], demanded: str | None, rules: DriftRules) -> FactRow:
    numbers = [one.value for one in group if isinstance(one.value, int | float) and not isinstance(one.value, bool)]
    median = statistics.median(numbers) if numbers else 0.0
    words = [_text(one.value, median, rules.percent) for one in group]
    usual = majority([text for text in words if text is not None])
    outliers, unread = [], []
    for fact, text in zip(group, words, strict=True):
        one = Deviation(node=fact.node, part=fact.part, value=str(fact.value) if text is None else text)
        if text is None:
            unread.append(one)
        elif text != usual or (demanded is not None and not meets(text, demanded)):
            outliers.append(one)
    return FactRow(
        kind=group[0].kind,
        name=group[0].name,
        among=group[0].among,
        usual=usual,
        alike=len(group) - len(outliers) - len(unread),
        demanded=demanded,
        outliers=tuple(outliers),
        unread=tuple(unread),
        is_judged=demanded is not None or not _fits(group[0].name, rules.shown),
    )


def _text(value: Value | NotAvailable, median: float, percent: float) -> str | None:
    """The value in words; a number near the median of all is the median. None: it was not read."""
    if isinstance(value, NotAvailable):
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value
    near = abs(value - median) <= percent / 100 * abs(median)
    return f"{median if near else value:.10g}" if isinstance(value, int) else f"{median if near else value:.6g}"


def meets(text: str, demanded: str) -> bool:
    """Whether a value is as demanded: it fits a shell pattern, or its version is at least the one after ``>=``."""
    if not demanded.startswith(AT_LEAST):
        return fnmatch.fnmatchcase(text, demanded)
    return _version(text) >= _version(demanded.removeprefix(AT_LEAST)) > ()


def _version(text: str) -> tuple[int, ...]:
    """The numbers of a version up to the first word: (6, 8, 0, 45) of ``6.8.0-45-generic``."""
    found = re.match(r"\s*v?(\d+(?:[.-]\d+)*)", text)
    return tuple(int(number) for number in re.split(r"[.-]", found[1])) if found else ()


def judge_drift(rows: Iterable[FactRow], node: str) -> Finding:
    """What deviates at a node, and what was not read there but elsewhere."""
    bad, unknown = [], []
    for row in rows:
        if row.is_compared and row.is_judged:
            bad += [f"{_named(row, one)} {one.value}, {_should(row)}" for one in row.outliers if one.node == node]
            unknown += [f"{_named(row, one)} {one.value}" for one in row.unread if one.node == node]
    return Finding(bad={HERE: bad}, unknown={HERE: unknown}, kind="host")


def _named(row: FactRow, one: Deviation) -> str:
    return f"{row.name}:" if row.kind == "host" else f"{one.part} {row.name}:"


def _should(row: FactRow) -> str:
    """What the value should be, in words."""
    if row.demanded is not None:
        return f"demanded is {row.demanded}"
    total = row.alike + len(row.outliers)
    return f"{row.alike} of {total} have {row.usual}" if row.usual is not None else f"no majority among {total}"


def summary(rows: Sequence[FactRow], *, num_nodes: int) -> str:
    """One line: how much was compared, and which parts differ in what."""
    compared = [row for row in rows if row.is_compared]
    odd = grouped((one.part, row.name) for row in compared for one in row.outliers)
    facts = counted(len({row.name for row in compared}), "fact")
    if num_nodes == 1 and not odd:
        return f"{facts} read, and no second host to compare with"
    what = f"{facts} compared over {counted(num_nodes, 'node')}"
    if not odd:
        return f"{what}, all alike"
    named = shortlist([f"{part} ({', '.join(dict.fromkeys(names))})" for part, names in odd.items()], most=NAMED)
    return f"{what}; {counted(len(odd), 'part differs', 'parts differ')}: {named}"


OF_HOST: Mapping[str, str] = {
    "kernel": "kernel",
    "operating_system": "operating system",
    "cpu_model": "CPU model",
    "sockets": "CPU sockets",
    "cores": "CPU cores",
    "cpus": "CPUs",
    "smt": "SMT",
    "governors": "CPU governor",
    "idle_states": "CPU idle states",
    "numa_nodes": "NUMA nodes",
    "numa_balancing": "NUMA balancing",
    "iommu": "IOMMU",
    "memory_gib": "memory GiB",
    "huge_pages": "huge pages",
    "transparent_huge_pages": "transparent huge pages",
    "memlock": "memlock limit",
    "ipc_lock": "right to lock memory",
    "nofile": "open files limit",
    "shm_gib": "shared memory GiB",
    "mlx5_driver": "mlx5 driver",
    "cpu_faults": "CPU faults without a mend",
    "perf_events": "perf_event_paranoid",
    "gpu_counters": "who may profile GPUs",
    "gdrcopy": "gdrcopy",
}
"""The fields of ``HostFacts``, each with its name in words."""
OF_GPU: Mapping[str, str] = {
    "vbios": "VBIOS",
    "board_part_number": "GPU board",
    "driver": "driver",
    "memory_gib": "GPU memory GiB",
    "ecc_enabled": "ECC",
    "mig": "MIG",
    "persistence": "persistence mode",
    "power_limit_w": "power limit W",
    "pcie_gen_max": "PCIe generation",
    "pcie_width_max": "PCIe lanes",
}
"""The fields of ``GpuState``, each with its name in words."""
OF_NIC: Mapping[str, str] = {"firmware": "NIC firmware", "board_id": "NIC board", "driver": "NIC driver"}
"""The fields of ``Nic``, each with its name in words."""
FULL_MEMBER, LIMITED_BY_DEFAULT = 0x8000, 0x7FFF
"""The bit of a partition key that makes a full member; the key of the default partition that fabrics give to every port."""
UNSET = "unset"
OF_ONE_HOST = ("NCCL_HOSTID",)
"""Variables that name their host, so that no two are alike."""


def facts_of_hosts(states: Mapping[str, HostState]) -> Iterator[Fact]:
    """The facts of each host by its node's id. A variable or version that some hosts have is ``unset`` on the others."""
    for node, state in states.items():
        yield from _facts(OF_HOST, state.facts, kind="host", node=node, part=node)
    versions = {node: state.versions for node, state in states.items()}
    variables = {
        node: {name: value for name, value in state.variables.items() if name not in OF_ONE_HOST}
        for node, state in states.items()
    }
    for prefix, table in (("", versions), ("variable ", variables)):
        for key in dict.fromkeys(key for one in table.values() for key in one):
            for node, one in table.items():
                yield Fact(kind="host", name=f"{prefix}{key}", node=node, part=node, value=one.get(key, UNSET))


def _facts(names: Mapping[str, str], readings: Any, **of_part: Any) -> Iterator[Fact]:
    """One fact for each of these fields."""
    for field, name in names.items():
        value = getattr(readings, field)
        yield Fact(name=name, value=", ".join(value) if isinstance(value, list) else value, **of_part)


def facts_of_gpus(node: str, states: Mapping[str, GpuState]) -> Iterator[Fact]:
    """The facts of the GPUs of a node, by the GPU's id, among GPUs of their model."""
    for part, state in states.items():
        yield Fact(kind="gpu", name="GPU model", node=node, part=part, value=state.name)
        yield from _facts(OF_GPU, state, kind="gpu", node=node, part=part, among=state.name)


def facts_of_nics(node: str, nics: list[Nic] | NotAvailable) -> Iterator[Fact]:
    """The facts of the NICs of a node, among adapters of their type, and how many of each type the host has."""
    if isinstance(nics, NotAvailable):
        yield Fact(kind="host", name="NICs", node=node, part=node, value=nics)
        return
    kinds = [str(nic.hca_type) for nic in nics]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted({*kinds}))
    yield Fact(kind="host", name="NICs", node=node, part=node, value=counts or "none")
    up = [port for nic in nics for port in or_none(nic.ports) or () if port.state == "ACTIVE"]
    keys = [apply(_keys_in_words, port.pkeys) for port in up if port.fabric == "infiniband"]
    roce = [port for port in up if port.fabric == "roce"]
    by_name: dict[str, list[Any]] = {"partition keys": keys, "GIDs": [port.roce_gid for port in roce]}
    by_name |= {"MTU": [port.mtu for port in up], "congestion control (ECN) priorities": [port.ecn for port in roce]}
    for name, values in by_name.items():
        if values:
            value = apply(lambda found: "; ".join(sorted({str(one) for one in found})), all_or_why(values))
            yield Fact(kind="host", name=name, node=node, part=node, value=value)
    for nic, kind in zip(nics, kinds, strict=True):
        yield from _facts(OF_NIC, nic, kind="nic", node=node, part=f"{node} {nic.device}", among=kind)


def _keys_in_words(keys: Sequence[str]) -> str:
    """``0x8001, 0x0002 (limited)``: limited members of a partition reach its full members only."""
    limited = [int(key, 16) < FULL_MEMBER and int(key, 16) != LIMITED_BY_DEFAULT for key in keys]
    return ", ".join(f"{key} (limited)" if is_limited else key for key, is_limited in zip(keys, limited, strict=True)) or "none"
