"""How often one test was run, and whether its function ran to its end. A test that was run twice is not believed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COUNTS = pytest.StashKey[Counter[str]]()
_RAISED = pytest.StashKey["str | None"]()


def attempts_of(item: pytest.Item) -> int:
    """How often this test was run so far, by whatever was repeated most often: its protocol, its call or its function."""
    return max(_counts(item).values(), default=0)


def hidden_by_a_hook(item: pytest.Item) -> str | None:
    """Why a test that passed has shown nothing: its function raised, or was not called. None if it ran to its end.

    A coroutine, a distributed test and a test that is no Python function are run by others: nothing is known of them.
    """
    raised = item.stash.get(_RAISED, None)
    if raised is not None:
        return f"raised {raised}, and a hook of another plugin or conftest.py hid it"
    if _is_counted(item) and _counts(item)["function"] == 0:
        return "was not called: a hook of another plugin or conftest.py answered in its place"
    return None


def count(item: pytest.Item, event: str) -> None:
    """Count one more ``event`` of this test: a hook or a function that is called once if nobody repeats the test."""
    _counts(item)[event] += 1


def forget(item: pytest.Item) -> None:
    """Count from 0 again: the run itself looks at this test a second time."""
    item.stash[_COUNTS] = Counter()
    item.stash[_RAISED] = None


@contextlib.contextmanager
def counted_runs(item: pytest.Item) -> Iterator[None]:
    """Count every call of the test's own ``runtest``: pytest makes one, a plugin that repeats tests makes more."""
    run = item.runtest
    item.runtest = _counting(run, item, "runtest")  # type: ignore[method-assign]
    try:
        yield
    finally:
        item.runtest = run  # type: ignore[method-assign]


@contextlib.contextmanager
def counted_calls(item: pytest.Function) -> Iterator[None]:
    """Count every call of the test's function, and remember what the last one raised."""
    if not _is_counted(item):
        yield
        return
    function = item.obj
    item.obj = _counting(function, item, "function")
    try:
        yield
    finally:
        item.obj = function


def _counts(item: pytest.Item) -> Counter[str]:
    found = item.stash.get(_COUNTS, None)  # ten times a test: a default would be made each time
    if found is None:
        found = item.stash[_COUNTS] = Counter()
    return found


def _is_counted(item: pytest.Item) -> bool:
    """Whether the calls of the test's function are counted. pytest, or a plugin, looks at the kind of an asynchronous one."""
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        return False
    is_asynchronous = inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj)
    return not is_asynchronous and item.get_closest_marker("distributed") is None


def _counting(function: Callable[..., Any], item: pytest.Item, event: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **values: Any) -> Any:
        __tracebackhide__ = True
        count(item, event)
        item.stash[_RAISED] = None
        try:
            return function(*arguments, **values)
        except BaseException as error:
            item.stash[_RAISED] = type(error).__name__
            raise

    return call
