"""A made sysfs with RDMA adapters: healthy ones as the drivers show them, and ways to change them.

What the kernel shows of ConnectX-7, of RoCE and of EFA: `drivers/infiniband/core/sysfs.c`, `drivers/infiniband/hw/efa`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.nics import Nic, NicPort
from pytest_gpucluster.inventory.reading import healthy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COUNTERS = (
    "VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors",
    "port_rcv_constraint_errors", "port_rcv_data", "port_rcv_errors", "port_rcv_packets", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards", "port_xmit_packets",
    "port_xmit_wait", "symbol_error",
)  # fmt: skip
HW_COUNTERS = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err", "np_cnp_sent",
    "np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err", "req_cqe_error", "rnr_nak_retry_err",
    "roce_slow_restart", "rp_cnp_handled", "rp_cnp_ignored", "rx_icrc_encapsulated",
)  # fmt: skip
EFA_COUNTERS = ("lifespan", "rx_bytes", "rx_drops", "tx_bytes", "tx_pkts")
NDR, HDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"
BRIDGES = ("pci0000:{bus:02x}", "0000:{bus:02x}:01.0", "0000:{up:02x}:00.0", "0000:{up:02x}:{port:02x}.0")
"""A root complex, its root port, and the two ends of a PCIe switch: one for each device below."""
GPU_CLASS = {"vendor": "0x10de", "class": "0x030200"}
"""Files by which the PCI tree shows a device as one of NVIDIA's GPUs."""


@dataclass(frozen=True, kw_only=True)
class MadeNic:
    """An adapter of a made sysfs. ``files`` replaces files below it: text, or None for none, by path."""

    name: str
    bus: int
    slot: int = 0
    layer: str = "InfiniBand"
    rate: str = NDR
    netdev: str = ""
    efa: bool = False
    ports: int = 1
    counted: bool = True

    @property
    def pci(self) -> str:
        """Its address."""
        return f"0000:{self.bus + 2 + self.slot:02x}:00.0"


def infiniband(number: int, **changes: Any) -> MadeNic:
    """A ConnectX-7 in InfiniBand mode, with IPoIB."""
    return MadeNic(**{"name": f"mlx5_{number}", "bus": 0x10 * (number + 1), "netdev": f"ib{number}", **changes})


def roce(number: int, **changes: Any) -> MadeNic:
    """A ConnectX-7 in Ethernet mode."""
    return infiniband(
        number, **{"layer": "Ethernet", "netdev": f"enp{number}s0f0np0", "rate": "400 Gb/sec (8X HDR)", **changes}
    )


def efa(number: int, **changes: Any) -> MadeNic:
    """An adapter of AWS."""
    other = {"name": f"rdmap{number}s27", "layer": "Unknown", "netdev": "", "efa": True, "rate": "100 Gb/sec (4X EDR)"}
    return infiniband(number, **{**other, **changes})


