"""Rows 8, 18 and 23: disks that refuse, and runs that meet in one results directory or one store."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from tests.support.mounts import NO_MOUNTS, can_mount, full, mounted
from tests.support.processes import command_of, free_port
from tests.support.reports import SCHEMA
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

RESULTS = "gpucluster-results"
ONE_PLACE = ("--gpucluster-expect", "nodes=1,gpus_per_node=1")
IN_USE = "is in use by another run; give this one its own: --gpucluster-results DIR"

# What the runs of this file measure: a value from the environment, at once or after a file named "go" is there.
SUITE = """
import os
import pathlib
import time

import pytest

def value(*, named=None):
    with open(f"ran-{os.environ['RANK']}", "a") as ran:
        ran.write("x")
    if named:
        pathlib.Path(f"asleep-{named}").touch()
    while named and not pathlib.Path("go").exists():
        time.sleep(0.02)
    return float(os.environ.get("VALUE", "1"))

@pytest.fixture(scope="session")
def values(cluster):
    return cluster.run(value, per="gpu", named=os.environ.get("WAIT_AS"), deadline_s=60)

def test_rate(values, place, criterion):
    criterion.require(values[place])

def test_after(criterion):
    criterion.require(2)
"""
LIMITS = {"rate": entry(per="gpu", min=1, unit="GB/s"), "after": entry(min=1)}


def written(starter: Starter) -> tuple[str, ...]:
    """Write the suite and its limits; the arguments of a run of it."""
    starter.write(test_value=SUITE)
    limits = write_limits(starter.folder / "limits.yaml", LIMITS, extends=False)
    return ("test_value.py", "--gpucluster", limits, "--junitxml=junit.xml")


@pytest.fixture
def chosen(starter: Starter) -> tuple[str, ...]:
    """The suite is written; the arguments of a run of it."""
    return written(starter)


def rows(launch: Launch, folder: str = RESULTS) -> dict[str, tuple[str, float | None]]:
    """(outcome, value) by criterion and place; results.json keeps its schema."""
    found = launch.results(folder)
    jsonschema.validate(found, SCHEMA)
    named = {row["criterion"] + (f"@{row['place']['id']}" if row["place"] else ""): row for row in found["criteria"]}
    assert len(named) == len(found["criteria"])
    return {name: (row["outcome"], row["value"]) for name, row in named.items()}


def said_once(launch: Launch, text: str) -> bool:
    """A clear error: one message, and no traceback with it."""
    return launch.output.count(text) == 1 and "Traceback" not in launch.output and "INTERNALERROR" not in launch.output


# Row 8: the disk


def refused(launch: Launch, path: str, why: str) -> None:
    """It ended by one usage error with the path and the disk's own words, and measured nothing."""
    assert launch.end(within_s=1) == 4, launch.output
    assert said_once(launch, "cannot be written"), launch.output
    line = next(line for line in launch.output.splitlines() if "cannot be written" in line)
    assert path in line
    assert why in line
    assert not list(launch.cwd.glob("ran-*"))


READ_ONLY = "mount --bind disk disk && mount -o remount,bind,ro disk"
REFUSED = {
    "a file in its place": "taken: File exists",
    "a file system without directories": "/proc/gpucluster: No such file or directory",
    "a read-only disk": "disk: Read-only file system",
    "a full disk": "disk: No space left on device",
}


@pytest.fixture(scope="module")
def refusing(shared_starter: Starter) -> dict[str, Launch]:
    """One run for each of those, at the same time; those that need a mount of their own only where that is allowed."""
    folder = shared_starter.folder
    (folder / "disk").mkdir()
    (folder / "disk" / "results.json").write_text("{}", encoding="utf-8")
    (folder / "taken").write_text("a person's own", encoding="utf-8")
    chosen = written(shared_starter)
    launches = {
        "a file in its place": shared_starter.pytest(*chosen, "--gpucluster-results", "taken"),
        "a file system without directories": shared_starter.pytest(*chosen, "--gpucluster-results", "/proc/gpucluster"),
    }
    if can_mount():
        launches["a read-only disk"] = mounted(shared_starter, READ_ONLY, *chosen, "--gpucluster-results", "disk")
        launches["a full disk"] = mounted(shared_starter, full("16k"), *chosen, "--gpucluster-results", "disk")
    for launch in launches.values():
        launch.end()
        launch.gone()
    return launches


@pytest.mark.parametrize("what", REFUSED)
def test_disk_that_refuses_from_the_start(what: str, refusing: dict[str, Launch]) -> None:
    """One usage error with the path and the disk's own words before anything is measured; what lay there is untouched."""
    if what not in refusing:
        pytest.skip(NO_MOUNTS)
    launch = refusing[what]
    refused(launch, *REFUSED[what].split(": "))
    assert (launch.cwd / "taken").read_text(encoding="utf-8") == "a person's own"
    assert [path.name for path in (launch.cwd / "disk").iterdir()] == ["results.json"]


