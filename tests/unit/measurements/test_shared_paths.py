"""What a host writes below a shared path and sees of others, on real file systems; what it does with one that is bad."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from io import BytesIO
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from pytest_gpucluster.inventory.host import Mount
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.measurements import shared_paths as module
from pytest_gpucluster.measurements.own_folder import Folder, NotOwnFolderError, name_of
from pytest_gpucluster.measurements.shared_paths import (
    PathMark,
    Replaced,
    clear_path,
    count_under_lock,
    in_words,
    leave_mark,
    read_marks,
    replace_file,
    small_files,
)
from tests.support.programs import why_not_working
from tests.support.strangers import end_by_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUN = "0123456789abcdef"
FORK = multiprocessing.get_context("fork")
LONG_S = 60.0


def as_rank(rank: int, call: Callable[[], Any]) -> Any:
    """What a call returns, made as this rank."""
    with mock.patch.dict(os.environ, RANK=str(rank)):
        return call()


def mark_of(path: Path) -> PathMark:
    """This rank's file below one path."""
    return leave_mark(path=str(path), run=RUN)


def test_a_file_is_seen(tmp_path: Path) -> None:
    """Another rank reads the digest, also after the file was written again; removed at the end, with nothing left."""
    (tmp_path / "users.txt").write_text("mine")
    digests, folders = set(), set()
    for _ in range(2):
        mark = as_rank(3, lambda: mark_of(tmp_path))
        assert mark.problem is None
        folders.add(mark.folder)
        assert mark.free_gib > 0
        assert isinstance(mark.mount, Mount)
        digests.add(mark.digest)
        seen = read_marks(path=str(tmp_path), digests={mark.folder: mark.digest}, within_s=LONG_S)
        assert (seen.missed, seen.absent) == ({}, [])
        assert seen.slowest_s is not None
    assert (len(digests), len(folders)) == (2, 1)
    assert re.fullmatch(r"\.gpucluster-[0-9a-f]{16}-rank3", folders.pop())
    assert as_rank(3, lambda: clear_path(path=str(tmp_path), run=RUN)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["users.txt"]


@pytest.mark.parametrize(
    ("spoil", "why", "absent"),
    [
        (lambda mark: mark.unlink(), "does not show", 1),
        (lambda mark: mark.write_bytes(b"other"), "shows other contents (5 bytes)", 0),
        (lambda mark: (mark.unlink(), mark.mkdir()), "cannot be read: Is a directory", 0),
    ],
)
def test_a_file_is_not_seen(tmp_path: Path, spoil: Callable[[Path], Any], why: str, absent: int) -> None:
    """After the time, with what is there in its place; the other host's file is seen."""
    bad, good = as_rank(0, lambda: mark_of(tmp_path)), as_rank(1, lambda: mark_of(tmp_path))
    spoil(tmp_path / bad.folder / "mark")
    digests = {one.folder: one.digest for one in (bad, good)}
    seen = read_marks(path=str(tmp_path), digests=digests, within_s=0.05)
    assert seen.missed == {bad.folder: why}
    assert seen.absent == ([bad.folder][:absent])
    assert seen.slowest_s is not None


def test_a_file_that_comes_late_and_in_time(tmp_path: Path) -> None:
    """It is tried again until then, and the time is that from the call on."""
    (tmp_path / "late").mkdir()
    late = threading.Timer(0.3, lambda: (tmp_path / "late" / "mark").write_bytes(b"x"))
    late.start()
    digest = hashlib.sha256(b"x").hexdigest()
    seen = read_marks(path=str(tmp_path), digests={"late": digest}, within_s=LONG_S)
    assert seen.missed == {}
    assert seen.slowest_s is not None
    assert seen.slowest_s >= 0.2


def test_a_slow_answer_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and later than allowed."""
    mark = mark_of(tmp_path)
    read = module._read
    monkeypatch.setattr(module, "_read", lambda *where: (time.sleep(0.3), read(*where))[1])
    seen = read_marks(path=str(tmp_path), digests={mark.folder: mark.digest}, within_s=0.1)
    assert seen.missed == {mark.folder: "came after 0.3 s"}


# Paths that cannot be used: an outcome with a reason.


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (lambda _path: None, "is not there"),
        (lambda path: path.write_text("a file"), "is a file, no folder"),
        (os.mkfifo, "is a file, no folder"),
        (lambda path: path.symlink_to("nowhere"), "is not there"),
        (lambda path: path.symlink_to(path), "cannot be used: Too many levels of symbolic links"),
    ],
)
def test_a_path_that_is_no_folder(tmp_path: Path, plant: Callable[[Path], Any], why: str) -> None:
    """Said in words."""
    plant(tmp_path / "bad")
    assert mark_of(tmp_path / "bad").problem == why


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EACCES, "gives no permission"),
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "is full: the quota is used up"),
        (errno.EROFS, "is mounted read-only"),
        (errno.ESTALE, "is stale: its server does not know it any more"),
        (errno.EIO, "cannot be used: Input/output error"),
    ],
)
def test_errors_in_words(number: int, why: str) -> None:
    """What the kernel says, for people."""
    assert in_words(OSError(number, os.strerror(number))) == why


MOUNTED = """
import json, sys
from pytest_gpucluster.measurements.shared_paths import clear_path, leave_mark
path, run = sys.argv[1:]
mark = leave_mark(path=path, run=run)
print(json.dumps({"problem": mark.problem, "kind": mark.mount.kind, "left": clear_path(path=path, run=run)}))
"""


def mounted(folder: Path, options: str, *, fill: str = "true") -> dict[str, Any]:
    """A mark below a tmpfs of its own, in a mount namespace of its own."""
    mount = f'mount -t tmpfs -o {options} none "$1" && {{ {fill}; }} && exec "$2" -c "$3" "$1" {RUN}'
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", str(folder), sys.executable, MOUNTED]
    if why_not_working("unshare", "-rm", "true"):
        pytest.skip("no mounts of one's own here (unshare -rm)")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONG_S)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("options", "fill", "problem"),
    [
        ("size=1m", "true", None),
        ("ro", "true", "is mounted read-only"),
        ("size=64k", 'head -c 65536 /dev/zero > "$1/full" 2>/dev/null', "is full"),
        ("nr_inodes=3", 'touch "$1/a" "$1/b"', "is full"),
    ],
)
def test_real_file_systems(tmp_path: Path, options: str, fill: str, problem: str | None) -> None:
    """Read-only, without room, without inodes; and a healthy one."""
    assert mounted(tmp_path, options, fill=fill) == {"problem": problem, "kind": "tmpfs", "left": None}


# Locks.


def count(folder: Path, parties: list[str], seconds: float = 0.3) -> Any:
    """Count as one of the parties."""
    return count_under_lock(path=str(folder), run=RUN, parties=parties, seconds=seconds)


def count_without_lock(folder: Path, parties: list[str], seconds: float = 0.3) -> Any:
    """The same on a file system whose locks hold on one host only: each host gets every lock."""
    module.fcntl.lockf = lambda *_: None  # type: ignore[attr-defined]  # of a process that ends with the call
    return count(folder, parties, seconds)


def _become_rank(rank: int) -> None:
    end_by_sigterm()
    os.environ["RANK"] = str(rank)


@pytest.mark.parametrize("counting", [count, count_without_lock])
def test_locks_hold_or_lose_updates(tmp_path: Path, counting: Callable[[Path, list[str]], Any]) -> None:
    """Every update under a lock arrives, and somebody had to wait. Without locks updates are lost."""
    parties = [as_rank(rank, lambda: mark_of(tmp_path)).folder for rank in (0, 1)]
    pools = [FORK.Pool(1, initializer=_become_rank, initargs=(rank,)) for rank in (0, 1)]
    with pools[0], pools[1]:
        answers = [pool.apply_async(counting, (tmp_path, parties)) for pool in pools]
        counted = [answer.get(LONG_S) for answer in answers]
    assert [(one.problem, one.absent) for one in counted] == [(None, [])] * 2
    updates, last = sum(one.updates for one in counted), max(one.last for one in counted)
    if counting is count:
        assert updates == last
        assert any(one.waited for one in counted)
    else:
        assert updates > last


def flock(folder: Path, parties: list[str]) -> Any:
    """Count under flock as one of the parties."""
    return count_under_lock(path=str(folder), run=RUN, parties=parties, seconds=0.3, flock=True)


def flock_without_lock(folder: Path, parties: list[str]) -> Any:
    """As Lustre does with the option localflock: each host gets every lock."""
    module.fcntl.flock = lambda *_: None  # type: ignore[attr-defined]  # of a process that ends with the call
    return flock(folder, parties)


@pytest.mark.parametrize("counting", [flock, flock_without_lock])
def test_flock_holds_or_loses_updates(tmp_path: Path, counting: Callable[[Path, list[str]], Any]) -> None:
    """A number of its own, so that what was counted by fcntl before does not matter."""
    parties = [as_rank(rank, lambda: mark_of(tmp_path)).folder for rank in (0, 1)]
    assert count(tmp_path, parties[:1], 0.01).updates > 0
    pools = [FORK.Pool(1, initializer=_become_rank, initargs=(rank,)) for rank in (0, 1)]
    with pools[0], pools[1]:
        answers = [pool.apply_async(counting, (tmp_path, parties)) for pool in pools]
        counted = [answer.get(LONG_S) for answer in answers]
    updates, last = sum(one.updates for one in counted), max(one.last for one in counted)
    assert (updates == last) is (counting is flock)


def replaced_by(folder: Path, replace: Callable[[Path, Path], None] | None = None, *, seconds: float = 0.2) -> Replaced:
    """What one host sees of its own file while it replaces it, by rename or by something else."""
    mark = mark_of(folder)
    own = folder / mark.folder

    def instead(source: str, target: str, **_: Any) -> None:
        assert replace is not None
        replace(own / source, own / target)

    with mock.patch.object(module.os, "rename", instead if replace is not None else os.rename):
        found = replace_file(path=str(folder), run=RUN, parties=[mark.folder], seconds=seconds)
    assert isinstance(found, Replaced)
    return found


def removed_first(source: Path, target: Path) -> None:
    """A rename that removes the old file first."""
    target.unlink()
    time.sleep(0.01)
    shutil.move(source, target)


def copied(source: Path, target: Path) -> None:
    """A rename that copies."""
    contents = source.read_bytes()
    with target.open("r+b") as file:
        file.write(contents[: len(contents) // 2 + 7])
        file.flush()
        time.sleep(0.01)
        file.write(contents[len(contents) // 2 + 7 :])


def cut(source: Path, target: Path) -> None:
    """A rename that empties the old file first."""
    target.write_bytes(b"")
    time.sleep(0.01)
    target.write_bytes(source.read_bytes())


def test_a_rename_is_atomic(tmp_path: Path) -> None:
    """A reader never sees anything but one whole file, and another rank reads it too."""
    found = replaced_by(tmp_path)
    assert (found.faults, found.problem, found.stale) == ({}, None, 0)
    assert found.replaced > 0
    assert found.reads > 0
    assert replace_file(path=str(tmp_path), run=RUN, parties=[name_of(RUN, 9)], seconds=0.01) is None


@pytest.mark.parametrize(
    ("replace", "fault"),
    [(removed_first, "no file"), (copied, "parts of two files"), (cut, "a part of the file")],
)
def test_a_rename_that_is_not_atomic(tmp_path: Path, replace: Callable[[Path, Path], None], fault: str) -> None:
    """The reader says what it saw."""
    assert fault in replaced_by(tmp_path, replace).faults


@pytest.mark.parametrize(("number", "problem", "stale"), [(errno.ESTALE, None, True), (errno.EIO, "Input/output error", False)])
def test_a_file_that_cannot_be_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, problem: str | None, *, stale: bool
) -> None:
    """Stale files are NFS's way, and counted; others are a problem."""
    really = Folder.read

    def fail(self: Folder, name: str, most: int) -> bytes:
        if name == "state":
            raise OSError(number, os.strerror(number))
        return really(self, name, most)

    mark = mark_of(tmp_path)
    monkeypatch.setattr(Folder, "read", fail)
    found = replace_file(path=str(tmp_path), run=RUN, parties=[mark.folder], seconds=0.01)
    assert isinstance(found, Replaced)
    assert (found.problem, found.stale > 0, found.faults) == (problem, stale, {})


@pytest.mark.parametrize(
    ("kind", "says", "expected"),
    [
        ("nfs4", "echo 'Disk quotas for user me'; echo 'server:/export 100  200'", "server:/export 100 200"),
        ("nfs4", "exit 0", "none for this user"),
        ("nfs4", "echo 'quota: no such user' >&2; exit 1", "not read: quota: no such user"),
        ("lustre", "echo '  /mnt  1  2  3'", "/mnt 1 2 3"),
    ],
)
def test_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, says: str, expected: str) -> None:
    """In the tool's words, or why it is not known."""
    mount = Mount(folder="/mnt", kind=kind, source="server:/export")
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = "lfs" if kind == "lustre" else "quota"
    assert module.read_quota(tmp_path, mount) == f"not read: {tool} is not installed"
    (tmp_path / tool).write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / tool).chmod(0o755)
    assert module.read_quota(tmp_path, mount) == expected
    assert "no mounts" in module.read_quota(tmp_path, NotAvailable("no mounts"))


