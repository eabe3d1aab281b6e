"""The ranks that caused a failure, and the failure in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_gpucluster.controller.diagnosis import diagnose
from pytest_gpucluster.protocol.messages import Failure, FailureKind, Reply, Success

OK = Success(value=1)
ECHO = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def bad(kind: FailureKind, error: str = "", **more: Any) -> Failure:
    """The reply of a rank that failed."""
    return Failure(kind=kind, error=error, **more)


def hung(collectives: int, *, state: str = "S") -> Failure:
    """A rank that did not return, after so many collectives."""
    name = "all_reduce" if collectives else ""
    return bad("hung", "did not return within 5 s", collectives=collectives, collective=name, state=state)


def name(rank: int) -> str:
    """A rank in words."""
    return f"rank {rank} (node0-gpu{rank}, h)"


def diagnosed(replies: dict[int, Reply]) -> tuple[tuple[int, ...], str, str]:
    """Culprits, kind and text."""
    found = diagnose(replies, name=name, what="gemm was not measured")
    return found.culprits, found.kind, found.text


@pytest.mark.parametrize(
    "echo",
    [
        bad("raised", ECHO, type="RuntimeError"),
        bad("raised", "NCCL error: unhandled system error, ncclRemoteError", type="DistBackendError"),
        bad("raised", "Socket Timeout", type="DistNetworkError"),
        bad("released", "released, because rank 2 raised", collectives=1, collective="all_reduce"),
        hung(1),
    ],
    ids=["gloo", "nccl", "socket", "released", "hung"],
)
def test_who_raised_first_is_the_cause(echo: Failure) -> None:
    """The rank with an error of its own, not those whose connection to it closed or who waited for it."""
    replies = {
        0: echo,
        1: echo,
        2: bad("raised", "CUDA out of memory", type="OutOfMemoryError", traceback="line 1\nline 2"),
        3: OK,
    }
    culprits, kind, text = diagnosed(replies)
    assert (culprits, kind) == ((2,), "raised")
    assert text.startswith("gemm was not measured: rank 2 (node0-gpu2, h): OutOfMemoryError: CUDA out of memory")
    assert "ranks 0-1 waited" in text
    assert "closed by peer" not in text
    assert "    line 2" in text


def test_who_died_is_the_cause() -> None:
    """Death comes before everything that others raised because of it."""
    died = bad("died", "the worker died: SIGSEGV", output="last words\n")
    culprits, kind, text = diagnosed({0: bad("raised", "something else", type="ValueError"), 1: died, 2: hung(3)})
    assert (culprits, kind) == ((1,), "died")
    assert "rank 1 (node0-gpu1, h): the worker died: SIGSEGV" in text.splitlines()[0]
    assert "last words" in text


def test_who_never_arrived_is_named() -> None:
    """The lowest count of collectives; and who had entered which one."""
    culprits, kind, text = diagnosed({0: hung(4), 1: hung(4), 2: hung(3), 3: hung(4)})
    assert (culprits, kind) == ((2,), "hung")
    first = text.splitlines()[0]
    assert (
        "rank 2 (node0-gpu2, h) never arrived in all_reduce (collective 4 of the call), which ranks 0-1, 3 had entered" in first
    )
    assert "did not return within 5 s" in first


@pytest.mark.parametrize("said", ["", "communicator c0ffee of 2 ranks: rank 1 launched 5 AllReduce; rank 0 launched 6"])
def test_what_nccl_says_stands_below(said: str) -> None:
    """Beside the flight recorder, once; nothing where NCCL says nothing."""
    waiting, late = replace(hung(2), ras=said), replace(hung(1), ras=said, flight="all_reduce 1: completed")
    _, _, text = diagnosed({0: waiting, 1: late})
    assert text.count("NCCL RAS of rank 1") == text.count("communicator c0ffee") == (1 if said else 0)
    assert "flight recorder of rank 1" in text


def returned(collectives: int) -> Success:
    """A rank that returned after so many collectives."""
    return Success(value=1, collectives=collectives)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ({0: hung(2), 1: hung(2), 2: returned(1), 3: hung(2)}, (2,)),
        ({0: hung(2), 1: returned(1), 2: returned(1), 3: hung(2)}, (1, 2)),
        ({0: hung(2), 1: returned(0), 2: returned(1), 3: hung(2)}, (1, 2)),
        ({0: hung(1), 1: returned(0)}, (1,)),
        ({0: hung(4), 1: returned(1), 2: hung(2), 3: hung(4)}, (1,)),
        (
            {0: bad("raised", ECHO, type="RuntimeError", collectives=2, collective="all_reduce"), 1: returned(1), 2: hung(2)},
            (1,),
        ),
    ],
    ids=["one", "two", "two at different places", "pair", "the others wait at different places", "a wait that broke off"],
)
def test_who_returned_early_is_named(replies: dict[int, Reply], expected: tuple[int, ...]) -> None:
    """The ranks whose collective the others wait for in vain; nobody else is blamed."""
    culprits, kind, text = diagnosed(replies)
    assert (culprits, kind) == (expected, "hung")
    first = text.splitlines()[0]
    who = f"rank {expected[0]}" if len(expected) == 1 else f"ranks {expected[0]}-{expected[-1]}"
    assert f"{who} (" in first
    assert "never arrived in all_reduce" in first
    assert f": {who} returned from the function; the call did not return within 5 s" in first


def test_who_returned_early_and_who_hangs_elsewhere() -> None:
    """Neither came into the second collective: both are named, and which of them returned."""
    culprits, _, text = diagnosed({0: hung(2), 1: returned(1), 2: hung(1), 3: hung(2)})
    assert culprits == (1, 2)
    assert "ranks 1-2 (" in text
    assert ": rank 1 returned from the function; the call" in text


def test_who_is_through_is_no_culprit_of_a_hang() -> None:
    """A rank that took part in every collective is not blamed; those that stand at different collectives are told apart."""
    culprits, _, text = diagnosed({0: returned(2), 1: hung(2), 2: hung(1)})
    assert culprits == (2,)
    assert "rank 0" not in text
    culprits, _, text = diagnosed({0: returned(2), 1: hung(2), 2: hung(2)})
    assert culprits == ()
    assert "ranks 1-2 all entered all_reduce and none returned" in text


def test_who_is_no_member_of_the_collective_is_no_culprit() -> None:
    """Ranks 0 and 1 talk among themselves: those who returned long before have nothing to do with their hang."""
    replies = {0: replace(hung(5), members=((0, 1),)), 1: hung(4), 2: returned(1), 3: returned(1)}
    culprits, _, text = diagnosed(replies)
    assert culprits == (1,)
    assert "returned from" not in text
    culprits, _, _ = diagnosed({**replies, 1: hung(5)})
    assert culprits == ()


def test_who_is_stopped_is_named() -> None:
    """State T wins over the counts: a debugger or SIGSTOP, not the network."""
    culprits, _, text = diagnosed({0: hung(2), 1: hung(2, state="T"), 2: hung(1)})
    assert culprits == (1,)
    assert "rank 1 (node0-gpu1, h) is stopped (SIGSTOP)" in text


def test_all_entered_blames_nobody() -> None:
    """A fabric that hangs is no rank's fault."""
    culprits, kind, text = diagnosed({0: hung(2), 1: hung(2)})
    assert (culprits, kind) == ((), "hung")
    assert "ranks 0-1 all entered all_reduce and none returned" in text


