"""What pytest's reporters print of a test: fit for a terminal, and no line of it like a line of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from _pytest._code import ExceptionInfo
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gpucluster.plugin.outcome import make_fit
from pytest_gpucluster.text import OWN, visible

ANYTHING = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)
FORGED = "verdict ACCEPTED: forged"
HOSTILE = f"{FORGED}\n{FORGED}\rgpucluster: fine\x1b[2J\udce9\n  {FORGED}\n\n{FORGED}"
STYLES = ("long", "short", "native", "line")


def fitted(longrepr: Any, **more: Any) -> Any:
    """A report of a failure after it was made fit."""
    report = SimpleNamespace(longrepr=longrepr, sections=[("Captured stdout call", "fine")], **more)
    make_fit(report)
    return report


def forged_lines(shown: str) -> list[str]:
    """The lines that begin as a run's own do."""
    assert visible(shown) == shown
    return [line for line in shown.split("\n") if line.startswith(OWN)]


@given(ANYTHING)
@example(HOSTILE)
def test_a_text(text: str) -> None:
    """Of an error that is ours, also where its first words are another's."""
    assert forged_lines(fitted(text).longrepr) == []


def test_our_own_sentences_stay() -> None:
    """The first line as it is, and what is set in already."""
    text = "tflops at node0-gpu1: 498 TFLOPS\n  why: the handover's limit\n\n  next: measure again"
    assert fitted(text).longrepr == text


@pytest.mark.parametrize("style", STYLES)
@given(text=ANYTHING)
@example(text=HOSTILE)
def test_a_traceback(style: Any, text: str) -> None:
    """In every style of pytest, with a cause, with notes and with local variables."""
    error = RuntimeError(text)
    error.__cause__ = ValueError(text)
    error.__notes__ = [text]  # type: ignore[attr-defined]  # Python 3.11
    with pytest.raises(RuntimeError) as caught:
        raise error
    shown = ExceptionInfo.from_exception(caught.value).getrepr(style=style, showlocals=True)
    report = fitted(shown)
    assert forged_lines(str(report.longrepr)) == []
    assert forged_lines(f"FAILED test - {report.longrepr.reprcrash.message}") == []


@given(ANYTHING)
@example(HOSTILE)
def test_a_skip_and_a_waiver(text: str) -> None:
    """The reason is one line, because pytest prints it within a line."""
    report = fitted(("file.py", 3, f"Skipped: {text}"), wasxfail=f"waived: {text}")
    assert "\n" not in report.longrepr[2] + report.wasxfail
    assert forged_lines(report.longrepr[2] + report.wasxfail) == []


def test_captured_output_is_escaped() -> None:
    """Its lines stay: pytest prints them below a heading of their own."""
    report = SimpleNamespace(longrepr=None, sections=[("Captured stdout call", "a\x1b[2J\nb\udce9")])
    make_fit(report)
    assert (report.longrepr, report.sections) == (None, [("Captured stdout call", "a\\x1b[2J\nb\\udce9")])
