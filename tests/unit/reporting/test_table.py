"""The closing table: what each cell says, what is folded, and how it fits a screen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pytest_gpucluster.judging.failure_text import format_beside, format_number
from pytest_gpucluster.judging.verdict import OUTCOMES, Record
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.reporting.bad_parts import Shown, describe_bad_parts
from pytest_gpucluster.reporting.table import COLUMNS, DROPPED, Layout, criteria_table
from pytest_gpucluster.reporting.table_rows import headroom_cell, outcome_text
from pytest_gpucluster.thresholds.layers import KINDS
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.entries import limit
from tests.support.fleet_records import selector_of
from tests.support.screens import kept_screen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.places import Place

NODE = Inventory(num_nodes=1, gpus_per_node=8, device="cuda")
FLEET = Inventory(num_nodes=64, gpus_per_node=8, device="cuda")
WIDE = Layout(width=200)
ERRORS = Limit(kind="max", value=0, unit="errors")
BEHIND = Limit(kind="max", value=8, unit="%")
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def table(
    *records: Record, inventory: Inventory = NODE, subjects: Mapping[str, str] | None = None, layout: Layout = WIDE
) -> list[str]:
    """The lines of the table."""
    return criteria_table(records, inventory.by_id, subjects=subjects or {}, layout=layout)


def over(
    criterion: str, values: Sequence[float | None], one: Limit, *, inventory: Inventory = NODE, **changes: Any
) -> list[Record]:
    """One criterion at the first GPUs: failed where the value misses the limit."""
    return [
        Record(
            criterion=criterion,
            place=place.id,
            value=value,
            limit=one,
            **{"outcome": "passed" if value is None or one.holds(value) else "failed", **changes},
        )
        for place, value in zip(inventory.places, values, strict=False)
    ]


NONE = Limit(kind="above", value=0, unit="GB/s")
"""Asks only that a value is there."""


@pytest.mark.parametrize(
    ("limit_of_one", "outcomes", "text"),
    [
        (NONE, ["passed"] * 3, "3 measured"),
        (Limit(kind="above", value=1, unit="GB/s"), ["passed"] * 3, "3 ok"),
        (Limit(kind="max", value=0, unit="errors"), ["passed"] * 3, "3 ok"),
        (NONE, ["passed", "passed", "error"], "1 of 3 not measured"),
        (NONE, ["passed", "passed", "missing"], "1 of 3 missing"),
    ],
)
def test_what_has_no_limit_is_measured_and_not_ok(limit_of_one: Limit, outcomes: list[str], text: str) -> None:
    """Green and ok say that a number was asked for; so does the line above the subject's rows."""
    value = 0.0 if limit_of_one.kind == "max" else 5.0
    records = [
        replace(record, outcome=outcome)
        for record, outcome in zip(over("scratch_read", [value] * 3, limit_of_one), outcomes, strict=True)
    ]
    (line,) = (one for one in table(*records) if one.startswith("scratch_read"))
    assert cells(line)[-1] == text
    subjects = {"scratch_read": "platform"}
    grouped = table(*records, subjects=subjects, layout=replace(WIDE, color=True, is_whole=True))
    assert any("all ok" in one for one in grouped) == (text == "3 ok")
    assert any("all 3 ok" in one for one in table(*records, subjects=subjects)) == (text == "3 ok")
    (row,) = (one for one in grouped if "scratch_read" in one)
    assert ("\x1b[32m" in row) == (text == "3 ok")


def cells(line: str) -> list[str]:
    """The cells of one row; a blank within a cell is single."""
    return re.split(r" {2,}", line.strip())


