"""``gpucluster launch``: the lines it prints, who meets whom, and the reports of a run that never began."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import socket
import sys
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from pytest_gpucluster.commands import launch, main
from pytest_gpucluster.commands import report as absent_nodes
from pytest_gpucluster.commands.launch import Job
from pytest_gpucluster.commands.report import Absence
from pytest_gpucluster.config import host_list
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol import channel, rendezvous
from pytest_gpucluster.protocol.codec import SECRET_VARIABLE, Secret
from pytest_gpucluster.protocol.rendezvous import Hello, Meeting, NotJoinedError
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.results import SCHEMA_FILE
from tests.support.processes import free_port
from tests.support.reports import cases_of, read_suite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpucluster.session import Session

HERE = "127.0.0.1"
NODES = ("--nnodes", "2", "--nproc-per-node", "8", "--master-addr", "gpu-node-0")
VARIABLE = SECRET_VARIABLE
ANOTHER = Secret(b"of another run")


def hello(node_rank: int, **changes: Any) -> Hello:
    """Of a node of three with two GPUs each."""
    return Hello(**{"node_rank": node_rank, "hostname": f"host{node_rank}", "num_nodes": 3, "num_local": 2, **changes})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No secret, no pytest options from outside, and a folder to write into."""
    monkeypatch.setenv(host_list.VARIABLE, "")  # what a launcher sets here ends with the test
    for name in (VARIABLE, "PYTEST_ADDOPTS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendezvous, "PAUSE_S", 0.02)
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.02)
    monkeypatch.chdir(tmp_path)


# The command line.


