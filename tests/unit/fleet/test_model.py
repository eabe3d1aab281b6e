"""The model of a simulated fleet: it answers what the packaged suite asks, with values that have the measurements' shape."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
from typing import TYPE_CHECKING, Any

import pytest

import pytest_gpucluster.measurements
from pytest_gpucluster.fleet import model
from pytest_gpucluster.fleet.simulated_call import SimulatedCall, SimulatedGroup
from pytest_gpucluster.fleet.simulation import MODELS, parse_simulation
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.functions import SIMULATED_MARK
from pytest_gpucluster.protocol.messages import Failure, FunctionName, Success, read_reply
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator

ASKED: dict[str, dict[str, Any]] = {
    "inventory.identity:identity": {"device": "cuda"},
    "inventory.occupancy:read_occupancy": {},
    "measurements.collective_sizes:by_size": {"operation": "all_to_all", "sizes_bytes": [8, 1 << 30]},
    "measurements.collectives:all_reduce": {"size_bytes": 1 << 30, "iterations": 20, "warmup": 5, "dtype": "float32"},
    "measurements.collectives:collective": {"operation": "all_gather", "size_bytes": 1 << 30, "iterations": 20, "warmup": 5},
    "measurements.collectives:nodes_reached": {},
    "measurements.dcgm:dcgm_program": {},
    "measurements.digest:digests": {"rounds": 100, "size": 8192, "seed": 1, "heat_s": 10},
    "inventory.occupancy:read_occupancy_again": {},
    "measurements.file_rates:file_rates": {"path": None, "size_bytes": 1 << 31, "files": 4, "within_s": 10},
    "measurements.file_rates:file_requests": {"path": None, "size_bytes": 1 << 28, "depth": 16, "seconds": 1},
    "measurements.gemm:gemm": {"dtype": "bfloat16", "sizes": [4096, 8192], "iterations": 50, "warmup_s": 0.005, "bursts": 5},
    "measurements.hbm:hbm_bandwidth": {"size_bytes": 1 << 32, "iterations": 20, "warmup": 5},
    "measurements.hbm_pattern:hbm_pattern": {"share": 0.95, "passes": 1},
    "measurements.health:clocks_under_load": {"seconds": 3, "size": 8192},
    "measurements.health:gpu_counters": {},
    "measurements.health:gpu_state": {},
    "measurements.host:host_clock": {},
    "measurements.host:host_errors": {},
    "measurements.host:host_state": {},
    "measurements.host:kubernetes_cluster": {},
    "measurements.host:kubernetes_node": {},
    "measurements.host_parts:host_parts": {},
    "measurements.host_link:host_link": {"size_bytes": 1 << 29, "iterations": 10, "warmup": 2},
    "measurements.host_rates:host_memory": {"size_bytes": 6 << 30, "repeats": 5},
    "measurements.host_rates:launch_latency": {"launches": 2000, "repeats": 5},
    "measurements.host:nic_paths": {},
    "measurements.host:nic_state": {},
    "measurements.pair_matrix:pair_matrix": {"size_bytes": 1 << 28, "small_bytes": 8, "iterations": 5, "warmup": 2},
    "measurements.pair_matrix:net_interfaces": {},
    "measurements.pair_matrix:rail": {"name": "mlx5_5:1", "size_bytes": 1 << 28},
    "measurements.shared_paths:clear_path": {"path": "/mnt", "run": "0"},
    "measurements.shared_paths:count_under_lock": {"path": "/mnt", "run": "0", "parties": ["simulated-rank0"], "seconds": 0.3},
    "measurements.shared_paths:leave_mark": {"path": "/mnt", "run": "0"},
    "measurements.shared_paths:read_marks": {"path": "/mnt", "digests": {}, "within_s": 1},
    "measurements.shared_paths:replace_file": {"path": "/mnt", "run": "0", "parties": ["simulated-rank0"], "seconds": 0.3},
    "measurements.shared_paths:small_files": {"path": "/mnt", "count": 500, "within_s": 5},
    "measurements.sustained:sustained": {"seconds": 20, "slice_s": 1},
    "measurements.health:node_sxids": {},
    "measurements.training:finetune": {"preset": "small"},
    "measurements.training:train": {"preset": "7b-shape", "steps": 12},
    "measurements.transport:transport": {"size_bytes": 1 << 26},
    "measurements.health:gpu_xids": {},
    "worker.worker:leave_group": {},
    "worker.worker:look_at_gpu": {},
}

BAD = (
    "node0-gpu0:ecc",
    "node0:pattern",
    "node0:throttled",
    "node0:busy",
    "node0:cable",
    "node0:sockets",
    "node0:xid",
    "node0-gpu1:pair",
)


def function(name: str) -> FunctionName:
    """A function of this package by its short name."""
    module, _, qualname = name.partition(":")
    return FunctionName(module=f"pytest_gpucluster.{module}", qualname=qualname, file="", relative="", digest="")


def ask(name: str, *, rank: int = 0, gpu: str = "h200-sxm", bad: tuple[str, ...] = (), **kwargs: Any) -> Any:
    """The plain value of one rank of 2 x 4 GPUs, all in one group."""
    simulation = dataclasses.replace(parse_simulation("2x4", faults=[*bad]), gpu=gpu)
    reply = model.answer(
        SimulatedGroup(simulation=simulation, ranks=tuple(range(8))),
        function(name),
        rank=rank,
        kwargs={**ASKED.get(name, {}), **kwargs},
    )
    assert isinstance(reply, Success), reply
    return reply.value


def alone() -> SimulatedGroup:
    """A rank without a process group."""
    return SimulatedGroup(simulation=parse_simulation("1x8", faults=[]), ranks=(0,))


def dataclasses_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every dataclass in a plain value, itself included."""
    if isinstance(value, dict):
        if plain_data.MARK in value:
            yield value
        for inner in value.values():
            yield from dataclasses_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from dataclasses_in(inner)


