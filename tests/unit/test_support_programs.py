"""A program that is installed and does not work is not used; coverage's tracer rests where it adds nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import tracing
from tests.support.programs import why_not_working


def test_a_program_that_works() -> None:
    """Its exit code is 0."""
    assert why_not_working("sh", "-c", "exit 0") is None


def test_a_program_that_is_not_there() -> None:
    """The reason names it."""
    assert why_not_working("no-such-program-x", "--version") == "no-such-program-x is not installed here"


def test_a_program_that_is_installed_and_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm's scontrol without a slurm.conf: the reason has its exit code and its last words."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert why_not_working("scontrol", "show", "hostnames", "a[1-2]") == (
        "scontrol show hostnames a[1-2] does not work here (exit code 1): fatal: Could not establish a configuration source"
    )


def test_a_program_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no program."""
    (tmp_path / "dcgmi").write_bytes(b"\x7fELF")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    reason = why_not_working("dcgmi", "--version")
    assert reason is not None
    assert reason.startswith("dcgmi does not work here")


class Tracer:
    """What coverage's tracer is asked for."""

    is_on = False

    def start(self) -> None:
        """Go on."""
        self.is_on = True

    def stop(self) -> None:
        """Rest."""
        self.is_on = False


def test_the_tracer_is_on_in_the_first_cases_of_a_test_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """In what they run, not in pytest between; a test of one unit has no process of its own measured."""
    monkeypatch.setenv(tracing.COVERAGE_OF_PROCESSES, "...")
    tracer = Tracer()
    plugin = tracing.Tracing(tests=Path("tests"), tracer=tracer)
    seen = []
    for folder, number in [("unit", 0), ("unit", 1), ("unit", 2), ("e2e", 0)]:
        path = Path("tests", folder, "test_x.py")
        item: Any = SimpleNamespace(nodeid=f"{path}::test_it[{number}]", path=path, obj=None)
        protocol, call = plugin.pytest_runtest_protocol(item), plugin.pytest_pyfunc_call()
        next(protocol)
        between = tracer.is_on
        next(call)
        seen.append((between, tracer.is_on, tracing.COVERAGE_OF_PROCESSES in os.environ))
        for hook in (call, protocol):
            with pytest.raises(StopIteration):
                next(hook)
        assert not tracer.is_on
        assert tracing.COVERAGE_OF_PROCESSES in os.environ
    assert seen == [(False, True, False), (False, True, False), (False, False, False), (False, True, True)]
