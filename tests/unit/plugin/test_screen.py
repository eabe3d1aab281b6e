"""The lines of a run fit a screen whose width is known, and stay whole in a log."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.plugin.header import PLAIN_WIDTH, Screen

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = "failed: straggler[bf16_sustained] at node23-gpu3 (gpu-node-23): 20.00 %, above 6.836 %; " + "and so on " * 20


class Reporter:
    """Keeps the lines it is given."""

    def __init__(self, *, is_terminal: bool, width: int) -> None:
        self.isatty, self.hasmarkup, self._tw = is_terminal, False, SimpleNamespace(fullwidth=width)
        self.lines: list[tuple[str, dict[str, bool]]] = []
        self.stats: dict[str, list[str]] = {}

    def ensure_newline(self) -> None:
        """Nothing is open."""

    def write_line(self, text: str, **markup: bool) -> None:
        """Keep it."""
        self.lines.append((text, markup))


def screen(reporter: Reporter) -> Screen:
    """On a reporter of pytest."""
    capture = SimpleNamespace(global_and_fixture_disabled=contextlib.nullcontext)
    plugins = {"terminalreporter": reporter, "capturemanager": capture}
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=plugins.__getitem__), get_verbosity=lambda: 0)
    return Screen(config)


@pytest.mark.parametrize("indent", ["", "      "])
@pytest.mark.parametrize("width", [80, 200])
def test_a_long_line_is_folded(indent: str, width: int) -> None:
    """At a terminal; no word is lost."""
    reporter = Reporter(is_terminal=True, width=width)
    screen(reporter).write(indent + LONG, red=True)
    texts = [text for text, _ in reporter.lines]
    assert len(texts) > 1
    assert max(map(len, texts)) <= width
    assert " ".join(" ".join(texts).split()) == LONG.strip()
    assert texts[0].startswith(f"{indent}failed: ")
    assert all(text.startswith(f"{indent}  ") for text in texts[1:])
    assert all(markup == {"red": True} for _, markup in reporter.lines)


@pytest.mark.parametrize(("columns", "width"), [("", PLAIN_WIDTH), ("80", 80)])
def test_a_log_has_whole_lines(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    """They are searched, by scripts too. ``COLUMNS`` is the width of tables all the same."""
    monkeypatch.setenv("COLUMNS", columns)
    reporter = Reporter(is_terminal=False, width=80)
    log = screen(reporter)
    log.write(LONG)
    assert [text for text, _ in reporter.lines] == [LONG]
    assert log.width == width


def test_the_width_is_that_of_the_terminal_while_a_test_is_captured() -> None:
    """Standard output is a file then: what joined was folded at 80 columns of a wider terminal."""
    reporter = Reporter(is_terminal=True, width=80)

    @contextlib.contextmanager
    def uncaptured() -> Iterator[None]:
        reporter._tw.fullwidth = 200
        yield
        reporter._tw.fullwidth = 80

    one = screen(reporter)
    one._config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled = uncaptured
    assert one.width == 200
    one.write("word " * 30)
    assert len(reporter.lines) == 1


class OfPytest(Reporter):
    """As pytest's own: another plugin may have put its reporter in that place."""

    __module__ = "_pytest.terminal"


@pytest.mark.parametrize(
    ("kind", "durations", "verbosity", "left"),
    [(OfPytest, None, 0, 2), (OfPytest, 0, 0, 4), (OfPytest, 5, 0, 4), (OfPytest, None, 1, 4), (Reporter, None, 0, 4)],
)
def test_reports_that_the_terminal_gets(kind: type[Reporter], durations: int | None, verbosity: int, left: int) -> None:
    """Of phases that passed, only what ``--durations`` and ``-v`` read. Others that report get all."""
    manager = pytest.PytestPluginManager()
    seen: dict[str, list[str]] = {"terminalreporter": [], "other": []}
    for name, phases in seen.items():
        one = kind(is_terminal=False, width=80)
        one.pytest_runtest_logreport = lambda report, phases=phases: phases.append(report.when)  # type: ignore[attr-defined]
        manager.register(one, name)
    config: Any = SimpleNamespace(pluginmanager=manager, get_verbosity=lambda: verbosity, hook=manager.hook)
    config.option = SimpleNamespace(durations=durations)
    item: Any = SimpleNamespace(ihook=manager.hook)
    reports: Any = [
        SimpleNamespace(when=when, outcome=outcome)
        for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "passed"), ("teardown", "failed"))
    ]
    log = Screen(config)
    log.take_over()
    log.log(item, reports)
    assert seen["other"] == ["setup", "call", "teardown", "teardown"]
    assert len(seen["terminalreporter"]) == left
