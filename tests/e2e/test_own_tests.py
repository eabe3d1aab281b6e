"""Tests of a user's own in CI: pytest's exit code and the JUnit file say the same."""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

import pytest
from _pytest.config import default_plugins, essential_plugins

from tests.support import REPOSITORY
from tests.support.runs import collect, run_pytest, start_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LIMITS = """
schema: 1
extends: packaged
criteria:
  own_rate: {criterion: Own., min: 1, unit: GB/s, per: gpu, level: quick, why: own, source: own}
  own_node: {criterion: Own., min: 1, unit: count, per: node, level: quick, why: own, source: own}
"""
TESTS = """
import time
import pytest

def measure(value=2.0):
    return value

@pytest.fixture(scope="session")
def rate(cluster):
    return cluster.run(measure, per="gpu", value=VALUE)

def test_own_rate(rate, place, criterion):
    criterion.require(rate[place])

@pytest.fixture(scope="session")
def on_node(cluster):
    return cluster.run(measure, per="host")

def test_own_node(on_node, node, criterion):
    criterion.require(on_node[node])
"""
OPTIONS = ("--gpucluster-profile=rehearsal", "--gpucluster-thresholds=own.yaml", "-p", "no:cacheprovider")


def run(folder: Path, *arguments: str, value: float = 2.0) -> FinishedRun:
    """Two own tests on two ranks."""
    (folder / "own.yaml").write_text(LIMITS, encoding="utf-8")
    (folder / "test_own.py").write_text(TESTS.replace("VALUE", str(value)), encoding="utf-8")
    return run_pytest(folder, *OPTIONS, *arguments)


def test_green_for_pytest_is_no_error_in_junit(tmp_path: Path) -> None:
    """The verdict's testcase is skipped with the reason: nobody asked to accept a cluster. The verdict stays INCOMPLETE."""
    found = run(tmp_path, "test_own.py")
    assert (found.returncode, found.results["verdict"]) == (0, "INCOMPLETE"), found.stdout
    assert [case.outcome for case in found.cases if case.outcome in ("error", "failure")] == []
    verdict = found.case("gpucluster.verdict")
    assert verdict.outcome == "skipped"
    assert verdict.message.startswith("only tests of your own were given, so no cluster is judged: INCOMPLETE: ")


def test_no_plugin_of_pytest_is_needed(tmp_path: Path) -> None:
    """Without those that pytest itself can do without, the same tests run; their options are not there to be read."""
    off = [
        name for name in default_plugins if name not in (*essential_plugins, "python", "terminal", "junitxml", "cacheprovider")
    ]
    found = run(tmp_path, "test_own.py", *(word for name in off for word in ("-p", f"no:{name}")))
    assert (found.returncode, found.outcomes("own_node")) == (0, {"node0": "passed"}), found.stdout


def test_the_gate_asks_for_an_acceptance(tmp_path: Path) -> None:
    """Then the exit code is not 0, and the verdict's testcase an error."""
    found = run(tmp_path, "test_own.py", "--gpucluster-gate")
    assert found.returncode == 1
    assert found.case("gpucluster.verdict").outcome == "error"


def test_red_is_red(tmp_path: Path) -> None:
    """An own test that failed."""
    found = run(tmp_path, "test_own.py", value=0.5)
    assert (found.returncode, found.results["verdict"]) == (1, "REJECTED")
    assert found.case("gpucluster.verdict").outcome == "failure"


def test_a_part_of_the_packaged_suite_is_no_acceptance(tmp_path: Path) -> None:
    """Who gives the packaged suite and selects a part asks for an acceptance: the testcase stays an error."""
    found = run(tmp_path, "test_own.py", "--pyargs", "tests_acceptance", "-k", "own_rate")
    assert (found.returncode, found.results["verdict"]) == (0, "INCOMPLETE")
    assert found.case("gpucluster.verdict").outcome == "error"


def test_a_hook_that_runs_no_test_is_named(tmp_path: Path) -> None:
    """The session came to its end, so nothing ended it early."""
    hook = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_protocol():\n    return True\n"
    (tmp_path / "conftest.py").write_text(hook, encoding="utf-8")
    found = run(tmp_path, "test_own.py")
    assert (found.returncode, found.outcomes("own_rate")["node0-cpu0"]) == (1, "missing")
    assert found.row("own_node", "node0")["reason"] == "not run: a hook of another plugin took its place"


