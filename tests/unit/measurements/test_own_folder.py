"""A run's own folder below a path of the user's: made, removed, removed by the next run; and nothing else is touched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.measurements import own_folder as module
from pytest_gpucluster.measurements.own_folder import (
    Folder,
    NotOwnFolderError,
    find_own_folder,
    make_own_folder,
    name_of,
    open_noted,
    remove_leftovers,
    remove_own_folder,
    within_own_folder,
)
from tests.support.strangers import AS_ROOT, STRANGER, stranger

if TYPE_CHECKING:
    from collections.abc import Callable

    Chmod = Callable[[int, int], None]

RUN = "0123456789abcdef"
OTHER = "fedcba9876543210"
CHILD = """
import sys, time
from pathlib import Path
from pytest_gpucluster.measurements import own_folder
own_folder.os.getppid = own_folder.os.getpid  # this process stands for the parent of a worker
made = own_folder.make_own_folder(Path(sys.argv[1]), sys.argv[2])
(made.path / "big").write_text("x")
print(made.path.name, flush=True)
time.sleep(600)
"""


def made_in(path: Path, **note: str) -> Path:
    """A folder of this rank's own, with another note."""
    with make_own_folder(path, RUN) as made:
        owner = json.loads((made.path / "owner.json").read_text())
        (made.path / "owner.json").write_text(json.dumps({**owner, **note}))
        return made.path


def test_made_and_removed(tmp_path: Path) -> None:
    """For this user only, under a name that nobody knows before; found again by its run."""
    with make_own_folder(tmp_path, RUN) as made, make_own_folder(tmp_path, OTHER) as other:
        assert re.fullmatch(r"\.gpucluster-[0-9a-f]{16}-rank0", made.path.name)
        assert RUN not in made.path.name
        assert made.path.stat().st_mode & 0o777 == 0o700
        (made.path / "file").write_text("x")
        found = find_own_folder(tmp_path, RUN)
        assert found is not None
        with found:
            assert found.path == made.path
        remove_own_folder(made)
        assert find_own_folder(tmp_path, RUN) is None
        assert list(tmp_path.iterdir()) == [other.path]


def test_another_rank_s_folder_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own, also in one run."""
    with make_own_folder(tmp_path, RUN):
        monkeypatch.setenv("RANK", "1")
        assert find_own_folder(tmp_path, RUN) is None
        assert find_own_folder(tmp_path / "none", RUN) is None


def test_removed_after_an_error(tmp_path: Path) -> None:
    """Whatever happens within."""

    def fail() -> None:
        with within_own_folder(tmp_path) as own:
            (own.path / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, and no folder stays that nobody would ever remove."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.json, "dump", refuse)
    with pytest.raises(OSError, match="No space left"):
        make_own_folder(tmp_path, RUN)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_s_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    """While the process lives its folder stays, whoever else looks; once it was killed the next run removes it."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), OTHER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert remove_leftovers(tmp_path) == []
        assert (tmp_path / name / "big").exists()
    finally:
        child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and its status not fetched
    assert remove_leftovers(tmp_path) == [name]
    child.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_is_used_again(tmp_path: Path) -> None:
    """A live process with another start time is another process."""
    made = made_in(tmp_path, started="1")
    assert remove_leftovers(tmp_path) == [made.name]


@pytest.mark.parametrize("part", ["boot", "pids"])
def test_another_host_s_folder(tmp_path: Path, part: str) -> None:
    """Of its processes nothing is known here, so its folder stays for a day."""
    made = made_in(tmp_path, pid="999999999", **{part: "elsewhere"})
    assert remove_leftovers(tmp_path) == []
    old_s = time.time() - 2 * module.ABANDONED_S
    for path in (made / "owner.json", made):
        os.utime(path, (old_s, old_s))
    assert remove_leftovers(tmp_path) == [made.name]


