"""Whose process is at the other end of a Unix socket: any user of the host can list the abstract namespace and connect."""

from __future__ import annotations

import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")
"""``struct ucred`` of Linux (unix(7)): pid, user, group."""


def user_of(line: socket.socket) -> int:
    """The user whose process connected or listens at the other end, by the kernel."""
    _, user, _ = CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(user)


def is_own_user(line: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user. Nobody answers another one, and root does not."""
    return user_of(line) == os.getuid()
