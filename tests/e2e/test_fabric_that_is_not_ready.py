"""A run in which NCCL and CUDA say that the NVLink fabric of the host is not ready, and in which a function only writes so."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.worker.raised import FABRIC_TEXT
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

TESTS = """\
    import os
    import pytest
    import torch.distributed as dist

    NOT_READY = "Unexpected error from cudaGetDeviceCount(). Did you run some? Error 802: system not yet initialized"
    BIND = (
        "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.29.3\\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\\nLast error:\\n"
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'not in the present state'."
    )

    def bind():
        raise dist.DistBackendError(BIND)

    def start():
        if dist.get_rank() == 1:
            raise RuntimeError(NOT_READY)

    def own():
        if dist.get_rank() == 1:
            raise ValueError(NOT_READY)

    @pytest.mark.parametrize("function", [bind, start, own])
    def test_of(cluster, function):
        assert cluster.run(function, per="cluster").value is None

    @pytest.mark.distributed(per="cluster")
    def test_together():
        bind()
    """


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two ranks of one host."""
    folder = tmp_path_factory.mktemp("fabric")
    (folder / "test_own.py").write_text(textwrap.dedent(TESTS), encoding="utf-8")
    expected = "--gpucluster-expect=gpus_per_node=2"
    return run_pytest(folder, "--gpucluster", "--gpucluster-profile=rehearsal", "test_own.py", expected)


def test_the_host_is_named_with_the_next_step(ran: FinishedRun) -> None:
    """One culprit: the host, not its two ranks, whoever of them met it."""
    found = ran.culprit("node0")
    assert found["kind"] == "host", ran.stdout
    assert FABRIC_TEXT in found["action"]
    assert len(found["criteria"]) == 3, found
    assert "look at the Fabric Manager" in ran.stdout


def test_a_text_of_a_function_is_its_own(ran: FinishedRun) -> None:
    """What a ValueError contains says nothing of the host."""
    assert ran.culprit("node0-cpu1")["kind"] == "software"
