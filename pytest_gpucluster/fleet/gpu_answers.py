"""What a GPU of a simulated fleet answers by itself: identity, health, products, memory, its link to the host. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.hardware import spread
from pytest_gpucluster.fleet.simulated_call import PEAK_CLOCK_MHZ, made, pci_of
from pytest_gpucluster.fleet.simulation import hostname_of
from pytest_gpucluster.inventory.identity import Identity, read_versions
from pytest_gpucluster.inventory.nvlinks import ALONE, LinkCounters, NvLink
from pytest_gpucluster.inventory.nvml import GpuCounters, GpuRepair, GpuState
from pytest_gpucluster.inventory.occupancy import GpuProcess, Occupancy
from pytest_gpucluster.inventory.reading import healthy
from pytest_gpucluster.protocol.plain_data import to_plain

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.simulated_call import SimulatedCall

GIB = 2**30
KINDS = ("bf16", "fp8", "fp32", "attention", "softmax", "reduction")
DEAD_LINK = 4
FALLEN = 79
LEAST_BER = 1.5e-254
"""The least bit error rate that NVML can say."""
SIMULATED = "simulated"
NOISY_TURNS, NOISY_SHARE, NOISY_SPREAD = 13, 0.906, 0.3
"""A disturbed link has its limit as its median, and wide repeats, in every round of a first look (judging/noise.py)."""
LOADED_SHARE = 0.7
"""What is left of a link while others keep the host busy."""
OTHER_VERSION = "0.0.0+simulated"


def identity(call: SimulatedCall) -> Any:
    """Who the rank is. Versions are those of this machine, unless other ones are planted."""
    node, gpu = call.place
    other = call.has("versions")
    found = Identity(
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
    return to_plain(found)


def read_occupancy(call: SimulatedCall) -> Any:
    """What uses the GPU before the run: nothing, unless that is planted."""
    return _occupancy(call, busy=call.has("busy") or call.has("guest"))


def read_occupancy_again(call: SimulatedCall) -> Any:
    """The same at the end of the run: a guest has left."""
    return _occupancy(call, busy=call.has("busy"))


def _occupancy(call: SimulatedCall, *, busy: bool) -> Any:
    found = Occupancy(
        uuid=call.uuid,
        memory_used_gib=23.5 if busy else 0.004,
        memory_limit_gib=0.25,
        processes=[GpuProcess(pid=4711, name="python3", memory_gib=23.4)] if busy else [],
        utilization_percent=0,
    )
    return to_plain(found)


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
    return to_plain(healthy(GpuCounters, ecc_uncorrected=2 if call.has("ecc") else 0, nvlinks=links))


def gpu_xids(call: SimulatedCall) -> Any:
    """What the driver reported during the run: nothing, unless that is planted."""
    xid: dict[str, Any] = {"code": FALLEN, "pid": None, "is_own": False, "detail": None, "age_s": 0.0, "count": 1}
    heard = [made("measurements.driver_errors:XidSeen", **xid)] if call.has("xid") else []
    logged: dict[str, Any] = {name: [] for name in ("kernel_log", "before", "lost", "lost_before", "lost_elsewhere")}
    why: dict[str, Any] = {"nvml_why": None, "kernel_log_why": None}
    return made("measurements.driver_errors:GpuXids", nvml=heard, **logged, **why)


def clocks_under_load(call: SimulatedCall) -> Any:
    """NVML's event reasons under load."""
    hot = call.has("throttled")
    seen = to_plain(call.telemetry(clock_mhz=1290.0 if hot else 1620.0, power_w=540.0 if hot else 692.0, hot=hot))
    rate = call.rate("sustained")
    return made(
        "measurements.health:ClocksUnderLoad", seconds=call.kwargs["seconds"], tflops=rate, nvml_error=None, telemetry=seen
    )


