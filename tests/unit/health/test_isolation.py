"""Settings of adapters, GPUDirect, cables and management: healthy hosts beside planted ones, on made trees."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.drift import DriftRules, compare_facts, facts_of_nics, judge_drift
from pytest_gpucluster.health.isolation import judge_cabling, judge_gpudirect, judge_management, judge_nic_settings
from pytest_gpucluster.inventory import nics as readers
from pytest_gpucluster.inventory.machine import Management, read_management
from pytest_gpucluster.inventory.nics import Nic, SwitchPort, read_nics
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.judging.finding import HERE
from pytest_gpucluster.measurements.host import NicPaths
from tests.support.sysfs import MadeSys, infiniband, roce, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpucluster.judging.finding import Finding

HIDDEN = NotAvailable("Permission denied")
ABSENT = NotAvailable("ibv_devinfo is not installed")
HEALTHY = NicPaths(
    nics=[],
    paths={},
    gpu_paths={},
    peer_memory=True,
    open_driver=True,
    kernel="6.8.0-45-generic",
    rdma_mtus=ABSENT,
    neighbours={},
)
PORT = "mlx5_1 port 1 (0000:22:00.0)"
HOSTS = 3


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[MadeSys]]:
    """Makes hosts with two adapters each; their device files are those of the first host."""

    def made(kind: Callable[[int], Any]) -> list[MadeSys]:
        found = [MadeSys(tmp_path / f"host{at}", *map(kind, range(2))) for at in range(HOSTS)]
        monkeypatch.setattr(readers, "DEVICES", found[0].root / "dev")
        return found

    return made


def settings(hosts: list[MadeSys], fabric: str, *, mtus: Any = ABSENT) -> list[Finding]:
    """What is found of each host."""
    paths = {str(at): replace(HEALTHY, nics=read_nics(root=made.root), rdma_mtus=mtus) for at, made in enumerate(hosts)}
    return [*judge_nic_settings(paths, fabric).values()]


@pytest.mark.parametrize(("kind", "fabric"), [(infiniband, "infiniband"), (roce, "roce")])
def test_healthy_adapters(trees: Callable[..., list[MadeSys]], kind: Any, fabric: str) -> None:
    """Nothing is bad or unknown; that nobody shows the MTU of InfiniBand is said."""
    for found in settings(trees(kind), fabric):
        assert (found.judged, found.unknown) == (0, {})
        assert (found.remark is not None) is (fabric == "infiniband")


def change(made: MadeSys, path: str, text: str | None) -> None:
    """Another text of a file of mlx5_1; None: no file, and where a folder is in its place nobody can read it."""
    file = made.root / "class" / "infiniband" / "mlx5_1" / path
    if text is not None:
        file.write_text(f"{text}\n")
    else:
        file.unlink()
        file.mkdir()


@pytest.mark.parametrize(
    ("kind", "path", "text", "says"),
    [
        (roce, "ports/1/gid_attrs/types/0", "IB/RoCE v1", "it has no GID of RoCE v2, and no router passes on IB/RoCE v1"),
        (infiniband, "ports/1/pkeys/0", "0x7fff", "it is a full member of no partition (0x7fff)"),
        (infiniband, "ports/1/pkeys/0", "0x0000", "it is a full member of no partition (none)"),
        (roce, "device/net/enp1s0f0np0/mtu", "1500", "its RDMA MTU is 1024 bytes, and 5 of 6 ports have 4096"),
    ],
)
def test_a_port_that_is_set_otherwise(trees: Callable[..., list[MadeSys]], kind: Any, path: str, text: str, says: str) -> None:
    """The port is named, with what it has, and the other hosts are good."""
    hosts = trees(kind)
    change(hosts[1], path, text)
    found = settings(hosts, "roce" if kind is roce else "infiniband")
    assert says in found[1].bad[PORT][0]
    assert [one.judged for one in found] == [0, 1, 0]


@pytest.mark.parametrize(
    ("kind", "path"),
    [(infiniband, "ports/1/pkeys/0"), (roce, "device/net/enp1s0f0np0/mtu")],
)
def test_a_port_that_hides_it(trees: Callable[..., list[MadeSys]], kind: Any, path: str) -> None:
    """It is unknown, with the reason, and never good."""
    hosts = trees(kind)
    change(hosts[1], path, None)
    found = settings(hosts, "roce" if kind is roce else "infiniband")
    assert PORT in found[1].unknown
    assert found[1].judged is None
    assert found[0].judged == 0


def test_a_kernel_without_the_kinds_of_gids(trees: Callable[..., list[MadeSys]]) -> None:
    """Old kernels have no such folder."""
    hosts = trees(roce)
    folder = hosts[1].port("mlx5_1") / "gid_attrs" / "types"
    (folder / "0").unlink()
    folder.rmdir()
    assert "its kinds of GIDs are not available: No such file" in settings(hosts, "roce")[1].unknown[PORT][0]


@pytest.mark.parametrize("readable", [[], ["IB/RoCE v1"]])
def test_kinds_of_gids_that_cannot_be_read(trees: Callable[..., list[MadeSys]], readable: list[str]) -> None:
    """The right one may be among them: unknown, and no fault. An empty entry, which the kernel refuses, is none."""
    hosts = trees(roce)
    folder = hosts[1].port("mlx5_1") / "gid_attrs" / "types"
    (folder / "0").unlink()
    (folder / "0").mkdir()
    write(folder, {str(at): kind for at, kind in enumerate(readable, start=1)})
    found = settings(hosts, "roce")[1]
    assert (found.bad, found.judged) == ({}, None)
    assert "its kinds of GIDs are not available: Is a directory" in found.unknown[PORT][0]


def test_an_adapter_that_nccl_cannot_open(trees: Callable[..., list[MadeSys]]) -> None:
    """In a container without the device file; and without the kernel's module."""
    hosts = trees(infiniband)
    node = hosts[0].root / "dev" / "infiniband" / f"uverbs{0x20}"
    node.unlink()
    found = settings(hosts, "infiniband")[1]
    assert found.bad[PORT] == (f"NCCL cannot open it: {node}: No such file or directory",)
    write(node.parent, {node.name: ""})
    folder = (hosts[1].root / "class/infiniband/mlx5_1/device").resolve() / "infiniband_verbs"
    folder.rename(folder.parent / "gone")
    assert "module ib_uverbs" in settings(hosts, "infiniband")[1].bad[PORT][0]


