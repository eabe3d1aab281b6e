"""What tools say of ports and cables: ibv_devinfo's MTU and lldpd's neighbours, in every form that is known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory.nics import SwitchPort, read_neighbours, read_rdma_mtus, roce_mtu
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path

DEVINFO = """\
hca_id:\tmlx5_0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t28.39.1002
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t4096 (5)
\t\t\tlink_layer:\t\tInfiniBand

hca_id:\tmlx5_bond_0
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
\t\tport:\t2
\t\t\tmax_mtu:\t\t4096 (5)
\t\t\tactive_mtu:\t\t2048 (4)
"""


def put(folder: Path, name: str, said: str, *, code: int = 0) -> str:
    """A program that prints this; the search path that has it."""
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    file.chmod(0o755)
    return str(folder)


def test_the_mtu_of_each_port(tmp_path: Path) -> None:
    """That is in use, not the greatest."""
    found = read_rdma_mtus(path=put(tmp_path, "ibv_devinfo", DEVINFO))
    assert found == {"mlx5_0:1": 4096, "mlx5_bond_0:1": 1024, "mlx5_bond_0:2": 2048}


@pytest.mark.parametrize(("size", "mtu"), [(1500, 1024), (4200, 4096), (9000, 4096), (4191, 2048), (352, 256)])
def test_the_mtu_that_the_kernel_makes(size: int, mtu: int) -> None:
    """By its rule: the greatest power of two that fits beside the headers."""
    assert roce_mtu(size) == mtu
    assert isinstance(roce_mtu(100), NotAvailable)


def one(name: str, switch: str, port: str, *, lists: bool) -> dict[str, Any]:
    """A neighbour as ``-f json0`` and ``-f json`` write it."""
    if lists:
        chassis = [{"id": [{"type": "mac", "value": "44:38:39:ff:00:01"}], "name": [{"value": switch}]}]
        return {"name": name, "via": "LLDP", "chassis": chassis, "port": [{"id": [{"type": "ifname", "value": port}]}]}
    chassis_by_name = {switch: {"id": {"type": "mac", "value": "44:38:39:ff:00:01"}, "descr": "Cumulus Linux"}}
    return {name: {"via": "LLDP", "chassis": chassis_by_name, "port": {"id": {"type": "ifname", "value": port}}}}


TWO = {"eth0": SwitchPort(switch="leaf0", port="swp1"), "eth1": SwitchPort(switch="leaf1", port="swp2")}


@pytest.mark.parametrize(
    "lldp",
    [
        [{"interface": [one("eth0", "leaf0", "swp1", lists=True), one("eth1", "leaf1", "swp2", lists=True)]}],
        {"interface": [one("eth0", "leaf0", "swp1", lists=False), one("eth1", "leaf1", "swp2", lists=False)]},
        {"interface": {**one("eth0", "leaf0", "swp1", lists=False), **one("eth1", "leaf1", "swp2", lists=False)}},
    ],
)
def test_neighbours_in_each_form(tmp_path: Path, lldp: Any) -> None:
    """json0 has lists, json has names as keys, and one neighbour is no list."""
    assert read_neighbours(path=put(tmp_path, "lldpcli", json.dumps({"lldp": lldp}))) == TWO


def test_a_switch_without_a_name(tmp_path: Path) -> None:
    """It has its address, also where json gives the parts of the chassis themselves."""
    unnamed = {"eth0": {"chassis": {"id": {"type": "mac", "value": "44:38:39:ff:00:01"}}, "port": {"id": {"value": "swp1"}}}}
    found = read_neighbours(path=put(tmp_path, "lldpcli", json.dumps({"lldp": {"interface": unnamed}})))
    assert found == {"eth0": SwitchPort(switch="44:38:39:ff:00:01", port="swp1")}


@pytest.mark.parametrize("said", ['{"lldp": {}}', '{"lldp": [{}]}'])
def test_nobody_announces_itself(tmp_path: Path, said: str) -> None:
    """No neighbour is known to be there."""
    assert read_neighbours(path=put(tmp_path, "lldpcli", said)) == {}


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ("", 1, "lldpcli: it printed nothing"),
        ("unable to connect to socket: Permission denied", 1, "Permission denied"),
        ("no JSON", 0, "another form (JSONDecodeError)"),
        ("[]", 0, "another form (TypeError)"),
        ('{"lldp": {"interface": {"eth0": {}}}}', 0, "another form (KeyError)"),
    ],
)
def test_answers_that_say_nothing(tmp_path: Path, said: str, code: int, why: str) -> None:
    """Each with its reason."""
    found = read_neighbours(path=put(tmp_path, "lldpcli", said, code=code))
    assert isinstance(found, NotAvailable)
    assert why in found.why


def test_tools_that_are_not_there(tmp_path: Path) -> None:
    """A container may have neither."""
    assert read_neighbours(path=str(tmp_path)) == NotAvailable("lldpcli is not installed")
    assert read_rdma_mtus(path=str(tmp_path)) == NotAvailable("ibv_devinfo is not installed")
