"""Rates at which a host writes and reads large files below a path, with its page cache defeated.

Several files are written at once, each by a thread of its own, as the ranks of a host write a checkpoint; then they are
flushed (fsync) and read again. The contents are random, so that nothing can be compressed, and every byte is compared. Where
the file system takes it, files are opened with O_DIRECT, which goes past the cache. Elsewhere the cache's pages are written
and dropped (posix_fadvise) before the files are read. A file system in memory has no disk to measure, and the method says so.
The caches of a server and of a disk are not defeated. GB/s are 10^9 bytes a second.

Small requests (``file_requests``) are made by ``fio`` where it is installed, as everybody knows its numbers. It is on few GPU
nodes and in few containers, so threads of this program stand in for it: blocking reads and writes give up Python's lock, and
what they reach is said to be theirs. No library does asynchronous reads without a C extension, so none is added.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import mmap
import os
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.host import Mount, read_mount
from pytest_gpucluster.inventory.program import ProgramError
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.measurements import progress
from pytest_gpucluster.measurements.own_folder import Folder, remove_leftovers, within_own_folder
from pytest_gpucluster.protocol.functions import without_device
from pytest_gpucluster.text import counted

CHUNK_BYTES = 8 << 20
PAGE_BYTES = 4096
DIRECT, DROPPED, IN_MEMORY = "O_DIRECT", "fsync and dropped pages", "none: the file system is in memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRates:
    """Rates of all files together in GB/s (10^9 bytes a second), each from the first byte to the last one's flush.

    ``written_bytes`` is less than asked for where the time was over first. ``cache`` says how the page cache was defeated.
    """

    write_gb_s: float
    read_gb_s: float
    written_bytes: int
    files: int
    cache: str
    path: str
    mount: Mount | NotAvailable

    @property
    def evidence(self) -> dict[str, Any]:
        """Both rates, and how they were measured."""
        return {
            "path": self.path,
            "file system": str(self.mount),
            "page cache defeated by": self.cache,
            "write GB/s": self.write_gb_s,
            "read GB/s": self.read_gb_s,
            "GiB": self.written_bytes / 2**30,
            "files": self.files,
        }


@dataclass(frozen=True, slots=True)
class _Stream:
    """One file: its folder and name, what is written, and where the bytes are read to."""

    folder: Folder
    name: str
    source: mmap.mmap
    target: mmap.mmap

    @property
    def file(self) -> Path:
        """Its path, for people."""
        return self.folder.path / self.name


@without_device
def file_rates(*, path: str | None, size_bytes: int, files: int, within_s: float) -> FileRates:
    """Write and read files of ``size_bytes`` in all below ``path``, in a folder of this rank's own.

    Args:
        path: an existing folder; None: that for temporary files (``TMPDIR``, else /tmp).
        size_bytes: of all files together, rounded down to whole pages of each.
        files: how many are written and read at once.
        within_s: no further chunk is begun after so many seconds of writing, nor of reading.

    Raises:
        OSError: the path cannot be used, or is full.
        ValueError: no file, or less than a page for each.
        ArithmeticError: what was read is not what was written.
    """
    each_bytes = size_bytes // max(1, files) // PAGE_BYTES * PAGE_BYTES
    if files < 1 or each_bytes < 1:
        raise ValueError(f"{size_bytes} bytes in {counted(files, 'file')} are less than a page of {PAGE_BYTES} bytes each")
    folder = Path(path or tempfile.gettempdir())
    progress.report(f"look at {folder}", 0.0)
    remove_leftovers(folder)
    mount = read_mount(folder)
    with within_own_folder(folder) as own, contextlib.ExitStack() as held:
        cache = _cache_of(own, mount)
        streams = [held.enter_context(_stream(own, str(number), each_bytes)) for number in range(files)]
        written, write_s, read, read_s = _write_and_read(streams, cache, within_s)
    progress.report("done", 1.0)
    return FileRates(
        write_gb_s=sum(written) / write_s / 1e9,
        read_gb_s=sum(read) / read_s / 1e9,
        written_bytes=sum(written),
        files=files,
        cache=cache,
        path=str(folder),
        mount=mount,
    )


def _write_and_read(streams: list[_Stream], cache: str, within_s: float) -> tuple[list[int], float, list[int], float]:
    """The bytes written of each file and the seconds for all, the bytes read and the seconds."""
    with ThreadPoolExecutor(len(streams)) as threads:
        list(threads.map(_fill, streams))
        progress.report(f"write {streams[0].file.parent}", 0.2)
        start_s = time.perf_counter()
        written = list(threads.map(functools.partial(_write, cache=cache, end_s=start_s + within_s), streams))
        write_s = time.perf_counter() - start_s
        progress.report(f"read {streams[0].file.parent}", 0.6)
        start_s = time.perf_counter()
        read = list(threads.map(functools.partial(_read, cache=cache, end_s=start_s + within_s), streams, written))
        read_s = time.perf_counter() - start_s
        list(threads.map(_verify, streams, read))
    return written, write_s, read, read_s


def _cache_of(folder: Folder, mount: Mount | NotAvailable) -> str:
    """How the page cache is defeated in a folder; the file system itself is asked."""
    if isinstance(mount, Mount) and mount.is_in_memory:
        return IN_MEMORY
    try:
        with _opened(folder, "probe", os.O_WRONLY | os.O_CREAT | os.O_EXCL, cache=DIRECT) as file, _mapped(PAGE_BYTES) as page:
            os.write(file, page)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return DROPPED
    return DIRECT


@contextlib.contextmanager
def _opened(folder: Folder, name: str, flags: int, *, cache: str) -> Iterator[int]:
    """The descriptor of a file in the folder, past the page cache where that is how it is defeated; closed at the end."""
    file = folder.open_at(name, flags | (os.O_DIRECT if cache == DIRECT else 0))
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _mapped(size_bytes: int) -> Iterator[mmap.mmap]:
    """Memory that begins at a page, as O_DIRECT asks; given back at once."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    try:
        yield memory
    finally:
        with contextlib.suppress(BufferError):  # an error on its way still shows the tensor that uses it
            memory.close()