@pytest.mark.parametrize("changes", [{}, {"boot": "elsewhere"}], ids=["this host's", "another host's"])
@pytest.mark.parametrize("ahead_s", [3600.0, 2 * module.ABANDONED_S, 400 * 86400.0])
def test_a_clock_that_is_ahead_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float, changes: dict[str, str]
) -> None:
    """The folder of a live process stays, however late it is by the clock of this host."""
    made = made_in(tmp_path, **changes)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
    assert remove_leftovers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [made.name]


def test_a_live_process_keeps_an_old_folder(tmp_path: Path) -> None:
    """A soak of two days, or a clock of the file system that was set: its process is here, and says more than a date."""
    made = made_in(tmp_path)
    old_s = time.time() - 2 * module.ABANDONED_S
    for path in (made / "owner.json", made):
        os.utime(path, (old_s, old_s))
    assert remove_leftovers(tmp_path) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """Other names, links, files, and folders without their own note: however old, and even if they are called like ours."""
    (tmp_path / "users").mkdir()
    (tmp_path / ".gpucluster-results").mkdir()
    (tmp_path / "users" / "file").write_text("x")
    (tmp_path / name_of(OTHER, 1)).symlink_to(tmp_path / "users")
    (tmp_path / name_of(OTHER, 2)).write_text("a file")
    (tmp_path / name_of(OTHER, 3)).mkdir()
    for rank, note in enumerate(("[1]", "{}", "", json.dumps({"pid": "1"})), start=4):
        (tmp_path / name_of(OTHER, rank)).mkdir()
        (tmp_path / name_of(OTHER, rank) / "owner.json").write_text(note)
    (tmp_path / f"{name_of(OTHER, 9)}.bak").mkdir()
    made_in(tmp_path, started="1").rename(tmp_path / name_of(OTHER, 10))
    old_s = time.time() - 2 * module.ABANDONED_S
    before = sorted(tmp_path.rglob("*"))
    for path in before:
        os.utime(path, (old_s, old_s), follow_symlinks=False)
    assert remove_leftovers(tmp_path) == []
    assert find_own_folder(tmp_path, RUN) is None
    assert sorted(tmp_path.rglob("*")) == before


# Links, and folders of others.


def user_s_file(path: Path) -> Path:
    """What no link may lead to."""
    (path / "users").mkdir()
    (path / "users" / "file").write_text("x")
    return path / "users" / "file"


@pytest.mark.parametrize("remove", ["its own", "left over"])
def test_links_within_are_not_followed(tmp_path: Path, remove: str) -> None:
    """What a link in our folder points to stays."""
    file = user_s_file(tmp_path)
    made = made_in(tmp_path, started="1")
    (made / "folder").symlink_to(file.parent)
    (made / "file").symlink_to(file)
    if remove == "its own":
        with open_noted(made, RUN) as own:
            remove_own_folder(own)
    else:
        assert remove_leftovers(tmp_path) == [made.name]
    assert not made.exists()
    assert file.read_text() == "x"


@pytest.mark.parametrize("mode", ["xb", "wb", "r+b", "rb"])
@pytest.mark.parametrize("plant", [lambda path, file: path.symlink_to(file), lambda path, _: path.symlink_to("new")])
def test_a_file_that_is_a_link(tmp_path: Path, mode: str, plant: Callable[[Path, Path], None]) -> None:
    """Neither read nor written, whether the link leads somewhere or not."""
    file = user_s_file(tmp_path)
    with make_own_folder(tmp_path, RUN) as own:
        plant(own.path / "mark", file)
        with pytest.raises(OSError, match=r"File exists|Too many levels of symbolic links"):
            own.file("mark", mode)
        assert not (own.path / "new").exists()
    assert file.read_text() == "x"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Neither as a file nor as a note."""
    (tmp_path / name_of(OTHER, 0)).mkdir()
    os.mkfifo(tmp_path / name_of(OTHER, 0) / "owner.json")
    assert remove_leftovers(tmp_path) == []
    with Folder(tmp_path / name_of(OTHER, 0)) as found, pytest.raises(OSError, match="it is a pipe"):
        found.read("owner.json", 1)


@pytest.mark.parametrize("plant", ["folder", "link to a folder", "link to nothing", "file"])
def test_a_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """Whoever guessed it: an error that names it, and what is there stays as it is."""
    file, taken = user_s_file(tmp_path), tmp_path / name_of(OTHER, 0)
    if plant == "folder":
        taken.mkdir()
        (taken / "owner.json").symlink_to(file)
    elif plant == "file":
        taken.write_text("a file")
    else:
        taken.symlink_to(file.parent if plant == "link to a folder" else "nothing")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(secrets, "token_hex", lambda _bytes: OTHER)
    with pytest.raises(NotOwnFolderError, match=f"{taken} is there already"):
        make_own_folder(tmp_path, RUN)
    assert sorted(tmp_path.rglob("*")) == before
    assert file.read_text() == "x"


def swapped(folder: Path, plant: Callable[[Path], None]) -> None:
    """Move a folder away and put something in its place, as others can where no sticky bit is set."""
    folder.rename(folder.with_suffix(".away"))
    plant(folder)


def link_to_users(folder: Path) -> None:
    """A link to a folder of the user's."""
    folder.symlink_to(folder.parent / "users")


