"""Readings that are not available, and the table of readings."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_gpucluster.inventory import detect, nvlinks, nvml
from pytest_gpucluster.inventory.reading import (
    NOBODY,
    NotAvailable,
    all_or_why,
    apply,
    as_plain,
    healthy,
    judged,
    or_none,
    read,
    row,
    rows,
    split,
)

REFUSED = NotAvailable("Not Supported")
OTHER = NotAvailable("Insufficient Permissions")
TABLES = (nvml.GpuState, nvml.GpuRepair, nvml.GpuCounters, nvlinks.NvLink, nvlinks.LinkCounters)


@pytest.mark.parametrize("value", ["reading or 0", "bool(reading)", "not reading"])
def test_a_value_that_is_not_available_cannot_be_taken_for_one(value: str) -> None:
    """``or 0`` is how silence became health."""
    with pytest.raises(TypeError, match="not available"):
        eval(value, {"reading": REFUSED})  # noqa: S307 -- the expression is the subject


def test_apply_keeps_the_first_reason() -> None:
    """A value is computed of all values; a falsy one is a value."""
    assert apply(lambda one: one + 1, 0) == 1
    assert apply(lambda one, other: one - other, 5, 3) == 2
    assert apply(lambda one: one, REFUSED) == REFUSED
    assert apply(lambda one, other: (one, other), OTHER, REFUSED) == OTHER
    assert apply(lambda one: REFUSED if one else one, 3) == REFUSED


def test_known_and_unknown() -> None:
    """Zero, false and empty are known."""
    readings: dict[str, Any] = {"zero": 0, "refused": REFUSED, "false": False, "empty": []}
    assert split(readings) == ({"zero": 0, "false": False, "empty": []}, {"refused": REFUSED})
    assert all_or_why([0, 1]) == [0, 1]
    assert all_or_why([0, REFUSED, OTHER]) == REFUSED
    assert (or_none(0), or_none(REFUSED)) == (0, None)


@dataclass(frozen=True, kw_only=True)
class Lamp:
    """A dataclass of readings."""

    number: int = judged(NOBODY, "which lamp it is")
    power_w: float | NotAvailable = row(lambda part: part["mw"], 2500, "lamp_power", convert=lambda mw: mw / 1000)
    is_on: bool | NotAvailable = row(lambda part: part["on"], healthy=True, judged="lamp_on, lamp_power", remark="of all lamps")


def test_a_row_reads_converts_and_knows_the_healthy_answer() -> None:
    """The row is used for both: what a part answers, and what a healthy one would answer."""
    assert read(Lamp, {"mw": 1500, "on": REFUSED}, number=3) == Lamp(number=3, power_w=1.5, is_on=REFUSED)
    assert read(Lamp, {"mw": OTHER, "on": False}, number=3).power_w == OTHER
    assert healthy(Lamp, number=4) == Lamp(number=4, power_w=2.5, is_on=True)
    assert healthy(Lamp, number=4, is_on=False) == Lamp(number=4, power_w=2.5, is_on=False)
    assert [one.judged for one in rows(Lamp).values()] == [("nobody",), ("lamp_power",), ("lamp_on", "lamp_power")]


def test_a_field_with_a_row_has_no_default() -> None:
    """A field that a reader forgets is an error, never a metadata object."""
    with pytest.raises(TypeError, match="power_w"):
        Lamp(number=1, is_on=True)


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type, in lists and dicts the first one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(is_of(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(is_of(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_of(one, arguments[1]) for one in value.values())
    return isinstance(value, (int, float)) if hint is float else type(value) is (hint or type(None))


@pytest.mark.parametrize("kind", TABLES)
def test_healthy_values_are_of_the_types_of_their_fields(kind: type) -> None:
    """A row that forgets to convert would answer 1 where the field says True."""
    hints = typing.get_type_hints(kind)
    for name, one in rows(kind).items():
        if one.source is not None:
            assert is_of(one.value_of(one.healthy), hints[name]), name


def test_plain_data_say_why_a_reading_is_not_available() -> None:
    """In one way, also where a child process of NVML wrote it, and inside what this process does not know."""
    known = {"a": NotAvailable("x"), "c": types.SimpleNamespace(d=[NotAvailable("z")])}
    shown = {"a": {"not_available": "x"}, "c": {"d": [{"not_available": "z"}]}}
    assert as_plain(known) == shown
    survey = json.loads(json.dumps({"b": {"why": "y"}}), object_hook=detect.as_written)
    assert as_plain(survey) == {"b": {"not_available": "y"}}


def test_a_user_s_own_word_is_no_missing_reading() -> None:
    """``gpucluster run --json`` showed a function's ``{"why": text}`` as not available."""
    assert as_plain({"why": "text"}) == {"why": "text"}
