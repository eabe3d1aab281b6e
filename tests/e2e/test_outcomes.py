"""What a user's test does, by accident or on purpose, never makes an outcome better than what was measured."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.rebuild import rebuild
from tests.support.reports import read_suite
from tests.support.runs import run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = pytest.mark.e2e

NO_NUMBERS = ("nan", "inf", "none", "bool", "text", "empty", "list")
JUDGED_ONCE = (
    "good", "never_judged", *(f"no_number[{name}]" for name in NO_NUMBERS), "xfail_mark", "xfail_mark_on_good",
    "xfail_mark_on_error", "swallowed", "second_value", "skips_afterwards", "xfails_afterwards", "skips_itself",
    "skip_mark", "asserts", "crashes", "bad_teardown", "failed_and_bad_teardown", "swallowed_nan", "some_places",
    "xfail_mark_bad_teardown",
)  # fmt: skip
ORDER = {name: entry() for name in ("first", "second", "third")}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """All of folders/honesty in one run."""
    folder = user_folder("honesty", tmp_path_factory.mktemp("user") / "honesty")
    criteria = {
        **{name: entry() for name in JUDGED_ONCE},
        "advisory": entry(severity="advisory"),
        "read_in_call": entry(per="gpu"),
        "read_in_setup": entry(per="gpu"),
    }
    limits = write_limits(folder / "limits.yaml", criteria, extends=False)
    return run_pytest(folder, "--gpucluster", "test_honesty.py", limits)


def launch_order(tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> FinishedRun:
    """folders/order, whose second of three criteria fails."""
    folder = user_folder("order", tmp_path_factory.mktemp("user") / "order")
    limits = write_limits(folder / "limits.yaml", ORDER, extends=False)
    return run_pytest(folder, "--gpucluster", "test_order.py", limits, *arguments)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    """Each file of folders/refused in a run of its own, two at a time; the first for real, the others collected only."""
    names = ("no_entry", "judged_twice", "wrong_place", "foreign_fixture")

    parents = {name: tmp_path_factory.mktemp("user") for name in names}  # not in the threads: pytest's factory is for one

    def launch(name: str) -> FinishedRun:
        folder = user_folder("refused", parents[name] / "refused")
        limits = write_limits(folder / "limits.yaml", {"first": entry()}, extends=False)
        collect = [] if name == "no_entry" else ["--collect-only"]
        return run_pytest(folder, "--gpucluster", f"test_{name}.py", limits, *collect)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(names, pool.map(launch, names), strict=True))


def test_never_judged(honest: FinishedRun) -> None:
    """A test that asks for its criterion and says nothing is an error."""
    assert honest.row("never_judged")["outcome"] == "error"
    assert honest.case("test_never_judged").outcome == "error"
    assert "never_judged was never judged" in honest.case("test_never_judged").text


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_no_number_is_no_measurement(honest: FinishedRun, name: str) -> None:
    """NaN, infinity, None, bool, text, nothing and a list: not measured, and no value in results.json."""
    row = honest.row(f"no_number[{name}]")
    assert (row["outcome"], row["value"]) == ("error", None)
    case = honest.case(f"test_no_number[{name}]")
    assert (case.outcome, case.properties["failure_type"]) == ("error", "error")


@pytest.mark.parametrize("name", ["xfail_mark", "swallowed", "second_value", "skips_afterwards", "xfails_afterwards"])
def test_one_failed_value_stays_failed(honest: FinishedRun, name: str) -> None:
    """xfail, except, a better second value, skip and xfail afterwards change nothing."""
    row = honest.row(name)
    assert (row["outcome"], row["value"]) == ("failed", 0)
    case = honest.case(f"test_{name}")
    assert case.outcome == "failure"
    assert f"{name} at the cluster: 0, below 1" in case.text


@pytest.mark.parametrize("name", ["skips_itself", "skip_mark", "xfail_mark_on_error", "crashes", "swallowed_nan"])
def test_no_value_is_an_error(honest: FinishedRun, name: str) -> None:
    """Skipped, marked as skipped or as xfail, or fallen over before there was a value."""
    assert honest.row(name)["outcome"] == "error"
    assert honest.case(f"test_{name}").outcome == "error"


def test_reasons_are_told_as_given(honest: FinishedRun) -> None:
    """The reason of a skip is quoted, without pytest's inner form of it."""
    reason = honest.row("skips_itself")["reason"]
    assert "not today" in reason
    assert "('" not in reason


def test_assertion_beside_the_criterion(honest: FinishedRun) -> None:
    """A passed value and a failed assert: failed."""
    assert honest.row("asserts")["outcome"] == "failed"
    assert honest.case("test_asserts").outcome == "failure"


def test_passes_what_is_good(honest: FinishedRun) -> None:
    """A good value passes, whatever its test expected; an advisory limit passes with a remark."""
    for name in ("good", "xfail_mark_on_good", "advisory"):
        assert honest.row(name)["outcome"] == "passed"
        assert honest.case(f"test_{name}").outcome == "passed"
    assert "advisory: advisory at the cluster: 0, below 1" in honest.stdout
    assert "advisory: " in honest.row("advisory")["reason"]


