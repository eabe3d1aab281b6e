"""InfiniBand, RoCE and EFA adapters, in a made sysfs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.nics import read_nics, read_ports_gb_s
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.protocol.plain_data import from_plain, to_plain
from tests.support.sysfs import MadeSys, efa, infiniband, roce, write

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.inventory.nics import Nic, NicPort

FILES = ("state", "phys_state", "rate", "link_layer", "gids/0", "counters", "hw_counters")


def nics_of(made: MadeSys) -> list[Nic]:
    """The adapters; there must be some."""
    found = read_nics(root=made.root)
    assert isinstance(found, list)
    return found


def ports_of(made: MadeSys) -> dict[str, NicPort]:
    """The first port of each adapter, by name."""
    found = {nic.device: nic.ports for nic in nics_of(made)}
    return {name: ports[0] for name, ports in found.items() if isinstance(ports, list)}


def test_a_healthy_connectx7(tmp_path: Path) -> None:
    """Every value of one adapter in InfiniBand mode."""
    (nic,) = nics_of(MadeSys(tmp_path, infiniband(0)))
    assert (nic.device, nic.pci, nic.is_virtual) == ("mlx5_0", "0000:12:00.0", False)
    assert (nic.firmware, nic.board_id, nic.hca_type) == ("28.42.1000", "MT_0000000838", "MT4129")
    assert nic.guid == "b83f:d203:0012:3456"
    assert isinstance(nic.ports, list)
    (port,) = nic.ports
    assert (port.number, port.fabric, port.state, port.physical_state) == (1, "infiniband", "ACTIVE", "LinkUp")
    assert (port.rate, port.rate_gbit_s) == ("400 Gb/sec (4X NDR)", 400)
    assert (port.guid, port.netdevs, port.carrier_changes) == ("b83f:d203:0010:0001", ["ib0"], 2)
    assert isinstance(port.counters, dict)
    assert isinstance(port.hw_counters, dict)
    assert port.counters["link_downed"] == 0
    assert port.hw_counters["out_of_sequence"] == 0
    assert "lifespan" not in port.hw_counters


def test_each_fabric_is_told_from_the_others(tmp_path: Path) -> None:
    """By link layer; EFA, whose link layer is unknown, by its PCI identity."""
    ports = ports_of(MadeSys(tmp_path, infiniband(0), roce(1), efa(2)))
    assert {name: port.fabric for name, port in ports.items()} == {
        "mlx5_0": "infiniband",
        "mlx5_1": "roce",
        "rdmap2s27": "efa",
    }
    assert isinstance(ports["rdmap2s27"].counters, NotAvailable)
    assert isinstance(ports["rdmap2s27"].hw_counters, dict)
    assert isinstance(ports["rdmap2s27"].carrier_changes, NotAvailable)


def test_a_port_without_a_cable(tmp_path: Path) -> None:
    """Down is a value; the twin stays up."""
    made = MadeSys(tmp_path, infiniband(0), infiniband(1))
    made.pull_down("mlx5_1")
    ports = ports_of(made)
    assert (ports["mlx5_1"].state, ports["mlx5_1"].physical_state, ports["mlx5_1"].rate_gbit_s) == ("DOWN", "Polling", 10)
    assert (ports["mlx5_0"].state, ports["mlx5_0"].rate_gbit_s) == ("ACTIVE", 400)


@pytest.mark.parametrize("path", [*FILES, "counters/link_downed", "hw_counters/out_of_sequence"])
def test_what_one_port_refuses_leaves_the_other(tmp_path: Path, path: str) -> None:
    """The value says why it is not there, and no value of another port is lost."""
    made = MadeSys(tmp_path, infiniband(0), infiniband(1))
    healthy = ports_of(made)["mlx5_1"]
    made.refuse("mlx5_0", path)
    ports = ports_of(made)
    assert ports["mlx5_1"] == healthy
    port, (name, _, inner) = ports["mlx5_0"], path.partition("/")
    fields = {"phys_state": "physical_state", "gids": "guid", "link_layer": "fabric"}
    found = getattr(port, fields.get(name, name))
    found = found[inner] if isinstance(found, dict) else found
    assert isinstance(found, NotAvailable)
    assert path in found.why


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("state", "ACTIVE"),
        ("phys_state", ""),
        ("rate", "-1 Gb/sec (unknown)"),
        ("rate", "400 GB/s"),
        ("link_layer", "Unspecified"),
        ("counters/link_downed", "N/A (no PMA)"),
        ("counters/link_downed", "-1"),
        ("counters/link_downed", "\N{SUPERSCRIPT TWO}"),
        ("gids/0", "none"),
    ],
)
def test_text_of_another_form_is_no_value(tmp_path: Path, path: str, text: str) -> None:
    """Nothing is guessed of a word that no kernel writes, and a negative count is none."""
    made = MadeSys(tmp_path, infiniband(0))
    made.change("mlx5_0", path, text)
    port = ports_of(made)["mlx5_0"]
    name, _, inner = path.partition("/")
    fields = {"phys_state": "physical_state", "gids": "guid", "link_layer": "fabric", "rate": "rate_gbit_s"}
    found = getattr(port, fields.get(name, name))
    assert isinstance(found[inner] if isinstance(found, dict) else found, NotAvailable)


def test_two_ports_of_one_function(tmp_path: Path) -> None:
    """Each has its own interfaces, by ``dev_port``."""
    made = MadeSys(tmp_path, roce(0, ports=2))
    net = (made.root / "class" / "infiniband" / "mlx5_0" / "device" / "net").resolve()
    (net / "second").mkdir()
    (net / "second" / "dev_port").write_text("1\n")
    (net / "second" / "carrier_changes").write_text("7\n")
    (nic,) = nics_of(made)
    assert isinstance(nic.ports, list)
    found = [(port.number, port.netdevs, port.carrier_changes) for port in nic.ports]
    assert found == [(1, ["enp0s0f0np0"], 2), (2, ["second"], 7)]


def test_no_such_class_is_no_empty_list(tmp_path: Path) -> None:
    """A kernel without RDMA gives no list; one with the class and no adapter gives an empty one."""
    absent = read_nics(root=tmp_path)
    assert isinstance(absent, NotAvailable)
    assert "class/infiniband" in absent.why
    (tmp_path / "class" / "infiniband").mkdir(parents=True)
    assert read_nics(root=tmp_path) == []


@pytest.mark.parametrize("how", ["empty", "absent", "words"])
def test_an_adapter_without_ports(tmp_path: Path, how: str) -> None:
    """No port, no folder of ports, or a folder with other names: the adapter is there, and the next one is whole."""
    made = MadeSys(tmp_path, infiniband(0), infiniband(1))
    folder = made.port("mlx5_0")
    folder.rename(folder.parent / "eth0" if how == "words" else tmp_path / "aside")
    if how == "absent":
        folder.parent.rmdir()
    first, second = nics_of(made)
    assert isinstance(first.ports, NotAvailable) if how == "absent" else first.ports == []
    assert isinstance(second.ports, list)
    assert len(second.ports) == 1


def test_natural_order_and_virtual_functions(tmp_path: Path) -> None:
    """``mlx5_10`` comes after ``mlx5_9``; a virtual function is told from a real one."""
    made = MadeSys(tmp_path, infiniband(10, bus=0xA0), infiniband(9, bus=0x90))
    device = (made.root / "class" / "infiniband" / "mlx5_10" / "device").resolve()
    (device / "physfn").symlink_to(device)
    assert [(nic.device, nic.is_virtual) for nic in nics_of(made)] == [("mlx5_9", False), ("mlx5_10", True)]


def test_values_and_reasons_cross_processes(tmp_path: Path) -> None:
    """What a worker read is what the controller has."""
    made = MadeSys(tmp_path, infiniband(0), efa(1))
    made.refuse("mlx5_0", "counters/link_downed")
    found = read_nics(root=made.root)
    assert from_plain(to_plain(found)) == found


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ({0: "0x8001", 1: "0x7fff", 2: "0x0000", 10: "0x0003", 9: "0x8002"}, ["0x8001", "0x7fff", "0x8002", "0x0003"]),
        ({0: "0xFFFF"}, ["0xffff"]),
        ({0: "0x0000"}, []),
        ({0: "0xffff", 1: "full"}, None),
        ({}, None),
    ],
)
def test_partition_keys_in_the_order_of_the_table(tmp_path: Path, table: dict[int, str], keys: list[str] | None) -> None:
    """Empty entries are left out; a table that is absent, or has something else, is no empty one."""
    made = MadeSys(tmp_path, infiniband(0))
    shutil.rmtree(made.port("mlx5_0") / "pkeys")
    for index, key in table.items():
        write(made.port("mlx5_0"), {f"pkeys/{index}": key})
    found = ports_of(made)["mlx5_0"].pkeys
    assert found == keys if keys is not None else isinstance(found, NotAvailable)


V4, LINK_LOCAL, EMPTY = (
    "0000:0000:0000:0000:0000:ffff:0a00:0105",
    "fe80:0000:0000:0000:b83f:d2ff:fe12:3456",
    "0000:0000:0000:0000:0000:0000:0000:0000",
)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (V4, "IB/RoCE v1"), (V4, "RoCE v2")], "RoCE v2 IPv4 at 3"),
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (EMPTY, ""), (EMPTY, ""), (V4, "RoCE v2")], "RoCE v2 IPv4 at 4"),
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], "no RoCE v2 IPv4"),
        ([(LINK_LOCAL, "IB/RoCE v1"), (V4, "IB/RoCE v1")], "no RoCE v2 IPv4"),
    ],
)
def test_the_gid_that_routed_roce_needs(tmp_path: Path, table: list[tuple[str, str]], found: str) -> None:
    """The first one of RoCE v2 with an IPv4 address; version 1 and link-local ones are others."""
    made = MadeSys(tmp_path, roce(0))
    for index, (gid, kind) in enumerate(table):
        write(made.port("mlx5_0"), {f"gids/{index}": gid, f"gid_attrs/types/{index}": kind})
    assert ports_of(made)["mlx5_0"].roce_gid == found
    made.refuse("mlx5_0", "gids/0")
    assert isinstance(ports_of(made)["mlx5_0"].roce_gid, NotAvailable)


def test_what_the_ports_of_a_host_carry(tmp_path: Path) -> None:
    """All that are up together; a rate that nobody can read makes the sum unknown, and no port is no rate."""
    made = MadeSys(tmp_path, infiniband(0, rate="800 Gb/sec (4X XDR)"), roce(1), infiniband(2), infiniband(3, ports=2))
    assert read_ports_gb_s(root=made.root) == (800 + 400 + 400 + 2 * 400) / 8
    made.pull_down("mlx5_0")
    assert read_ports_gb_s(root=made.root) == 4 * 400 / 8
    made.refuse("mlx5_1", "rate")
    assert read_ports_gb_s(root=made.root) is None
    for name in ("mlx5_1", "mlx5_2", "mlx5_3"):
        made.remove(name)
    assert read_ports_gb_s(root=made.root) is None
    assert read_ports_gb_s(root=tmp_path / "nowhere") is None


def test_virtual_functions_carry_what_their_port_carries(tmp_path: Path) -> None:
    """Beside the port they add nothing; a container that has nothing else has their rate."""
    made = MadeSys(tmp_path, infiniband(0), infiniband(1))
    (made.root / "class" / "infiniband" / "mlx5_1" / "device" / "physfn").mkdir()
    assert read_ports_gb_s(root=made.root) == 50.0
    made.remove("mlx5_0")
    assert read_ports_gb_s(root=made.root) == 50.0
