"""The exception tree.

::

    GpuclusterError
    +-- ConfigurationError     the user's options, environment or files are wrong: pytest.UsageError
    +-- MeasurementError       something could not be measured: pytest ERROR, never FAILED
    +-- CriterionFailedError   measured, and outside the limit: pytest FAILED
    +-- RanksFailedError       a distributed test failed on some of its ranks: pytest FAILED
    +-- DoesNotApplyError      by its entry's own rule a criterion does not apply here: pytest SKIPPED

    MemoryError
    +-- GpuMemoryError         too little memory is free on a GPU
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from pytest_gpucluster.places import Place

ErrorKind: TypeAlias = Literal["raised", "refused", "died", "hung", "released", "lost", "missing", "not_idle", "noisy"]
Part: TypeAlias = Literal["gpu", "node", "link", "nic", "switch", "path", "software", "settings", "host", "unknown"]
"""What kind of part is to blame: the ``kind`` of a culprit in results.json."""


class GpuclusterError(Exception):
    """Base of everything this package raises on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What is to blame for an error, decided where the error is made.

    Attributes:
        part: the kind of the part; ``unknown`` where that cannot be told.
        cause: what happened, in one line without a place; the same for all that one cause took along.
        among: the places of which any may be to blame, where no culprit can be named.
        advice: what to do next, where the error itself says it; None: what is usual for the part.
    """

    part: Part = "unknown"
    cause: str | None = None
    among: tuple[Place, ...] = ()
    advice: str | None = None


class ConfigurationError(GpuclusterError):
    """Options, environment, thresholds file or results directory cannot be used as they are."""

    blames: ClassVar[Part] = "settings"


class MeasurementError(GpuclusterError):
    """A value could not be measured.

    The text names the rank of the cause first. ``culprits`` holds the places that caused the error, never those that only
    suffered from it. ``kind`` says what happened; ``not_idle``: another program uses the GPU, so nothing was measured there.
    ``blame`` says which kind of part is to blame.
    """

    def __init__(
        self, message: str, *, culprits: tuple[Place, ...] = (), kind: ErrorKind = "raised", blame: Blame | None = None
    ) -> None:
        """``culprits`` are the places that caused it."""
        super().__init__(message)
        self.culprits = culprits
        self.kind = kind
        self.blame = blame or Blame(part="software" if kind in ("refused", "not_idle") else "unknown")
        self.blames = self.blame.part
        """The kind of the part that is to blame."""


class GpuMemoryError(MemoryError):
    """Too little memory is free on a GPU: something else holds it, or too much was asked."""

    blames: ClassVar[Part] = "software"


class CriterionFailedError(GpuclusterError):
    """Measured, and outside the limit: pytest FAILED, without a traceback."""


class DoesNotApplyError(GpuclusterError):
    """By its entry's own rule a criterion does not apply to a host. Counts only from ``criterion.does_not_apply``."""

    def __init__(self, message: str, *, cause: str) -> None:
        """``cause``: what all that do not apply for this reason have in common, in a few words."""
        super().__init__(message)
        self.cause = cause


class RanksFailedError(GpuclusterError):
    """A distributed test failed; ``culprits`` are the places where it failed, empty if it failed everywhere."""

    def __init__(self, message: str, *, culprits: tuple[Place, ...] = (), blame: Blame | None = None) -> None:
        """``culprits`` are the places that caused it."""
        super().__init__(message)
        self.culprits = culprits
        self.blame = blame or Blame()
