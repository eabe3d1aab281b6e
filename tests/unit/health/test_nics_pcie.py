"""The PCIe tree of a made sysfs: links on the way to NICs, and which GPU is near which NIC."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.health.nics import judge_pcie_links, judge_redirection, nearest_gpus
from pytest_gpucluster.inventory.pci_tree import PciPath, read_gpu_paths, read_path, read_peer_memory
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.protocol.plain_data import from_plain, to_plain
from tests.support.findings import NOTHING, said
from tests.support.sysfs import MadeSys, infiniband, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpucluster.judging.finding import Finding

NIC = "0000:12:00.0"
WAY = [NIC, "0000:11:01.0", "0000:11:00.0", "0000:10:01.0"]
GPU = {"vendor": "0x10de", "device": "0x2335", "class": "0x030200"}


class Tree:
    """A NIC and a GPU below one switch each, and a GPU below another one."""

    def __init__(self, folder: Path) -> None:
        """All links at their best."""
        self.made = MadeSys(folder / "sys", infiniband(0), infiniband(1))
        for bus, slot in ((0x10, 1), (0x20, 1)):
            self.made.add_pci(f"0000:{bus + 2 + slot:02x}:00.0", bus=bus, slot=slot, files=GPU)

    def change(self, address: str, **files: str) -> None:
        """Replace files of a device."""
        write((self.made.root / "bus" / "pci" / "devices" / address).resolve(), files)

    def way(self, address: str = NIC) -> PciPath:
        """The way of a device."""
        found = read_path(address, root=self.made.root)
        assert isinstance(found, PciPath)
        return found

    def judge(self) -> Finding:
        """The links on the way to the first NIC."""
        return judge_pcie_links({"mlx5_0": read_path(NIC, root=self.made.root)})


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A healthy one."""
    return Tree(tmp_path)


def test_the_way_of_a_nic(tree: Tree) -> None:
    """From the device over the switch's two ends to the root port; every link at its best."""
    way = tree.way()
    assert [node.address for node in way.nodes] == WAY
    assert (way.numa_node, len(way.nodes)) == ("0", 4)
    assert {(node.speed_gt_s, node.max_speed_gt_s, node.width, node.max_width) for node in way.nodes} == {(32.0, 32.0, 16, 16)}
    assert (said(tree.judge()), tree.judge().evidence) == (NOTHING, {"PCIe links": 2})
    assert from_plain(to_plain(way)) == way


def test_a_virtual_function_has_the_link_of_its_device(tree: Tree) -> None:
    """By itself it shows a speed that is unknown and no lane. A container may have nothing else."""
    nic = (tree.made.root / "bus" / "pci" / "devices" / NIC).resolve()
    no_link = {"current_link_speed": "Unknown", "current_link_width": "0", "max_link_speed": "Unknown", "max_link_width": "0"}
    function = tree.made.add_pci("0000:12:00.1", bus=0x10, files={**no_link, "vendor": "0x15b3", "class": "0x020700"})
    (function / "physfn").symlink_to(nic)
    assert [node.address for node in tree.way("0000:12:00.1").nodes] == WAY
    judged = judge_pcie_links({"mlx5_0": read_path("0000:12:00.1", root=tree.made.root)})
    assert (said(judged), judged.evidence) == (NOTHING, {"PCIe links": 2})
    tree.change(NIC, current_link_width="8")
    assert judge_pcie_links({"mlx5_0": tree.way("0000:12:00.1")}).names == (NIC,)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"current_link_width": "8"}, "x8 at 32 GT/s of x16 at 32 GT/s"),
        ({"current_link_speed": "16.0 GT/s PCIe"}, "x16 at 16 GT/s of x16 at 32 GT/s"),
        ({"current_link_speed": "2.5 GT/s PCIe", "current_link_width": "0"}, "x0 at 2.5 GT/s"),
    ],
)
def test_a_narrow_link_is_named(tree: Tree, at: int, files: dict[str, str], text: str) -> None:
    """The device's own, and the one of the switch above it."""
    address = tree.way().nodes[at].address
    tree.change(address, **files)
    seen = tree.judge()
    assert (seen.names, seen.doubts) == ((address,), ())
    assert seen.facts[0].startswith(f"{address}: on the way to mlx5_0: {text}")


def test_a_slower_slot_is_no_fault(tree: Tree) -> None:
    """Both ends must be able to do more: a card in a slot of an older generation runs at its best."""
    device, slot = tree.way().nodes[:2]
    tree.change(slot.address, max_link_speed="16.0 GT/s PCIe", current_link_speed="16.0 GT/s PCIe")
    tree.change(device.address, current_link_speed="16.0 GT/s PCIe")
    assert tree.judge().names == ()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"current_link_width": "255"}, "does not answer"),
        ({"current_link_speed": "Unknown"}, "'Unknown' is no speed"),
        ({"max_link_speed": "Unknown"}, None),
    ],
)
def test_what_is_not_shown(tree: Tree, files: dict[str, str], text: str | None) -> None:
    """Said where nothing can be judged; the other end's figure is enough for what a link can."""
    tree.change(NIC, **files)
    seen = tree.judge()
    assert seen.names == ()
    assert (len(seen.doubts), seen.evidence["PCIe links"]) == (int(text is not None), 2)
    assert text is None or text in seen.doubts[0]


def test_no_way_at_all(tree: Tree, tmp_path: Path) -> None:
    """A device that is gone, and no NIC: nothing is green."""
    tree.made.remove("mlx5_0")
    assert "its way is not available: No such file" in tree.judge().doubts[0]
    assert judge_pcie_links({}).unknown
    assert isinstance(read_gpu_paths(root=tmp_path / "nowhere"), NotAvailable)
    assert isinstance(read_peer_memory(root=tmp_path / "nowhere"), NotAvailable)


