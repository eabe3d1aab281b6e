"""Rows 9, 10 and 19: less than was promised, limits that are none, and criteria that are left out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from pytest_gpucluster.commands import main
from tests.support.launching import ACCEPTANCE
from tests.support.reports import SCHEMA
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

# Row 9: fewer nodes and GPUs than expected

PROMISED = """
import pytest

def one():
    return 1

@pytest.fixture(scope="session")
def ones(cluster):
    return cluster.run(one, per="gpu", deadline_s=30)

@pytest.fixture(scope="session")
def together(cluster):
    return cluster.run(one, per="cluster", deadline_s=30)

def test_rate(ones, place, criterion):
    criterion.require(ones[place])

def test_in_node(cluster, node, criterion):
    ones = cluster.run(one, per="node", deadline_s=30)
    criterion.require(sum(ones[place] for place in cluster.places if place.node == node.node))

def test_worst(ones, criterion):
    criterion.require(ones)

def test_together(together, criterion):
    criterion.require(list(together.values()))

@pytest.mark.distributed
def test_body(world_size):
    assert world_size == 2
"""
PROMISES = {
    "rate": entry(per="gpu"),
    "in_node": entry(per="node"),
    "worst": entry(),
    "together": entry(),
}
PLACES = [f"node{node}-cpu{gpu}" for node in (0, 1) for gpu in range(4)]


def test_fewer_nodes_and_gpus_than_expected(starter: Starter) -> None:
    """Two ranks where two nodes of four GPUs were promised: every absent place is missing by name, nothing is green for it."""
    starter.write(test_promised=PROMISED)
    limits = write_limits(starter.folder / "limits.yaml", PROMISES, extends=False)
    launch = starter.torchrun("--gpucluster", limits, "--gpucluster-expect", "nodes=2,gpus_per_node=4", "--junitxml=junit.xml")
    assert launch.end(within_s=110) != 0, launch.output  # and does not wait two minutes for those who were never started
    launch.gone()
    found = launch.results()
    jsonschema.validate(found, SCHEMA)
    told = {(row["criterion"], row["place"] and row["place"]["id"]): row for row in found["criteria"]}
    places = {"node0-cpu0": "passed", "node0-cpu1": "passed"}
    assert {place: told["rate", place]["outcome"] for place in PLACES} == {**dict.fromkeys(PLACES, "missing"), **places}
    others = [("in_node", "node0"), ("in_node", "node1"), ("worst", None), ("together", None), ("body", None)]
    assert {key: told[key]["outcome"] for key in others} == dict.fromkeys(others, "missing")
    for key in [("rate", place) for place in PLACES[2:]] + others:
        assert told[key]["value"] is None
        assert "2 of 8 expected places answer" in told[key]["reason"], key
    assert "an unknown host is absent: no such node joined" in told["rate", "node1-cpu3"]["reason"]
    assert (found["verdict"], found["expected"]) == ("INCOMPLETE", {"nodes": 2, "gpus_per_node": 4})
    blamed = {culprit["place"]["id"]: culprit["kind"] for culprit in found["culprits"]}
    assert blamed == {"node0-cpu2": "gpu", "node0-cpu3": "gpu", "node1": "node"}
    (absent,) = (culprit for culprit in found["culprits"] if culprit["kind"] == "node")
    assert absent["evidence"][0].startswith("an unknown host is absent: ")
    cases = launch.junit()
    assert cases == {
        **{f"test_rate[{place}]": "error" for place in PLACES},
        **{f"test_rate[{place}]": "passed" for place in places},
        **dict.fromkeys(("test_in_node[node0]", "test_in_node[node1]", "test_worst", "test_together", "test_body"), "error"),
        "gpucluster.verdict": "error",
    }
    assert "verdict INCOMPLETE: " in launch.output  # in torchrun's own banner


# Row 10: thresholds

EVIL = """schema: 1
profiles: {rehearsal: {gpu: null, rehearsal: true}}
criteria:
  rate: {min: .nan}
  rate: !!python/object/apply:os.system ["touch executed"]
"""


def test_evil_thresholds_under_torchrun(starter: Starter) -> None:
    """From two ranks one message a problem, with file and line, nothing executed, all gone at once."""
    (starter.folder / "evil.yaml").write_text(EVIL, encoding="utf-8")
    launch = starter.torchrun(ACCEPTANCE, "--gpucluster-thresholds", "evil.yaml", "--junitxml=junit.xml", ranks=2)
    launch.wait_for("evil.yaml:4")
    launch.gone()
    assert launch.end() != 0
    assert re.findall(r"evil\.yaml:(\d+): ", launch.output) == ["4", "5", "5"]
    assert len(re.findall(r"^ERROR: .*evil\.yaml:4: ", launch.output, re.MULTILINE)) == 1
    for told in ("is not a number that", "'rate' is there twice; first in line 4", "python/object/apply:os.system"):
        assert launch.output.count(told) == 1, told
    assert not (starter.folder / "executed").exists()
    assert not (starter.folder / "gpucluster-results").exists()
    assert not (starter.folder / "junit.xml").exists()


GOOD = """schema: 1
profiles:
  rehearsal: {gpu: null, rehearsal: true, accept_at: quick, fabric: none}
criteria:
  share:
    criterion: The share that arrives.
    per: cluster
    min: 0.5
    unit: ratio
    level: quick
    why: A test.
    source: none
