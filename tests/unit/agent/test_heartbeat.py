"""When an agent takes the controller for lost: by looks at its heartbeat, and not by the time in which nobody could look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pytest_gpucluster.agent import heartbeat
from pytest_gpucluster.agent.heartbeat import Heartbeat
from pytest_gpucluster.protocol.channel import CONTROLLER
from pytest_gpucluster.protocol.rank import Rank

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import StoreChannel

RANK = Rank(rank=1, world_size=2, local_rank=1, local_world_size=2, group_rank=0)
ROUND_S = 0.5


class Watched:
    """A heartbeat over a store whose clock and whose controller a test moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """The controller beats."""
        self.now_s, self.blocked_s, self.count, self.is_alive = 100.0, 0.0, 0, True
        patch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.heartbeat = Heartbeat(cast("StoreChannel", self), RANK)

    def beat(self, rank: int, count: int) -> None:
        """The store takes it at once, or after a while in which it answers nobody."""
        del rank, count
        self.now_s, self.blocked_s = self.now_s + self.blocked_s, 0.0

    def beats(self, ranks: list[int]) -> dict[int, bytes]:
        """What the controller wrote last."""
        del ranks
        return {CONTROLLER: b"%d" % self.count} if self.count else {}

    def rounds(self, seconds: float) -> bool:
        """So long the agent goes on; whether it took the controller for lost."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += ROUND_S
            self.count += self.is_alive
            self.heartbeat.beat()
            if self.heartbeat.is_controller_lost():
                return True
        return False


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """An agent that has heard the controller for a while."""
    found = Watched(monkeypatch)
    assert not found.rounds(20.0)
    return found


@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("paused_s", [59.0, 300.0])
def test_a_pause_of_its_own_is_no_silence(watched: Watched, paused_s: float, after_s: float) -> None:
    """The whole node was stopped, or the machine: the controller, which was too, goes on a moment later."""
    watched.rounds(after_s)
    watched.now_s += paused_s
    watched.is_alive = False
    assert not watched.rounds(5.0)
    watched.is_alive = True
    assert not watched.rounds(20.0)


@pytest.mark.parametrize("after_s", [0.0, 1.0, 2.0, 3.0, 4.0])
def test_a_store_that_answers_late_is_no_silence(watched: Watched, after_s: float) -> None:
    """It answered nobody for a minute, so that the controller could not write either."""
    watched.rounds(after_s)
    watched.blocked_s = 58.0
    assert not watched.rounds(80.0)


def test_after_sigterm_too(watched: Watched) -> None:
    """A store that is slow for a moment is no controller that is gone."""
    watched.heartbeat.note_termination()
    assert not watched.rounds(5.0)
    watched.blocked_s = heartbeat.TERMINATED_SILENT_S + 1.0
    assert not watched.rounds(10.0)


def test_a_controller_that_is_gone(watched: Watched) -> None:
    """After a minute of looks, and soon after SIGTERM; in the end also with it."""
    watched.is_alive = False
    assert not watched.rounds(heartbeat.CONTROLLER_SILENT_S - 10.0)
    assert watched.rounds(20.0)
    watched.is_alive = True
    watched.rounds(20.0)
    watched.heartbeat.note_termination()
    watched.is_alive = False
    assert not watched.rounds(heartbeat.TERMINATED_SILENT_S - 1.0)
    assert watched.rounds(3.0)
    watched.is_alive = True
    assert watched.rounds(heartbeat.AFTER_TERM_S)


def test_a_controller_that_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, but not after SIGTERM."""
    found = Watched(monkeypatch)
    found.is_alive = False
    assert not found.rounds(200.0)
    found.heartbeat.note_termination()
    assert found.rounds(3.0)