# Numbers.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (498.0, "498"),
        (498.04, "498.0"),
        (771.03, "771.0"),
        (0.61803, "0.6180"),
        (0.5, "0.5"),
        (1234.56, "1235"),
        (18914.8, "18910"),
        (1557.9, "1558"),
        (0.0013114, "0.001311"),
        (3e-05, "3e-05"),
        (0, "0"),
        (-0.0, "0"),
        (-3.0, "-3"),
        (8388608, "8388608"),
        (1e9, "1e+09"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    """A rounded number has four, an exact one no more than it needs, a count all."""
    assert format_number(value) == text


@given(st.floats(-1e300, 1e300, allow_subnormal=False))
def test_a_shown_number_is_near(value: float) -> None:
    """Four digits are right to a half of the last one."""
    assert float(format_number(value)) == pytest.approx(value, rel=0.51e-3, abs=0)


@given(st.sampled_from(KINDS), FINITE, FINITE)
@example("above", 700.0, 699.99)
@example("above", 700.0, 700.01)
@example("above", 700.0, 700.0)
@example("min", 137.592, 137.59)
@example("max", 0.1 + 0.2, 0.30000000000000007)
@example("below", 1e-320, 2e-320)
def test_what_fails_is_shown_as_failing(kind: Any, bound: float, value: float) -> None:
    """The two texts compare as the two numbers do; equal texts of different numbers never stand for a miss."""
    one = Limit(kind=kind, value=bound, unit="s")
    shown_limit, shown = map(float, format_beside(one, value))
    assert replace(one, value=shown_limit).holds(shown) == one.holds(value)
    if not one.holds(value) and value != bound:
        assert shown != shown_limit


@given(st.sampled_from(KINDS), FINITE, st.lists(FINITE, min_size=1, max_size=5))
def test_a_row_shows_its_worst_value_as_bad_as_it_is(kind: Any, bound: float, values: list[float]) -> None:
    """A row in which something failed has a worst value that misses the limit beside it, and any other row has not."""
    one = Limit(kind=kind, value=bound, unit="ms")
    heading, line = table(*over("time", values, one))
    found = dict(zip(cells(heading), cells(line), strict=True))
    shown = replace(one, value=float(found["limit"].split()[1]))
    failed = [value for value in values if not one.holds(value)]
    assert shown.holds(float(found["worst"])) == (not failed)
    assert ("failed" in found["outcome"]) == bool(failed)


@pytest.mark.parametrize(
    ("one", "value", "text"),
    [
        (limit(), 777.2, "11 %"),
        (limit(), 498.0, "-29 %"),
        (limit(), 700.0, "0 %"),
        (limit(), 729.4, "4.2 %"),
        (limit(), 699.99, "-0.0014 %"),
        (limit(), 4060.0, "5.8 x"),
        (limit(), 1400.0, "100 %"),
        (limit(), 1401.0, "2 x"),
        (limit(), 33600.0, "48 x"),
        (limit("max", 6, "%"), 5.4, "10 %"),
        (limit("max", 6, "%"), -2.4, "140 %"),
        (limit("max", 4, "%"), 20.66, "-416 %"),
        (limit("max", 4, "%"), 4e9, "-1e+11 %"),
        (limit("min", -10, "C"), 15.0, "250 %"),
        (limit("min", 8, "GPUs"), 8, "-"),
        (limit("min", 2, "nodes"), 1, "-"),
        (limit("max", 6, "errors"), 1, "-"),
        (limit("max", 0, "%"), 1.0, "-"),
        (limit(), float("nan"), "-"),
    ],
)
def test_headroom_has_one_meaning(one: Limit, value: float, text: str) -> None:
    """Distance from the limit in percent of it, a multiple above twice a lower limit; none for counts and bounds of zero."""
    assert headroom_cell(value, one) == text


# Cells.


def test_a_row_names_the_worst_place() -> None:
    """Criterion, unit, worst value and its place, median, limit, headroom, outcome."""
    heading, line = table(*over("tflops", [783.9, 777.2, 790.1, 784.4], limit()))
    assert cells(heading) == [name for name in COLUMNS if name != "p1"]
    assert cells(line) == ["tflops", "TFLOPS", "777.2", "gpu1", "784.1", "> 700", "11 %", "4 ok"]


def test_a_ceiling_is_worst_at_the_top() -> None:
    """And what misses its limit is worse than anything that does not, whatever the other limits are."""
    assert cells(table(*over("behind", [-2.5, 3.93, 1.0], BEHIND))[1])[2:5] == ["3.93", "gpu1", "1"]
    wider = over("behind", [9.0], replace(BEHIND, value=10)) + over("behind", [0, 8.1], BEHIND)[1:]
    assert cells(table(*wider)[1])[2:] == ["8.1", "gpu1", "8.55", "<= 8", "-1.2 %", "1 of 2 failed"]


@pytest.mark.parametrize(("inventory", "names"), [(NODE, ("gpu0", "node")), (FLEET, ("node0-gpu0", "node0"))])
def test_places_have_short_names(inventory: Inventory, names: tuple[str, str]) -> None:
    """On one node nobody needs its number."""
    rows = [*over("rate", [800.0], limit()), replace(over("bus", [500.0], limit())[0], place="node0")]
    rows.append(replace(rows[0], criterion="whole", place=None))
    assert tuple(cells(line)[3] for line in table(*rows, inventory=inventory)[1:]) == (*names, "cluster")


BLAMED = ["failed", "error", "missing", "noisy", "waived"]


def blamed(outcome: str, row: Record, **changes: Any) -> Record:
    """The same record with a bad outcome."""
    waiver: dict[str, Any] = {"waiver": {"who": "J. Doe"}, "waivable": True} if outcome == "waived" else {}
    return replace(row, outcome="failed" if waiver else outcome, **waiver, **changes)


@pytest.mark.parametrize("has_limit", [True, False])
@pytest.mark.parametrize("outcome", [one for one in BLAMED if one != "missing"])
def test_a_bad_outcome_without_a_value_blames_its_own_place(outcome: str, *, has_limit: bool) -> None:
    """Never the worst of the good ones: their values are in the median only."""
    rows = over("tflops", [783.9, 777.2, 790.1, 784.4], limit())
    rows[2] = blamed(outcome, rows[2], value=None, limit=limit() if has_limit else None)
    line = cells(table(*rows)[1])
    assert line[2:7] == ["-", "gpu2", "783.9", "> 700", "-"]
    assert line[-1].startswith("1 of ")


@pytest.mark.parametrize("outcome", [one for one in BLAMED if one != "missing"])
def test_the_worst_value_is_one_of_the_severest_outcome(outcome: str) -> None:
    """Also where a good value is nearer to the limit; the twin without a bad outcome shows that one."""
    rows = over("tflops", [783.9, 777.2, 790.1, 784.4], limit())
    assert cells(table(*rows)[1])[2:4] == ["777.2", "gpu1"]
    rows[2] = blamed(outcome, rows[2])
    assert cells(table(*rows)[1])[2:4] == ["790.1", "gpu2"]
    rows[3] = blamed(outcome, rows[3], value=None)
    assert cells(table(*rows)[1])[2:4] == ["790.1", "gpu2"]


def absent(row: Record) -> Record:
    """The same criterion at a place that nobody heard of."""
    return replace(
        row, outcome="missing", value=None, limit=None, reason=f"not run: {row.place} is missing: no such node joined"
    )


def test_values_stand_beside_missing_places() -> None:
    """The worst one of those that were measured. Only the outcome is red: the value is good, and so is its place."""
    rows = over("tflops", [783.9, 777.2, 790.1, 784.4], limit())
    rows[2] = absent(rows[2])
    assert cells(table(*rows)[1])[2:] == ["777.2", "gpu1", "783.9", "> 700", "11 %", "1 of 4 missing"]
    coloured = table(*rows, layout=replace(WIDE, color=True))[1]
    assert re.findall(r"\x1b\[31m *([^\x1b]*)", coloured) == ["1 of 4 missing"]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("nodes", [[1], [0, 2]])
def test_the_table_says_nothing_of_absent_nodes(*, nodes: list[int], is_whole: bool) -> None:
    """The bad parts name them once. Rows show what was measured, and no subject is all good."""
    inventory = Inventory(num_nodes=3, gpus_per_node=2, device="cuda", hosts=("qx", "qy", "qz"))
    places = {
        one.id: replace(one, rank=rank) if one.node not in nodes and one.gpu is not None else one
        for rank, one in enumerate(inventory.everything)
    }
    rows = [row for key in ("one", "two", "three") for row in over(key, [783.9] * 6, limit(), inventory=inventory)]
    rows = [absent(row) if places[str(row.place)].node in nodes else row for row in rows]
    rows += [absent(Record(criterion="all", place=f"node{node}", outcome="passed")) for node in range(3)]
    lost = {"place": None, "outcome": "missing", "reason": "not run: qy is absent", "culprits": (f"node{nodes[0]}",)}
    rows += [Record(criterion=name, **lost) for name in ("busbw_scaling", "training_scaling_cluster")]  # type: ignore[arg-type]
    subjects = dict.fromkeys(("one", "two", "three", "busbw_scaling", "training_scaling_cluster"), "compute")
    shown = criteria_table(rows, places, subjects=subjects, layout=replace(WIDE, is_whole=is_whole))
    assert not any("absent" in line or "all ok" in line for line in shown)
    good = 6 - 2 * len(nodes)
    if is_whole:
        assert sum(line.endswith(f"{good} ok") for line in shown) == 3
    else:
        assert cells(shown[0])[1].startswith(f"{3 * good} ok")
    (gone,) = (line for line in describe(rows, places) if "absent" in line and "node" in line and "BAD" not in line)
    assert [name in gone for name in ("qx", "qy", "qz")] == [node in nodes for node in range(3)]


def describe(rows: list[Record], places: dict[str, Place]) -> list[str]:
    """The lines about bad parts but for their reasons."""
    shown = Shown(places=places, tests=selector_of(rows), device="cuda", width=200, command=())
    return [line.plain for line in describe_bad_parts(rows, shown) if "not run" not in line.plain]


def test_a_missing_gpu_of_a_node_that_answers_is_no_absent_node() -> None:
    """It stays in the row of each criterion."""
    inventory = Inventory(num_nodes=1, gpus_per_node=2, device="cuda")
    places = {one.id: replace(one, rank=0) if one.gpu == 0 else one for one in inventory.everything}
    rows = over("one", [783.9, 783.9], limit(), inventory=inventory)
    shown = criteria_table([rows[0], absent(rows[1])], places, subjects={}, layout=WIDE)
    assert shown[1].endswith("1 of 2 missing")
    assert not any(line.startswith("absent") for line in shown)


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (["missing"] * 8 + ["skipped"] * 1016, "8 of 1024 missing"),
        (["failed", "skipped", "missing"], "1 failed, 1 missing"),
        (["failed", "passed", "skipped"], "1 of 2 failed"),
        (["skipped"] * 3, "3 do not apply"),
        (["passed"] * 3, "3 ok"),
    ],
)
def test_what_a_rule_leaves_out_is_told_alone(outcomes: list[str], text: str) -> None:
    """Beside what is bad it is no news, and would take the room of other columns."""
    assert outcome_text(outcomes) == text


