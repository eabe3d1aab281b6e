"""The text of pytest's reports: its reporters print it as it is, and no line of it may look like a line of ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from _pytest._code.code import ReprEntryNative, ReprFileLocation  # no public way

from pytest_gpucluster.text import barred, framed, one_line, visible


def make_fit(report: Any) -> None:
    """Escape unfit characters in what a TestReport or CollectReport says, and set in the lines of an error."""
    report.longrepr = _fit_error(report.longrepr)
    report.sections = [(one_line(title), visible(content)) for title, content in report.sections]
    if hasattr(report, "wasxfail"):
        report.wasxfail = one_line(report.wasxfail)


def _fit_error(error: Any) -> Any:
    """A text, the place and the reason of a skip, or a traceback, which is changed in place."""
    if isinstance(error, str):
        return framed(error)
    if isinstance(error, tuple):
        return tuple(one_line(part) if isinstance(part, str) else part for part in error)
    return _fit_part(error)


def _fit_part(part: Any) -> Any:
    if isinstance(part, str):
        return visible(part)
    if isinstance(part, (list, tuple)):
        return type(part)(_fit_part(one) for one in part)
    if isinstance(part, ReprEntryNative):
        part.lines = [barred("".join(part.lines).rstrip("\n")) + "\n"]
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            setattr(part, field.name, _fit_part(getattr(part, field.name)))
    if isinstance(part, ReprFileLocation):
        part.message = framed(part.message)  # the summary shows it whole where CI is set
    return part
