"""Plain and distributed tests are in the plan like any other: whatever leaves one out, the verdict says so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

JUDGES = """
import pytest

def test_judged(criterion):
    criterion.require(1)

class TestGroup:
    def test_in_class(self):
        pass
"""
PLAIN = """
import pytest

def test_alone():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_sized(size):
    pass

@pytest.mark.distributed(per="cluster")
def test_sum(rank):
    pass
"""
FILES = {"test_judges.py": JUDGES, "deep/test_plain.py": PLAIN}
EVERYTHING = {"judged", "in_class", "alone", "sized[1]", "sized[2]", "sum"}
CONFTEST = "conftest.py"
HOOKS = {
    "modifyitems": (
        "def pytest_collection_modifyitems(items):\n    items[:] = [one for one in items if 'sum' not in one.name]\n"
    ),
    "modifyitems, last": (
        "import pytest\n@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_collection_modifyitems(items):\n"
        "    yield\n    items[:] = [one for one in items if 'sum' not in one.name]\n"
    ),
    "collection finish": (
        "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_collection_finish(session):\n"
        "    session.items[:] = [one for one in session.items if 'sum' not in one.name]\n"
    ),
    "collect report": (
        "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_make_collect_report(collector):\n"
        "    report = yield\n    report.result = [one for one in report.result if 'sum' not in one.name]\n    return report\n"
    ),
}
IGNORES = "def pytest_ignore_collect(collection_path):\n    return True if 'plain' in collection_path.name else None\n"
OPTIONS = {
    ("-k", "judged"): {"judged"},
    ("-m", "not slow"): EVERYTHING - {"sized[1]", "sized[2]"},
    ("--deselect", "deep/test_plain.py::test_sized[2]"): EVERYTHING - {"sized[2]"},
    ("--deselect", "deep"): {"judged", "in_class"},
    ("test_judges.py::test_judged", "deep/test_plain.py::test_sum"): {"judged", "sum"},
    ("test_judges.py::TestGroup", "deep"): EVERYTHING - {"judged"},
}
AT_NIGHT = (("--deselect", "deep"), ("test_judges.py::TestGroup", "deep"))
"""Each has a sibling by day: another thing deselected, another test named."""
LEFT_OUT = "not_selected"


def started(folder: Path, *arguments: str, files: dict[str, str] | None = None) -> FinishedRun:
    """A rehearsal of a folder whose only entry is ``judged``."""
    for name, text in {**FILES, **(files or {})}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n", encoding="utf-8")
    limits = write_limits(folder / "limits.yaml", {"judged": entry()}, extends=False)
    return run_pytest(folder, "--gpucluster", limits, *arguments)


def by_name(ran: FinishedRun) -> dict[str, str]:
    """The outcome of each criterion and plain test."""
    return {row["criterion"]: row["outcome"] for row in ran.results["criteria"]}


def assert_left_out(ran: FinishedRun, names: set[str]) -> None:
    """The verdict is INCOMPLETE and counts ``names``; everything else passed, and is in the JUnit file."""
    found = by_name(ran)
    assert {name for name, outcome in found.items() if outcome == LEFT_OUT} == names
    assert set(found.values()) <= {"passed", LEFT_OUT}
    assert ran.results["verdict"] == "INCOMPLETE"
    assert f"{len(names)} not selected" in ran.verdict_line
    shown = {case.name.removeprefix("test_") for case in ran.cases}
    assert not names & shown
    assert set(found) - names <= shown


def test_nothing_left_out(tmp_path: Path) -> None:
    """All are in the plan under their names, and the rehearsal is one."""
    ran = started(tmp_path)
    assert by_name(ran) == dict.fromkeys(EVERYTHING, "passed")
    assert ran.results["verdict"] == "REHEARSED"


@pytest.mark.parametrize(
    "options", [pytest.param(one, marks=pytest.mark.slow) if one in AT_NIGHT else one for one in OPTIONS], ids=" ".join
)
def test_by_an_option(tmp_path: Path, options: tuple[str, ...]) -> None:
    """By -k, -m, --deselect, or by naming tests of a file."""
    assert_left_out(started(tmp_path, *options), EVERYTHING - OPTIONS[options])


@pytest.mark.parametrize("hook", HOOKS)
def test_by_a_hook(tmp_path: Path, hook: str) -> None:
    """By a conftest, wherever its hook acts."""
    assert_left_out(started(tmp_path, files={CONFTEST: HOOKS[hook]}), {"sum"})


@pytest.mark.parametrize(
    ("files", "options"),
    [
        pytest.param({CONFTEST: "collect_ignore = ['deep']\n"}, (), marks=pytest.mark.slow),
        pytest.param({CONFTEST: "collect_ignore_glob = ['*plain*']\n"}, (), marks=pytest.mark.slow),
        ({CONFTEST: IGNORES}, ()),
        ({}, ("--ignore=deep/test_plain.py",)),
        pytest.param({}, ("--ignore=deep",), marks=pytest.mark.slow),
        pytest.param({}, ("--ignore-glob=*plain*",), marks=pytest.mark.slow),
    ],
)
def test_by_ignoring_a_file(tmp_path: Path, files: dict[str, str], options: tuple[str, ...]) -> None:
    """Its tests are not known, so the file stands for them."""
    assert_left_out(started(tmp_path, *options, files=files), {"deep/test_plain.py"})


def test_what_pytest_never_collects_is_not_missed(tmp_path: Path) -> None:
    """A file of another name, a hidden folder, a virtual environment."""
    (tmp_path / ".tox").mkdir()
    (tmp_path / "venv").mkdir()
    others = {".tox/test_a.py": PLAIN, "venv/pyvenv.cfg": "", "venv/test_b.py": PLAIN, "helper.py": "", "deep/plain.py": ""}
    ran = started(tmp_path, files=others)
    assert by_name(ran) == dict.fromkeys(EVERYTHING, "passed")


def test_other_files_of_the_folder_are_not_asked_for(tmp_path: Path) -> None:
    """Only what was named is of the run, also where its neighbour is ignored."""
    ran = started(tmp_path, "test_judges.py", "--ignore=test_other.py", files={"test_other.py": PLAIN})
    assert by_name(ran) == {"judged": "passed", "in_class": "passed"}
    assert ran.results["verdict"] == "REHEARSED"


def test_by_last_failed(tmp_path: Path) -> None:
    """With --lf pytest does not collect the other files; their tests are missed all the same."""
    cache = tmp_path / ".pytest_cache" / "v" / "cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({"test_judges.py::test_judged": True}), encoding="utf-8")
    ran = started(tmp_path, "--lf", "-p", "cacheprovider")
    assert_left_out(ran, EVERYTHING - {"judged"})


def test_cut_short(tmp_path: Path) -> None:
    """A plain test that ends the run leaves the others missing; with -x they are not selected."""
    ends = "import pytest\n\ndef test_ends():\n    pytest.exit('enough')\n\ndef test_later():\n    pass\n"
    ran = started(tmp_path, "test_ends.py", files={"test_ends.py": ends})
    assert by_name(ran)["later"] == "missing"
    fails = "def test_fails():\n    assert 0\n\ndef test_later():\n    pass\n"
    ran = started(tmp_path, "test_fails.py", "-x", files={"test_fails.py": fails})
    assert by_name(ran) == {"fails": "failed", "later": LEFT_OUT, "judged": LEFT_OUT}
    assert ran.results["verdict"] == "REJECTED"


def test_plain_tests_of_one_name(tmp_path: Path) -> None:
    """In two files, both count, each by its whole name, however many are selected."""
    same = {"test_a.py": "def test_same():\n    pass\n", "test_b.py": "def test_same():\n    pass\n"}
    ran = started(tmp_path, files=same)
    names = {"test_a.py::test_same", "test_b.py::test_same"}
    assert set(by_name(ran)) == EVERYTHING | names
    ran = started(tmp_path, "--deselect", "test_a.py")
    assert by_name(ran)["test_a.py::test_same"] == LEFT_OUT
    assert by_name(ran)["test_b.py::test_same"] == "passed"