def test_values_that_are_alike_name_no_place_beside_missing_ones() -> None:
    """No place is the worst, and they are not all."""
    rows = over("errors", [0, 0, 0], ERRORS)
    rows[2] = absent(rows[2])
    assert cells(table(*rows)[1])[2:4] == ["0", "-"]
    assert cells(table(*over("errors", [0, 0, 0], ERRORS))[1])[2:4] == ["0", "all"]


def test_a_value_that_failed_stands_beside_missing_places() -> None:
    """With its place, both red."""
    rows = [*over("tflops", [783.9, 600.0], limit()), absent(over("tflops", [1.0] * 3, limit())[2])]
    assert cells(table(*rows)[1])[2:4] == ["600", "gpu1"]


@pytest.mark.parametrize("outcome", BLAMED)
def test_no_value_anywhere(outcome: str) -> None:
    """Then the first bad place is named; all, if all are bad."""
    rows = [blamed(outcome, row, value=None) for row in over("tflops", [800.0] * 3, limit())]
    assert cells(table(*rows)[1])[2:7] == ["-", "all", "-", "> 700", "-"]
    assert cells(table(replace(rows[0], outcome="passed", waiver=None), *rows[1:])[1])[2:4] == ["-", "gpu1"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([*BLAMED[:4], "passed", "skipped"]), st.booleans()), min_size=1, max_size=8))
