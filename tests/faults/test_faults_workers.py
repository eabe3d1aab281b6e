"""What a function does to its own worker: it ends it, writes into its line, or raises what cannot be printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

ROUNDS, SLOW_ROUNDS = 1, 20
CALLS, SLOW_CALLS = 15, 60

# Workers that leave a child with all their pipes.

DYING = """
import os
import subprocess

import pytest
import torch
import torch.distributed as dist

def leave():
    subprocess.Popen(["sleep", "600"], close_fds=False)
    os._exit(3)

def add_up():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

@pytest.mark.parametrize("call", range(CALLS))
def test_leaves(cluster, call):
    found = cluster.run(leave, per="gpu", places=[cluster.places[call % len(cluster.places)]])
    list(found.values())

def test_after(cluster):
    assert set(cluster.run(add_up, per="cluster").values()) == {cluster.world_size}
"""


def every_call_is_one_error(starter: Starter, *, calls: int) -> None:
    """Run the suite once: an ERROR for each call, which says how the worker left, and nothing else."""
    starter.write(test_dying=DYING.replace("CALLS", str(calls)))
    launch = starter.torchrun("--gpucluster", "--junitxml=junit.xml", "test_dying.py", ranks=2)
    launch.end(within_s=60.0 + 3.0 * calls)
    launch.gone()
    cases = launch.cases()
    dying = [case for case in cases if case.name.startswith("test_leaves")]
    assert [case.outcome for case in dying] == ["error"] * calls, launch.output
    assert all("the worker left with exit code 3" in case.text for case in dying)
    assert {case.name: case.outcome for case in cases}["test_after"] == "passed"


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_workers_that_leave_their_pipes_to_a_child(starter: Starter, _round: int) -> None:
    """The agent lives on, whichever of the two ends it sees first; the child is gone with its worker."""
    every_call_is_one_error(starter, calls=CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("_round", range(SLOW_ROUNDS))
def test_many_workers_that_leave_their_pipes_to_a_child(starter: Starter, _round: int) -> None:
    """The same often: what matters is the order of two events that come at about the same time."""
    every_call_is_one_error(starter, calls=SLOW_CALLS)


# One launch in which functions do what they should not, each test with a healthy one after it.

SPOILING = """
import ctypes
import os
import socket
import stat

import pytest
import torch
import torch.distributed as dist

SHORT_S = 3.0

class SilentError(Exception):
    def __str__(self):
        raise KeyError("no text")
    __repr__ = __str__

def add_up():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

def own_rank():
    return int(os.environ["RANK"])

def return_early(ranks):
    add_up()
    return 1.0 if own_rank() in ranks else add_up()

def wait_first():
    if own_rank() == 1:
        ctypes.CDLL(None).pause()  # until a signal comes
    return add_up()

def write_into_the_line(text):
    for number in range(3, 256):
        try:
            link = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if link.family == socket.AF_UNIX and link.type == socket.SOCK_STREAM:
            link.sendall(text.encode("latin-1"))
    return 1.0

def look():
    facts = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]]
    os.environ["WORLD_SIZE"] = os.environ["RANK"] = "77"
    return [dist.is_initialized(), *map(int, facts)]

def join_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return add_up()

def destroy(ranks):
    if own_rank() in ranks:
        dist.destroy_process_group()
    return 1.0

def destroy_and_join_again():
    dist.destroy_process_group()
    return join_alone()

def raise_silently():
    raise SilentError

def raise_chained():
    try:
        try:
            raise LookupError("the cause")
        except LookupError as error:
            raise ValueError("between\\n" * 50) from error
    except ValueError as error:
        raise RuntimeError("the last") from error

def fork():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return 1.0 if child else 2.0

def spoil(name):
    raise SystemExit(name)

def same(found, value):
    assert list(found.values()) == [value] * 3

def healthy(cluster):
    same(cluster.run(add_up, per="cluster"), 3.0)

def alone(cluster):
    assert list(cluster.run(look).values()) == [[False, rank, 3, rank, 3] for rank in range(3)]

def test_returned(cluster):
    cluster.run(return_early, per="cluster", deadline_s=SHORT_S, ranks=[2]).value

def test_after_returned(cluster):
    healthy(cluster)

def test_two_returned(cluster):
    cluster.run(return_early, per="cluster", deadline_s=SHORT_S, ranks=[0, 2]).value

def test_after_two_returned(cluster):
    healthy(cluster)

def test_waited(cluster):
    found = cluster.run(wait_first, per="cluster", deadline_s=SHORT_S)
    assert len(found.errors) == 3
    found.value

def test_after_waited(cluster):
    healthy(cluster)

@pytest.mark.parametrize(
    "text", ["garbage\\n", "half a li", "\\xff\\xfe\\n", "[" * 5000 + "\\n", '{"t": "success"}\\n'])
