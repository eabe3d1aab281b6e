"""Whole runs on a simulated host whose driver reports errors (Xids) during the run, each beside a healthy twin."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest
import yaml

from pytest_gpucluster.inventory.error_codes import ACTIONS, xid_of
from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment, python_path
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import PLANTS, RUN_S, collect
from tests.support.strangers import AS_ROOT, STRANGER

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

Kind: TypeAlias = Literal["test", "worker", "late", "deaf", "stranger"]
KEY = "xid_during_run"
FIRST = "gpu_count"
"""Judged before ``test_between``, so the run has begun by then, as in a whole suite."""
GREEN = {"node0-gpu0": "passed", "node0-gpu1": "passed"}
BETWEEN = """\
    import contextlib
    import multiprocessing
    import os
    import signal
    import socket
    import time
    from pathlib import Path
    import pytest
    from pytest_gpucluster.protocol import node_events
    from pytest_gpucluster.protocol.functions import without_device
    from tests.support.nvml_simulator import plant

    @without_device
    def happen(*, scenario, end):
        plant(os.environ, scenario)
        time.sleep(2)  # until the listener has heard of it
        if end:
            os.abort()

    @without_device
    def kill_the_listener():
        name = "@" + os.environ[node_events.VARIABLE]
        heard = node_events.ask(name[1:]).to_json().decode()
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        inode = next(line[6] for line in lines if line[7:] == [name])
        for fd in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                is_its = os.readlink(fd) == f"socket:[{{inode}}]"
            except OSError:
                continue
            if is_its:
                os.kill(int(fd.parts[2]), signal.SIGKILL)
                return name, heard

    def become_its_listener(name, heard):
        parent, child = multiprocessing.Pipe()
        if os.fork() == 0:
            try:
                os.setuid({stranger})
                taking = socket.socket(socket.AF_UNIX)
                for _ in range(600):
                    try:
                        taking.bind("\\0" + name[1:])
                    except OSError:  # on a busy machine, what was killed has it for a moment
                        time.sleep(0.1)
                    else:
                        break
                taking.listen()
                child.send_bytes(b"listens")
                while True:
                    line, _ = taking.accept()
                    with line:
                        with contextlib.suppress(OSError):
                            line.settimeout(0.5)
                            line.recv(4096)
                        with contextlib.suppress(OSError):
                            line.sendall(heard.encode())
            finally:
                os._exit(1)
        child.close()  # where the other ends without a word, so does this
        assert parent.poll(120)
        assert parent.recv_bytes() == b"listens"

    @pytest.mark.health
    def test_between(request):
        if {kind!r} in ("deaf", "stranger"):
            cluster = request.getfixturevalue("cluster")
            killed = cluster.run(kill_the_listener, per="gpu", places=[cluster.places[0]])
            assert killed[cluster.places[0]] is not None
            if {kind!r} == "stranger":
                become_its_listener(*killed[cluster.places[0]])
            happen(scenario={scenario!r}, end=False)
        elif {kind!r} == "worker":
            cluster = request.getfixturevalue("cluster")
            errors = cluster.run(happen, per="gpu", places=[cluster.places[1]], scenario={scenario!r}, end=True).errors
            assert "SIGABRT" in str([*errors.values()])
        else:
            happen(scenario={scenario!r}, end=False)
    """


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def limits() -> dict[str, Any]:
    """The packaged entries alone."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    return {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {key: {**packaged[key], "profiles": {}} for key in (FIRST, KEY)},
    }


def run(folder: Path, library: Path, *, begin: str = "count 2\n", between: str = "", kind: Kind = "test") -> FinishedRun:
    """The criterion on the GPUs of ``begin``; a test of the run, or a worker of GPU 1 that dies of it, adds ``between``.

    In a deaf run, the test kills the node's listener first. In a stranger's, another user then takes its name, and says what
    it said: nothing was heard.

    The test is collected first, is one of health and asks for no GPU. In a late run, none of ours can run before it.
    """
    (folder / "limits.yaml").write_text(json.dumps(limits()), encoding="utf-8")
    text = textwrap.dedent(BETWEEN).format(kind=kind, scenario=f"{between}\n{begin}", stranger=STRANGER)
    (folder / "test_between.py").write_text(text, encoding="utf-8")
    names = f"{KEY} or between" if kind == "late" else f"{FIRST} or {KEY} or between"
    chosen = ("test_between.py", f"{ACCEPTANCE}/test_health.py", "-k", names)
    options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    variables = {**environment(measured=True), **with_gpus(library, begin), "PYTHONPATH": python_path(PLANTS)}
    launch = Launch(command=[*PYTEST, *chosen, *options], cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def test_nothing_is_reported(tmp_path: Path, library: Path) -> None:
    """Codes from before the run, and a test message in it: ACCEPTED."""
    ran = run(tmp_path, library, begin="count 2\nxids 1:79\n", between="xids 1:79 1:106")
    assert ran.outcomes(KEY) == GREEN, ran.stdout
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)