def test_ports_that_are_down_are_not_looked_at(trees: Callable[..., list[MadeSys]]) -> None:
    """They are off by design, or nic_ports says so."""
    hosts = trees(infiniband)
    change(hosts[1], "ports/1/pkeys/0", "0x7fff")
    hosts[1].pull_down("mlx5_1")
    assert settings(hosts, "infiniband")[1].judged == 0


def test_the_mtu_of_infiniband_by_its_tool(trees: Callable[..., list[MadeSys]]) -> None:
    """Equal is good; a port that the tool does not list is unknown."""
    hosts = trees(infiniband)
    assert {one.judged for one in settings(hosts, "infiniband", mtus={"mlx5_0:1": 4096, "mlx5_1:1": 4096})} == {0}
    assert "ibv_devinfo does not list it" in settings(hosts, "infiniband", mtus={"mlx5_0:1": 4096})[1].unknown[PORT][0]
    assert settings(hosts, "infiniband", mtus={"mlx5_0:1": 4096, "mlx5_1:1": 2048})[1].count == 2, "no majority"


def test_a_host_whose_adapters_are_hidden() -> None:
    """It is unknown, and the others are judged."""
    found = judge_nic_settings({"a": replace(HEALTHY, nics=HIDDEN), "b": HEALTHY}, "infiniband")
    assert (found["a"].judged, found["b"].judged) == (None, 0)


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("mtu", "9000", "MTU: 4200; 9000, 2 of 3 have 4200"),
        ("ecn", "0", "congestion control (ECN) priorities: [3]; [], 2 of 3 have [3]"),
    ],
)
def test_what_differs_between_hosts(trees: Callable[..., list[MadeSys]], name: str, text: str, fact: str) -> None:
    """MTU and congestion control are facts of a host that should be alike."""
    hosts = trees(roce)
    for made in hosts:
        for net in (made.root / "devices").rglob("net/*"):
            for end in ("roce_np", "roce_rp"):
                write(net / "ecn" / end / "enable", {"3": "1", "4": "0"})
    change(hosts[1], "device/net/enp1s0f0np0/" + ("mtu" if name == "mtu" else "ecn/roce_rp/enable/3"), text)
    facts = [one for at, made in enumerate(hosts) for one in facts_of_nics(str(at), read_nics(root=made.root))]
    rows = compare_facts(facts, DriftRules())
    assert judge_drift(rows, "1").facts == (fact,)
    assert judge_drift(rows, "0").judged == 0


@pytest.mark.parametrize(
    ("changes", "bad", "doubts"),
    [
        ({}, 0, 0),
        ({"peer_memory": False}, 0, 0),
        ({"open_driver": False}, 0, 0),
        ({"peer_memory": False, "open_driver": False}, 1, 0),
        ({"peer_memory": False, "kernel": "5.4.0-150-generic"}, 1, 0),
        ({"peer_memory": False, "kernel": "5.15.0-1053-nvidia"}, 0, 0),
        ({"peer_memory": HIDDEN}, 0, 0),
        ({"peer_memory": HIDDEN, "open_driver": False}, 0, 1),
        ({"peer_memory": False, "open_driver": HIDDEN}, 0, 1),
        ({"peer_memory": False, "kernel": "rolling"}, 0, 1),
    ],
)
def test_gpudirect(changes: dict[str, Any], bad: int, doubts: int) -> None:
    """One way is enough; no way is bad; what hides the only way is unknown."""
    found = judge_gpudirect(replace(HEALTHY, **changes))
    assert (found.count, len(found.doubts)) == (bad, doubts)


