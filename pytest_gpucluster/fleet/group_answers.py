"""What the GPUs of a simulated fleet answer together: collectives, the transport, training. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_gpucluster.fleet.simulated_call import SimulatedCall, made
from pytest_gpucluster.fleet.simulation import FaultKind, hostname_of, spread
from pytest_gpucluster.inventory.nics import NetInterface
from pytest_gpucluster.inventory.reading import healthy
from pytest_gpucluster.inventory.telemetry import GroupTelemetry
from pytest_gpucluster.protocol.plain_data import to_plain
from pytest_gpucluster.protocol.rank import ordered_rounds, ranges
from pytest_gpucluster.thresholds.limit import all_to_all_gb_s

IN_NODE_GB_S = {2: 331.0, 3: 340.0, 4: 353.0}
"""Bus bandwidth of an all-reduce in a node by the number of GPUs; from here on NVLink SHARP gives :data:`NVLS_GB_S`."""
NVLS_GB_S = 480.0
BLACKWELL_IN_NODE_GB_S = {4: 650.0, 8: 725.0}
IN_DOMAIN_GB_S = 870.0
"""Bus bandwidth of an all-reduce of 8 GiB in an NVLink domain of several nodes, and between domains (GB200, published)."""
BETWEEN_DOMAINS_GB_S = 790.0
OF_SLOW_LINKS = 0.8
"""Bus bandwidth of an all-reduce as a part of links that are slower than Hopper's NVLinks; a guess."""
WITHOUT_NVLS = 0.765
HOPPER_NVLINK_GB_S = 450.0
MOVED_GB_S = {"all_gather": 332.8, "reduce_scatter": 326.9, "all_to_all": 336.6, "broadcast": 330.0, "send_recv": 359.6}
"""Bus bandwidth of the other collectives in a node; those of 4 H200, but for broadcast, which nobody measured."""
BY_NVLS = ("all_reduce", "all_gather", "reduce_scatter")
LATENCY_US = 13.3
"""What the smallest collective takes (8 H100, NVIDIA's dgxc-benchmarking)."""
BUSBW_FACTOR: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), lambda ranks: (ranks - 1) / ranks),
    **dict.fromkeys(("broadcast", "send_recv"), lambda _ranks: 1.0),
}
"""As of measurements/collectives.py, which needs torch."""
SHOWN_DTYPES = ("float32", "bfloat16")
PORT_GB_S = 50.0
"""What the ports of a node carry for each of its GPUs."""
OF_PORTS = {2: 1.1525}
"""Bus bandwidth as a part of all ports of a node, by the number of nodes: a tree on 2 nodes; rings on more."""
BLACKWELL_OF_PORTS = {2: 1.51}
RINGS_OF_PORTS = 0.9665
"""As 96 H100 reach them (386.6 of 400 GB/s; CoreWeave, README of its nccl-tests)."""
SLOW_UPLINK = 0.5
SLOW_RAIL = 5
"""The number of the adapter, and so of the GPU, whose way is slow where that is planted."""
ALL_TO_ALL_OF_BOUND = 0.84
"""As 16 H100 reach it (79.1 of 93.75 GB/s; NVIDIA's cluster-readiness-engine)."""
ALL_TO_ALL_OF_DOMAINS = 0.65
"""As 144 GB200 in two racks reach it (65 of 100 GB/s; a handbook of Google A4X)."""
SOCKETS_GB_S = 4.8
CHANNELS = {"infiniband": "NET/IB/GDRDMA", "roce": "NET/RoCE/GDRDMA", "efa": "NET/AWS Libfabric/GDRDMA", "nvlink": "P2P/MNNVL"}
"""By fabric; any other is sockets."""
CHECKS = (
    "base_digest", "data_digest", "lock_step", "all_reduce", "adapter_digest", "finite", "adapters_moved", "restore",
    "generation", "graph_lock_step", "step_time_spread",
)  # fmt: skip
OF_SEVERAL = ("all_reduce", "adapter_digest", "step_time_spread")
"""Checks that a rank alone does not make."""
KEPT = {("ddp", 1): 1.0, ("ddp", 2): 0.985, ("ddp", 3): 0.965, ("fsdp", 1): 0.99, ("fsdp", 2): 0.9, ("fsdp", 3): 0.6}
"""What is left of a GPU's training rate, by strategy and reach: 1 alone, 2 in a node, 3 between nodes."""
KEPT_ON_SOCKETS = {"ddp": 0.66, "fsdp": 0.11}
NOT_MEASURED = ("tokens_per_s_per_gpu", "positions_per_s_per_gpu", "mfu", "step_ms", "resumed_at", "saved_step", "compile_s")
"""None of an outcome that is not made for its rate, not resumed and not compiled."""
ALONE_GIB, SHARDED_GIB, LAYERS = 51.9, 12.1, 28


