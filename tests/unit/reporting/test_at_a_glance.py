"""The end of a run at a glance: how many lines it takes, what has a row, and one sentence for one cause."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.page import overview
from pytest_gpucluster.page.document import read_document
from pytest_gpucluster.reporting.at_a_glance import HANDOVER, GoodPeers, sentence_of, subject_lines
from pytest_gpucluster.reporting.bad_parts import Shown, advisory_lines, describe_bad_parts
from pytest_gpucluster.reporting.table import Ending, Layout, criteria_table, verdict_block
from pytest_gpucluster.thresholds.limit import Limit
from tests.support import REPOSITORY
from tests.support.fleet_records import failed, fleet, selector_of
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.resolve import Threshold

KEPT = REPOSITORY / "docs" / "results" / "2026-11-26-h100x2-f5b0f8f" / "results.json"
MARKS = {
    "compute": ("tflops", "tops", "bf16_", "silent", "straggler[bf16", "straggler[fp32"),
    "memory": ("hbm", "straggler[hbm"),
    "links": ("busbw[", "host_to", "device_to", "latency", "numa", "gpu_pairs", "slow_pair"),
    "fabric": ("inter_node", "nodes_reachable", "transport", "slow_rail"),
    "training": ("training", "finetune", "memory_scaling", "busbw_scaling"),
    "platform": ("scratch", "launch", "drift", "environment", "host_", "slow_host", "shared"),
}
TIMINGS = {"total_s": 194.0, "startup_s": 8.2, "measuring_s": 181.0, "other_s": 4.8}
MHZ = {"SM MHz": 1755.0}


@cache
def entries() -> Mapping[str, Threshold]:
    """The packaged criteria for an H200."""
    file = packaged()
    return file.criteria(file.profiles["h200-sxm"])


def subject_of(criterion: str) -> str:
    """About the mark of its test."""
    return next((mark for mark, parts in MARKS.items() if any(part in criterion for part in parts)), "health")


def whole(records: Sequence[Record], places: Mapping[str, Place], *, width: int = 80, **changes: Any) -> list[str]:
    """All lines from the first one of the report to the last one of the verdict."""
    noise = {key: entry.noise for key, entry in entries().items() if entry.noise is not None}
    subjects = {record.criterion: subject_of(record.criterion) for record in records}
    table = criteria_table(records, places, subjects=subjects, layout=Layout(width=width, noise=noise))
    command = ("pytest", "--pyargs", "tests_acceptance", "--gpucluster-gate", "--junitxml=handover.xml")
    shown: dict[str, Any] = {"places": places, "tests": selector_of(records), "device": "cuda", "width": width}
    parts = describe_bad_parts(records, Shown(**shown, command=command, drain_reason="gpucluster-20261126", **changes))
    verdict = decide(records, Terms(rehearsal=False, level_reached=True, shape="some GPUs"))
    ending = Ending(mode=None, timings=TIMINGS, folder="gpucluster-results", files=["results.json", "junit.xml"])
    block = verdict_block(verdict, ending, width=width, quiet=False)
    return [*table, *(line.plain for line in (*parts, *block))]


def rows_of_screen(lines: Iterable[str], width: int) -> int:
    """A line that is wider than the screen takes several rows."""
    return sum(max(1, -(-len(line) // width)) for line in lines)


def at_places(key: str, places: Sequence[Place]) -> list[Record]:
    """Good outcomes of one packaged criterion at every GPU, every node, or of the cluster."""
    entry = entries()[key]
    if entry.per == "cluster":
        where: list[str | None] = [None]
    else:
        where = [place.id for place in places if (place.gpu is not None) == (entry.per == "gpu")]
    limit = entry.limit(gpus=8, cluster={"nodes": 2, "gpus_per_node": 8, "world_size": 16})
    value = limit.value * (1.2 if limit.is_floor else 0.5) or (1.0 if limit.is_floor else 0.0)
    return [Record(criterion=key, place=one, outcome="passed", value=value, limit=limit, evidence=MHZ) for one in where]


def a_run(nodes: int, slow: Iterable[str] = (), absent: Iterable[int] = ()) -> tuple[dict[str, Place], list[Record]]:
    """Every packaged criterion at every place; a slow GPU fails each rate and each comparison of rates."""
    places = fleet(nodes, 8, absent=absent)
    slow = {*slow}
    records: list[Record] = []
    for key, entry in entries().items():
        if entry.skip is not None or key.startswith(("nic", "busbw_soak", "dcgm")) or entry.level == "soak":
            continue
        records += [_planted(record, places, slow) for record in at_places(key, [*places.values()])]
    return places, records


def _planted(record: Record, places: Mapping[str, Place], slow: set[str]) -> Record:
    assert record.limit is not None
    assert record.value is not None
    if record.place is not None and places[record.place].hostname is None:
        why = f"not run: {record.place} is missing"
        return replace(record, outcome="missing", value=None, limit=None, reason=why)
    if record.place in slow and (record.unit in ("TFLOPS", "TOPS") or record.criterion.startswith("straggler[bf16")):
        value = record.value * 0.7 if record.limit.is_floor else 31.78
        return failed(record.criterion, record.place, value, limit=record.limit, evidence=MHZ)
    return record


@pytest.mark.parametrize(
    ("missing", "said"),
    [([], "memory    all {} ok"), ([17], "memory    1 of 32 missing")],
)
def test_a_subject_says_what_is_missing(missing: list[int], said: str) -> None:
    """What was not measured is never among what is good."""
    places, records = a_run(1)
    of_memory = [index for index, record in enumerate(records) if subject_of(record.criterion) == "memory"]
    for number in missing:
        index = of_memory[number]
        records[index] = replace(records[index], outcome="missing", value=None, reason="not run: the run was interrupted")
    line = next(line for line in whole(records, places, width=100) if line.startswith("memory "))
    assert line.startswith(said.format(len(of_memory) - len(missing)))


def test_what_is_missing_is_counted_once() -> None:
    """Of a criterion that was measured in part, and of one that was not measured at all."""
    _, records = a_run(1)
    found = [record for record in records if record.criterion == "hbm_bandwidth"]
    found[0] = replace(found[0], outcome="missing", value=None, reason="not run: terminated by SIGTERM")
    of_each = {"hbm_bandwidth": "memory", "hbm_pattern": "memory"}
    (line,) = subject_lines({"hbm_bandwidth": found}, of_each, unjudged={"hbm_pattern": 5}, is_rehearsal=True)
    assert line.state == f"6 of {len(found) + 5} missing"


FIVE = ("node23-gpu3", "node41-gpu6", "node90-gpu0", "node5-gpu1", "node77-gpu2")
RUNS = {
    "healthy": (lambda: a_run(1), 40),
    "one bad": (lambda: a_run(1, ["node0-gpu3"]), 60),
    "five of 1024, a node absent": (lambda: a_run(128, FIVE, absent=[17]), 80),
}


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", RUNS)
def test_how_many_lines_it_takes(name: str, width: int) -> None:
    """40 for a healthy node of 8, 60 for a bad one, 80 for 1,024 GPUs with five bad ones; no line is wider than the screen."""
    made, most = RUNS[name]
    places, records = made()
    lines = whole(records, places, width=width)
    assert rows_of_screen(lines, width) <= most
    assert max(map(len, [line for line in lines if not line.startswith("verdict ")])) <= width
    bad = {record.place for record in records if record.outcome == "failed"}
    shown = "\n".join(lines).partition("BAD PARTS")[2]
    assert all(place in shown for place in bad if place is not None)


def test_the_lines_of_a_real_run() -> None:
    """Two H100, accepted: HBM at 1.8 % is near its limit, five collectives are measured and not judged."""
    run = read_document(KEPT)
    lines = whole(run.records, run.places)
    assert rows_of_screen(lines, 80) <= 40
    assert any(line.startswith("memory ") and "HBM 3.053 to 3.054 TB/s (> 3)" in line for line in lines)
    rows = {line.split()[0]: line for line in lines if line}
    assert "ok, near" in rows["hbm_bandwidth"]
    assert "near" not in rows["bf16_tflops"]
    assert "all_gather 267.0" in " ".join(lines).partition("measured, not judged: ")[2]
    assert not any(line.startswith("gpu_memory") for line in lines), "its value never varies"
    assert not any(word in lines for word in ("none", "e-0"))


def test_the_handover_has_rows_where_it_applies() -> None:
    """The page and the screen share the list; what does not apply is named in the line that says why, and has no row."""
    assert overview.HANDOVER is HANDOVER
    places, records = a_run(1)
    rows = {line.split()[0] for line in whole(records, places, width=200) if line}
    assert {*HANDOVER} & {record.criterion for record in records} <= rows
    left = [replace(one, outcome="not_selected", value=None) if one.criterion == "hbm_bandwidth" else one for one in records]
    assert "hbm_bandwidth" not in {line.split()[0] for line in whole(left, places, width=200) if line}
    skipped = [replace(one, outcome="skipped", value=None) if one.criterion == "hbm_bandwidth" else one for one in records]
    (named,) = (line for line in whole(skipped, places, width=200) if line.startswith("not applicable"))
    assert named == "not applicable: 1; of the handover hbm_bandwidth"
    assert not any(line.startswith("hbm_bandwidth") for line in whole(skipped, places, width=200))


@pytest.mark.parametrize(
    ("headroom", "noise", "is_near"),
    [(0.049, {}, True), (0.051, {}, False), (0.02, {"rate": 0.01}, False), (0.2, {"rate": 0.3}, True), (0.0, {}, False)],
)
def test_what_is_near_its_limit(headroom: float, noise: dict[str, float], *, is_near: bool) -> None:
    """Within the noise that the entry states, or 5 % without one; a value at a strict limit fails, which is not near."""
    limit = Limit(kind="above", value=700, unit="TFLOPS")
    value = 700 * (1 + headroom)
    outcome = "passed" if limit.holds(value) else "failed"
    record = Record(criterion="rate", place="node0-gpu0", outcome=outcome, value=value, limit=limit)
    layout = Layout(width=100, noise=noise)
    lines = criteria_table([record], fleet(1, 1), subjects={"rate": "compute"}, layout=layout)
    assert any("ok, near" in line for line in lines) == is_near


def test_one_cause_is_one_sentence() -> None:
    """What it does worse, by how much beside its siblings, at which clock, and in what it shows; the values with -v."""
    places, records = a_run(1, ["node0-gpu3"])
    text = " ".join(" ".join(whole(records, places, width=100)).split())
    assert "computes 30 % slower than its siblings at full clock: 8 rates, 3 stragglers" in text
    assert text.partition("BAD PARTS")[2].count("siblings ") == 2
    detailed = " ".join(whole(records, places, width=100, is_whole=True)).partition("BAD PARTS")[2]
    assert detailed.count("siblings ") == 11


def test_a_clock_that_is_lower_is_named() -> None:
    """Both numbers: a GPU that is held back is not a slow one."""
    limit = Limit(kind="above", value=700, unit="TFLOPS")
    good = [Record(criterion="bf16_tflops", place="a", outcome="passed", value=800, limit=limit, evidence=MHZ)]
    bad = failed("bf16_tflops", "node0-gpu3", 600, limit=limit, evidence={"SM MHz": 1290.0})
    assert sentence_of([bad], GoodPeers(good)) == "computes 25 % slower than its siblings at 1290 of 1755 MHz: 1 rate"
    assert sentence_of([bad], GoodPeers([])) == "1 value outside their limits: 1 rate"


def test_no_number_is_longer_than_it_means() -> None:
    """A median of almost nothing is 0, and findings have no unit."""
    percent = Limit(kind="max", value=8, unit="%")
    values = [-7.838e-06, -7.838e-06, 9.5]
    rows = [
        Record(
            criterion="slow", place=f"node0-gpu{one}", outcome="passed" if value < 8 else "failed", value=value, limit=percent
        )
        for one, value in enumerate(values)
    ]
    rows.append(failed("mig", "node0-gpu1", 1, limit=Limit(kind="max", value=0, unit="count")))
    lines = criteria_table(rows, fleet(1, 4), subjects={"slow": "compute", "mig": "health"}, layout=Layout(width=200))
    cells = {line.split()[0]: line.split() for line in lines if line}
    assert cells["slow"][:5] == ["slow", "%", "9.5", "gpu2", "0"]
    assert cells["mig"][:4] == ["mig", "-", "1", "gpu1"]


def test_what_blames_no_part_is_not_counted_as_one() -> None:
    """Somebody else's process is no bad GPU."""
    busy = Record(criterion="hbm_bandwidth", place="node0-gpu1", outcome="error", reason="host not idle", blames="software")
    lines = whole([replace(busy, culprits=("node0-gpu1",))], fleet(1, 8))
    assert "BAD PARTS  0; software is to blame at 1 place" in lines


