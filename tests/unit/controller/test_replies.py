"""Who is released when: peers of a rank that failed, each kind of failure after its own moment."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.controller import call
from pytest_gpucluster.controller.call import PendingReplies, lost_reply
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import Address, StoreChannel, reply_key
from pytest_gpucluster.protocol.codec import Secret
from pytest_gpucluster.protocol.messages import AbortCall, Failure, FailureKind, Success
from pytest_gpucluster.protocol.plain_data import to_plain

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = "call-0"
SECRET = Secret.random()
LONG_S = 30.0


def of_two_pairs() -> PendingReplies:
    """Four ranks in two groups, nobody has answered."""
    return PendingReplies(call_id=CALL, waiting={0, 1, 2, 3}, groups=[(0, 1), (2, 3)], give_up_s=time.monotonic() + 60)


def failed(kind: FailureKind, **more: Any) -> Failure:
    """The reply of a rank that failed."""
    return Failure(**{"kind": kind, "error": "planted", **more})


@dataclass(frozen=True)
class Timing:
    """What every rank of a collective returns."""

    samples: list[float]


class Written:
    """In place of a channel: all replies are there."""

    def __init__(self, values: dict[int, object]) -> None:
        self._written = {reply_key(CALL, rank): Success(value=to_plain(value)).to_json() for rank, value in values.items()}

    def missing(self, _keys: object, **_options: object) -> list[str]:
        """None is."""
        return []

    def take_written(self, keys: list[str], read: Callable[[bytes], object]) -> list[object]:
        """Read them."""
        return [read(self._written[key]) for key in keys]


def test_ranks_that_say_the_same_share_a_value() -> None:
    """A value that cannot be changed; a dict, and another value, stay those of one rank."""
    one = of_two_pairs()
    channel: Any = Written({0: Timing([1.5]), 1: Timing([1.5]), 2: Timing([2.5]), 3: Timing([1.5])})
    one.receive(channel, within_s=1.0)
    values: Any = {rank: reply.value for rank, reply in one.replies.items() if isinstance(reply, Success)}
    assert values[0] is values[1] is values[3]
    assert values[2] == Timing([2.5])
    two = of_two_pairs()
    channel = Written({rank: {"rate": 1.5} for rank in range(4)})
    two.receive(channel, within_s=1.0)
    dicts = [reply.value for reply in two.replies.values() if isinstance(reply, Success)]
    assert len({id(value) for value in dicts}) == 4
    assert dicts == [{"rate": 1.5}] * 4


@dataclass
class Open:
    """What a test may change."""

    rate: float


@dataclass(frozen=True)
class Holding:
    """A frozen value that holds what a test may change."""

    samples: list[float]
    by_name: dict[str, list[float]]
    inner: Timing | Open


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda value: value.samples.append(9.9),
    "item": lambda value: value.samples.__setitem__(0, 9.9),
    "slice": lambda value: value.samples.__setitem__(slice(None), []),
    "delete": lambda value: value.samples.__delitem__(0),
    "sort": lambda value: value.samples.sort(),
    "add": lambda value: value.samples.__iadd__([9.9]),
    "key": lambda value: value.by_name.__setitem__("b", [9.9]),
    "union": lambda value: value.by_name.__ior__({"b": [9.9]}),
    "pop": lambda value: value.by_name.pop("a"),
    "nested": lambda value: value.by_name["a"].clear(),
    "inner": lambda value: value.inner.samples.reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_test_changes_the_value_of_another_rank(change: str) -> None:
    """Lists and dicts of a frozen value refuse it, whether ranks share them or not; a copy is an ordinary one."""
    made = Holding([2.5, 1.5], {"a": [1.5]}, Timing([3.5, 1.5]))
    one = of_two_pairs()
    channel: Any = Written(dict.fromkeys(range(3), made) | {3: replace(made, samples=[7.5])})
    one.receive(channel, within_s=1.0)
    values: Any = {rank: reply.value for rank, reply in one.replies.items() if isinstance(reply, Success)}
    assert values[0] is values[1]
    for value in (values[0], values[3]):
        with pytest.raises(TypeError, match="change a copy"):
            CHANGES[change](value)
    assert values[1] == made
    for copied in (copy.copy(values[0].samples), copy.deepcopy(values[0]).samples, [*values[0].samples], values[0].samples[:]):
        copied.append(9.9)
        assert type(copied) is list
    assert asdict(values[0]) == asdict(made)
    assert json.dumps(to_plain(values[0])) == json.dumps(to_plain(made))


def test_what_can_be_changed_inside_is_not_shared() -> None:
    """An open dataclass in a frozen one: each rank has its own."""
    one = of_two_pairs()
    channel: Any = Written(dict.fromkeys(range(4), Holding([1.5], {}, Open(1.5))))
    one.receive(channel, within_s=1.0)
    values: Any = [reply.value for reply in one.replies.values() if isinstance(reply, Success)]
    values[0].inner.rate = 9.9
    assert [value.inner.rate for value in values] == [9.9, 1.5, 1.5, 1.5]


def test_nobody_is_released_while_all_is_well() -> None:
    """An answer is no reason."""
    one = of_two_pairs()
    one.add(0, Success(value=1))
    assert one.to_release() is None


@pytest.mark.parametrize("entered", [True, False])
def test_peers_of_one_that_raised(monkeypatch: pytest.MonkeyPatch, *, entered: bool) -> None:
    """After a moment, its own group alone, once; and they are told whether it came into the call."""
    monkeypatch.setattr(call, "RAISED_GRACE_S", 0.05)
    one = of_two_pairs()
    one.add(2, failed("raised", entered=entered))
    assert one.to_release() is None
    time.sleep(0.06)
    why = "released, because rank 2 raised"
    assert one.to_release() == AbortCall(id=CALL, ranks=((3, 3),), why=why, grace_s=0.05, entered=entered)
    assert one.to_release() is None


def test_peers_of_one_that_died() -> None:
    """At once; one that is lost never said whether it came in, and its peers need no moment."""
    one = of_two_pairs()
    one.add(1, lost_reply("its agent process has ended"))
    why = "released, because rank 1 lost"
    assert one.to_release() == AbortCall(id=CALL, ranks=((0, 0),), why=why, grace_s=0.0, entered=False)


def test_each_group_has_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group in which a rank failed before cost the next one its moment: who had the cause was released, and not named."""
    monkeypatch.setattr(call, "RAISED_GRACE_S", 0.05)
    monkeypatch.setattr(call, "CONSEQUENCE_GRACE_S", 0.3)
    one = of_two_pairs()
    one.add(0, lost_reply("its agent process has ended"))
    assert one.to_release() is not None
    one.add(2, failed("raised", error="Connection closed by peer [127.0.0.1]:4711", entered=True))
    time.sleep(0.06)
    assert one.to_release() is None
    time.sleep(0.3)
    found = one.to_release()
    assert found is not None
    assert found.ranks == ((3, 3),)