def _telemetry(call: SimulatedCall) -> Any:
    first, last = call.group.ends
    found = GroupTelemetry(
        sm_clock_lowest_mhz=1725.0,
        sm_clock_highest_mhz=1980.0,
        lowest_clock_rank=first,
        power_lowest_w=310.0,
        power_highest_w=402.0,
        temperature_highest_c=61.0,
        hottest_rank=last,
        event_reasons={"sw_power_cap": ranges(call.group.ranks)} if len(call.group.ranks) < 64 else {},
    )
    return to_plain(found)


def _on_sockets(call: SimulatedCall) -> bool:
    fabric = call.simulation.fabric
    return len(call.group.nodes) > 1 and (fabric not in CHANNELS or bool(call.group.with_fault("sockets")))


def _busbw_gb_s(call: SimulatedCall, operation: str) -> float:
    if len(call.group.nodes) > 1:
        is_slow = call.group.with_fault("uplink") or call.group.leaves_a_bad_leaf or _has_slow_way(call)
        slowed = SLOW_UPLINK if is_slow else 1.0
        return SOCKETS_GB_S if _on_sockets(call) else slowed * _between_nodes_gb_s(call, operation)
    links = call.spec.peer_gb_s / HOPPER_NVLINK_GB_S
    in_node = IN_NODE_GB_S if links == 1 else BLACKWELL_IN_NODE_GB_S
    moved = MOVED_GB_S[operation] * links if operation in MOVED_GB_S else None
    halved = 0.5 if call.group.with_fault("links") else 1.0
    summed = in_node.get(len(call.group.ranks), NVLS_GB_S) if links >= 1 else OF_SLOW_LINKS * call.spec.peer_gb_s
    whole = (moved or summed) * halved
    return whole * WITHOUT_NVLS if call.group.with_fault("nvls") and operation in BY_NVLS else whole


def _has_slow_way(call: SimulatedCall) -> bool:
    """Whether the GPU beside the slow adapter of a node takes part: a ring is as slow as its slowest way."""
    gpus, ranks = call.simulation.gpus_per_node, call.group.ranks
    return any(ranks[number] % gpus == SLOW_RAIL % gpus for number in call.group.with_fault("rail"))