def gemm(call: SimulatedCall) -> Any:
    """Dense products in bursts."""
    rate, kwargs = call.rate(call.kwargs["dtype"]), call.kwargs
    best, bursts = kwargs["sizes"][len(kwargs["sizes"]) // 2], kwargs.get("bursts", 1)
    by_size = {
        str(size): {"median": value, "p10": 0.997 * value, "p90": 1.003 * value, "best": 1.004 * value}
        for size in kwargs["sizes"]
        for value in [rate if size == best else 0.97 * rate]
    }
    return made(
        "measurements.gemm:GemmRate",
        tflops=rate,
        dtype=kwargs["dtype"],
        best_size=best,
        by_size=by_size,
        bursts_tflops=spread(rate, bursts),
        samples_tflops=spread(rate, kwargs["iterations"]),
        warmup_s=kwargs["warmup_s"],
        rest_s=kwargs.get("rest_s", 0.0),
        bursts=bursts,
        device=call.device,
        telemetry=to_plain(call.telemetry()),
    )


def sustained(call: SimulatedCall) -> Any:
    """Products back to back; the clock is what is left by the power limit, or by the heat."""
    rate, ratio = call.rate("sustained"), call.rate("at_clock")
    peak_tflops = rate / ratio
    clock_mhz = peak_tflops / call.spec.bf16_tflops * PEAK_CLOCK_MHZ
    hot = call.has("throttled")
    seconds, slice_s = call.kwargs.get("seconds", 20.0), call.kwargs.get("slice_s", 1.0)
    num_slices = max(2, round(seconds / slice_s))
    return made(
        "measurements.sustained:Sustained",
        tflops=rate,
        dtype=call.kwargs.get("dtype", "bfloat16"),
        size=call.kwargs.get("size", 8192),
        seconds=seconds,
        products=round(seconds * 600),
        slices_tflops=[*spread(1.02 * rate, num_slices // 2), *spread(rate, num_slices - num_slices // 2)],
        counted_clock_mhz=clock_mhz,
        counted_tflops=rate,
        clock_error=None,
        peak_at_clock_tflops=peak_tflops,
        of_peak_at_clock_ratio=ratio,
        nvml_error=None,
        device=call.device,
        telemetry=to_plain(call.telemetry(clock_mhz=clock_mhz, power_w=540.0 if hot else 692.0, hot=hot)),
    )


def hbm_pattern(call: SimulatedCall) -> Any:
    """Patterns over nearly all of the memory."""
    bad = call.has("pattern")
    total = int(call.spec.memory_gib * GIB)
    free = int(0.995 * total)
    tested = int(call.kwargs.get("share", 0.95) * free)
    first = made(
        "measurements.hbm_pattern:PatternError",
        kind="random",
        step="read",
        block=17,
        offset_bytes=4096,
        device_pointer="0x7f0000001000",
        expected="0x00000000ffffffff",
        found="0x00000000fffffffb",
        wrong_bits=[2],
    )
    return made(
        "measurements.hbm_pattern:PatternResult",
        errors=3 if bad else 0,
        errors_by_kind={"random": 3} if bad else {},
        first_errors=[first] if bad else [],
        tested_bytes=tested, free_bytes=free, total_bytes=total, share_of_free=tested / free, share_of_total=tested / total,
        blocks=128, passes=1, seconds=16.0, expected_s=15.0, moved_bytes=28 * tested, tb_s=3.6, device=call.device,
        telemetry=to_plain(call.telemetry()),
    )  # fmt: skip


def digests(call: SimulatedCall) -> Any:
    """Digests of seeded work, equal on all GPUs; one kind is another on a GPU that computes wrong bits."""
    bad = call.has("corrupt")
    found = {kind: hashlib.sha256(f"{kind}{bad and kind == 'fp32'}".encode()).hexdigest()[:48] for kind in KINDS}
    rounds = call.kwargs.get("rounds", 10)
    return made(
        "measurements.digest:Digests",
        digests=found,
        rounds=rounds,
        hot_rounds=rounds // 2,
        differing=dict.fromkeys(KINDS, 0),
        differing_rounds={kind: [] for kind in KINDS},
        excluded={},
        size=call.kwargs["size"],
        seed=call.kwargs["seed"],
        seconds=20.0,
        heat_s=call.kwargs.get("heat_s", 0.0),
        model=f"simulated {call.device}",
        device=call.device,
        telemetry=to_plain(call.telemetry()),
    )


def host_link(call: SimulatedCall) -> Any:
    """Copies between GPU and host; slower while all GPUs of the node copy."""
    together = call.kwargs.get("together", False)
    noisy = call.has("noisy") and call.turn < NOISY_TURNS
    loaded = call.has("loaded") and call.turn == 0
    share = NOISY_SHARE if noisy else LOADED_SHARE if loaded else 1.0
    h2d, d2h = (share * call.rate(f"{way}_all" if together else way) for way in ("h2d", "d2h"))
    wide = NOISY_SPREAD if noisy else 0.003
    number, socket = call.kwargs["iterations"], int(call.place[1] >= call.hardware.simulation.gpus_per_node / 2)
    cpus = "56-111" if socket else "0-55"
    return made(
        "measurements.host_link:HostLink",
        h2d_gb_s=h2d,
        d2h_gb_s=d2h,
        both_gb_s=1.6 * d2h,
        repeats_h2d_gb_s=spread(h2d, number, relative=wide),
        repeats_d2h_gb_s=spread(d2h, number, relative=wide),
        repeats_both_gb_s=spread(1.6 * d2h, number),
        h2d_remote_gb_s=None if together else 0.8 * h2d,
        d2h_remote_gb_s=None if together else 0.8 * d2h,
        numa_node=socket,
        remote_node=None if together else 1 - socket,
        memory_nodes=[0, 1],
        cpus=cpus,
        cpus_allowed="0-111",
        cpus_are_local=True,
        pages_on=[socket],
        together=together,
        size_bytes=call.kwargs["size_bytes"],
        device=call.device,
        telemetry={way: to_plain(call.telemetry()) for way in ("h2d", "d2h", "both")},
        host_load=to_plain(call.host_load(loaded=loaded)),
    )