def test_peers_of_one_that_only_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is given longer to tell; once it has, the ordinary moment counts for the rest."""
    monkeypatch.setattr(call, "RAISED_GRACE_S", 0.05)
    monkeypatch.setattr(call, "CONSEQUENCE_GRACE_S", 600.0)
    one = PendingReplies(call_id=CALL, waiting={0, 1, 2}, groups=[(0, 1, 2)], give_up_s=time.monotonic() + 60)
    one.add(0, failed("raised", error="Connection closed by peer [127.0.0.1]:4711", entered=True))
    time.sleep(0.06)
    assert one.to_release() is None
    one.add(1, failed("raised", error="CUDA out of memory", entered=True))
    time.sleep(0.06)
    found = one.to_release()
    assert found is not None
    assert found.ranks == ((2, 2),)


def test_echoes_alone_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells more: the rest is released."""
    monkeypatch.setattr(call, "CONSEQUENCE_GRACE_S", 0.05)
    one = of_two_pairs()
    one.add(0, failed("raised", error="Socket Timeout", entered=True))
    assert one.to_release() is None
    time.sleep(0.06)
    found = one.to_release()
    assert found is not None
    assert found.ranks == ((1, 1),)


# How they arrive, over a real store.


@pytest.fixture
def store() -> StoreChannel:
    """A store of its own."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()[:2]
    return channel.host_store(Address(host=host, port=port, run_id="run"), SECRET, listener=listener)


def pending(*ranks: int, call: str = CALL) -> PendingReplies:
    """A call of these ranks, each by itself."""
    return PendingReplies(call_id=call, waiting={*ranks}, groups=[], give_up_s=time.monotonic() + LONG_S)


def answer(store: StoreChannel, *ranks: int, call: str = CALL) -> None:
    """These ranks reply with their numbers."""
    for rank in ranks:
        store.put(reply_key(call, rank), Success(value=rank))


def fail(store: StoreChannel, rank: int) -> None:
    """This rank replies that it failed, as its agent does."""
    store.put(reply_key(CALL, rank), failed("raised"))
    store.note_fault(CALL, rank)


def test_all_replies_are_read_once_all_are_there(store: StoreChannel) -> None:
    """Each is placed at its rank; those of another call are not."""
    one = pending(0, 1, 2)
    answer(store, 0, 1)
    answer(store, 2, call="given up")
    one.receive(store, within_s=0.05)
    assert one.replies == {}
    answer(store, 2)
    one.receive(store, within_s=LONG_S)
    assert one.replies == {rank: Success(value=rank) for rank in range(3)}
    assert one.waiting == set()


def test_a_failure_is_read_at_once(store: StoreChannel) -> None:
    """While others work on. Two that fail at the same moment are both read, and no rank is asked twice."""
    one = pending(*range(300))
    answer(store, *range(200))
    fail(store, 250)
    fail(store, 7)
    one.receive(store, within_s=0.05)
    assert set(one.replies) == {7, 250}
    assert set(one.release_s) == {7, 250}
    one.receive(store, within_s=0.05)
    assert set(one.replies) == {7, 250}
    answer(store, *(rank for rank in range(200, 300) if rank != 250))
    one.receive(store, within_s=LONG_S)
    assert len(one.replies) == 300
    assert one.waiting == set()


def test_what_is_there_is_not_asked_for_again(store: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is complete is left out of each later look: of 1,024 ranks the slowest alone is waited for."""
    checked: list[int] = []
    monkeypatch.setattr(channel.KeyStore, "check", counted(channel.KeyStore.check, checked))
    one = pending(*range(1024))
    answer(store, *range(1023))
    one.receive(store, within_s=0.05)
    checked.clear()
    one.receive(store, within_s=0.05)
    assert max(checked) <= channel.BATCH_KEYS
    answer(store, 1023)
    checked.clear()
    one.receive(store, within_s=LONG_S)
    assert sum(checked) <= channel.BATCH_KEYS + 1
    assert len(one.replies) == 1024