@pytest.mark.parametrize("phase", ["call", "teardown"])
def test_a_failure_that_a_hook_makes_is_in_all_reports(tmp_path: Path, phase: str) -> None:
    """A site's hook that looks at logs, say. pytest's summary and exit code told of it, the verdict did not."""
    hook = "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item, call):\n    report = yield\n"
    made = f"    if call.when == {phase!r}:\n        report.outcome, report.longrepr = 'failed', 'the log says so'\n"
    (tmp_path / "conftest.py").write_text(f"{hook}{made}    return report\n", encoding="utf-8")
    found = run(tmp_path, "test_own.py", "-k", "own_node")
    row = found.row("own_node", "node0")
    assert (found.returncode, row["outcome"], found.case("test_own_node[node0]").outcome) == (1, "error", "error"), found.stdout
    assert row["reason"].endswith("a hook of another plugin or conftest.py made its report a failure: the log says so")


HOOKS_OF_COLLECTION = {
    "raises": ("def pytest_collection_modifyitems():\n    raise ValueError('of the site')\n", "ValueError: of the site"),
    "adds": (
        (
            "import pytest\nclass Late(pytest.Item):\n    def runtest(self):\n        pass\n"
            "@pytest.hookimpl(wrapper=True, tryfirst=True)\ndef pytest_collection_modifyitems(session, items):\n"
            "    yield\n    items.append(Late.from_parent(session, name='late'))\n"
        ),
        "a hook of another plugin or conftest.py added ::late after the tests were paired with their criteria",
    ),
}


@pytest.mark.parametrize("hook", HOOKS_OF_COLLECTION)
def test_what_a_hook_of_collection_does_wrong_is_said(tmp_path: Path, hook: str) -> None:
    """Its own error, or a sentence; a KeyError of ours stood there."""
    text, said = HOOKS_OF_COLLECTION[hook]
    (tmp_path / "conftest.py").write_text(text, encoding="utf-8")
    found = run(tmp_path, "test_own.py")
    assert found.returncode not in (0, 1)
    assert said in found.stdout
    assert "KeyError" not in found.stdout


@pytest.mark.parametrize("prefix", [(), ("--junit-prefix=site",)])
def test_a_file_outside_the_root_folder_has_each_testcase_once(tmp_path: Path, prefix: tuple[str, ...]) -> None:
    """The tests are called ``::test_x`` by pytest, without a file (``-c conf/pytest.ini``, ``--rootdir``)."""
    root = tmp_path / "conf"
    root.mkdir()
    found = run(tmp_path, "test_own.py", f"--rootdir={root}", *prefix)
    assert sorted(case.name for case in found.cases) == sorted(
        ["test_own_rate[node0-cpu0]", "test_own_rate[node0-cpu1]", "test_own_node[node0]", "gpucluster.verdict"]
    )


def test_what_a_hook_measures_after_the_verdict_changes_no_report(tmp_path: Path) -> None:
    """The reports of a run that goes on took the place of those of the end, and the JUnit file could not be written."""
    hook = "import pytest, test_kept\ndef pytest_sessionfinish():\n    pytest.kept.run(test_kept.measure, per='gpu')\n"
    keeps = (
        "import pytest\ndef measure():\n    return 2\ndef test_own_node(cluster, node, criterion):\n    pytest.kept = cluster\n"
    )
    (tmp_path / "conftest.py").write_text(hook, encoding="utf-8")
    (tmp_path / "test_kept.py").write_text(f"{keeps}    criterion.require(2)\n", encoding="utf-8")
    (tmp_path / "own.yaml").write_text(LIMITS, encoding="utf-8")
    found = run_pytest(tmp_path, *OPTIONS, "test_kept.py")
    assert found.returncode == 0, found.stdout
    assert found.verdict_line == f"verdict {found.results['verdict_line']}"


