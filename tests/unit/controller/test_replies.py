"""Who is released when: peers of a rank that failed, each kind of failure after its own moment."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pytest_gpucluster.controller import replies
from pytest_gpucluster.controller.replies import Gathering, Release, lost_reply
from pytest_gpucluster.protocol.messages import Failure, FailureKind, Success


def of_two_pairs() -> Gathering:
    """Four ranks in two groups, nobody has answered."""
    return Gathering(waiting={0, 1, 2, 3}, groups=[(0, 1), (2, 3)], give_up_s=time.monotonic() + 60)


def failed(kind: FailureKind, **more: Any) -> Failure:
    """The reply of a rank that failed."""
    return Failure(**{"kind": kind, "error": "planted", **more})


def test_nobody_is_released_while_all_is_well() -> None:
    """An answer is no reason."""
    one = of_two_pairs()
    one.add(0, Success(value=1))
    assert one.to_release() is None


@pytest.mark.parametrize("entered", [True, False])
def test_peers_of_one_that_raised(monkeypatch: pytest.MonkeyPatch, *, entered: bool) -> None:
    """After a moment, its own group alone, once; and they are told whether it came into the call."""
    monkeypatch.setattr(replies, "RAISED_GRACE_S", 0.05)
    one = of_two_pairs()
    one.add(2, failed("raised", entered=entered))
    assert one.to_release() is None
    time.sleep(0.06)
    assert one.to_release() == Release(ranks=[3], why="released, because rank 2 raised", grace_s=0.05, entered=entered)
    assert one.to_release() is None


def test_peers_of_one_that_died() -> None:
    """At once; one that is lost never said whether it came in, and its peers need no moment."""
    one = of_two_pairs()
    one.add(1, lost_reply("its agent process has ended"))
    assert one.to_release() == Release(ranks=[0], why="released, because rank 1 lost", grace_s=0.0, entered=False)


def test_peers_of_one_that_only_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is given longer to tell; once it has, the ordinary moment counts for the rest."""
    monkeypatch.setattr(replies, "RAISED_GRACE_S", 0.05)
    monkeypatch.setattr(replies, "CONSEQUENCE_GRACE_S", 600.0)
    one = Gathering(waiting={0, 1, 2}, groups=[(0, 1, 2)], give_up_s=time.monotonic() + 60)
    one.add(0, failed("raised", error="Connection closed by peer [127.0.0.1]:4711", entered=True))
    time.sleep(0.06)
    assert one.to_release() is None
    one.add(1, failed("raised", error="CUDA out of memory", entered=True))
    time.sleep(0.06)
    found = one.to_release()
    assert found is not None
    assert found.ranks == [2]


def test_echoes_alone_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells more: the rest is released."""
    monkeypatch.setattr(replies, "CONSEQUENCE_GRACE_S", 0.05)
    one = of_two_pairs()
    one.add(0, failed("raised", error="Socket Timeout", entered=True))
    assert one.to_release() is None
    time.sleep(0.06)
    found = one.to_release()
    assert found is not None
    assert found.ranks == [1]
