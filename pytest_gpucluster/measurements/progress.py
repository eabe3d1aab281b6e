"""How a measurement says what it is doing right now; silent unless somebody listens."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, "float | None"], None]


def _ignore(_step: str, _fraction: float | None) -> None:
    """Nobody listens: a measurement called from a script or a test."""


_listeners: list[Listener] = [_ignore]


def listen(listener: Listener) -> None:
    """Send every later report to ``listener(step, fraction)``; the worker installs its own."""
    _listeners[0] = listener


def report(step: str, fraction: float | None = None) -> None:
    """Say which step runs now (``"8192"``, ``"step 40 of 300"``) and how far along it is (0 to 1)."""
    _listeners[0](step, fraction)