@pytest.mark.parametrize("name", ["read_in_call", "read_in_setup"])
def test_unmeasured_place_is_an_error_wherever_it_is_read(honest: FinishedRun, name: str) -> None:
    """In the test's body and in a fixture alike; the other place passes."""
    assert honest.outcomes(name) == {"node0-cpu0": "passed", "node0-cpu1": "error"}
    case = honest.case(f"test_{name}[node0-cpu1]")
    assert (case.outcome, case.properties["failure_type"]) == ("error", "error")
    assert "no_gpu_answers was not measured: rank 1 (node0-cpu1, " in case.text
    assert "OSError: the probe does not answer" in case.text


def test_teardown(honest: FinishedRun) -> None:
    """A good value whose teardown broke is an error; a failed one stays failed."""
    row = honest.row("bad_teardown")
    assert row["outcome"] == "error"
    assert "its teardown failed: " in row["reason"]
    assert "the probe could not be put away" in row["reason"]
    assert honest.case("test_bad_teardown").outcome == "error"
    assert honest.row("failed_and_bad_teardown")["outcome"] == "failed"
    both = [case.outcome for case in honest.cases if case.name == "test_failed_and_bad_teardown"]
    assert both == ["failure", "error"]
    assert honest.row("xfail_mark_bad_teardown")["outcome"] == "error"
    assert honest.case("test_xfail_mark_bad_teardown").outcome == "error"


def test_a_place_that_was_left_out(honest: FinishedRun) -> None:
    """The test judges what it got, and it did not get all: an error that names the place."""
    row = honest.row("some_places")
    assert (row["outcome"], row["value"]) == ("error", None)
    assert "some_places: no value for node0-cpu1: 1 of 2 expected places have one" in row["reason"]
    assert "some_places" in honest.culprit("node0-cpu1")["criteria"]


def test_tests_without_a_criterion_count(honest: FinishedRun) -> None:
    """A plain failure rejects; a plain skip is not selected."""
    rows = {row["criterion"]: row["outcome"] for row in honest.results["criteria"] if row["criterion"].startswith("plain")}
    assert rows == {"plain_failure": "failed", "plain_skip": "not_selected"}
    assert "plain_failure: 1 of 1 clusters not None" not in honest.stdout


def test_honest_verdict(honest: FinishedRun) -> None:
    """One JUnit case and one row for each; the counts add up; exit 1."""
    assert (honest.returncode, honest.results["verdict"]) == (1, "REJECTED")
    assert honest.verdict_line.startswith("verdict REJECTED: 5 passed, 8 failed, 18 not measured, 1 not selected")
    assert len(honest.results["criteria"]) == 32
    assert honest.cases[-1].outcome == "failure"


def test_the_rebuilt_file_agrees_with_pytests(honest: FinishedRun, tmp_path: Path) -> None:
    """Testcase by testcase, whatever the tests did: names, kinds, messages, texts and properties."""
    lines = "".join(json.dumps(event) + "\n" for event in honest.journal)
    (tmp_path / "journal.jsonl").write_text(lines, encoding="utf-8")
    assert rebuild(tmp_path).line == honest.results["verdict_line"]
    rebuilt = replace(honest, junit=read_suite(tmp_path / "junit.xml"))
    assert rebuilt.cases == honest.cases
    assert rebuilt.case("test_good").properties["value"] == "1.0"


def test_stopping_at_the_first_failure(tmp_path_factory: pytest.TempPathFactory) -> None:
    """``-x``: the rest is not selected, which keeps it from any acceptance."""
    stopped = launch_order(tmp_path_factory, "-x")
    assert {row["criterion"]: row["outcome"] for row in stopped.results["criteria"]} == {
        "first": "passed",
        "second": "failed",
        "third": "not_selected",
    }
    assert "stopping after 1 failures" in (stopped.row("third")["reason"] or "")
    assert (stopped.returncode, stopped.results["verdict"]) == (1, "REJECTED")
    assert "1 not selected" in stopped.verdict_line
    assert not [case for case in stopped.cases if case.name == "test_third"]


def test_gate(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A part of the tests, all green: exit 0 (see test_rehearsal.py), and 1 with the gate."""
    gated = launch_order(tmp_path_factory, "-k", "first or third", "--gpucluster-gate")
    assert gated.row("second")["outcome"] == "not_selected"
    assert (gated.returncode, gated.results["verdict"]) == (1, "INCOMPLETE")
    assert {case.name: case.outcome for case in gated.cases} == {
        "test_first": "passed",
        "test_third": "passed",
        "gpucluster.verdict": "error",
    }


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_entry", "test_no_entry.py::test_frist judges the criterion 'frist', which "),
        ("judged_twice", "both judge 'first'; rename one of them"),
        ("wrong_place", "criterion 'first' is per cluster, so its test takes neither place nor node"),
        (
            "foreign_fixture",
            "a distributed test runs in the workers and cannot have the fixtures tmp_path, capsys; it may take",
        ),
    ],
)
def test_usage_errors(refused: dict[str, FinishedRun], name: str, told: str) -> None:
    """Refused at collection: pytest's 4, the reason once, no traceback, nothing run, nobody left behind."""
    ran = refused[name]
    assert ran.returncode == 4, ran.stdout
    assert ran.stdout.count(told) == 1
    assert "Traceback" not in ran.stdout
    assert "INTERNALERROR" not in ran.stdout
    assert not ran.results or ran.results["verdict"] == "INCOMPLETE"
    assert {row["outcome"] for row in ran.results.get("criteria", [])} <= {"missing"}


def test_typing_mistake_is_guessed(refused: dict[str, FinishedRun]) -> None:
    """The nearest entry is offered."""
    assert "Did you mean 'first'?" in refused["no_entry"].stdout