def beside() -> set[str]:
    """The measurements whose answer stands beside them."""
    modules = [found.name for found in pkgutil.iter_modules(pytest_gpucluster.measurements.__path__)]
    return {
        f"measurements.{module}:{name}"
        for module in modules
        for name, found in vars(importlib.import_module(f"pytest_gpucluster.measurements.{module}")).items()
        if hasattr(found, SIMULATED_MARK)
    }


def test_every_answer_is_asked_for_here() -> None:
    """The tests below cover every answer. One beside its measurement has that one's class, and needs no row here."""
    assert set(model.ANSWERS) <= {name.partition(":")[2] for name in ASKED}
    assert {name for name in ASKED if name.partition(":")[2] not in model.ANSWERS} <= beside()


def test_an_answer_stands_in_one_place() -> None:
    """Beside the measurement or among the others, and no two functions that are asked for share a name."""
    assert "measurements.host_rates:launch_latency" in beside()
    names = [name.partition(":")[2] for name in {*ASKED, *beside()}]
    assert len(set(names)) == len(names)
    assert not {name.partition(":")[2] for name in beside()} & set(model.ANSWERS)


@pytest.mark.parametrize("name", sorted(ASKED))
def test_the_function_is_there(name: str) -> None:
    """A measurement that was renamed is noticed."""
    module, _, qualname = name.partition(":")
    assert callable(getattr(importlib.import_module(f"pytest_gpucluster.{module}"), qualname))


@pytest.mark.parametrize("gpu", sorted(MODELS))
@pytest.mark.parametrize(
    "bad",
    [
        (),
        ("node0-gpu0:ecc", "node0:pattern", "node0:throttled", "node0:busy", "node0:cable", "node0:sockets", "node0-gpu1:pair"),
    ],
)
@pytest.mark.parametrize("name", sorted(ASKED))
def test_values_have_the_shape_of_the_measurement(name: str, bad: tuple[str, ...], gpu: str) -> None:
    """Each dataclass has exactly the fields of its class, and the value crosses the channel as it is."""
    value = ask(name, gpu=gpu, bad=bad)
    assert read_reply(Success(value=value).to_json()) == Success(value=plain_data.from_plain(value))
    for one in dataclasses_in(value):
        where, _, qualname = one[plain_data.MARK].partition(":")
        fields = {field.name for field in dataclasses.fields(getattr(importlib.import_module(where), qualname))}
        assert set(one["fields"]) == fields, qualname


@pytest.mark.parametrize("name", sorted({*ASKED} - {"measurements.host:host_clock"}))
def test_equal_seeds_give_equal_values(name: str) -> None:
    """A run can be repeated; the GPUs of a host differ."""
    assert ask(name, rank=3) == ask(name, rank=3)


