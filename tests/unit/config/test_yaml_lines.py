"""YAML as plain data with line numbers. Hostile files are in tests/unit/thresholds/test_lint.py."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.config import yaml_lines


def test_yaml_1_1_surprises_stay_text() -> None:
    """Words, octals, sexagesimals and dates are what is written; 1e3 is a number."""
    document = yaml_lines.parse(b"a: [no, off, 0777, 1:30, 2026-11-20, 1_000, 1e3, ~, '5']", file="f")
    assert document.data["a"] == ["no", "off", "0777", "1:30", "2026-11-20", "1_000", 1000.0, None, "5"]
    assert document.problems == ()


def test_every_path_knows_its_line() -> None:
    """Keys, items of lists and values in flow style; a path that is not there has the line of its parent."""
    document = yaml_lines.parse(b"a:\n  - 1\n  - {b: 2,\n     c: 3}\nd: x\n", file="f")
    assert document.data == {"a": [1, {"b": 2, "c": 3}], "d": "x"}
    lines = {path: place.line for path, place in document.where.items()}
    expected = {(): 1, ("a",): 1, ("a", 0): 2, ("a", 1): 3, ("a", 1, "b"): 3, ("a", 1, "c"): 4, ("d",): 5}
    assert lines == expected
    assert document.find(("a", 1, "c", "nothing")) == ("f", 4)


BRACKETS, ITEMS = "a: " + "[" * 1_000_000, "a: [" + "1," * 500_000 + "]"
INDENTED = "".join(" " * depth + "a:\n" for depth in range(1400))


@pytest.mark.parametrize("content", [BRACKETS, ITEMS, INDENTED], ids=["brackets", "items", "indented"])
def test_large_input_is_refused_before_it_is_composed(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither depth nor number of values costs more than a moment, because reading stops at the first one too many."""
    monkeypatch.delattr(yaml, "compose")
    assert len(yaml_lines.parse(content.encode(), file="f").problems) == 1


def test_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML's own parser gives the same data, lines and problems."""
    good, bad = b"a: {b: [1, x]}\n", b"a: 1\na: !!str 2\n"
    fast = [yaml_lines.parse(content, file="f") for content in (good, bad)]
    monkeypatch.setattr(yaml_lines, "_FAST_LOADER", yaml.BaseLoader)
    assert [yaml_lines.parse(content, file="f") for content in (good, bad)] == fast


TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=8)
KEYS = TEXT.filter(lambda key: key != "<<")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, PLAIN, max_size=4))
def test_json_is_read_as_it_is(data: dict[str, object]) -> None:
    """JSON is YAML: a written mapping is read again."""
    assert yaml_lines.parse(json.dumps(data).encode(), file="f").data == data