def test_no_good_place_is_named_beside_a_bad_outcome(found: list[tuple[str, bool]]) -> None:
    """Whatever the outcomes, and whoever has a value; but where places are only missing, others have theirs."""
    rows = [
        Record(criterion="c", place=place.id, outcome=outcome, value=800.0 + number if has_value else None, limit=limit())
        for number, (place, (outcome, has_value)) in enumerate(zip(NODE.places, found, strict=False))
    ]
    severest = next((one for one in BLAMED if any(one == outcome for outcome, _ in found)), None)
    assume(severest is not None)
    assume(severest != "missing" or not any(has_value for _, has_value in found))
    where = cells(table(*rows)[1])[3]
    guilty = [f"gpu{number}" for number, (outcome, _) in enumerate(found) if outcome == severest]
    assert where in guilty or (where == "all" and len(guilty) == len(found))


def test_a_near_miss_gives_the_median_no_digits() -> None:
    """Only a median that is a near miss itself has more than four."""
    values = [782.5061728, 699.99999999, 790.1, 760.3]
    assert cells(table(*over("tflops", values, limit()))[1])[2:6] == ["699.99999999", "gpu1", "771.4", "> 700"]
    assert cells(table(*over("tflops", [699.99] * 3, limit()))[1])[2:6] == ["699.99", "all", "699.99", "> 700"]


