"""Each cause is shown once, with all that it took along, however many outcomes share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpucluster.judging.culprits import describe_remarks, first_seen, name_of
from pytest_gpucluster.judging.verdict import Record
from tests.support.fleet_records import fleet

TEXT = "finetune was not measured: rank 3 (node0-gpu3, h): the worker died: SIGKILL\n  Python stacks of rank 3:\n    line"


def lost(criterion: str, place: str = "node0-gpu3", **changes: Any) -> Record:
    """One of many outcomes that a dead worker took along."""
    record = Record(criterion=criterion, place=None, outcome="error", reason=TEXT, culprits=(place,))
    return replace(record, **{"blames": "host", "cause": "the worker died: SIGKILL", **changes})


def test_first_seen() -> None:
    """By the whole text of the error: another call's error is another one. What no measurement raised is not grouped."""
    rows = [lost("a"), lost("b"), lost("c", reason="another call"), lost("d"), lost("e", cause=None)]
    assert first_seen(rows) == {("b", None): rows[0], ("d", None): rows[0]}
    assert name_of(replace(rows[0], place="node0")) == "a at node0"


def test_remarks_are_shown_once() -> None:
    """With all places that have them."""
    alone = "compared with itself over 5 rounds; no other GPU to compare with"
    rows = [Record(criterion="bits", place=name, outcome="passed", remark=alone) for name in ("node0-gpu0", "node1-gpu0")]
    assert describe_remarks([*rows, Record(criterion="a", place=None, outcome="passed")]) == [
        f"remark: bits at node0-gpu0, bits at node1-gpu0: {alone}"
    ]


def test_a_remark_of_many_places_counts_them() -> None:
    """Of each criterion, so that one load of a host is a line and no paragraph."""
    places = [place.id for place in fleet(2, 8).values() if place.gpu is not None]
    rows = [
        Record(criterion=key, place=name, outcome="passed", remark="measured again")
        for key in ("to_gpu", "from_gpu")
        for name in places[:8]
    ]
    rows.append(Record(criterion="bits", place=places[0], outcome="passed", remark="measured again"))
    assert describe_remarks(rows) == [f"remark: to_gpu at 8 places, from_gpu at 8 places, bits at {places[0]}: measured again"]
