"""Counts what the interpreter does: a busy machine changes how long work takes, and not how much work it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def operations(work: Callable[[], object]) -> int:
    """How many bytecodes ``work()`` runs, in this thread. What C code does within one of them is not seen."""
    count = 0

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
