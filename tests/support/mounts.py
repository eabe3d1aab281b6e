"""Disks of a test's own: mounted in a namespace that only its launch sees."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from tests.support.launching import PYTEST
from tests.support.programs import why_not_working

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

NO_MOUNTS = "no mounts of one's own here (unshare -rm)"


def can_mount() -> bool:
    """Whether a test may mount something for itself alone."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()]
    return why_not_working(*command) is None


def mounted(starter: Starter, mount: str, *arguments: str, kept: str = "kept") -> Launch:
    """Start pytest where ``mount`` (shell) was done for it alone; what is then in ``disk`` is copied to ``kept``."""
    script = f'mkdir -p {kept} && {mount} || exit 99; "$@"; code=$?; cp -r disk/. {kept}/; exit $code'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", *PYTEST, *arguments]
    (starter.folder / "disk").mkdir(exist_ok=True)
    return starter.start(command, name="mounted")


def full(size: str) -> str:
    """The mount of a disk of this size."""
    return f"mount -t tmpfs -o size={size} tmpfs disk"
