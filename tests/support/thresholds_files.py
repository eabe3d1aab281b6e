"""Writes thresholds files for runs that tests start."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.thresholds.lint import load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_gpucluster.thresholds.file import ThresholdsFile

REHEARSAL = {"cluster": {}, "profiles": {"rehearsal": {"gpu": None, "rehearsal": True, "accept_at": "quick", "fabric": "none"}}}
ENTRY = {"criterion": "It is judged.", "per": "cluster", "unit": "count", "level": "quick", "why": "A test.", "source": "none"}


@functools.cache
def packaged() -> ThresholdsFile:
    """The packaged limits, read once: nothing changes them."""
    return load(None)


def write_limits(path: Path, criteria: Mapping[str, Any], *, extends: bool = True) -> str:
    """Write a thresholds file and return the option that names it.

    With ``extends`` the file changes the packaged one; without, it stands alone and has a profile for rehearsals.
    """
    document = {"schema": 1, **({"extends": "packaged"} if extends else REHEARSAL), "criteria": criteria}
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")  # JSON is YAML
    return f"--gpucluster-thresholds={path}"


def entry(**keys: Any) -> dict[str, Any]:
    """A complete entry, cluster-wide and at least 1, unless ``keys`` say otherwise."""
    limit = {} if {"above", "below", "max"} & set(keys) else {"min": 1}
    return {**ENTRY, **limit, **keys}


def in_rehearsal(**keys: Any) -> dict[str, Any]:
    """What a file that extends another writes to change an entry for rehearsals."""
    waived = {"bound_waived": "a CPU, and a limit between a good and a planted value"} if "above" in keys else {}
    return {"profiles": {"rehearsal": {**keys, **waived}}}