def test_wrote(cluster, text):
    found = cluster.run(write_into_the_line, places=cluster.places[1:2], text=text)
    found[cluster.places[1]]

def test_after_wrote(cluster):
    healthy(cluster)

def test_alone_after_a_group(cluster):
    alone(cluster)
    healthy(cluster)
    alone(cluster)

def test_some_alone_after_a_group(cluster):
    healthy(cluster)
    assert list(cluster.run(look, places=cluster.places[1:2]).values()) == [[False, 1, 3, 1, 3]]
    healthy(cluster)

def test_joined_alone(cluster):
    same(cluster.run(join_alone), 1.0)
    alone(cluster)
    healthy(cluster)
    same(cluster.run(join_alone), 1.0)
    healthy(cluster)

@pytest.mark.parametrize("ranks", [[0, 1, 2], [1]])
def test_destroyed(cluster, ranks):
    healthy(cluster)
    same(cluster.run(destroy, per="cluster", ranks=ranks), 1.0)
    healthy(cluster)

def test_destroyed_and_joined_again(cluster):
    same(cluster.run(destroy_and_join_again, per="cluster"), 1.0)
    healthy(cluster)
    same(cluster.run(destroy_and_join_again, per="cluster"), 1.0)
    alone(cluster)

def test_forked(cluster):
    same(cluster.run(fork), 1.0)
    same(cluster.run(fork), 1.0)

def test_silent(cluster):
    list(cluster.run(raise_silently).values())

def test_chained(cluster):
    list(cluster.run(raise_chained).values())

def test_exited(cluster):
    list(cluster.run(spoil, name="gone").values())

def test_after_all(cluster):
    healthy(cluster)
"""
GROUP_ERRORS = {"returned": (2,), "two_returned": (0, 2), "waited": (1,)}
OWN_ERRORS = {
    "silent": ("SilentError: (no text: str() of it raised KeyError)",),
    "chained": (
        "RuntimeError: the last; first cause: LookupError: the cause",
        "\n    LookupError: the cause\n",
        "\n    ValueError: between\n",
        "\n    RuntimeError: the last",
    ),
    "exited": ("SystemExit: gone",),
}


@pytest.fixture(scope="module")
def spoiled(shared_starter: Starter) -> Launch:
    """The suite, run to its end; no process of it is left."""
    shared_starter.write(test_spoiling=SPOILING)
    launch = shared_starter.torchrun("--gpucluster", "--junitxml=junit.xml", "test_spoiling.py", ranks=3)
    launch.end(within_s=240)
    launch.gone()
    return launch


def reason_of(launch: Launch, criterion: str) -> str:
    """What results.json says of an ERROR; the JUnit file says the same."""
    (row,) = (row for row in launch.results()["criteria"] if row["criterion"] == criterion)
    assert row["outcome"] == "error", row
    (case,) = (case for case in launch.cases() if case.name == f"test_{criterion}")
    assert case.outcome == "error"
    assert all(line.strip() in case.text for line in row["reason"].splitlines())
    return str(row["reason"])


@pytest.mark.parametrize("criterion", GROUP_ERRORS)
def test_who_never_arrived_is_placed(spoiled: Launch, criterion: str) -> None:
    """The first line names who never arrived, results.json points at them and at nobody else."""
    culprits = GROUP_ERRORS[criterion]
    first = reason_of(spoiled, criterion).splitlines()[0]
    assert f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))} (" in first
    assert "never arrived in all_reduce" in first
    assert ("returned from the function" in first) == ("returned" in criterion)
    blamed = [one["place"]["rank"] for one in spoiled.results()["culprits"] if criterion in one["criteria"]]
    assert tuple(sorted(blamed)) == culprits


@pytest.mark.parametrize("criterion", OWN_ERRORS)
def test_what_was_raised_is_told(spoiled: Launch, criterion: str) -> None:
    """Type, text and the first cause, also of exceptions that cannot be printed."""
    reason = reason_of(spoiled, criterion)
    for part in OWN_ERRORS[criterion]:
        assert part in reason
    assert "Odd" not in reason


def test_garbage_is_one_error_each(spoiled: Launch) -> None:
    """Every call in which a function wrote into its worker's line."""
    wrote = [case for case in spoiled.cases() if case.name.startswith("test_wrote")]
    assert len(wrote) == 5
    for case in wrote:
        assert case.outcome == "error", case
        assert "rank 1 (node0-" in case.text
        assert "the worker sent what is no message: " in case.text


def test_everything_else_passes(spoiled: Launch) -> None:
    """The calls after each of these, and those whose functions change or leave their process group."""
    errors = {*(f"test_{criterion}" for criterion in (*GROUP_ERRORS, *OWN_ERRORS)), "gpucluster.verdict"}
    others = {case.name: case.outcome for case in spoiled.cases() if case.name not in errors and "test_wrote" not in case.name}
    assert len(others) == 12
    assert set(others.values()) == {"passed"}, others