def test_junit_file_that_cannot_be(starter: Starter, chosen: tuple[str, ...]) -> None:
    """``--junitxml`` below a file: said before anything is measured, not when the verdict is due."""
    (starter.folder / "taken").touch()
    launch = starter.pytest(*chosen, *ONE_PLACE, "--junitxml=taken/junit.xml")
    launch.end()
    launch.gone()
    refused(launch, "taken/junit.xml", "")


FILLING = """
import errno

import pytest

def one():
    return 1

def fill():
    print("said on a full disk " * 1000)
    with open("disk/filler", "wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"x" * 4096)
            except OSError as full:
                return full.errno

def test_before(cluster, place, criterion):
    criterion.require(list(cluster.run(one, per="gpu").values())[0])

def test_filled(cluster):
    assert set(cluster.run(fill, per="gpu", deadline_s=30).values()) == {errno.ENOSPC}

def test_after(cluster, place, criterion, record_property):
    record_property("remark", "x" * 20000)  # the JUnit file needs more room now than before the disk was full
    criterion.require(list(cluster.run(one, per="gpu").values())[0])
"""


@pytest.fixture(scope="module")
def filled(shared_starter: Starter) -> dict[str, Launch]:
    """Two runs at the same time, whose disk is full in the middle: the JUnit file on another disk, and on the same."""
    if not can_mount():
        pytest.skip(NO_MOUNTS)
    shared_starter.write(test_filling=FILLING)
    criteria = {name: entry(per="gpu") for name in ("before", "after")}
    limits = write_limits(shared_starter.folder / "filling.yaml", criteria, extends=False)
    arguments = ("test_filling.py", "--gpucluster", limits, *ONE_PLACE, "--gpucluster-results", "disk")
    launches = {
        where: mounted(shared_starter, full("600k"), *arguments, f"--junitxml={where}/junit.xml", kept=f"kept-{where}")
        for where in ("elsewhere", "disk")
    }
    for launch in launches.values():
        launch.end()
        launch.gone()
    return launches


@pytest.mark.parametrize("where", ["elsewhere", "disk"])
def test_disk_that_fills_during_the_run(where: str, filled: dict[str, Launch]) -> None:
    """The run goes on, the verdict is printed, the shell's status is not 0; nothing on the disk looks better than it was."""
    launch = filled[where]
    assert launch.end(within_s=1) == 1, launch.output
    assert "\nverdict REHEARSED: 3 passed" in launch.output
    assert "results are incomplete on disk: " in launch.output
    assert "No space left on device" in launch.output
    assert "Traceback" not in launch.output
    said = " ".join(launch.output.split())  # a long path has a line of its own
    assert "/disk incomplete, see above" in said, "what lies there is of the time before the disk was full"
    if where == "elsewhere":
        assert launch.junit("elsewhere/junit.xml") == {
            "test_before[node0-cpu0]": "passed",
            "test_filled": "passed",
            "test_after[node0-cpu0]": "passed",
            "gpucluster.verdict": "skipped",
        }
    kept = launch.results(f"kept-{where}")  # written before the disk was full
    assert kept["verdict"] == "INCOMPLETE"
    outcomes = [event["record"]["criterion"] for event in launch.journal(f"kept-{where}") if event["event"] == "outcome"]
    assert outcomes[:1] == ["before"]


