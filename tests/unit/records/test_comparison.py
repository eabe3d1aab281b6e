"""Two runs compared: what is worse is found wherever its part is now, and a healthy pair is silent."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands import main
from pytest_gpucluster.commands.compare import findable, sections
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.records.changes import JudgedValue, Pair, find_changes, most_by_chance, relative_change
from pytest_gpucluster.records.comparison import compare
from pytest_gpucluster.records.reading import checked
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.kept_runs import KeptCluster, keep
from tests.support.pages import Page

if TYPE_CHECKING:
    from pathlib import Path

SIGMA = 0.002
NUM_GPUS = 1024
RATES = {f"rate{number}": JudgedValue(unit="TFLOPS", is_floor=True) for number in range(4)}


@pytest.fixture(autouse=True)
def _a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist's workers have COLUMNS, as a terminal would."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pair_of_runs(seed: int, *, loss: float, sigma: float = SIGMA, shift: float = 0.0) -> dict[str, list[Pair]]:
    """The values of 1,024 GPUs in two runs, each with noise of its own; GPU 77 loses in the second one."""
    chance = random.Random(seed)
    found: dict[str, list[Pair]] = {}
    for name in RATES:
        chips = [700 * (1 + chance.gauss(0, 0.011)) for _ in range(NUM_GPUS)]
        for number, chip in enumerate(chips):
            before = chip * (1 + chance.gauss(0, sigma))
            after = chip * (1 + shift) * (1 + chance.gauss(0, sigma)) * (1 - loss * (number == 77))
            change = (after - before) / before
            found.setdefault(name, []).append(Pair(part=("gpu", f"GPU-{number}"), before=before, after=after, change=change))
    return found


def alarms(pairs: dict[str, list[Pair]]) -> set[Any]:
    """The parts that lost beyond noise."""
    return {one.part for one in find_changes(pairs, RATES) if one.change < 0 and one.part is not None}


def test_a_loss_of_two_percent_of_one_gpu_of_1024_is_found() -> None:
    """However much all GPUs changed together, the one that lost 2 % is named, and no other one."""
    for seed in range(12):
        found = alarms(pair_of_runs(seed, loss=0.02, shift=(-0.03, 0.0, 0.02)[seed % 3]))
        assert found == {("gpu", "GPU-77")}, seed


def test_a_healthy_pair_raises_no_alarm() -> None:
    """Noise alone is no change, however large it is."""
    assert [seed for seed in range(12) if alarms(pair_of_runs(seed, loss=0.0, sigma=SIGMA * (1 + seed % 4), shift=-0.02))] == []


def test_a_loss_below_the_noise_is_found_over_several_criteria() -> None:
    """Where one criterion scatters too much, all criteria of a family together still show it."""
    pairs = pair_of_runs(5, loss=0.02, sigma=0.0055)
    assert find_changes({"rate0": pairs["rate0"]}, RATES) == []
    (found,) = [one for one in find_changes(pairs, RATES) if one.part is not None]
    assert (found.part, len(found.members)) == (("gpu", "GPU-77"), 4)
    assert found.change == pytest.approx(-0.02, abs=0.01)


def test_what_all_lost_is_told_once() -> None:
    """A loss of all parts together is one line, and counts as worse only where it is large."""
    for shift, counts in ((-0.02, False), (-0.08, True)):
        shifts = [one for one in find_changes(pair_of_runs(1, loss=0.0, shift=shift), RATES) if one.part is None]
        assert len(shifts) == len(RATES)
        assert all((one.change <= -one.allowed) is counts for one in shifts)


@pytest.mark.parametrize(
    ("before", "after", "known", "limit", "change"),
    [
        (100.0, 98.0, JudgedValue(unit="TFLOPS", is_floor=True), 70, -0.02),
        (10.0, 12.0, JudgedValue(unit="us", is_floor=False), 20, -0.1),
        (0.001, 0.002, JudgedValue(unit="s", is_floor=False), 0.1, -0.01),
        (1.0, 3.0, JudgedValue(unit="%", is_floor=False), 5, -0.02),
        (3, 9, JudgedValue(unit="errors", is_floor=False), 0, None),
        (0.0, 1.0, JudgedValue(unit="us", is_floor=False), None, None),
    ],
)
def test_the_change_of_a_value(
    before: float, after: float, known: JudgedValue, limit: float | None, change: float | None
) -> None:
    """Below 0 is worse, whatever the direction; what should be small is measured by its limit; counts have none."""
    found = relative_change(before, after, criterion=known, limit=limit)
    assert found == (change if change is None else pytest.approx(change))


@pytest.mark.parametrize(
    ("freedom", "share", "value"),
    [(math.inf, 0.005, 2.5758), (8, 0.005, 3.3554), (5, 0.005, 4.0321), (20, 0.001, 3.5518), (4, 0.05, 2.1318)],
)
def test_quantiles_of_student(freedom: float, share: float, value: float) -> None:
    """As in printed tables."""
    assert most_by_chance(share, freedom=freedom) == pytest.approx(value, rel=2e-4)


def test_wide_tails_are_no_alarm() -> None:
    """Noise with wider tails than normal ones (Student, 6 degrees of freedom) raises the limit, not the alarm."""
    chance = random.Random(3)
    wide = lambda: chance.gauss(0, 1) / math.sqrt(chance.gammavariate(3, 1 / 3))  # noqa: E731
    pairs = {
        name: [Pair(part=("gpu", str(number)), before=700, after=700, change=0.003 * wide()) for number in range(NUM_GPUS)]
        for name in RATES
    }
    assert alarms(pairs) == set()


def test_a_gpu_is_followed_over_slots_and_nodes() -> None:
    """Values belong to the part: after a swap nothing changed, and the one that is slow is named where it is now."""
    before, after = KeptCluster(nodes=8, gpus=8), KeptCluster(nodes=8, gpus=8)
    after.swap("node0-gpu0", "node5-gpu3")
    own = {name: 740.0 + number % 7 for number, name in enumerate(before.places)}
    swapped = {**own, "node0-gpu0": own["node5-gpu3"], "node5-gpu3": own["node0-gpu0"]}
    found = compare(before.document(before.records(own)), after.document(after.records(swapped)))
    assert not found.is_worse
    assert [(old["id"], new["id"]) for old, new in found.parts.moved] == [
        ("node0-gpu0", "node5-gpu3"),
        ("node5-gpu3", "node0-gpu0"),
    ]
    slow = {**swapped, "node5-gpu3": 0.97 * swapped["node5-gpu3"]}
    found = compare(before.document(before.records(own)), after.document(after.records(slow)))
    (change,) = found.worse_values
    assert change.part == ("gpu", "GPU-node0-gpu0")


def test_a_gpu_whose_uuid_changed_is_known_by_its_serial() -> None:
    """The serial number is that of the board: it stays where a new firmware gives another UUID."""
    before, after = KeptCluster(), KeptCluster()
    after.places["node1-gpu2"] = replace(after.places["node1-gpu2"], uuid="GPU-new")
    found = compare(before.document(before.records()), after.document(after.records()))
    assert (found.parts.gone, found.parts.new) == ([], [])


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ("passed", "failed", True),
        ("passed", "error", True),
        ("passed", "missing", True),
        ("passed", "noisy", True),
        ("error", "failed", True),
        ("failed", "error", False),
        ("failed", "passed", False),
        ("passed", "not_selected", False),
        ("skipped", "passed", False),
    ],
)
def test_outcomes(before: str, after: str, *, worse: bool) -> None:
    """An outcome that is worse counts; what was not selected says nothing."""
    cluster = KeptCluster()
    rows = [cluster.records()[:-1], Record(criterion="bf16_tflops", place="node1-gpu3", outcome="passed")]
    documents = [cluster.document([*rows[0], replace(rows[1], outcome=outcome)]) for outcome in (before, after)]  # type: ignore[type-var]
    found = compare(*documents)
    assert bool(found.worse_outcomes) is worse
    if worse:
        assert found.is_worse


def test_a_part_that_is_gone_is_worse() -> None:
    """A GPU that only the earlier run has is named."""
    before, after = KeptCluster(), KeptCluster()
    after.places["node1-gpu2"] = replace(after.places["node1-gpu2"], uuid="GPU-other", serial="S-other")
    found = compare(before.document(before.records()), after.document(after.records()))
    assert [place["serial"] for place in found.parts.gone] == ["S-node1-gpu2"]
    assert [place["serial"] for place in found.parts.new] == ["S-other"]
    assert found.is_worse


def test_a_node_that_is_absent_is_one_line() -> None:
    """Its GPUs are gone and its criteria missing: a line each, however many GPUs and criteria. A single GPU has its own."""
    before, after = KeptCluster(nodes=3, gpus=8), KeptCluster(nodes=3, gpus=8)
    nodes = [f"node{number}" for number in range(3)]
    names = [f"nic{number}" for number in range(30)]
    rows = [Record(criterion=name, place=node, outcome="passed") for name in names for node in nodes]
    gone = [name for name in after.places if name.startswith("node2")]
    for name in gone:
        after.places[name] = replace(after.places[name], uuid=None, serial=None, pci=None, rank=None)
    after.places["node1-gpu3"] = replace(after.places["node1-gpu3"], uuid="GPU-new", serial="S-new")
    rows += [Record(criterion=f"busbw[{name}]", place=None, outcome="passed") for name in names[:7]]
    lost = {"outcome": "missing", "reason": "not run: host2 is absent"}
    missing = [replace(one, **lost) if one.place in ("node2", None) else one for one in rows]
    found = compare(before.document([*before.records(), *rows]), after.document([*after.records(), *missing]))
    known = dict(sections(found))
    why = "passed -> missing: not run: host2 is absent"
    assert known["worse outcomes"] == [f"30 criteria at host2 (node2): {why}", f"7 criteria at the cluster: {why}"]
    assert known["parts that are gone"] == ["host1 (node1-gpu3) serial S-node1-gpu3", "host2 (node2): the node with its 8 GPUs"]
    assert len(found.parts.gone) == 9


def test_few_criteria_with_one_reason_are_named() -> None:
    """Another reason is another line, and so is a criterion whose outcome has no reason."""
    cluster = KeptCluster(nodes=1, gpus=2)
    reasons = {"a": "busy", "b": "busy", "c": "hung", "d": "", "e": ""}
    rows = [Record(criterion=name, place="node0", outcome="passed") for name in reasons]
    bad = [replace(one, outcome="error", reason=reasons[one.criterion]) for one in rows]
    found = compare(cluster.document([*cluster.records(), *rows]), cluster.document([*cluster.records(), *bad]))
    lines = [line.replace("host0 (node0): passed -> not measured", "HOST") for line in dict(sections(found))["worse outcomes"]]
    assert lines == ["a, b at HOST: busy", "c at HOST: hung", "d at HOST", "e at HOST"]


def test_all_gpus_of_a_node_exchanged_are_one_line() -> None:
    """The node is there, and none of its GPUs is; a criterion that is missing where GPUs answer keeps its own line."""
    before, after = KeptCluster(nodes=2, gpus=4), KeptCluster(nodes=2, gpus=4)
    for name in [name for name in after.places if name.startswith("node1-")]:
        after.places[name] = replace(after.places[name], uuid=f"new-{name}", serial=f"new-{name}")
    row = Record(criterion="nic", place="node1", outcome="passed")
    lost = [replace(row, outcome="missing", reason="cut")]
    known = dict(sections(compare(before.document([*before.records(), row]), after.document([*after.records(), *lost]))))
    assert known["parts that are gone"] == ["host1 (node1): all of its 4 GPUs"]
    assert known["worse outcomes"] == ["nic at host1 (node1): passed -> missing: cut"]


def test_environment_and_limits_are_named() -> None:
    """A driver, a version, a limit that differs is said, and is nothing worse by itself."""
    cluster = KeptCluster()
    before = cluster.document(cluster.records(), environment={"versions": {"torch": "2.12", "driver": "1"}})
    after = cluster.document(cluster.records(limit=Limit(kind="above", value=600, unit="TFLOPS")), level="quick")
    found = compare(before, after)
    assert ("versions: torch", "2.12", "2.13") in found.settings
    assert ("limit of bf16_tflops", "> 700 TFLOPS", "> 600 TFLOPS") in found.settings
    assert ("level", "standard", "quick") in found.settings
    assert not found.is_worse


def test_few_siblings_are_compared_by_the_noise_of_the_entry() -> None:
    """Two GPUs give no spread: a change counts from twice the noise that the entry allows."""
    cluster = KeptCluster(nodes=1, gpus=2)
    limits = {"bf16_tflops": {"noise": 0.04}}
    before = cluster.document(cluster.records(), limits=limits)
    for value, worse in ((700.1, False), (685.0, True)):
        assert compare(before, cluster.document(cluster.records({"node0-gpu1": value}))).is_worse is worse


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 2), "this comparison can find: 12 %; more than 2 % in bf16_tflops (12 %)"),
        ((8, 8), "this comparison can find: 1 %\n"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--markdown",), ("--html",)])
def test_what_could_have_been_found_is_said(
    shape: tuple[int, int], said: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each form, also where nothing is worse: three times the noise of the entry, or what siblings show."""
    cluster = KeptCluster(nodes=shape[0], gpus=shape[1])
    kept = keep(tmp_path / "a", cluster.document(cluster.records(), limits={"bf16_tflops": {"noise": 0.04}}))
    page = tmp_path / "page.html"
    assert main.main(["compare", str(kept), str(kept), *words, *([str(page)] if "--html" in words else [])]) == 0
    shown = Page(page.read_text()).text + "\n" if "--html" in words else capsys.readouterr().out.replace("\\", "")
    assert f"smallest loss that {said}" in shown.replace("1 % ", "1 %\n")
    assert "bf16_tflops: 1" in shown


