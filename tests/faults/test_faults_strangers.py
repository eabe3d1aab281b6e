"""Row 20: somebody else on the network writes to the store's port. Nothing of it is executed, nothing is lost for it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from tests.support.processes import command_of, free_port
from tests.support.reports import SCHEMA
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import PrefixStore

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

# Four measurements, one after the other; each waits for a file before it returns the value that belongs to it.
SUITE = """
import pathlib
import time

VALUES = {"first": 100.0, "second": 90.0, "third": 0.5, "fourth": 50.0}

def waits(*, name):
    pathlib.Path(f"in-{name}").touch()
    while not (pathlib.Path(f"go-{name}").exists() or pathlib.Path("go").exists()):
        time.sleep(0.02)
    return VALUES[name]

def judge(cluster, criterion, name):
    criterion.require(cluster.run(waits, per="gpu", name=name, deadline_s=40))

def test_first(cluster, criterion):
    judge(cluster, criterion, "first")

def test_second(cluster, criterion):
    judge(cluster, criterion, "second")

def test_third(cluster, criterion):
    judge(cluster, criterion, "third")

def test_fourth(cluster, criterion):
    judge(cluster, criterion, "fourth")
"""
LIMITS = {name: entry(min=1) for name in ("first", "second", "third", "fourth")}
ONE_PLACE = ("--gpucluster-expect", "nodes=1,gpus_per_node=1")
UNSIGNED = "was not signed by this run"


class Evil:
    """What runs a command where somebody unpickles it."""

    def __init__(self, marker: Path) -> None:
        """``marker`` is the file that gives it away."""
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """What a pickle of this does."""
        return os.system, (f"touch {self._marker}",)


def arguments(starter: Starter) -> tuple[str, ...]:
    """The suite is written; how a run of it is asked for."""
    starter.write(test_waits=SUITE)
    return ("--gpucluster", write_limits(starter.folder / "limits.yaml", LIMITS, extends=False), "--junitxml=junit.xml")


def measuring(launch: Launch, name: str) -> None:
    """Wait until a worker is in this measurement."""
    launch.until((launch.cwd / f"in-{name}").exists, what=f"worker in {name}")


def go_on(launch: Launch, name: str) -> None:
    """Let this measurement return."""
    (launch.cwd / f"go-{name}").touch()


def address(launch: Launch) -> dict[str, Any]:
    """Host, port and run id of the store, as anybody on this machine can read them from an agent's command line."""
    command = command_of(launch.agent_of(0))
    found: dict[str, Any] = json.loads(command[command.index("{") :])["address"]
    return found


def tcp_store(*parts: bytes | int) -> bytes:
    """Whole numbers as the store's protocol has lengths, after the greeting that it asks of its clients."""
    greeting = bytes([9]) + struct.pack("<I", 0x3C85F7CE)
    return greeting + b"".join(struct.pack("<Q", part) if isinstance(part, int) else part for part in parts)


def nonsense(marker: Path) -> dict[str, bytes]:
    """What a stranger, a port scanner or a broken client might send."""
    return {
        "noise": os.urandom(4096),
        "a browser": b"GET / HTTP/1.0\r\n\r\n",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(32),
        "a pickle": pickle.dumps(Evil(marker)),
        "a pickle after its length": struct.pack("<Q", 1 << 40) + pickle.dumps(Evil(marker)),
        "a huge key": tcp_store(bytes([1]), (1 << 63) - 1),
        "a huge value": tcp_store(bytes([1]), 3, b"a/b", 1 << 40),
        "a huge list": tcp_store(bytes([7]), 1 << 40),
        "an unknown question": tcp_store(bytes([250])),
        "half a question": tcp_store(bytes([1]), 3, b"a"),
    }


# Messages


def store_of(where: dict[str, Any]) -> PrefixStore:
    """The keys of a run, through torch's own client."""
    from datetime import timedelta  # noqa: PLC0415 -- as torch

    from torch.distributed import PrefixStore, TCPStore  # noqa: PLC0415 -- only a test that forges needs torch

    client = TCPStore(where["host"], where["port"], is_master=False, timeout=timedelta(seconds=10))
    return PrefixStore(f"gpucluster/{where['run_id']}", client)


def last_command(store: PrefixStore) -> tuple[int, dict[str, Any]]:
    """Number and text of what the controller said last."""
    number = 0
    while store.check([f"cmd/{number + 1}"]):
        number += 1
    command: dict[str, Any] = json.loads(bytes(store.get(f"cmd/{number}")).partition(b"\n")[2])
    return number, command


def unsigned(message: dict[str, Any]) -> str:
    """A message as a run without a secret would write it."""
    return "\n" + json.dumps(message)


PERFECT = {
    "ok": True,
    "value": 1e9,
    "setup_s": 0.0,
    "run_s": 0.0,
    "entered": True,
    "collectives": 0,
    "collective": "",
    "output": "",
}


