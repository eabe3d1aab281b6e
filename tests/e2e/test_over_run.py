"""What is judged over the whole run: a reader is called before the first test and after the last one, in any folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FIRST = """
import json, pathlib


def bump(*, path):
    file = pathlib.Path(path)
    file.write_text(str(1 + int(file.read_text())))
    return 0


def test_a_first_one(cluster):
    assert set(cluster.run(bump, per="host", path={path!r}).each(int).values()) == {{0}}
"""
SECOND = """
import pathlib
import pytest


def counter(*, path):
    return int(pathlib.Path(path).read_text())


def refuses(*, path):
    raise OSError("no such counter")


def where(cluster):
    assert cluster.world_size == 2
    return {path!r}


@pytest.mark.over_run(counter, per="host", path=where)
def test_grew(over_run, node):
    first, last = over_run[node]
    assert (first, last) == (5, 6)
    assert over_run.seconds >= 0


@pytest.mark.over_run(refuses, per="gpu", path={path!r})
def test_refused(over_run, place):
    over_run[place]


def test_reads_the_first_one(readings, node):
    assert readings.first(counter, per="host", path=where)[node] == 5


def test_without_its_mark(over_run):
    pass
"""


SHUFFLED = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    yield
    items.reverse()
"""


@pytest.mark.parametrize("others", ["", SHUFFLED], ids=["alone", "shuffled by a plugin"])
def test_a_reading_before_the_first_test(tmp_path: Path, others: str) -> None:
    """A test of another folder that runs first changes the counter; the reader saw it before and afterwards."""
    counter = tmp_path / "counter"
    counter.write_text("5", encoding="utf-8")
    (tmp_path / "conftest.py").write_text(others, encoding="utf-8")
    for folder, text in (("a", FIRST), ("b", SECOND)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(text.format(path=str(counter)), encoding="utf-8")
    run = run_pytest(tmp_path, "a", "b", timeout_s=120)
    assert run.outcomes("grew") == {"node0": "passed"}, run.stdout
    assert run.outcomes("a_first_one") == {None: "passed"}
    assert run.outcomes("reads_the_first_one") == {"node0": "passed"}
    assert set(run.outcomes("refused").values()) == {"error"}
    assert "no such counter" in run.stdout
    assert "the fixture over_run needs the mark @pytest.mark.over_run" in run.stdout


BETWEEN = """
import pytest


def counts():
    return 7


@pytest.fixture(scope="session")
def late(cluster):
    yield
    assert {*cluster.run(counts, per="gpu").values()} == {7}


@pytest.mark.parametrize("number", range(3))
def test_first(cluster, late, number):
    assert {*cluster.run(counts, per="gpu").values()} == {7}
    assert number == 0, "made to fail"


@pytest.mark.over_run(counts, per="host", between=True)
def test_grew(over_run, node, late):
    assert over_run[node] == (7, 7)
"""
EVERY_TIME = "import pytest_gpucluster.plugin.whole_run.run_readings as readings\n\nreadings.EVERY_S = readings.EACH = 0\n"


@pytest.mark.parametrize("options", [[], ["-x"]])
def test_what_is_measured_between_two_tests(tmp_path: Path, options: list[str]) -> None:
    """Readings now and then, and the end of a session's fixture after ``-x``, are of no test, and end no run."""
    (tmp_path / "conftest.py").write_text(EVERY_TIME, encoding="utf-8")
    (tmp_path / "test_own.py").write_text(BETWEEN, encoding="utf-8")
    ran = run_pytest(tmp_path, "test_own.py", *options)
    assert "INTERNALERROR" not in ran.stdout
    assert [row["outcome"] for row in ran.results["criteria"]][:2] == ["passed", "failed"]


UNREAD = """
import pytest


def refuses():
    raise OSError("no such counter")


@pytest.mark.over_run(refuses, per="gpu")
def test_unread(over_run, place):
    assert over_run.seconds >= 0
"""


def test_each_place_has_to_read_the_end(tmp_path: Path) -> None:
    """The reading at the end is taken by the first of the tests; what it could not read passed at every other place."""
    (tmp_path / "test_own.py").write_text(UNREAD, encoding="utf-8")
    ran = run_pytest(tmp_path, "test_own.py")
    assert set(ran.outcomes("unread").values()) == {"error"}, ran.stdout