@pytest.mark.parametrize(
    ("xids", "codes", "advice"),
    [
        ("1:79", (79,), xid_of(79).action),
        pytest.param("1:48 1:48", (48,), ACTIONS["Xid"]["reset"], marks=pytest.mark.slow),
        pytest.param("1:74", (74,), xid_of(74).action, marks=pytest.mark.slow),
        pytest.param("1:119", (119,), ACTIONS["Xid"]["reset"], marks=pytest.mark.slow),
        pytest.param("1:43", (43,), xid_of(43).action, marks=pytest.mark.slow),
        pytest.param("1:999", (999,), ACTIONS["Xid"]["vendor"], marks=pytest.mark.slow),
        pytest.param("1:43 1:95", (43, 95), ACTIONS["Xid"]["reset"], marks=pytest.mark.slow),
    ],
)
def test_one_gpu(tmp_path: Path, library: Path, xids: str, codes: tuple[int, ...], advice: str) -> None:
    """The GPU that is named fails, with the meaning of each code and what to do; the other one is green."""
    ran = run(tmp_path, library, between=f"xids {xids}")
    assert ran.outcomes(KEY) == {**GREEN, "node0-gpu1": "failed"}, ran.stdout
    row = ran.row(KEY, "node0-gpu1")
    assert row["value"] == len(xids.split())
    assert all(str(xid_of(code)) in str(row["evidence"]["found"]) for code in codes)
    assert f"next: {advice}" in row["reason"]
    assert ran.results["verdict"] != "ACCEPTED"


@pytest.mark.parametrize(
    ("xids", "outcome"),
    [
        pytest.param("1:43", "passed", marks=pytest.mark.slow),
        ("1:45 1:43", "passed"),
        pytest.param("1:43 1:79", "failed", marks=pytest.mark.slow),
        pytest.param("0:43", None, marks=pytest.mark.slow),
    ],
)
def test_a_worker_of_our_own_dies(tmp_path: Path, library: Path, xids: str, outcome: str | None) -> None:
    """Its own codes are no fault of the GPU; a code of hardware is, and so is any code of another GPU."""
    ran = run(tmp_path, library, between=f"xids {xids}", kind="worker")
    bad = {"node0-gpu0": "failed"} if outcome is None else {"node0-gpu1": outcome}
    assert ran.outcomes(KEY) == {**GREEN, **bad}, ran.stdout


def test_a_link_that_took_other_gpus_along(tmp_path: Path, library: Path) -> None:
    """The GPU whose link went down is the one culprit of all."""
    ran = run(tmp_path, library, begin="count 4\n", between="xids 0:145 1:145 2:149 3:145")
    assert set(ran.outcomes(KEY).values()) == {"failed"}, ran.stdout
    (culprit,) = ran.results["culprits"]
    assert culprit["place"]["id"] == "node0-gpu2"
    assert "Xid 149" in str(culprit["evidence"])
    assert ACTIONS["Xid"]["link"] in ran.row(KEY, "node0-gpu0")["reason"]


def test_errors_of_nvlink_without_a_kernel_log(tmp_path: Path, library: Path) -> None:
    """NVML does not say whether they are fatal: an ERROR of each GPU that had one, and no part is named."""
    ran = run(tmp_path, library, begin="count 4\n", between="xids 0:145 1:145 2:149")
    assert ran.outcomes(KEY) == {**{f"node0-gpu{gpu}": "error" for gpu in range(3)}, "node0-gpu3": "passed"}, ran.stdout
    assert (ran.results["verdict"], ran.results["culprits"]) == ("INCOMPLETE", [])
    assert "its severity is unknown, not readable without the kernel log" in ran.row(KEY, "node0-gpu2")["reason"]


@pytest.mark.parametrize(
    ("begin", "between", "bad"),
    [
        ("err.nvmlEventSetCreate 3", "", ("node0-gpu0", "node0-gpu1")),
        pytest.param("1.err.nvmlDeviceRegisterEvents 3", "", ("node0-gpu1",), marks=pytest.mark.slow),
        pytest.param("", "err.nvmlEventSetWait 3", ("node0-gpu0", "node0-gpu1"), marks=pytest.mark.slow),
    ],
)
def test_nobody_listens(tmp_path: Path, library: Path, begin: str, between: str, bad: tuple[str, ...]) -> None:
    """What was not heard is an error with its reason, never a pass."""
    ran = run(tmp_path, library, begin=f"count 2\n{begin}\n", between=between)
    assert ran.outcomes(KEY) == {**GREEN, **dict.fromkeys(bad, "error")}, ran.stdout
    assert all("Not Supported" in ran.row(KEY, place)["reason"] for place in bad)


@pytest.mark.parametrize("between", [pytest.param("", marks=pytest.mark.slow), "xids 1:79"])
def test_the_listener_is_killed(tmp_path: Path, library: Path, between: str) -> None:
    """Nobody knows what came then, on any GPU of the node."""
    ran = run(tmp_path, library, between=between, kind="deaf")
    assert ran.outcomes(KEY) == dict.fromkeys(GREEN, "error"), ran.stdout
    assert all("the listener of this node does not answer" in ran.row(KEY, place)["reason"] for place in GREEN)
    assert (ran.results["verdict"], ran.returncode != 0) == ("INCOMPLETE", True), ran.stdout


@AS_ROOT
def test_another_user_speaks_for_the_listener(tmp_path: Path, library: Path) -> None:
    """He is not believed: an error that names him, and no GPU with an Xid is accepted."""
    ran = run(tmp_path, library, between="xids 1:79", kind="stranger")
    assert ran.outcomes(KEY) == dict.fromkeys(GREEN, "error"), ran.stdout
    assert all(f"user {STRANGER} has taken its name" in ran.row(KEY, place)["reason"] for place in GREEN)
    assert (ran.results["verdict"], ran.returncode != 0) == ("INCOMPLETE", True), ran.stdout


def test_a_test_of_another_folder_that_runs_first(tmp_path: Path, library: Path) -> None:
    """The listener is heard before it, so what the driver reported while it ran is judged."""
    ran = run(tmp_path, library, between="xids 1:79", kind="late")
    assert ran.outcomes(KEY) == {**GREEN, "node0-gpu1": "failed"}, ran.stdout
