"""Measurements that several criteria share: each is taken once."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.errors import GpuclusterError, MeasurementError
from pytest_gpucluster.measurements.collective_sizes import by_size
from pytest_gpucluster.measurements.collectives import all_reduce, collective
from pytest_gpucluster.measurements.driver_errors import gpu_xids, node_sxids
from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.measurements.hbm import hbm_bandwidth
from pytest_gpucluster.measurements.health import gpu_counters, gpu_state
from pytest_gpucluster.measurements.host import nic_paths, nic_state
from pytest_gpucluster.measurements.host_link import host_link
from pytest_gpucluster.measurements.slurm import slurm_state
from pytest_gpucluster.measurements.sustained import sustained
from pytest_gpucluster.measurements.training import finetune, train
from pytest_gpucluster.plugin.stash_keys import RULE
from pytest_gpucluster.text import first_line
from tests_acceptance.guilty_nodes import GuiltyNodes

FOLDER = "tests_acceptance"


@dataclass(frozen=True)
class Snapshot:
    """What a reader gave at one moment; what grew is the last one less the first.

    Attributes:
        at_s: the controller's clock.
        earlier: the first test of the run if it began before a test of this folder did, so that nobody had read anything yet.
    """

    results: Any
    at_s: float
    earlier: str | None = None


def snapshot(cluster: Any, function: Any, **arguments: Any) -> Snapshot:
    """A reading that another one will be compared with."""
    return Snapshot(cluster.run(function, **arguments), time.monotonic())


def first_snapshot(request: pytest.FixtureRequest, results: Any) -> Snapshot:
    """A reading that was taken before the run, for :func:`first_snapshots`."""
    first = request.session.items[0]
    is_own = first.path.is_relative_to(Path(__file__).parent)
    return Snapshot(results, time.monotonic(), None if is_own else f"{first.path.name}::{first.name}")


def watched_s(first: Snapshot, last: Snapshot) -> float:
    """The seconds of the run between two readings.

    Raises:
        MeasurementError: tests had run before the first one, and what they did to the hardware was not seen.
    """
    if first.earlier is not None:
        raise MeasurementError(
            f"{first.earlier} ran before the first reading: select a test of {FOLDER} that can run before it"
        )
    return last.at_s - first.at_s


@pytest.fixture(scope="session", autouse=True)
def first_snapshots(request):
    """Take, before the first test, the ``..._at_start`` of every test that judges the whole run, and that no rule excludes.

    They are all at home in this file: the first test may be one of any other.
    """
    for item in request.session.items:
        if item.get_closest_marker("at_end") is not None and RULE not in item.stash:
            for name in item.fixturenames:
                if name.endswith("_at_start"):
                    with contextlib.suppress(GpuclusterError):  # raised again in each test that reads it
                        request.getfixturevalue(name)


@pytest.fixture(scope="session")
def nics_at_start(cluster, request):
    """Every adapter of every host, before the long work. All hosts take part: their ports are compared."""
    return first_snapshot(request, cluster.run(nic_state, per="host", places=cluster.places, deadline_s=60))


@pytest.fixture(scope="session")
def nic_ways(cluster):
    """The ways of every adapter and GPU through the PCIe tree of its host."""
    return cluster.run(nic_paths, per="host", deadline_s=60)


@pytest.fixture(scope="session")
def counters_at_start(cluster, request):
    """The error counters of every GPU, before the long work."""
    return first_snapshot(request, cluster.run(gpu_counters, per="gpu", deadline_s=60))


@pytest.fixture(scope="session")
def xids_at_start(cluster, request):
    """What the listener of every node heard of its GPUs before the long work; it listens from then on at the latest."""
    return first_snapshot(request, cluster.run(gpu_xids, per="gpu", deadline_s=60))


@pytest.fixture(scope="session")
def sxids_at_start(cluster, request):
    """What the listener of every host read in the kernel log before the long work; it reads on from then."""
    return first_snapshot(request, cluster.run(node_sxids, per="host", deadline_s=60))


def ask_slurm(cluster):
    """What Slurm says of every host."""
    return cluster.run(slurm_state, per="host", deadline_s=60, job=cluster.promised.slurm_job)


@pytest.fixture(scope="session")
def slurm_at_start(cluster):
    """What Slurm says of every host before the long work."""
    return ask_slurm(cluster)


@pytest.fixture(scope="session")
def gpu_states(cluster):
    """NVML's and torch's view of every GPU."""
    return cluster.run(gpu_state, per="gpu", deadline_s=60)


@pytest.fixture(scope="session")
def gpu_states_at_start(gpu_states, request):
    """NVML's view of every GPU, before the long work."""
    return first_snapshot(request, gpu_states)


@pytest.fixture(scope="session")
def finetuned(cluster, recipe):
    """One LoRA fine-tune over the whole cluster."""
    return cluster.run(finetune, per="cluster", **recipe("finetune_loss"))