class MadeSys:
    """A sysfs in a folder of the test: ``root`` is what a reader takes in place of ``/sys``."""

    def __init__(self, root: Path, *nics: MadeNic) -> None:
        """Write these adapters."""
        self.root = root
        (root / "class" / "infiniband").mkdir(parents=True)
        for nic in nics:
            self.add(nic)

    def add(self, nic: MadeNic) -> None:
        """One adapter below a PCIe switch of its own root port."""
        device = self.add_pci(nic.pci, bus=nic.bus, slot=nic.slot, files=_identity(nic))
        folder = device / "infiniband" / nic.name
        write(
            folder,
            {"fw_ver": "28.42.1000", "board_id": "MT_0000000838", "hca_type": "MT4129", "node_guid": "b83f:d203:0012:3456"},
        )
        for port in range(1, nic.ports + 1):
            self._add_port(folder / "ports" / str(port), nic, port)
        node = f"uverbs{nic.bus}"
        write(device / "infiniband_verbs" / node, {"ibdev": nic.name})
        write(self.root / "dev" / "infiniband", {node: ""})
        if nic.netdev:
            mtu = "4200" if nic.layer == "Ethernet" else "4092"
            net = {"carrier_changes": "2", "dev_port": "0", "operstate": "up", "mtu": mtu}
            write(device / "net" / nic.netdev, net)
        (folder / "device").symlink_to(device)
        (self.root / "class" / "infiniband" / nic.name).symlink_to(folder)

    def _add_port(self, folder: Path, nic: MadeNic, number: int) -> None:
        texts = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": nic.rate, "link_layer": nic.layer}
        kind = "RoCE v2" if nic.layer == "Ethernet" else "IB/RoCE v1"
        tables = {"pkeys/0": "0xffff", "gid_attrs/types/0": kind}
        write(folder, {**texts, **tables, "gids/0": f"fe80:0000:0000:0000:b83f:d203:{nic.bus:04x}:{number:04x}"})
        names = {"hw_counters": EFA_COUNTERS} if nic.efa else {"counters": COUNTERS, "hw_counters": HW_COUNTERS}
        for kind, counters in names.items() if nic.counted else ():
            write(folder / kind, dict.fromkeys(counters, "0"))

    def add_pci(self, address: str, *, bus: int, slot: int = 0, files: Mapping[str, str]) -> Path:
        """A PCI device below the switch of a root port, with its link and those of the bridges above."""
        parts = [part.format(bus=bus, up=bus + 1, port=slot + 1) for part in BRIDGES]
        folder = self.root / "devices"
        listed = self.root / "bus" / "pci" / "devices"
        listed.mkdir(parents=True, exist_ok=True)
        for part in (*parts, address):
            folder /= part
            folder.mkdir(parents=True, exist_ok=True)
            if not part.startswith("pci") and not (listed / part).exists():
                link = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}
                most = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
                write(folder, {**link, **most, "vendor": "0x1000", "class": "0x060400", "numa_node": "0"})
                (listed / part).symlink_to(folder)
        write(folder, files)
        return folder

    def port(self, name: str, number: int = 1) -> Path:
        """The folder of a port."""
        return self.root / "class" / "infiniband" / name / "ports" / str(number)

    def change(self, name: str, path: str, text: str, *, port: int = 1) -> None:
        """Write one file of a port: ``change("mlx5_0", "counters/link_downed", "1")``."""
        (self.port(name, port) / path).write_text(f"{text}\n")

    def carrier(self, name: str, changes: int) -> None:
        """How often the interfaces of an adapter changed."""
        for net in (self.root / "class" / "infiniband" / name / "device" / "net").iterdir():
            (net / "carrier_changes").write_text(f"{changes}\n")

    def pull_down(self, name: str) -> None:
        """No cable."""
        self.change(name, "state", "1: DOWN")
        self.change(name, "phys_state", "2: Polling")
        self.change(name, "rate", "10 Gb/sec (4X SDR)")

    def refuse(self, name: str, path: str) -> None:
        """Make a file of a port one that nobody, not even root, can read: a folder."""
        file = self.port(name) / path
        if file.is_dir():
            shutil.rmtree(file)
            file.symlink_to("nowhere")
        else:
            file.unlink()
            file.mkdir()

    def remove(self, name: str) -> None:
        """The adapter is gone from the bus."""
        link = self.root / "class" / "infiniband" / name
        device = (link / "device").resolve()
        link.unlink()
        (self.root / "bus" / "pci" / "devices" / device.name).unlink()
        shutil.rmtree(device)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write each text with the kernel's newline at its end."""
    written = {folder / name: f"{text}\n" for name, text in files.items()}
    for parent in {file.parent for file in written}:
        parent.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        file.write_text(text)


def _identity(nic: MadeNic) -> dict[str, str]:
    if nic.efa:
        return {"vendor": "0x1d0f", "device": "0xefa2", "class": "0x020000"}
    return {"vendor": "0x15b3", "device": "0x1021", "class": "0x020700"}


def port_with(**hw_counters: int) -> list[Nic]:
    """An adapter with one RoCE port that has these counters of the driver, and no others; without any file."""
    port = healthy(NicPort, number=1, fabric="roce", counters={}, hw_counters={**hw_counters})
    return [healthy(Nic, device="mlx5_0", ports=[port])]