def test_lines_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """One a node, quoted for a shell, with the host as a comment."""
    arguments = ["tests_acceptance", "-k", "bf16 and not node0", "--", "--run"]
    assert main.main(["launch", *NODES, "--hosts", "a, b", "--", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("#")[2].strip() for line in lines] == ["a", "b"]
    for node, line in enumerate(lines):
        where = [f"--node-rank={node}", "--master-addr=gpu-node-0", "--master-port=29500"]
        found = shlex.split(line, comments=True)
        assert found == [
            "OMP_NUM_THREADS=1",
            "torchrun",
            "--nnodes=2",
            "--nproc-per-node=8",
            *where,
            "-m",
            "pytest",
            *arguments,
        ]


@pytest.mark.parametrize(
    ("shape", "address"),
    [(("--nnodes", "1"), "127.0.0.1"), (("--nnodes", "2", "--hosts", "a,b"), "a"), (("--nnodes", "1", "--hosts", "a"), "a")],
)
def test_what_follows_from_the_shape(shape: tuple[str, ...], address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A node alone meets itself, and node 0 is the first of the hosts: nobody has to say it."""
    assert main.main(["launch", *shape, "--nproc-per-node", "8"]) == 0
    assert f" --node-rank=0 --master-addr={address} " in capsys.readouterr().out
    assert main.main(["launch", *shape, "--nproc-per-node", "8", "--master-addr", "other"]) == 0
    assert " --master-addr=other " in capsys.readouterr().out


def test_one_node_needs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, each says which one it is."""
    led: list[launch.Job] = []
    monkeypatch.setattr(launch, "_lead", lambda job: led.append(job) or 0)
    assert main.main(["launch", "--run", "--nnodes", "1", "--nproc-per-node", "2"]) == 0
    assert (led[0].node_rank, led[0].master_addr) == (0, "127.0.0.1")
    assert main.main(["launch", "--run", "--nnodes", "2", "--nproc-per-node", "2", "--hosts", "a,b"]) == 2


@pytest.mark.parametrize("report", ["--junitxml=./limits.yaml", "--gpucluster-summary=hosts", "--junitxml=run/journal.jsonl"])
def test_a_report_in_the_place_of_an_input(
    report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither limits, nor the list of hosts, nor the run that has it; before anybody waits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    inputs = [tmp_path / name for name in ("limits.yaml", "hosts", "run/journal.jsonl")]
    for file in inputs:
        file.write_text("a\nb\n", encoding="utf-8")
    monkeypatch.setattr(launch, "hosts_from", lambda _text: ("a", "b"))
    hosts = "run" if "journal" in report else "./hosts"
    words = ["--run", "--node-rank", "0", *NODES, "--hosts", hosts, "--", "--gpucluster-thresholds=limits.yaml", report]
    assert main.main(["launch", *words]) == 2
    assert "an input or another report" in capsys.readouterr().err
    assert {file.read_text(encoding="utf-8") for file in inputs} == {"a\nb\n"}


def test_lines_without_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the command."""
    assert main.main(["launch", *NODES, "--master-port", "1234", "--", "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "OMP_NUM_THREADS=1 torchrun --nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr=gpu-node-0 --master-port=1234 "
        "-m pytest -q"
    )


def test_without_arguments_the_suite_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain pytest would run other tests on each node."""
    assert main.main(["launch", *NODES]) == 0
    assert all(line.endswith(" -m pytest --pyargs tests_acceptance") for line in capsys.readouterr().out.splitlines())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the package."""
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"pytest-gpucluster {version('pytest-gpucluster')}\n")


def test_torchrun_has_nothing_to_warn_of(
    capsys: pytest.CaptureFixture[str], started: list[tuple[list[str], str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives several ranks one thread each, with four lines of warning, unless that is set. One rank keeps all threads."""
    monkeypatch.setattr("pytest_gpucluster.run_setup.detect_gpus", lambda: gpus(0))
    variable = "OMP_NUM_THREADS"
    for ranks, own, expected in (("2", None, "1"), ("2", "4", "4"), ("1", None, None)):
        node = ["--nnodes", "1", "--nproc-per-node", ranks, "--master-addr", HERE, "--master-port", str(free_port())]
        monkeypatch.delenv(variable, raising=False)
        if own is not None:
            monkeypatch.setenv(variable, own)
        assert main.main(["launch", *node, "--", "-q"]) == 0
        assert capsys.readouterr().out.startswith("torchrun" if expected is None else f"{variable}={expected} torchrun")
        with pytest.raises(SystemExit):
            main.main(["launch", *node, "--run", "--node-rank", "0", "--", "-q"])
        assert os.environ.get(variable) == expected
    assert len(started) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "0"], "--nnodes 0 is not a number above zero"),
        (["--nproc-per-node", "-1"], "--nproc-per-node -1 is not a number above zero"),
        (["--hosts", "a,b,c"], "--hosts names 3 hosts, --nnodes says 2"),
        (["--hosts", "a,"], "--hosts 'a,' names an empty host"),
        (["--hosts", ",b"], "--hosts ',b' names an empty host"),
        (["--hosts", "a,a"], "'a' is there twice"),
        (["--hosts", "gpu-[1-2,2]"], "'gpu-2' is there twice"),
        (["--hosts", "a b,c"], "'a b' is no hostname"),
        (["--hosts", "a\tb,c"], "'a\\tb' is no hostname"),
        (["--hosts", "a;b,c"], "'a;b' is no hostname"),
        (["--hosts", "é,b"], "'é' is no hostname"),
        (["--run"], "--run needs --node-rank, from 0 to 1"),
        (["--run", "--node-rank", "2"], "--run needs --node-rank, from 0 to 1"),
        (["--master-port", "65536"], "--master-port 65536 is no TCP port"),
        (["--join-deadline-s", "0"], "--join-deadline-s 0 is not a time above zero"),
        (["--join-deadline-s", "nan"], "--join-deadline-s nan is not a time above zero"),
        (["--join-deadline-s", "inf"], "--join-deadline-s inf is not a time above zero"),
    ],
)
def test_wrong_usage(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, before anything is opened."""
    assert main.main(["launch", *NODES, *options, "--", "-q"]) == 2
    assert message in capsys.readouterr().err


def test_pytest_arguments_stand_behind_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    """Before them they are a mistake: ``-k`` might be meant for us."""
    with pytest.raises(SystemExit) as left:
        main.main(["launch", *NODES, "tests_acceptance"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "gpucluster launch: error: unrecognized arguments: tests_acceptance" in said
    assert "usage: gpucluster launch [--nnodes" in said


def test_not_inside_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight launchers on one node would all be that node."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main.main(["launch", *NODES, "--run", "--node-rank", "0", "--", "-q"]) == 2
    assert "this is a process of torchrun already" in capsys.readouterr().err


def test_wrong_pytest_options_are_said_before_waiting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pytest would refuse on every node is refused here, at once."""
    monkeypatch.setattr("pytest_gpucluster.run_setup.detect_gpus", lambda: gpus(0))
    run = ["launch", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", HERE, "--run", "--node-rank", "0", "--"]
    assert main.main([*run, "--gpucluster-profile", "rehersal"]) == 2
    assert "Did you mean 'rehearsal'" in capsys.readouterr().err
    assert main.main([*run, "--gpucluster-profile", "rehearsal", "--gpucluster-expect", "2x8"]) == 2
    assert "--gpucluster-expect: '2x8' is not understood" in capsys.readouterr().err


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Another job's torchrun, mostly."""
    with socket.create_server((HERE, 0)) as other:
        port = str(other.getsockname()[1])
        run = ["launch", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", HERE, "--master-port", port, "--run"]
        assert main.main([*run, "--node-rank", "0", "--", "--gpucluster-profile", "rehearsal"]) == 2
    told = capsys.readouterr().err
    assert f"port {port} cannot be used on this node: Address already in use; say another --master-port" in told


@pytest.mark.parametrize(
    ("host", "family"),
    [("localhost", socket.AF_INET), (HERE, socket.AF_INET), ("gpu-node-0", None), ("10.1.2.3", None)],
)
def test_where_node_0_listens(host: str, family: socket.AddressFamily | None) -> None:
    """On all interfaces, as torchrun does, unless the loopback was asked for."""
    with rendezvous._listen(host, free_port()) as listener:
        address = listener.getsockname()[0]
        assert address == HERE if family is not None else address in ("::", "0.0.0.0")  # noqa: S104 -- what is tested


# Meeting.


class Joining(threading.Thread):
    """A launcher of another node."""

    def __init__(self, own: Hello, port: int, *, within_s: float = 20.0) -> None:
        super().__init__(daemon=True)
        self._own, self._port, self._within_s = own, port, within_s
        self.notices: list[str] = []
        self.error: str | None = "still joining"
        self.secret: str | None = None
        self.start()

    def run(self) -> None:
        """Join."""
        try:
            self.secret = rendezvous.join(
                self._own, host=HERE, port=self._port, within_s=self._within_s, notice=self.notices.append
            )
        except NotJoinedError as error:
            self.error = str(error)
        else:
            self.error = None

    def ended(self) -> str | None:
        """Why it could not join; None when it could."""
        self.join(60)
        assert not self.is_alive()
        return self.error


class Host:
    """Node 0 of three."""

    def __init__(self) -> None:
        self.port = free_port()
        self.notices: list[str] = []
        self.meeting = Meeting(hello(0), host=HERE, port=self.port, notice=self.notices.append)

    def gather_until(self, holds: Callable[[], bool], *, within_s: float = 20.0) -> None:
        """Hear what comes until something holds; the meeting stays open."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline_s, self.notices
            self.meeting.gather(within_s=0.05)


@pytest.fixture
def host() -> Iterator[Host]:
    """Closed in the end, whatever happened."""
    made = Host()
    yield made
    with contextlib.suppress(OSError, KeyError):
        made.meeting.close()


@pytest.mark.parametrize("secret", [None, "of this run"])
def test_all_come(host: Host, monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    """In any order; each is told to go, and the port is free at once."""
    if secret is not None:
        monkeypatch.setenv(VARIABLE, secret)
    others = [Joining(hello(rank), host.port) for rank in (2, 1)]
    host.meeting.gather(within_s=20)
    assert host.meeting.is_complete
    assert host.meeting.hostnames == {0: "host0", 1: "host1", 2: "host2"}
    host.meeting.end({"t": "go"})
    assert [other.ended() for other in others] == [None, None]
    with socket.create_server((HERE, host.port)):
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    """The command line and the secret of every torchrun that would have been started."""
    found: list[tuple[list[str], str | None]] = []

    def execv(_file: str, command: list[str]) -> None:
        found.append((command, os.environ.get(VARIABLE)))
        sys.exit(0)

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.delenv(VARIABLE, raising=False)
    return found


def test_a_launcher_alone_makes_a_secret(started: list[tuple[list[str], str | None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one for each run, in the environment and on no command line; one that the user set stays."""
    monkeypatch.setattr("pytest_gpucluster.run_setup.detect_gpus", lambda: gpus(0))
    alone = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", HERE, "--master-port", str(free_port())]
    run = ["launch", *alone, "--run", "--node-rank", "0", "--", "-q"]
    for _ in range(2):
        monkeypatch.delenv(VARIABLE, raising=False)
        with pytest.raises(SystemExit):
            main.main(run)
    monkeypatch.setenv(VARIABLE, "of the user")
    with pytest.raises(SystemExit):
        main.main(run)
    secrets = [secret or "" for _, secret in started]
    assert [len(secret) for secret in secrets[:2]] == [64, 64]
    assert secrets[0] != secrets[1]
    assert secrets[2] == "of the user"
    assert not any(secret in " ".join(command) for command, secret in started if secret)


def test_all_nodes_get_the_secret_of_node_0(host: Host) -> None:
    """It comes with the go; without one in it there is none."""
    others = [Joining(hello(rank), host.port) for rank in (1, 2)]
    host.meeting.gather(within_s=20)
    host.meeting.end({"t": "go", "secret": "of this run"})
    assert [other.ended() for other in others] == [None, None]
    assert [other.secret for other in others] == ["of this run", "of this run"]


@pytest.mark.parametrize("secret", [None, "of the user"])
def test_how_printed_lines_are_signed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    """A secret to enter on every node stands beside the lines, not in them. The user's own is not printed."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if secret is not None:
        monkeypatch.setenv(VARIABLE, secret)
    assert main.main(["launch", *NODES, "--", "-q"]) == 0
    told = capsys.readouterr()
    assert VARIABLE not in told.out
    assert "of the user" not in told.err
    exported = [line for line in told.err.splitlines() if line.startswith(f"export {VARIABLE}=")]
    assert [len(line.rpartition("=")[2]) for line in exported] == ([64] if secret is None else [])
    assert secret is None or f"give every node the {VARIABLE}" in told.err


def test_a_node_alone_waits_for_nobody() -> None:
    """``--nnodes 1`` goes on at once."""
    meeting = Meeting(hello(0, num_nodes=1), host=HERE, port=free_port(), notice=pytest.fail)
    meeting.gather(within_s=600)
    assert meeting.is_complete
    meeting.close()


def test_one_is_absent(host: Host) -> None:
    """At the deadline the wait ends, and who came is told why nothing starts."""
    other = Joining(hello(2), host.port)
    host.gather_until(lambda: 2 in host.meeting.hostnames)
    host.meeting.gather(within_s=0.2)
    assert not host.meeting.is_complete
    host.meeting.end({"t": "end", "why": "node 1 never joined within 0.2 s"})
    assert other.ended() == "nothing was started: node 1 never joined within 0.2 s"


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        (hello(1, num_nodes=4), "node 1 says --nnodes 4, node 0 says 3"),
        (hello(1, num_local=8), "node 1 says --nproc-per-node 8, node 0 says 2"),
        (hello(1, start="7.1"), "the launcher on host1 belongs to another start of the job (7.1, this is no job): end it"),
        (hello(0), "--node-rank 0 is not one of 1 to 2"),
        (hello(3), "--node-rank 3 is not one of 1 to 2"),
    ],
)
def test_who_does_not_fit_is_refused(host: Host, own: Hello, complaint: str) -> None:
    """At once, on both sides; the others are still waited for."""
    other = Joining(own, host.port)
    host.gather_until(lambda: not other.is_alive())
    assert complaint in str(other.ended())
    assert [complaint in notice for notice in host.notices] == [True]
    assert host.notices[0].startswith(f"{own.hostname} cannot join: ")
    assert host.meeting.hostnames == {0: "host0"}


def test_a_node_rank_is_taken_once(host: Host) -> None:
    """The second is refused and named; the first stays."""
    first = Joining(hello(1), host.port)
    host.gather_until(lambda: 1 in host.meeting.hostnames)
    second = Joining(hello(1, hostname="copied"), host.port)
    host.gather_until(lambda: not second.is_alive())
    assert "node rank 1 is here already, from host1" in str(second.ended())
    assert host.meeting.hostnames == {0: "host0", 1: "host1"}
    host.meeting.end({"t": "end", "why": "enough"})
    assert first.ended() == "nothing was started: enough"


def say_hello(port: int, own: Hello) -> socket.socket:
    """A connection that said a good hello and waits."""
    line = socket.create_connection((HERE, port), timeout=20)
    threading.Thread(target=rendezvous._hello, args=(line, own), daemon=True).start()
    return line


def test_hellos_that_came_during_a_pause(host: Host) -> None:
    """Node 0's launcher was stopped until the time was up: nodes that had said hello by then "never joined"."""
    lines = [say_hello(host.port, hello(rank)) for rank in (1, 2)]
    for _ in lines:
        host.meeting._accept(20.0)
    waiting = [peer.connection for peer in host.meeting._peers]
    deadline_s = time.monotonic() + 20.0
    while len(select.select(waiting, [], [], 0.05)[0]) < len(waiting):
        assert time.monotonic() < deadline_s
    host.meeting.gather(within_s=0.0)
    assert host.meeting.is_complete
    for line in lines:
        line.close()


def test_who_leaves_is_absent_again(host: Host) -> None:
    """A launcher that was ended meanwhile does not count, and may come again."""
    line = say_hello(host.port, hello(1))
    host.gather_until(lambda: 1 in host.meeting.hostnames)
    line.close()
    host.gather_until(lambda: 1 not in host.meeting.hostnames)
    assert "node 1 (host1) has left again" in host.notices
    others = [Joining(hello(rank), host.port) for rank in (1, 2)]
    host.gather_until(lambda: host.meeting.is_complete)
    host.meeting.end({"t": "go"})
    assert [other.ended() for other in others] == [None, None]


STRANGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\n{}\n",
    b"\n[1]\n",
    b"\n" + b"[" * 2000 + b"\n",
    b"\n" + b"x" * 10000,
    b"\x80\x04\x95\n\x8c\x05posix\n",
    b"\0" * 100,
    b'\n{"hello": {"node_rank": true, "num_nodes": 3, "num_local": 2, "hostname": "x"}, "nonce": ""}\n',
    b'\n{"hello": {"node_rank": 1, "num_nodes": 3, "num_local": 2, "hostname": "\\u001b[2J"}, "nonce": ""}\n',
    b'\n{"hello": {"node_rank": 1, "num_nodes": 3, "num_local": 2, "hostname": "x", "more": 1}, "nonce": ""}\n',
    b'\n{"hello": {"node_rank": 1, "num_nodes": 3, "num_local": 2, "hostname": "x"}, "nonce": 5}\n',
    b"",
]


@pytest.mark.parametrize("secret", [None, "of this run"])
def test_strangers_change_nothing(host: Host, monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    """Whatever comes in on that port is dropped; those who are meant still meet."""
    if secret is not None:
        monkeypatch.setenv(VARIABLE, secret)
    lines = []
    for text in STRANGE:
        lines.append(socket.create_connection((HERE, host.port), timeout=20))
        with contextlib.suppress(OSError):
            lines[-1].sendall(text)
    lines[-1].close()
    host.meeting.gather(within_s=0.5)
    assert host.meeting.hostnames == {0: "host0"}
    assert not any("\x1b" in notice for notice in host.notices)
    others = [Joining(hello(rank), host.port) for rank in (1, 2)]
    host.gather_until(lambda: host.meeting.is_complete)
    host.meeting.end({"t": "go"})
    assert [other.ended() for other in others] == [None, None]
    for line in lines:
        line.close()


def test_many_who_say_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than we hold are closed at once, silent ones after a while; a real node still gets in."""
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.3)
    lines = [socket.create_connection((HERE, host.port), timeout=20) for _ in range(rendezvous.MAX_STRANGERS + 6)]
    others = [Joining(hello(rank), host.port) for rank in (1, 2)]
    host.gather_until(lambda: host.meeting.is_complete)
    assert len(host.meeting._peers) <= rendezvous.MAX_STRANGERS + 2
    host.meeting.end({"t": "go"})
    assert [other.ended() for other in others] == [None, None]
    for line in lines:
        line.close()


def forged(message: dict[str, Any], name: str) -> bytes:
    """As a launcher with another secret writes it."""
    return channel.sign(json.dumps(message).encode(), name=name, secret=ANOTHER) + b"\n"


def test_a_hello_with_another_secret(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts for nothing, and one signed for another connection neither."""
    monkeypatch.setenv(VARIABLE, "of this run")
    line = socket.create_connection((HERE, host.port), timeout=20)
    host.meeting.gather(within_s=0.2)
    challenge = rendezvous._receive(line, rendezvous.Welcome, key=rendezvous.WELCOME, within_s=5).challenge
    said = {"hello": {"node_rank": 1, "hostname": "x", "num_nodes": 3, "num_local": 2}, "nonce": "n"}
    old = rendezvous._frame(said, key="a challenge of long ago")
    another = forged(said, f"joining/{challenge}")
    for frame in (old, another):
        with socket.create_connection((HERE, host.port), timeout=20) as stranger:
            stranger.sendall(frame)
            host.meeting.gather(within_s=0.2)
    line.sendall(another)
    host.meeting.gather(within_s=0.2)
    assert host.meeting.hostnames == {0: "host0"}
    assert [notice for notice in host.notices if "not signed by this run" in notice] != []
    line.close()


def test_nobody_listens() -> None:
    """Within the deadline: host, port, and what to look at."""
    began_s = time.monotonic()
    port = free_port()
    other = Joining(hello(1), port, within_s=0.5)
    told = str(other.ended())
    assert time.monotonic() - began_s > 0.4
    assert told.startswith(f"node 0's launcher was not reached at {HERE}:{port} within 0.5 s: connection refused")
    assert [word for word in ("address:", "port:", "firewall:") if word not in told] == []
    assert other.notices == [f"waiting for node 0 at {HERE}:{port}: connection refused, nothing listens there"]


def test_no_such_host() -> None:
    """A name that means nothing here is said as such."""
    with pytest.raises(NotJoinedError, match=r"no such host\n  address: .*nowhere\.invalid is unknown here"):
        rendezvous.join(hello(1), host="nowhere.invalid", port=1, within_s=0.3, notice=lambda _text: None)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program, or another GPUCLUSTER_SECRET"),
        (b"x" * 100_000, "another program, or another GPUCLUSTER_SECRET"),
        (b'\n{"challenge": "x", "left_s": 1e300}\n', "another program, or another GPUCLUSTER_SECRET"),
        (b'\n{"challenge": 5}\n', "another program, or another GPUCLUSTER_SECRET"),
        (b"", "no answer"),
    ],
)
def test_something_else_answers(monkeypatch: pytest.MonkeyPatch, answer: bytes, problem: str) -> None:
    """Not waited for longer than the deadline, and told from a closed port."""
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.2)
    with socket.create_server((HERE, 0)) as server:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    held[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        other = Joining(hello(1), server.getsockname()[1], within_s=0.6)
        assert problem in str(other.ended())
    for line in held:
        line.close()


def test_another_secret_on_another_node(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without the run's secret is told so by what it reads."""
    monkeypatch.setattr(rendezvous, "_frame", lambda message, *, key: forged(message, key))
    other = Joining(hello(1), host.port, within_s=0.5)
    host.gather_until(lambda: not other.is_alive())
    assert "another GPUCLUSTER_SECRET" in str(other.ended())


def test_node_0_goes_away(host: Host) -> None:
    """A launcher that was ended takes nobody with it for long."""
    other = Joining(hello(1), host.port)
    host.gather_until(lambda: 1 in host.meeting.hostnames)
    host.meeting.close()
    assert "node 0 was reached, and then its launcher went away" in str(other.ended())


def test_node_0_never_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node 0 that hangs is not waited for longer than it said, and a margin."""
    monkeypatch.setattr(rendezvous, "MARGIN_S", 0.2)
    with socket.create_server((HERE, 0)) as server:
        other = Joining(hello(1), server.getsockname()[1])
        line, _ = server.accept()
        line.sendall(rendezvous._frame({"challenge": "x", "left_s": 0.1}, key=rendezvous.WELCOME))
        assert "its launcher went away (timed out)" in str(other.ended())
        line.close()


# Reports of a run that never began.


def meant(*arguments: str, num_local: int = 2, profile: str = "rehearsal") -> Session:
    """A run on two nodes, to be rehearsed."""
    job = Job(
        num_nodes=2,
        num_local=num_local,
        node_rank=0,
        master_addr=HERE,
        master_port=29500,
        hosts=(),
        within_s=3.0,
        pytest_arguments=(f"--gpucluster-profile={profile}", *arguments),
    )
    return absent_nodes.expect(job.rank_0, absent_nodes.read_options(job.pytest_arguments)[0])


def absence(**changes: Any) -> Absence:
    """The second of two did not come."""
    return Absence(**{"hostnames": {0: "a"}, "num_nodes": 2, "hosts": ("a", "b"), "waited_s": 3.0, **changes})


@pytest.mark.parametrize(
    ("changes", "told", "elsewhere"),
    [
        ({}, "node 1 (b) never joined within 3 s", "not run: node 1 never joined"),
        ({"hosts": ()}, "node 1 never joined within 3 s", "not run: node 1 never joined"),
        (
            {"num_nodes": 4, "hosts": (), "hostnames": {0: "a", 2: "c"}},
            "node 1 never joined within 3 s; node 3 never joined within 3 s",
            "not run: nodes 1, 3 never joined",
        ),
        (
            {"ended_by": "SIGTERM"},
            "ended by SIGTERM; node 1 (b) had not joined within 3 s",
            "not run: terminated by SIGTERM before all nodes had joined",
        ),
    ],
)
def test_who_is_absent_in_words(changes: dict[str, Any], told: str, elsewhere: str) -> None:
    """Each by node rank, with its hostname where that is known."""
    assert absence(**changes).text == told
    assert absence(**changes).reason_elsewhere == elsewhere


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        ({}, ["a", "b"]),
        ({"hosts": ("n10", "n9")}, ["a", "n9"]),
        ({"hosts": (), "num_nodes": 3, "hostnames": {0: "n10", 2: "n9"}}, ["n10", None, "n9"]),
        ({"hosts": ("a", "b"), "num_nodes": 2, "hostnames": {0: "n", 1: "n"}}, ["n", "n"]),
    ],
)
def test_which_places_are_whose(changes: dict[str, Any], hosts: list[str]) -> None:
    """By node rank, whoever is absent: the number of a node that did not come points to no other node."""
    found = absence(**changes)
    session = meant(f"--gpucluster-expect=nodes={found.num_nodes}")
    named = absent_nodes._named(session, found)
    assert [place.hostname for place in named if place.gpu is None] == hosts


@pytest.mark.parametrize(
    ("hosts", "value"),
    [
        ("gpu-08,gpu-09,gpu-10", "gpu-[08-10]"),
        ("n2,n1", "n2,n1"),
        ("head,n1", "head,n1"),
        ("10.0.0.7,10.0.0.8", "10.0.0.[7-8]"),
        ("fd00::7,fd00::8", "fd00::7,fd00::8"),
    ],
)
def test_the_list_goes_to_rank_0(hosts: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a variable, in the order of node ranks, in Slurm's short form where that keeps it."""
    number = str(hosts.count(",") + 1)
    where = ["--nnodes", number, "--nproc-per-node", "8", "--master-addr", "gpu-node-0", "--hosts", hosts]
    assert main.main(["launch", *where, "--", "-q"]) == 0
    exported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("export GPUCLUSTER_HOSTS=")]
    assert [shlex.split(line)[1] for line in exported] == [f"GPUCLUSTER_HOSTS={value}"]
    assert host_list.expand(value) == tuple(hosts.split(","))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"a\0b\nc\n", "'a\\x00b' is no hostname"), (b"a\nb\na\n", "'a' is there twice"), (b"\xef\xbb\xbfa\nb\n", "no hostname")],
)
def test_a_file_of_what_are_no_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str) -> None:
    """A NUL went as far as the lines to copy, and one host twice as far as a node that waits for ever."""
    (tmp_path / "hosts").write_bytes(content)
    words = ["--nnodes", "2", "--nproc-per-node", "8", "--hosts", str(tmp_path / "hosts")]
    assert main.main(["launch", "--show", "torchrun", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_no_list_goes_to_rank_0_without_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines to copy know no hosts then."""
    assert main.main(["launch", *NODES, "--", "-q"]) == 0
    assert "GPUCLUSTER_HOSTS" not in capsys.readouterr().err


def test_options_among_pytests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In both spellings, from PYTEST_ADDOPTS too, the last one counts; what is not ours is passed over."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q --gpucluster-level=soak --junitxml first.xml")
    found, junit = absent_nodes.read_options(
        ["-k", "x y", "--gpucluster-expect", "nodes=2", "-x", "--gpucluster-results=r", "a.py"]
    )
    assert (found.level, found.expect.nodes, found.results_dir) == ("soak", 2, tmp_path / "r")
    assert junit == tmp_path / "first.xml"
    assert absent_nodes.read_options(["--junit-xml=sub/x.xml"])[1] == tmp_path / "sub/x.xml"
    monkeypatch.delenv("PYTEST_ADDOPTS")
    assert absent_nodes.read_options(["-q"])[1] is None
    assert absent_nodes.read_options([])[0].results_dir == tmp_path / "gpucluster-results"


def test_reports(tmp_path: Path) -> None:
    """Everything expected is there: skipped by rule, or missing with the reason; the absent node is the culprit."""
    session = meant("--gpucluster-results=r")
    verdict = absent_nodes.write_reports(session, absence(), junit=tmp_path / "new" / "x.xml")
    assert verdict.word == "INCOMPLETE"
    found = json.loads((tmp_path / "r" / "results.json").read_text(encoding="utf-8"))
    jsonschema.validate(found, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    assert found["expected"] == {"nodes": 2, "gpus_per_node": 2}
    suite = read_suite(tmp_path / "new" / "x.xml")
    assert suite.get("hostname") == "a"
    cases = {(case.get("classname"), case.get("name")) for case in suite.iter("testcase")}
    assert ("test_compute", "test_bf16_tflops[node1-cpu0]") in cases
    assert ("test_stragglers", "test_straggler[node0-cpu0-bf16_tflops]") in cases
    assert ("gpucluster", "gpucluster.verdict") in cases
    missing = {
        (row["criterion"], row["place"] and row["place"]["id"]): row["reason"]
        for row in found["criteria"]
        if row["outcome"] == "missing"
    }
    assert {reason for (_, place), reason in missing.items() if str(place).startswith("node1")} == {
        "node 1 (b) never joined within 3 s"
    }
    assert {reason for (_, place), reason in missing.items() if not str(place).startswith("node1")} == {
        "not run: node 1 never joined"
    }
    assert {place for _, place in missing} >= {None, *(f"node{node}-cpu{rank}" for node in (0, 1) for rank in (0, 1))}
    assert {row["outcome"] for row in found["criteria"]} <= {"missing", "skipped"}
    assert [(row["kind"], row["place"]["id"], row["place"]["hostname"]) for row in found["culprits"]] == [
        ("node", "node1", "b")
    ]
    for file in (tmp_path / "new" / "x.xml", tmp_path / "r" / "junit.xml"):
        names = [case.name for case in cases_of(read_suite(file))]
        assert len(names) == len(set(names)) == len(found["criteria"]) + 1
        assert "test_bf16_tflops[node1-cpu1]" in names
        assert names[-1] == "gpucluster.verdict"


def test_the_journal_tells_the_same(tmp_path: Path) -> None:
    """``gpucluster report`` on it gives the same verdict; it is marked as finished."""
    session = meant()
    verdict = absent_nodes.write_reports(session, absence(), junit=None)
    folder = tmp_path / "gpucluster-results"
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert (events[:3], events[-1]) == (["started", "planned", "bound"], "verdict")
    assert rebuild(folder) == verdict


def test_the_expected_set_is_that_of_a_run(tmp_path: Path) -> None:
    """What the level leaves out is not selected, not missing; promised nodes beyond the launched ones are expected too."""
    site = (
        "schema: 1\nextends: packaged\nprofiles:\n  site: {inherits: rehearsal, accept_at: standard}\n"
        "criteria:\n  finetune_loss: {level: standard}\n"
    )
    (tmp_path / "site.yaml").write_text(site, encoding="utf-8")
    options = ("--gpucluster-thresholds=site.yaml", "--gpucluster-profile=site", "--gpucluster-level=quick")
    session = meant(*options, "--gpucluster-expect=nodes=3")
    absent_nodes.write_reports(session, absence(), junit=None)
    outcomes = {(row.criterion, row.place): row.outcome for row in session.plan}
    assert outcomes["finetune_loss", None] == "not_selected"
    assert outcomes["bf16_tflops", "node2-cpu0"] == "missing"
    reasons = {row.place: row.reason for row in session.plan if row.criterion == "bf16_tflops"}
    assert reasons["node2-cpu0"] == "not run: node 1 never joined"
    assert reasons["node1-cpu0"] == "node 1 (b) never joined within 3 s"


def test_a_results_directory_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The absent node is named all the same, and the exit code is no better."""
    (tmp_path / "file").touch()
    session = meant("--gpucluster-results=file/r")
    assert launch._report(session, absence(), junit=None) == 1
    assert "no reports: the results directory" in capsys.readouterr().err


def test_all_files_of_a_run_that_never_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Page, summary and the Pod's termination message name the absent node too; one that cannot be written is said."""
    session = meant("--gpucluster-termination-message=log", "--gpucluster-summary=summary.md")
    assert launch._report(session, absence(), junit=None) == 1
    message = (tmp_path / "log").read_text(encoding="utf-8")
    assert message.startswith("INCOMPLETE: ")
    assert "b is absent: 46 expected outcomes are missing with it" in message
    assert "b is absent" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    (tmp_path / "folder").mkdir()
    session = meant("--gpucluster-termination-message=folder", "--gpucluster-results=other")
    assert launch._report(session, absence(), junit=None) == 1
    assert "folder could not be written: Is a directory" in capsys.readouterr().err


def test_a_job_with_too_few_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node 0 waits its time, and says what the Job has to have."""
    for name, value in {"JOB_COMPLETION_INDEX": "0", "GPUCLUSTER_NODES": "3", "GPUCLUSTER_GPUS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PET_MASTER_ADDR", HERE)
    options = [f"--master-port={free_port()}", "--join-deadline-s=0.3"]
    assert main.main(["launch", "--run", *options, "--", "--gpucluster-profile=rehearsal"]) == 1
    said = capsys.readouterr().err
    assert "node 1 never joined within 0.3 s; node 2 never joined within 0.3 s" in said
    assert "completions and parallelism of the Job have to be 3 each" in said


def test_places_are_plain() -> None:
    """What the journal says of a place can be read back."""
    session = meant()
    named = absent_nodes._named(session, absence())
    assert {place.id: place.hostname for place in named if place.gpu is None} == {"node0": "a", "node1": "b"}
    assert all(isinstance(place, Place) for place in named)


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--nproc-per-node`` above the GPUs of node 0 is said before anybody waits."""
    monkeypatch.setattr("pytest_gpucluster.run_setup.detect_gpus", lambda: gpus(4))
    with pytest.raises(ConfigurationError, match="8 ranks on this node, which has 4 visible GPUs"):
        meant(num_local=8, profile="h200-sxm")


def gpus(number: int) -> Any:
    """What NVML shows on a node with H200."""
    from pytest_gpucluster.inventory.detect import Detected  # noqa: PLC0415 -- only here

    return Detected(names=("NVIDIA H200",) * number)