@pytest.mark.parametrize(("one", "worst"), [(limit(), 781.0), (limit("max", 6000, "ms"), 1287.0)])
def test_one_percent_is_as_bad_or_worse(one: Limit, worst: float) -> None:
    """The sixth worst of 512 values; a column only where a row has more than 100 values, and "-" in the other rows."""
    values = [776.0 + number for number in range(512)]
    heading, *lines = table(*over("rate", values, one, inventory=FLEET), *over("few", [800.0] * 2, one), inventory=FLEET)
    assert cells(heading) == [*COLUMNS]
    p1 = [dict(zip(COLUMNS, cells(line), strict=True))["p1"] for line in lines]
    assert p1 == [f"{worst:.0f}" if one.is_floor else "1282", "-"]
    assert "p1" not in table(*over("rate", values[:100], one, inventory=FLEET), inventory=FLEET)[0]


def test_a_good_subject_says_so() -> None:
    """On its own line: not where something is bad, an advisory limit was missed, or something was not selected.

    With ``-v`` too, above the rows.
    """
    good, bad = over("ecc", [0, 0], ERRORS), over("rows", [0, 3], ERRORS)
    missed = [replace(one, criterion="hot", outcome="passed", advisory=True) for one in bad]
    unselected = [replace(one, criterion="mig", outcome="not_selected", value=None) for one in good]
    skipped = [replace(one, criterion="nic", outcome="skipped", value=None) for one in good]
    subjects = dict.fromkeys(("ecc", "rows", "hot", "mig", "nic"), "health")
    for more in ([], skipped):
        assert table(*good, *more, subjects=subjects)[0] == "health  all 2 ok"
    whole = replace(WIDE, is_whole=True)
    assert cells(table(*good, subjects=subjects, layout=whole)[1]) == ["health", "all ok"]
    for more, state in ((bad, "1 of 4 failed"), (missed, "all 4 ok, 2 advisory misses"), (unselected, "2 ok")):
        assert table(*good, *more, subjects=subjects)[0] == f"health  {state}"
        assert cells(table(*good, *more, subjects=subjects, layout=whole)[1]) == ["health"]


