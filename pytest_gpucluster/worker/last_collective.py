"""The collective that a rank entered last, in a small file: the worker writes it, its agent reads it even after a kill.

In a group that hangs, a rank whose count is behind its peers' is the one that never arrived.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.protocol.messages import Spans
from pytest_gpucluster.protocol.rank import spans

MAX_SPANS = 32
HEAD = struct.Struct("=Q56sI")
SPANS = struct.Struct(f"={2 * MAX_SPANS}I")
NOTHING = bytes(HEAD.size + SPANS.size)
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCollective:
    """The number of collectives entered in a call, and the name of the last one.

    ``members``: the positions in the process group of the call that take part in it; empty: all of them.
    """

    count: int = 0
    name: str = ""
    members: Spans = ()


def create(path: Path) -> None:
    """Create the file, with no collective entered."""
    path.write_bytes(NOTHING)


def read(path: Path) -> LastCollective:
    """What the worker wrote last; nothing entered if that cannot be read."""
    try:
        data = path.read_bytes()
        count, name, num_spans = HEAD.unpack_from(data)
        ends = SPANS.unpack_from(data, HEAD.size)
    except (OSError, struct.error):
        return LastCollective()
    members = tuple(zip(ends[::2], ends[1::2], strict=True))[:num_spans]
    return LastCollective(count=count, name=name.rstrip(b"\0").decode("ascii", "replace"), members=members)


class CollectiveRecorder:
    """The worker's side: counts each entry into a collective of ``torch.distributed``."""

    def __init__(self, path: Path) -> None:
        """Map the file that the agent created. A write costs one store to memory, and survives the process."""
        descriptor = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(descriptor, len(NOTHING))
        os.close(descriptor)
        self._count = 0

    def restart(self) -> None:
        """Count from zero: a new call begins."""
        self._count = 0
        self._memory[:] = NOTHING

    def watch(self, module: Any) -> None:
        """Wrap the collectives of ``torch.distributed``, so that each is recorded before it can block."""
        for name in COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, self._wrap(name, getattr(module, name), module))

    def _wrap(self, name: str, collective: Callable[..., Any], module: Any) -> Callable[..., Any]:
        @functools.wraps(collective)
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._count += 1
            members = _members((*args, kwargs.get("group")), module)
            ends = struct.pack(f"={2 * len(members)}I", *[end for span in members for end in span])
            self._memory[HEAD.size : HEAD.size + len(ends)] = ends
            self._memory[: HEAD.size] = HEAD.pack(self._count, name.encode()[:56], len(members))
            return collective(*args, **kwargs)

        return entered


def _members(arguments: tuple[Any, ...], module: Any) -> Spans:
    """The members of the process group among the arguments of a collective; empty for the group of the call itself."""
    group = next((one for one in arguments if isinstance(one, module.ProcessGroup)), None)
    if group is None or group is module.group.WORLD:
        return ()
    with contextlib.suppress(ValueError, RuntimeError, KeyError):  # a group that was destroyed: the collective itself says so
        members = spans(module.get_process_group_ranks(group))
        return members if len(members) <= MAX_SPANS else ()
    return ()