@contextlib.contextmanager
def _stream(folder: Folder, name: str, size_bytes: int) -> Iterator[_Stream]:
    with _mapped(size_bytes) as source, _mapped(size_bytes) as target:
        yield _Stream(folder=folder, name=name, source=source, target=target)


def _fill(stream: _Stream) -> None:
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    torch.frombuffer(stream.source, dtype=torch.int64).random_(generator=generator)


def _write(stream: _Stream, *, cache: str, end_s: float) -> int:
    """Write, flush and close one file; the bytes written before the time was over."""
    done = 0
    with _opened(stream.folder, stream.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, cache=cache) as file:
        with memoryview(stream.source) as source:
            while done < len(source) and (not done or time.perf_counter() < end_s):
                with source[done : done + CHUNK_BYTES] as chunk:
                    done += os.pwrite(file, chunk, done)
        os.fsync(file)
        if cache == DROPPED:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return done


def _read(stream: _Stream, size_bytes: int, *, cache: str, end_s: float) -> int:
    """Read one file; the bytes read before the time was over.

    Raises:
        ArithmeticError: the file is shorter than what was written.
    """
    done = 0
    with _opened(stream.folder, stream.name, os.O_RDONLY, cache=cache) as file, memoryview(stream.target) as target:
        while done < size_bytes and (not done or time.perf_counter() < end_s):
            with target[done : min(done + CHUNK_BYTES, size_bytes)] as chunk:
                got = os.preadv(file, [chunk], done)
            if not got:
                raise ArithmeticError(f"{stream.file} ends after {done} bytes of {size_bytes}")
            done += got
    return done


def _verify(stream: _Stream, size_bytes: int) -> None:
    """Compare every byte that was read with what was written.

    Raises:
        ArithmeticError: they differ.
    """
    written, read = (torch.frombuffer(one, dtype=torch.uint8, count=size_bytes) for one in (stream.source, stream.target))
    if not torch.equal(written, read):
        first = int((written != read).nonzero()[0])
        raise ArithmeticError(f"{stream.file}: the byte at {first} of {size_bytes} is not what was written")


# --- Small requests: how many a second, and how long each takes ---

OWN, FIO = "threads of this sysfs, as fio is not installed", "fio"
FIO_GRACE_S = 60.0
"""How much longer than its measurement fio may take to lay out the file."""
PERCENTILE = "99.000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests of one page a second (IOPS), and the microseconds that one takes: on average, and of 99 in 100 the longest."""

    iops: float
    mean_us: float
    p99_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequests:
    """Random requests of 4 KiB to one file, reads and then writes. ``by`` says who made them, ``cache`` as in FileRates."""

    read: Requests
    write: Requests
    depth: int
    by: str
    cache: str
    path: str
    mount: Mount | NotAvailable

    @property
    def evidence(self) -> dict[str, Any]:
        """What was measured beside reads a second, and how."""
        ways = {"read": self.read, "write": self.write}
        times = {f"{way} us": f"{one.mean_us:.0f} on average, p99 {one.p99_us:.0f}" for way, one in ways.items()}
        made = {"requests at once": self.depth, "by": self.by, "page cache defeated by": self.cache}
        return {"write IOPS": self.write.iops, **times, **made, "path": self.path, "file system": str(self.mount)}


