"""Progress of the running measurement: reports go to one listener, by default to none."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, "float | None"], None]


_listeners: list[Listener] = []
"""None where the measurement was called from a script or a test."""


def listen(listener: Listener) -> None:
    """Send every later report to ``listener(step, fraction)``; the worker installs its own."""
    _listeners[:] = [listener]


def report(step: str, fraction: float | None = None) -> None:
    """Report the current step (``"size 8192"``, ``"step 40 of 300"``) and the finished share of the measurement (0 to 1)."""
    for listener in _listeners:
        listener(step, fraction)
