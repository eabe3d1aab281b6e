"""The verdict is the last test of every reporter: green for an acceptance alone, whatever other plugins do with it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.plugin import verdict_item
from pytest_gpucluster.plugin.verdict_item import NODEID, VerdictItem
from pytest_gpucluster.reporting.junit import verdict_testcase
from pytest_gpucluster.reporting.rebuild import CUT_SHORT, NO_VERDICT, JournalState
from pytest_gpucluster.reporting.results import ReportedTest, RunReport
from tests.support import reporters
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from pytest_gpucluster.reporting.junit import Testcase

PLACES = fleet(2, 2)
TESTS = "def test_good(): pass\ndef test_other(): pass\n"
QUIET = (
    "-p",
    "no:terminal",
    "-p",
    "no:logging",
    "-p",
    "no:faulthandler",
    "-p",
    "no:cacheprovider",
    "-s",
    "--import-mode=importlib",
)
GOOD = Terms(rehearsal=False, level_reached=True)


def record(outcome: str, **changes: Any) -> Record:
    """A criterion of one GPU."""
    return Record(criterion=f"of_{outcome}", place="node0-gpu1", outcome=outcome, reason=f"it is {outcome}", **changes)


def report(records: list[Record], terms: Terms = GOOD) -> RunReport:
    """What is reported of a run that ended with these outcomes."""
    cases = tuple(ReportedTest(nodeid=f"test_{one.criterion}", record=one) for one in records)
    return RunReport(cases=cases, verdict=decide(records, terms), places=PLACES, facts={}, is_rehearsal=terms.rehearsal)


def cut_short() -> RunReport:
    """What is rebuilt from the journal of a run that was killed after its first outcome."""
    state = JournalState(terms=GOOD, places=dict(PLACES))
    for one in (record("passed"), record("pending")):
        state.records[one.criterion, one.place], state.nodeids[one.criterion, one.place] = one, f"test_{one.criterion}"
    rebuilt = state.report(state.close())
    assert {CUT_SHORT} == {case.record.reason for case in rebuilt.cases if case.record.outcome == "missing"}
    assert NO_VERDICT in rebuilt.verdict.line
    return rebuilt


WAIVER = {"criterion": "of_failed", "place": None, "until": "2099-12-31", "who": "J. Doe", "why": "RMA"}
PASSED = record("passed")
RUNS: dict[str, tuple[str, RunReport]] = {
    "accepted": ("passed", report([PASSED])),
    "accepted with waivers": ("passed", report([PASSED, record("failed", waivable=True, waiver=WAIVER)])),
    "rejected": ("failure", report([PASSED, failed("bf16_tflops", "node1-gpu0", 498.0)])),
    "rejected in a rehearsal": ("failure", report([PASSED, record("failed")], Terms(rehearsal=True, level_reached=True))),
    "rejected in a simulation": (
        "failure", report([PASSED, record("failed")], Terms(rehearsal=False, level_reached=True, simulated=True)),
    ),
    "rejected, own tests only": (
        "failure", report([PASSED, record("failed")], Terms(rehearsal=False, level_reached=True, own_tests_only=True)),
    ),
    "an error": ("error", report([PASSED, record("error")])),
    "too close to call": ("error", report([PASSED, record("noisy", limit=limit())])),
    "missing": ("error", report([PASSED, record("missing")])),
    "interrupted": (
        "error", report([PASSED, record("missing")], Terms(rehearsal=False, level_reached=True, objections=("cut",))),
    ),
    "not selected": ("error", report([PASSED, record("not_selected")])),
    "a level that is too low": ("error", report([PASSED], Terms(rehearsal=False, level_reached=False))),
    "more GPUs than expected": ("error", report([PASSED], Terms(rehearsal=False, level_reached=True, objections=("more",)))),
    "all skipped": ("error", report([record("skipped")])),
    "no test": ("error", report([])),
    "killed and rebuilt": ("error", cut_short()),
    "a part of a simulation": (
        "error", report([PASSED, record("not_selected")], Terms(rehearsal=False, level_reached=True, simulated=True)),
    ),
    "rehearsed": ("skipped", report([PASSED], Terms(rehearsal=True, level_reached=True))),
    "simulated": ("skipped", report([PASSED], Terms(rehearsal=False, level_reached=True, simulated=True))),
    "own tests only": (
        "skipped",
        report([PASSED, record("not_selected")], Terms(rehearsal=False, level_reached=True, own_tests_only=True)),
    ),
}  # fmt: skip
"""By kind of run: the testcase of its verdict, and its report."""
SAID = {"failed": ("failure", "error"), "error": ("error",), "broken": ("failure", "error")}
"""By a reporter's word for bad: what it may stand for."""