def test_a_bound_of_zero_has_no_headroom() -> None:
    """It reads as any other bound: a value of zero is a number, and so is what misses it."""
    good, bad = over("ecc", [0, 0], ERRORS), over("rows", [0, 3, 0], ERRORS)
    other = over("time", [0.0], limit("max", 5, "ms"))
    lines = [cells(line)[2:] for line in table(*good, *bad, *other)[1:]]
    assert lines == [
        ["0", "all", "0", "<= 0", "-", "2 ok"],
        ["3", "gpu1", "0", "<= 0", "-", "1 of 3 failed"],
        ["0", "gpu0", "-", "<= 5", "100 %", "1 ok"],
    ]


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (["passed"] * 8, "8 ok"),
        (["passed"] * 7 + ["failed"], "1 of 8 failed"),
        (["failed"] * 8, "8 failed"),
        (["missing"], "1 missing"),
        (["passed", "error", "failed", "missing", "missing"], "1 of 2 failed, 1 not measured, 2 missing"),
        (["passed", "noisy", "not_selected"], "1 of 2 too close to call, 1 not selected"),
        (["failed", "missing", "missing"], "1 failed, 2 missing"),
        (["passed", "missing", "missing"], "2 of 3 missing"),
    ],
)
def test_outcomes_in_words(outcomes: list[str], text: str) -> None:
    """How many, the severest first. What was judged is counted among all that was judged, what was not among everything."""
    rows = [Record(criterion="c", place=place.id, outcome=one) for place, one in zip(NODE.places, outcomes, strict=False)]
    assert cells(table(*rows)[1])[-1] == text


@pytest.mark.parametrize(("misses", "text"), [(0, "2 ok"), (1, "2 ok, 1 advisory miss"), (2, "2 ok, 2 advisory misses")])
def test_advisory_misses_are_counted(misses: int, text: str) -> None:
    """Beside the outcome, which is passed."""
    rows = [replace(row, advisory=number < misses) for number, row in enumerate(over("rate", [800.0, 800.0], limit()))]
    assert cells(table(*rows)[1])[-1] == text


def test_a_waived_failure_is_no_failure() -> None:
    """It has a word of its own."""
    rows = over("rate", [498.0, 800.0], limit(), waivable=True, waiver={"who": "J. Doe"})
    assert cells(table(*rows)[1])[-1] == "1 of 2 waived"


def test_a_rehearsal_shows_no_headroom() -> None:
    """Its values say nothing about hardware."""
    rows = over("rate", [800.0], limit())
    assert "headroom" in table(*rows)[0]
    assert "headroom" not in table(*rows, layout=replace(WIDE, is_rehearsal=True))[0]


def test_rows_stand_by_subject() -> None:
    """With -v, subjects and criteria in the order of the run; without subjects there are no headings."""
    rows = [over(name, [800.0], limit())[0] for name in ("ecc", "tflops", "mig", "mine")]
    grouped = table(
        *rows, subjects={"ecc": "health", "mig": "health", "tflops": "compute"}, layout=replace(WIDE, is_whole=True)
    )
    assert [re.split(" {3,}|  TFLOPS", line)[0] for line in grouped[1:]] == [
        "health", "  ecc", "  mig", "compute", "  tflops", "others", "  mine",
    ]  # fmt: skip
    assert [cells(line)[0] for line in table(*rows)[1:]] == ["ecc", "tflops", "mig", "mine"]


def left_out(outcome: str, causes: Sequence[str | None]) -> list[Record]:
    """One criterion at two places for each cause."""
    return [
        Record(criterion=f"{outcome}{number}", place=place, outcome=outcome, cause=cause)
        for number, cause in enumerate(causes)
        for place in ("node0-gpu0", "node0-gpu1")
    ]


