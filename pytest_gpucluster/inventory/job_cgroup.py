"""The memory that the cgroups of a Slurm job leave to this process, by /proc/self/cgroup and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import read_text

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 62
"""Version 1 writes the greatest number of whole pages for no limit."""


def read_memory_limit(job: str, *, own: Path = OWN, cgroups: Path = CGROUPS) -> int | NotAvailable:
    """The lowest limit in bytes from the job's cgroup down to this process; :data:`NO_LIMIT_BYTES` where none is set.

    A process whose cgroup is another one than the job's is not held by the job. Where only the root is shown (``/``), a
    namespace may hide the job's cgroup: then nothing is known.
    """
    text = read_text(own)
    if isinstance(text, NotAvailable):
        return text
    groups = _memory_groups(text, cgroups)
    for root, path in groups:
        parts = Path(path).parts
        if f"job_{job}" in parts:
            first = parts.index(f"job_{job}") + 1
            folders = [root.joinpath(*(part for part in parts[:end] if part != "/")) for end in range(first, len(parts) + 1)]
            return _lowest(folders)
    if any(path != "/" for _, path in groups):
        return NO_LIMIT_BYTES
    return NotAvailable(f"no cgroup of job {job} is shown here: a container may hide it")


def _memory_groups(text: str, cgroups: Path) -> list[tuple[Path, str]]:
    """Where the controller of memory lies, and the path below: version 1 by its name, then version 2 (``0::/path``)."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    first = [(cgroups / "memory", path) for _, names, path in lines if "memory" in names.split(",")]
    return [*first, *((cgroups, path) for number, names, path in lines if (number, names) == ("0", ""))]


def _lowest(folders: list[Path]) -> int | NotAvailable:
    texts = [read_text(folder / name) for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [text for text in texts if isinstance(text, str)]
    if not limits:
        return NotAvailable(f"no limit of memory can be read ({folders[0]})")
    sizes = [int(text) for text in limits if text.isdecimal()]
    return min([NO_LIMIT_BYTES, *sizes])
