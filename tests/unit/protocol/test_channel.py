"""Messages as bytes: signed when there is a secret, refused when anything is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import ForgedMessageError, sign, verify
from pytest_gpucluster.protocol.codec import MalformedMessageError, Secret
from pytest_gpucluster.protocol.messages import HangFound, JournalText, Quit, read_command, read_reply

BODIES = st.binary() | st.text().map(lambda text: JournalText(text=text).to_json())
SECRET = Secret(b"s")
SECRETS = st.none() | st.builds(Secret, st.binary(min_size=1))


@given(BODIES, SECRETS)
def test_round_trip(body: bytes, secret: Secret | None) -> None:
    """What was put is taken, with and without a secret."""
    assert verify(sign(body, name="cmd/0", secret=secret), name="cmd/0", secret=secret) == body


@given(BODIES, st.binary(min_size=1, max_size=3), st.integers(min_value=0))
def test_any_change_is_noticed(body: bytes, noise: bytes, position: int) -> None:
    """One changed byte anywhere makes a signed message a forged one."""
    good = sign(body, name="res/1/0", secret=SECRET)
    at = position % len(good)
    bad = good[:at] + noise + good[at + len(noise) :]
    if bad != good:
        with pytest.raises(ForgedMessageError):
            verify(bad, name="res/1/0", secret=SECRET)


def test_an_old_message_cannot_take_the_place_of_a_new_one() -> None:
    """The key is signed too: a reply to call 1 is none to call 2."""
    old = sign(HangFound(rank=0).to_json(), name="res/1/0", secret=SECRET)
    with pytest.raises(ForgedMessageError, match="not signed by this run"):
        verify(old, name="res/2/0", secret=SECRET)


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, None), (None, SECRET), (SECRET, Secret(b"t"))])
def test_another_secret_is_forged(ours: Secret | None, theirs: Secret | None) -> None:
    """Also where one side has none."""
    with pytest.raises(ForgedMessageError, match="not signed by this run"):
        verify(sign(b"{}", name="k", secret=theirs), name="k", secret=ours)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\nnot json",
        b"\n[1]",
        b"\n3",
        b"\nnull",
        b"no newline",
        b'\n{"a": 1',
        b"\n\xff\xfe\x00",
        b"\n" + b"[" * 200_000,
    ],
    ids=["empty", "no body", "text", "list", "number", "null", "no line", "cut", "no UTF-8", "deep"],
)
def test_what_a_stranger_writes_is_refused(data: bytes) -> None:
    """Without a secret anything may come: it is refused as malformed or as forged, never by another exception."""
    expected = MalformedMessageError if data.startswith(b"\n") or not data else ForgedMessageError
    for read in (HangFound.read, read_command, read_reply):
        with pytest.raises(expected):
            read(verify(data, name="k", secret=None))


def test_too_large() -> None:
    """The store resets connections at 8 MB; the message names both sizes."""
    body = b"x" * (channel.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(ValueError, match=rf"{len(body)} bytes; at most {channel.MAX_MESSAGE_BYTES}"):
        sign(body, name="k", secret=None)


def test_connecting_to_nobody_says_where() -> None:
    """A store that does not answer is one error, with its address and how long it was waited for."""
    with channel.listen_on_loopback() as listener:
        host, port = listener.getsockname()
    assert host == "127.0.0.1"
    with pytest.raises(channel.ChannelLostError, match=rf"no store answers at 127.0.0.1:{port} within 0.5 s"):
        channel.connect(channel.Address(host=host, port=port, run_id="r"), None, timeout_s=0.5)


def test_a_store_and_its_client() -> None:
    """Put, take, has, arrived and beats over a real store on the loopback; runs do not see each other's keys."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()
    here = channel.Address(host=host, port=port, run_id="one")
    server = channel.host_store(here, SECRET, listener=listener)
    client = channel.connect(here, SECRET)
    assert not client.arrived(["who/0"], within_s=0.05)
    server.put("who/0", HangFound(rank=1))
    assert client.arrived(["who/0"], within_s=60)
    assert client.take("who/0", HangFound.read) == HangFound(rank=1)
    with pytest.raises(MalformedMessageError, match="is none of Quit"):
        client.take("who/0", Quit.read)
    client.beat(3, 7)
    server.store.set("hb/5", b"\xff garbage")
    assert server.beats(range(1000)) == {3: b"7", 5: b"\xff garbage"}
    assert server.written([f"hb/{rank}" for rank in range(9)]) == ["hb/3", "hb/5"]
    assert server.written([]) == []
    assert client.faults("c") == set()
    client.note_fault("c", 3)
    server.note_fault("c", 1023)
    assert client.faults("c") == {3, 1023}
    other = channel.connect(channel.Address(host=host, port=port, run_id="two"), SECRET)
    assert not other.has("who/0")
    other.store.set("who/0", server.store.get("who/0"))
    with pytest.raises(ForgedMessageError, match="not signed by this run"):
        other.take("who/0", HangFound.read)
    client.store.set("who/1", b"\n{}")
    with pytest.raises(ForgedMessageError):
        server.take("who/1", HangFound.read)