def test_what_has_no_result_is_a_line() -> None:
    """The number of criteria by cause; without a cause the number alone; with ``-v`` rows of what was selected."""
    rows = left_out("skipped", ["one node"] * 2 + ["one GPU"] * 3) + left_out("not_selected", [None] * 4)
    assert table(*rows) == ["not applicable (5): one GPU (3), one node (2)", "not selected: 4"]
    whole = table(*rows, layout=replace(WIDE, is_whole=True))
    assert (len(whole), whole[-1]) == (1 + 5 + 1, "not selected: 4")
    some = table(*left_out("not_selected", [None, "level quick"]), *over("rate", [800.0], limit()))
    assert [cells(line)[0] for line in some] == ["criterion", "rate", "not selected (2): level quick (1)"]
    many = table(*left_out("skipped", [f"cause {number}" for number in range(9)]))
    assert many == ["not applicable (9): cause 0 (1), cause 1 (1), cause 2 (1), cause 3 (1), 5 other reasons"]


def test_what_ran_somewhere_keeps_its_row() -> None:
    """A criterion that was left out at some places only has a result."""
    rows = [*over("rate", [800.0], limit()), Record(criterion="rate", place="node0-gpu1", outcome="not_selected")]
    assert cells(table(*rows)[1])[-1] == "1 of 2 not selected"


# Screens.

NAMES = st.text(min_size=1, max_size=60)
RECORDS = st.builds(
    Record,
    criterion=NAMES,
    place=st.none() | st.sampled_from([*NODE.by_id, "nobody"]),
    outcome=st.sampled_from(OUTCOMES),
    value=st.none() | st.floats(),
    limit=st.none() | st.builds(Limit, kind=st.sampled_from(KINDS), value=st.floats(), unit=st.text()),
    cause=st.none() | st.text(),
    advisory=st.booleans(),
)


@given(
    st.lists(RECORDS, max_size=4),
    st.builds(Layout, width=st.integers(1, 200), color=st.booleans(), is_whole=st.booleans()),
)
def test_any_outcome_at_any_width(records: list[Record], layout: Layout) -> None:
    """Names with brackets, no values, no numbers, narrow screens: a table, never an exception."""
    table(*records, layout=layout)


def a_run(inventory: Inventory = NODE, *, bad: Mapping[str, float] | None = None) -> list[Record]:
    """Every kind of row: rates, counts, long names, families, what does not apply."""

    def rates(name: str, one: Limit, middle: float) -> list[Record]:
        values = [middle * (1 + (7 * number % 13 - 6) / 1000) for number in range(len(inventory.places))]
        return over(name, values, one, inventory=inventory)

    def counts(name: str) -> list[Record]:
        return over(name, [0] * len(inventory.places), ERRORS, inventory=inventory)

    def whole(name: str, one: Limit, value: float) -> Record:
        return Record(criterion=name, place=None, outcome="passed", value=value, limit=one)

    rows = [
        *counts("ecc_uncorrected"),
        whole("gpu_count", Limit(kind="min", value=8, unit="GPUs"), 8),
        *rates("bf16_tflops", limit(), 783.9),
        *rates("hbm_bandwidth", limit("above", 4.1, "TB/s"), 4.37),
        *rates("training_throughput_gpu", limit("above", 2000, "tokens/s/GPU"), 18463.1),
        whole("training_throughput_fsdp_cluster", limit("above", 500, "tokens/s/GPU"), 11237.4),
        *[one for name in ("bf16_tflops", "hbm_bandwidth") for one in rates(f"straggler[{name}]", BEHIND, 1.3)],
        *[whole(f"finetune_check[{name}]", limit("max", 0, "count"), 0) for name in ("finite", "restore", "lock_step")],
        *left_out("skipped", ["one node"] * 6 if len(inventory.nodes) == 1 else []),
    ]
    worse, at = bad or {}, inventory.places[3].id
    return [
        replace(row, value=worse[row.criterion], outcome="failed") if row.place == at and row.criterion in worse else row
        for row in rows
    ]


