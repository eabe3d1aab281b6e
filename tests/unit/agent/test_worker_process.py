"""Workers: started by copying a process, watched through a small file, ended with all they started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agent.spawner import describe_exit
from pytest_gpucluster.protocol.messages import Success
from tests.support import REPOSITORY
from tests.support.processes import MARK, kill_marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AGENT = """
import json, os, signal, socket, subprocess, sys, time
from pathlib import Path
from pytest_gpucluster.agent.neighbours import Neighbours
from pytest_gpucluster.agent.spawner import Spawner, describe_exit, kill_and_reap
from pytest_gpucluster.agent.worker_process import WorkerProcess
from pytest_gpucluster.protocol.messages import Failure

HUNG = Failure(kind="hung", error="")

def main(request, link_fd):
    # A stand-in for worker.main: does what its environment says, so that no torch is loaded here.
    link = socket.socket(fileno=link_fd)
    exec(request.environment["DO"], {"link": link, "request": request, "os": os, "subprocess": subprocess,
                                        "time": time, "signal": signal, "sys": sys})

def start(do, **more):
    return WorkerProcess(spawner, cwd=more.get("cwd", "/"), environment={"DO": do})

def tell(**facts):
    print(json.dumps(facts), flush=True)

spawner = Spawner(main, folder=Path(sys.argv[1]), neighbours=Neighbours(rank=0, local_rank=0, controller=None))
GRANDCHILD = (
    "pid = subprocess.Popen(['sleep', '600']).pid\\n"
    "link.sendall(b'{\\"t\\": \\"pid\\", \\"pid\\": %d}\\\\n' % pid)\\n"
    "time.sleep(600)"
)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that plays the agent; whatever it leaves is killed by its mark."""
    started: list[subprocess.Popen[str]] = []
    mark = f"{os.getpid()}-{tmp_path.name}"

    def start(program: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: mark}
        command = [sys.executable, "-c", AGENT + program, str(tmp_path)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    kill_marked(mark)
    for process in started:
        process.communicate()


def alive(pid: int) -> bool:
    """Whether there is such a process, a zombie not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pids: list[int], *, within_s: float) -> bool:
    """Whether they are all gone in time."""
    deadline_s = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of the agent."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the agent ended without a word"
    answer: dict[str, Any] = json.loads(line)
    return answer


def test_spawn_and_exit_status(agent: Any) -> None:
    """A worker that leaves, one that raises and one that is shot are told apart; output and messages arrive."""
    facts = said(
        agent("""
worker = start("link.sendall(b'{\\"t\\": \\"success\\"}\\\\n'); print('hello'); sys.stdout.flush()")
status = dict(spawner.exits(within_s=120))[worker.pid]
worker.drain()
left = [describe_exit(status), worker.tail.decode(), repr(worker.last_messages()[-1]), worker.state()]
bad = start("1/0")
raised = describe_exit(dict(spawner.exits(within_s=120))[bad.pid])
shot = start("os.kill(os.getpid(), signal.SIGSEGV)")
died = describe_exit(dict(spawner.exits(within_s=120))[shot.pid])
tell(left=left, raised=raised, died=died, cwd=os.getcwd())
""")
    )
    assert facts["left"][0] == "left with exit code 0"
    assert facts["left"][1] == "hello\n"
    assert facts["left"][2] == repr(Success())
    assert (facts["raised"], facts["died"]) == ("left with exit code 1", "died: SIGSEGV")


@pytest.mark.parametrize("looked_at", ["flight_recorder", "python_stacks"])
def test_no_stacks_of_a_worker_that_answers_meanwhile(agent: Any, tmp_path: Path, looked_at: str) -> None:
    """The end of a peer may wake it while its agent looks at it: what it does after its answer says nothing."""
    answered = tmp_path / "answer"
    facts = said(
        agent(f"""
import select
from pytest_gpucluster.worker import flight_recorder, python_stacks

def answers(pid, path):
    Path({str(answered)!r}).touch()
    assert select.select([worker.wire], [], [], 60)[0]
    return "waits for the next call"

python_stacks.ask = lambda pid, path: "in a wait"
flight_recorder.ask = lambda pid, path: None
hangs = start("time.sleep(600)")
hangs.look(HUNG)
hangs_in = hangs.stacks()
{looked_at}.ask = answers
worker = start('''
while not os.path.exists({str(answered)!r}):
    time.sleep(0.01)
link.sendall(b'{{"t": "success"}}\\\\n')
time.sleep(600)
''')
worker.look(HUNG)
tell(hangs=hangs_in, woken=worker.stacks())
""")
    )
    assert facts == {"hangs": "in a wait", "woken": ""}


def test_nccl_is_asked_at_a_hang(agent: Any) -> None:
    """At the address in the worker's environment, while the worker lives; a stopped worker, or one without, is not asked."""
    facts = said(
        agent("""
from pytest_gpucluster.worker import flight_recorder, python_stacks
from pytest_gpucluster.agent import nccl_ras

flight_recorder.ask = lambda pid, path: None
python_stacks.ask = lambda pid, path: ""
nccl_ras.ask = lambda address: f"asked {address}"
known = {"DO": "time.sleep(600)", "NCCL_RAS_ADDR": "127.0.0.1:4711"}
worker = WorkerProcess(spawner, cwd="/", environment=known)
asked = worker.look(HUNG).ras
os.kill(worker.pid, signal.SIGSTOP)
while worker.state() != "T":
    time.sleep(0.01)
tell(asked=asked, stopped=worker.look(HUNG).ras, without=start("time.sleep(600)").look(HUNG).ras)
""")
    )
    assert facts == {"asked": "asked 127.0.0.1:4711", "stopped": "", "without": "asked None"}


