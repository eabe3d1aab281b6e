"""What is bad, grouped by part: each failure once, its cause, what to do next, and never more than 60 lines."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.reporting.bad_parts import (
    MOST_DETAILED,
    MOST_LINES,
    MOST_PARTS,
    Shown,
    describe_bad_parts,
    remark_lines,
)
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet, outcomes, selector_of
from tests.support.host_lists import expand
from tests.support.screens import kept_screen

if TYPE_CHECKING:
    from collections.abc import Iterable

SCREENS = Path(__file__).with_name("screens")
TEXT = "finetune was not measured: rank 3 (node0-gpu3, h): the worker died: SIGKILL\n  Python stacks of rank 3:\n    line"
HOT = {"event reasons": ["hw_thermal_slowdown"], "C": 91.0, "W": 412.0, "SM MHz": 1290.0}


def lines_of(places: Any, bad: Iterable[Record] = (), *, records: list[Record] | None = None, **changes: Any) -> list[str]:
    """The texts of the block; an acceptance of GPUs by ``pytest --pyargs tests_acceptance``."""
    facts: dict[str, Any] = {
        "device": "cuda",
        "width": 100,
        "command": ("pytest", "--pyargs", "tests_acceptance"),
        "report": "gpucluster-results/results.json",
        "drain_reason": "gpucluster-20261122",
        **changes,
    }
    rows = outcomes(places, bad) if records is None else records
    return [line.plain for line in describe_bad_parts(rows, Shown(places=places, tests=selector_of(rows), **facts))]


def one_bad() -> tuple[Any, list[Record]]:
    """One GPU of eight, hot, which fails two criteria."""
    bad = [failed(name, "node0-gpu3", value, evidence=HOT) for name, value in (("bf16_tflops", 498), ("clocks_under_load", 1))]
    return fleet(1, 8), bad


def three_bad_and_an_absent_node() -> tuple[Any, list[Record]]:
    """Of 64 nodes with 8 GPUs."""
    bad = [
        failed("bf16_tflops", "node23-gpu3", 498, evidence=HOT),
        failed("clocks_under_load", "node23-gpu3", 1, evidence=HOT),
        failed("hbm_bandwidth", "node41-gpu0", 3.91),
        failed("hbm_bandwidth", "node41-gpu6", 3.93),
        failed("busbw[all_reduce]", "node41", 371),
    ]
    return fleet(64, 8, absent=[17]), bad


def test_board_of_a_bad_gpu() -> None:
    """Whoever replaces it reads part and module, and where in the rack it is."""
    places, bad = one_bad()
    board = {
        "part_number": "692-2G520-0282-001",
        "vbios": "96",
        "module": "4",
        "chassis_serial": "18",
        "slot": "3",
        "tray": "2",
    }
    known = {**places, "node0-gpu3": replace(places["node0-gpu3"], board=board)}
    text = " ".join(" ".join(lines_of(known, bad)).split())
    assert "part 692-2G520-0282-001 module 4 chassis 18 slot 3 tray 2" in text
    assert "part 692" not in " ".join(lines_of(places, bad))


@pytest.mark.parametrize(
    ("serial", "width", "heads"), [(True, 200, 1), (True, 100, 1), (True, 60, 2), (False, 100, 1), (False, 40, 4)]
)
def test_the_uuid_of_a_bad_gpu_takes_no_line_beside_its_serial_number(serial: bool, width: int, heads: int) -> None:  # noqa: FBT001
    """It stands at the end of a line that has room, and where nothing else tells the GPU from others."""
    places, bad = one_bad()
    gpu = replace(places["node0-gpu3"], board={"module": "4"})
    known = {**places, "node0-gpu3": gpu if serial else replace(gpu, serial=None)}
    lines = lines_of(known, bad, width=width, command=())
    first = next(number for number, line in enumerate(lines) if line.startswith("  gpu-node-0"))
    head = lines[first : next(number for number, line in enumerate(lines) if line.startswith("    bf16_tflops"))]
    words = " ".join(head).split()
    assert len(head) == heads
    assert {"gpu-node-0", "node0-gpu3", "00000000:4b:00.0", "4"} <= {*words}
    assert (str(gpu.serial) in words) == serial
    assert (gpu.uuid in words) == (width == 200 or not serial)


def slow(number: int, step: int = 1) -> tuple[Any, list[Record]]:
    """So many slow GPUs of 512."""
    places = fleet(64, 8)
    gpus = [place.id for place in places.values() if place.gpu is not None]
    return places, [failed("bf16_tflops", name, 498) for name in gpus[::step][:number]]


SCREENS_OF = {
    "one-bad-gpu": one_bad,
    "64x8-3-bad-1-absent": three_bad_and_an_absent_node,
    "300-bad-of-512": lambda: slow(300),
    "100-bad-parts": lambda: slow(100, step=5),
}


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", SCREENS_OF)
def test_screen(name: str, width: int) -> None:
    """As it was looked at; no line is wider than the screen."""
    lines = lines_of(*SCREENS_OF[name](), width=width)
    assert lines == kept_screen(SCREENS / f"{name}-{width}.txt", lines)
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []


def test_nothing_bad_is_nothing_shown() -> None:
    """A good run of one GPU and of 1,024."""
    assert lines_of(fleet(1, 1)) == lines_of(fleet(128, 8)) == []


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("number", [1, 6, 7, 20, 21, 100, 255, 512])
def test_never_more_than_60_lines(number: int, width: int) -> None:
    """However many parts are bad by however many criteria; what is left out is counted."""
    places, bad = slow(number)
    gone = {record.place for record in bad}
    rows = outcomes(places, bad)
    tflops = [row for row in rows if row.criterion == "bf16_tflops"]
    rows += [replace(row, criterion=f"other_{one}", reason=f"{one} {row.reason}") for row in tflops for one in range(30)]
    lines = lines_of(places, records=rows, width=width)
    assert len(lines) <= MOST_LINES
    named = {word for line in lines for word in line.split() if word in gone}
    if MOST_PARTS < number < 256:
        assert f"  and {number - MOST_PARTS} more, in gpucluster-results/results.json" in lines
    if number < 256:
        assert len(named) == min(number, MOST_PARTS)


def test_one_line_of_many_findings() -> None:
    """They are one sentence, as much of it as fits."""
    places, bad = slow(MOST_PARTS)
    rows = outcomes(places, bad)
    tflops = [row for row in rows if row.criterion == "bf16_tflops"]
    rows += [replace(row, criterion=f"other_{one}") for row in tflops for one in range(30)]
    shown = [lines_of(places, records=rows, width=width) for width in (80, 900)]
    narrow, wide = (next(line for line in lines if line.startswith("  gpu-node-0  serial 1654923000000")) for lines in shown)
    assert narrow.startswith("  gpu-node-0  serial 1654923000000  node0-gpu0  31 bad: computes 36 % slower th")
    assert len(narrow) <= 80
    assert narrow.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert wide.endswith("computes 36 % slower than its siblings: 31 rates")


@pytest.mark.parametrize("words", [0, 60])
def test_a_long_command_is_not_written_at_each_part(words: int) -> None:
    """Rather than its values, a part loses the words of the command that it shares with the others."""
    places, bad = slow(MOST_DETAILED)
    command = ("pytest", *("--an-option=/with/a/long/folder/" for _ in range(words)))
    lines = lines_of(places, bad, command=command)
    assert sum("siblings" in line for line in lines) == MOST_DETAILED
    assert sum("-k" in line for line in lines) == MOST_DETAILED
    again = [line for line in lines if line.startswith("      measure again: the same command with --gpucluster-only ")]
    assert len(again) == (MOST_DETAILED if words == 60 else 0)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("criteria", "parts"),
    [
        *((1, parts) for parts in (1, 2, 6, 7, 300, 511, 513, 1024)),
        *((12, parts) for parts in (1, 6, 7)),
        (3, 513),
        (3, 1024),
        (40, 6),
    ],
)
def test_never_more_than_60_rows_of_1024_gpus(criteria: int, parts: int, width: int) -> None:
    """A command wider than the screen takes several rows."""
    places = fleet(128, 8)
    gpus = [place.id for place in places.values() if place.gpu is not None]
    rows = [failed(f"some_criterion_{one}", name, 1) for one in range(criteria) for name in gpus[:parts]]
    good = [
        Record(criterion=row.criterion, place=name, outcome="passed", value=500, limit=row.limit)
        for row in rows[::parts]
        for name in gpus[parts:]
    ]
    lines = lines_of(places, records=[*rows, *good], width=width)
    assert sum(max(1, -(-len(line) // width)) for line in lines) <= MOST_LINES
    if parts <= MOST_DETAILED and criteria == 1:
        assert sum("measure" not in line and "-k" in line for line in lines) == parts


@pytest.mark.parametrize("width", [80, 100, 200])
def test_values_stand_in_a_column(width: int) -> None:
    """Also behind the longest names of stragglers; what the siblings measured is not torn apart."""
    names = ["hbm_bandwidth", "straggler[bf16_sustained]", "straggler[fp32_tflops]"]
    bad = [failed(name, "node0-gpu3", 0.6374, limit=limit("above", 0.87, "ratio")) for name in names]
    good = [
        replace(row, place=f"node0-gpu{gpu}", outcome="passed", value=value)
        for row in bad
        for gpu, value in ((0, 0.90481), (1, 0.92052))
    ]
    lines = [line for line in lines_of(fleet(1, 8), records=[*bad, *good], width=width) if "0.6374 ratio" in line]
    assert len({line.index("0.6374") for line in lines}) == 1
    shown = lines_of(fleet(1, 8), records=[*bad, *good], width=width)
    assert sum("siblings 0.9048 to 0.9205" in line for line in shown) == len(names)


def test_long_errors_give_way() -> None:
    """Stacks of 100 lines are in the reports; the screen has their first lines."""
    error = Record(criterion="a", place=None, outcome="error", reason=TEXT + "\n    x" * 100, blames="host")
    rows = [replace(error, culprits=("node0-gpu3",), cause="SIGKILL")]
    lines = lines_of(fleet(1, 8), records=rows)
    assert len(lines) < MOST_LINES
    assert sum("the worker died: SIGKILL" in line for line in lines) == 1
    assert any("Python stacks" in line for line in lines_of(fleet(1, 8), records=[replace(rows[0], reason=TEXT)]))
    assert not any("Python stacks" in line for line in lines_of(fleet(1, 8), records=rows, whole=False))


@pytest.mark.parametrize("number", [1, 14, 100])
def test_one_text_of_one_cause(number: int) -> None:
    """Part, criteria, the text once, what to do next."""
    lost = Record(criterion="", place=None, outcome="error", reason=TEXT, culprits=("node0-gpu3",), blames="host")
    rows = [replace(lost, criterion=f"check[{one}]", cause="SIGKILL") for one in range(number)]
    lines = lines_of(fleet(1, 8), records=rows)
    assert lines[1] == "BAD PARTS  0; the host is to blame at 1 place"
    assert sum("Python stacks" in line for line in lines) == 1
    assert any(line.startswith(f"    {number} criteri") for line in lines)
    assert any(line.startswith("    host, medium confidence: look at what the evidence names") for line in lines)


def test_a_text_of_two_places_is_shown_once() -> None:
    """The ranks that raised are both named."""
    row = Record(criterion="a", place=None, outcome="error", reason=TEXT, culprits=("node0-gpu3", "node0-gpu4"))
    lines = lines_of(fleet(1, 8), records=[replace(row, blames="host")])
    assert sum("Python stacks" in line for line in lines) == 1
    assert [line.split()[3] for line in lines if line.startswith("  gpu-node-0  serial ")] == ["node0-gpu3", "node0-gpu4"]


def test_absent_nodes_are_one_entry() -> None:
    """63 of 64: one list of names, one count, one next step."""
    lines = lines_of(fleet(64, 8, absent=range(1, 64)))
    assert lines[1:3] == ["BAD PARTS  63 nodes absent", "  absent  63 unknown hosts  63 nodes, 1512 expected outcomes missing"]
    assert len(lines) == 6


def test_only_a_cause_that_no_sibling_has() -> None:
    """Where good GPUs report the same, it explains nothing."""
    places, bad = one_bad()
    rows = outcomes(places, bad)
    assert any("heat throttles it" in line for line in lines_of(places, records=rows))
    everywhere = [replace(row, evidence=HOT) for row in rows]
    assert not any("heat" in line for line in lines_of(places, records=everywhere))
    once = [replace(row, evidence={"event reasons": []}) if row.criterion == "clocks_under_load" else row for row in rows]
    assert not any("heat" in line for line in lines_of(places, records=once))


@pytest.mark.parametrize(
    ("everywhere", "shown"), [(False, "clocks_under_load (hw_thermal_slowdown)"), (True, "clocks_under_load 1")]
)
def test_a_line_names_only_a_cause_that_no_sibling_has(shown: str, *, everywhere: bool) -> None:
    """Where all are held at their power cap, a value of one says more."""
    bad = [failed("clocks_under_load", f"node{node}-gpu0", 1, evidence=HOT, margin_percent=None) for node in range(MOST_PARTS)]
    rows = outcomes(fleet(MOST_PARTS, 8), bad)
    rows = [replace(row, evidence=HOT) if everywhere else row for row in rows]
    lines = lines_of(fleet(MOST_PARTS, 8), records=rows)
    assert sum(line.endswith(shown) for line in lines) == MOST_PARTS


def test_what_blames_nobody() -> None:
    """The whole cluster's failures, what never ran; a crash of a test itself is pytest's to show."""
    cut = not_run(9)
    crash = Record(criterion="own", place=None, outcome="failed", reason="def test():\n> 1 / 0", headline="ZeroDivisionError")
    lines = lines_of(fleet(1, 8), records=[*cut, crash, failed("loss", None, 390)], is_whole=True)
    assert lines[1:] == [
        "BAD PARTS  none is named",
        "  no culprit",
        "    9 criteria: c0, c1, c2, c3, c4, c5, c6, c7, c8",
        "    not run: SIGTERM",
        "  cluster",
        "    loss  390 GB/s, limit > 400",
    ]
    assert lines_of(fleet(1, 8), records=[crash]) == []


def impossible(place: str, number: int) -> list[Record]:
    """So many values of one place that no hardware reaches: a clock is wrong, and nobody is to blame."""
    cause = "more than the hardware can: the measurement is wrong"
    texts = {f"c{index}": f"c{index} at {place}: 9{index}: {cause}" for index in range(number)}
    return [Record(criterion=name, place=place, outcome="error", cause=cause, reason=text) for name, text in texts.items()]


def test_what_blames_nobody_says_where_it_was_found() -> None:
    """Fourteen entries of one place said neither which one, nor that it was one."""
    places = fleet(2, 2)
    lines = lines_of(places, records=[*impossible("node1-gpu1", 22), *impossible("node0", 1)], whole=False, command=())
    assert [line for line in lines if "no culprit" in line] == [
        f"  no culprit  {places['node1-gpu1'].named}",
        f"  no culprit  {places['node0'].named}",
    ]
    assert sum("measurement is wrong" in line for line in lines) >= 1
    shared = [replace(record, reason="one text", place=name) for name in places for record in impossible(name, 1)]
    assert [line for line in lines_of(places, records=shared) if "no culprit" in line] == ["  no culprit"]


def not_run(number: int) -> list[Record]:
    """Criteria that a run which was ended did not come to."""
    return [Record(criterion=f"c{index}", place=None, outcome="missing", reason="not run: SIGTERM") for index in range(number)]


@pytest.mark.parametrize(("number", "is_said"), [(1, True), (2, False), (40, False)])
def test_an_ended_run_says_its_reason_once(number: int, *, is_said: bool) -> None:
    """The table says it of two criteria and more, and also for what was measured in part; of one, nothing else does."""
    records = [*not_run(number), failed("loss", None, 390)]
    good = replace(failed("bf16_tflops", "node0-gpu0", 790), outcome="passed", reason=None, culprits=())
    records += [good, Record(criterion="bf16_tflops", place="node0-gpu1", outcome="missing", reason="not run: SIGTERM")]
    lines = lines_of(fleet(1, 8), records=records)
    assert any("SIGTERM" in line for line in lines) is is_said
    assert "    loss  390 GB/s, limit > 400" in lines
    assert lines_of(fleet(1, 8), records=not_run(2)) == []


def disturbed(place: str, who: str) -> Record:
    """A rate that another program made slow, as a run has it."""
    first = f"host not idle: {who} on vm (node0); host_to_device at vm gpu 0 serial 1753024033300 ({place}): 39.46 GB/s"
    return Record(
        criterion="host_to_device",
        place=place,
        outcome="error",
        reason=f"{first}\n  found {'fact ' * 60}\n  next: end what keeps the host busy",
        culprits=("node0",),
        blames="host",
        cause="host not idle",
        advice="end what keeps the host busy, or wait for its job",
        is_disturbed=True,
    )


@pytest.mark.parametrize("width", [80, 100, 200])
def test_what_disturbs_is_said_once(width: int) -> None:
    """Of eight GPUs the first, and how many more; no line is wider than the screen, and what to do stands below."""
    records = [disturbed(f"node0-gpu{index}", f"python (pid 1620, root) 79{index} % CPU") for index in range(8)]
    lines = lines_of(fleet(1, 8), records=records, width=width, command=("pytest",))
    text = " ".join(" ".join(lines).split())
    assert text.count("host not idle") == 1
    assert "(node0-gpu0): 39.46 GB/s; the same at 7 more outcomes host, medium confidence: end what keeps the host busy" in text
    assert "fact" not in text
    assert max(map(len, lines)) <= width


def test_a_whole_text_is_folded() -> None:
    """Ours; what others wrote, as code and paths, stays as it is."""
    code = f"  | {'path/' * 40}file.py"
    one = Record(criterion="c", place=None, outcome="error", reason=f"c was not measured\n  found {'fact ' * 60}\n{code}")
    lines = lines_of(fleet(1, 8), records=[one])
    assert [line for line in lines if len(line) > 100] == [f"    {code}"]


@pytest.mark.parametrize("number", [MOST_DETAILED, MOST_DETAILED + 3])
@pytest.mark.parametrize("width", [80, 200])
def test_parts_whose_rows_have_no_room(number: int, width: int) -> None:
    """Each still has its slot, a line of what is bad, and what to do, which the first of several says in full."""
    places, bad = slow(number, 16)
    places = {name: replace(place, board={"slot": "3"}) for name, place in places.items()}
    tflops = [row for row in outcomes(places, bad) if row.criterion == "bf16_tflops"]
    rows = [replace(row, criterion=f"other_rate_{one}") for row in tflops for one in range(6)]
    lines = lines_of(places, records=rows, width=width)
    starts = [index for index, line in enumerate(lines) if line.startswith("  gpu-node-")]
    assert len(starts) == number
    assert max(map(len, lines)) <= width
    entries = [lines[begin:end] for begin, end in itertools.pairwise(starts)]
    assert {len(entry) for entry in entries[1:]} == {3}
    assert all("slot 3" in " ".join(entry) for entry in entries)
    assert all(entry[-2].startswith("    6 bad: other_rate_0 -29 %, other_rate_1") for entry in entries[1:])
    assert {entry[-1] for entry in entries[1:]} == {"    gpu, high confidence: as above"}


@pytest.mark.parametrize("number", [3, MOST_DETAILED + 1])
def test_as_above_is_the_advice_just_above(number: int) -> None:
    """Nobody does to a part what another one needs: after a different advice, the first one is written out again."""
    advice = ("reset it", "replace it")
    bad = [failed("bf16_tflops", f"node{at}-gpu0", 498, advice=advice[at % 2]) for at in range(number)]
    lines = lines_of(fleet(8, 8), bad)
    assert sum(line.endswith(advice) for line in lines) == number
    alike = lines_of(fleet(8, 8), [replace(one, advice=advice[0]) for one in bad])
    assert sum(line.endswith(advice[0]) for line in alike) == 1
    assert sum(line.endswith(": as above") for line in alike) == number - 1


def test_remarks_are_wrapped_and_counted() -> None:
    """Ten of them; all where all is asked for. No line is wider than the screen."""
    passed = [replace(failed("busbw", f"node0-gpu{index}", 500), outcome="passed", reason=None) for index in range(12)]
    records = [replace(one, remark=f"{index} of 40 repeats {'spread ' * 20}") for index, one in enumerate(passed)]
    lines = remark_lines(records, width=80, is_whole=False)
    assert sum(line.startswith("remark: busbw at node0-gpu") for line in lines) == 10
    assert lines[-1] == "and 2 more remarks, in results.json"
    assert max(map(len, lines)) <= 80
    every = remark_lines(records, width=200, is_whole=True)
    assert sum(line.startswith("remark: ") for line in every) == 12
    assert not any("more remarks" in line for line in every)


def test_waived_parts_say_so() -> None:
    """Yellow, not drained, and not good either."""
    places, bad = fleet(2, 8), [failed("bf16_tflops", "node1-gpu0", 650, waivable=True, waiver={"who": "J. Doe"})]
    lines = lines_of(places, bad)
    assert any("limit > 700 (waived)" in line for line in lines)
    assert "good: gpu-node-0" in lines
    assert not any("drain" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "drained"),
    [
        ({}, True),
        ({"blames": "node"}, True),
        ({"blames": "software"}, False),
        ({"blames": "settings"}, False),
        ({"blames": "host"}, False),
        ({"blames": "unknown"}, False),
    ],
)
def test_only_hardware_is_drained(changes: dict[str, Any], *, drained: bool) -> None:
    """Software, settings and what is unknown take no node out of service."""
    bad = [failed("bf16_tflops", "node1-gpu0", 650, **changes)]
    lines = lines_of(fleet(3, 8), bad)
    assert any(line.startswith("drain: ") for line in lines) == drained
    assert "good: gpu-node-[0,2]" in lines


def test_an_absent_node_is_drained_where_its_host_is_known() -> None:
    """A name is never guessed."""
    places = fleet(3, 8, absent=[1])
    assert not any("drain" in line for line in lines_of(places))
    known = {**places, "node1": replace(places["node1"], hostname="gpu-node-1")}
    assert "drain: scontrol update nodename=gpu-node-1 state=drain reason=gpucluster-20261122" in lines_of(known)


def test_nothing_is_drained_where_nothing_is_real() -> None:
    """A rehearsal, a simulated fleet."""
    lines = lines_of(fleet(3, 8), [failed("bf16_tflops", "node1-gpu0", 498)], drain_reason=None)
    assert not any("drain" in line or "scontrol" in line for line in lines)


def drained(lines: list[str]) -> set[str]:
    """The hosts that a shell would hand to Slurm."""
    first = next(number for number, line in enumerate(lines) if line.startswith("drain: "))
    script = "\n".join(line.removeprefix("drain: ") for line in lines[first:])
    words = shlex.split(script.replace("\\\n", " "))
    return {host for word in words if word.startswith("nodename=") for host in expand(word.removeprefix("nodename="))}


@pytest.mark.parametrize("width", [80, 200])
def test_the_drain_command_is_safe_in_a_shell(width: int) -> None:
    """It names just the hosts with bad hardware; a host that is no name for Slurm is left out."""
    places, bad = slow(60, step=8)
    assert drained(lines_of(places, bad, width=width)) == {f"gpu-node-{number}" for number in range(60)}
    evil = {name: replace(place, hostname="a;reboot") if place.node == 3 else place for name, place in places.items()}
    assert drained(lines_of(evil, bad)) == {f"gpu-node-{number}" for number in range(60) if number != 3}


@pytest.mark.parametrize(("bad", "name"), [("a.north", "a.north"), ("b.north", "b")])
def test_a_short_name_is_that_of_one_host_of_the_run(bad: str, name: str) -> None:
    """``a`` would be a good host, too."""
    hosts = ["a.north", "a.south", "b.north"]
    places = {key: replace(place, hostname=hosts[place.node]) for key, place in fleet(3, 8).items()}
    node = hosts.index(bad)
    lines = lines_of(places, [failed("bf16_tflops", f"node{node}-gpu0", 498)])
    assert drained(lines) == {name}
    good = next(line for line in lines if line.startswith("good: "))
    assert good == ("good: a.south,b" if bad == "a.north" else "good: a.north,a.south")


@pytest.mark.parametrize("number", [256, 257, 300, 512])
def test_a_cause_that_most_share_makes_no_node_good_or_bad(number: int) -> None:
    """Neither line, where the text says that it is not the GPUs; a node with a fault of its own is drained all the same."""
    places, bad = slow(number)
    is_shared = number > 256
    lines = lines_of(places, bad)
    assert any("not the GPUs" in line for line in lines) == is_shared
    assert any(line.startswith(("good: ", "drain: ")) for line in lines) != is_shared
    own = failed("hbm_bandwidth", "node63-gpu0", 3.91)
    assert "gpu-node-63" in drained(lines_of(places, [*bad, own]))
    assert any(line.startswith("good: ") for line in lines_of(places, [*bad, own])) != is_shared


def test_a_shared_cause_shows_what_was_found_at_one_place() -> None:
    """Not the values of a rate, which the table has; but what a criterion that allows nothing found, once."""
    found = {"found": ["/mnt/x is not shared"]}
    gpus = [f"node0-gpu{number}" for number in range(8)]
    lines = lines_of(fleet(1, 8), [failed("clocks_under_load", name, 1, evidence=found) for name in gpus])
    assert [line for line in lines if "is not shared" in line] == ["    node0-gpu0: found /mnt/x is not shared"]
    rates = [failed("bf16_tflops", name, 498, evidence=found) for name in gpus]
    assert not any("is not shared" in line for line in lines_of(fleet(1, 8), rates))


def test_foreign_text_begins_no_line() -> None:
    """Hosts, errors and evidence that hold a verdict or act on a screen."""
    forged = "fine\nverdict ACCEPTED: 9 passed\x1b[2J"
    places = {name: replace(place, hostname=forged, serial=forged, uuid=forged) for name, place in fleet(2, 2).items()}
    rows = [
        failed("bf16_tflops", "node0-gpu0", 1, evidence={"found": forged}),
        failed("checks", "node0-gpu1", 1, evidence={"found": forged}, limit=limit("max", 0, "count")),
        Record(criterion="lost", place="node1-gpu0", outcome="error", reason=forged, culprits=("node1-gpu0",)),
        Record(criterion="other", place="node1-gpu1", outcome="error", reason=forged),
    ]
    for count in (1, 4):
        lines = lines_of(places, records=rows * count)
        assert [line for line in lines if "\n" in line or "\x1b" in line or line.startswith(("verdict", "fine"))] == []


def test_without_a_command() -> None:
    """Under torchrun each node has one of its own."""
    places, bad = one_bad()
    shown = [line.strip() for line in lines_of(places, bad, command=(), width=200)]
    only = "--gpucluster-only gpu-node-0:GPU-6f1c0f3e-5e1b-4a0c-9d7e-000000000003"
    assert f"measure again: the same command with {only} -k 'test_bf16_tflops or test_clocks_under_load'" in shown


def test_a_rehearsal_counts_ranks() -> None:
    """It has no GPU."""
    bad = [failed("bf16_tflops", "node0-cpu0", 1)]
    assert lines_of(fleet(1, 2, device="cpu"), bad, device="cpu")[1] == "BAD PARTS  1 of 2 ranks"


def test_the_number_of_failed_checks_is_no_failure_of_its_own() -> None:
    """``finetune_checks`` counts ``finetune_check[...]``; a criterion with such a name and without members stays."""
    zero = limit("max", 0, "count")
    places = fleet(1, 8)
    member = failed("finetune_check[step_time_spread]", None, 1, limit=zero, culprits=("node0-gpu3",), blames="gpu")
    total = failed("finetune_checks", None, 1, limit=zero, culprits=(), blames=None)
    shown = "\n".join(lines_of(places, records=[member, total]))
    assert "step_time_spread" in shown
    assert "finetune_checks" not in shown
    assert "finetune_checks" in "\n".join(lines_of(places, records=[total]))


@pytest.mark.parametrize("outcome", ["failed", "error", "missing", "noisy"])
def test_a_sites_own_criterion_is_shown_beside_a_family_of_its_name(outcome: str) -> None:
    """Only ``finetune_checks`` is known to count others, and only a number of failures is said already."""
    places, zero = fleet(1, 8), limit("max", 0, "count")
    for family in ("own_rate", "finetune_check"):
        member = failed(f"{family}[a]", None, 1, limit=zero, culprits=("node0-gpu3",), blames="gpu")
        total = replace(
            failed(f"{family}s", None, 1, limit=zero, culprits=(), blames=None), outcome=outcome, reason="why it is"
        )
        hidden = family == "finetune_check" and outcome == "failed"
        shown = "\n".join(lines_of(places, records=[member, total]))
        assert (f"{family}s" in shown or "why it is" in shown) is not hidden, shown


@pytest.mark.parametrize("number", [0.123456789, 1234567890123])
def test_evidence_is_left_out_from_a_comma_on(number: float) -> None:
    """No number and no name in it is cut."""
    evidence = {f"reading number {one} of the port": number for one in range(30)}
    record = failed("nic_ports", "node0-gpu3", 1, limit=limit("max", 0, "count"), evidence=evidence)
    shown = " ".join(" ".join(lines_of(fleet(1, 8), records=[record])).split())
    assert ", ..." in shown
    assert re.search(r"reading number \d+ of the port [\d.]+, \.\.\.", shown)