def waiting(collective: str, tensor: str = "Float [4]", **more: Any) -> Failure:
    """A rank that did not return from its second collective, with the last lines of its flight recorder."""
    flight = f"all_reduce 1: completed, Float [4]\n{collective} 2: started, {tensor}" if tensor else ""
    return replace(hung(2), collective=collective, flight=flight, **more)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (waiting("broadcast"), "ranks 0, 2 all_reduce of Float [4], rank 1 broadcast of Float [4]"),
        (waiting("barrier"), "ranks 0, 2 all_reduce, rank 1 barrier"),
        (waiting("all_reduce", "Float [8]"), "ranks 0, 2 all_reduce of Float [4], rank 1 all_reduce of Float [8]"),
        (waiting("all_reduce", "Double [4]"), "ranks 0, 2 all_reduce of Float [4], rank 1 all_reduce of Double [4]"),
    ],
    ids=["name", "without-tensors", "size", "dtype"],
)
def test_who_entered_something_else_is_named(odd: Failure, words: str) -> None:
    """Most ranks agree: the one that does not is the cause, whichever it is. PyTorch's matcher blames all but the first."""
    culprits, kind, text = diagnosed({0: waiting("all_reduce"), 1: odd, 2: waiting("all_reduce")})
    assert (culprits, kind) == ((1,), "hung")
    assert f"rank 1 (node0-gpu1, h) did not enter what the others did ({words}; collective 2 of the call)" in text
    culprits, _, _ = diagnosed({0: odd, 1: waiting("all_reduce"), 2: waiting("all_reduce")})
    assert culprits == (0,)


def test_who_of_two_is_wrong_is_not_known() -> None:
    """Both are told, neither is blamed."""
    culprits, _, text = diagnosed({0: waiting("all_reduce"), 1: waiting("broadcast")})
    assert culprits == ()
    assert "the ranks did not enter the same collective (rank 0 all_reduce of Float [4], rank 1 broadcast of" in text