OF_ONE = """
import os
import pytest

def unlike():
    return 2.0 if os.environ["RANK"] == "0" else 0.5

def alike():
    return 2.0

@pytest.fixture(scope="session")
def rates(cluster):
    return cluster.run(unlike, per="gpu")

def test_own_node(rates, node, criterion):
    criterion.require(rates[node])

def test_whole(rates):
    assert rates.value >= 1

def test_alike(cluster, node):
    assert cluster.run(alike, per="gpu")[node] == cluster.run(unlike, per="node")[node] == 2.0
"""


def test_the_value_of_one_gpu_is_not_that_of_its_node(tmp_path: Path) -> None:
    """Each measured for itself: the first one's value passed for all, whatever the others had. What is alike is read."""
    (tmp_path / "own.yaml").write_text(LIMITS, encoding="utf-8")
    (tmp_path / "test_own.py").write_text(OF_ONE, encoding="utf-8")
    found = run_pytest(tmp_path, *OPTIONS, "test_own.py")
    rows = (found.row("own_node", "node0"), found.row("whole"), found.row("alike", "node0"))
    assert [row["outcome"] for row in rows] == ["error", "error", "passed"], found.stdout
    assert all("GPUs measured each for itself, and differ" in row["reason"] for row in rows[:2])


BY_NAME = """
import pytest

def key(place, name):
    return getattr(place, name)

@pytest.mark.parametrize("name", ["uuid", "serial", "pci", "rank"])
def test_part(cluster, name, criterion):
    criterion.require({key(cluster.places[0], name): 2.0})

@pytest.mark.parametrize("name", ["uuid", "serial"])
def test_whole(cluster, name, criterion):
    criterion.require({key(place, name): 0.5 if place.id == "node1-gpu0" else 2.0 for place in cluster.places})
"""


def test_values_by_what_only_a_hello_tells(tmp_path: Path) -> None:
    """UUID, serial number, address and rank are known after collection: the value of one GPU of four passed, unnamed."""
    keys = [f'"part[{name}]"' for name in ("uuid", "serial", "pci", "rank")] + ['"whole[uuid]"', '"whole[serial]"']
    entry = "{criterion: Own., min: 1, unit: GB/s, per: cluster, level: quick, why: own, source: own}"
    limits = "schema: 1\nextends: packaged\ncriteria:\n" + "".join(f"  {key}: {entry}\n" for key in keys)
    (tmp_path / "own.yaml").write_text(limits, encoding="utf-8")
    (tmp_path / "test_own.py").write_text(BY_NAME, encoding="utf-8")
    fleet = ("-p", "pytest_gpucluster.plugin.fleet", "--fleet=2x2", "--gpucluster-profile=h100-sxm")
    found = run_pytest(tmp_path, *fleet, "--gpucluster-thresholds=own.yaml", "test_own.py")
    for name in ("uuid", "serial", "pci", "rank"):
        row = found.row(f"part[{name}]")
        assert (row["outcome"], "1 of 4 expected places have one" in (row["reason"] or "")) == ("error", True), (name, row)
    assert [found.row(f"whole[{name}]")["outcome"] for name in ("uuid", "serial")] == ["failed", "failed"]
    assert "whole[uuid]" in found.culprit("node1-gpu0")["criteria"]


@pytest.mark.parametrize("edited", [None, "test_hosts.py", "conftest.py"])
def test_an_edited_copy_of_the_suite_is_told(tmp_path: Path, edited: str | None) -> None:
    """A test, or the fixtures of all of them, may have another number in it. An unchanged copy is as good as the suite."""
    shutil.copytree(
        REPOSITORY / "tests_acceptance", tmp_path / "tests_acceptance", ignore=shutil.ignore_patterns("__pycache__")
    )
    if edited is not None:
        with (tmp_path / "tests_acceptance" / edited).open("a", encoding="utf-8") as file:
            file.write("# edited\n")
    found = run_pytest(tmp_path, "tests_acceptance/test_hosts.py", "-k", "drift", "--gpucluster-expect=nodes=1,gpus_per_node=2")
    term = "judged by tests or fixtures of your own, not the packaged ones: drift"
    assert (term in found.verdict_line) is (edited is not None)