@pytest.mark.parametrize("message", [Quit(code=0), HangFound(rank=0)], ids=["quit", "fault"])
def test_a_message_of_an_earlier_run(message: Quit | HangFound) -> None:
    """Two runs have one secret, and torchrun gives both the same id: the same key of the later one does not verify it."""
    stores = []
    for _ in range(2):
        listener = channel.listen_on_loopback()
        host, port = listener.getsockname()
        address = channel.Address(host=host, port=port, run_id="none.0")
        server = channel.host_store(address, SECRET, listener=listener)
        stores.append((server, channel.connect(address, SECRET)))
    (earlier, agent), (later, its_agent) = stores
    earlier.put("cmd/3", message)
    assert agent.take("cmd/3", type(message).read) == message
    later.store.set("cmd/3", earlier.store.get("cmd/3"))
    for reader in (later, its_agent, its_agent.reconnect()):
        with pytest.raises(ForgedMessageError, match="not signed by this run"):
            reader.take("cmd/3", type(message).read)
    later.put("cmd/3", message)
    assert its_agent.reconnect().take("cmd/3", type(message).read) == message


def test_many_messages_at_once() -> None:
    """In batches, in order; one that was forged is an error in its own place, and the others are read."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()
    store = channel.host_store(channel.Address(host=host, port=port, run_id="one"), SECRET, listener=listener)
    keys = [f"res/0/{rank}" for rank in range(2 * channel.BATCH_KEYS + 3)]
    for rank, key in enumerate(keys[:-1]):
        store.put(key, HangFound(rank=rank))
    assert not store.arrived(keys, within_s=0.05)
    store.store.set(keys[-1], b"\n{}")
    assert store.arrived(keys, within_s=60)
    *good, forged = store.take_written(keys, HangFound.read)
    assert good == [HangFound(rank=rank) for rank in range(len(keys) - 1)]
    assert isinstance(forged, ForgedMessageError)
    assert store.take_written([], HangFound.read) == []


def test_more_keys_than_16_bits_can_count() -> None:
    """1,024 ranks write 100,000 keys in a run: the first and the last are there, and all are read in batches."""
    listener = channel.listen_on_loopback()
    address = channel.Address(host="127.0.0.1", port=listener.getsockname()[1], run_id="r")
    store = channel.host_store(address, None, listener=listener)
    keys = [channel.reply_key("c", rank) for rank in range(65_536 + 500)]
    for rank, key in enumerate(keys):
        store.put(key, HangFound(rank=rank))
    assert store.arrived(keys, within_s=60)
    assert store.take_written(keys, HangFound.read) == [HangFound(rank=rank) for rank in range(len(keys))]
