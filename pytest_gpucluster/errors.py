"""The exception tree.

::

    GpuclusterError
    +-- ConfigurationError     the user's options, environment or files are wrong: pytest.UsageError at the door
    +-- MeasurementError       something could not be measured: pytest ERROR, never FAILED
    +-- CriterionFailedError   measured, and outside the limit: pytest FAILED
    +-- RanksFailedError       a distributed test failed on some of its ranks: pytest FAILED
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpucluster.places import Place


class GpuclusterError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigurationError(GpuclusterError):
    """Options, environment, thresholds file or results directory cannot be used as they are."""


class MeasurementError(GpuclusterError):
    """A value could not be measured.

    The text says ``rank N`` of the cause first; ``culprits`` holds the places to blame (never those that only
    suffered); ``kind`` is one of ``raised died hung missing lost released refused
    not_idle noisy``; ``not_idle``: somebody else is on the GPU, so nothing was measured there.
    """

    def __init__(self, message: str, *, culprits: tuple[Place, ...] = (), kind: str = "raised") -> None:
        """Remember whom to blame beside the message."""
        super().__init__(message)
        self.culprits = culprits
        self.kind = kind


class CriterionFailedError(GpuclusterError):
    """Measured, and outside the limit: pytest FAILED, without a traceback."""


class RanksFailedError(GpuclusterError):
    """A distributed test failed; ``culprits`` are the places that alone saw it, empty where all did."""

    def __init__(self, message: str, *, culprits: tuple[Place, ...] = ()) -> None:
        """Remember whom to blame beside the message."""
        super().__init__(message)
        self.culprits = culprits
