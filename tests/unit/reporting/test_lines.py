"""Text for a screen: broken at spaces only, and what rich makes of tables and texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.reporting.lines import printed, tied, whole, wrapped

WORDS = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30), min_size=1, max_size=20)


@given(WORDS, st.integers(1, 60))
def test_no_word_is_broken_or_lost(words: list[str], width: int) -> None:
    """A longer one than the screen stands alone in a line."""
    lines = wrapped(" ".join(words), width=width, indent="  ", later="    ")
    assert [word for line in lines for word in line.split()] == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert lines[0].startswith("  ")
    assert all(line.startswith("    ") for line in lines[1:])


def test_what_is_tied_stays_together() -> None:
    """Its blanks are blanks again in the end."""
    assert wrapped("one two three", width=8, indent="", later="") == ["one two", "three"]
    assert wrapped(f"one {tied('two three')}", width=9, indent="", later="") == ["one", "two three"]


@pytest.mark.parametrize("text", ["", " "])
def test_no_text_is_one_line(text: str) -> None:
    """Whoever prints a reason prints a line."""
    assert wrapped(text, width=80, indent="    ") == [""]


def test_a_line_of_text_is_printed_as_it_is() -> None:
    """A command is copied, and a verdict is searched: neither is folded. Nothing in it is markup, or a path, or a number."""
    text = f"[bold] /a/path {'x' * 100} 12 verdict"
    assert printed([Text(text, style="bold red")], width=20) == [text]
    assert printed([Text(text, style="bold red")], width=20, color=True) == [f"\x1b[1;31m{text}\x1b[0m"]


def test_a_table_fits() -> None:
    """Rich takes the room from the column that can be cut."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("name", Text("y" * 50, no_wrap=True, overflow="ellipsis"))
    assert printed([table], width=20) == [f"name  {'y' * 13}\N{HORIZONTAL ELLIPSIS}"]


def test_a_table_that_is_too_wide_takes_more_lines_a_row() -> None:
    """The first heading stands in the first line, no cell is cut, and a row without cells further on has one line."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("began", "verdict", "folder"):
        made.add_column(name, no_wrap=True, justify="right" if name == "verdict" else "left")
    made.add_row(Text("2026-11-27"), Text("REJECTED"), Text("a/folder"))
    made.add_row(Text("a heading"))
    assert printed([whole(made, width=24)], width=24) == [
        "began        verdict",
        "  folder",
        "2026-11-27  REJECTED",
        "  a/folder",
        "a heading",
    ]
    assert printed([whole(made, width=24, spare=("folder",))], width=24)[1] == "2026-11-27  REJECTED"
    assert whole(made, width=80) is made
    narrow = printed([whole(made, width=5)], width=40)
    assert [line.strip() for line in narrow[3:6]] == ["2026-11-27", "REJECTED", "a/folder"]
