"""Measurements that several criteria share: each is taken once."""

import functools
from dataclasses import replace

import pytest

from pytest_gpucluster import Finding, MeasurementError, NodeLocalizer
from pytest_gpucluster.measurements.collective_sizes import by_size
from pytest_gpucluster.measurements.collectives import all_reduce, collective
from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.measurements.hbm import hbm_bandwidth
from pytest_gpucluster.measurements.health import gpu_state
from pytest_gpucluster.measurements.host import nic_paths, nic_state
from pytest_gpucluster.measurements.host_link import host_link
from pytest_gpucluster.measurements.sustained import sustained
from pytest_gpucluster.measurements.training import finetune, train


def measured(function, key=None, *, per="gpu", at="selected", in_budget=False, **named):  # noqa: ANN003 -- as in all of this suite
    """A fixture: what the function measures, once for all criteria that read it.

    By the recipe of the entry ``key``, in the seconds that it may take where ``in_budget``; at the ``selected`` places, at
    ``all``, or at those that are ``compared``.
    """

    @pytest.fixture(scope="session")
    def results(cluster, recipe, budget, compared_places):  # noqa: ANN202 - a fixture, known by the name that it is given below
        places = {"selected": None, "all": cluster.places, "compared": compared_places}[at]
        limit = {"budget_s": budget(key)} if in_budget else {}
        return cluster.run(function, per=per, places=places, **limit, **named, **(recipe(key) if key else {}))

    return results


compared = functools.partial(measured, at="compared")


def values_of(results):
    """The values of the places that have one, by place."""
    return {place: results[place] for place in results if place not in results.errors}


@pytest.fixture(scope="session")
def nics_at_start(readings):
    """Every adapter of every host, before the long work. All hosts take part: their ports are compared."""
    return readings.first(nic_state, per="host", every=True)


@pytest.fixture(scope="session")
def gpu_states(readings):
    """NVML's and torch's view of every GPU, before the long work."""
    return readings.first(gpu_state, per="gpu")


nic_ways = measured(nic_paths, per="host", deadline_s=60)
"""The ways of every adapter and GPU through the PCIe tree of its host."""
finetuned = measured(finetune, "finetune_loss", per="cluster")
"""One LoRA fine-tune over the whole cluster."""
trained_alone = compared(train, "training_throughput_gpu", single_rank=True)
"""A training on every GPU by itself, all at once."""
trained_in_node = measured(train, "training_throughput_ddp_node", per="node")
"""A training over the GPUs of each node, each with the whole model."""
trained_in_cluster = measured(train, "training_throughput_ddp_cluster", per="cluster")
"""A training over all GPUs, each with the whole model."""
sharded_in_node = measured(train, "training_throughput_fsdp_node", per="node")
"""A training under FSDP2 over the GPUs of each node."""
sharded_in_cluster = measured(train, "training_throughput_fsdp_cluster", per="cluster")
"""A training under FSDP2 over all GPUs."""
gemm_bf16 = compared(gemm, "bf16_tflops", dtype="bfloat16")
"""Dense BF16 products on every GPU at once."""
gemm_fp32 = compared(gemm, "fp32_tflops", dtype="float32")
"""FP32 products on every GPU at once: far below the power limit, so healthy GPUs do not differ."""
gemm_sustained = compared(sustained, "bf16_sustained")
"""BF16 products back to back on every GPU at once."""
hbm = compared(hbm_bandwidth, "hbm_bandwidth")
"""Copy, triad, read and write on every GPU at once."""
host_link_alone = compared(host_link, "host_to_device")
"""Copies between every GPU and its host, one GPU of a node at a time."""


@pytest.fixture(scope="session")
def node_localizer(cluster, recipe):
    """Searches the nodes that slow an all-reduce between nodes."""
    return NodeLocalizer(cluster, all_reduce, recipe("inter_node_busbw[all_reduce]"))


JUDGED_SHARE = 0.5
"""Of a collective's budget: what its judged rate may take. The table beside it has the rest."""
SHORTENED, LEFT_OUT = "fewer repeats", "sizes left out"
"""Names in the evidence for what the budget made shorter."""