def users_folder(folder: Path) -> None:
    """A folder of the user's, with another name."""
    (folder.parent / "users").rename(folder)


def folder_of_a_stranger(folder: Path) -> None:
    """An empty folder of another user."""
    folder.mkdir(mode=0o777)
    os.chown(folder, STRANGER, STRANGER)


SWAPS = [link_to_users, users_folder, pytest.param(folder_of_a_stranger, marks=AS_ROOT)]


@pytest.mark.parametrize("plant", SWAPS)
def test_swapped_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None]) -> None:
    """Between mkdir and open: an error that names it, and nothing is written or removed there."""
    content = user_s_file(tmp_path).read_text()
    make = Path.mkdir

    def make_and_swap(folder: Path, **options: Any) -> None:
        make(folder, **options)
        monkeypatch.undo()
        swapped(folder, plant)

    monkeypatch.setattr(Path, "mkdir", make_and_swap)
    with pytest.raises(NotOwnFolderError, match=rf"{tmp_path}/\.gpucluster-\w+-rank0 (is|belongs)"):
        make_own_folder(tmp_path, RUN)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [(file.name, file.read_text()) for file in files] == [("file", content)]


@pytest.mark.parametrize("plant", SWAPS)
def test_swapped_after_it_was_made(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    """Not opened again, not found, and not removed; what is open already stays what it is."""
    user_s_file(tmp_path)
    with make_own_folder(tmp_path, RUN) as own:
        swapped(own.path, plant)
        with pytest.raises(NotOwnFolderError, match=str(own.path)):
            open_noted(own.path, RUN)
        assert find_own_folder(tmp_path, RUN) is None
        assert remove_leftovers(tmp_path) == []
        with own.file("mark", "xb") as file:
            file.write(b"x")
        assert (own.path.with_suffix(".away") / "mark").exists()
        with contextlib.suppress(OSError):  # the path leads elsewhere
            remove_own_folder(own)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {file.name for file in files} == {"file"}


@AS_ROOT
def test_another_owner(tmp_path: Path) -> None:
    """The folder was given away: an error that names it and him."""
    with make_own_folder(tmp_path, RUN) as own:
        os.chown(own.path, STRANGER, -1)
        for look in (lambda: open_noted(own.path, RUN), lambda: find_own_folder(tmp_path, RUN)):
            with pytest.raises(NotOwnFolderError, match=f"{own.path} belongs to user {STRANGER}, and its files to user"):
                look()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_another_mode(tmp_path: Path, mode: int) -> None:
    """Others can write there: an error that names it."""
    with make_own_folder(tmp_path, RUN) as own:
        own.path.chmod(mode)
        with pytest.raises(NotOwnFolderError, match=f"{own.path} has mode {mode:o}: other users can write there"):
            open_noted(own.path, RUN)


def without_effect(_descriptor: int, _mode: int) -> None:
    """As SMB mounts with ``dir_mode=0777`` take a mode, and many of FUSE."""


def refused(_descriptor: int, _mode: int) -> None:
    """As the same mounts do for a user who is not that of ``uid=``."""
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("chmod", [without_effect, refused])
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_file_system_that_keeps_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, chmod: Chmod) -> None:
    """Every folder has the mode of the mount: a healthy user's run works there, and is found again."""
    really, of_mount = Path.mkdir, mode

    def mkdir(path: Path, mode: int) -> None:
        really(path, mode)
        path.chmod(of_mount)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(os, "fchmod", chmod)
    with make_own_folder(tmp_path, RUN) as own:
        with own.file("mark", "xb") as mark:
            mark.write(b"ours")
        with own.file("mark", "wb") as mark:
            mark.write(b"new")
        found = find_own_folder(tmp_path, RUN)
        assert found is not None
        with found:
            assert found.read("mark", 10) == b"new"
            assert sorted(found.names()) == ["mark", "owner.json"], "nothing is left of the question who owns a file"
            remove_own_folder(found)
    assert list(tmp_path.iterdir()) == []


