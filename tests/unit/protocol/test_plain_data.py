"""Values as plain data and back."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.messages import Success, read_reply

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text().filter(lambda key: key not in (plain_data.MARK, plain_data.NUMBER))
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """As a measurement returns it."""

    tflops: float
    by_size: dict[str, float]
    inner: Rate | None = None


def through(value: Any) -> Any:
    """What arrives at the other end of a process boundary."""
    success: Any = read_reply(Success(value=plain_data.to_plain(value)).to_json())
    return success.value


@given(DATA)
def test_plain_data_comes_back_equal(value: Any) -> None:
    """Everything JSON can say crosses unchanged."""
    assert through(value) == value


@given(DATA)
def test_so_does_a_dataclass_of_it(value: Any) -> None:
    """Frozen dataclasses are rebuilt, nested ones too, whatever lies in their fields."""
    rate = Rate(tflops=1.5, by_size={"8192": 2.0}, inner=Rate(tflops=2.5, by_size={}, inner=value))
    assert through(rate) == rate
    assert type(through([rate])[0]) is Rate


def test_not_finite_numbers_cross() -> None:
    """Inside a run NaN must arrive as NaN, so that a criterion can refuse it; JSON has none."""
    found = through({"nan": math.nan, "inf": -math.inf, "in": Rate(tflops=math.inf, by_size={"1": math.nan})})
    assert math.isnan(found["nan"])
    assert math.isnan(found["in"].by_size["1"])
    assert (found["inf"], found["in"].tflops) == (-math.inf, math.inf)


@pytest.mark.parametrize("name", ["1", "infinity", 1, None, ["nan"], "nan "])
def test_no_other_number_has_a_name(name: Any) -> None:
    """What Python's float would take as well is no such number."""
    with pytest.raises(plain_data.NotPlainDataError):
        plain_data.from_plain({plain_data.NUMBER: name})


class Colour(str, enum.Enum):
    """A text that has a name."""

    RED = "red"


class Count(int):
    """A number with a class of its own."""


@pytest.mark.parametrize(
    ("value", "crossed"), [(np.float64(0.1), 0.1), (Count(3), 3), (Colour.RED, "red"), ({Colour.RED: 1}, {"red": 1})]
)
def test_subclasses_cross_as_what_json_has(value: Any, crossed: Any) -> None:
    """A number of NumPy, a text with a name."""
    assert through(value) == crossed
    assert type(through(value)) is type(crossed)


def test_tuples_come_as_lists() -> None:
    """JSON has no tuples."""
    assert through((1, (2,))) == [1, [2]]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        ({1}, "builtins.set"),
        (b"x", "builtins.bytes"),
        (Rate, "builtins.type"),
        ([{"deep": 1j}], "builtins.complex"),
    ],
)
def test_what_cannot_cross_is_named(value: Any, named: str) -> None:
    """The message says which type it was."""
    with pytest.raises(plain_data.NotPlainDataError, match=named):
        plain_data.to_plain(value)


@pytest.mark.parametrize("key", [1, None, plain_data.MARK, plain_data.NUMBER])
def test_keys_are_text(key: Any) -> None:
    """Other keys would come back as text, and the mark would come back as an object."""
    with pytest.raises(plain_data.NotPlainDataError, match="cannot be a key"):
        plain_data.to_plain({key: 1})


def test_depth_is_bounded() -> None:
    """A value that contains itself ends in a message, not in a RecursionError."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(plain_data.NotPlainDataError, match="nested deeper"):
        plain_data.to_plain(endless)


def test_unknown_class_comes_as_attributes_and_imports_nothing() -> None:
    """A message can never cause an import."""
    data = {plain_data.MARK: "antigravity:Flight", "fields": {"height_m": 3}}
    assert plain_data.from_plain(data) == SimpleNamespace(height_m=3)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["json:JSONDecoder", "os:system", f"{__name__}:test_keys_are_text", "builtins:dict"])
def test_only_dataclasses_are_rebuilt(name: str) -> None:
    """Neither another class nor a function behind the name is called."""
    assert "json" in sys.modules  # so it could be found
    assert isinstance(plain_data.from_plain({plain_data.MARK: name, "fields": {"args": "true"}}), SimpleNamespace)


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just(plain_data.MARK), inner)))
def test_whatever_json_arrives_is_read(data: Any) -> None:
    """A message of another version or origin gives a value or a NotPlainError, nothing else."""
    with contextlib.suppress(plain_data.NotPlainDataError):
        plain_data.from_plain(data)