def sized(recipe, cluster):
    """The recipe of a collective with the size for so many nodes: the large one from ``large_from_nodes`` on.

    With ``rank_bytes`` each rank has so many at least, up to ``most_bytes`` in all.
    """
    recipe.pop("search_s", None)  # of node_localizer
    large, least = recipe.pop("large_size_bytes", None), recipe.pop("large_from_nodes", None)
    of_rank, most = recipe.pop("rank_bytes", 0), recipe.pop("most_bytes", 0)
    is_large = None not in (large, least) and cluster.promised.num_nodes >= least
    of_ranks = min(of_rank * cluster.promised.num_nodes * cluster.promised.gpus_per_node, most)
    sizes = [size for size in (large if is_large else recipe.get("size_bytes"), of_ranks) if size]
    return {**recipe, "size_bytes": max(sizes)} if sizes else recipe


def require_possible(trained, possible):
    """Refuse a training that no GPU can be so fast at: what its products take is more than the dense BF16 rate."""
    for where, one in trained.items():
        if (error := impossible_training(one, possible, where=where)) is not None:
            raise error


def impossible_training(one, possible, *, where):
    """The error of a training that no GPU can be so fast at; None for any other."""
    can_be = possible("bf16_tflops")
    if can_be.bound is None or one.product_tflops is None:
        return None
    return can_be.error(one.product_tflops, where=f"{where}, {one.tokens_per_s_per_gpu:.0f} tokens/s")


def collective_by(operation, key, *, per):
    """A fixture: a collective by the recipe of the entry ``key``, which is judged, and by size what is shown beside it."""
    call, named = (all_reduce, {}) if operation == "all_reduce" else (collective, {"operation": operation})

    @pytest.fixture(scope="session")
    def results(cluster, recipe, budget):  # noqa: ANN202 - as above
        arguments, budget_s = sized(recipe(key), cluster), budget(key)
        shown_bytes = arguments.pop("shown_bytes", [])
        judged_s = None if budget_s is None else JUDGED_SHARE * budget_s
        judged = cluster.run(call, per=per, budget_s=judged_s, **named, **arguments)
        shown = {name: value for name, value in arguments.items() if name == "deadline_s"}
        shown["budget_s"] = None if judged_s is None else budget_s - min(judged.took_s, judged_s)
        return judged, cluster.run(by_size, per=per, operation=operation, sizes_bytes=shown_bytes, **shown)

    return results


def sizes_or_error(read):
    """The table by size that ``read`` returns. An error of our own code is shown there, and leaves the judged value as it is.

    Raises:
        MeasurementError: wrong elements arrived, a rank hung or died: that is no healthy node's.
    """
    try:
        sizes = read()
    except MeasurementError as error:
        if error.blames != "software":
            raise
        return {"sizes": f"not measured: {str(error).splitlines()[0]}"}
    found = {"sizes": sizes.rows, **({"without": sizes.left_out} if sizes.left_out else {})}
    if sizes.left_out_bytes:
        told = ", ".join(map(str, sizes.left_out_bytes))
        found[LEFT_OUT] = f"{told} bytes, as the table had {sizes.budget_s:.3g} s"
    return found


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
        **({SHORTENED: timing.shortened} if timing.shortened else {}),
        **sizes_or_error(read_sizes),
        **timing.evidence,
    }


def judge_compared(criterion, own, compared, evidence):
    """Judge a part beside its siblings; whoever kept its host busy meanwhile is named in place of the part."""
    load = getattr(own, "host_load", None)
    criterion.judge(Finding(value=compared, evidence=evidence, disturbed_by=None if load is None else load.disturbed_by))


def remark_on(evidence):
    """What the budget made shorter, for the report; None if nothing."""
    said = [f"{name}: {evidence[name]}" for name in (SHORTENED, LEFT_OUT) if name in evidence]
    return "; ".join(said) or None


def judge_collective(criterion, measured, place, read_sizes, culprit):
    """Judge the repeats of a collective at a place (None: all nodes); ``culprit`` is the finding of who slows it."""
    timing = measured.value if place is None else measured[place]
    repeats = measured.repeated(place, "busbw_gb_s", "spans_busbw_gb_s")
    evidence = {**culprit.evidence, **evidence_of(timing, read_sizes)}
    remark = "; ".join(filter(None, (culprit.remark, remark_on(evidence)))) or None
    criterion.judge(replace(culprit, value=repeats, evidence=evidence, remark=remark))
