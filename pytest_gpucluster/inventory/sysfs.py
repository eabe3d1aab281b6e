"""Files of the kernel: the text or number of one in sysfs, or the reason why there is none; its counts of the host's work."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SYS = Path("/sys")


def read_text(file: Path) -> str | NotAvailable:
    """The stripped text of a file; an empty file has no value."""
    try:
        text = file.read_bytes()[:65536].decode("utf-8", "replace").strip()
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({file})")
    return text or NotAvailable(f"empty ({file})")


def read_number(file: Path) -> int | NotAvailable:
    """The whole number, zero or more, that a file holds."""
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    if not (text.isascii() and text.isdecimal()):
        return NotAvailable(f"{text[:80]!r} is no number ({file})")
    return int(text)


def read_numbers(folder: Path) -> dict[str, int | NotAvailable] | NotAvailable:
    """The number in each entry of a folder, by name."""
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    return {name: read_number(folder / name) for name in names}


def list_names(folder: Path) -> list[str] | NotAvailable:
    """The names in a folder, sorted."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")


def list_if_there(folder: Path) -> list[str] | NotAvailable:
    """The names in a folder, sorted; none where the kernel has no such folder. One that cannot be listed says nothing."""
    try:
        folder.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")
    return list_names(folder)


def target_of(link: Path) -> str | NotAvailable:
    """The name of what a link leads to."""
    try:
        return link.resolve(strict=True).name
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return NotAvailable(f"{getattr(error, 'strerror', error)} ({link})")


@dataclass(frozen=True, slots=True)
class SysfsFile:
    """A source of readings: a file or folder below that of a part."""

    name: str
    how: Callable[[Path], Any] = read_text

    def __call__(self, folder: Path) -> Any:
        """Its content, or why there is none."""
        return self.how(folder / self.name)


# --- What the host has worked ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostTask:
    """A process by ``/proc/PID/stat``; ``seconds`` of CPU time so far. ``begun`` tells it from a later one of its pid."""

    name: str
    parent: int
    session: int
    seconds: float
    begun: int
    runs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCounts:
    """What the kernel has counted up to one moment, in seconds: CPUs busy, CPUs stolen, waiting of tasks; bytes of memory."""

    at_s: float
    total_cpus: int
    busy_s: float
    stolen_s: float
    pressure_s: dict[str, float]
    memory_bytes: int | None
    running: int | None
    tasks: dict[int, _HostTask]


def read_counts(proc: Path, resctrl: Path) -> _HostCounts:
    """Read everything once.

    Raises:
        OSError, ValueError, LookupError: there are no counts of CPUs.
    """
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    lines = (proc / "stat").read_text(encoding="utf-8").splitlines()
    total = [int(word) * tick_s for word in lines[0].split()[1:9]]
    return _HostCounts(
        at_s=time.monotonic(),
        total_cpus=sum(line.startswith("cpu") for line in lines) - 1,
        busy_s=sum(total[:3]),  # user, nice, system; interrupts may be those of our copies
        stolen_s=total[7] if len(total) > 7 else 0.0,
        pressure_s={name: found for name in ("cpu", "memory") if (found := _pressure_s(proc / "pressure" / name)) is not None},
        memory_bytes=_memory_bytes(resctrl),
        running=_running(proc / "loadavg"),
        tasks=dict(_tasks(proc, tick_s)),
    )


def _running(file: Path) -> int | None:
    """How many tasks can run at this moment: the fourth word of ``loadavg``."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return int(file.read_text(encoding="utf-8").split()[3].partition("/")[0])
    return None


def _pressure_s(file: Path) -> float | None:
    """Seconds in which some task waited; None on a kernel without PSI."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        line = next(line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("some"))
        return int(line.rpartition("total=")[2]) / 1e6
    return None


def _memory_bytes(resctrl: Path) -> int | None:
    """Bytes between the CPUs and memory by resctrl (MBM); None where it is not mounted or does not count."""
    try:
        counts = [int(file.read_text(encoding="utf-8")) for file in resctrl.glob("mon_data/mon_L3_*/mbm_total_bytes")]
    except (OSError, ValueError):  # "Unavailable"
        return None
    return sum(counts) if counts else None


def _tasks(proc: Path, tick_s: float) -> Iterator[tuple[int, _HostTask]]:
    """Every process that can be seen. One that ends meanwhile is left out."""
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, LookupError):
            head, _, tail = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            words = tail.split()
            yield (
                int(folder.name),
                _HostTask(
                    name=head.partition("(")[2],
                    parent=int(words[1]),
                    session=int(words[3]),
                    seconds=(int(words[11]) + int(words[12])) * tick_s,
                    begun=int(words[19]),
                    runs=words[0] == "R",
                ),
            )