SUBJECTS = {
    "ecc_uncorrected": "health",
    "gpu_count": "health",
    "bf16_tflops": "compute",
    "hbm_bandwidth": "memory",
    "training_throughput_gpu": "training",
    "training_throughput_fsdp_cluster": "training",
    "straggler[bf16_tflops]": "training",
    "straggler[hbm_bandwidth]": "training",
    "finetune_check[finite]": "training",
}
BAD = {"bf16_tflops": 498.0, "ecc_uncorrected": 3, "straggler[bf16_tflops]": 36.6}
SCREENS = Path(__file__).parent / "screens"


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("name", "records", "inventory"),
    [
        ("healthy-1x8", a_run(), NODE),
        ("bad-1x8", a_run(bad=BAD), NODE),
        ("bad-64x8", a_run(FLEET, bad=BAD), FLEET),
    ],
    ids=["healthy", "bad", "fleet"],
)
def test_screens(name: str, records: list[Record], inventory: Inventory, width: int) -> None:
    """The whole table, as a person sees it. No line is wider than the screen, and none has colours."""
    lines = table(*records, inventory=inventory, subjects=SUBJECTS, layout=Layout(width=width))
    assert lines == kept_screen(SCREENS / f"{name}-{width}.txt", lines)
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)


@settings(max_examples=30)
@given(st.integers(30, 160))
def test_a_name_is_never_broken(width: int) -> None:
    """Nor is any cell; no line is wider than the screen. A narrow screen has fewer columns: first without the median."""
    lines = table(*a_run(bad=BAD), subjects=SUBJECTS, layout=Layout(width=width, is_whole=True))
    heading, shown = lines[0].split(), "\n".join(lines)
    assert all(len(line) <= max(width, 34) for line in lines)
    assert all(f"  {name}" in shown for name in SUBJECTS if "[" not in name)
    dropped = [name for name in DROPPED if name not in heading]
    assert dropped == [*DROPPED[: len(dropped)]]


def test_colour_is_never_the_only_sign() -> None:
    """The coloured text says the same words as the plain one. The bad value and its place are red, a good one is not."""
    for is_whole in (False, True):
        _same_words(replace(WIDE, is_whole=is_whole))


def _same_words(layout: Layout) -> None:
    plain = table(*a_run(bad=BAD), subjects=SUBJECTS, layout=layout)
    coloured = table(*a_run(bad=BAD), subjects=SUBJECTS, layout=replace(layout, color=True))
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in coloured] == plain
    bad = next(line for line in coloured if "498" in line and "gpu3" in line)
    assert all(re.search(rf"\x1b\[31m *{text}", bad) for text in ("498", "gpu3", "1 of 8 failed"))
    assert not any("\x1b[31m" in line for line in coloured if " ok" in line)


def test_what_is_missing_everywhere_for_one_reason_is_one_line() -> None:
    """In red, and its subject is not good. A single criterion keeps its row, and with ``-v`` each has one."""
    gone = [
        Record(criterion=f"c{one}", place=None, outcome="missing", reason="not run: node1 is missing: no") for one in range(3)
    ]
    rows, subjects = over("rate", [800.0, 810.0], limit()), {"rate": "a", "c0": "a", "c1": "b", "c2": "b"}
    lines = table(*rows, *gone, subjects=subjects)
    assert lines == ["a  2 ok, 1 missing   rate 800 to 810 TFLOPS (> 700)", "missing (3): not run: node1 is missing: no"]
    assert table(*rows, *gone, layout=replace(WIDE, color=True))[-1].startswith("\x1b[31mmissing (3)")
    assert cells(table(*rows, gone[0])[-1])[0] == "c0"
    other = replace(gone[1], reason="not run: terminated by SIGTERM")
    assert [cells(line)[0] for line in table(*rows, gone[0], other)[1:]] == ["rate", "c0", "c1"]
    assert len(table(*rows, *gone, layout=replace(WIDE, is_whole=True))) == 5
