"""FSDP2's gathers by copy engines: the calls to FSDP2 and NCCL. Only a GPU shows that no SM moves a byte."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

from finetune_smoke.parallel import copy_engine_gather
from tests.support.finetune.runs import QUICK, forked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.ranks import Ranks

pytestmark = pytest.mark.long

SHARDED = {**QUICK, "layers": 2, "strategy": "fsdp", "greedy_rows": 0}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By run: the outcome, and the report of rank 1."""
    folder = tmp_path_factory.mktemp("gathers")
    asked = {**SHARDED, "fsdp_gather": "copy-engines"}
    worlds = [
        {"name": "kernels", "world_size": 2, "settings": SHARDED},
        {"name": "engines", "world_size": 2, "settings": asked, "copy_engines": True},
        {"name": "offload", "world_size": 2, "settings": {**asked, "cpu_offload": True}, "copy_engines": True},
        {"name": "cpu", "world_size": 2, "settings": asked},
    ]
    forked(folder, worlds)
    names = [str(world["name"]) for world in worlds]
    return {name: tuple(json.loads((folder / f"{name}{rest}.json").read_text()) for rest in ("", ".1")) for name in names}


@pytest.mark.parametrize("name", ["engines", "offload"])
def test_every_layer_is_gathered_so(reports: dict[str, Any], name: str) -> None:
    """In training, audits and evaluation, to the same bits; afterwards the communicator is gone."""
    (plain, none), (outcome, one) = reports["kernels"], reports[name]
    assert outcome["losses"] == plain["losses"]
    assert outcome["adapter_digest"] == plain["adapter_digest"]
    assert all(check["passed"] for check in outcome["checks"].values())
    assert none["gathers"] == {}
    gathered = one["gathers"]
    assert gathered["allocated"] == gathered["registered"] >= 2 * 2 * len(outcome["losses"])  # layers, forward and backward
    assert gathered["ended"] == 1


def test_ranks_without_a_gpu_are_refused(reports: dict[str, Any]) -> None:
    """The ranks are refused before anything is loaded."""
    assert reports["cpu"][1]["error"] == "fsdp_gather copy-engines cannot be had here: there is no GPU"


@pytest.mark.parametrize(
    ("device", "hosts", "nccl", "why_not"),
    [
        ("cuda", 1, (2, 28, 9), None),
        ("cuda", 1, (2, 27, 7), "NCCL is 2.27.7, and 2.28 is the first that can"),
        ("cuda", 2, (2, 28, 9), "the ranks are on several hosts"),
        ("cpu", 1, (2, 28, 9), "there is no GPU"),
    ],
)
def test_what_is_in_the_way(
    device: str, hosts: int, nccl: tuple[int, ...], why_not: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy engines need one host, GPUs and a recent NCCL."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(NCCL_CTA_POLICY_ZERO=2), raising=False)
    ranks = SimpleNamespace(device=torch.device(device), gather=lambda mine: [mine, [mine[0] + hosts - 1]])
    assert copy_engine_gather.obstacle(cast("Any", ranks)) == why_not


def test_torch_that_cannot_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old torch is refused with any NCCL."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(), raising=False)
    ranks = SimpleNamespace(device=torch.device("cuda"), gather=lambda mine: [mine, mine])
    assert copy_engine_gather.obstacle(cast("Any", ranks)) == f"torch {torch.__version__} cannot ask NCCL for it, 2.11 can"


class Steps:
    """The calls, in order, to stand-ins for GPU functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        policies = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()), NCCL_CTA_POLICY_ZERO="no CTAs")
        for place, name, stand_in in (
            (copy_engine_gather.symm_mem, "set_backend", self.done.append),
            (copy_engine_gather.symm_mem, "get_mem_pool", lambda device: f"pool of {device}"),
            (copy_engine_gather.symm_mem, "rendezvous", lambda _tensor, group: self.done.append(f"registered with {group}")),
            (torch.cuda, "use_mem_pool", self.use),
            (copy_engine_gather, "_all_gather", self.gather),
            (dist, "ProcessGroupNCCL", policies),
            (dist, "new_group", self.new_group),
            (dist, "barrier", lambda _group, device_ids: self.done.append(f"met on {device_ids}")),
            (dist, "destroy_process_group", lambda group: self.done.append(f"{group.group_name} gone")),
        ):
            monkeypatch.setattr(place, name, stand_in, raising=False)

    @contextmanager
    def use(self, pool: str) -> Iterator[None]:
        """As torch.cuda.use_mem_pool."""
        self.done.append(pool)
        yield

    def new_group(self, pg_options: Any) -> Any:
        """As dist.new_group."""
        self.done.append(pg_options.config.cta_policy)
        return SimpleNamespace(group_name="ours")

    def gather(self, _output: object, _input: object, *, group: Any, async_op: bool) -> Any:
        """As dist.all_gather_single."""
        self.done.append(f"gathered by {group.group_name}, {async_op}")
        return SimpleNamespace(wait=lambda: self.done.append("waited"))


def ranks_on_gpus() -> Ranks:
    """One of two ranks, with a device that does nothing."""
    wait = {"wait": lambda: None}
    return cast("Ranks", SimpleNamespace(device=torch.device("cuda", 1), **wait))


def test_communicator_asks_for_no_ctas_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The communicator stays after an error: other ranks may still be in a gather."""
    steps = Steps(monkeypatch)
    with copy_engine_gather.copy_engines(ranks_on_gpus()):
        pass
    assert steps.done == ["no CTAs", "met on [1]", "NCCL", "ours gone"]
    steps.done.clear()
    with pytest.raises(ValueError, match="training"), copy_engine_gather.copy_engines(ranks_on_gpus()):
        raise ValueError("training")
    assert steps.done == ["no CTAs", "met on [1]", "NCCL"]


def test_output_lies_in_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is registered before the gather, which runs on NCCL's stream, in our group and not in FSDP2's."""
    steps = Steps(monkeypatch)
    theirs = cast("Any", SimpleNamespace(group_name="theirs"))
    with copy_engine_gather.copy_engines(ranks_on_gpus()) as gather:
        steps.done.clear()
        output = gather.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
        assert output.shape == (6,)
        assert steps.done == ["pool of cuda:1"]
        steps.done.clear()
        assert gather(output, output[:3], theirs) is None
        assert steps.done == ["registered with ours", "gathered by ours, True", "waited"]
        steps.done.clear()
        assert gather(output, output[:3], theirs, async_op=True) is not None
        assert steps.done == ["registered with ours", "gathered by ours, True"]
