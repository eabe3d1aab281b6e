"""A suite as a user writes it, copied beside a launch as ``test_planted.py``: ranks that fail together, one of them first.

Each faulty test has a healthy one after it. ``PLANTED=none`` in the environment makes all of them healthy. Nothing here
knows the device: a collective runs where the rank's group runs it (NCCL on GPUs, gloo on CPUs).

A fault strikes only once the peers are inside the collective. Who is where is left in files: ``entered-<case>-<rank>``,
``struck-<case>`` and ``ended-<case>``, each with the time of it in seconds since 1970.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN201, D103 -- written as users write

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

HEALTHY = os.environ.get("PLANTED") == "none"
SHORT_S = 3.0
"""Deadline of the calls in which a rank hangs; the others are over long before theirs."""

SETTLE_S = 0.2
"""From the word "entered" to being inside the collective that is entered next."""


def note(name):
    """Leave a file of this name with the time in it, whole or not at all."""
    unfinished = Path(f"{name}.{os.getpid()}")
    unfinished.write_text(repr(time.time()), encoding="ascii")
    unfinished.rename(name)


def await_notes(*names, within_s=30.0):
    """Wait for others' files, and then until what they announce has happened."""
    deadline_s = time.monotonic() + within_s
    while absent := [name for name in names if not Path(name).exists()]:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {', '.join(absent)} within {within_s:g} s")
        time.sleep(0.01)
    time.sleep(SETTLE_S)


# What every rank runs. They return what the ranks add up to: one for each.


def ones():
    """A tensor on the device of the group's backend."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.ones(1, device=device)


def add_up():
    total = ones()
    dist.all_reduce(total)
    return total.item()


def add_twice(*, case, victim, fault):
    """The victim takes part in the first sum, and strikes instead of entering the second."""
    rank = int(os.environ["RANK"])
    add_up()
    if rank == victim and not HEALTHY:
        await_notes(*entered(case, but=(victim,)))
        note(f"struck-{case}")
        BEFORE[fault]()
    note(f"entered-{case}-{rank}")
    return add_up()


def add_late(*, case, victim, fault):
    """The victim strikes inside the sum, from another thread; one rank holds back, so that nobody can leave it before."""
    rank = int(os.environ["RANK"])
    late = (victim + 1) % dist.get_world_size()
    if rank == victim and not HEALTHY:
        threading.Thread(target=strike_inside, args=(case, entered(case, but=(late,)), fault), daemon=True).start()
    if rank == late and not HEALTHY:
        await_notes(f"struck-{case}")
        time.sleep(60)
    note(f"entered-{case}-{rank}")
    return add_up()


def strike_inside(case, names, fault):
    await_notes(*names)
    note(f"struck-{case}")
    INSIDE[fault]()


def add_over_sockets(*, case, victim, pause_s=0.0):
    """The victim closes its connections and tells why only when its peers have had their errors from that."""
    rank = int(os.environ["RANK"])
    peers = [peer for peer in range(dist.get_world_size()) if peer != victim]
    group = dist.new_group(backend="gloo")  # sockets, whatever the device
    if rank == victim and not HEALTHY:
        await_notes(*entered(case, but=(victim,)))
        note(f"struck-{case}")
        dist.destroy_process_group(group)
        del group
        await_notes(*[f"suffered-{case}-{peer}" for peer in peers])
        time.sleep(pause_s)
        raise ArithmeticError("planted: the cause")
    note(f"entered-{case}-{rank}")
    total = torch.ones(1)
    with noted_errors(f"suffered-{case}-{rank}"):
        dist.all_reduce(total, group=group)
    return total.item()


@contextlib.contextmanager
def noted_errors(name):
    try:
        yield
    except RuntimeError:
        note(name)
        raise


def entered(case, *, but):
    """The files of the ranks that enter the collective of this case."""
    return [f"entered-{case}-{rank}" for rank in range(dist.get_world_size()) if rank not in but]


def raise_early():
    raise ArithmeticError("planted: the product is wrong")


def hang():
    while True:
        time.sleep(1)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def enter_another():
    total = ones()
    dist.broadcast(total, src=0)
    total.item()  # on a GPU, a broadcast has only been queued before


BEFORE = {"raise": raise_early, "hang": hang, "stop": stop, "mismatch": enter_another}
INSIDE = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": lambda: os._exit(0),
    "crash": faulthandler._sigsegv,
}


# What the controller runs.


def judge(cluster, function, case, **options):
    """Run it on all ranks; note when the call was over, then read what came of it."""
    found = cluster.run(function, per="cluster", case=case, **options)
    note(f"ended-{case}")
    assert found.value == cluster.world_size


def judge_healthy(cluster):
    assert list(cluster.run(add_up, per="cluster").values()) == [cluster.world_size] * cluster.world_size


def test_before(cluster):
    judge_healthy(cluster)


def test_raised(cluster):
    judge(cluster, add_twice, "raised", victim=1, fault="raise")


def test_after_raised(cluster):
    judge_healthy(cluster)


def test_killed(cluster):
    judge(cluster, add_late, "killed", victim=2, fault="kill")


def test_after_killed(cluster):
    judge_healthy(cluster)


def test_left(cluster):
    judge(cluster, add_late, "left", victim=3, fault="leave")


def test_after_left(cluster):
    judge_healthy(cluster)


def test_crashed(cluster):
    judge(cluster, add_late, "crashed", victim=0, fault="crash")


def test_after_crashed(cluster):
    judge_healthy(cluster)


def test_echoed(cluster):
    judge(cluster, add_over_sockets, "echoed", victim=1)


def test_after_echoed(cluster):
    judge_healthy(cluster)


def test_late(cluster):
    judge(cluster, add_over_sockets, "late", victim=0, pause_s=1.5)


def test_after_late(cluster):
    judge_healthy(cluster)


def test_hung(cluster):
    judge(cluster, add_twice, "hung", victim=3, fault="hang", deadline_s=SHORT_S)


def test_after_hung(cluster):
    judge_healthy(cluster)


def test_stopped(cluster):
    judge(cluster, add_twice, "stopped", victim=2, fault="stop", deadline_s=SHORT_S)


def test_after_stopped(cluster):
    judge_healthy(cluster)


def test_mismatched(cluster):
    judge(cluster, add_twice, "mismatched", victim=1, fault="mismatch", deadline_s=SHORT_S)


def test_after_mismatched(cluster):
    judge_healthy(cluster)
