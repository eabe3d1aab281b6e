"""Each cause is shown once, with all that it took along, however many outcomes share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.judging.causes import SHOWN_CULPRITS, describe_causes, describe_remarks, first_seen, name_of
from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.places import Inventory
from tests.support.entries import limit

TEXT = "finetune was not measured: rank 3 (node0-gpu3, h): the worker died: SIGKILL\n  Python stacks of rank 3:\n    line"


def places(nodes: int = 1, gpus: int = 8, *, absent: range = range(0)) -> dict[str, Any]:
    """Every GPU and node; those of absent nodes have no rank."""
    inventory = Inventory(num_nodes=nodes, gpus_per_node=gpus, device="cuda")
    bound = [
        replace(place, rank=rank, hostname=f"h{place.node}", serial=f"16{rank}") if place.node not in absent else place
        for rank, place in enumerate(inventory.places)
    ]
    return {place.id: place for place in (*bound, *inventory.nodes)}


def lost(criterion: str, place: str = "node0-gpu3", **changes: Any) -> Record:
    """One of many outcomes that a dead worker took along."""
    record = Record(criterion=criterion, place=None, outcome="error", reason=TEXT, culprits=(place,))
    return replace(record, **{"blames": "host", "cause": "the worker died: SIGKILL", **changes})


def shown(records: list[Record], known: dict[str, Any] | None = None, *, whole: bool = True) -> list[str]:
    """The lines of the terminal."""
    known = known or places()
    return describe_causes(find_culprits(records, known), records, known, whole=whole)


def test_nothing_bad_is_nothing_shown() -> None:
    """A good run."""
    assert shown([Record(criterion="a", place=None, outcome="passed")]) == []


@pytest.mark.parametrize("number", [1, 14, 100])
def test_one_block_for_one_cause(number: int) -> None:
    """Place, serial, the whole text once, the criteria, what to do next."""
    head, *body = shown([lost(f"check[{one}]") for one in range(number)])
    assert head == "host: node0-gpu3 (rank 3, h0), serial 163 (medium confidence)"
    assert [line.strip() for line in body[:3]] == [line.strip() for line in TEXT.splitlines()]
    assert body[3].strip().startswith(f"{number} criteri")
    assert body[4].strip().startswith("next: look at the host")
    assert len(body) == 5


def test_only_first_lines_where_pytest_shows_the_rest() -> None:
    """With ``-v``."""
    assert not any("Python stacks" in line for line in shown([lost("a"), lost("b")], whole=False))


def test_one_text_of_two_culprits_is_shown_once() -> None:
    """The ranks that raised are both named."""
    lines = shown([lost("a", culprits=("node0-gpu3", "node0-gpu4"))])
    assert sum("Python stacks" in line for line in lines) == 1
    assert sum(line.startswith("host: ") for line in lines) == 2


def test_absent_nodes_are_one_block() -> None:
    """63 of 64: a line of names, a count, a next step; not 63 blocks."""
    known = places(nodes=64, absent=range(1, 64))
    gone = [place.id for place in known.values() if place.node > 0]
    rows = [Record(criterion="a", place=name, outcome="missing", reason=f"not run: {name} is missing") for name in gone]
    lines = shown(rows, known)
    assert len(lines) == 3
    assert "node1, node2" in lines[0]
    assert "and 47 more are absent: 567 expected outcomes" in lines[0]


def test_many_culprits_are_cut() -> None:
    """The terminal names twenty and points to the file."""
    known = places(nodes=8)
    names = [place.id for place in known.values() if place.gpu is not None][:30]
    facts: dict[str, Any] = {"outcome": "failed", "limit": limit(), "value": 1.0, "blames": "gpu"}
    bad = [Record(criterion=f"c{name}", place=name, culprits=(name,), reason=f"{name} is slow", **facts) for name in names]
    lines = shown(bad, known)
    assert sum(line.startswith("gpu: ") for line in lines) == SHOWN_CULPRITS
    assert "and 10 more culprits, in results.json" in lines


def test_what_blames_nobody_is_shown_once() -> None:
    """Never run, too close to call; a crash of a test itself is pytest's to show."""
    cut = [Record(criterion=f"c{number}", place=None, outcome="missing", reason="not run: SIGTERM") for number in range(9)]
    crash = Record(criterion="own", place=None, outcome="error", reason="def test():\n> 1 / 0", headline="ZeroDivisionError")
    lines = shown([*cut, crash])
    assert lines == ["no culprit: 9 criteria: c0, c1, c2, c3, c4, c5, c6, c7, c8", "  not run: SIGTERM"]


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
