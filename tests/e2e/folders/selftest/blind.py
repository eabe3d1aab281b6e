"""A detection that is broken on purpose (``-p blind``): digests are never compared, and whoever hangs or dies is not named."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cluster import unmeasurable
from pytest_gpucluster.judging import agreement

if TYPE_CHECKING:
    from pytest_gpucluster.controller.diagnosis import Diagnosis

DIAGNOSE = unmeasurable.diagnose


def suspicions(digests_by_member: dict[Any, Any], group_of: dict[Any, str]) -> dict[Any, dict[str, str]]:
    """Nothing against anybody."""
    del group_of
    return {member: {} for member in digests_by_member}


def diagnose(*replies: Any, **words: Any) -> Diagnosis:
    """Nobody to blame."""
    return replace(DIAGNOSE(*replies, **words), culprits=())


agreement.suspicions = suspicions  # type: ignore[assignment]  # the plant
unmeasurable.diagnose = diagnose
