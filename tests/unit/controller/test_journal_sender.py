"""The journal's way to its replica: few messages for many lines, and none of the lines is lost or late."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from pytest_gpucluster.controller import command_link
from pytest_gpucluster.controller.command_link import SEND_EVERY_S, JournalSender
from pytest_gpucluster.protocol.channel import ChannelLostError, journal_key

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import StoreChannel
    from pytest_gpucluster.protocol.messages import JournalText


class Sent:
    """Stands for the channel: keeps what was sent."""

    def __init__(self, *, is_lost: bool = False) -> None:
        """Nothing was sent."""
        self.texts: list[str] = []
        self.is_lost = is_lost

    def put(self, key: str, message: JournalText) -> None:
        """Keep it; the keys count from 0."""
        if self.is_lost:
            raise ChannelLostError("gone")
        assert key == journal_key(len(self.texts))
        self.texts.append(message.text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test moves on."""
    now_s = [100.0]
    monkeypatch.setattr(command_link.time, "monotonic", lambda: now_s[0])
    return now_s


def opened(sent: Sent) -> JournalSender:
    """A sender that knows its replica."""
    sender = JournalSender()
    sender.open(cast("StoreChannel", sent))
    return sender


def test_many_lines_are_few_messages(clock: list[float]) -> None:
    """The first line goes at once, those of the next moment together, in their order."""
    sent = Sent()
    sender = opened(sent)
    for number in range(1000):
        clock[0] += SEND_EVERY_S / 100
        sender.add(f"{number}\n")
    assert len(sent.texts) <= 11
    sender.flush()
    assert "".join(sent.texts) == "".join(f"{number}\n" for number in range(1000))


def test_a_line_after_a_pause_goes_at_once(clock: list[float]) -> None:
    """A run whose tests take long has no line behind."""
    sent = Sent()
    sender = opened(sent)
    for number in range(5):
        clock[0] += SEND_EVERY_S
        sender.add(f"{number}\n")
        assert sent.texts[-1] == f"{number}\n"


def test_lines_before_the_replica_is_known_wait(clock: list[float]) -> None:
    """They are sent with its coming, and dropped if there is none."""
    sent, sender = Sent(), JournalSender()
    sender.add("first\n")
    clock[0] += 10 * SEND_EVERY_S
    sender.add("second\n")
    sender.flush()
    sender.open(cast("StoreChannel", sent))
    assert sent.texts == ["first\nsecond\n"]
    alone = JournalSender()
    alone.add("first\n")
    alone.close()
    alone.add("second\n")
    alone.open(cast("StoreChannel", sent))
    assert sent.texts == ["first\nsecond\n"]


def test_nothing_is_sent_twice_and_nothing_empty(clock: list[float]) -> None:
    """A call without a new line before it sends nothing."""
    sent = Sent()
    sender = opened(sent)
    sender.add("one\n")
    sender.flush()
    sender.flush()
    assert sent.texts == ["one\n"]
    assert clock


def test_a_lost_store_does_not_matter_here(clock: list[float]) -> None:
    """Those who wait for replies say so."""
    sender = opened(Sent(is_lost=True))
    sender.add("one\n")
    clock[0] += SEND_EVERY_S
    sender.add("two\n")