def test_a_virtual_machine_shows_the_device_alone(tmp_path: Path) -> None:
    """Its own figures decide."""
    root = MadeSys(tmp_path).root
    device = root / "devices" / "pci0000:00" / "0000:00:06.0"
    link = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}
    write(device, {**link, "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16", "numa_node": "-1"})
    listed = root / "bus" / "pci" / "devices"
    listed.mkdir(parents=True)
    (listed / device.name).symlink_to(device)
    assert said(judge_pcie_links({"mlx5_0": read_path(device.name, root=root)})) == NOTHING
    write(device, {"current_link_width": "8"})
    assert judge_pcie_links({"mlx5_0": read_path(device.name, root=root)}).names == ("0000:00:06.0",)


def test_the_gpu_below_the_same_switch(tree: Tree) -> None:
    """By the nearest bridge in common; by the NUMA node where there is none; nobody where that is not known."""
    gpus = read_gpu_paths(root=tree.made.root)
    assert isinstance(gpus, dict)
    assert sorted(gpus) == ["0000:13:00.0", "0000:23:00.0"]
    assert nearest_gpus(tree.way(), gpus) == ("0000:13:00.0",)
    assert nearest_gpus(tree.way("0000:22:00.0"), gpus) == ("0000:23:00.0",)
    alone = PciPath(numa_node="0", nodes=tree.way().nodes[:1])
    assert nearest_gpus(alone, gpus) == ("0000:13:00.0", "0000:23:00.0")
    assert nearest_gpus(PciPath(numa_node="-1", nodes=alone.nodes), gpus) == ()


@pytest.mark.parametrize(
    ("control", "found"),
    [(0b11101, True), (0b00100, True), (0b00001, False), (None, False)],
)
def test_access_control(tree: Tree, control: int | None, found: bool) -> None:  # noqa: FBT001 -- a parameter
    """By the config space, of which only root sees enough."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    if control is not None:
        config[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x146:0x148] = control.to_bytes(2, "little")
    file = (tree.made.root / "bus" / "pci" / "devices" / NIC).resolve() / "config"
    assert isinstance(tree.way().nodes[0].redirects_peers, NotAvailable)
    file.write_bytes(config)
    assert tree.way().nodes[0].redirects_peers is found
    file.write_bytes(config[:64])
    assert isinstance(tree.way().nodes[0].redirects_peers, NotAvailable)


def peermem(root: Path) -> None:
    """Load the module."""
    (root / "module" / "nvidia_peermem").mkdir(parents=True)


@pytest.mark.parametrize(("load", "found"), [(peermem, True), (lambda root: (root / "module").mkdir(), False)])
def test_peer_memory(tmp_path: Path, load: Callable[[Path], None], *, found: bool) -> None:
    """By the loaded modules."""
    load(tmp_path)
    assert read_peer_memory(root=tmp_path) is found


def redirecting(tree: Tree, address: str, control: int | None) -> None:
    """Write the access control of a bridge; None: only the part of the config space that everybody may read."""
    config = bytearray(4096 if control is not None else 64)
    if control is not None:
        config[0x100:0x104] = (0x000D | 1 << 16).to_bytes(4, "little")
        config[0x106:0x108] = control.to_bytes(2, "little")
    (tree.made.root / "bus" / "pci" / "devices" / address).resolve().joinpath("config").write_bytes(config)


@pytest.mark.parametrize(
    ("control", "bad", "unknown"),
    [
        ((0, 0), (), 0),
        ((0b00001, 0), (), 0),
        ((0b00100, 0), ("nic",), 0),
        ((0, 0b01000), ("gpu",), 0),
        ((0b11101, 0b11101), ("gpu", "nic"), 0),
        ((None, 0), (), 1),
        ((None, 0b11100), ("gpu",), 1),
        ((None, None), None, 0),
    ],
)
def test_traffic_that_goes_up_to_the_root(
    tree: Tree, control: tuple[int | None, int | None], bad: tuple[str, ...] | None, unknown: int
) -> None:
    """By the bridges between the NIC and the GPU of its switch; those that both are below, and other switches, do not count."""
    gpus = read_gpu_paths(root=tree.made.root)
    assert isinstance(gpus, dict)
    ports = {"nic": tree.way().nodes[1].address, "gpu": tree.way("0000:13:00.0").nodes[1].address}
    for node in (*tree.way().nodes[2:], *tree.way("0000:23:00.0").nodes[1:]):
        redirecting(tree, node.address, 0b11111)
    for name, one in zip(ports, control, strict=True):
        redirecting(tree, ports[name], one)
    found = judge_redirection({"mlx5_0": tree.way()}, read_gpu_paths(root=tree.made.root))
    if bad is None:
        assert found is None
        return
    assert found is not None
    assert sorted(found.bad) == sorted(ports[name] for name in bad)
    assert (len(found.unknown), found.evidence) == (unknown, {"bridges": 2})


def test_redirection_where_nothing_is_shown(tree: Tree) -> None:
    """A virtual machine shows no bridge; a bus or a way that cannot be read is not known."""
    refused = NotAvailable("no")
    alone = PciPath(numa_node="0", nodes=tree.way().nodes[:1])
    found = judge_redirection({"mlx5_0": alone}, {"0000:13:00.0": alone})
    assert found is not None
    assert (found.judged, found.evidence) == (0, {"bridges": 0})
    for nics, gpus in (({"mlx5_0": alone}, refused), ({"mlx5_0": refused}, {"0000:13:00.0": alone})):
        found = judge_redirection(nics, gpus)
        assert found is not None
        assert found.unknown
