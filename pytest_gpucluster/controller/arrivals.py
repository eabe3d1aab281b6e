"""What arrives at the store from ranks, by themselves or through the voice of their node: replies and heartbeats."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import beat_key, fault_key, parcel_key, reply_key
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.messages import read_reply
from pytest_gpucluster.protocol.stores import Parcel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pytest_gpucluster.protocol.channel import Channel
    from pytest_gpucluster.protocol.messages import Hello, Reply

SLICE_S = 0.1


class Arrivals:
    """Reads the parcels of each voice in their order, and the replies that lie under keys of their own."""

    def __init__(self, hellos: Mapping[int, Hello]) -> None:
        """The ``hellos`` of the ranks that have joined say which ranks speak through a voice."""
        self._hellos = hellos
        self._next_parcel: dict[str, int] = {}
        self._direct: set[int] = set()

    def replies(self, channel: Channel, call_id: str, ranks: Collection[int]) -> dict[int, Reply | RefusedMessageError]:
        """Wait :data:`SLICE_S` for all replies. Returns those found if something came of every rank, or if a rank failed.

        A parcel may hold the replies of a part of its ranks, so the caller asks again for the others.
        """
        voiced, keys = self._expected(call_id, ranks)
        expected = [*(self._parcel_key(voice) for voice in voiced), *keys]
        if channel.arrived(expected, within_s=SLICE_S):
            found = self._take_parcels(channel, call_id, voiced)
            return {**found, **_take_single(channel, keys)}
        lost_voice = self._direct.intersection(ranks)
        if channel.has(fault_key(call_id)):
            return self._look(channel, call_id, ranks, at=ranks)
        return self._look(channel, call_id, ranks, at=lost_voice) if lost_voice else {}

    def beats(self, channel: Channel, ranks: Collection[int]) -> dict[int, bytes]:
        """The newest heartbeat of each rank that has written one, through its voice or without it."""
        voices = {voice for rank in ranks if (voice := self._voice_of(rank)) is not None}
        own = sorted(rank for rank in ranks if self._voice_of(rank) is None)
        written = channel.beats([*sorted(voices), *own])
        found: dict[int, bytes] = {}
        for voice in voices:
            found.update(_counts(written.get(voice, b"")))
        return {rank: beat for rank in ranks if (beat := written.get(rank) or found.get(rank)) is not None}

    def note_direct(self, channel: Channel, ranks: Iterable[int]) -> None:
        """Called for ranks that may have lost their voice: those that beat by themselves have."""
        self._direct.update(rank for rank in ranks if self._voice_of(rank) is not None and channel.has(beat_key(rank)))

    def _voice_of(self, rank: int) -> str | None:
        hello = self._hellos.get(rank)
        return hello.voice or None if hello is not None and rank not in self._direct else None

    def _expected(self, call_id: str, ranks: Iterable[int]) -> tuple[dict[str, list[int]], dict[str, int]]:
        """The ranks of each voice, and the keys of the ranks without one."""
        voiced: dict[str, list[int]] = {}
        keys: dict[str, int] = {}
        for rank in ranks:
            voice = self._voice_of(rank)
            if voice is None:
                keys[reply_key(call_id, rank)] = rank
            else:
                voiced.setdefault(voice, []).append(rank)
        return voiced, keys

    def _parcel_key(self, voice: str) -> str:
        return parcel_key(voice, self._next_parcel.get(voice, 0))

    def _look(
        self, channel: Channel, call_id: str, ranks: Collection[int], *, at: Collection[int]
    ) -> dict[int, Reply | RefusedMessageError]:
        """The replies of ranks ``at`` that are written, wherever they are.

        A rank that has lost its voice may have replied through it before.
        """
        found: dict[int, Reply | RefusedMessageError] = {}
        said = {rank: hello.voice for rank in at if (hello := self._hellos.get(rank)) is not None and hello.voice}
        voices = dict.fromkeys(said.values(), ranks)
        while voices := {voice: ranks for voice in voices if channel.has(self._parcel_key(voice))}:
            found.update(self._take_parcels(channel, call_id, voices))
        keys = {reply_key(call_id, rank): rank for rank in at if rank not in found}
        single = _take_single(channel, {key: rank for key, rank in keys.items() if channel.has(key)})
        self.note_direct(channel, single)
        return {**found, **single}

    def _take_parcels(
        self, channel: Channel, call_id: str, voiced: Mapping[str, Collection[int]]
    ) -> dict[int, Reply | RefusedMessageError]:
        """The replies to this call in the next parcel of each voice; a parcel that is refused is refused for all its ranks."""
        found: dict[int, Reply | RefusedMessageError] = {}
        large: dict[str, int] = {}
        parcels = channel.take_written([self._parcel_key(voice) for voice in voiced], Parcel.read)
        for (voice, ranks), parcel in zip(voiced.items(), parcels, strict=True):
            self._next_parcel[voice] = self._next_parcel.get(voice, 0) + 1
            if isinstance(parcel, RefusedMessageError):
                found.update({rank: parcel for rank in ranks if self._hellos[rank].voice == voice})
                continue
            for rank, key, text in parcel.replies:
                if rank not in ranks or key != reply_key(call_id, rank):
                    continue  # of a call that was given up
                if text is None:
                    large[key] = rank
                else:
                    found[rank] = _read(channel, key, text.encode())
        return {**found, **_take_single(channel, large)}


def _take_single(channel: Channel, keys: Mapping[str, int]) -> dict[int, Reply | RefusedMessageError]:
    return dict(zip(keys.values(), channel.take_written(list(keys), read_reply), strict=True))


def _read(channel: Channel, key: str, data: bytes) -> Reply | RefusedMessageError:
    try:
        return read_reply(channel.read_signed(key, data))
    except RefusedMessageError as refused:
        return refused


def _counts(data: bytes) -> dict[int, bytes]:
    """The heartbeats of a voice's ranks; none if anybody else wrote there."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return {int(rank): str(count).encode() for rank, count in json.loads(data or b"{}").items()}
    return {}
