"""The exception tree.

::

    GpuclusterError
    +-- ConfigurationError     the user's options, environment or files are wrong: pytest.UsageError
    +-- MeasurementError       something could not be measured: pytest ERROR, never FAILED
    +-- CriterionFailedError   measured, and outside the limit: pytest FAILED
    +-- RanksFailedError       a distributed test failed on some of its ranks: pytest FAILED
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from pytest_gpucluster.places import Place

ErrorKind: TypeAlias = Literal["raised", "refused", "died", "hung", "released", "lost", "missing", "not_idle", "noisy"]


class GpuclusterError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigurationError(GpuclusterError):
    """Options, environment, thresholds file or results directory cannot be used as they are."""


class MeasurementError(GpuclusterError):
    """A value could not be measured.

    The text names the rank of the cause first. ``culprits`` holds the places that caused the error, never those that only
    suffered from it. ``kind`` says what happened; ``not_idle``: another program uses the GPU, so nothing was measured there.
    """

    def __init__(self, message: str, *, culprits: tuple[Place, ...] = (), kind: ErrorKind = "raised") -> None:
        """``culprits`` are the places that caused it."""
        super().__init__(message)
        self.culprits = culprits
        self.kind = kind


class CriterionFailedError(GpuclusterError):
    """Measured, and outside the limit: pytest FAILED, without a traceback."""


class RanksFailedError(GpuclusterError):
    """A distributed test failed; ``culprits`` are the places where it failed, empty if it failed everywhere."""

    def __init__(self, message: str, *, culprits: tuple[Place, ...] = ()) -> None:
        """``culprits`` are the places that caused it."""
        super().__init__(message)
        self.culprits = culprits
