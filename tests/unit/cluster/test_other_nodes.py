"""What each node says of itself and no rank of the controller's node can see: hidden GPUs, other variables."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.config.settings import OPTIONS, Expect, Settings, requested, requested_of_node
from pytest_gpucluster.inventory.identity import Identity, read_variables
from pytest_gpucluster.judging.promises import hidden_gpus, other_options, other_variables
from tests.support import REPOSITORY
from tests.support.nvml_simulator import build, environment

NCCL = {"NCCL_ALGO": "Ring", "NCCL_IB_HCA": "mlx5"}


def rank_of(node: int, gpu: int = 0, **known: Any) -> Identity:
    """What a rank of a node says."""
    one = Identity(hostname=f"gpu-node-{node}", group_rank=node, local_rank=gpu, versions={}, torch_gpus=8)
    return replace(one, **known)


def test_hidden_gpus_of_every_node() -> None:
    """Each node by its hostname, once; a GPU that any rank of the node sees is not hidden."""
    ranks = [
        rank_of(0, nvml_gpus=8, hidden_gpus=0),
        *(rank_of(1, gpu, nvml_gpus=8, hidden_gpus=2) for gpu in range(6)),
        rank_of(2, nvml_gpus=None, hidden_gpus=None),
        rank_of(10, nvml_gpus=8, hidden_gpus=7),
    ]
    assert hidden_gpus(ranks) == [
        "CUDA_VISIBLE_DEVICES hides 2 of 8 GPUs on gpu-node-1",
        "CUDA_VISIBLE_DEVICES hides 7 of 8 GPUs on gpu-node-10",
    ]
    assert hidden_gpus(ranks[:1]) == []


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (NCCL, []),
        ({**NCCL, "NCCL_ALGO": "Tree"}, ["NCCL_ALGO=Tree on gpu-node-1, Ring on gpu-node-0"]),
        ({"NCCL_IB_HCA": "mlx5"}, ["NCCL_ALGO unset on gpu-node-1, Ring on gpu-node-0"]),
        ({**NCCL, "NCCL_P2P_DISABLE": "1"}, ["NCCL_P2P_DISABLE=1 on gpu-node-1, unset on gpu-node-0"]),
        ({**NCCL, "CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING=1 on gpu-node-1, unset on gpu-node-0"]),
    ],
)
def test_other_variables(second: dict[str, str], said: list[str]) -> None:
    """A variable that differs from the first node's is named once a node, with both values."""
    ranks = [rank_of(0, variables=NCCL), rank_of(1, 0, variables=second), rank_of(1, 1, variables=second)]
    assert other_variables(ranks) == said
    assert other_variables(ranks[:1]) == other_variables([]) == []


def test_many_nodes_with_one_difference_are_one_entry() -> None:
    """The verdict line stays one line."""
    ranks = [rank_of(0, variables={}), *(rank_of(node, variables=NCCL) for node in range(1, 64))]
    assert other_variables(ranks) == [
        "NCCL_ALGO=Ring on 63 nodes (gpu-node-1, ...), unset on gpu-node-0",
        "NCCL_IB_HCA=mlx5 on 63 nodes (gpu-node-1, ...), unset on gpu-node-0",
    ]


ASKED = {"--gpucluster-level": "standard", "--gpucluster-profile": "h200-sxm"}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("", []),
        ("--gpucluster-level=standard --gpucluster-results=x", []),
        ("--gpucluster-level=soak", ["--gpucluster-level=soak:28800s on b, standard on a"]),
        ("--gpucluster-level=loud", ["--gpucluster-level=loud on b, standard on a"]),
        ("--gpucluster-gate", ["--gpucluster-gate=given on b, not given on a"]),
        ("--gpucluster-selftest", ["--gpucluster-selftest=given on b, not given on a"]),
        ("--gpucluster-profile=lab", ["--gpucluster-profile=lab on b, h200-sxm on a"]),
        ("--gpucluster-expect=gpus_per_node=8,nodes=2", ["--gpucluster-expect=nodes=2,gpus_per_node=8 on b, not given on a"]),
    ],
)
def test_other_options(second: str, said: list[str]) -> None:
    """Each option of another node that means something else, with both texts."""
    parser = argparse.ArgumentParser()
    for option in OPTIONS:
        parser.add_argument(option.name, **option.keywords)
    given = parser.parse_args(["--gpucluster-profile=h200-sxm", *second.split()])
    assert other_options([("a", ASKED), ("b", requested_of_node(given, start=Path()))]) == said
    assert other_options([("a", ASKED)]) == []


def test_an_option_that_is_not_given_elsewhere() -> None:
    """The difference is the same seen from the other side."""
    assert other_options([("a", ASKED), ("b", {"--gpucluster-level": "standard"})]) == [
        "--gpucluster-profile not given on b, h200-sxm on a"
    ]


def test_a_thresholds_file_is_known_by_its_content(tmp_path: Path) -> None:
    """Not by its name; one that is missing on a node is a difference too."""
    for name, content in (("one", "a"), ("copy", "a"), ("other", "b")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    ours = Settings(
        thresholds=tmp_path / "one",
        profile=None,
        expect=Expect(),
        level="quick",
        soak_s=None,
        results_dir=tmp_path,
        gate=False,
        inline=False,
    )
    others = (requested(replace(ours, thresholds=tmp_path / name)) for name in ("copy", "other", "missing", "."))
    assert [len(other_options([("a", requested(ours)), ("b", other)])) for other in others] == [0, 1, 1, 1]
    assert len(other_options([("a", requested(ours)), ("b", requested(replace(ours, thresholds=None)))])) == 1


def test_which_variables_are_read() -> None:
    """What changes a measurement; not what differs between ranks, what only logs, or a secret."""
    chosen = {"NCCL_ALGO": "Ring", "TORCH_NCCL_BLOCKING_WAIT": "1", "CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1"}
    others = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": "x.log",
        "GPUCLUSTER_NODE": "1",
        "GPUCLUSTER_SECRET": "no",
        "GPUCLUSTER_NCCL_LOG": "x.log",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/root",
    }
    assert read_variables({**chosen, **others}) == chosen


@pytest.mark.parametrize(("shown", "expected"), [(None, "3 0"), ("0,2", "3 1"), ("", "3 3"), ("7", "3 3")])
def test_a_rank_counts_what_its_node_hides(tmp_path: Path, shown: str | None, expected: str) -> None:
    """By NVML and CUDA_VISIBLE_DEVICES, on the node itself."""
    variables = environment(build(tmp_path), "count 3\n")
    visible = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    code = "from pytest_gpucluster.inventory.identity import read_hidden; print(*read_hidden())"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, env={**variables, **visible}, capture_output=True, text=True, timeout=120, check=True, cwd=REPOSITORY
    )
    assert ran.stdout.strip() == expected
