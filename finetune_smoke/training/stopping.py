"""Stop on a signal: SIGTERM or SIGUSR1 to any rank ends the run with a checkpoint that can be resumed.

Schedulers send one of them some time before they kill (Slurm: ``--signal=USR1@60``). torchrun passes SIGTERM on, and
SIGUSR1 if its --signals-to-handle names it, and kills 30 s later. The handler only sets a flag. After each window of steps
the ranks exchange their flags, because the signal may reach one rank before the others.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune_smoke.ranks import Ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class StopRequest:
    """Whether this rank received a signal to stop; ``listens`` is equal on all ranks."""

    listens: bool
    received: bool = False

    def on_any_rank(self, ranks: Ranks) -> bool:
        """Whether any rank received a signal; a collective with the same result on all ranks."""
        return self.listens and bool(ranks.where(self.received))


@contextmanager
def handle_signals(*, wanted: bool) -> Iterator[StopRequest]:
    """Handle the signals within the block, if ``wanted``; restore the earlier handlers afterwards.

    Python lets only the main thread install handlers. In another thread the signals keep their earlier handlers.
    """
    stop = StopRequest(listens=wanted)
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def hear(_number: int, _frame: Any) -> None:
        stop.received = True

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
