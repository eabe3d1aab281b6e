"""The comparison of planted faults sees a case that left, whether it was a parameter, a test or a name in a loop."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.project import planted_faults

if TYPE_CHECKING:
    from pathlib import Path

PARAMETERS = "import pytest\n@pytest.mark.parametrize('what', ['a', 'b', 'c d'])\ndef test_it(what): pass\n"
LOOP = "import pytest\n@pytest.mark.cases('a', 'b', 'c d')\ndef test_it(): pass\n"


def committed(repository: Path, text: str) -> str:
    """A commit with this as its only test."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository))
    (repository / "tests").mkdir(exist_ok=True)
    (repository / "tests" / "test_some.py").write_text(text, encoding="utf-8")
    if not (repository / ".git").exists():
        subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--no-gpg-sign", "-m", "x"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_what_left_and_what_is_new(tmp_path: Path) -> None:
    """A loop that names all cases of a parametrized test loses none; one that forgets a name does."""
    texts = {"before": PARAMETERS, "loop": LOOP, "forgets": LOOP.replace("'b', ", ""), "other": "def test_new(): pass\n"}
    found = {name: planted_faults.collected(committed(tmp_path, text), tmp_path) for name, text in texts.items()}
    assert found["before"] == found["loop"] == {f"'tests/test_some.py::test_it[{what}]'" for what in ("a", "b", "c d")}
    assert planted_faults.report(found["before"], found["forgets"]).splitlines() == [
        "left 'tests/test_some.py::test_it[b]'",
        "3 cases before, 2 after: 1 left, 0 are new",
    ]
    assert planted_faults.report(found["before"], found["other"]).endswith("3 cases before, 1 after: 3 left, 1 are new")


def test_a_commit_that_cannot_be_collected_is_no_empty_list(tmp_path: Path) -> None:
    """Else each of its cases would have left, or none would be missed."""
    commit = committed(tmp_path, "import nothing_of_this_name\n")
    with pytest.raises(SystemExit, match="exit code 2"):
        planted_faults.collected(commit, tmp_path)