"""
BOMB = "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True))
BAD = {
    "not YAML": ("min: 0.5", "min: [0.5", 9, "not YAML"),
    "another kind": (GOOD, "- a list\n", 1, "a mapping"),
    "wrong type": ("min: 0.5", "min: a lot", 8, "'min' must be a number"),
    "wrong type of a section": ("criteria:\n", "criteria: 5\nspare:\n", 4, "'criteria' must be a mapping"),
    "unknown key": ("min: 0.5", "minimum: 0.5", 8, "'minimum' is not a key"),
    "unknown unit": ("unit: ratio", "unit: parts", 9, "'unit' is 'parts'"),
    "minimum above maximum": ("min: 0.5", "min: 0.5\n    max: 0.25", 9, "Nothing could pass: min 0.5 is above max 0.25"),
    "impossible limit": ("min: 0.5", "min: 1.5", 8, "lies outside 0..1"),
    "a limit that always holds": ("min: 0.5", "min: 0", 8, "it is no limit"),
    "NaN": ("min: 0.5", "min: .nan", 8, ".nan is not a number"),
    "infinity": ("min: 0.5", "min: -.inf", 8, "-.inf is not a number"),
    "duplicate key": ("min: 0.5", "min: 0.5\n    min: 0.1", 9, "'min' is there twice; first in line 8"),
    "duplicate criterion": ("criteria:\n", "criteria:\n  share: {min: 0.1}\n", 6, "'share' is there twice; first in line 5"),
    "bomb": ("schema: 1", f"a: &a [x, x, x, x, x, x, x, x, x]\n{BOMB}schema: 1", 1, "the anchor '&a' is not allowed"),
    "object": ("min: 0.5", 'min: !!python/object/apply:os.system ["touch executed"]', 8, "os.system' is not allowed"),
    "module": ("min: 0.5", "min: !!python/module:antigravity {}", 8, "antigravity' is not allowed"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_thresholds_and_the_command(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``gpucluster lint`` says file, line and what is wrong, ends with 1, and executes nothing."""
    monkeypatch.chdir(tmp_path)
    good, bad, line, told = BAD[fault]
    file = tmp_path / "site.yaml"
    file.write_text(GOOD, encoding="utf-8")
    assert main.main(["lint", "site.yaml"]) == 0
    assert good in GOOD
    file.write_text(GOOD.replace(good, bad), encoding="utf-8")
    capsys.readouterr()
    assert main.main(["lint", "site.yaml"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert any(one.startswith(f"site.yaml:{line}: ") and told in one for one in said), said
    assert [path.name for path in tmp_path.iterdir()] == ["site.yaml"]


# Row 19: left out. A run of one place in which all is well would be REHEARSED; with anything left out it is not. (That a
# test without an entry is refused, and what a criterion's own skip is called, is in tests/e2e/test_outcomes.py.)

HEALTHY = "def test_first(criterion): criterion.require(1)\n"
JUDGING = "def test_second(criterion): criterion.require(1)\n"
SKIPPING = "import pytest\n\ndef test_second(criterion): pytest.skip('not today')\n"
PLAIN = "def test_plain(): assert True\n"
NOT_FOUND = "import pytest\n\npytest.importorskip('no_such_module_at_all')\n\n"
NOT_IMPORTED = "import no_such_module_at_all\n\n"
GO_ON = ("--continue-on-collection-errors",)
LEFT_OUT = {
    "nothing": (("first", "second"), JUDGING, (), 0),
    "a test for an entry, and a criterion by itself": (("first", "second", "third"), SKIPPING, (), 1),
    "a plain test whose file skips itself": (("first",), NOT_FOUND + PLAIN, (), 0),
    "a plain test whose file does not import": (("first",), NOT_IMPORTED + PLAIN, GO_ON, 1),
}


@pytest.fixture(scope="module")
def left_out(shared_starter: Starter) -> dict[str, Launch]:
    """A run for each, all at the same time, each in a folder of its own; ends with all of them."""
    launches = {}
    for number, (what, (criteria, text, options, _)) in enumerate(LEFT_OUT.items()):
        folder = shared_starter.folder / str(number)
        folder.mkdir()
        for name, content in {"test_healthy": HEALTHY, "test_other": text}.items():
            (folder / f"{name}.py").write_text(content, encoding="utf-8")
        limits = write_limits(folder / "limits.yaml", {name: entry() for name in criteria}, extends=False)
        reports = ("--gpucluster-results", f"{number}/results", f"--junitxml={number}/junit.xml")
        promised = ("--gpucluster-expect", "nodes=1,gpus_per_node=1")
        launches[what] = shared_starter.pytest(str(number), "--gpucluster", limits, *promised, *reports, *options)
    for launch in launches.values():
        launch.end()
        launch.gone()
    return launches


@pytest.mark.parametrize("what", LEFT_OUT)
def test_left_out(what: str, left_out: dict[str, Launch]) -> None:
    """Never better than INCOMPLETE, which the gate turns into a failure; with nothing left out the same run is green."""
    criteria, _, _, status = LEFT_OUT[what]
    launch, number = left_out[what], list(LEFT_OUT).index(what)
    assert launch.end(within_s=1) == status, launch.output
    found = launch.results(f"{number}/results")
    jsonschema.validate(found, SCHEMA)
    outcomes = {row["criterion"]: row["outcome"] for row in found["criteria"]}
    verdict = launch.junit(f"{number}/junit.xml")["gpucluster.verdict"]
    if what == "nothing":
        assert (found["verdict"], verdict, outcomes) == ("REHEARSED", "skipped", {"first": "passed", "second": "passed"})
        return
    assert (found["verdict"], verdict) == ("INCOMPLETE", "error"), launch.output
    assert set(outcomes) >= set(criteria)
    assert "passed" not in (outcomes.get("second"), outcomes.get("third"))
    assert "verdict INCOMPLETE: " in launch.output
