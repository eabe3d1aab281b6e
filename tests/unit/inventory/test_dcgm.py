"""``dcgmi`` found, run under a deadline, and asked for its GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from pytest_gpucluster.inventory import dcgm
from pytest_gpucluster.inventory.dcgm import DcgmError, DcgmGpu
from tests.support.dcgm import NO_ENGINE, discovery, install

UUIDS = {0: "GPU-934a71d6-e50c-86a3-f752-3743a8c1bbb2", 3: "GPU-34bf77d1-c686-6821-79a8-32d326c5039c"}
LONG_S = 60.0
CPUS = """1 CPU found.
+--------+----------------------------------------------------------------------+
| CPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: Grace                                                          |
+--------+----------------------------------------------------------------------+
"""


def program(folder: Path, text: str) -> str:
    """A script in place of ``dcgmi``."""
    path = folder / "dcgmi"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_numbers_and_uuids_of_the_table() -> None:
    """DCGM's numbers, which may have gaps; switches and CPUs are no GPUs."""
    found = dcgm.parse_discovery(discovery(UUIDS) + CPUS)
    assert found == [DcgmGpu(number=number, uuid=uuid) for number, uuid in UUIDS.items()]


def test_a_gpu_without_a_uuid_is_left_out() -> None:
    """As DCGM shows one that it cannot ask any more."""
    lost = discovery(UUIDS).replace("Device UUID: GPU-934a", "Return: GPU is lost  ")
    assert [gpu.number for gpu in dcgm.parse_discovery(lost)] == [3]


def test_one_uuid_twice_is_refused() -> None:
    """Nobody could tell which of them a result is about."""
    with pytest.raises(DcgmError, match="two GPUs one number"):
        dcgm.parse_discovery(discovery({0: UUIDS[0], 1: UUIDS[0]}))


def test_without_the_host_engine(tmp_path: Path) -> None:
    """What ``dcgmi`` said, and what to look for."""
    made = install(tmp_path / "bin", uuids=UUIDS, report="", before=NO_ENGINE) / "dcgmi"
    with pytest.raises(DcgmError, match=r"exit code 235: Error: unable to establish .* nv-hostengine"):
        dcgm.read_gpus(str(made), within_s=LONG_S)


def test_the_version(tmp_path: Path) -> None:
    """From the program; None where it says nothing that is one."""
    made = install(tmp_path / "bin", uuids=UUIDS, report="") / "dcgmi"
    assert dcgm.read_version(str(made), within_s=LONG_S) == "3.3.9"
    assert dcgm.read_version(program(tmp_path, "echo what?"), within_s=LONG_S) is None


def test_what_was_printed_and_the_exit_code(tmp_path: Path) -> None:
    """The first line of either is the gist."""
    ended = dcgm.run(program(tmp_path, "echo; echo one; echo two >&2; exit 226"), [], within_s=LONG_S)
    assert (ended.exit_code, ended.printed, ended.complained, ended.gist) == (226, "\none\n", "two\n", "one")
    assert dcgm.run(program(tmp_path, "echo two >&2"), [], within_s=LONG_S).gist == "two"
    assert dcgm.run(program(tmp_path, "exit 0"), [], within_s=LONG_S).gist == "it printed nothing"


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    """An outcome with its reason."""
    path = tmp_path / "dcgmi"
    path.write_bytes(b"\x7fELF no program")
    path.chmod(0o755)
    with pytest.raises(DcgmError, match=r"dcgmi diag cannot be started: .*Exec format error"):
        dcgm.run(str(path), ["diag"], within_s=LONG_S)


def is_alive(pid: int) -> bool:
    """Whether a process is there that is more than a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("trap", ["", "trap '' TERM"], ids=["gentle", "stubborn"])
def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, trap: str) -> None:
    """At the deadline: by SIGTERM, so that it stops the host engine's test; by SIGKILL where that does not help."""
    made = program(tmp_path, f"{trap}\nsleep 1000 & echo $! > {tmp_path}/pids; echo $$ >> {tmp_path}/pids; wait; wait; wait")
    with pytest.raises(DcgmError, match="dcgmi diag did not end within 1 s and was ended"):
        dcgm.run(made, ["diag"], within_s=1.0, grace_s=0.5)
    pids = [int(line) for line in (tmp_path / "pids").read_text(encoding="ascii").split()]
    deadline_s = time.monotonic() + LONG_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def test_a_helper_that_goes_on_holds_up_nothing(tmp_path: Path) -> None:
    """What the program left behind in its group ends with it, though it holds the output open."""
    made = program(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; echo done")
    assert dcgm.run(made, [], within_s=LONG_S).printed == "done\n"
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    deadline_s = time.monotonic() + LONG_S
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_far_too_much_output_is_cut(tmp_path: Path) -> None:
    """A report that long is none."""
    ended = dcgm.run(program(tmp_path, "yes | head -c 5000000"), [], within_s=LONG_S)
    assert len(ended.printed) == dcgm.MOST_BYTES


def test_whether_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH, and executable."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert dcgm.find_program() is None
    made = program(tmp_path, "exit 0")
    assert dcgm.find_program() == made
