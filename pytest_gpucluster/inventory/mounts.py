"""The file system below a path, by the kernel's table of mounts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.inventory.reading import NotAvailable

TABLE = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
_ESCAPED = re.compile(r"\\([0-7]{3})")
_AFTER_OPTIONS = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system: where it is mounted, its type (``nfs4``, ``ext4``) and its source (``server:/export``)."""

    folder: str
    kind: str
    source: str

    @property
    def is_in_memory(self) -> bool:
        """Whether no disk lies below: what is written stays in the memory of the host."""
        return self.kind in IN_MEMORY

    def __str__(self) -> str:
        """``nfs4 server:/export at /mnt/shared``, for the evidence of a report."""
        return f"{self.kind} {self.source} at {self.folder}"


def read_mount(path: Path, *, table: Path = TABLE) -> Mount | NotAvailable:
    """The file system that holds ``path``, links resolved. Of mounts over each other the last one counts."""
    try:
        lines = table.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
        real = path.resolve()
    except OSError as error:
        return NotAvailable(str(error))
    mounts = [mount for line in lines if (mount := _parse(line)) is not None and real.is_relative_to(mount.folder)]
    if not mounts:
        return NotAvailable(f"{table} has no mount for {real}")
    deepest = max(len(Path(mount.folder).parts) for mount in mounts)
    return [mount for mount in mounts if len(Path(mount.folder).parts) == deepest][-1]


def _parse(line: str) -> Mount | None:
    """One line of the table: ``36 35 98:0 /root /mnt rw,noatime shared:1 - ext4 /dev/sda rw``. None for another form."""
    words = line.split(" ")
    if _AFTER_OPTIONS not in words[6:]:
        return None
    end = words.index(_AFTER_OPTIONS, 6)
    if len(words) < end + 3:
        return None
    return Mount(folder=_plain(words[4]), kind=_plain(words[end + 1]), source=_plain(words[end + 2]))


def _plain(text: str) -> str:
    r"""The text with ``\040`` for a blank, as the kernel writes it, undone."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