def test_runs_without_a_rate_say_that_nothing_could_be_found() -> None:
    """Counts alone have no loss that is a share."""
    cluster = KeptCluster()
    counted = cluster.document(cluster.records(limit=Limit(kind="max", value=800, unit="count")))
    assert "none, no rate is in both runs" in findable(compare(counted, counted))


def test_different_clusters_are_refused() -> None:
    """Nothing of one is in the other; or one was simulated, or rehearsed."""
    one, other = KeptCluster(), KeptCluster()
    other.places = {
        name: replace(place, hostname=f"x{place.node}", uuid=f"{place.uuid}x", serial="x")
        for name, place in other.places.items()
    }
    with pytest.raises(ConfigurationError, match="different clusters"):
        compare(one.document(one.records()), other.document(other.records()))
    with pytest.raises(ConfigurationError, match="simulated fleet"):
        compare(one.document(one.records()), one.document(one.records(), simulated={"nodes": 2}))


def test_an_older_file_is_compared_by_its_rows() -> None:
    """results.json of version 0.1.0 has rows alone."""
    cluster = KeptCluster()
    new = cluster.document(cluster.records({"node0-gpu1": 500.0}))
    old = cluster.document(cluster.records())
    for name in ("schema_version", "values", "places", "run", "criteria_omitted"):
        old.pop(name, None)
    assert [one.part for one in compare(old, new).worse_values] == [("gpu", "GPU-node0-gpu1")]