def counted(check: Any, found: list[int]) -> Any:
    """The same method, which notes how many keys it was called with."""

    def count(self: Any, keys: Any) -> bool:
        found.append(len(keys))
        return bool(check(self, keys))

    return count


def test_a_rank_that_is_lost_is_not_waited_for(store: StoreChannel) -> None:
    """It never replies; the others have."""
    one = pending(0, 1, 2)
    answer(store, 0, 2)
    one.receive(store, within_s=0.05)
    one.add(1, lost_reply("its agent process has ended"))
    one.receive(store, within_s=LONG_S)
    assert {rank: reply.ok for rank, reply in one.replies.items()} == {0: True, 1: False, 2: True}


@pytest.mark.parametrize("answered", [(), (0,), (3,), (0, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("failing", [False, True])
def test_only_who_did_not_answer_is_said_not_to_have(store: StoreChannel, answered: tuple[int, ...], *, failing: bool) -> None:
    """At the deadline all were lost, those too whose replies waited for that of another rank."""
    one = pending(*range(5))
    answer(store, *answered)
    if failing:
        fail(store, 4)
    one.give_up(store)
    expected = {rank: Success(value=rank) for rank in answered} | ({4: failed("raised")} if failing else {})
    late = lost_reply("its agent did not answer within the deadline")
    assert one.replies == dict.fromkeys(range(5), late) | expected
    assert one.waiting == set()


@pytest.mark.parametrize(
    ("groups", "counts"), [([], True), ([(0, 1), (2, 3)], True), ([(0, 1, 2), (3,)], False)], ids=["alone", "done", "at work"]
)
def test_a_rank_that_answered_before_it_was_lost(store: StoreChannel, groups: list[tuple[int, ...]], *, counts: bool) -> None:
    """Its agent ended, or fell silent, while others worked: what it measured was thrown away. Its peers at work need it."""
    one = PendingReplies(call_id=CALL, waiting={0, 1, 2, 3}, groups=groups, give_up_s=time.monotonic() + LONG_S)
    ended = lost_reply("its agent process has ended")
    answer(store, 0, 1)
    one.lose({0: ended}, store)
    assert one.replies == {0: Success(value=0) if counts else ended}
    assert (one.to_release() is None) == counts
    one.lose({3: ended}, store)
    assert one.replies[3] == ended
    answer(store, 2)
    one.receive(store, within_s=LONG_S)
    assert [one.replies[rank].ok for rank in range(4)] == [counts, True, True, False]


def test_a_whole_fabric_is_lost_at_once(store: StoreChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,192 ranks in one group all but one fall silent: their keys are made once, and not once for each of them."""
    made: list[int] = []
    monkeypatch.setattr(call, "reply_key", lambda call_id, rank: made.append(rank) or reply_key(call_id, rank))
    ranks = range(8192)
    one = PendingReplies(call_id=CALL, waiting={*ranks}, groups=[tuple(ranks)], give_up_s=time.monotonic() + LONG_S)
    answer(store, *ranks[:10])
    one.lose({rank: lost_reply("its agent has been silent") for rank in ranks[:-1]}, store)
    assert one.waiting == {8191}
    assert len(made) <= 2 * len(ranks)


@pytest.mark.parametrize("written", [b"\n{}", b"", b'00\n{"t": "success", "value": 1}'])
def test_a_forged_reply_costs_its_rank_alone(store: StoreChannel, written: bytes) -> None:
    """It is refused, and no other."""
    answer(store, 0, 2)
    store.store.set(reply_key(CALL, 1), written)
    one = pending(0, 1, 2)
    one.receive(store, within_s=LONG_S)
    refused = one.replies[1]
    assert isinstance(refused, Failure)
    assert (refused.kind, refused.error) == ("refused", "a message on the channel was not signed by this run")
    assert one.replies[0].ok
    assert one.replies[2].ok


@pytest.mark.parametrize(
    "value",
    [{"$dataclass": "a:B", "fields": [1]}, [{"$dataclass": 1, "fields": {}}], {"$float": "1"}],
    ids=["fields", "name", "float"],
)
def test_a_value_that_cannot_be_rebuilt(store: StoreChannel, value: Any) -> None:
    """A function wrote it into the line of its worker: the rank is refused, and says what it is."""
    store.put(reply_key(CALL, 0), Success(value=value))
    one = pending(0)
    one.receive(store, within_s=LONG_S)
    refused = one.replies[0]
    assert isinstance(refused, Failure)
    assert (refused.kind, refused.error.partition(":")[0]) == ("refused", "Success.value")


@pytest.mark.parametrize("said", [b"7,", b"x", b",,,", b"1" * 5000, b"-1,", b"\xff,1", b"0"], ids=repr)
def test_a_stranger_says_that_ranks_failed(store: StoreChannel, said: bytes) -> None:
    """Nobody signs that: the replies are looked for, and what is not there is waited for as before."""
    store.store.set(channel.fault_key(CALL), said)
    one = pending(0, 1)
    answer(store, 1)
    one.receive(store, within_s=0.05)
    assert set(one.replies) <= {1}
    answer(store, 0)
    one.receive(store, within_s=LONG_S)
    assert one.replies == {0: Success(value=0), 1: Success(value=1)}


def test_large_replies(store: StoreChannel) -> None:
    """Nearly as much as may cross the channel, from each rank."""
    text = "x" * (channel.MAX_MESSAGE_BYTES - 1000)
    for rank in range(4):
        store.put(reply_key(CALL, rank), Success(value=text))
    one = pending(*range(4))
    one.receive(store, within_s=LONG_S)
    assert one.replies == {rank: Success(value=text) for rank in range(4)}
