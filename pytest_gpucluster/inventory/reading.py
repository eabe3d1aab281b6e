"""What a reader returns: a value, or the reason why there is none.

A value that could not be read is never zero, never empty and never None, so it cannot pass for a healthy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class NotAvailable:
    """A value that could not be read; ``why`` is the source's own text, such as NVML's ``Not Supported``."""

    why: str

    def __bool__(self) -> NoReturn:
        """Refuse to be taken for a value: ``reading or 0`` would turn silence into health.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"not available ({self.why}): ask isinstance(reading, NotAvailable)")

    def __str__(self) -> str:
        """``not available: Not Supported``, for the evidence of a report."""
        return f"not available: {self.why}"


def or_none(reading: Value | NotAvailable) -> Value | None:
    """The value for evidence that no criterion judges; None where it is not available."""
    return None if isinstance(reading, NotAvailable) else reading
