"""The readings before the first test: any test may be the first one, so their fixtures must be there for all."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING

import pytest

import tests_acceptance
from tests_acceptance import conftest

if TYPE_CHECKING:
    from collections.abc import Iterator


def names_asked_for() -> Iterator[str]:
    """Every ``..._at_start`` that a test or fixture of the suite takes."""
    for found in pkgutil.iter_modules(tests_acceptance.__path__):
        module = importlib.import_module(f"tests_acceptance.{found.name}")
        for kind in vars(module).values():
            function = inspect.unwrap(kind) if callable(kind) else None
            if inspect.isfunction(function):
                yield from (name for name in inspect.signature(function).parameters if name.endswith("_at_start"))


@pytest.mark.parametrize("name", sorted({*names_asked_for()}))
def test_its_fixture_is_in_the_conftest(name: str) -> None:
    """A fixture of one file is not there when the first test is one of another file."""
    assert hasattr(conftest, name)


def test_all_are_found() -> None:
    """The search sees tests and fixtures."""
    assert {"counters_at_start", "nics_at_start", "xids_at_start"} <= {*names_asked_for()}
