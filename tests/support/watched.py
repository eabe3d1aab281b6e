"""What ``gpucluster watch`` shows, made: readings of a node with eight GPUs, and the journal of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.commands.watch_screen import View
from pytest_gpucluster.config.run_files import JOURNAL, LOGS
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.watched_node import LiveGpu, LivePort, NodeReading
from pytest_gpucluster.judging.verdict import PENDING, Record
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.watched_run import WatchedRun
from tests.support.fleet_records import failed, fleet, outcomes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pytest_gpucluster.places import Place

HOT = {"event reasons": ["hw_thermal_slowdown"], "C": 91.0, "W": 412.0, "SM MHz": 1290.0}
USUAL = {"event reasons": ["sw_power_cap"], "C": 61.0, "W": 694.0, "SM MHz": 1755.0}
VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "CUDA_MODULE_LOADING": "LAZY"}
PLANNED = ("criterion", "place", "outcome", "reason")
LOG = "[rank 3] gpu-node-0:4711:4711 [3] NCCL INFO Connected all rings\nclocks 1290 MHz, 91 C\n"


def gpu(number: int, *, seconds: int, **changes: Any) -> LiveGpu:
    """A busy H200 that has sent and received for so many seconds."""
    sent = {"nvlink_tx": 412, "nvlink_rx": 409, "pcie_tx": 1, "pcie_rx": 27}
    facts: dict[str, Any] = {
        "name": "NVIDIA H200",
        "busy_percent": 100,
        "memory_used_gib": 121.3 + number / 10,
        "memory_gib": 140.4,
        "temperature_c": 58 + number,
        "memory_temperature_c": 70.0 + number,
        "power_w": 690.0 + number,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 3201,
        "event_reasons": ["sw_power_cap"],
        "counted_bytes": {name: (gb_s + number) * 10**9 * seconds for name, gb_s in sent.items()},
    }
    return LiveGpu(**{**facts, **changes})


def reading(*, seconds: int, gpus: Any = None, ports: Any = None) -> NodeReading:
    """Eight GPUs and eight ports: GPU 3 is hot, GPU 6 lost, and a port is down."""
    hot = {"event_reasons": ["hw_slowdown", "hw_thermal_slowdown"], "temperature_c": 91, "sm_clock_mhz": 1290, "power_w": 412.0}
    made = [gpu(number, seconds=seconds, **(hot if number == 3 else {})) for number in range(8)]
    lost = NotAvailable("GPU is lost (nvmlDeviceGetUUID)")
    found = [*made[:6], lost, made[7]]
    adapters = [port(number, seconds=seconds, state="DOWN" if number == 5 else "ACTIVE") for number in range(8)]
    return NodeReading(at_s=float(seconds), gpus=found if gpus is None else gpus, ports=adapters if ports is None else ports)


def port(number: int, *, seconds: int, state: str = "ACTIVE") -> LivePort:
    """A ConnectX-7 that carries 371.2 Gbit/s each way; a port that is down has sent nothing."""
    count = 46_400_000_000 * seconds if state == "ACTIVE" else 0
    return LivePort(name=f"mlx5_{number}/1", state=state, rate_gbit_s=400.0, counted_bytes={"tx": count, "rx": count})


def view(run: WatchedRun | None = None, **changes: Any) -> View:
    """A screen of a node that was read twice, two seconds apart."""
    facts: dict[str, Any] = {
        "hostname": "gpu-node-0",
        "at": "2026-11-23 12:00:00",
        "before": reading(seconds=100),
        "now": reading(seconds=102),
        "silent_s": 1.0,
        "interval_s": 2.0,
        "run": None if run is None else run.picture(),
    }
    return View(**{**facts, **changes})


def records_of(places: dict[str, Place], *, bad: Iterable[Record]) -> list[Record]:
    """The outcomes of three criteria and of the variables of each node."""
    rows = outcomes(places, bad)
    known = [_with_telemetry(row) for row in rows]
    nodes = [place.id for place in places.values() if place.gpu is None and place.hostname is not None]
    found: list[str] = []
    asked = {"evidence": {"found": found, "variables": VARIABLES}, "outcome": "passed"}
    return [*known, *(Record(criterion="environment_hints", place=node, **asked) for node in nodes)]


def _with_telemetry(record: Record) -> Record:
    if record.outcome != "passed" or record.criterion != "bf16_tflops":
        return record
    facts = {**record_facts(record), "evidence": USUAL}
    return Record(**facts)


def write_run(
    folder: Path, *, nodes: int, absent: Sequence[int] = (), done: float = 1.0, verdict: str | None = None
) -> WatchedRun:
    """The files of a run that has come so far: its journal, and the log of a rank."""
    places = fleet(nodes, 8, absent=absent)
    bad = [failed("bf16_tflops", "node0-gpu3", 498, evidence=HOT), failed("clocks_under_load", "node0-gpu3", 1, evidence=HOT)]
    records = records_of(places, bad=bad)
    (folder / LOGS).mkdir(parents=True)
    (folder / LOGS / "rank3.log").write_text(LOG, encoding="utf-8")
    journal = Journal(folder / JOURNAL)
    write_start(journal, places, records, nodes=nodes)
    for record in records[: int(done * len(records))]:
        journal.write("outcome", record=record_facts(record))
    if verdict is not None:
        journal.write("verdict", verdict=verdict.partition(":")[0], line=verdict, objections=[])
    journal.close()
    return WatchedRun(folder)


def write_start(journal: Journal, places: dict[str, Place], records: Sequence[Record], *, nodes: int) -> None:
    """What stands before the first outcome."""
    facts = {"level": "standard", "profile": "h200-sxm", "expected": {"nodes": nodes, "gpus_per_node": 8}, "waivers": []}
    journal.write("started", run="0123456789abcdef", versions={}, settings={}, facts=facts)
    pending = [{**record_facts(record), "outcome": PENDING, "reason": None} for record in records]
    rows = [{"nodeid": f"test_{row['criterion']}", **{name: row[name] for name in PLANNED}} for row in pending]
    terms = {"rehearsal": False, "level_reached": True, "objections": []}
    journal.write("planned", expected=rows, terms=terms)
    every = [{name: getattr(place, name) for name in place.__slots__} for place in places.values()]
    gpus, hosts = [one for one in every if one["gpu"] is not None], [one for one in every if one["gpu"] is None]
    journal.write("bound", places=gpus, nodes=hosts, shape=f"{nodes} nodes x 8 NVIDIA H200", remarks=[])


def settled(run: WatchedRun, **changes: Any) -> View:
    """A view of a run whose clock stands still, of a folder that is called as usual."""
    seen = view(run)
    assert seen.run is not None
    still = {"source": "gpucluster-results", "silent_s": 2.0, "elapsed_s": 64.0}
    return replace(seen, run=replace(seen.run, **{**still, **changes}))
