"""A call as its caller describes it, and what ends it early."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.protocol.messages import FunctionName  # noqa: TC001 -- relay.py reads a call by the types of its fields

SETUP_S = 120.0
OnProgress: TypeAlias = Callable[[int, str, "float | None"], None]
OnOutput: TypeAlias = Callable[[int, str], None]
LAST_CALL_S = 15.0
"""When torchrun ends this node because an agent here died, a call that runs may finish within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One function on some ranks. Each of ``groups`` shares a process group; None: there is no process group."""

    function: FunctionName
    ranks: Sequence[int]
    deadline_s: float
    kwargs: dict[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[int]] | None = None
    setup_s: float = SETUP_S
    any_device: bool = False
    test_arguments: Sequence[str] | None = None
    once: bool = False
    """Later calls of the function get the first one's replies: this run itself changes what the function reads."""
    is_startup: bool = False
    """The call belongs to the start-up, so its time does not count as measuring."""
    variables: dict[str, str] = field(default_factory=dict)
    """What new workers get in their environment, for this call alone (:data:`protocol.messages.CALL_VARIABLES`)."""

    def __post_init__(self) -> None:
        """Refuse a deadline that never comes.

        Raises:
            ConfigurationError: ``deadline_s`` is no finite number above zero.
        """
        is_number = isinstance(self.deadline_s, Real) and not isinstance(self.deadline_s, bool)
        if not is_number or not 0 < self.deadline_s < float("inf"):
            raise ConfigurationError(f"deadline_s={self.deadline_s!r} is not a time above zero, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """What a controller calls while it works, in the thread that makes the call.

    ``on_work(worked_s)`` once the ranks have a call, and several times a second until they have answered; ``worked_s``: since
    they have it. ``on_wait()`` several times a second while ranks are waited for; ``on_progress(rank, step, fraction)`` while
    ranks work; ``on_output(rank, text)`` with what a rank printed, after the call.
    """

    on_work: Callable[[float], None] | None = None
    on_wait: Callable[[], None] | None = None
    on_progress: OnProgress | None = None
    on_output: OnOutput | None = None


class CallClock:
    """How long calls took, and for how long all ranks waited for the controller."""

    def __init__(self) -> None:
        """No call was made yet."""
        self.measuring_s = 0.0
        self._began_s: float | None = None
        self._worked_s = 0.0

    def add(self, call: Call, *, began_s: float, ended_s: float) -> None:
        """One call was made. Both ends are of ``time.monotonic()``."""
        if not call.is_startup:
            self.measuring_s += ended_s - began_s

    def add_work(self, *, began_s: float, ended_s: float) -> None:
        """The ranks worked from the command to the last reply, as far as the controller saw it."""
        self._began_s = began_s if self._began_s is None else self._began_s
        self._worked_s += ended_s - began_s

    @property
    def waited_s(self) -> float:
        """The seconds since the first command in which no rank had anything to do; 0 before it."""
        return 0.0 if self._began_s is None else max(0.0, time.monotonic() - self._began_s - self._worked_s)


class TerminatedError(MeasurementError):
    """A signal (SIGTERM) ends the run: what is left cannot be measured."""


class EarlyEnd:
    """Whether a signal ends this run early, and how soon."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.terminated: str | None = None
        self._ending: str | None = None
        self._ending_s = 0.0

    def at_once(self, by: str) -> None:
        """End the run: no call starts, and a running call ends now."""
        self.terminated = by

    def after_last_call(self, why: str) -> None:
        """End the run: no call starts, and a running call may finish within :data:`LAST_CALL_S`."""
        if self._ending is None:
            self._ending_s = time.monotonic()
            self._ending = why

    @property
    def is_ending(self) -> bool:
        """Whether no call starts any more, although a running call may finish."""
        return self._ending is not None

    def check_before_call(self) -> None:
        """Called before each call.

        Raises:
            TerminatedError: no call may start.
        """
        if self._ending is not None:
            raise TerminatedError(f"not run: {self._ending}", kind="missing")

    def check(self) -> None:
        """Called while ranks are waited for.

        Raises:
            TerminatedError: the wait ends now.
        """
        if self._ending is not None and time.monotonic() > self._ending_s + LAST_CALL_S:
            raise TerminatedError(f"not run: {self._ending}", kind="missing")
        if self.terminated is not None:
            raise TerminatedError(f"not run: terminated by {self.terminated}", kind="missing")