def cabled(*hosts: dict[str, tuple[str, str]] | NotAvailable) -> list[Finding | None]:
    """What is found of hosts with these cables at their two interfaces."""
    ports = [healthy(readers.NicPort, number=1, fabric="roce", netdevs=[f"eth{at}"]) for at in range(3)]
    nics = [healthy(Nic, device=f"mlx5_{at}", ports=[port]) for at, port in enumerate(ports)]
    found = {}
    for at, cables in enumerate(hosts):
        ends: Any = cables
        if not isinstance(cables, NotAvailable):
            ends = {name: SwitchPort(switch=switch, port=port) for name, (switch, port) in cables.items()}
        found[str(at)] = replace(HEALTHY, nics=nics, neighbours=ends)
    return [*judge_cabling(found, "roce").values()]


def rails(port: int, **other: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """A host with each interface at the leaf of its rail, at this port."""
    return {**{f"eth{at}": (f"leaf{at}", f"swp{port}") for at in range(3)}, **other}


def test_cables_as_they_should_be() -> None:
    """Each rail at its leaf; hosts of another group have other leaves."""
    other = {f"eth{at}": (f"leaf{at + 8}", "swp1") for at in range(3)}
    assert [one.judged for one in cabled(rails(1), rails(2), rails(3), other) if one] == [0, 0, 0, 0]


def test_a_cable_at_another_leaf() -> None:
    """The interface is named, with where it ends and where it should."""
    (_, _, found) = cabled(rails(1), rails(2), rails(3, eth1=("leaf2", "swp9")))
    assert found is not None
    assert found.bad == {"eth1": ("ends at leaf2 swp9, and at leaf1 on 2 of 3 hosts",)}


def test_two_cables_at_one_port() -> None:
    """Both interfaces are named."""
    found = cabled(rails(1), rails(2), rails(2, eth0=("leaf0", "swp3"), eth2=("leaf2", "swp5")))
    assert [sorted(one.bad) for one in found if one is not None] == [[], ["eth1"], ["eth1"]]


def test_cables_of_which_nobody_tells() -> None:
    """Without lldpcli the criterion does not apply; what lldpcli is refused, and a silent switch, is unknown."""
    silent = rails(1)
    del silent["eth1"]
    first, second, third = cabled(NotAvailable("lldpcli is not installed"), NotAvailable("lldpcli: no permission"), silent)
    assert first is None
    assert second is not None
    assert third is not None
    assert second.judged is None
    assert third.unknown == {"eth1": ("no switch announces itself there",)}


def test_ways_to_management(tmp_path: Path) -> None:
    """Nothing there is good, also with the sysfs of a virtual machine; each way that is open counts."""
    devices, net = tmp_path / "dev", tmp_path / "sys" / "class" / "net"
    devices.mkdir()

    def judged(**changes: Any) -> Finding:
        return judge_management(replace(read_management(devices=devices, sys=tmp_path / "sys"), **changes), [])

    assert (judged().judged, judged().unknown) == (0, {})
    net.mkdir(parents=True)
    (devices / "ipmi0").touch()
    assert judged().facts == (f"the BMC can be reached by {devices}/ipmi0",)
    (devices / "rshim0").mkdir()
    (devices / "rshim0" / "misc").touch()
    (tmp_path / "drivers" / "cdc_ether").mkdir(parents=True)
    (net / "usb0" / "device").mkdir(parents=True)
    (net / "usb0" / "device" / "driver").symlink_to(tmp_path / "drivers" / "cdc_ether")
    assert judged().count == 3
    assert judged(bmc="closed", rshim="none", bmc_networks=[]).judged == 0
    assert judged(bmc=HIDDEN, rshim="none", bmc_networks=[]).judged is None
    assert judged(bmc="none", rshim="none", bmc_networks=HIDDEN).judged is None


def test_devices_that_cannot_be_listed(tmp_path: Path) -> None:
    """They are unknown."""
    found = read_management(devices=tmp_path / "nowhere", sys=tmp_path)
    assert isinstance(found.bmc, NotAvailable)
    assert isinstance(found.rshim, NotAvailable)


def test_a_dpu_whose_mode_nobody_shows() -> None:
    """It is said."""
    found = judge_management(healthy(Management), [healthy(Nic, device="mlx5_0", hca_type="MT41692", ports=[])])
    assert found.judged == 0
    assert "mlx5_0 run in DPU or NIC mode is not known" in str(found.remark)
    assert judge_management(healthy(Management), HIDDEN).remark is None


def test_nothing_is_said_of_the_host_itself() -> None:
    """A host without adapters is judged by nic_ports, not here."""
    assert judge_nic_settings({"a": HEALTHY}, "infiniband")["a"].unknown.get(HERE) is None
