"""Programs of the host, run under a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.program import ProgramError

LONG_S = 60.0


def script(folder: Path, text: str) -> str:
    """A shell script."""
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_what_was_printed_and_the_exit_code(tmp_path: Path) -> None:
    """The first line of either is the gist."""
    ended = program.run(script(tmp_path, "echo; echo one; echo two >&2; exit 226"), [], within_s=LONG_S)
    assert (ended.exit_code, ended.printed, ended.complained, ended.gist) == (226, "\none\n", "two\n", "one")
    assert program.run(script(tmp_path, "echo two >&2"), [], within_s=LONG_S).gist == "two"
    assert program.run(script(tmp_path, "exit 0"), [], within_s=LONG_S).gist == "it printed nothing"


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    """An outcome with its reason."""
    path = tmp_path / "tool"
    path.write_bytes(b"\x7fELF no program")
    path.chmod(0o755)
    with pytest.raises(ProgramError, match=r"tool diag cannot be started: .*Exec format error"):
        program.run(str(path), ["diag"], within_s=LONG_S)


def is_alive(pid: int) -> bool:
    """Whether a process is there that is more than a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("trap", ["", "trap '' TERM"], ids=["gentle", "stubborn"])
def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, trap: str) -> None:
    """At the deadline: by SIGTERM, so that it can undo what it began; by SIGKILL where that does not help."""
    made = script(tmp_path, f"{trap}\nsleep 1000 & echo $! > {tmp_path}/pids; echo $$ >> {tmp_path}/pids; wait; wait; wait")
    with pytest.raises(ProgramError, match="tool diag: no answer within 1 s, so it was ended"):
        program.run(made, ["diag"], within_s=1.0, grace_s=0.5)
    pids = [int(line) for line in (tmp_path / "pids").read_text(encoding="ascii").split()]
    deadline_s = time.monotonic() + LONG_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def test_a_helper_that_goes_on_holds_up_nothing(tmp_path: Path) -> None:
    """What the program left behind in its group ends with it, though it holds the output open."""
    made = script(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/pid; echo done")
    assert program.run(made, [], within_s=LONG_S).printed == "done\n"
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    deadline_s = time.monotonic() + LONG_S
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not is_alive(pid)


def test_far_too_much_output_is_cut(tmp_path: Path) -> None:
    """A report that long is none."""
    ended = program.run(script(tmp_path, "yes | head -c 5000000"), [], within_s=LONG_S)
    assert len(ended.printed) == program.MOST_BYTES


def test_variables_are_set_besides_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LC_ALL`` for its words, and what the site has set for it."""
    monkeypatch.setenv("OF_THE_SITE", "kept")
    made = script(tmp_path, 'echo "$OF_THE_SITE $LC_ALL"')
    ended = program.run_by_name(Path(made).name, [], within_s=LONG_S, path=str(tmp_path))
    assert isinstance(ended, program.Ended)
    assert ended.printed == "kept C\n"
    assert program.run(made, [], within_s=LONG_S, environment={"OF_THE_SITE": "alone"}).printed == "alone \n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the process that is left
def test_one_that_even_a_kill_does_not_end_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that does not answer: the error comes all the same."""
    monkeypatch.setattr(program, "KILLED_S", 0.2)
    monkeypatch.setattr(program.os, "killpg", lambda _pid, _number: None)
    made = script(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    try:
        with pytest.raises(ProgramError, match=r"no answer within 0\.5 s"):
            program.run(made, [], within_s=0.5)
    finally:
        pid, deadline_s = tmp_path / "pid", time.monotonic() + LONG_S
        while not (pid.exists() and pid.read_text(encoding="ascii").strip()) and time.monotonic() < deadline_s:
            time.sleep(0.02)  # half a second may be too short for the shell to begin
        os.kill(int(pid.read_text(encoding="ascii")), signal.SIGKILL)