def send_nonsense(where: dict[str, Any], stack: contextlib.ExitStack, marker: Path) -> None:
    """Open a connection for each piece of nonsense; every second one stays open as long as ``stack``."""
    for number, data in enumerate(nonsense(marker).values()):
        stranger = socket.create_connection((where["host"], where["port"]), timeout=5)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        if number % 2:
            stack.enter_context(stranger)
        else:
            stranger.close()


def forge_commands(store: PrefixStore, marker: Path) -> None:
    """Be quicker than the controller with its next two commands; returns when they have been read."""
    number, _ = last_command(store)
    store.set(f"cmd/{number + 1}", pickle.dumps(Evil(marker)).decode("latin-1"))
    store.set(f"cmd/{number + 2}", unsigned({"t": "quit", "code": 0}))
    time.sleep(0.3)


@pytest.fixture(scope="module")
def attacked(shared_starter: Starter) -> Launch:
    """One run: nonsense during the first measurement, a forged answer to the second, forged commands during the fourth."""
    starter, executed = shared_starter, shared_starter.folder / "executed"
    launch = starter.pytest(*arguments(starter), *ONE_PLACE)
    measuring(launch, "first")
    where = address(launch)
    assert where["host"] == "127.0.0.1"
    with contextlib.ExitStack() as connections:
        send_nonsense(where, connections, executed)
        store = store_of(where)
        go_on(launch, "first")
        measuring(launch, "second")
        store.set(f"res/{last_command(store)[1]['id']}/0", unsigned(PERFECT))
        launch.until(lambda: last_command(store)[1].get("kwargs") == {"name": "third"}, what="third call")
        time.sleep(0.3)  # the third call has reached the agent, whose worker is still in the second
        go_on(launch, "second")
        go_on(launch, "third")
        fourth = starter.folder / "in-fourth"
        launch.until(lambda: fourth.exists() or launch.has_ended, what="worker in fourth")
        if fourth.exists():
            forge_commands(store, executed)
        (starter.folder / "go").touch()
        assert launch.end() == 1, launch.output
        launch.gone()
    return launch


def row(launch: Launch, criterion: str) -> dict[str, Any]:
    """The row of this criterion in results.json."""
    return next(row for row in launch.results()["criteria"] if row["criterion"] == criterion)


def test_nonsense_changes_nothing(attacked: Launch) -> None:
    """What is measured meanwhile is right, and no pickle was executed."""
    assert (row(attacked, "first")["outcome"], row(attacked, "first")["value"]) == ("passed", 100)
    assert not (attacked.cwd / "executed").exists()


def test_forged_answer(attacked: Launch) -> None:
    """It is not taken for a measurement, and the reason says what it was."""
    found = row(attacked, "second")
    assert (found["outcome"], found["value"]) == ("error", None)
    assert UNSIGNED in found["reason"]


def test_true_answer_after_a_forged_one(attacked: Launch) -> None:
    """It comes late, and is not taken for the answer to the next question, which it would turn green."""
    found = row(attacked, "third")
    assert (found["outcome"], found["value"]) in (("failed", 0.5), ("error", None)), found


def test_forged_commands(attacked: Launch) -> None:
    """They are obeyed by nobody: the rest is measured, or is said not to have been for a message that was not signed."""
    found = row(attacked, "fourth")
    refused = found["outcome"] in ("error", "missing") and UNSIGNED in found["reason"]
    assert (found["outcome"], found["value"]) == ("passed", 50) or refused, found
    assert not (attacked.cwd / "executed").exists()


def test_reports_of_an_attacked_run(attacked: Launch) -> None:
    """Both are whole, and never green."""
    jsonschema.validate(attacked.results(), SCHEMA)
    assert attacked.results()["verdict"] in ("REJECTED", "INCOMPLETE")
    cases = attacked.junit()
    assert list(cases) == ["test_first", "test_second", "test_third", "test_fourth", "gpucluster.verdict"]
    assert cases["gpucluster.verdict"] in ("failure", "error")


AS_TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
}
STRANGE = """
import pathlib

pathlib.Path({marker!r}).touch()

def measure():
    return 1
"""


@pytest.mark.slow
def test_a_strangers_file_in_an_unsigned_run(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without a secret anybody can write commands; a file that does not belong to the tests is still not run."""
    elsewhere, executed = tmp_path_factory.mktemp("elsewhere"), starter.folder / "executed"
    file = elsewhere / "strange_measurement.py"
    file.write_text(STRANGE.format(marker=str(executed)), encoding="utf-8")
    launch = starter.pytest(*arguments(starter), **AS_TORCHRUN, MASTER_PORT=str(free_port()))
    measuring(launch, "first")
    store = store_of(address(launch))
    number, call = last_command(store)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    function = {"module": file.stem, "qualname": "measure", "file": str(file), "relative": file.name, "digest": digest}
    forged = {**call, "id": "forged", "function": function, "kwargs": {}, "sys_path": [str(elsewhere)]}
    store.set(f"cmd/{number + 1}", unsigned(forged))
    (starter.folder / "go").touch()
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s and not store.check(["res/forged/0"]) and launch.alive():
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(launch.pid, signal.SIGTERM)
    assert launch.end() != 0, launch.output
    launch.gone()
    assert not executed.exists(), "a file from outside the tests was run"
