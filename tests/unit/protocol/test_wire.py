"""Messages over a socket: whole, however the stream cuts them."""

from __future__ import annotations

import socket

import pytest

from pytest_gpucluster.protocol.codec import MalformedMessageError, Wire
from pytest_gpucluster.protocol.messages import Bye, JournalText


def test_wire() -> None:
    """Messages come whole however the stream cuts them; a closed end is None, not an exception."""
    left, right = socket.socketpair()
    here, there = Wire(left), Wire(right)
    there.send(JournalText(text="ä\n"))
    right.sendall(b'{"b": 1}\n{"c"')
    first, second = here.receive() or ()
    assert (JournalText.read(first), second) == (JournalText(text="ä\n"), b'{"b": 1}')
    right.sendall(b": 2}")
    assert here.receive() == []
    right.sendall(b"\n")
    assert here.receive() == [b'{"c": 2}']
    there.close()
    assert here.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        here.send(Bye())
    here.close()


def test_a_line_that_is_not_json() -> None:
    """It is refused by the error that every wrong message gets."""
    left, right = socket.socketpair()
    right.sendall(b"nonsense\n")
    (line,) = Wire(left).receive() or ()
    with pytest.raises(MalformedMessageError, match="not JSON"):
        Bye.read(line)
    left.close()
    right.close()
