"""How often a test was run, and what its function raised: a plugin that repeats tests, or hides failures, is known by that."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.plugin.stash_keys import IN_BODY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

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


def note(item: pytest.Item, what: str) -> None:
    """Count one more of ``what``."""
    _counts(item)[what] += 1


def _counts(item: pytest.Item) -> Counter[str]:
    return item.stash.setdefault(_COUNTS, Counter())


class Attempts:
    """A pytest plugin that counts; it changes nothing."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count protocols, and within each how often the test's own ``runtest`` is called, by whom ever."""
        note(item, "protocol")
        run = item.runtest
        item.runtest = _counting(run, item, "runtest")  # type: ignore[method-assign]
        try:
            return (yield)
        finally:
            item.runtest = run  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Count phases; a report out of the test's body is of a block of ``subtests.test()``."""
        if not item.stash.get(IN_BODY, False):
            note(item, call.when)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Count calls."""
        note(item, "hook of the call")
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Count calls of the hook, and of the function inside it."""
        note(pyfuncitem, "hook of the function")
        function = pyfuncitem.obj
        if not _is_counted(pyfuncitem):
            return (yield)
        pyfuncitem.obj = _counting(function, pyfuncitem, "function")
        try:
            return (yield)
        finally:
            pyfuncitem.obj = function


def _is_counted(item: pytest.Item) -> bool:
    """Whether the calls of the test's function are counted. pytest, or a plugin, looks at the kind of an asynchronous one."""
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        return False
    is_asynchronous = inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj)
    return not is_asynchronous and item.get_closest_marker("distributed") is None


def _counting(function: Callable[..., Any], item: pytest.Item, what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **values: Any) -> Any:
        __tracebackhide__ = True
        note(item, what)
        item.stash[_RAISED] = None
        try:
            return function(*arguments, **values)
        except BaseException as error:
            item.stash[_RAISED] = type(error).__name__
            raise

    return call
