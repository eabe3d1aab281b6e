"""A person at a terminal: reads what appears, types lines."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.launching import DEADLINE_S, forking, hear_interrupts, is_forked
from tests.support.processes import MARK, kill_marked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.forked_launches import Forked


@contextlib.contextmanager
def at_terminal(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """One command with a pseudo-terminal as stdin, stdout and stderr; what is left of it is killed at the end."""
    own, theirs = pty.openpty()
    variables = {**environment, MARK: (mark := uuid.uuid4().hex)}
    process: subprocess.Popen[bytes] | Forked
    if is_forked(command, environment):
        name = os.ttyname(theirs)
        process = forking().fork(command, cwd=cwd, environment=variables, output=Path(name), reads=name)
    else:
        ends: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
        process = subprocess.Popen(command, cwd=cwd, env=variables, preexec_fn=hear_interrupts, **ends)  # noqa: PLW1509
    os.close(theirs)
    try:
        yield Terminal(process, own)
    finally:
        kill_marked(mark)
        process.wait()
        os.close(own)


class Terminal:
    """What a person at the terminal sees (``seen``) and types."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, own: int) -> None:
        """``own``: this side of the pseudo-terminal."""
        self._process, self._own = process, own
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until ``text`` appears after what was typed last."""
        deadline_s, start = time.monotonic() + DEADLINE_S, len(self.seen)
        while text not in self.seen[start:]:
            if not self._read(deadline_s):
                raise AssertionError(f"no {text!r} in:\n{self.seen}")

    def type(self, line: str) -> None:
        """One line."""
        os.write(self._own, line.encode() + b"\n")

    def end(self) -> int:
        """Read to the end of the command; its exit status."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._read(deadline_s):
            pass
        return self._process.wait(max(1.0, deadline_s - time.monotonic()))

    def _read(self, deadline_s: float) -> bool:
        ready, _, _ = select.select([self._own], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._own, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