@pytest.mark.parametrize("words", [(), ("--markdown",)])
def test_the_command(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text or Markdown, and the exit code: 0 nothing is worse, 1 something is."""
    cluster = KeptCluster()
    name = "rate_of_<script>"
    before = keep(tmp_path / "a", cluster.document(cluster.records(criterion=name), run={"id": "6f1c0f3e"}))
    after = keep(tmp_path / "b", cluster.document(cluster.records({"node1-gpu1": 600.0}, criterion=name)))
    assert main.main(["compare", str(before), str(before), *words]) == 0
    said = capsys.readouterr().out
    assert "nothing is worse" in said
    assert "A and B are one and the same run" in said
    assert main.main(["compare", str(before), str(after), *words]) == 1
    said = capsys.readouterr().out
    assert "750" in said
    assert "600" in said
    assert "S-node1-gpu1" in said
    assert ("<script>" in said) is (not words)


ROW = (
    '{"criterion": "x", "outcome": "OUTCOME", "place": null, "value": 1, "unit": null, "limit": null, '
    '"limit_kind": null, "limit_value": null, "evidence": {}}'
)
RUN = '{"schema": 1, "verdict": "VERDICT", "verdict_line": "A", "criteria": [ROW], "values": []}'.replace("ROW", ROW)
FORGED = {
    f"{verdict} with an outcome {outcome}": (
        RUN.replace("VERDICT", verdict).replace("OUTCOME", outcome),
        f"says {verdict} and has an outcome '{outcome}': it was damaged or made up",
    )
    for verdict, outcome in (
        *(("ACCEPTED", one) for one in ("failed", "error", "noisy", "missing", "not_selected")),
        *(("ACCEPTED_WITH_WAIVERS", one) for one in ("failed", "error", "noisy", "missing", "not_selected")),
    )
}
BAD = {
    **FORGED,
    "a waiver below ACCEPTED": (
        RUN.replace("VERDICT", "ACCEPTED")
        .replace("OUTCOME", "failed")
        .replace('"evidence": {}', '"evidence": {}, "waiver": {}'),
        "says ACCEPTED and has an outcome 'waived': it was damaged or made up",
    ),
    "a forged column": (
        RUN.replace("VERDICT", "ACCEPTED").replace(ROW, "").replace("[]}", '[{"criterion": "x", "outcome": ["failed"]}]}'),
        "says ACCEPTED and has an outcome 'failed': it was damaged or made up",
    ),
    "a verdict twice": (
        RUN.replace("VERDICT", "REJECTED").replace("OUTCOME", "failed")[:-1] + ', "verdict": "ACCEPTED"}',
        "says ACCEPTED and has an outcome 'failed': it was damaged or made up",
    ),
    "an outcome of no kind": (
        RUN.replace("VERDICT", "REJECTED").replace("OUTCOME", "ok"),
        "says REJECTED and has an outcome 'ok': it was damaged or made up",
    ),
    "a culprit of nothing": (
        '{"schema": 1, "verdict": "REJECTED", "verdict_line": "A", "criteria": [], "culprits": [{"kind": "gpu"}]}',
        "is damaged: Object missing required field `criteria`",
    ),
    "nothing": (None, "there is no "),
    "half": ('{"schema": 1, "verdict": "ACC', "not whole JSON"),
    "no results": ("[1, 2]", "holds no results"),
    "newer": ('{"schema": 1, "schema_version": 3, "verdict": "ACCEPTED", "criteria": []}', "newer than 2"),
    "no number": ('{"schema": 1, "schema_version": "x", "verdict": "ACCEPTED", "criteria": []}', "which is no number"),
    "bytes": (b"\xff\xfe", "not whole JSON"),
    "newer schema": ('{"schema": 2, "verdict": "ACCEPTED", "criteria": []}', "newer than 1"),
    "a row without a place": (
        '{"schema": 1, "verdict": "ACCEPTED", "verdict_line": "A", "criteria": [{"criterion": "x", "outcome": "passed"}]}',
        "is damaged: Object missing required field `place`",
    ),
    "a place without a GPU": (
        '{"schema": 1, "verdict": "ACCEPTED", "verdict_line": "A", "criteria": [], "places": [{"id": "x", "node": 0}]}',
        "is damaged: Object missing required field `gpu`",
    ),
    "an acceptance of nothing": (
        '{"schema": 1, "verdict": "ACCEPTED", "verdict_line": "A", "criteria": [], "values": []}',
        "damaged or made up",
    ),
    "a verdict of no kind": (
        '{"schema": 1, "verdict": "GOOD", "verdict_line": "A", "criteria": []}',
        "there is no verdict 'GOOD'",
    ),
    "limits of no kind": (
        '{"schema": 1, "verdict": "ACCEPTED", "verdict_line": "A", "criteria": [], "limits": [1]}',
        "is damaged: Expected `object`",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
@pytest.mark.parametrize("command", ["show", "compare", "history", "trend", "report"])
def test_bad_files_are_a_sentence(command: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is said in a sentence, with exit code 4; nothing is written."""
    content, said = BAD[case]
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        (folder / "results.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    more = {"compare": [str(folder)], "trend": ["bf16_tflops"]}.get(command, [])
    assert main.main([command.replace("trend", "history"), str(folder), *more]) == 4
    error = capsys.readouterr().err
    assert (said if content is not None or command != "report" else "cannot be read") in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["show", "compare", "report"])
def test_what_is_no_file_is_not_waited_for(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe or a folder in place of results.json: a sentence at once."""
    os.mkfifo(tmp_path / "results.json")
    (tmp_path / "b" / "results.json").mkdir(parents=True)
    words = {"show": ([tmp_path], [tmp_path / "b"]), "compare": ([tmp_path] * 2, [tmp_path / "b"] * 2)}
    for given in words.get(command, ([tmp_path / "results.json"],)):
        assert main.main([command, *map(str, given)]) == 4
        assert "results.json is no file" in capsys.readouterr().err


@pytest.mark.parametrize("column", ["", '{"criterion": "x", "outcome": ["failed"]}'])
@pytest.mark.parametrize("outcome", ["failed", "noisy"])
def test_a_waived_outcome_is_no_contradiction(outcome: str, column: str) -> None:
    """In the row that has the waiver, and in the column, which has none."""
    text = RUN.replace("VERDICT", "ACCEPTED_WITH_WAIVERS").replace("OUTCOME", outcome).replace("[]}", f"[{column}]}}")
    waived = text.replace('"evidence": {}', '"evidence": {}, "waiver": {"who": "J. Doe"}')
    assert checked(waived.encode(), "results.json")["verdict"] == "ACCEPTED_WITH_WAIVERS"
    with pytest.raises(ConfigurationError, match="it was damaged or made up"):
        checked(text.encode(), "results.json")


def test_nothing_to_compare_is_no_good_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs that judged nothing, or nothing of the same: a sentence, exit code 4."""
    cluster = KeptCluster()
    some = [replace(one, outcome="not_selected", value=None) for one in cluster.records()]
    nothing = keep(tmp_path / "a", cluster.document(some))
    other = keep(tmp_path / "b", cluster.document(cluster.records(criterion="other")))
    for pair in ((nothing, nothing), (nothing, other), (other, keep(tmp_path / "c", cluster.document(cluster.records())))):
        assert main.main(["compare", *map(str, pair)]) == 4
        assert "no criterion was judged in both runs" in capsys.readouterr().err


def test_a_journal_alone_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was killed before its first report."""
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert main.main(["show", str(tmp_path)]) == 4
    assert f"gpucluster report {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("compare", "a"), ("merge", "a"), ("show",), ("history", "a", "b", "c"), ("compare", "a", "b", "--html")]
)
def test_wrong_words_are_usage(words: tuple[str, ...]) -> None:
    """Arguments that are absent, too many or unknown have the same exit code."""
    with pytest.raises(SystemExit) as left:
        main.main([*words])
    assert left.value.code == 4


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("bf16_tflops at host0 gpu 0 (node0-gpu0): 498 TFLOPS, not above 700", "failed: 498 TFLOPS, not above 700"),
        ("bf16_tflops at host1 gpu 3 (node1-gpu3): 1, above 0", "failed: bf16_tflops at host1 gpu 3 (node1-gpu3): 1, above 0"),
        ("bf16_tflops was not measured: cut", "failed: bf16_tflops was not measured: cut"),
        ("cut", "failed: cut"),
    ],
)
def test_a_part_is_named_once(
    reason: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason begins with criterion and part; the line has them already. A terminal folds it, a pipe does not."""
    cluster = KeptCluster()
    rows = cluster.records({})
    bad = [replace(rows[0], outcome="failed", reason=reason), *rows[1:]]
    folders = [keep(tmp_path / name, cluster.document(some)) for name, some in (("a", rows), ("b", bad))]
    for width in (60, 80, None):
        monkeypatch.setenv("COLUMNS", str(width or ""))
        assert main.main(["compare", *map(str, folders)]) == 1
        text = capsys.readouterr().out
        assert f"bf16_tflops at host0 (node0-gpu0) serial S-node0-gpu0: passed -> {shown}" in " ".join(text.split())
        assert (max(map(len, text.splitlines())) <= (width or 0)) == (width is not None)
