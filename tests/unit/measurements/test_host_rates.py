"""The triad on each NUMA node: where its threads run, what is counted, and what is no rate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpucluster.measurements import host_rates as module
from pytest_gpucluster.measurements.host_rates import HostMemory, cores_by_node, host_memory

if TYPE_CHECKING:
    from pathlib import Path

SMALL = 3 << 20


def plant(root: Path, *, nodes: dict[int, str], memory_kb: dict[int, int] | None = None, cores: tuple[str, ...] = ()) -> Path:
    """A sysfs with NUMA nodes by their CPUs, and cores by their hardware threads."""
    for number, cpus in nodes.items():
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
        size = (memory_kb or {}).get(number, 1 << 31)
        names = ("MemTotal", "MemFree", "Active(file)", "Inactive(file)")
        (folder / "meminfo").write_text("".join(f"Node {number} {name}: {size} kB\n" for name in names))
    for core in cores:
        for cpu in module.numa.parse_cpulist(core):
            folder = root / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(core)
    return root


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (range(16), {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}),
        ([1, 2, 9, 15], {0: [1, 2], 1: [15]}),  # 9 is the other thread of core 1
        ([0, 1], {0: [0, 1], 1: []}),
    ],
)
def test_one_thread_on_each_core(tmp_path: Path, allowed: Any, expected: dict[int, list[int]]) -> None:
    """Of those that this process may use; a node without one of them is there, without a CPU."""
    cores = tuple(f"{cpu},{cpu + 8}" for cpu in range(8))
    root = plant(tmp_path, nodes={0: "0-3,8-11", 1: "4-7,12-15", 2: ""}, cores=cores)
    assert cores_by_node(frozenset(allowed), root=root) == expected


def test_memory_without_cpus_is_left_out(tmp_path: Path) -> None:
    """A GPU's memory may be a node of its own, and a node may have no memory."""
    root = plant(tmp_path, nodes={0: "0-1", 1: "", 2: "2-3"}, memory_kb={2: 0})
    assert cores_by_node(frozenset(range(4)), root=root) == {0: [0, 1]}


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    """All CPUs together, under no number."""
    assert cores_by_node(frozenset({0, 3}), root=tmp_path) == {None: [0, 3]}


def test_this_host() -> None:
    """Every node that may be used has a rate, the slowest is the value; affinity and torch's threads stay as they were."""
    before = os.sched_getaffinity(0), torch.get_num_threads()
    found = host_memory(size_bytes=SMALL, repeats=3)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    assert found.triad_gb_s == min(one.triad_gb_s for one in found.nodes) > 0
    assert len(found.repeats_gb_s) == 3
    assert found.evidence["GiB each"] == SMALL / 2**30


def test_three_arrays_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of two reads and a write of each element, in each pass, over the span from the first start to the last end."""
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(module, "cores_by_node", lambda _allowed: {0: sorted(os.sched_getaffinity(0))[:1]})
    found = host_memory(size_bytes=SMALL, repeats=2)
    assert found.repeats_gb_s == [pytest.approx(module.PASSES * SMALL / 1e9, abs=1e-6)] * 2


def test_the_slowest_node_is_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a node on which this process may not run is named."""
    rates = {(0,): [5.0, 7.0, 6.0], (1,): [3.0, 2.0, 4.0]}
    monkeypatch.setattr(module, "cores_by_node", lambda _allowed: {0: [0], 1: [1], 2: []})
    monkeypatch.setattr(module, "_triad", lambda cpus, _size, _repeats: rates[tuple(cpus)])
    found = host_memory(size_bytes=SMALL, repeats=3)
    assert (found.triad_gb_s, found.repeats_gb_s, found.not_measured) == (3.0, [3.0, 2.0, 4.0], [2])
    assert [(one.node, one.triad_gb_s) for one in found.nodes] == [(0, 6.0), (1, 3.0)]


def test_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a rate."""
    monkeypatch.setattr(module.torch, "add", lambda _b, _c, *, alpha, out: out.fill_(alpha))
    with pytest.raises(ArithmeticError, match="a sum of the triad on CPU"):
        host_memory(size_bytes=SMALL, repeats=1)


def test_one_thread_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is raised, and no thread waits for it for ever."""

    def refuse(_thread: int, cpus: set[int]) -> None:
        if cpus == {1}:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(module, "cores_by_node", lambda _allowed: {0: [0, 1, 2]})
    monkeypatch.setattr(module.os, "sched_setaffinity", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        host_memory(size_bytes=SMALL, repeats=2)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Named with the node, before the kernel has to kill anybody."""
    locality = module.numa.read_locality(None, root=plant(tmp_path, nodes={0: "0-3", 1: "4-7"}, memory_kb={0: 1}))
    monkeypatch.setattr(module.numa, "read_locality", lambda _pci: locality)
    with pytest.raises(MemoryError, match=r"NUMA node 0 has 2.861e-06 GiB free, and \S+ GiB are needed"):
        host_memory(size_bytes=SMALL, repeats=1)


def test_a_virtual_machine_that_grew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The only node shows the memory of its start. A host with 122 GiB free had "5.9 GiB free, and 6 GiB are needed"."""
    locality = module.numa.read_locality(None, root=plant(tmp_path, nodes={0: "0-3"}, memory_kb={0: 1}))
    monkeypatch.setattr(module.numa, "read_locality", lambda _pci: locality)
    assert host_memory(size_bytes=SMALL, repeats=1).triad_gb_s > 0


@pytest.mark.parametrize("wrong", [{"size_bytes": 8}, {"repeats": 0}])
def test_nothing_to_measure(wrong: dict[str, int]) -> None:
    """Said."""
    with pytest.raises(ValueError, match="nothing to measure"):
        host_memory(**{"size_bytes": SMALL, "repeats": 1, **wrong})


def test_the_result_is_frozen() -> None:
    """As every measurement's."""
    assert HostMemory.__dataclass_params__.frozen  # type: ignore[attr-defined]