class Run:
    """A pytest plugin that does with the verdict what a run does."""

    def __init__(self, testcase: Testcase) -> None:
        """``testcase`` is the verdict in the end."""
        self._testcase = testcase
        self.ran: list[str] = []
        self.text = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Add it."""
        verdict_item.add_verdict(session)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Take it out."""
        assert isinstance(session.items[-1], VerdictItem) or not session.items
        verdict_item.set_aside(session)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Run it."""
        verdict_item.report_verdict(session, self._testcase)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what reporters are told."""
        if report.when == "call" or report.outcome != "passed":
            self.ran.append(f"{report.nodeid} {report.outcome}")
            self.text = report.longreprtext


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each session has its own folder, and leaves the environment as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def session(folder: Path, kind: str, *options: str, tests: str = TESTS, conftest: str = "") -> tuple[int, list[str]]:
    """A session with a verdict of this kind; its exit code, and what its reporters were told in order."""
    (folder / "test_own.py").write_text(tests, encoding="utf-8")
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    for module in ("test_own", "conftest"):  # of the session before
        sys.modules.pop(module, None)
    run = Run(verdict_testcase(RUNS[kind][1]))
    code = pytest.main([*QUIET, f"--rootdir={folder}", *options, "test_own.py"], plugins=[run])
    return int(code), run.ran


def test_the_kinds_of_runs() -> None:
    """Twenty, and none but an acceptance is green."""
    assert len(RUNS) == 20
    kinds = {name: verdict_testcase(run).kind for name, (_, run) in RUNS.items()}
    assert kinds == {name: kind for name, (kind, _) in RUNS.items()}
    green = {run.verdict.word for _, run in RUNS.values() if verdict_testcase(run).kind == "passed"}
    assert green == {"ACCEPTED", "ACCEPTED_WITH_WAIVERS"}


@pytest.mark.parametrize("kind", RUNS)
def test_none_is_green_but_accepted(tmp_path: Path, kind: str) -> None:
    """In all reporters at once: the verdict is there once, with its word, and every test beside it."""
    expected, run = RUNS[kind]
    session(tmp_path, kind, *reporters.OPTIONS)
    for name, read in reporters.READERS.items():
        found = reporters.verdict_of(tmp_path, name)
        assert (found.outcome == "passed") == (expected == "passed"), name
        assert expected in SAID.get(found.outcome, (found.outcome,)), f"{name}: {found}"
        assert sum(one.outcome == "passed" for one in read(tmp_path)) == 2 + (expected == "passed"), name
        if expected != "passed":
            assert run.verdict.word in found.text, name


def test_bad_parts_are_named(tmp_path: Path) -> None:
    """In the message of a rejected cluster, in every reporter."""
    session(tmp_path, "rejected", *reporters.OPTIONS)
    for name in reporters.READERS:
        text = reporters.verdict_of(tmp_path, name).text
        assert "gpu-node-1 gpu 0" in text, name
        assert "bf16_tflops" in text, name


@pytest.mark.parametrize("kind", ["accepted", "rejected", "missing", "rehearsed"])
@pytest.mark.parametrize(
    "options",
    [
        "-k good", "-k nothing", "-m nothing", "--deselect test_own.py::test_good", "-x", "--maxfail=1", "--sw", "--lf",
        "-p no:lfplugin", "--setup-show", "-p no:randomly", "test_own.py::test_good",
    ],
)  # fmt: skip
def test_no_option_leaves_it_out(tmp_path: Path, kind: str, options: str) -> None:
    """It is there once, and last."""
    cache = ("-p", "cacheprovider") if options in ("--sw", "--lf") else ()
    _, ran = session(tmp_path, kind, *cache, *options.split(" "))
    assert [one for one in ran if NODEID in one] == ran[-1:]


