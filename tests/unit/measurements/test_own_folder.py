"""A run's own folder below a path of the user's: made, removed, removed by the next run; and nothing else is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.measurements import own_folder as module
from pytest_gpucluster.measurements.own_folder import (
    make_own_folder,
    name_of,
    remove_leftovers,
    remove_own_folder,
    within_own_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

RUN = "0123456789abcdef"
OTHER = "fedcba9876543210"
CHILD = """
import sys, time
from pathlib import Path
from pytest_gpucluster.measurements import own_folder
own_folder.os.getppid = own_folder.os.getpid  # this process stands for the parent of a worker
made = own_folder.make_own_folder(Path(sys.argv[1]), sys.argv[2])
(made / "big").write_text("x")
print("made", flush=True)
time.sleep(600)
"""


def test_made_and_removed(tmp_path: Path) -> None:
    """For this user only; making it again changes nothing, and removing it twice neither."""
    made = make_own_folder(tmp_path, RUN)
    assert (made.name, made.stat().st_mode & 0o777) == (name_of(RUN, 0), 0o700)
    (made / "file").write_text("x")
    assert make_own_folder(tmp_path, RUN) == made
    assert (made / "file").exists()
    remove_own_folder(tmp_path, RUN)
    remove_own_folder(tmp_path, RUN)
    assert list(tmp_path.iterdir()) == []


def test_removed_after_an_error(tmp_path: Path) -> None:
    """Whatever happens within."""

    def fail() -> None:
        with within_own_folder(tmp_path, RUN) as own:
            (own / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_s_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    """While the process lives its folder stays, whoever else looks; once it was killed the next run removes it."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), OTHER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "made\n"
        assert remove_leftovers(tmp_path) == []
        assert (tmp_path / name_of(OTHER, 0) / "big").exists()
    finally:
        child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and its status not fetched
    assert remove_leftovers(tmp_path) == [name_of(OTHER, 0)]
    child.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_is_used_again(tmp_path: Path) -> None:
    """A live process with another start time is another process."""
    made = make_own_folder(tmp_path, RUN)
    owner = json.loads((made / "owner.json").read_text())
    (made / "owner.json").write_text(json.dumps({**owner, "started": "1"}))
    assert remove_leftovers(tmp_path) == [made.name]


@pytest.mark.parametrize("part", ["boot", "pids"])
def test_another_host_s_folder(tmp_path: Path, part: str) -> None:
    """Of its processes nothing is known here, so its folder stays for a day."""
    made = make_own_folder(tmp_path, RUN)
    owner = json.loads((made / "owner.json").read_text())
    (made / "owner.json").write_text(json.dumps({**owner, "pid": "999999999", part: "elsewhere"}))
    assert remove_leftovers(tmp_path) == []
    old_s = time.time() - 2 * module.ABANDONED_S
    for path in (made / "owner.json", made):
        os.utime(path, (old_s, old_s))
    assert remove_leftovers(tmp_path) == [made.name]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Other names, links, files and folders without an owner: not even if they are called like ours."""
    (tmp_path / "users").mkdir()
    (tmp_path / ".gpucluster-results").mkdir()
    (tmp_path / "users" / "file").write_text("x")
    (tmp_path / name_of(OTHER, 1)).symlink_to(tmp_path / "users")
    (tmp_path / name_of(OTHER, 2)).write_text("a file")
    (tmp_path / name_of(OTHER, 3)).mkdir()
    (tmp_path / name_of(OTHER, 4)).mkdir()
    (tmp_path / name_of(OTHER, 4) / "owner.json").write_text("[1]")
    (tmp_path / f"{name_of(OTHER, 5)}.bak").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert remove_leftovers(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_links_within_are_not_followed(tmp_path: Path) -> None:
    """What a link in our folder points to stays."""
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "file").write_text("x")
    made = make_own_folder(tmp_path, RUN)
    (made / "link").symlink_to(tmp_path / "users")
    remove_own_folder(tmp_path, RUN)
    assert (tmp_path / "users" / "file").exists()