@dataclass(frozen=True, slots=True)
class _Work:
    """What is asked of one file: how large it is, how many requests at once, for how long, and how the cache is defeated."""

    folder: Folder
    size_bytes: int
    depth: int
    seconds: float
    cache: str


@without_device
def file_requests(*, path: str | None, size_bytes: int, depth: int, seconds: float) -> FileRequests:
    """Read and write single pages at random places of a file below ``path``, in a folder of this rank's own.

    Args:
        path: an existing folder; None: that for temporary files (``TMPDIR``, else /tmp).
        size_bytes: of the file, in whole pages.
        depth: how many requests are made at once.
        seconds: of reading, and again of writing.

    Raises:
        OSError: the path cannot be used, or is full.
        ValueError: no request at once, or a file of less than a page.
        ProgramError: fio could not be run to its end, or printed no report.
    """
    if depth < 1 or size_bytes < PAGE_BYTES:
        raise ValueError(f"{depth} requests at once to a file of {size_bytes} bytes are none: a page has {PAGE_BYTES}")
    folder, fio = Path(path or tempfile.gettempdir()), shutil.which(FIO)
    progress.report(f"small requests below {folder}")
    remove_leftovers(folder)
    mount = read_mount(folder)
    with within_own_folder(folder) as own:
        cache = _cache_of(own, mount)
        work = _Work(own, size_bytes // PAGE_BYTES * PAGE_BYTES, depth, seconds, cache)
        _lay_out(work)
        measure = functools.partial(_by_fio, fio) if fio is not None else _by_threads
        read, write = measure(work, "read"), measure(work, "write")
    by = FIO if fio is not None else OWN
    return FileRequests(read=read, write=write, depth=depth, by=by, cache=cache, path=str(folder), mount=mount)


def _lay_out(work: _Work) -> None:
    """Write the file once, so that every page is on the disk."""
    with _stream(work.folder, "requests", work.size_bytes) as stream:
        _fill(stream)
        _write(stream, cache=work.cache, end_s=float("inf"))


def _by_threads(work: _Work, way: str) -> Requests:
    """Each thread makes one request after the other. Its own page of memory begins at a page, as O_DIRECT asks."""
    ends_s = time.perf_counter() + work.seconds

    def one_by_one(file: int) -> list[float]:
        made: list[float] = []
        with _mapped(PAGE_BYTES) as page:
            while not made or time.perf_counter() < ends_s:
                at = random.randrange(work.size_bytes // PAGE_BYTES) * PAGE_BYTES
                begun_s = time.perf_counter()
                if way == "read":
                    os.preadv(file, [page], at)
                else:
                    os.pwrite(file, page, at)
                    os.fdatasync(file)
                if work.cache == DROPPED:
                    os.posix_fadvise(file, at, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
                made.append(time.perf_counter() - begun_s)
        return made

    with _opened(work.folder, "requests", os.O_RDWR, cache=work.cache) as file, ThreadPoolExecutor(work.depth) as threads:
        start_s = time.perf_counter()
        took_s = sorted(one for made in threads.map(one_by_one, [file] * work.depth) for one in made)
        all_s = time.perf_counter() - start_s
    p99_s = took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))]
    return Requests(iops=len(took_s) / all_s, mean_us=1e6 * statistics.fmean(took_s), p99_us=1e6 * p99_s)


def _by_fio(fio: str, work: _Work, way: str) -> Requests:
    """The same by fio: as many jobs with blocking requests, so that the numbers mean the same."""
    arguments = [
        "--name=requests", f"--filename={work.folder.path / 'requests'}", f"--size={work.size_bytes}",
        f"--rw=rand{way}", f"--bs={PAGE_BYTES}", f"--direct={int(work.cache == DIRECT)}", "--ioengine=psync",
        f"--numjobs={work.depth}",
        "--time_based", f"--runtime={work.seconds:g}", "--group_reporting", "--invalidate=1", "--output-format=json",
        *(["--fdatasync=1"] if way == "write" else []),
    ]  # fmt: skip
    ended = program.run(fio, arguments, within_s=work.seconds + FIO_GRACE_S)
    why = f"exit code {ended.exit_code}: {ended.gist}"
    if ended.exit_code != 0:  # a report that ended early has the requests until then
        raise ProgramError(f"fio printed no report of the whole time ({why})")
    try:
        found = json.loads(ended.printed[ended.printed.index("{") :])["jobs"][0][way]
        times = found["clat_ns"]
        return Requests(iops=found["iops"], mean_us=times["mean"] / 1e3, p99_us=times["percentile"][PERCENTILE] / 1e3)
    except (ValueError, LookupError, TypeError) as error:
        raise ProgramError(f"fio printed no report ({why})") from error
