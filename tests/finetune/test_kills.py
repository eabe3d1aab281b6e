"""SIGKILL and lost ranks: a resumed run ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY
from tests.support.finetune.runs import CHEAP, SCRIPTS, options, result, torchrun
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

OFTEN = {**CHEAP, "steps": 12, "window_steps": 1, "checkpoint_every": 1}
"""A checkpoint after every step: many moments to be killed in."""

SURROUNDINGS = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}


def last_result(output: str) -> dict[str, Any]:
    """The last RESULT, whatever launchers print after it."""
    return result([line for line in output.splitlines() if line.startswith("RESULT ")][-1])


def killed(folder: Path, kills: int, **settings: Any) -> dict[str, Any]:
    """Run kill_and_resume.py, which fails if an end differs."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "kill_and_resume.py", folder, json.dumps({**OFTEN, **settings}), str(kills), "7"],
        env=SURROUNDINGS,
        capture_output=True,
        text=True,
        timeout=60 + 30 * kills,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_many_times(tmp_path: Path, kills: int) -> None:
    """The kills come at random moments of a run that saves after every step."""
    seen = killed(tmp_path, kills, keep_checkpoints=2)
    assert seen["killed"] == kills
    assert max(seen["newest_at_kill"]) > 0


@pytest.mark.soak
def test_launches_of_two_ranks_killed_twenty_times(tmp_path: Path) -> None:
    """Launcher and ranks at once, as a node that loses power, from the first import to the last check."""
    rng = random.Random(7)
    settings = options({**OFTEN, "keep_checkpoints": 3})
    begin = time.monotonic()
    whole = torchrun("-m", "finetune_smoke", *settings, "--checkpoint-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr[-4000:]
    seconds, kills, round_ = time.monotonic() - begin, 0, 0
    arguments = ["--standalone", "--nproc-per-node=2", "-m", "finetune_smoke", *settings, "--resume=auto"]
    while kills < 20:
        folder = tmp_path / f"round{round_}"
        command = [sys.executable, "-m", "torch.distributed.run", *arguments, f"--checkpoint-dir={folder}"]
        with (tmp_path / "output").open("w+") as output:
            try:
                with started(command, output) as child:
                    child.wait(rng.uniform(0.3, 1.0) * seconds)
            except subprocess.TimeoutExpired:
                kills += 1
                continue
            output.seek(0)
            assert last_result(output.read())["adapter_digest"] == last_result(whole.stdout)["adapter_digest"]
            round_ += 1
    last = torchrun("-m", "finetune_smoke", *settings, "--resume=auto", "--checkpoint-dir", folder)
    assert last.returncode == 0, last.stderr[-4000:]
    assert last_result(last.stdout)["adapter_digest"] == last_result(whole.stdout)["adapter_digest"]
    assert last_result(last.stdout)["losses"] == last_result(whole.stdout)["losses"]


@contextmanager
def started(command: list[str], output: IO[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prints to ``output``; what it started ends with the block, if it runs still."""
    surroundings = {**SURROUNDINGS, **environment}
    child = subprocess.Popen(command, env=surroundings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            end_all_below(child.pid)
        child.wait(30)


def end_all_below(pid: int) -> None:
    """SIGKILL to a process and all that it started, at once."""
    import psutil  # noqa: PLC0415 -- only here

    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_torchrun_starts_again_and_the_run_goes_on(tmp_path: Path) -> None:
    """Rank 1 kills itself after the checkpoint of step 4 and before that of step 6; torchrun restarts the run."""
    settings = options({**OFTEN, "steps": 6, "checkpoint_every": 2, "window_steps": 2})
    whole = torchrun("-m", "finetune_smoke", *settings, "--checkpoint-dir", tmp_path / "whole")
    again = torchrun(
        "--max-restarts=1", SCRIPTS / "rank_dies_once.py", *settings, "--checkpoint-dir", tmp_path / "dies", "--resume=auto"
    )
    assert (whole.returncode, again.returncode) == (0, 0), again.stderr[-4000:]
    ours, theirs = last_result(again.stdout), last_result(whole.stdout)
    assert ours["resumed_at"] == 4
    assert ours["losses"] == theirs["losses"]
    assert ours["adapter_digest"] == theirs["adapter_digest"]


@pytest.mark.slow
def test_smaller_world_goes_on_when_a_node_is_lost(tmp_path: Path) -> None:
    """Of two launchers of one rank each the second is killed; the first continues by itself with the same losses."""
    long = {**OFTEN, "steps": 400, "checkpoint_every": 10, "window_steps": 5, "keep_checkpoints": 2}
    meeting = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=smaller"]
    port = free_port()
    meeting += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=20,join_timeout=120"]
    arguments = ["-m", "finetune_smoke", *options(long), f"--checkpoint-dir={tmp_path / 'shared'}", "--resume=auto"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, *arguments]
    nodes = []
    with ExitStack() as stack:
        for name in ("first", "second"):
            output = stack.enter_context((tmp_path / name).open("w"))
            nodes.append(stack.enter_context(started(command, output)))
            wait_for(lambda: accepts(port), nodes)  # the first one makes the meeting point, and outlives the second
        wait_for((tmp_path / "shared" / "step-20" / "_SUCCESS").exists, nodes)
        end_all_below(nodes[1].pid)
        assert nodes[0].wait(480) == 0, (tmp_path / "first").read_text()[-4000:]
    ended = last_result((tmp_path / "first").read_text())
    assert ended["world_size"] == 1
    assert ended["resumed_at"] >= 20
    assert len(ended["losses"]) == 400


def wait_for(condition: Callable[[], bool], nodes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until ``condition`` holds, at most five minutes, and while all nodes run."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert [node.poll() for node in nodes] == [None] * len(nodes)
        time.sleep(0.1)


def accepts(port: int) -> bool:
    """Whether a process on this machine accepts connections on ``port``."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
