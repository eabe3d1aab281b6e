"""What a :class:`~pytest_gpucluster.protocol.channel.Channel` reads and writes: keys of the run's store, as bytes.

:class:`~pytest_gpucluster.protocol.channel.DirectStore` has a connection to the store itself. Agents of a node with several
ranks share the connections of one of them, the node's voice (:mod:`pytest_gpucluster.agent.voice`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pytest_gpucluster.protocol.codec import TypedMessage

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A rank's signed reply to one call, and its key. ``look_key``: makes the controller look at the keys of single ranks."""

    rank: int
    key: str
    data: bytes
    look_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel(TypedMessage):
    """Replies that a voice has gathered: of each the rank, the key and the signed message.

    A message that is None lies under its own key, because it is large.
    """

    replies: tuple[tuple[int, str, str | None], ...]


class Store(Protocol):
    """The keys of one run.

    Every method raises :class:`~pytest_gpucluster.protocol.channel.ChannelLostError` if the store is gone.
    """

    @property
    def voice(self) -> str | None:
        """The voice that this store is read and written through; None: there is none."""

    def set(self, key: str, data: bytes) -> None:
        """Write one key."""

    def put_reply(self, reply: Reply) -> None:
        """Write a reply, in a parcel or under its own key."""

    def beat(self, rank: int, count: int) -> None:
        """Write a heartbeat, at once or a little later."""

    def get(self, key: str) -> bytes:
        """Read one key; waits until it is written."""

    def command(self, number: int) -> bytes:
        """Read a command; waits until it is written."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read keys that are written."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are written."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the key has the value ``expected``; the value afterwards."""