def test_another_seed_and_another_gpu_are_other_parts() -> None:
    """Chips differ, and so do fleets."""
    one, other = parse_simulation("2x4", faults=[]), parse_simulation("2x4", seed=1, faults=[])
    assert len({round(each.rate(rank, "sustained"), 3) for each in (one, other) for rank in range(8)}) == 16


def test_a_function_without_a_model_is_an_error_that_says_so() -> None:
    """No value is made up for a test of somebody's own."""
    reply = model.answer(alone(), function("ours:own"), rank=0, kwargs={})
    assert isinstance(reply, Failure)
    assert reply.error == "a simulated fleet has no value of pytest_gpucluster.ours:own"


@pytest.mark.parametrize(
    "name",
    [
        "measurements.none:none",
        "measurements.host_rates:none",
        "measurements.host_rates:cores_by_node",
        "measurements:host_rates",
        "inventory.host:launch_latency",
        "measurements.host_rates:",
    ],
)
def test_a_measurement_without_an_answer(name: str) -> None:
    """A module or function that is not there, one without the mark, and one of another folder."""
    reply = model.answer(alone(), function(name), rank=0, kwargs={"launches": 1, "repeats": 1})
    assert isinstance(reply, Failure)
    assert reply.type == "NotSimulatedError"
    assert "has no value of" in reply.error


def test_arguments_that_an_answer_beside_does_not_know() -> None:
    """No crash of the agent."""
    reply = model.answer(alone(), function("measurements.host_rates:launch_latency"), rank=0, kwargs={})
    assert isinstance(reply, Failure)
    assert "cannot answer launch_latency" in reply.error


def test_gpus_and_hosts_are_near_the_usual_value() -> None:
    """Each by its own sigma, the same in each call, and equal where nothing differs."""
    simulation = parse_simulation("2x4", faults=[])
    calls = [
        SimulatedCall(group=SimulatedGroup(simulation=simulation, ranks=(rank,)), rank=rank, kwargs={}) for rank in range(8)
    ]
    assert {call.near(5.0, "copy") for call in calls} == {5.0}
    by_host = [call.near(5.0, "copy", host=0.01) for call in calls]
    assert by_host[:4] == [by_host[0]] * 4
    assert len(set(by_host)) == 2
    assert len({call.near(5.0, "copy", chip=0.01) for call in calls}) == 8
    assert all(abs(call.near(5.0, "copy", chip=0.01) / 5 - 1) <= 0.02 for call in calls)


def test_arguments_without_a_model_are_an_error() -> None:
    """An unknown dtype is no crash of the agent."""
    reply = model.answer(
        alone(),
        function("measurements.gemm:gemm"),
        rank=0,
        kwargs={**ASKED["measurements.gemm:gemm"], "dtype": "float4"},
    )
    assert isinstance(reply, Failure)
    assert "cannot answer gemm" in reply.error


def test_labels_are_those_of_no_real_part() -> None:
    """Whoever reads one row of a report sees that the part is simulated."""
    label = ask("inventory.identity:identity", rank=5)["fields"]
    assert (label["uuid"], label["serial"]) == ("GPU-SIMULATED-00001-01", "SIM-00001-01")


@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm", "b200-sxm"])
def test_no_collective_is_faster_than_its_ports(gpu: str) -> None:
    """At every shape of 2 to 8 nodes and 1 to 8 GPUs: a tree over two single GPUs sends as much as a ring."""
    entries = packaged().criteria(packaged().profiles[gpu])
    for nodes, gpus in itertools.product(range(2, 9), range(1, 9)):
        simulation = dataclasses.replace(parse_simulation(f"{nodes}x{gpus}", faults=[]), gpu=gpu)
        group = SimulatedGroup(simulation=simulation, ranks=tuple(range(nodes * gpus)))
        facts = {"nodes": nodes, "gpus_per_node": gpus, "world_size": nodes * gpus}
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            bound = entries[f"inter_node_busbw[{operation}]"].best_possible(gpus=nodes * gpus, cluster=facts)
            arguments = {**ASKED["measurements.collectives:all_reduce"], "operation": operation}
            reply = model.answer(group, function("measurements.collectives:collective"), rank=0, kwargs=arguments)
            assert isinstance(reply, Success)
            assert bound is not None
            assert bound.allows(plain_data.from_plain(reply.value).busbw_gb_s), (nodes, gpus, operation)
