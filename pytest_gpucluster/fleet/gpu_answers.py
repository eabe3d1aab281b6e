"""What a GPU of a simulated fleet answers by itself: identity, occupancy, health, errors. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.simulated_call import made, pci_of
from pytest_gpucluster.fleet.simulation import hostname_of
from pytest_gpucluster.inventory.identity import Identity, read_versions
from pytest_gpucluster.inventory.nvlinks import ALONE, LinkCounters, NvLink
from pytest_gpucluster.inventory.nvml import GpuCounters, GpuRepair, GpuState
from pytest_gpucluster.inventory.occupancy import GpuProcess, Occupancy
from pytest_gpucluster.inventory.reading import healthy
from pytest_gpucluster.protocol.plain_data import to_plain

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.simulated_call import SimulatedCall

DEAD_LINK = 4
FALLEN = 79
LEAST_BER = 1.5e-254
"""The least bit error rate that NVML can say."""
SIMULATED = "simulated"
OTHER_VERSION = "0.0.0+simulated"


def identity(call: SimulatedCall) -> Any:
    """Who the rank is. Versions are those of this machine, unless other ones are planted."""
    node, gpu = call.place
    other = call.has("versions")
    return Identity(
        hostname=hostname_of(node),
        group_rank=node,
        local_rank=gpu,
        versions={**read_versions(), **({"torch": OTHER_VERSION} if other else {})},
        torch_gpus=call.hardware.simulation.gpus_per_node,
        gpu_name=call.device,
        uuid=call.uuid,
        serial=call.serial,
        pci=call.pci,
        nvml_gpus=call.hardware.simulation.gpus_per_node,
        hidden_gpus=0,
        variables={},
        board={"vbios": SIMULATED, "module": str(gpu + 1)},
        fabric=call.hardware.simulation.domain_of(node),
        switch=call.hardware.simulation.switch_of(node),
        stack={"driver": OTHER_VERSION if other else SIMULATED, "CUDA": SIMULATED, "NCCL": SIMULATED},
    )


def read_occupancy(call: SimulatedCall) -> Any:
    """What uses the GPU before the run: nothing, unless that is planted."""
    return _occupancy(call, busy=call.has("busy") or call.has("guest"))


def read_occupancy_again(call: SimulatedCall) -> Any:
    """The same at the end of the run: a guest has left."""
    return _occupancy(call, busy=call.has("busy"))


def _occupancy(call: SimulatedCall, *, busy: bool) -> Any:
    return Occupancy(
        uuid=call.uuid,
        memory_used_gib=23.5 if busy else 0.004,
        memory_limit_gib=0.25,
        processes=[GpuProcess(pid=4711, name="python3", memory_gib=23.4)] if busy else [],
        utilization_percent=0,
    )


def gpu_state(call: SimulatedCall) -> Any:
    """NVML's view of the GPU at rest: what its data sheet says, what is planted, and for the rest what its readings answer."""
    has_errors, has_half_a_link = call.has("ecc"), call.has("pcie")
    spec, gpu = call.spec, call.place[1]
    cluster_uuid, _, clique = (call.hardware.simulation.domain_of(call.place[0]) or f"{ALONE.cluster_uuid}/0").partition("/")
    state = healthy(
        GpuState,
        index=gpu,
        cuda_index=gpu,
        visible=True,
        uuid=call.uuid,
        serial=call.serial,
        pci=call.pci,
        name=call.device,
        driver=SIMULATED,
        vbios=SIMULATED,
        board_part_number=SIMULATED,
        module_id=gpu + 1,
        memory_gib=spec.memory_gib,
        ecc_uncorrected_volatile=2 if has_errors else 0,
        ecc_uncorrected_aggregate=2 if has_errors else 0,
        remapped_rows_pending=has_errors,
        mig=call.has("mig"),
        pcie_gen=spec.pcie_gen - has_half_a_link,
        pcie_gen_max=spec.pcie_gen,
        pcie_width=spec.pcie_width,
        pcie_width_max=spec.pcie_width,
        power_limit_w=spec.power_w,
        power_limit_default_w=spec.power_w,
        nvlinks=_nvlinks(call),
        repair=healthy(GpuRepair, recovery_action="gpu_reset") if call.has("reset") else healthy(GpuRepair),
        fabric=replace(ALONE, cluster_uuid=cluster_uuid, clique=int(clique)),
    )
    count = call.hardware.simulation.gpus_per_node
    return made(
        "measurements.health:GpuHealth",
        gpu=to_plain(state),
        torch_sees=True,
        torch_device_count=count,
        nvml_device_count=count,
        pci_gpus={pci_of(gpu).removeprefix("0000"): "nvidia" for gpu in range(count)},
        nvml_pci=[pci_of(gpu) for gpu in range(count)],
        torch_device_name=call.device,
        lost=False,
        advice=None,
    )


def _nvlinks(call: SimulatedCall) -> list[NvLink]:
    """The NVLinks of the GPU; one is down where that is planted. Bit error rates are those of a GPU that gives them."""
    spec = call.spec
    rates = {} if spec.nvlink_ber is None else {"effective_ber": LEAST_BER, "symbol_ber": LEAST_BER}
    return [
        healthy(
            NvLink,
            link=link,
            is_up=link != DEAD_LINK or not call.has("nvlink"),
            speed_gb_s=spec.peer_gb_s / (spec.nvlink_links or 1),
            **rates,
        )
        for link in range(spec.nvlink_links or 0)
    ]


def gpu_counters(call: SimulatedCall) -> Any:
    """Error counters of the GPU, which do not grow."""
    links = [healthy(LinkCounters, link=link) for link in range(call.spec.nvlink_links or 0)]
    return healthy(GpuCounters, ecc_uncorrected=2 if call.has("ecc") else 0, nvlinks=links)


def gpu_xids(call: SimulatedCall) -> Any:
    """What the driver reported during the run: nothing, unless that is planted."""
    xid: dict[str, Any] = {"code": FALLEN, "pid": None, "is_own": False, "detail": None, "age_s": 0.0, "count": 1}
    heard = [made("measurements.driver_errors:XidSeen", **xid)] if call.has("xid") else []
    logged: dict[str, Any] = {name: [] for name in ("kernel_log", "before", "lost", "lost_before", "lost_elsewhere")}
    why: dict[str, Any] = {"nvml_why": None, "kernel_log_why": None}
    return made("measurements.driver_errors:GpuXids", nvml=heard, **logged, **why)