def test_an_advisory_miss_is_one_finding() -> None:
    """Its value and what was found, without the raw variables of the host."""
    evidence = {"found": ["NCCL_NVLS_ENABLE=0: switches NVLink SHARP off; unset it"], "variables": {"CUDA_HOME": "/usr"}}
    miss = failed("environment_hints", "node0", 1, limit=Limit(kind="max", value=0, unit="count"), evidence=evidence)
    lines = advisory_lines([replace(miss, outcome="passed", advisory=True)], fleet(1, 1), width=120)
    assert " ".join(" ".join(lines).split()) == (
        "advisory: environment_hints at node0: 1, above 0; found NCCL_NVLS_ENABLE=0: switches NVLink SHARP off; unset it"
    )


def missed(criterion: str, value: float, **changes: Any) -> Record:
    """An advisory limit that ``node0-gpu4`` misses by itself, with what was found there."""
    facts = {"limit": Limit(kind="above", value=30, unit="GB/s"), "evidence": {"NUMA node": 1}, **changes}
    return replace(failed(criterion, "node0-gpu4", value, **facts), outcome="passed", advisory=True)


TO_GPU, FROM_GPU = missed("host_to_device_all", 23.54), missed("device_to_host_all", 18.67)
BAD_LINK = failed("host_to_device", "node0-gpu4", 26.7)
OF_A_BAD_PART = (
    "advisory: gpu-node-0 gpu 4 (node0-gpu4): host_to_device_all 23.54 GB/s, not above 30 GB/s;",
    "  device_to_host_all 18.67 GB/s, not above 30 GB/s",
)