def test_locks_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre does without the option flock."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    mark = mark_of(tmp_path)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert count(tmp_path, [mark.folder]).problem == "Function not implemented"


def test_a_host_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, and not waited for without end."""
    monkeypatch.setattr(module, "READY_S", 0.05)
    here, other = mark_of(tmp_path), as_rank(7, lambda: mark_of(tmp_path))
    counted = count(tmp_path, [here.folder, other.folder], 0.01)
    assert counted.absent == [other.folder]
    assert counted.updates == counted.last


def test_no_party_at_a_path(tmp_path: Path) -> None:
    """A host that saw not every file does not count."""
    assert count(tmp_path, [name_of(RUN, 9)]) is None


# Small files.


def test_small_files(tmp_path: Path) -> None:
    """Made, read and removed."""
    found = small_files(path=str(tmp_path), count=20, within_s=LONG_S)
    assert found.files == 20
    assert found.files_s == pytest.approx(20 / found.seconds)
    assert list(tmp_path.iterdir()) == []


def test_small_files_end_in_time(tmp_path: Path) -> None:
    """The time bounds how many."""
    found = small_files(path=str(tmp_path), count=1 << 30, within_s=0.05)
    assert 0 < found.files < 1 << 30


class LosesBytes(BytesIO):
    """A file that keeps nothing."""

    def write(self, _contents: object) -> int:
        """Take it, and forget it."""
        return 0


def test_small_files_that_lose_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a rate; and nothing stays."""
    monkeypatch.setattr(Folder, "file", lambda own, name, mode: (own.path / name).open(mode) if mode == "x" else LosesBytes())
    with pytest.raises(ArithmeticError, match="does not hold what was written"):
        small_files(path=str(tmp_path), count=2, within_s=LONG_S)
    assert list(tmp_path.iterdir()) == []


