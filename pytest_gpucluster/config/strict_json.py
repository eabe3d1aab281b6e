"""Values as strict JSON, which knows neither NaN nor infinity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.text import visible


def strict_json(value: Any) -> Any:
    """The value as strict JSON data: a number that is not finite becomes null, an object that JSON lacks becomes text.

    Text is made fit by :func:`visible`.
    """
    if value is None or type(value) in (bool, int, str):  # most of a report, and of a journal
        return visible(value) if type(value) is str else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {visible(str(key)): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return strict_json(dataclasses.asdict(value))
    return value if isinstance(value, (int, float, bool)) or value is None else visible(str(value))
