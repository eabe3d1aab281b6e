"""The site of docs/: every page has its place, links that leave docs/ lead somewhere, and pages keep their promised size."""

from __future__ import annotations

import importlib.util
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from types import ModuleType

DOCS = REPOSITORY / "docs"
MOST_WORDS = {"handover.md": 400, "quick-reference.md": 600}
STEPS = (
    "gpucluster info",
    "gpucluster launch --run",
    "verdict",
    "BAD PARTS",
    "resume",
    "gpucluster bundle",
    "gpucluster verify",
)
"""What an engineer does on handover day, in this order."""
STARTS = (
    "tutorial.md",
    "handover.md",
    "quick-reference.md",
    "writing-a-criterion.md",
    "thresholds.md",
    "thresholds.md#waivers",
    "how-to/new-gpu.md",
    "report.md",
    "how-to/evidence.md",
    "records.md",
    "troubleshooting.md",
)
"""What somebody who opens the index looks for."""


@pytest.fixture
def site() -> ModuleType:
    """docs/site_pages.py."""
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_a_place(site: ModuleType) -> None:
    """Exactly one, whatever pages come."""
    names = [file.relative_to(DOCS).with_suffix("").as_posix() for file in DOCS.rglob("*.md")]
    pages = [page for section in site.navigation(names) for found in section.values() for page in found]
    assert sorted(pages) == sorted(f"{name}.md" for name in names)


def test_a_new_page_needs_no_edit(site: ModuleType) -> None:
    """By its folder; what no section names comes last. A folder's own pages are not those of a folder below it."""
    found = site.navigation(["README", "tutorial", "how-to/zebra", "how-to/deep/a", "scaling", "odd"])
    assert found == [
        {"Start": ["README.md", "tutorial.md"]},
        {"How-to": ["how-to/zebra.md"]},
        {"Explanation": ["scaling.md"]},
        {"More": ["how-to/deep/a.md", "odd.md"]},
    ]


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("a.md", "[x](b.md#c)", "[x](b.md#c)"),
        ("a.md", "[x](../thresholds.yaml)", "x"),
        ("a.md", "[x](../README.md#install)", "x"),
        ("a.md", "[x](../CONTRIBUTING.md)", "[x](contributing.md)"),
        ("how-to/a.md", "[x](../../CHANGELOG.md#one)", "[x](../changelog.md#one)"),
        ("how-to/a.md", "[x](../images/a.svg) ![y](../images/a.svg)", "[x](../images/a.svg) ![y](../images/a.svg)"),
        ("how-to/a.md", "[x](../../deploy/slurm)", "x"),
        ("a.md", "[x](https://example.org) [y](#z)", "[x](https://example.org) [y](#z)"),
        ("a.md", "```\n[x](../a.py)\n```\n[y](../a.py)", "```\n[x](../a.py)\n```\ny"),
        ("a.md", "[x](gone.md) [y](generate_limits.py)", "[x](gone.md) y"),
    ],
)
def test_links_that_leave_the_folder(page: str, text: str, shown: str, site: ModuleType) -> None:
    """To a page that the site has too, or no link: nothing is published that it could lead to. A dead link stays, and fails."""
    assert site.linked(text, PurePosixPath(page)) == shown


def test_links_of_the_pages_from_the_top(site: ModuleType) -> None:
    """They lie in docs/ on the site."""
    text = "[a](docs/b.md) [c](thresholds.yaml) [d](https://example.org)"
    assert site.moved(text) == "[a](b.md) [c](../thresholds.yaml) [d](https://example.org)"


@pytest.mark.parametrize("name", MOST_WORDS)
def test_a_page_of_one_look(name: str) -> None:
    """Whoever has little time reads these: code and tables count too."""
    assert len((DOCS / name).read_text(encoding="utf-8").split()) <= MOST_WORDS[name]


def test_handover_day_is_in_order() -> None:
    """From ssh to signature; each step is on the page, after the one before it."""
    text = (DOCS / "handover.md").read_text(encoding="utf-8")
    at = [text.find(step) for step in STEPS]
    assert -1 not in at
    assert at == sorted(at)
    assert "sign" in text[at[-1] :].lower()


def test_the_tutorial_shows_what_it_says() -> None:
    """A picture of a machine, of a bad GPU, of the page and of an acceptance, each with words for who cannot see it."""
    pictures = re.findall(r"!\[(.*?)\]\(images/(.*?)\)", (DOCS / "tutorial.md").read_text(encoding="utf-8"))
    assert len(pictures) >= 4
    assert [name for words, name in pictures if len(words.split()) < 5 or not (DOCS / "images" / name).is_file()] == []


def test_the_index_names_what_people_look_for() -> None:
    """Each has a row of its own in the index."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [page for page in STARTS if f"]({page})" not in index] == []
