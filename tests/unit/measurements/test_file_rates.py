"""Rates of large files on real file systems; what defeats the page cache, and that wrong bytes are no rate."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.inventory.host import Mount
from pytest_gpucluster.inventory.program import ProgramError
from pytest_gpucluster.measurements import file_rates as module
from pytest_gpucluster.measurements.file_rates import (
    DIRECT,
    DROPPED,
    FIO,
    IN_MEMORY,
    OWN,
    PAGE_BYTES,
    FileRates,
    FileRequests,
    file_rates,
    file_requests,
)

SMALL = 1 << 20
DISK = Mount(folder="/", kind="ext4", source="/dev/sda")


def small(path: Path | None, **changes: Any) -> FileRates:
    """Small enough for any disk."""
    return file_rates(**{"path": path and str(path), "size_bytes": SMALL, "files": 2, "within_s": 60, **changes})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each file."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 16 * PAGE_BYTES)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Every file that was opened, and whether with O_DIRECT; a file system that takes it without doing it, as none here may."""
    found: list[tuple[str, bool]] = []
    really = os.open

    def note(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_DIRECTORY and Path(path).name in ("0", "1", "probe"):
            found.append((Path(path).name, bool(flags & os.O_DIRECT)))
        return really(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)

    monkeypatch.setattr(module.os, "open", note)
    monkeypatch.setattr(module, "read_mount", lambda _path: DISK)
    return found


def test_rates(tmp_path: Path) -> None:
    """Whatever file system is here: both rates, all bytes, and nothing is left."""
    found = small(tmp_path)
    assert found.write_gb_s > 0
    assert found.read_gb_s > 0
    assert (found.written_bytes, found.files, found.path) == (SMALL, 2, str(tmp_path))
    assert found.cache in (DIRECT, DROPPED, IN_MEMORY)
    assert list(tmp_path.iterdir()) == []


def test_past_the_cache(tmp_path: Path, opened: list[tuple[str, bool]]) -> None:
    """Every file is written and read with O_DIRECT where the file system takes it."""
    assert small(tmp_path).cache == DIRECT
    assert sorted(opened) == [("0", True), ("0", True), ("1", True), ("1", True), ("probe", True)]


@pytest.mark.parametrize("at", ["open", "write"])
def test_a_file_system_without_o_direct(
    tmp_path: Path, opened: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The pages of every file are flushed and dropped before the file is read; the report says which."""
    dropped = []
    monkeypatch.setattr(module.os, "posix_fadvise", lambda *arguments: dropped.append(arguments[1:]))
    refused = OSError(errno.EINVAL, "Invalid argument")
    note = os.open

    def refuse(*arguments: Any, **more: Any) -> Any:
        if at == "write" or Path(arguments[0]).name == "probe":
            raise refused
        return note(*arguments, **more)

    monkeypatch.setattr(module.os, at, refuse)
    assert small(tmp_path).cache == DROPPED
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)] * 2
    assert not any(direct for name, direct in opened if name != "probe")


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs has no disk below, and the report says so."""
    monkeypatch.setattr(module, "read_mount", lambda _path: Mount(folder="/", kind="tmpfs", source="none"))
    assert small(tmp_path).cache == IN_MEMORY


def test_the_time_bounds_the_bytes(tmp_path: Path) -> None:
    """A slow disk ends a quick run late by one chunk at most; the rate is that of what was written."""
    found = small(tmp_path, within_s=0)
    assert found.written_bytes == 2 * module.CHUNK_BYTES


def test_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a path."""
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert small(None).path == str(tmp_path)


@pytest.mark.parametrize("changes", [{"files": 0}, {"files": -1}, {"size_bytes": 4095}, {"files": 1024}])
def test_too_little_to_measure(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Said, before anything is written."""
    with pytest.raises(ValueError, match="less than a page of 4096 bytes each"):
        small(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "error"), [("none", FileNotFoundError), ("file", NotADirectoryError)])
def test_paths_that_are_no_folder(tmp_path: Path, name: str, error: type[OSError]) -> None:
    """The error names the path."""
    (tmp_path / "file").touch()
    with pytest.raises(error, match=name):
        small(tmp_path / name)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a file: an error, and the folder is removed."""
    calls = []
    really = os.pwrite

    def fill(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(*arguments)

    monkeypatch.setattr(module.os, "pwrite", fill)
    with pytest.raises(OSError, match="No space left"):
        small(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["a wrong byte", "a short file"])
def test_bytes_that_are_not_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Never a rate: the error names the file."""
    really = os.preadv

    def spoil(file: int, buffers: list[memoryview], offset: int) -> int:
        got = really(file, buffers, offset)
        if offset and fault == "a short file":
            return 0
        buffers[0][7] ^= 1 if offset else 0
        return got

    monkeypatch.setattr(module.os, "preadv", spoil)
    said = f"the byte at {module.CHUNK_BYTES + 7} of" if fault == "a wrong byte" else f"ends after {module.CHUNK_BYTES} bytes"
    with pytest.raises(ArithmeticError, match=said):
        small(tmp_path)
    assert list(tmp_path.iterdir()) == []


def requests(path: Path, **changes: Any) -> FileRequests:
    """Few requests to a small file."""
    return file_requests(**{"path": str(path), "size_bytes": SMALL, "depth": 2, "seconds": 0.05, **changes})


def fio(folder: Path, monkeypatch: pytest.MonkeyPatch, *, says: str) -> None:
    """A fio on the PATH that prints this, and notes its arguments."""
    folder.mkdir()
    (folder / FIO).write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{says}\n')
    (folder / FIO).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_small_requests_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fio both ways have a rate and times, and nothing is left; who made them is said.

    In memory a request takes 3 us. One that waited for a core lifts the mean above the 99th percentile.
    """
    monkeypatch.setattr(module.shutil, "which", lambda _name: None)
    found = requests(tmp_path)
    assert found.read.iops > 0
    assert found.write.iops > 0
    assert found.read.mean_us > 0
    assert found.read.p99_us > 0
    assert (found.by, found.evidence["by"]) == (OWN, OWN)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_slow_has_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted delay of 20 ms a read: at most 100 a second of two threads, and the time is at least that."""
    monkeypatch.setattr(module.shutil, "which", lambda _name: None)
    really = os.preadv

    def late(*arguments: Any) -> int:
        module.time.sleep(0.02)
        return really(*arguments)

    monkeypatch.setattr(module.os, "preadv", late)
    found = requests(tmp_path)
    assert found.read.iops <= 100
    assert found.read.mean_us >= 20_000


def test_small_requests_by_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own numbers, of the same blocks, jobs and file; lines before its report are left out."""
    one = '{"iops": 1234.5, "clat_ns": {"mean": 170000.0, "percentile": {"99.000000": 400000}}}'
    says = f'echo note: both iodepth; echo \'{{"jobs": [{{"read": {one}, "write": {one}}}]}}\''
    fio(tmp_path / "bin", monkeypatch, says=says)
    (tmp_path / "disk").mkdir()
    found = requests(tmp_path / "disk")
    assert (found.read.iops, found.read.mean_us, found.read.p99_us, found.by) == (1234.5, 170.0, 400.0, FIO)
    read, write = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert "--rw=randread --bs=4096" in read
    assert "--numjobs=2" in read
    assert "--fdatasync=1" in write


@pytest.mark.parametrize("says", ["echo 'fio: engine psync not loadable' >&2; exit 1", "echo '{}'", "kill -9 $$"])
def test_a_fio_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """An error with its own words, and nothing is left."""
    fio(tmp_path / "bin", monkeypatch, says=says)
    (tmp_path / "disk").mkdir()
    with pytest.raises(ProgramError, match="fio printed no report"):
        requests(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_fio_that_ended_early_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report has the requests until then, and its exit code says that an error came."""
    one = '{"iops": 1234.5, "clat_ns": {"mean": 170000.0, "percentile": {"99.000000": 400000}}}'
    says = f'echo \'{{"jobs": [{{"error": 5, "read": {one}, "write": {one}}}]}}\'; exit 1'
    fio(tmp_path / "bin", monkeypatch, says=says)
    (tmp_path / "disk").mkdir()
    with pytest.raises(ProgramError, match="exit code 1"):
        requests(tmp_path / "disk")


@pytest.mark.skipif(shutil.which(FIO) is None, reason="fio is not installed")
def test_the_real_fio(tmp_path: Path) -> None:
    """It takes these arguments, and its report has these names."""
    found = requests(tmp_path, seconds=1)
    assert found.by == FIO
    assert found.read.iops > 0
    assert found.write.p99_us > 0


@pytest.mark.parametrize("changes", [{"depth": 0}, {"size_bytes": 100}])
def test_requests_that_are_none(tmp_path: Path, changes: dict[str, int]) -> None:
    """Refused before anything is written."""
    with pytest.raises(ValueError, match="are none"):
        requests(tmp_path, **changes)
