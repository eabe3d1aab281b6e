"""A store that does not answer any more is taken for gone, in time and with the reason."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.controller import command_link
from pytest_gpucluster.controller.command_link import CommandLink
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, keys_of_call
from pytest_gpucluster.protocol.messages import Quit
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="connections are found in /proc")

SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("there", flush=True)
time.sleep(120)
"""
SILENT_S = 2.0
SOON_S = 20.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], CommandLink]]:
    """A store in another process, and a link to it that has not been used."""
    monkeypatch.setattr(command_link, "BEAT_S", 0.1)
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "there\n"
    link = CommandLink(Address(host="127.0.0.1", port=port, run_id="r"), None, hosts_store=False)
    yield server, link
    link.stop_beating()
    server.kill()
    server.wait()
    server.stdout.close()


def use(link: CommandLink) -> None:
    """Write the first command, and wait for the first answer to a heartbeat: on a busy machine it comes late."""
    link.send(Quit(code=0))
    while not link._num_answers:
        time.sleep(0.05)


def test_the_store_forgets_finished_calls(store: tuple[subprocess.Popen[str], CommandLink]) -> None:
    """Of many calls the keys of the last two are left: a soak of thousands would fill the memory of node 0."""
    _, link = store
    use(link)
    ids = [f"call-{number}" for number in range(20)]
    keys = {one: keys_of_call(one, range(4), [(0, 1), (2, 3)]) for one in ids}
    assert all(len(of_call) == 4 + 2 + 1 for of_call in keys.values())
    for one in ids:
        for key in keys[one]:
            link.channel.store.set(key, b"reply")
    for one in ids[:-2]:
        link.forget(keys[one])
    gone = [key for one in ids[:-2] for key in keys[one]]
    deadline_s = time.monotonic() + 120
    while any(link.channel.has(key) for key in gone) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(link.channel.has(key) for key in gone)
    assert all(link.channel.has(key) for one in ids[-2:] for key in keys[one])


def test_a_store_that_is_stopped(store: tuple[subprocess.Popen[str], CommandLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits in it hears of it, and nothing tries to reach it again."""
    server, link = store
    use(link)
    monkeypatch.setattr(command_link, "STORE_SILENT_S", SILENT_S)
    time.sleep(SILENT_S + 1.0)
    assert link.channel.has("cmd/0"), "a store that answers was given up"
    os.kill(server.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(ChannelLostError):
        link.channel.arrived(["cmd/1"], within_s=600)
    assert time.monotonic() - began_s < SOON_S
    assert link.silence == f"the store at 127.0.0.1:{link.address.port} has not answered for 2 s and is taken for gone"
    with pytest.raises(ChannelLostError, match="has not answered for 2 s"):
        link.send(Quit(code=0))
    began_s = time.monotonic()
    link.stop_beating()
    assert time.monotonic() - began_s < SOON_S


def test_a_store_whose_torchrun_is_stopped(
    store: tuple[subprocess.Popen[str], CommandLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no slow store: less patience."""
    server, link = store
    use(link)
    monkeypatch.setattr(command_link, "STORE_SILENT_S", 600.0)
    monkeypatch.setattr(command_link, "STORE_STOPPED_S", SILENT_S)
    monkeypatch.setattr(os, "getppid", lambda: server.pid)
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ChannelLostError):
        link.channel.arrived(["cmd/1"], within_s=600)
    assert link.silence is not None


def test_a_store_that_is_stopped_before(
    store: tuple[subprocess.Popen[str], CommandLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and never answers: torch 2.13 waits longer than its own timeout for it."""
    monkeypatch.setattr(command_link, "STORE_SILENT_S", SILENT_S)
    monkeypatch.setattr(channel, "connect", functools.partial(channel.connect, timeout_s=SILENT_S))
    server, link = store
    os.kill(server.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(ChannelLostError):
        link.send(Quit(code=0))
    assert time.monotonic() - began_s < SOON_S


def test_a_store_that_has_ended(store: tuple[subprocess.Popen[str], CommandLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said as what it is, later too."""
    server, link = store
    use(link)
    monkeypatch.setattr(command_link, "STORE_SILENT_S", SILENT_S)
    server.kill()
    server.wait()
    with pytest.raises(ChannelLostError, match="is gone"):
        link.channel.has("cmd/0")
    time.sleep(SILENT_S + 1.0)
    assert link.silence is None