# Other users of the path.


@pytest.mark.parametrize("name", ["mark", "lock", "ready"])
@pytest.mark.parametrize("target", ["users.txt", "nothing"])
def test_a_file_in_our_folder_that_is_a_link(tmp_path: Path, name: str, target: str) -> None:
    """Nothing is written through it, whether it leads somewhere or not; a host that cannot write says so."""
    (tmp_path / "users.txt").write_text("mine")
    mark = mark_of(tmp_path)
    (tmp_path / mark.folder / name).unlink()
    (tmp_path / mark.folder / name).symlink_to(tmp_path / target)
    problems = [mark_of(tmp_path).problem, count(tmp_path, [mark.folder], 0.01).problem]
    assert any("Too many levels of symbolic links" in str(problem) for problem in problems)
    assert clear_path(path=str(tmp_path), run=RUN) is None
    assert [path.name for path in tmp_path.iterdir()] == ["users.txt"]
    assert (tmp_path / "users.txt").read_text() == "mine"


@pytest.mark.parametrize("part", ["folder", "file"])
def test_a_link_is_not_read(tmp_path: Path, part: str) -> None:
    """Not even where it leads to the right bytes: a host's file lies in the host's own folder."""
    mark = mark_of(tmp_path)
    own = tmp_path / mark.folder
    if part == "folder":
        (tmp_path / "linked").symlink_to(own)
    else:
        (tmp_path / "linked").mkdir()
        (tmp_path / "linked" / "mark").symlink_to(own / "mark")
    seen = read_marks(path=str(tmp_path), digests={"linked": mark.digest}, within_s=0.05)
    assert seen.slowest_s is None
    assert seen.missed["linked"] in ("cannot be read: Not a directory", "cannot be read: Too many levels of symbolic links")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """In the place of a host's file."""
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / "mark")
    seen = read_marks(path=str(tmp_path), digests={"other": "0" * 64}, within_s=0.05)
    assert seen.missed == {"other": "cannot be read: it is a pipe"}


