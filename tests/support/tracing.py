"""Coverage's tracer, on only where it adds something: in test files as they are imported, in fixtures, and in tests.

A tracer makes 4 CPU seconds of Python 8, pytest's own and those of pytest-xdist too. So it rests in what pytest does between
tests, in the process that only hands out tests, and in cases and properties that run the same lines again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

MEASURED_CASES = 2
"""Of each parametrized test, so many cases are measured for coverage: a tracer makes 11 CPU seconds of them 26."""
RUNS = ("e2e", "finetune")
"""Folders of tests whose processes are measured too: those that tests of one unit start run the same lines again."""
COVERAGE_OF_PROCESSES = "COVERAGE_PROCESS_CONFIG"
"""The variable by which coverage measures the processes that a test starts."""


def tracer_here() -> Any:
    """Coverage's tracer of this thread; None where nothing is measured, and beside a debugger."""
    tracer: Any = sys.gettrace()
    return tracer if hasattr(tracer, "start") and hasattr(tracer, "stop") else None


@dataclass(eq=False)
class Tracing:
    """A plugin of pytest: the tracer rests from its registration to the end of the session, but in what it wraps."""

    tests: Path
    tracer: Any
    is_on: bool = False
    is_wanted: bool = False
    cases: Counter[str] = field(default_factory=Counter)

    @contextlib.contextmanager
    def _on(self) -> Iterator[None]:
        if self.is_on or not self.is_wanted:
            yield
            return
        self.is_on = True
        self.tracer.start()
        try:
            yield
        finally:
            self.tracer.stop()
            self.is_on = False

    def pytest_unconfigure(self) -> None:
        """Coverage ends what it has begun."""
        self.tracer.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, object, object]:
        """Import a file of tests, with what it imports of ours. What is wrong with it is reported by the caller."""
        if isinstance(collector, pytest.Module):
            self.is_wanted = True
            with self._on(), contextlib.suppress(Exception, pytest.skip.Exception):
                collector.obj  # noqa: B018 -- pytest imports the file when it is asked for
            self.is_wanted = False
        return (yield)

    def is_measured(self, item: pytest.Item) -> bool:
        """Whether a case adds to coverage: one of the first, and no property, whose examples run the same lines again."""
        name = item.nodeid.partition("[")[0]
        self.cases[name] += 1
        return self.cases[name] <= MEASURED_CASES and not getattr(getattr(item, "obj", None), "is_hypothesis_test", False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Choose what of this test is measured: itself, and the processes that it starts."""
        self.is_wanted, of_processes = self.is_measured(item), os.environ.get(COVERAGE_OF_PROCESSES)
        if not self.is_wanted or item.path.relative_to(self.tests).parts[0] not in RUNS:
            os.environ.pop(COVERAGE_OF_PROCESSES, None)
        try:
            return (yield)
        finally:
            self.is_wanted = False
            if of_processes is not None:
                os.environ[COVERAGE_OF_PROCESSES] = of_processes

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self) -> Generator[None, object, object]:
        """What a fixture runs."""
        with self._on():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """What a test runs."""
        with self._on():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """What a fixture runs after its ``yield``."""
        with self._on():
            return (yield)