def test_the_advisory_misses_of_a_bad_part_are_one_finding() -> None:
    """Of a part that BAD PARTS shows with its evidence, the values are enough."""
    others = failed("host_to_device", "node0-gpu3", 26.7)
    assert advisory_lines([TO_GPU, others, BAD_LINK, FROM_GPU], fleet(1, 8), width=100) == [*OF_A_BAD_PART]


@pytest.mark.parametrize(
    ("miss", "bad"),
    [
        pytest.param(TO_GPU, failed("host_to_device", "node0-gpu3", 26.7), id="no bad part"),
        pytest.param(TO_GPU, failed("host_to_device", "node0-gpu4", 26.7, culprits=("node0",)), id="another part is to blame"),
        pytest.param(
            missed("mig", 1, limit=Limit(kind="max", value=0, unit="count")), BAD_LINK, id="what was found is the value"
        ),
        pytest.param(missed("slow_pair", 9, culprits=("node0-gpu4", "node0-gpu5")), BAD_LINK, id="between two parts"),
        pytest.param(missed("launch", 29, culprits=(), reason="launch: too close to call"), BAD_LINK, id="too close to call"),
        pytest.param(missed("host", 9, culprits=("node0",)), BAD_LINK, id="the host is to blame"),
    ],
)
def test_another_advisory_miss_keeps_what_was_found(miss: Record, bad: Record) -> None:
    """Also beside those of a bad part."""
    lines = advisory_lines([miss, bad], fleet(1, 8), width=200)
    assert lines == [f"advisory: {str(miss.reason).replace(' count', '')}; NUMA node 1"]
    beside = advisory_lines([miss, bad, FROM_GPU, BAD_LINK], fleet(1, 8), width=200)
    assert len([line for line in beside if line.startswith("advisory: gpu-node-0 gpu 4 (node0-gpu4): ")]) == 1
    assert set(lines).issubset(beside) == (miss is not TO_GPU)
