"""NUMA by planted sysfs trees: present, missing and malformed files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.inventory import numa

if TYPE_CHECKING:
    from pathlib import Path

GPU = "0000:1b:00.0"
NVML_GPU = "00000000:1B:00.0"
SOCKETS = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}


def plant_node(root: Path, number: int, *, cpus: str = "0\n", distance: str = "10\n", memory_kb: int = 1000) -> Path:
    """A node as Linux 6 shows it, a tenth of its memory free and three tenths cached files."""
    folder = root / "devices" / "system" / "node" / f"node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpus)
    (folder / "distance").write_text(distance)
    sizes = {"MemTotal": 10, "MemFree": 1, "Active": 5, "Active(file)": 2, "Inactive(file)": 1}
    lines = [f"Node {number} {name}:  {parts * memory_kb // 10} kB" for name, parts in sizes.items()]
    (folder / "meminfo").write_text("\n".join([*lines, f"Node {number} HugePages_Total:     0", ""]))
    return folder


def plant_gpu(root: Path, node: str, *, pci: str = GPU) -> None:
    """A PCI device with this text in ``numa_node``."""
    folder = root / "bus" / "pci" / "devices" / pci
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(node)


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of eight CPUs; the GPU is on the second."""
    for number, cpus in SOCKETS.items():
        plant_node(tmp_path, number, cpus=cpus, distance=("10 21\n", "21 10\n")[number])
    plant_gpu(tmp_path, "1\n")
    return tmp_path


@pytest.mark.parametrize("pci", [GPU, NVML_GPU])
def test_gpu_is_found_by_either_spelling(two_sockets: Path, pci: str) -> None:
    """Sysfs and NVML write the same address differently."""
    found = numa.read_locality(pci, root=two_sockets)
    assert found.node == 1
    assert found.cpus_of(1) == frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    assert (found.memory_nodes, found.farthest) == ([0, 1], 0)


def test_what_a_node_has(two_sockets: Path) -> None:
    """Sizes in bytes; what it can give is free memory and cached files, not everything it calls active."""
    node = numa.read_nodes(root=two_sockets)[0]
    assert node.number == 0
    assert node.memory_bytes == 1000 * 1024
    assert node.available_bytes == 400 * 1024
    assert node.distances == {0: 10, 1: 21}


def test_misplacement_shows(two_sockets: Path) -> None:
    """A process held to the other socket has no CPU of the GPU's node; one that may run anywhere has all of them."""
    found = numa.read_locality(GPU, root=two_sockets)
    assert not numa.parse_cpulist(SOCKETS[0]) & found.cpus_of(found.node)
    assert frozenset(range(16)) & found.cpus_of(found.node) == numa.parse_cpulist(SOCKETS[1])


@pytest.mark.parametrize("text", ["-1\n", "", "x\n", "1.0\n", "0x1\n", "7\n"])
def test_node_nobody_can_mean_is_unknown(tmp_path: Path, text: str) -> None:
    """Minus one (the firmware does not say), garbage, and a node that the machine does not have: never node 0."""
    plant_node(tmp_path, 0)
    plant_node(tmp_path, 1)
    plant_gpu(tmp_path, text)
    found = numa.read_locality(GPU, root=tmp_path)
    assert found.node is None
    assert found.farthest is None
    assert found.cpus_of(found.node) == frozenset()


@pytest.mark.parametrize("planted", ["no device", "no file", "no nodes", "nothing"])
def test_missing_is_unknown(tmp_path: Path, planted: str) -> None:
    """A hidden device, a kernel without NUMA, no sysfs at all."""
    if planted in ("no device", "no file"):
        plant_node(tmp_path, 0)
    if planted == "no file":
        (tmp_path / "bus" / "pci" / "devices" / GPU).mkdir(parents=True)
    if planted == "no nodes":
        plant_gpu(tmp_path, "0\n")
    found = numa.read_locality(GPU, root=tmp_path)
    assert found.node is None
    assert len(found.nodes) == (1 if planted in ("no device", "no file") else 0)


def test_without_a_device_the_nodes_are_read(two_sockets: Path) -> None:
    """A rehearsal has no GPU, and still a host."""
    found = numa.read_locality(None, root=two_sockets)
    assert found.node is None
    assert found.memory_nodes == [0, 1]
    assert found.available_bytes(None) == 2 * 400 * 1024