def test_workers_lead_a_session_and_die_with_what_they_started(agent: Any) -> None:
    """Killed by its agent: the worker and its child are gone; the spawner starts the next one."""
    facts = said(
        agent("""
worker = start(GRANDCHILD)
child = None
while child is None:
    for message in worker.wire.receive(): child = json.loads(message)["pid"]
session = os.getsid(worker.pid) == worker.pid
killed = worker.kill()
again = worker.kill()
next_one = start("pass")
status = dict(spawner.exits(within_s=120))[next_one.pid]
tell(pids=[worker.pid, child], session=session, killed=killed, again=again, next=describe_exit(status))
time.sleep(600)
""")
    )
    assert ends(facts["pids"], within_s=120)
    assert (facts["session"], facts["killed"], facts["again"]) == (True, True, True)
    assert facts["next"] == "left with exit code 0"


def test_a_worker_that_ends_takes_its_children_along(agent: Any) -> None:
    """What a measurement forgot to end does not stay on the node."""
    facts = said(
        agent("""
worker = start(GRANDCHILD.replace("time.sleep(600)", "pass"))
child = None
while child is None:
    for message in worker.wire.receive() or (): child = json.loads(message)["pid"]
spawner.exits(within_s=120)
tell(pids=[child])
time.sleep(600)
""")
    )
    assert ends(facts["pids"], within_s=120)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_its_agent(agent: Any, number: int) -> None:
    """The agent is shot: spawner, worker and the worker's own child are gone without anybody's help."""
    process = agent("""
worker = start(GRANDCHILD)
child = None
while child is None:
    for message in worker.wire.receive(): child = json.loads(message)["pid"]
tell(pids=[spawner.pid, worker.pid, child])
time.sleep(600)
""")
    pids = said(process)["pids"]
    assert all(alive(pid) for pid in pids)
    os.kill(process.pid, number)
    assert ends(pids, within_s=120), [pid for pid in pids if alive(pid)]


def test_a_spawner_that_is_gone_is_an_error(agent: Any) -> None:
    """The agent hears of it at once, and can answer; the workers do not stay."""
    facts = said(
        agent("""
worker = start("time.sleep(600)")
os.kill(spawner.pid, signal.SIGKILL)
told = []
for call in (lambda: spawner.exits(within_s=120), lambda: start("pass")):
    try: call()
    except OSError as error: told.append(str(error))
tell(told=told, pids=[worker.pid])
time.sleep(600)
""")
    )
    assert facts["told"][0] == "the spawner of workers has ended"
    assert len(facts["told"]) == 2
    assert ends(facts["pids"], within_s=120)


def test_a_stopped_worker(agent: Any) -> None:
    """State T is seen; it gives no stacks, within a bound; SIGKILL ends it all the same."""
    facts = said(
        agent("""
worker = start("time.sleep(600)")
time.sleep(0.3)
os.kill(worker.pid, signal.SIGSTOP)
while worker.state() != "T": time.sleep(0.01)
began_s = time.monotonic()
stacks = worker.stacks()
tell(stacks=stacks, took_s=time.monotonic() - began_s, killed=worker.kill(), pids=[worker.pid])
""")
    )
    assert (facts["stacks"], facts["killed"]) == ("", True)
    assert facts["took_s"] < 60  # the worker would sleep for ten minutes
    assert ends(facts["pids"], within_s=120)


STOPPED_EARLY = """
def stop():  # before the worker leads a group of its own, and before its end is tied to that of the spawner
    os.kill(os.getpid(), signal.SIGSTOP)

os.setsid = stop
spawner = Spawner(main, folder=Path(sys.argv[1]), neighbours=Neighbours(rank=0, local_rank=0, controller=None))
worker = start("time.sleep(600)")
while worker.state() != "T": time.sleep(0.01)
"""


@pytest.mark.parametrize("killed_by", ["the agent", "the spawner"])
def test_a_worker_that_was_stopped_before_it_began(agent: Any, killed_by: str) -> None:
    """It has no group yet, and is killed all the same."""
    end = "worker.kill()" if killed_by == "the agent" else "None"
    process = agent(f"{STOPPED_EARLY}tell(killed={end}, pids=[worker.pid])\ntime.sleep(600)")
    facts = said(process)
    assert facts["killed"] in (True, None)
    if killed_by == "the spawner":
        process.kill()
    assert ends(facts["pids"], within_s=120)


def test_output_is_bounded(agent: Any) -> None:
    """A worker that prints for ever costs its agent 64 KiB, and the end of it is kept."""
    facts = said(
        agent("""
worker = start("sys.stdout.write('x' * 3_000_000 + 'the end'); sys.stdout.flush()")
while not any(pid == worker.pid for pid, _ in spawner.exits(within_s=0.01)):
    worker.drain()
worker.drain()
tell(length=len(worker.tail), end=worker.tail[-7:].decode(), more=worker.drain())
""")
    )
    assert (facts["length"], facts["end"], facts["more"]) == (65536, "the end", False)


@pytest.mark.parametrize(
    ("status", "text"), [(0, "left with exit code 0"), (256, "left with exit code 1"), (9, "died: SIGKILL")]
)
def test_exit_in_words(status: int, text: str) -> None:
    """A wait status as people say it."""
    assert describe_exit(status) == text


def test_exit_by_a_real_time_signal_has_words_too() -> None:
    """Numbers without a name of their own do not raise."""
    assert "died" in describe_exit(signal.SIGRTMIN + 3)
