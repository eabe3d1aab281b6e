"""The call that a worker is busy with, and the three clocks that can end it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.messages import AbortCall, ForeignProcess, StartCall

LATEST_ENTRY_S = 5.0
"""After another rank of the group raised, a rank that is still in its set-up gets this long to enter the call."""


class CurrentCall:
    """One call in progress on this rank.

    Before the function is entered, the call's ``setup_s`` counts, afterwards its ``deadline_s``. The release counts besides,
    once the controller has aborted the call.
    """

    def __init__(self, command: StartCall) -> None:
        """Start the clock of the set-up."""
        self.command = command
        self.aborted: AbortCall | None = None
        self.foreign_processes: tuple[ForeignProcess, ...] = ()
        self._entered_s: float | None = None
        self._deadline_s = time.monotonic() + command.setup_s
        self._release_s = math.inf

    @property
    def has_entered(self) -> bool:
        """Whether the worker has finished the set-up and called the function."""
        return self._entered_s is not None

    @property
    def next_s(self) -> float:
        """When the next clock runs out, by the monotonic clock."""
        return min(self._deadline_s, self._release_s)

    @property
    def is_overdue(self) -> bool:
        """Whether the set-up or the function took longer than allowed."""
        return time.monotonic() >= self._deadline_s

    @property
    def is_release_due(self) -> bool:
        """Whether the call was aborted and its time of grace is over."""
        return time.monotonic() >= self._release_s

    def enter(self) -> None:
        """Called when the worker calls the function: start the deadline, and a time of grace that waited for this."""
        self._entered_s = time.monotonic()
        self._deadline_s = self._entered_s + self.command.deadline_s
        if self.aborted is not None:
            self._release_s = self._entered_s + self.aborted.grace_s

    def note_foreign_process(self, process: ForeignProcess) -> None:
        """Called when the worker reports a foreign process on its GPU."""
        self.foreign_processes += (process,)

    def abort(self, command: AbortCall) -> None:
        """Called when the controller aborts this call: set when the rank is released.

        If a rank raised, this rank may be about to raise as well. So it is released only after it has been in the call for the
        time of grace. If the failed rank never entered, this rank cannot enter either, and its own way in is not waited for.
        """
        self.aborted = command
        may_still_enter = not self.has_entered and command.grace_s > 0 and command.entered
        if may_still_enter:
            self._release_s = time.monotonic() + LATEST_ENTRY_S
        else:
            self._release_s = (self._entered_s or time.monotonic()) + command.grace_s

    def describe_overdue(self) -> str:
        """What took too long: ``did not return within 5 s``."""
        if self.has_entered:
            return f"did not return within {self.command.deadline_s:g} s"
        return f"did not finish its set-up within {self.command.setup_s:g} s"
