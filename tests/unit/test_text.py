"""Text made fit: what any text becomes, and that it can be in XML, in strict JSON and on a terminal."""

from __future__ import annotations

import json
import os
import unicodedata
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.text import BAR, LONGEST, UNPRINTABLE, barred, barred_below, one_line, shortened, shortlist, visible

ANYTHING = st.text(st.characters(codec=None, exclude_categories=()), max_size=200)
ENDS_A_LINE = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@given(ANYTHING)
def test_any_text_fits(text: str) -> None:
    """No control character but newline and tab, no direction of writing; XML and strict JSON give it back as it is."""
    fit = visible(text)
    for character in fit:
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in BIDI
    fit.encode("utf-8")
    assert ET.fromstring(ET.tostring(_element(fit))).text == (fit or None)  # noqa: S314 -- our own text
    assert json.loads(json.dumps(strict_json({text: text}), ensure_ascii=False).encode()) == {fit: fit}


def test_every_unfit_character_is_found() -> None:
    """Alone and within other text, every character of Unicode: what can be printed fits, and every other is looked at."""
    for character in map(chr, range(0x110000)):
        unfit = UNPRINTABLE.match(character) is not None
        assert (visible(f"a{character}") != f"a{character}") == unfit, hex(ord(character))


@given(ANYTHING)
def test_fit_text_stays(text: str) -> None:
    """Twice is once; and text without an unfit character is not touched."""
    assert visible(visible(text)) == visible(text)
    plain = "".join(character for character in text if character.isprintable() or character in "\n\t")
    assert visible(plain) == plain


@given(ANYTHING)
def test_foreign_lines(text: str) -> None:
    """One line is one line; of several lines each stands behind a bar, or all but the first."""
    assert not set(one_line(text)) & set(ENDS_A_LINE)
    assert all(line.startswith(BAR) for line in barred(text).split("\n"))
    first, *others = barred_below(text).split("\n")
    assert first == visible(text).partition("\n")[0]
    assert all(line.startswith(BAR) for line in others)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        (os.fsdecode(b"caf\xe9"), r"caf\udce9"),
        ("a\rb\r\nc\x08", "a\\rb\nc\\x08"),
        ("\x00\x7f\x9b\x85", r"\x00\x7f\x9b\x85"),
        ("\u202eevil\u2066\u200f", r"\u202eevil\u2066\u200f"),
        ("\u2028\u2029\ufffe\uffff\ufdd0\ufeff\U0001fffe", r"\u2028\u2029\ufffe\uffff\ufdd0\ufeff\U0001fffe"),
        ("naïve 😀 \ufffd\t|", "naïve 😀 \ufffd\t|"),
    ],
)
def test_escapes_are_those_of_python(text: str, shown: str) -> None:
    """As in a string's repr; what can be read stays."""
    assert visible(text) == shown


def _element(text: str) -> ET.Element:
    element = ET.Element("a", {"b": text})
    element.text = text
    return element


@given(st.integers(min_value=0, max_value=3 * LONGEST))
def test_a_long_reason_keeps_both_ends(length: int) -> None:
    """The cause stands at one of them. The number of characters between is told, and no text is much longer than the limit."""
    whole = "".join(chr(ord("a") + number % 26) for number in range(min(length, 52))).ljust(length, "-") + "end"
    found = shortened(whole)
    assert found[:50] == whole[:50]
    assert found.endswith("end")
    assert len(found) <= LONGEST + 50
    assert (found == whole) == (len(whole) <= LONGEST)


@pytest.mark.parametrize(
    ("names", "text"),
    [("", ""), ("a", "a"), ("ab", "a, b"), ("abc", "a, b and 1 more"), ("abcd", "a, b and 2 more")],
)
def test_a_shortlist_says_how_many_are_left_out(names: str, text: str) -> None:
    """A name is shown or counted."""
    assert shortlist([*names], most=2) == text
