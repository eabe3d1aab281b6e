"""The collective that a rank entered last, in a small file: the worker writes it, its agent reads it even after a kill.

In a group that hangs, a rank whose count is behind its peers' is the one that never arrived.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYOUT = struct.Struct("=Q56s")
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


def create(path: Path) -> None:
    """Create the file, with no collective entered."""
    path.write_bytes(LAYOUT.pack(0, b""))


def read(path: Path) -> tuple[int, str]:
    """The number of collectives entered in this call, and the name of the last one."""
    try:
        count, name = LAYOUT.unpack(path.read_bytes()[: LAYOUT.size])
    except (OSError, struct.error):
        return 0, ""
    return count, name.rstrip(b"\0").decode("ascii", "replace")


class CollectiveRecorder:
    """The worker's side: counts each entry into a collective of ``torch.distributed``."""

    def __init__(self, path: Path) -> None:
        """Map the file that the agent created. A write costs one store to memory, and survives the process."""
        descriptor = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(descriptor, LAYOUT.size)
        os.close(descriptor)
        self._count = 0

    def restart(self) -> None:
        """Count from zero: a new call begins."""
        self._count = 0
        self._write("")

    def watch(self, module: Any) -> None:
        """Wrap the collectives of ``torch.distributed``, so that each is recorded before it can block."""
        for name in COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, self._wrap(name, getattr(module, name)))

    def _wrap(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._count += 1
            self._write(name)
            return collective(*args, **kwargs)

        return entered

    def _write(self, name: str) -> None:
        self._memory[: LAYOUT.size] = LAYOUT.pack(self._count, name.encode()[:56])
