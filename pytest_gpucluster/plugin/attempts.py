"""How often a test was run. A plugin that repeats a test until it is green is known by that, whatever its name."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.plugin.stash_keys import IN_BODY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_COUNTS = pytest.StashKey[Counter[str]]()


def attempts_of(item: pytest.Item) -> int:
    """How often this test was run so far, by whatever was repeated most often: its protocol, its call or its function."""
    return max(_counts(item).values(), default=0)


def note(item: pytest.Item, what: str) -> None:
    """Count one more of ``what``."""
    _counts(item)[what] += 1


def _counts(item: pytest.Item) -> Counter[str]:
    return item.stash.setdefault(_COUNTS, Counter())


class Attempts:
    """A pytest plugin that counts; it changes nothing."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count protocols."""
        note(item, "protocol")
        return (yield)

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
        if pyfuncitem.get_closest_marker("distributed") is not None or _is_asynchronous(function):
            return (yield)
        pyfuncitem.obj = _counted(function, pyfuncitem)
        try:
            return (yield)
        finally:
            pyfuncitem.obj = function


def _is_asynchronous(function: Callable[..., Any]) -> bool:
    """Whether pytest, or a plugin, looks at the kind of function before the call."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _counted(function: Callable[..., Any], item: pytest.Function) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **values: Any) -> Any:
        __tracebackhide__ = True
        note(item, "function")
        return function(*arguments, **values)

    return call