@pytest.mark.parametrize("whose", ["of the first host", "its own"])
@pytest.mark.parametrize("link", [True, False])
def test_a_folder_that_was_swapped_is_not_written_to(tmp_path: Path, whose: str, *, link: bool) -> None:
    """Before the counting: an error that names the folder, and what was put there stays as it is."""
    first, own = as_rank(1, lambda: mark_of(tmp_path)), mark_of(tmp_path)
    (tmp_path / "users").mkdir()
    for name in ("lock", "ready"):
        (tmp_path / "users" / name).write_text("0")
    folder = tmp_path / (first.folder if whose == "of the first host" else own.folder)
    folder.rename(tmp_path / "away")
    if link:
        folder.symlink_to(tmp_path / "users")
    else:
        (tmp_path / "users").rename(folder)
    with pytest.raises(NotOwnFolderError, match=str(folder)):
        count(tmp_path, [first.folder, own.folder], 0.01)
    assert [(folder / name).read_text() for name in ("lock", "ready")] == ["0", "0"]


def test_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    """It was opened for them: an error that names it, at each call that writes there."""
    mark = mark_of(tmp_path)
    (tmp_path / mark.folder).chmod(0o777)
    for call in (lambda: mark_of(tmp_path), lambda: count(tmp_path, [mark.folder]), lambda: cleared(tmp_path)):
        with pytest.raises(NotOwnFolderError, match=f"{mark.folder} has mode 777"):
            call()


def cleared(path: Path) -> str | None:
    """Remove the folder of the run."""
    return clear_path(path=str(path), run=RUN)