@AS_ROOT
@pytest.mark.parametrize("chmod", [without_effect, refused])
def test_somebody_else_s_folder_stays_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chmod: Chmod) -> None:
    """His note beside it does not help him: what this process makes there belongs to another user than the folder."""
    with make_own_folder(tmp_path, RUN) as own:
        for path in (own.path / "owner.json", own.path):
            os.chown(path, STRANGER, -1)
            path.chmod(0o777)
        if chmod is refused:
            monkeypatch.setattr(os, "fchmod", refused)
            with pytest.raises(NotOwnFolderError, match=f"{own.path} has mode 777"):
                open_noted(own.path, RUN)
        os.chown(own.path / "owner.json", 0, -1)
        monkeypatch.setattr(os, "fchmod", chmod)
        with pytest.raises(NotOwnFolderError, match=f"belongs to user {STRANGER}"):
            open_noted(own.path, RUN)


@pytest.mark.parametrize("mode", ["wb", "r+b", "ab"])
def test_a_second_name_of_a_user_s_file(tmp_path: Path, mode: str) -> None:
    """A hard link is neither emptied nor written to: where others can write, they can put one there."""
    file = user_s_file(tmp_path)
    with make_own_folder(tmp_path, RUN) as own:
        (own.path / "mark").hardlink_to(file)
        with pytest.raises(NotOwnFolderError, match="is not a file that this run made"):
            own.file("mark", mode)
    assert file.read_text() == "x"


def test_a_server_that_shows_other_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does for root (root squash): folder and files are of one user, who is not this process's."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with make_own_folder(tmp_path, RUN) as own, open_noted(own.path, RUN):
        remove_own_folder(own)


def chase(path: Path, seconds: float) -> int:
    """Take every name of a later rank as soon as a folder of the first shows, and put links there; how many."""
    end_s, taken = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        for first in path.glob(".gpucluster-*-rank0"):
            for rank in range(1, 8):
                later = first.with_name(f"{first.name[:-1]}{rank}")
                with contextlib.suppress(OSError):
                    later.mkdir()
                    for name in ("owner.json", "mark"):
                        (later / name).symlink_to(path / "users" / "file")
                    taken += 1
    return taken


@AS_ROOT
def test_a_later_rank_is_raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the first rank's folder tells nobody that of a later one, so no link is in its way."""
    path = Path(tempfile.mkdtemp(prefix="gpucluster-test-"))  # others have no way to tmp_path
    path.chmod(0o1777)
    try:
        file = user_s_file(path)
        with make_own_folder(path, RUN), stranger() as other:
            assert other(chase, path, 0.3) == 7
            for rank in range(1, 8):
                monkeypatch.setenv("RANK", str(rank))
                with make_own_folder(path, RUN) as own, own.file("mark", "xb") as mark:
                    mark.write(b"ours")
        assert file.read_text() == "x"
    finally:
        shutil.rmtree(path)
