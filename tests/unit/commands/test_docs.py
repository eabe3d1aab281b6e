"""``gpucluster docs``: pages by name, in a checkout and as a wheel has them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands import docs
from pytest_gpucluster.commands.main import main
from pytest_gpucluster.errors import ConfigurationError
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

PAGES = ("README", "handover", "thresholds", "how-to/slurm", "how-to/launch", "decisions/0001-one", "decisions/0012-two")


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Path]:
    """A folder of pages."""
    for name in PAGES:
        file = tmp_path / f"{name}.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"# Title of {name}\n\ntext\n", encoding="utf-8")
    return docs.pages(tmp_path)


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("handover", "handover"),
        ("slurm", "how-to/slurm"),
        ("how-to/slurm.md", "how-to/slurm"),
        ("docs/how-to/slurm.md#one", "how-to/slurm"),
        ("docs/decisions/0012", "decisions/0012-two"),
        ("0001", "decisions/0001-one"),
        ("thresh", "thresholds"),
        ("README", "README"),
    ],
)
def test_a_page_by_its_name(text: str, page: str, found: dict[str, Path]) -> None:
    """With or without its folder and ending, as messages name it, or its beginning."""
    assert docs.page_of(text, found) == found[page]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slrum", "there is no page 'slrum'; gpucluster docs lists them. Did you mean 'slurm'?"),
        ("zzzz", "there is no page 'zzzz'; gpucluster docs lists them."),
        ("", "there is no page ''"),
        ("00", "'00' may be decisions/0001-one, decisions/0012-two"),
        ("../README", "there is no page '../README'"),
    ],
)
def test_no_such_page(text: str, said: str, found: dict[str, Path]) -> None:
    """The one that was meant is named; several are listed."""
    with pytest.raises(ConfigurationError) as refused:
        docs.page_of(text, found)
    assert str(refused.value).startswith(said)


def test_the_list(found: dict[str, Path]) -> None:
    """Name and title, those of the top first; decisions are counted."""
    assert docs.listed(found).splitlines() == [
        "handover       Title of handover",
        "thresholds     Title of thresholds",
        "how-to/launch  Title of how-to/launch",
        "how-to/slurm   Title of how-to/slurm",
        "decisions/...: 2 more pages",
        "gpucluster docs NAME prints a page",
    ]


@pytest.mark.parametrize("head", ["<!-- Made by a program. -->\n", "\n\n", "---\nicon: x\n---\n\n"])
def test_the_title_is_a_heading(head: str, tmp_path: Path) -> None:
    """Whatever stands above it, as in a page that a program writes; a page without one has its name."""
    (tmp_path / "limits.md").write_text(f"{head}# The limits\n", encoding="utf-8")
    (tmp_path / "bare.md").write_text(f"{head}text\n", encoding="utf-8")
    assert docs.listed(docs.pages(tmp_path)).splitlines()[:2] == ["bare    bare", "limits  The limits"]


def test_in_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    """The pages of this repository."""
    assert main(["docs", "handover"]) == 0
    assert capsys.readouterr().out == (REPOSITORY / "docs" / "handover.md").read_text(encoding="utf-8")
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("handover ") for line in lines)
    assert max(map(len, lines)) <= 80, "a title is longer than a screen"
    assert main(["docs", "nowhere"]) == 2


def test_without_any_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation may lack them; a wheel's lie inside the package."""
    monkeypatch.setattr(docs, "__file__", str(tmp_path / "package" / "commands" / "packaged" / "docs.py"))
    with pytest.raises(ConfigurationError, match="no documentation with it"):
        docs.docs_folder()
    (tmp_path / "package" / "docs").mkdir(parents=True)
    (tmp_path / "package" / "docs" / "README.md").touch()
    assert docs.docs_folder() == tmp_path / "package" / "docs"


@pytest.mark.parametrize(
    ("typed", "ended"),
    [
        (["report"], (4, "gpucluster report: gpucluster-results cannot be read: No such file or directory")),
        (["watch", "nowhere", "--once"], (2, "gpucluster watch: nowhere does not exist; say the results directory of a run")),
    ],
)
def test_a_folder_that_is_not_there(
    typed: list[str],
    ended: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code, and one sentence; `report` without a name means the default."""
    monkeypatch.chdir(tmp_path)
    assert (main(typed), capsys.readouterr().err[: len(ended[1])]) == ended


@pytest.mark.parametrize("words", [["docs"], ["docs", "glossary"], ["lint", "--schema"]])
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    """As with ``| head -1``: nothing is said, also where all of it fits the buffer."""
    readable, writable = os.pipe()
    os.close(readable)
    command = [sys.executable, "-m", "pytest_gpucluster.cli", *words]
    ran = subprocess.run(command, stdout=writable, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writable)
    assert (ran.stderr, ran.returncode) == ("", 141)
