"""What a node of a simulated fleet answers of its NICs: eight adapters with one port each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.asked import made

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.asked import Asked

COUNTERS = (
    "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors",
    "port_xmit_discards", "symbol_error",
)  # fmt: skip
ADAPTERS = 8
UNPLUGGED = 3
"""The adapter whose port has no link, where that is planted."""


def nic_state(asked: Asked) -> Any:
    """Every adapter of the rank's node."""
    nics = [_nic(asked, number) for number in range(ADAPTERS)]
    return made("measurements.nics:NicState", nics=nics)


def nic_paths(asked: Asked) -> Any:
    """The way of every adapter of the rank's node, and of every GPU: each below a switch of its own."""
    nics = [_nic(asked, number) for number in range(ADAPTERS)]
    gpus = [f"0000:{0x13 + 0x10 * gpu:02x}:00.0" for gpu in range(asked.hardware.simulation.gpus_per_node)]
    paths = {nic["fields"]["device"]: _path(nic["fields"]["pci"], number) for number, nic in enumerate(nics)}
    gpu_paths = {address: _path(address, number) for number, address in enumerate(gpus)}
    return made("measurements.nics:NicPaths", nics=nics, paths=paths, gpu_paths=gpu_paths, peer_memory=True)


def _path(address: str, number: int) -> Any:
    addresses = (address, f"0000:{0x11 + 0x10 * number:02x}:01.0")
    link = {"speed_gt_s": 32.0, "max_speed_gt_s": 32.0, "width": 16, "max_width": 16, "redirects_peers": False}
    nodes = [made("inventory.pci_tree:PciNode", address=one, **link) for one in addresses]
    return made("inventory.pci_tree:PciPath", numa_node="0", nodes=nodes)


def _nic(asked: Asked, number: int) -> Any:
    return made(
        "inventory.nics:Nic",
        device=f"mlx5_{number}",
        pci=f"0000:{0x12 + 0x10 * number:02x}:00.0",
        is_virtual=False,
        driver="mlx5_core",
        firmware="simulated",
        board_id="simulated",
        hca_type="MT4129",
        guid=f"0000:0000:0000:00{number:02x}",
        ports=[_port(number, is_up=number != UNPLUGGED or not asked.has("cable"))],
    )


def _port(number: int, *, is_up: bool) -> Any:
    return made(
        "inventory.nics:NicPort",
        number=1,
        fabric="infiniband",
        state="ACTIVE" if is_up else "DOWN",
        physical_state="LinkUp" if is_up else "Polling",
        rate="400 Gb/sec (4X NDR)" if is_up else "10 Gb/sec (4X SDR)",
        rate_gbit_s=400.0 if is_up else 10.0,
        guid=f"0000:0000:0000:01{number:02x}",
        netdevs=[f"ib{number}"],
        carrier_changes=2,
        counters=dict.fromkeys((*COUNTERS, "port_xmit_data"), 0),
        hw_counters={},
    )
