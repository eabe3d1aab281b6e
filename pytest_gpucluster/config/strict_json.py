"""Values as strict JSON, which knows neither NaN nor infinity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.text import MOST_BITS, text_of, visible

DEEPEST = 32


def strict_json(value: Any, depth: int = 0) -> Any:
    """The value as strict JSON data: a number that is not finite becomes null, an object that JSON lacks becomes text.

    Text is made fit by :func:`visible`. An integer of more than :data:`MOST_BITS`, what lies below :data:`DEEPEST` levels and
    what raises when it is read become text too, so that no value can stop a report.
    """
    kind = type(value)
    if kind is str:
        return value if value.isprintable() else visible(value)
    if value is None or kind is bool or (kind is float and math.isfinite(value)):  # with text, most of a report
        return value
    if isinstance(value, float):
        return float.__float__(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return int.__int__(value) if int.bit_length(value) <= MOST_BITS else text_of(value)
    try:
        return _converted(value, depth) if depth < DEEPEST else visible(text_of(value))
    except Exception:  # noqa: BLE001 -- it is foreign code
        return visible(text_of(value))


def _converted(value: Any, depth: int) -> Any:
    if type(value) is dict or isinstance(value, Mapping):  # to ask an abstract class is slow
        return {
            key if type(key) is str and key.isprintable() else visible(text_of(key)): strict_json(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict_json(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: strict_json(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    return visible(text_of(value))