def test_room_of_a_node(two_sockets: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One of two nodes has its own; the only node, all nodes and an unknown one have at least what the kernel has free."""
    free_bytes = 1 << 20  # far below what this machine has
    found = numa.read_locality(None, root=two_sockets)
    assert found.room_bytes(0) == 400 * 1024
    assert min(found.room_bytes(None), found.room_bytes(7)) > free_bytes
    one = tmp_path_factory.mktemp("one")
    plant_node(one, 0)
    assert numa.read_locality(None, root=one).room_bytes(0) > free_bytes


def test_garbage_in_a_node_is_not_read(tmp_path: Path) -> None:
    """Each file alone: CPUs, memory and distances that make no sense are none, and the node is still there."""
    folder = plant_node(tmp_path, 0)
    for name in ("cpulist", "distance", "meminfo"):
        (folder / name).write_bytes(b"\xff garbage 5-2 \0")
    (folder.parent / "node_of_another_kind").mkdir()
    found = numa.read_nodes(root=tmp_path)
    assert found == (numa.NumaNode(number=0, cpus=frozenset(), memory_bytes=None, available_bytes=None, distances={}),)
    assert numa.read_locality(None, root=tmp_path).memory_nodes == []


def test_half_told_memory_is_not_told(tmp_path: Path) -> None:
    """A missing line is not 0 bytes, neither of one node nor of all."""
    folder = plant_node(tmp_path, 0)
    plant_node(tmp_path, 1)
    (folder / "meminfo").write_text("Node 0 MemTotal:  1000 kB\nNode 0 MemFree:  100 kB\n")
    found = numa.read_locality(None, root=tmp_path)
    assert found.available_bytes(0) is None
    assert found.available_bytes(None) is None
    assert found.available_bytes(1) == 400 * 1024
    assert found.available_bytes(2) is None


def test_farthest_is_by_distance_and_part_of_the_host(tmp_path: Path) -> None:
    """Four nodes of two sockets and a GPU's own memory as node 8, farther than all and no part of the host."""
    rows = {
        0: "10 12 32 32 80\n",
        1: "12 10 32 32 80\n",
        2: "32 32 10 12 80\n",
        3: "32 32 12 10 80\n",
        8: "80 80 80 80 10\n",
    }
    for number, distance in rows.items():
        plant_node(tmp_path, number, cpus="\n" if number == 8 else f"{number}\n", distance=distance)
    plant_gpu(tmp_path, "3\n")
    assert numa.read_locality(GPU, root=tmp_path).farthest == 0
    (tmp_path / "devices" / "system" / "node" / "node0" / "meminfo").write_text("Node 0 MemTotal: 0 kB\n")
    assert numa.read_locality(GPU, root=tmp_path).farthest == 1


def test_alone_there_is_no_other_node(tmp_path: Path) -> None:
    """One socket: nothing to compare with."""
    plant_node(tmp_path, 0, cpus="0-3\n")
    plant_gpu(tmp_path, "0\n")
    found = numa.read_locality(GPU, root=tmp_path)
    assert (found.node, found.farthest) == (0, None)


@pytest.mark.parametrize("text", ["", "1b:00.0", "0000:1b:00.8", "0000:1b:00.0/../..", "0000:1g:00.0", "node0\n"])
def test_what_is_no_pci_address_is_refused(text: str) -> None:
    """The address becomes part of a path, so another text is refused."""
    with pytest.raises(ValueError, match="is no PCI address"):
        numa.read_node_of(text)


def test_long_domain_is_kept() -> None:
    """Of a domain above 16 bits every digit counts."""
    assert numa.sysfs_address("00010000:1B:00.0") == "10000:1b:00.0"
    assert numa.sysfs_address("0001:00:00.0") == "0001:00:00.0"


@pytest.mark.parametrize("text", ["5-2", "1,x", "1-", "-1", "1 2", "0x3"])
def test_garbage_is_no_cpulist(text: str) -> None:
    """Nothing is made of a part of it."""
    with pytest.raises(ValueError, match="is no list of numbers"):
        numa.parse_cpulist(text)


def test_cpulist_as_the_kernel_writes_it() -> None:
    """Ranges, single numbers, and the empty line of a node without CPUs."""
    assert numa.parse_cpulist("0-2,7\n") == {0, 1, 2, 7}
    assert numa.parse_cpulist("\n") == frozenset()
    assert numa.format_cpulist({7, 2, 0, 1}) == "0-2,7"
    assert numa.format_cpulist(()) == ""


@given(st.frozensets(st.integers(min_value=0, max_value=2000), max_size=50))
def test_cpulist_round_trip(cpus: frozenset[int]) -> None:
    """Whatever the numbers, they come back, in as few parts as can be."""
    text = numa.format_cpulist(cpus)
    assert numa.parse_cpulist(text) == cpus
    assert len([part for part in text.split(",") if part]) == len([cpu for cpu in cpus if cpu - 1 not in cpus])