SPOILING = """
import os
import pathlib
import resource
import shutil
import signal

FOLDER = pathlib.Path(os.environ["SPOILED"])

def one():
    return 1

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def remove():
    shutil.rmtree(FOLDER)

def replace_by_a_file():
    FOLDER.rename(FOLDER.with_name(f"{FOLDER.name}-moved"))
    FOLDER.touch()

def replace_by_a_new_folder():
    FOLDER.rename(FOLDER.with_name(f"{FOLDER.name}-moved"))
    FOLDER.mkdir()

def remove_the_journal():
    (FOLDER / "journal.jsonl").unlink()

def make_results_a_folder():
    (FOLDER / "results.json").unlink()
    (FOLDER / "results.json" / "full").mkdir(parents=True)

def limit_every_file():
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))

def limit_for_a_while():
    limit_every_file()

def replace_the_journal():
    text = (FOLDER / "journal.jsonl").read_bytes()
    (FOLDER / "journal.jsonl").unlink()
    (FOLDER / "journal.jsonl").write_bytes(text)

def test_before(cluster, place, criterion):
    criterion.require(list(cluster.run(one, per="gpu").values())[0])

def test_spoiled(cluster):
    globals()[os.environ["HOW"]]()
    assert cluster.run(die, per="gpu").errors  # the next call needs a new worker

def test_after(cluster, place, criterion):
    criterion.require(list(cluster.run(one, per="gpu").values())[0])

def test_at_the_end():
    if os.environ["HOW"] == "limit_for_a_while":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
SPOILED = {
    "remove": "No such file or directory",
    "replace_by_a_file": "Not a directory",
    "replace_by_a_new_folder": "journal.jsonl was removed or replaced meanwhile",
    "remove_the_journal": "journal.jsonl was removed or replaced meanwhile",
    "replace_the_journal": "journal.jsonl was removed or replaced meanwhile",
    "make_results_a_folder": "Is a directory",
    "limit_every_file": "File too large",
    "limit_for_a_while": "File too large",
}


@pytest.fixture(scope="module")
def spoiled(shared_starter: Starter) -> dict[str, Launch]:
    """One run for each kind, all at the same time; no mount is needed."""
    shared_starter.write(test_spoiling=SPOILING)
    criteria = {name: entry(per="gpu") for name in ("before", "after")}
    limits = write_limits(shared_starter.folder / "spoiling.yaml", criteria, extends=False)
    arguments = ("test_spoiling.py", "--gpucluster", limits, *ONE_PLACE)
    launches = {
        how: shared_starter.pytest(
            *arguments, f"--gpucluster-results=of-{how}", f"--junitxml={how}.xml", HOW=how, SPOILED=f"of-{how}"
        )
        for how in SPOILED
    }
    for launch in launches.values():
        launch.end()
        launch.gone()
    return launches


@pytest.mark.parametrize("how", SPOILED)
def test_results_that_are_spoiled_during_the_run(how: str, spoiled: dict[str, Launch]) -> None:
    """The run goes on, and measures; the verdict is printed with what is missing on disk; the shell's status is 1."""
    launch = spoiled[how]
    assert launch.end(within_s=1) == 1, launch.output
    assert "\nverdict REHEARSED: 4 passed" in launch.output
    assert "results are incomplete on disk: " in launch.output
    assert SPOILED[how] in launch.output
    assert "Traceback" not in launch.output
    assert "INTERNALERROR" not in launch.output
    if how != "limit_every_file":  # which is true of the JUnit file too
        assert launch.junit(f"{how}.xml")["test_after[node0-cpu0]"] == "passed"
        assert launch.junit(f"{how}.xml")["gpucluster.verdict"] == "skipped"


# Row 18: two runs, and what is left of a dead one


def in_its_call(launch: Launch, named: str) -> None:
    """Wait until the run is in the middle of its measurement."""
    launch.until((launch.cwd / f"asleep-{named}").exists, what="measurement")


def test_directory_of_another_run_and_of_an_older_one(starter: Starter, chosen: tuple[str, ...]) -> None:
    """An older run's files are kept apart, a person's stay; while this run holds the directory a second is refused."""
    folder = starter.folder / RESULTS
    (folder / "logs").mkdir(parents=True)
    older = {
        "journal.jsonl": '{"at_s": 1, "event": "started"}\n',
        "results.json": "{}",
        "junit.xml": "",
        "logs/rank0.log": "said",
    }
    for name, text in {**older, "notes.txt": "a person's own"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    first = starter.pytest(*chosen, *ONE_PLACE, VALUE="5", WAIT_AS="first")
    in_its_call(first, "first")
    second = starter.pytest(*chosen, "--junitxml=second.xml")
    assert second.end() == 4, second.output
    second.gone()
    assert said_once(second, IN_USE), second.output
    assert RESULTS in second.output
    (starter.folder / "go").touch()
    assert first.end() == 0, first.output
    first.gone()
    assert rows(first) == {"rate@node0-cpu0": ("passed", 5), "after": ("passed", 2)}
    assert first.junit()["gpucluster.verdict"] == "skipped"
    assert [event["event"] for event in first.journal()].count("started") == 1
    (shelf,) = (folder / "previous").iterdir()
    assert {name: (shelf / name).read_text(encoding="utf-8") for name in older} == older
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "journal.jsonl",
        "logs",
        "metrics.prom",
        "notes.txt",
        "previous",
        "report.html",
        "results.json",
    }
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "a person's own"


LATE_REPORT = """
import pathlib, sys, time

deadline = time.monotonic() + 15
while "report" in sys.orig_argv and not pathlib.Path("late").exists() and time.monotonic() < deadline:
    time.sleep(0.02)
"""


