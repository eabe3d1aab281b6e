"""One run as a whole, before anything is started."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.cluster.calls import Cluster
from pytest_gpucluster.config.settings import Expect, Settings, parse_level
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.protocol.messages import FunctionName, Success
from pytest_gpucluster.run_setup import prepare
from pytest_gpucluster.session import Session
from tests.support.names import function_named

if TYPE_CHECKING:
    from pathlib import Path


def session(folder: Path, level: str = "standard", **changes: Any) -> Session:
    """A rehearsal of two ranks, started in ``folder``."""
    named, soak_s = parse_level(level)
    settings = Settings(
        thresholds=None,
        profile="rehearsal",
        expect=Expect(),
        level=named,
        soak_s=soak_s,
        results_dir=folder / "results",
        gate=False,
        inline=False,
    )
    return Session(prepare(replace(settings, **changes), None, start=folder), rootdir=folder)


@pytest.mark.parametrize(("level", "seconds"), [("quick", 120), ("standard", 300), ("soak", 600), ("soak:2h", 600)])
def test_deadline_comes_from_the_level(tmp_path: Path, level: str, seconds: float) -> None:
    """A soak lasts long by many calls: none of them may hang for hours."""
    assert session(tmp_path, level).setup.deadline_s == seconds


class Recorder:
    """In the controller's place: remembers the deadlines of the calls."""

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []

    def name(self, function: Any) -> FunctionName:
        """Any function will do."""
        return function_named(function.__name__)

    def call(self, call: Any) -> dict[int, Any]:
        """Answer with 1 for every rank."""
        self.deadlines_s.append(call.deadline_s)
        return {rank: Success(value=1) for rank in call.ranks}


def test_a_call_may_bring_its_own_deadline_and_a_further_round_has_that_of_the_first() -> None:
    """Else it has that of the level."""
    controller: Any = Recorder()
    inventory = Inventory(num_nodes=1, gpus_per_node=1, device="cpu")
    binding = Binding(inventory=inventory, places=(replace(inventory.places[0], rank=0),))
    cluster = Cluster(controller, binding, deadline_s=120)
    first = cluster.run(sorted, per="gpu", iterations=10)
    cluster.run(sorted, per="gpu", deadline_s=7)
    assert first._remeasured
    assert controller.deadlines_s == [120, 7, 120]


def test_waivers_are_checked_before_anything_runs(tmp_path: Path) -> None:
    """Also in a rehearsal, where they are not applied."""
    (tmp_path / "waivers.yaml").write_text("schema: 1\nwaivers: [{criterion: nonsense}]\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"waivers.yaml:2: 'until' is missing"):
        session(tmp_path)


def test_a_rehearsal_has_no_waivers(tmp_path: Path) -> None:
    """There is no part to answer for."""
    entry = "{criterion: finetune_loss, until: 2099-12-31, who: J. Doe, why: a test}"
    (tmp_path / "waivers.yaml").write_text(f"schema: 1\nwaivers: [{entry}]\n", encoding="utf-8")
    made = session(tmp_path)
    assert made.setup.waivers.facts == []
    record: Any = SimpleNamespace(place=None, criterion="finetune_loss", outcome="failed")
    assert made.waive(record) is record


def test_a_report_while_the_run_goes_on_accepts_nothing(tmp_path: Path) -> None:
    """Everything has passed, and the last teardown has not ended; at the end the same records are the verdict."""
    made = session(tmp_path)
    made.recorder.open(tmp_path / "results", junit=tmp_path / "junit.xml")
    made.recorder.record_outcome(Record(criterion="finetune_loss", place=None, outcome="passed"))
    so_far = json.loads((tmp_path / "results" / "results.json").read_text(encoding="utf-8"))
    assert so_far["verdict"] == "INCOMPLETE"
    assert so_far["verdict_line"] == "INCOMPLETE: 1 passed on 1 node x 2 ranks on the CPU (the run has not ended)"
    assert '<error type="error" message="INCOMPLETE: 1 passed' in (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert made.decide().word == "REHEARSED"
    made.recorder.close()


def test_a_run_that_ended_before_its_tests_were_known(tmp_path: Path) -> None:
    """All that the profile expects is missing, with the reason."""
    made = session(tmp_path)
    made.record_unplanned(why="not run: terminated by SIGTERM")
    assert {record.outcome for record in made.plan} == {"missing"}
    assert made.decide().word == "INCOMPLETE"


@pytest.mark.parametrize(
    ("hostnames", "is_signed", "is_said"),
    [
        (("node-a", "node-b"), False, True),
        (("node-a", "node-b"), True, False),
        (("node-a", "node-a"), False, False),
        (("node-a", None), False, False),
        (("node-a",), False, False),
    ],
    ids=["two hosts", "signed", "one host twice", "an unknown host", "one host"],
)
def test_unsigned_messages_between_hosts_are_said(
    tmp_path: Path, *, hostnames: tuple[str | None, ...], is_signed: bool, is_said: bool
) -> None:
    """In the verdict line, and it forbids nothing."""
    run = session(tmp_path)
    controller: Any = SimpleNamespace(is_signed=is_signed)
    run.state.controller = controller
    nodes = [Place(id=f"node{number}", node=number, hostname=name) for number, name in enumerate(hostnames)]
    bound: Any = SimpleNamespace(nodes=nodes, places=[], identities={}, startup_s=0.0, remarks=())
    run.state.binding = bound
    assert run.state.terms.remarks == (("messages were not signed",) if is_said else ())
    assert run.decide().line.endswith("; messages were not signed") is is_said
    assert not run.state.terms.objections


def test_the_seconds_of_a_run_are_taken_once(tmp_path: Path) -> None:
    """When its verdict is decided: the screen, which comes after the reports were written, says what these say."""
    run = session(tmp_path)
    controller: Any = SimpleNamespace(is_signed=True, clock=SimpleNamespace(measuring_s=3.0, waited_s=1.0))
    run.state.controller = controller
    first = run.state.timings()
    time.sleep(0.01)
    assert run.state.timings()["total_s"] > first["total_s"]  # it goes on
    run.state.end()
    ended = run.state.timings()
    controller.clock = SimpleNamespace(measuring_s=9.0, waited_s=9.0)
    time.sleep(0.01)
    assert run.state.timings() == ended
    assert ended["waited_s"] == 1.0
