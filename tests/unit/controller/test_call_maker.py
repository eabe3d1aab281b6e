"""What a call leaves behind: ranks that are lost, replies that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.controller.diagnosis import diagnose
from pytest_gpucluster.controller.replies import lost_reply
from pytest_gpucluster.protocol.messages import Success
from tests.support.names import function_named

if TYPE_CHECKING:
    from pathlib import Path


def test_a_lost_place_is_named_and_not_asked_again(tmp_path: Path) -> None:
    """The controller remembers it: later calls are answered without the agent, the cause first, its peers not blamed."""
    why = "worker 4711 does not end on SIGKILL (state D)"
    controller = Controller(None, num_local=2, device="cpu", rootdir=tmp_path)
    controller._calls._drop_broken_groups({0: Success(value=1), 1: lost_reply(why)})
    replies = controller.call(Call(function=function_named("product"), ranks=[0, 1], groups=[[0, 1]], deadline_s=1.0))
    found = diagnose(replies, name=lambda rank: f"rank {rank} (node0-gpu{rank}, host)", what="product was not measured")
    assert (found.culprits, found.kind) == ((1,), "lost")
    assert found.text.splitlines()[0] == f"product was not measured: rank 1 (node0-gpu1, host): {why}"
