"""The end of a run beside pytest's own reports: torchrun's banner, and a verdict also where a reporter falls over."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpucluster.judging.verdict import Verdict


class Told(Protocol):
    """The run, as far as it is told of trouble."""

    verdict: Verdict | None

    def note_trouble(self, told: str) -> None:
        """Something of this run's results is not on disk."""


class LastWords:
    """Innermost around the other reporters: one that meets a full disk must not cost the terminal its verdict."""

    def __init__(self, run: Told) -> None:
        """``run`` tells the trouble."""
        self._run = run

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """A report that could not be written is said beside the verdict, and is no success."""
        try:
            return (yield)
        except OSError as error:
            if self._run.verdict is None:
                raise
            self._run.note_trouble(f"{error.filename or 'a report'} could not be written: {error.strerror}")
            session.exitstatus = int(session.exitstatus) or int(pytest.ExitCode.TESTS_FAILED)
            return None


def write_torchrun_error_file(line: str) -> None:
    """What torchrun's closing banner shows as the cause, in its own format (torch.distributed.elastic error files)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {"message": f"handover {line}"[:120], "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