@pytest.mark.parametrize(
    "others",
    [
        [waiting("all_reduce"), waiting("all_reduce")],
        [waiting("all_to_all", "Float [8]"), waiting("all_to_all", "Float [4]")],
        [waiting("recv"), waiting("send")],
        [waiting("all_reduce", ""), waiting("all_reduce")],
        [waiting("broadcast", members=((1, 2),)), waiting("broadcast", members=((1, 2),))],
    ],
    ids=["alike", "sizes-may-differ", "pairs", "no-recorder", "another-group"],
)
def test_ranks_that_match_blame_nobody(others: list[Failure]) -> None:
    """What may differ from rank to rank, or is not known, is no mismatch."""
    culprits, _, text = diagnosed({0: replace(others[0], members=()), 1: others[0], 2: others[1]})
    assert culprits == ()
    assert "did not enter" not in text


def test_one_rank_alone_that_hangs() -> None:
    """No peers, no collective: the rank itself."""
    culprits, _, text = diagnosed({5: hung(0)})
    assert culprits == (5,)
    assert "rank 5 (node0-gpu5, h) did not return within 5 s" in text


def test_equal_failures_are_collapsed() -> None:
    """Nine ranks with one error are one sentence."""
    same = bad("raised", "no such file", type="FileNotFoundError")
    culprits, _, text = diagnosed(dict.fromkeys((3, 5, *range(8, 16)), same) | {4: bad("raised", "other", type="OSError")})
    assert culprits == (3, 4, 5, *range(8, 16))
    assert text.splitlines()[0].count("no such file") == 1
    assert "ranks 3, 5, 8-15" in text
    assert "rank 4 (node0-gpu4, h): OSError: other" in text


def test_only_echoes_blame_nobody() -> None:
    """Nobody has an error of its own: all are named, none is blamed."""
    culprits, kind, text = diagnosed({0: bad("raised", ECHO, type="RuntimeError"), 1: bad("raised", ECHO, type="RuntimeError")})
    assert (culprits, kind) == ((), "raised")
    assert "ranks 0-1 failed together" in text


KINDS = ("raised", "refused", "died", "lost", "hung", "released")
FAILURES = st.builds(
    Failure,
    kind=st.sampled_from(KINDS),
    error=st.sampled_from(["x", ECHO, ""]),
    type=st.sampled_from(["", "E"]),
    collectives=st.integers(0, 3),
    collective=st.sampled_from(["", "all_reduce"]),
    state=st.sampled_from(["", "S", "T", "D"]),
    output=st.text(max_size=20),
    stacks=st.text(max_size=20),
    traceback=st.text(max_size=20),
)


@given(st.dictionaries(st.integers(0, 99), FAILURES, min_size=1, max_size=6), st.booleans())
def test_whatever_comes_is_put_into_words(replies: dict[int, Failure], one_good: bool) -> None:  # noqa: FBT001 -- drawn
    """Never an exception; culprits are ranks that failed; who was only released is never blamed."""
    everyone: dict[int, Reply] = {**replies, 100: OK} if one_good else {**replies}
    found = diagnose(everyone, name=name, what="w")
    assert set(found.culprits) <= set(everyone)
    if not any(reply.kind == "hung" for reply in replies.values()):
        assert set(found.culprits) <= set(replies)
    assert found.text.startswith("w: ")
    assert found.kind in KINDS
    if any(reply.kind in ("died", "lost") for reply in replies.values()):
        assert all(replies[rank].kind in ("died", "lost") for rank in found.culprits)


def test_what_is_to_blame() -> None:
    """The part that the cause blames; unknown where causes differ, or where no rank is the cause."""
    one = diagnose({0: OK, 1: bad("raised", "'x'", type="KeyError", blames="software")}, name=name, what="gemm")
    assert (one.blames, one.cause, one.failed) == ("software", "KeyError: 'x'", (1,))
    both = {0: bad("raised", blames="software"), 1: bad("raised", blames="host"), 2: OK}
    assert diagnose(both, name=name, what="gemm").blames == "unknown"
    together = diagnose({0: bad("raised", ECHO, blames="software"), 1: bad("raised", ECHO)}, name=name, what="gemm")
    assert (together.culprits, together.blames, together.failed) == ((), "unknown", (0, 1))


@pytest.mark.parametrize(
    ("replies", "blames"),
    [
        ({0: waiting("all_reduce"), 1: waiting("broadcast")}, "software"),
        ({0: waiting("all_reduce"), 1: waiting("broadcast"), 2: waiting("all_reduce")}, "software"),
        ({0: hung(2), 1: returned(1)}, "software"),
        ({0: hung(3), 1: returned(1), 2: hung(1)}, "unknown"),
        ({0: hung(2), 1: hung(1)}, "unknown"),
        ({0: hung(2), 1: hung(2)}, "unknown"),
    ],
    ids=["two-ways", "odd", "returned", "returned-and-hangs", "hangs", "all-entered"],
)
def test_another_way_through_the_program_is_no_part(replies: dict[int, Reply], blames: str) -> None:
    """Nobody looks for a bad cable because a test calls collectives on some of its ranks only."""
    found = diagnose(replies, name=name, what="sum could not run to its end")
    assert found.blames == blames
    assert (found.advice is not None and "correct the program" in found.text) == (blames == "software")
