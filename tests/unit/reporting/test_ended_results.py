"""``gpucluster report`` does not put a damaged journal in the place of the results of a run that ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands.main import main
from tests.support.evidence import keep_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda journal: journal[: len(journal) // 2],
    "empty": lambda journal: b"",
    "without its verdict": lambda journal: b"".join(journal.splitlines(keepends=True)[:-1]),
    "a torn last line": lambda journal: journal[:-20],
    "a damaged line": lambda journal: journal.replace(b'"outcome"', b'"outcom', 1),
    "another file": lambda journal: bytes(range(256)) * 8,
}


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file with its content."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("more", [False, True])
def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, *, more: bool) -> None:
    """A sentence, exit code 4, and every file as it was, also where the JUnit file has another place."""
    kept = keep_run(tmp_path / "r")
    journal = kept / "journal.jsonl"
    journal.write_bytes(DAMAGED[case](journal.read_bytes()))
    before = files_of(kept)
    assert main(["report", str(kept), *(["--junitxml", str(tmp_path / "j.xml")] if more else [])]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{kept / 'results.json'} is of a run that ended, and its journal is not whole: nothing was written" in said.err
    assert files_of(kept) == before
    assert not (tmp_path / "j.xml").exists()
    assert main(["report", str(kept), "-o", str(tmp_path / "page.html")]) == 1
    assert "REJECTED" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["unfinished", "rebuilt_from_journal", "whole", "gone", "half"])
def test_what_may_be_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """Results of a run that goes on, that were made of a journal, or that cannot be read; and any whose journal is whole."""
    kept = keep_run(tmp_path / "r")
    journal, results = kept / "journal.jsonl", kept / "results.json"
    if flag != "whole":
        journal.write_bytes(journal.read_bytes()[:9000])
        document = json.loads(results.read_bytes())
        results.write_text(json.dumps({**document, "environment": {flag: True}})[: 900 if flag == "half" else None])
    if flag == "gone":
        results.unlink()
    assert main(["report", str(kept)]) == 1
    word = "REJECTED" if flag == "whole" else "INCOMPLETE"
    assert json.loads(results.read_bytes())["verdict"] == word
    assert word in capsys.readouterr().out
