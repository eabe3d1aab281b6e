"""SIGTERM while a run goes on: the call in progress ends, no further test begins, and the reports are written."""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.controller.call import LAST_CALL_S

if TYPE_CHECKING:
    from pytest_gpucluster.session import Session

PATIENCE_S = 4.0
"""After so many seconds a SIGTERM interrupts what is not a call: collection, or a loop of a test's own."""


class Termination:
    """Handles SIGTERM for one run."""

    def __init__(self, session: Session) -> None:
        """Handle nothing before :meth:`install`."""
        self._session = session
        self.signal: str | None = None
        self._timer: threading.Timer | None = None
        self._is_ignored = False

    def install(self) -> None:
        """Handle SIGTERM from now on, where this thread may."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def ignore(self) -> None:
        """Ignore SIGTERM from now on. Called when the session finishes: an interruption could only damage the reports."""
        self._is_ignored = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_sigterm(self, *_: Any) -> None:
        """Called in the main thread when SIGTERM comes, and again by the timer if the run has not ended by then.

        Raises:
            KeyboardInterrupt: the run was terminated before and still goes on.
        """
        if self._is_ignored:
            return
        if self.signal is not None:
            raise KeyboardInterrupt
        self._session.controller.terminate("SIGTERM")
        self.signal = self._session.controller.terminated
        patience_s = PATIENCE_S if self.signal is not None else LAST_CALL_S + 1.0
        again = functools.partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGTERM)
        self._timer = threading.Timer(patience_s, again)
        self._timer.daemon = True
        self._timer.start()
