"""How an agent finds the store: through the voice of its node, as that voice, or by connections of its own."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.agent.voice import Voice
from pytest_gpucluster.agent.voice_link import SILENT_S, OtherUserError, VoicedStore, call_voice
from pytest_gpucluster.config.open_files import require_open_files
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.protocol.channel import (
    CONNECT_TIMEOUT_S,
    Address,
    Channel,
    ChannelLostError,
    connect,
    connect_reader,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.protocol.rank import Rank
    from pytest_gpucluster.protocol.secret import Secret
    from pytest_gpucluster.protocol.stores import Store

POLL_S = 0.01
START_S = 5.0
"""How long an agent tries to reach a voice whose address is taken."""
BACKLOG = 256
LINES_A_RANK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """An agent's way to the store: a channel to write, one to wait for commands, and the voice if this agent is it."""

    channel: Channel
    reader: Channel
    voice: Voice | None = None


def join_node(address: Address, secret: Secret | None, rank: Rank) -> NodeLinks:
    """Find the node's voice, or become it. A node of one rank needs none.

    An agent that may not have as many open files as the lines of a voice has its own connections.

    Raises:
        ChannelLostError: there is no store.
    """
    voice = None
    if rank.local_world_size > 1:
        with contextlib.suppress(OtherUserError, ConfigurationError):
            require_open_files(LINES_A_RANK * rank.local_world_size)
            name = voice_address(address, secret, rank)
            deadline_s = time.monotonic() + START_S
            while time.monotonic() < deadline_s:
                voice = voice or _found_voice(name, lambda: _connect_both(address, secret))
                with contextlib.suppress(OSError):
                    links = call_voice(name), call_voice(name)
                    writing, reading = (VoicedStore(link, own) for link, own in zip(links, _own(address, secret), strict=True))
                    return NodeLinks(
                        channel=Channel(address, writing, secret), reader=Channel(address, reading, secret), voice=voice
                    )
                time.sleep(POLL_S)
    return NodeLinks(channel=connect(address, secret), reader=connect_reader(address, secret), voice=voice)


def voice_address(address: Address, secret: Secret | None, rank: Rank) -> str:
    """The voice's address in the abstract namespace, a part of the network's. In a signed run nobody else can know it."""
    node = f"{address.host}:{address.port}/{address.run_id}/{rank.group_rank}".encode()
    digest = secret.sign("voice", node) if secret is not None else hashlib.sha256(node).hexdigest()
    return f"\0gpucluster-{digest}"


def _found_voice(name: str, connect_both: Callable[[], tuple[Channel, Channel]]) -> Voice | None:
    """The voice, if nobody has this address yet."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name)
    except OSError:
        listener.close()
        return None
    listener.listen(BACKLOG)
    voice = Voice(listener, connect_both)
    voice.start()
    return voice


def _connect_both(address: Address, secret: Secret | None) -> tuple[Channel, Channel]:
    """The connections of a voice. A TCPStore that waits for its server holds Python's lock, so the wait is before."""
    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
    while not _is_there(address) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return connect(address, secret), connect_reader(address, secret)


def _own(address: Address, secret: Secret | None) -> tuple[Callable[[], Store], Callable[[], Store]]:
    """What makes the connections of an agent that has lost its voice. A store that is gone is found at once."""

    def after_look(opened: Callable[[Address, Secret | None], Channel]) -> Store:
        if not _is_there(address):
            raise ChannelLostError(f"the store at {address.host}:{address.port} is gone")
        return opened(address, secret).store

    return lambda: after_look(connect), lambda: after_look(connect_reader)


def _is_there(address: Address) -> bool:
    """Whether anybody listens at the address of the store."""
    try:
        socket.create_connection((address.host, address.port), timeout=SILENT_S).close()
    except OSError:
        return False
    return True