@pytest.fixture(scope="session")
def trained_alone(cluster, recipe):
    """A training on every GPU by itself, all at once."""
    return cluster.run(train, per="gpu", single_rank=True, **recipe("training_throughput_gpu"))


@pytest.fixture(scope="session")
def trained_in_node(cluster, recipe):
    """A training over the GPUs of each node, each with the whole model."""
    return cluster.run(train, per="node", **recipe("training_throughput_ddp_node"))


@pytest.fixture(scope="session")
def trained_in_cluster(cluster, recipe):
    """A training over all GPUs, each with the whole model."""
    return cluster.run(train, per="cluster", **recipe("training_throughput_ddp_cluster"))


@pytest.fixture(scope="session")
def compared_places(request, cluster):
    """Places of the measurements that compare GPUs: all, if a selected test compares; None (the selected) otherwise."""
    compared = any("siblings" in getattr(item, "fixturenames", ()) for item in request.session.items)
    return cluster.places if compared else None


@pytest.fixture(scope="session")
def gemm_bf16(cluster, recipe, compared_places):
    """Dense BF16 products on every GPU at once."""
    return cluster.run(gemm, per="gpu", places=compared_places, dtype="bfloat16", **recipe("bf16_tflops"))


@pytest.fixture(scope="session")
def gemm_fp32(cluster, recipe, compared_places):
    """FP32 products on every GPU at once: far below the power limit, so healthy GPUs do not differ."""
    return cluster.run(gemm, per="gpu", places=compared_places, dtype="float32", **recipe("fp32_tflops"))


@pytest.fixture(scope="session")
def gemm_sustained(cluster, recipe, compared_places):
    """BF16 products back to back on every GPU at once."""
    return cluster.run(sustained, per="gpu", places=compared_places, **recipe("bf16_sustained"))


@pytest.fixture(scope="session")
def hbm(cluster, recipe, compared_places):
    """Copy, triad, read and write on every GPU at once."""
    return cluster.run(hbm_bandwidth, per="gpu", places=compared_places, **recipe("hbm_bandwidth"))


@pytest.fixture(scope="session")
def host_link_alone(cluster, recipe, compared_places):
    """Copies between every GPU and its host, one GPU of a node at a time."""
    return cluster.run(host_link, per="gpu", places=compared_places, **recipe("host_to_device"))


@pytest.fixture(scope="session")
def guilty_nodes(cluster, recipe):
    """Searches the nodes that spoil an all-reduce between nodes."""
    return GuiltyNodes(cluster, recipe("inter_node_busbw[all_reduce]"))


def sized(recipe, cluster):
    """The recipe of a collective with the size for so many nodes: the large one from ``large_from_nodes`` on."""
    recipe.pop("search_s", None)  # of guilty_nodes
    large, least = recipe.pop("large_size_bytes", None), recipe.pop("large_from_nodes", None)
    is_large = None not in (large, least) and cluster.promised.num_nodes >= least
    return {**recipe, "size_bytes": large} if is_large else recipe


def measure_collective(cluster, operation, recipe, *, per):
    """One collective over the GPUs of each node, or of all nodes: what is judged, and by size what is shown beside it."""
    shown_bytes = recipe.pop("shown_bytes", [])
    call, named = (all_reduce, {}) if operation == "all_reduce" else (collective, {"operation": operation})
    judged = cluster.run(call, per=per, **named, **recipe)
    deadline = {key: value for key, value in recipe.items() if key == "deadline_s"}
    return judged, cluster.run(by_size, per=per, operation=operation, sizes_bytes=shown_bytes, **deadline)


def told_by_size(read):
    """The table by size that ``read`` returns. An error of our own code there is told, and leaves the judged value as it is.

    Raises:
        MeasurementError: wrong elements arrived, a rank hung or died: that is no healthy node's.
    """
    try:
        sizes = read()
    except MeasurementError as error:
        if error.blames != "software":
            raise
        return {"sizes": f"not measured: {first_line(str(error))}"}
    return {"sizes": sizes.rows, **({"without": sizes.left_out} if sizes.left_out else {})}


def evidence_of(timing, read_sizes):
    """What else was seen while a collective was timed; by size it is in results.json."""
    return {
        "NVLS": timing.nvls,
        **({"algorithm": f"{timing.algorithm}, {timing.protocol}"} if timing.algorithm else {}),
        "NCCL": timing.nccl_version,
        "us": timing.time_us,
        "p50 us": timing.p50_us,
        "p99 us": timing.p99_us,
        "algbw GB/s": timing.algbw_gb_s,
        "ranks": timing.world_size,
        "slowest rank": timing.slowest_rank,
        "bytes": timing.size_bytes,
        **told_by_size(read_sizes),
        **timing.evidence,
    }