def test_ranks_of_a_dead_job_are_still_alive(starter: Starter, chosen: tuple[str, ...]) -> None:
    """A survivor of a killed job, late with its reports, writes nothing into the run that was started in its place.

    Or that run is refused, by name, until the survivor has gone.
    """
    (starter.folder / "late_report").mkdir()
    (starter.folder / "late_report" / "sitecustomize.py").write_text(LATE_REPORT, encoding="utf-8")
    path = os.pathsep.join((str(starter.folder / "late_report"), starter.environment["PYTHONPATH"]))
    dead = starter.torchrun(*chosen, ranks=1, VALUE="5", WAIT_AS="dead", PYTHONPATH=path)
    in_its_call(dead, "dead")
    dead.controller().kill()
    dead.until(lambda: any(" report " in command_of(p) for p in dead.alive()), what="deputy at work")
    os.kill(dead.pid, signal.SIGKILL)
    new = starter.pytest(*chosen, *ONE_PLACE, VALUE="7", WAIT_AS="new")
    asleep = starter.folder / "asleep-new"
    new.until(lambda: asleep.exists() or new.has_ended, what="measurement or refusal")
    (starter.folder / "late").touch()
    dead.gone(within_s=120)
    if not asleep.exists():
        assert new.end() == 4, new.output
        assert said_once(new, IN_USE), new.output
        assert rows(dead)["after"] == ("missing", None)
        return
    text = (starter.folder / RESULTS / "results.json").read_text(encoding="utf-8")
    (starter.folder / "go").touch()
    assert new.end() == 0, new.output
    new.gone()
    assert not json.loads(text)["environment"].get("rebuilt_from_journal"), "the dead job wrote into the new one's directory"
    assert rows(new) == {"rate@node0-cpu0": ("passed", 7), "after": ("passed", 2)}


def as_torchrun_does(port: int) -> dict[str, str]:
    """The variables of the only rank of a job whose store somebody else hosts."""
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**numbers, **address, "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.slow
def test_store_of_an_earlier_run(starter: Starter, chosen: tuple[str, ...]) -> None:
    """What an earlier run left in the store, signed with the same secret, is no answer to this one.

    Refused, or measured anew, never the old values.
    """
    from torch.distributed import TCPStore  # noqa: PLC0415 -- only this test needs torch

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**as_torchrun_does(store.port), "GPUCLUSTER_SECRET": "the same in both"}
    first = starter.pytest(*chosen, "--gpucluster-results", "first", VALUE="5", **variables)
    assert first.end() == 0, first.output
    assert rows(first, "first")["rate@node0-cpu0"] == ("passed", 5)
    second = starter.pytest(*chosen, "--gpucluster-results", "second", VALUE="0", **variables)
    assert second.end(within_s=100) != 0, second.output
    second.gone()
    if (starter.folder / "second" / "results.json").exists():
        assert rows(second, "second")["rate@node0-cpu0"] in (("failed", 0), ("error", None), ("missing", None))


# Row 23: torchrun starts the suite again by itself

SLOW_SECOND_ATTEMPT = """
import os, pathlib, time

def wait(holds, *, at_most):
    deadline = time.monotonic() + at_most
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)

def pytest_configure(config):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":  # rank 0 comes late: the other rank is an agent and serves by then
        wait(lambda: list(pathlib.Path(os.environ["TMPDIR"]).glob("gpucluster-rank1-*")), at_most=10)
        wait(lambda: len(pathlib.Path("ran-1").read_text()) > 1, at_most=2.5)
"""


@pytest.mark.slow
def test_restart_by_torchrun(starter: Starter, chosen: tuple[str, ...]) -> None:
    """The second attempt is refused by name, measures nothing on any rank, and the first one's reports stay as they were."""
    starter.write(conftest=SLOW_SECOND_ATTEMPT)
    options = ("--master-port", str(free_port()), "--max-restarts=1", "--monitor-interval=0.1")
    launch = starter.torchrun(*chosen, options=options, VALUE="0")
    assert launch.end(within_s=90) != 0, launch.output
    launch.gone()
    assert launch.output.count("this is restart 1 of torchrun") == 1
    assert launch.output.count("test session starts") == 1
    assert rows(launch) == {"rate@node0-cpu0": ("failed", 0), "rate@node0-cpu1": ("failed", 0), "after": ("passed", 2)}
    assert launch.results()["verdict"] == "REJECTED"
    assert not (starter.folder / RESULTS / "previous").exists()
    assert [event["event"] for event in launch.journal()].count("started") == 1
    assert launch.junit()["gpucluster.verdict"] == "failure"
    ran = {rank: (starter.folder / f"ran-{rank}").read_text(encoding="utf-8") for rank in (0, 1)}
    assert ran == {0: "x", 1: "x"}, "commands of the first attempt were obeyed in the second"