def _between_nodes_gb_s(call: SimulatedCall, operation: str) -> float:
    nodes, ranks = len(call.group.nodes), len(call.group.ranks)
    gpus = max(1, ranks // nodes)
    domains = call.group.domains
    if None not in domains and not call.group.with_fault("clique"):
        nvlink_gb_s = IN_DOMAIN_GB_S if len(domains) == 1 else BETWEEN_DOMAINS_GB_S
        if operation == "all_to_all" and len(domains) > 1:
            return ALL_TO_ALL_OF_DOMAINS * PORT_GB_S * (ranks - 1) / (ranks - ranks / len(domains))
        return nvlink_gb_s * (1.0 if operation == "all_reduce" else 0.75)
    if operation == "all_to_all":
        rates = {"nic_gb_s_per_gpu": PORT_GB_S, "nvlink_gb_s": call.spec.peer_gb_s}
        return ALL_TO_ALL_OF_BOUND * all_to_all_gb_s(nodes=nodes, gpus_per_node=gpus, **rates)
    of_ports = OF_PORTS if call.spec.peer_gb_s <= HOPPER_NVLINK_GB_S else BLACKWELL_OF_PORTS
    has_tree = operation == "all_reduce" and gpus > 1  # of single GPUs a tree sends as much as a ring
    share = of_ports.get(nodes, RINGS_OF_PORTS) if has_tree else RINGS_OF_PORTS
    return PORT_GB_S * ranks / nodes * share


def _time_us(call: SimulatedCall, operation: str, size_bytes: int) -> float:
    algbw = _busbw_gb_s(call, operation) / BUSBW_FACTOR[operation](len(call.group.ranks))
    return max(size_bytes / algbw / 1e3, LATENCY_US)


def collective(call: SimulatedCall) -> Any:
    """A collective in a node or between nodes."""
    operation = call.kwargs.get("operation", "all_reduce")
    ranks, size, iterations = len(call.group.ranks), call.kwargs["size_bytes"], call.kwargs["iterations"]
    busbw, time_us = _busbw_gb_s(call, operation), _time_us(call, operation, size)
    return made(
        "measurements.collectives:CollectiveTiming",
        operation=operation,
        busbw_gb_s=busbw,
        algbw_gb_s=busbw / BUSBW_FACTOR[operation](ranks),
        time_us=time_us,
        p50_us=time_us,
        p99_us=1.02 * time_us,
        size_bytes=size,
        dtype=call.kwargs.get("dtype", "float32"),
        world_size=ranks,
        samples_busbw_gb_s=spread(busbw, iterations),
        spans_busbw_gb_s=spread(busbw, max(1, iterations // 4)),
        slowest_rank=0,
        nccl_version="simulated",
        nvls="off" if call.group.with_fault("nvls") else "default",
        **_chosen(call, operation, time_us),
        device=call.device,
        telemetry=_telemetry(call),
        shortened=None,
    )


all_reduce = collective


def by_size(call: SimulatedCall) -> Any:
    """A collective at several sizes: its rate from some size on, its latency below."""
    operation = call.kwargs["operation"]
    return made(
        "measurements.collective_sizes:CollectiveSizes",
        rows=[_row(call, operation, dtype, size) for dtype in SHOWN_DTYPES for size in call.kwargs["sizes_bytes"]],
        left_out=[],
        left_out_bytes=[],
        budget_s=call.kwargs.get("budget_s"),
    )


def _row(call: SimulatedCall, operation: str, dtype: str, size_bytes: int) -> dict[str, Any]:
    time_us = _time_us(call, operation, size_bytes)
    algbw = size_bytes / time_us / 1e3
    return {
        "dtype": dtype,
        "bytes": size_bytes,
        "us": round(time_us, 3),
        "p50_us": round(time_us, 3),
        "p99_us": round(1.02 * time_us, 3),
        "algbw_gb_s": round(algbw, 5),
        "busbw_gb_s": round(algbw * BUSBW_FACTOR[operation](len(call.group.ranks)), 5),
        "slowest_rank": 0,
        **_chosen(call, operation, time_us),
    }


def _chosen(call: SimulatedCall, operation: str, time_us: float) -> dict[str, str | None]:
    """What NCCL would choose; it says nothing of sends and receives."""
    if operation in ("all_to_all", "send_recv"):
        return {"algorithm": None, "protocol": None}
    has_nvls = operation in BY_NVLS and not call.group.with_fault("nvls")
    nvls = "NVLS" if len(call.group.nodes) == 1 else "NVLS_TREE"
    is_small = time_us <= LATENCY_US
    return {"algorithm": nvls if has_nvls and not is_small else "RING", "protocol": "LL" if is_small else "SIMPLE"}


def nodes_reached(call: SimulatedCall) -> Any:
    """Which nodes answered in one group over all ranks."""
    nodes = call.group.nodes
    return made(
        "measurements.collectives:Reachability",
        nodes=[*nodes],
        num_nodes=len(nodes),
        hostnames={str(node): [hostname_of(node)] for node in nodes},
        world_size=len(call.group.ranks),
        round_trip_us=180.0,
    )


def transport(call: SimulatedCall) -> Any:
    """The channels of a rank: the first and the last GPU of a node speak to other nodes."""
    nodes, (_, gpu) = call.group.nodes, call.place
    is_off_fabric = call.has("sockets")
    simulation = call.simulation
    kind = "NET/Socket" if is_off_fabric else CHANNELS.get(simulation.fabric, "NET/Socket")
    ends = len(nodes) > 1 and gpu in (0, simulation.gpus_per_node - 1)
    domains = call.group.domains
    own = simulation.domain_of(call.place[0])
    in_domain = {"NET/Socket" if is_off_fabric else "P2P/MNNVL": 2} if ends and own is not None and domains[own] > 1 else {}
    leaves = ends and (own is None or len(domains) > 1)
    crossing = {**({kind: 2} if leaves else {}), **in_domain}
    return made(
        "measurements.transport:Transport",
        backend="nccl",
        network="Socket" if kind == "NET/Socket" else "IB",
        devices=[f"mlx5_{gpu}:1/IB"],
        kinds={"P2P/CUMEM": 4, **crossing},
        inter_node=crossing,
        in_domain=in_domain,
        gdr=all("GDRDMA" in one for one in crossing) if crossing else None,
        num_nodes=len(nodes),
        lines=[],
    )


def _checks(call: SimulatedCall) -> dict[str, Any]:
    """The exact checks of a fine-tune. A slow GPU is found by its forward."""
    slow = call.group.with_fault("slow")
    made_here = [name for name in CHECKS if len(call.group.ranks) > 1 or name not in OF_SEVERAL]
    found: dict[str, Any] = {name: {"passed": True, "detail": "1 look, nothing differs", "ranks": []} for name in made_here}
    if slow and "step_time_spread" in found:
        detail = f"rank {ranges(slow)}: the forward takes 4.7 ms, the median of all is 3.3 ms"
        found["step_time_spread"] = {"passed": False, "detail": detail, "ranks": [*slow]}
    return found


def _outcome(call: SimulatedCall, **measured: Any) -> Any:
    losses = [round(0.1 + 2.3 * 0.955**step, 4) for step in range(120)]
    fields: dict[str, Any] = {
        "loss": losses[-1],
        "first_loss": losses[0],
        "losses": losses,
        "loss_limit": 0.5,
        "step_below_limit": 53,
        "seconds_below_limit": 9.5,
        "blind_floor_nats": 1.35,
        "exact_match": 1.0,
        "greedy_exact_match": 1.0,
        "heldout_loss": 0.09,
        "steps": len(losses),
        "world_size": len(call.group.ranks),
        "adapter_digest": "simulated",
        "checks": _checks(call),
        "train_s": 10.0,
        "setup_s": 3.0,
        "eval_s": 1.0,
        "stopped": False,
        "notes": [],
        "strategy": "none",
        "step_rows": 8 * len(call.group.ranks),
        "trained_parameters": 40_370_176,
        "wire_gb_per_step": 0.0,
        "memory_peak_gib": [12.0] * min(8, len(call.group.ranks)),
        "sharded_gib": 0.0,
        "layer_gib": 0.0,
        "rows_s": 0.1,
        "left_out": {},
        "window_rates": [],
        "timed_steps": 0,
        "timed_s": 0.0,
        **dict.fromkeys(NOT_MEASURED),
        **measured,
    }
    return {"$dataclass": "finetune_smoke.reporting.outcome:Outcome", "fields": fields}


def finetune(call: SimulatedCall) -> Any:
    """The small fine-tune that has to learn."""
    return made("measurements.training:Finetuned", outcome=_outcome(call), telemetry=_telemetry(call), device=call.device)


def train(call: SimulatedCall) -> Any:
    """A training at full speed: as fast as the slowest GPU, less what the wire takes."""
    strategy = "fsdp" if call.kwargs.get("strategy") == "fsdp" else "ddp"
    reach = 1 if len(call.group.ranks) == 1 else 2 if len(call.group.nodes) == 1 else 3
    kept = KEPT_ON_SOCKETS[strategy] if _on_sockets(call) else KEPT[strategy, reach]
    rate = call.group.training_rate * kept
    outcome = _outcome(
        call,
        checks={},
        losses=[2.4] * 20,
        steps=20,
        tokens_per_s_per_gpu=rate,
        positions_per_s_per_gpu=1.003 * rate,
        window_rates=[rate] * 8,
        timed_steps=16,
        timed_s=16 * 8192 / rate,
        mfu=rate / 33_700,
        step_ms=8192e3 / rate,
        memory_peak_gib=[_peak_gib(strategy, len(call.group.ranks))] * min(8, len(call.group.ranks)),
        sharded_gib=SHARDED_GIB if strategy == "fsdp" else 0.0,
        layer_gib=SHARDED_GIB / LAYERS if strategy == "fsdp" else 0.0,
        strategy="none" if reach == 1 else strategy,
        step_rows=4 * len(call.group.ranks),
        wire_gb_per_step=0.0 if reach == 1 else 1.3,
    )
    measured = {"outcome": outcome, "telemetry": _telemetry(call), "device": call.device}
    return made("measurements.training:Trained", peak_tflops=call.kwargs.get("peak_bf16_tflops"), **measured)


def _peak_gib(strategy: str, ranks: int) -> float:
    """What a GPU alone needs; under FSDP2 less what the others hold, plus two gathered layers, and 1 % of what is sharded."""
    saved = SHARDED_GIB * (1 - 1 / ranks - 2 / LAYERS - 0.01) if strategy == "fsdp" else 0.0
    return round(ALONE_GIB - saved, 3)


DIRECT = (0.88, 4.2, "P2P/CUMEM")
"""What a pair reaches of its NVLinks, its latency in microseconds, and NCCL's name of the way."""
OVER_HOST = (0.05, 11.5, "SHM/direct/direct")


PAIR_KEPT: Mapping[FaultKind, float] = {"links": 0.5, "nvlink": 17 / 18}
"""What is left of a pair's rate where one of its GPUs has this fault."""


def pair_matrix(call: SimulatedCall) -> Any:
    """Every ordered pair of a node's GPUs: equal, unless one is planted that takes the host, or that has slow NVLinks."""
    ranks = range(len(call.group.ranks))
    bad = [{first, (first + 1) % len(ranks)} for first in call.group.with_fault("pair")]
    kept = {number: share for kind, share in PAIR_KEPT.items() for number in call.group.with_fault(kind)}
    full_gb_s = call.spec.peer_gb_s

    def values(value: Callable[[set[int], float, float, str], Any]) -> list[list[Any]]:
        """One value of each pair, from its ranks and its way; None for the GPU itself."""
        pairs = [[{source, target} for target in ranks] for source in ranks]
        return [[value(one, *(OVER_HOST if one in bad else DIRECT)) if len(one) > 1 else None for one in row] for row in pairs]

    return made(
        "measurements.pair_matrix:PairMatrix",
        gb_s=values(lambda pair, share, _us, _path: share * min(kept.get(one, 1.0) for one in pair) * full_gb_s),
        latency_us=values(lambda _pair, _share, latency_us, _path: latency_us),
        paths=values(lambda _pair, _share, _us, path: path),
        peer_access=values(lambda _pair, _share, _us, path: path == DIRECT[2]),
        shortened=0,
        device=call.device,
    )


# --- One adapter at a time ---

RDMA_GB_S = 46.5
RDMA_US, SOCKETS_US = 9.0, 38.0
INTERFACE = "eth0"
SLOW_ADAPTERS = ("mlx5_5:1", INTERFACE)
"""The adapters that are slow where that is planted."""
LOSS, DELAY = 0.5, 2.5
PARTNERS = 3


def net_interfaces(_call: SimulatedCall) -> Any:
    """One interface for sockets."""
    return made("measurements.pair_matrix:NetInterfaces", interfaces=[to_plain(healthy(NetInterface, name=INTERFACE))])


def rail(call: SimulatedCall) -> Any:
    """A rank's ends of its pairs. A pair is as slow as a slow adapter at either end."""
    group, name, size = call.group, call.kwargs["name"], call.kwargs["size_bytes"]
    own = group.ranks.index(call.rank)
    slow = {*group.with_fault("rail")} if name in SLOW_ADAPTERS else set()
    sockets = name == INTERFACE
    rounds = ordered_rounds(len(group.ranks), most=call.kwargs.get("partners", PARTNERS))
    transfer_s = size / (SOCKETS_GB_S if sockets else RDMA_GB_S) / 1e9
    trip_s = 2e-6 * (SOCKETS_US if sockets else RDMA_US)
    ends = [
        made(
            "measurements.pair_matrix:RailEnd",
            source=source,
            target=target,
            transfer_s=transfer_s / LOSS if slow & {source, target} else transfer_s,
            round_trip_s=trip_s * DELAY if slow & {source, target} else trip_s,
        )
        for pairs in rounds
        for source, target in pairs
        if own in (source, target)
    ]
    return made(
        "measurements.pair_matrix:RailRates",
        name=name,
        ends=ends,
        used=[name],
        kinds=["NET/Socket" if sockets else "NET/IB/GDRDMA"],
        size_bytes=size,
        shortened=0,
        device=call.device,
    )