OVERRIDES = {
    "cluster": "@pytest.fixture(scope='session')\ndef cluster(cluster):\n    return cluster\n",
    "criterion": "@pytest.fixture\ndef criterion(criterion):\n    return criterion\n",
    "another name": "@pytest.fixture(autouse=True)\ndef mine(cluster):\n    return None\n",
}


@pytest.mark.parametrize(
    ("name", "file"),
    [("cluster", "conftest.py"), ("cluster", "plugin.py"), ("criterion", "conftest.py"), ("another name", "conftest.py")],
)
def test_a_fixture_in_the_place_of_ours_is_told(tmp_path: Path, name: str, file: str) -> None:
    """It may return any value for a packaged test, which passed by it unnamed."""
    suite = tmp_path / "tests_acceptance"
    shutil.copytree(REPOSITORY / "tests_acceptance", suite, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['plugin']\n", encoding="utf-8")
    (tmp_path / file).write_text(f"import pytest\n{OVERRIDES[name]}", encoding="utf-8")
    found = run_pytest(tmp_path, "tests_acceptance/test_hosts.py", "-k", "drift", "--gpucluster-expect=nodes=1,gpus_per_node=1")
    term = "judged by tests or fixtures of your own, not the packaged ones: drift"
    assert (term in found.verdict_line) is (name != "another name")


def test_who_judges_a_packaged_criterion_is_told(tmp_path: Path) -> None:
    """A test of that name in the place of the packaged one may require any number: the verdict line names it."""
    text = "def test_drift(node, criterion):\n    criterion.require(0)\n"
    (tmp_path / "test_other.py").write_text(text, encoding="utf-8")
    found = run(tmp_path, "test_other.py", "test_own.py")
    term = "judged by tests or fixtures of your own, not the packaged ones: drift"
    assert (found.row("drift", "node0")["outcome"], found.results["changed_terms"]) == ("passed", [term])
    assert found.verdict_line.endswith(f"; terms changed: {term}")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("-n", "2", "-k", "own_node"), 5),
        (("-n", "2"), 0),
        (("-k", "own_skipped"), 5),
    ],
)
def test_nothing_measured_is_never_0(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    """Every test is skipped: pytest's code for no tests; where something passed, 0."""
    (tmp_path / "test_skipped.py").write_text("def test_own_skipped(cluster):\n    import pytest; pytest.skip('x')\n")
    found = run(tmp_path, "test_own.py", *(("test_skipped.py",) if "own_skipped" in arguments else ()), *arguments)
    assert found.returncode == code, found.stdout
    kinds = {case.name: case.outcome for case in found.cases}
    assert kinds["gpucluster.verdict"] == ("skipped" if code == 0 else "error")


def test_what_does_not_apply_is_not_missing(tmp_path: Path) -> None:
    """After Ctrl-C: the rules left it out, and the interrupt took nothing of it."""
    (tmp_path / "conftest.py").write_text(
        "import time\nfrom pathlib import Path\n\n\ndef pytest_runtest_setup(item):\n"
        "    Path('begun').touch()\n    time.sleep(60)\n",
        encoding="utf-8",
    )
    words = ("--gpucluster-profile=rehearsal", "-p", "no:cacheprovider", "-p", "conftest", "--pyargs", "tests_acceptance")
    chosen = ("-k", "slow_host or fp8 or bf16_tflops or hbm_bandwidth")
    (launch,) = launches = start_pytest(tmp_path, *words, *chosen, variables={"PYTHONPATH": str(tmp_path)})
    try:
        deadline_s = time.monotonic() + 120
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline_s, launch.output
            time.sleep(0.1)
        os.kill(launch.pid, signal.SIGINT)
        launch.end(within_s=120)
    finally:
        launch.kill_all()
    found = collect(launches)
    outcomes = {(row["criterion"], row["outcome"]) for row in found.results["criteria"] if row["outcome"] != "not_selected"}
    assert ("bf16_tflops", "missing") in outcomes
    assert ("fp8_tflops", "skipped") in outcomes, found.stdout
    assert not {criterion for criterion, outcome in outcomes if outcome == "missing"} & {
        criterion for criterion, outcome in outcomes if outcome == "skipped"
    }