CONFTESTS = {
    "takes long": "import time\ndef pytest_runtest_setup(item):\n    if 'verdict' in item.name: time.sleep(600)",
    "reverses": "def pytest_collection_modifyitems(items): items.reverse()",
    "clears what was collected": "def pytest_collection_finish(session): session.items.clear()",
    "reorders late": "def pytest_collection_finish(session): session.items.reverse()",
    "clears in the loop": (
        "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtestloop(session): session.items.clear()"
    ),
    "runs nothing": "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_protocol(item): return True",
    "leaves": "import pytest\ndef pytest_runtest_setup(item): pytest.exit('no')",
    "skips all": "import pytest\ndef pytest_runtest_setup(item): pytest.skip('no')",
    "asks for a function": "def pytest_runtest_setup(item): item.function()",
    "makes all green": (
        "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item):\n"
        "    report = yield\n    report.outcome, report.longrepr = 'passed', None\n    return report"
    ),
    "makes all red": (
        "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item):\n"
        "    report = yield\n    report.outcome, report.longrepr = 'failed', 'no'\n    return report"
    ),
}


@pytest.mark.parametrize("kind", ["accepted", "rejected", "missing", "rehearsed"])
@pytest.mark.parametrize("hook", CONFTESTS)
def test_no_hook_changes_it(tmp_path: Path, kind: str, hook: str) -> None:
    """Whatever other plugins do, reporters are told once what the verdict is."""
    _, ran = session(tmp_path, kind, conftest=CONFTESTS[hook])
    outcome = {"accepted": "passed", "rehearsed": "skipped"}.get(kind, "failed")
    assert [one for one in ran if NODEID in one] == [f"{NODEID} {outcome}"]
    assert ran[-1].startswith(NODEID)


def test_an_interrupted_test_leaves_it_whole(tmp_path: Path) -> None:
    """The interrupted test was not torn down yet, and its fixtures are torn down after it."""
    tests = """
import pytest
@pytest.fixture
def held():
    yield
    open("down", "w").close()
def test_good(held): raise KeyboardInterrupt
"""
    code, ran = session(tmp_path, "accepted", tests=tests)
    assert (code, ran) == (2, [f"{NODEID} passed"])
    assert (tmp_path / "down").exists()


@pytest.mark.parametrize(
    ("kind", "capture", "ends"),
    [
        ("rejected", "fd", "raise KeyboardInterrupt"),
        ("missing", "no", "pytest.exit('no')"),
        ("missing", "sys", "request.session.shouldstop = 'no'"),
        ("rehearsed", "fd", "raise KeyboardInterrupt"),
    ],
)
def test_an_interrupted_run_says_what_the_verdict_is(tmp_path: Path, kind: str, capture: str, ends: str) -> None:
    """Pytest captures nothing any more, and its own error about that is not the verdict's text."""
    (tmp_path / "test_own.py").write_text(f"import pytest\ndef test_good(request): {ends}\ndef test_later(): pass\n")
    sys.modules.pop("test_own", None)
    testcase = verdict_testcase(RUNS[kind][1])
    run = Run(testcase)
    pytest.main([*QUIET, f"--rootdir={tmp_path}", f"--capture={capture}", "test_own.py"], plugins=[run])
    words = testcase.message if testcase.kind == "skipped" else testcase.text
    assert words in run.text


@pytest.mark.parametrize("kind", ["accepted", "rejected", "missing"])
def test_it_is_no_test_of_the_session(tmp_path: Path, kind: str) -> None:
    """``-x``, pytest's exit code and what ``--lf`` and ``--sw`` remember know nothing of it: ``end.py`` decides."""
    assert session(tmp_path, kind, "-x")[0] == 0
    assert session(tmp_path, kind, "-k", "nothing")[0] == 5
    for option in ("--lf", "--sw"):
        session(tmp_path, kind, "-p", "cacheprovider", option)
    remembered = [file.read_text(encoding="utf-8") for file in (tmp_path / ".pytest_cache").rglob("v/cache/*")]
    assert not [text for text in remembered if NODEID in text]


def test_the_last_test_is_the_last_one(tmp_path: Path) -> None:
    """What a session shares is torn down by its last test, so that a failure there still counts."""
    tests = """
import pytest
@pytest.fixture(scope="session")
def shared():
    yield
    raise OSError
def test_good(shared): pass
"""
    _, ran = session(tmp_path, "accepted", tests=tests)
    assert ran == ["test_own.py::test_good passed", "test_own.py::test_good failed", f"{NODEID} passed"]
