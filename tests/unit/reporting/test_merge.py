"""Many nodes' runs as one: one verdict, gaps and doubles named, nothing overwritten."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from pytest_gpucluster.commands import main
from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.records.reading import read_results, rows_of
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.results import SCHEMA_FILE, bound_facts
from pytest_gpucluster.thresholds.limit import Limit
from tests.support import fake_slurm

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = Limit(kind="above", value=700, unit="TFLOPS")
FACTS: dict[str, Any] = {
    "level": "standard",
    "profile": "h100-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 2},
    "thresholds_sha256": "0" * 64,
    "changed_limits": [],
}


def run_of(
    folder: Path,
    *hosts: str,
    at_s: float = 1e9,
    rows: list[Record] | None = None,
    facts: dict[str, Any] | None = None,
    absent: tuple[str, ...] = (),
    **terms: Any,
) -> Path:
    """A results directory: the run of these hosts, two GPUs each; by default each GPU passes, and so does the cluster.

    Nothing answers for the places in ``absent``.
    """
    folder.mkdir(parents=True)
    places = [
        Place(
            id=place.id,
            node=place.node,
            gpu=place.gpu,
            rank=None if place.id in absent else number,
            hostname=hosts[place.node],
            uuid=None if place.id in absent else f"GPU-{hosts[place.node]}-{place.gpu}",
        )
        for number, place in enumerate(Inventory(num_nodes=len(hosts), gpus_per_node=2, device="cuda").places)
    ]
    nodes = [Place(id=f"node{at}", node=at, hostname=host) for at, host in enumerate(hosts)]
    found = rows if rows is not None else [*(passed(place.id) for place in places), passed(None, "busbw")]
    of_verdict = Terms(**{"rehearsal": False, "level_reached": True, "shape": f"{len(hosts)} node x 2 H100", **terms})
    journal = Journal(folder / "journal.jsonl")
    journal.write("started", run=f"run-{folder.name}", versions={"torch": "2"}, facts={**FACTS, **(facts or {})})
    expected = [
        {"nodeid": f"t.py::test_{one.criterion}[{one.place}]", "criterion": one.criterion, "place": one.place} for one in found
    ]
    planned = [{**row, "outcome": "pending", "reason": None} for row in expected]
    journal.write("planned", expected=planned, terms=asdict(of_verdict))
    journal.write(
        "bound", places=[bound_facts(one) for one in places], nodes=[bound_facts(one) for one in nodes], shape=of_verdict.shape
    )
    for one in found:
        journal.write("outcome", record=record_facts(one))
    verdict = decide(found, of_verdict)
    journal.write("verdict", verdict=verdict.word, line=verdict.line, objections=list(of_verdict.objections), ended_s=at_s + 60)
    journal.close()
    text = (folder / "journal.jsonl").read_text().splitlines()
    lines = [json.dumps({**json.loads(line), "at_s": at_s + number}) for number, line in enumerate(text)]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def passed(place: str | None, criterion: str = "bf16_tflops", **changes: Any) -> Record:
    """A value within its limit."""
    known = {"criterion": criterion, "place": place, "outcome": "passed", "value": 750.0, "limit": LIMIT}
    return Record(**{**known, **changes})


def merged(out: Path, *words: str | Path) -> tuple[int, Any]:
    """The exit code, and the merged results.json, which has the shape that is shipped."""
    code = main.main(["merge", *map(str, words), "-o", str(out)])
    if not out.exists():
        return code, None
    found = read_results(out)
    jsonschema.validate(found, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    return code, found


def outcomes(found: Any) -> dict[tuple[str, str | None], str]:
    """Every outcome by criterion and place id."""
    return {(row["criterion"], row["place"]["id"] if row["place"] else None): row["outcome"] for row in rows_of(found)}


def test_nodes_are_one_run(tmp_path: Path) -> None:
    """Every GPU keeps its values under the number of its host; what is of the cluster was measured by no run of all nodes."""
    slow = passed(
        "node0-gpu1", outcome="failed", value=500.0, reason="slow at node0-gpu1", culprits=("node0-gpu1",), waivable=True
    )
    first = run_of(tmp_path / "a", "host10")
    second = run_of(
        tmp_path / "b", "host9", rows=[passed("node0-gpu0", evidence={"beside": "node0-gpu1"}), slow, passed(None, "busbw")]
    )
    code, found = merged(tmp_path / "all", first, second)
    assert (code, found["verdict"]) == (1, "REJECTED")
    assert [place["hostname"] for place in found["places"] if place["gpu"] is None] == ["host9", "host10"]
    rows = {(row["criterion"], row["place"]["id"] if row["place"] else None): row for row in rows_of(found)}
    assert rows["bf16_tflops", "node0-gpu1"]["outcome"] == "failed"
    assert rows["bf16_tflops", "node0-gpu0"]["evidence"] == {"beside": "node0-gpu1"}
    assert rows["bf16_tflops", "node1-gpu1"]["place"]["uuid"] == "GPU-host10-1"
    assert [found["culprits"][0]["place"][name] for name in ("id", "hostname")] == ["node0-gpu1", "host9"]
    assert (rows["busbw", "node1"]["outcome"], rows["busbw", None]["outcome"]) == ("passed", "not_selected")
    assert [run["hosts"] for run in found["merged"]["runs"]] == [["host10"], ["host9"]]
    assert found["expected"] == {"nodes": 2, "gpus_per_node": 2}


def test_a_run_of_all_nodes_completes_the_single_ones(tmp_path: Path) -> None:
    """With what is between the nodes measured by a run of all of them, nothing is open: accepted."""
    alone = [run_of(tmp_path / name, name) for name in ("host0", "host1")]
    rows = [passed("node0-gpu0", outcome="not_selected", value=None), passed(None, "busbw")]
    together = run_of(tmp_path / "fabric", "host0", "host1", rows=rows)
    code, found = merged(tmp_path / "all", *alone, together)
    assert (code, found["verdict"]) == (0, "ACCEPTED")
    assert found["merged"]["doubles"] == []
    code, found = merged(tmp_path / "some", *alone)
    assert (code, found["verdict"]) == (1, "INCOMPLETE")


def test_gaps_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A host that is expected and in no run: its criteria are missing, and the verdict names it. One more than expected too."""
    runs = [run_of(tmp_path / name, name) for name in ("host0", "host3")]
    code, found = merged(tmp_path / "all", *runs, "--hosts", "host0,host1,host2")
    assert (code, found["verdict"]) == (1, "INCOMPLETE")
    assert outcomes(found)["bf16_tflops", "node1-gpu1"] == "missing"
    assert "gap: host1 is expected and in no run" in capsys.readouterr().out
    assert found["merged"]["gaps"][-1] == "host3 is in a run and was not expected"
    for host in ("host1", "host2", "host3"):
        assert host in found["verdict_line"]


CLOCKS = pytest.mark.parametrize("bad_at_s", [1e9, 2e9], ids=["its clock is late", "its clock is early"])
"""When the run that was bad began, by the clock of its host; the good one says 1.5e9 s. Nobody knows which came first."""


@CLOCKS
@pytest.mark.parametrize(
    ("outcome", "verdict"), [("failed", "REJECTED"), ("error", "INCOMPLETE"), ("noisy", "INCOMPLETE"), ("passed", "INCOMPLETE")]
)
def test_of_doubles_the_worse_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad_at_s: float, outcome: str, verdict: str
) -> None:
    """Two runs of one host: no clock hides what was bad, in whatever order the folders are given."""
    bad = [passed("node0-gpu0", outcome=outcome, value=500.0, reason="bad"), passed("node0-gpu1")]
    runs = [run_of(tmp_path / "bad", "host0", rows=bad, at_s=bad_at_s)]
    runs += [run_of(tmp_path / "good", "host0", rows=[passed("node0-gpu0"), passed("node0-gpu1")], at_s=1.5e9)]
    for number, order in enumerate([runs, runs[::-1]]):
        code, found = merged(tmp_path / f"all{number}", *order)
        assert (code, found["verdict"]) == (1, verdict)
        assert outcomes(found)["bf16_tflops", "node0-gpu0"] == outcome
        assert "double: host0 is in several runs" in capsys.readouterr().out


@CLOCKS
def test_a_waiver_of_one_run_waives_no_other(tmp_path: Path, bad_at_s: float) -> None:
    """A failure that nobody waived stands beside the same one that somebody did."""
    rows = [passed("node0-gpu0", outcome="failed", value=500.0, waivable=True)]
    waived = [passed("node0-gpu0", outcome="failed", value=500.0, waivable=True, waiver={"id": "W1"})]
    runs = [
        run_of(tmp_path / "bad", "host0", rows=rows, at_s=bad_at_s),
        run_of(tmp_path / "w", "host0", rows=waived, at_s=1.5e9),
    ]
    assert merged(tmp_path / "all", *runs)[1]["verdict"] == "REJECTED"


@CLOCKS
def test_a_gpu_that_was_replaced_is_not_blamed_for_the_old_one(tmp_path: Path, bad_at_s: float) -> None:
    """Two GPUs of one place: the one that failed is named by its own UUID, and both are said."""
    bad = [passed("node0-gpu0", outcome="failed", value=500.0, reason="slow", culprits=("node0-gpu0",)), passed("node0-gpu1")]
    first = run_of(tmp_path / "bad", "host0", rows=bad, at_s=bad_at_s)
    other = run_of(tmp_path / "good", "host0", at_s=1.5e9)
    text = (other / "journal.jsonl").read_text()
    (other / "journal.jsonl").write_text(text.replace("GPU-host0-0", "GPU-new"))
    _, found = merged(tmp_path / "all", first, other)
    assert [culprit["place"]["uuid"] for culprit in found["culprits"]] == ["GPU-host0-0"]
    assert any("GPU-host0-0" in text and "GPU-new" in text for text in found["merged"]["doubles"])


@CLOCKS
def test_a_gpu_that_one_run_did_not_find_is_not_accepted(tmp_path: Path, bad_at_s: float) -> None:
    """It passed in one run, and in another one its host answered without it."""
    rows = [passed("node0-gpu0"), passed("node0-gpu1", outcome="missing", value=None, reason="nothing answers for it")]
    lost = run_of(tmp_path / "lost", "host0", rows=rows, at_s=bad_at_s, absent=("node0-gpu1",))
    code, found = merged(tmp_path / "all", lost, run_of(tmp_path / "good", "host0", at_s=1.5e9))
    assert (code, found["verdict"]) == (1, "INCOMPLETE")
    assert any("host0" in text and "node0-gpu1" in text for text in found["merged"]["doubles"])


@pytest.mark.parametrize(("outcome", "shown"), [("passed", "not_selected"), ("skipped", "not_selected"), ("failed", "failed")])
def test_some_nodes_together_are_not_all(tmp_path: Path, outcome: str, shown: str) -> None:
    """Two of three hosts were measured together: what passed there is not said of all three, and what failed is."""
    rows = [*(passed(f"node{node}-gpu{gpu}") for node in (0, 1) for gpu in (0, 1)), passed(None, "busbw", outcome=outcome)]
    two = run_of(tmp_path / "two", "host0", "host1", rows=rows)
    one = run_of(tmp_path / "one", "host2", rows=[passed("node0-gpu0"), passed("node0-gpu1")])
    code, found = merged(tmp_path / "all", two, one)
    assert (code, outcomes(found)["busbw", None]) == (1, shown)
    assert found["verdict"] == ("REJECTED" if outcome == "failed" else "INCOMPLETE")


def test_one_gpu_under_two_hosts_is_a_double(tmp_path: Path) -> None:
    """A renamed host does not hide that its GPUs were counted before."""
    first = run_of(tmp_path / "a", "host0")
    text = (first / "journal.jsonl").read_text().replace('"hostname": "host0"', '"hostname": "host1"')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "journal.jsonl").write_text(text)
    _, found = merged(tmp_path / "all", first, tmp_path / "b")
    assert any("GPU-host0-0" in double for double in found["merged"]["doubles"])


def test_half_a_journal_is_no_acceptance(tmp_path: Path) -> None:
    """A run that was cut short stays one: what it did not reach is missing, and its folder is named."""
    whole, cut = run_of(tmp_path / "whole", "host0"), run_of(tmp_path / "cut", "host1")
    lines = (cut / "journal.jsonl").read_text().splitlines()
    (cut / "journal.jsonl").write_text("\n".join(lines[:4]) + '\n{"at_s": 3, "event": "outc')
    code, found = merged(tmp_path / "all", whole, cut)
    assert (code, found["verdict"]) == (1, "INCOMPLETE")
    assert "cut: the run ended before its verdict" in found["verdict_line"]
    assert outcomes(found)["bf16_tflops", "node1-gpu1"] == "missing"


def refused(tmp_path: Path, case: str) -> tuple[list[str | Path], str]:
    """Words of a command line that is refused, and what it says."""
    good = run_of(tmp_path / "good", "host0")
    other = run_of(tmp_path / "other", "host1", facts={"thresholds_sha256": "1" * 64} if case == "limits" else None)
    if case == "simulated":
        other = run_of(tmp_path / "simulated", "host1", simulated=True)
    if case == "newer":
        (other / "results.json").write_text('{"schema": 1, "schema_version": 99, "verdict": "ACCEPTED", "criteria": []}')
    if case == "loop":
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
    if case == "empty":
        (other / "journal.jsonl").write_text("")
    words: dict[str, tuple[list[str | Path], str]] = {
        "no folder": ([good, tmp_path / "nothing"], "there is no results directory"),
        "no journal": ([good, tmp_path], "journal.jsonl cannot be read"),
        "twice": ([good, good], "given twice"),
        "loop": ([good, tmp_path / "loop"], "there is no results directory"),
        "limits": ([good, other], "different files of limits"),
        "simulated": ([good, other], "simulated or a rehearsal"),
        "newer": ([good, other], "newer than"),
        "empty": ([good, other], "no outcomes"),
        "hosts": ([good, other, "--hosts", "a,,b"], "names an empty host"),
    }
    return words[case]


@pytest.mark.parametrize("case", ["no folder", "no journal", "twice", "loop", "limits", "simulated", "newer", "empty", "hosts"])
def test_what_is_no_one_run_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence, exit code 4, and nothing is written."""
    words, said = refused(tmp_path, case)
    assert merged(tmp_path / "all", *words) == (4, None)
    assert said in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that holds anything stays as it is."""
    run, out = run_of(tmp_path / "a", "host0"), tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("mine")
    assert main.main(["merge", str(run), "-o", str(out)]) == 4
    assert "nothing was written" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("results.json", "mine")]


def failed(place: str | None = "node0-gpu1", outcome: str = "failed", **changes: Any) -> Record:
    """A value that misses its limit, or another bad outcome."""
    return passed(place, outcome=outcome, value=500.0, reason=f"{outcome} at {place}", **changes)


def excluded(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code and both streams of ``merge --exclude`` over every folder in ``folder``."""
    nodes = sorted(path for path in folder.iterdir() if path.is_dir())
    code = main.main(["merge", *map(str, nodes), "-o", str(folder.parent / "merged"), "--exclude", *words])
    streams = capsys.readouterr()
    return code, streams.out.strip(), streams.err


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the nodes' runs, two of which passed; no Slurm is here."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("gpu-1", "gpu-3"):
        run_of(tmp_path / "nodes" / name, f"{name}.example.com")
    return tmp_path / "nodes"


GOOD = "--nodes=2 --nodelist=gpu-[1,3]"


@pytest.mark.parametrize(
    ("rows", "terms", "why"),
    [
        ([passed("node0-gpu0"), failed()], {}, "bf16_tflops failed: failed at node0-gpu1"),
        ([passed("node0-gpu0"), failed(evidence={"found": ["a cable", "a fan"]})], {}, "bf16_tflops failed: a cable"),
        ([passed("node0-gpu0"), failed(outcome="error")], {}, "bf16_tflops not measured: error at node0-gpu1"),
        ([passed("node0-gpu0"), failed(outcome="missing")], {}, "bf16_tflops missing: missing at node0-gpu1"),
        ([passed("node0-gpu0"), failed(outcome="noisy")], {}, "bf16_tflops too close to call: noisy at node0-gpu1"),
        ([failed("node0-gpu0", "error"), failed()], {}, "bf16_tflops failed: failed at node0-gpu1, and 1 more"),
        ([passed("node0-gpu0", outcome="not_selected")], {}, "nothing was measured and passed"),
        (None, {"objections": ("CUDA_LAUNCH_BLOCKING is set",)}, "CUDA_LAUNCH_BLOCKING is set"),
    ],
    ids=["failed", "what was found", "error", "missing", "noisy", "the worst is said", "nothing selected", "a debugging mode"],
)
def test_a_node_that_did_not_pass_is_excluded(
    rows: list[Record] | None, terms: dict[str, Any], why: str, nodes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name in Slurm, with the reason; sbatch's options are all of standard output."""
    run_of(nodes / "gpu-2", "gpu-2.example.com", rows=rows, **terms)
    code, options, said = excluded(nodes, capsys)
    assert (code, options) == (0, f"{GOOD} --exclude=gpu-2")
    assert f"excluded gpu-2: {why}\n" in said
    assert "passed: 2 of 3 nodes: gpu-[1,3]\n" in said
    assert read_results(nodes.parent / "merged")["expected"]["nodes"] == 3


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "rehearsal": ({"rehearsal": True}, "it ran as a rehearsal, and others measured GPUs"),
    "simulated": ({"simulated": True}, "it ran as a simulation, and others measured GPUs"),
    "profile": ({"facts": {"profile": "h100-pcie"}}, "other profiles than most nodes: h100-pcie, and most have h100-sxm"),
    "limits": ({"facts": {"thresholds_sha256": "1" * 64}}, "other files of limits than most nodes"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_node_that_was_judged_otherwise_is_excluded(case: str, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A driver that is missing, or another GPU: that node's fault holds no other node back, and nothing of it is merged."""
    changes, why = ODD[case]
    run_of(nodes / "gpu-2", "gpu-2.example.com", **changes)
    code, options, said = excluded(nodes, capsys)
    assert (code, options) == (0, f"{GOOD} --exclude=gpu-2")
    assert f"excluded gpu-2: {why}\n" in said
    found = read_results(nodes.parent / "merged")
    assert (found["verdict"], found["expected"]["nodes"]) == ("INCOMPLETE", 3)
    assert {row["place"]["hostname"] for row in rows_of(found) if row["outcome"] == "passed" and row["place"]} == {
        "gpu-1.example.com", "gpu-3.example.com",
    }  # fmt: skip


def test_one_real_node_beside_rehearsals(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What measured GPUs counts, however few: no fabric is judged on CPUs because most drivers are missing."""
    for name in ("gpu-2", "gpu-4", "gpu-5"):
        run_of(nodes / name, name, rehearsal=True)
    assert excluded(nodes, capsys)[:2] == (0, f"{GOOD} --exclude=gpu-[2,4-5]")


def test_without_a_majority_nobody_is_excluded(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes of one profile and two of another: nobody can say which was ordered."""
    for name in ("gpu-2", "gpu-4"):
        run_of(nodes / name, name, facts={"profile": "h100-pcie"})
    code, options, said = excluded(nodes, capsys)
    assert (code, options, "used different profiles: they are no one run" in said) == (4, "", True)


def test_what_excludes_no_node(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A low level, a selection and a waived failure: what was measured is good."""
    waived = failed(waiver={"id": "W1"}, waivable=True)
    run_of(nodes / "gpu-4", "gpu-4", rows=[passed("node0-gpu0"), waived, passed(None, "busbw", outcome="not_selected")])
    run_of(nodes / "gpu-5", "gpu-5", level_reached=False)
    code, options, said = excluded(nodes, capsys)
    assert (code, options, "excluded" in said) == (0, "--nodes=4 --nodelist=gpu-[1,3-5]", False)


@pytest.mark.parametrize("written", [None, "", "{}\n", "no journal"], ids=["nothing", "empty", "no run", "damaged"])
def test_a_node_that_never_reported_is_excluded(written: str | None, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is empty, or has a journal of nothing; the merged report has it as a gap."""
    (nodes / "gpu-2").mkdir()
    if written is not None:
        (nodes / "gpu-2" / "journal.jsonl").write_text(written)
    code, options, said = excluded(nodes, capsys, "--hosts", "gpu-1.example.com,gpu-9")
    assert (code, options) == (0, f"{GOOD} --exclude=gpu-[2,9]")
    assert ("excluded gpu-2: it never reported\n" if written is None else "excluded gpu-2: its run cannot be read: ") in said
    assert "excluded gpu-9: it never reported\n" in said
    assert "gap: gpu-2 is expected and in no run" in said
    assert read_results(nodes.parent / "merged")["verdict"] == "INCOMPLETE"


def test_no_node_passed(tmp_path: Path, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence, exit code 1 and no options, whether there are runs to merge or none."""
    for name in ("gpu-1", "gpu-3"):
        (nodes / name / "journal.jsonl").unlink()
    code, options, said = excluded(nodes, capsys)
    assert (code, options, (tmp_path / "merged").exists()) == (1, "", False)
    assert "none of 2 nodes passed: there is nothing to run the next job on" in said
    run_of(nodes / "gpu-2", "gpu-2", rows=[failed()])
    code, options, said = excluded(nodes, capsys)
    assert (code, options, (tmp_path / "merged").exists()) == (1, "", True)


def test_a_run_of_several_nodes_tells_of_no_node_alone(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder's name is that of one node, so nothing follows for the others."""
    run_of(nodes / "gpu-2", "gpu-2", "gpu-7")
    code, options, said = excluded(nodes, capsys)
    assert (code, options) == (0, f"{GOOD} --exclude=gpu-2")
    assert "excluded gpu-2: its folder holds a run of 2 nodes, and not of this node alone" in said


def test_two_folders_of_one_name(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which run is the node's cannot be said: wrong usage."""
    run_of(nodes / "again" / "gpu-1", "gpu-1")
    words = [str(nodes / "gpu-1"), str(nodes / "again" / "gpu-1"), "-o", str(nodes.parent / "merged"), "--exclude"]
    assert main.main(["merge", *words]) == 4
    assert "two folders are called gpu-1" in capsys.readouterr().err


def slurm_says(folder: Path, **states: str) -> None:
    """A ``scontrol`` that shows these nodes, each with its state and reason."""
    records = [fake_slurm.node(state=state).replace("NodeName=vm", f"NodeName={name}") for name, state in states.items()]
    command = folder / "scontrol"
    command.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(records) + "\nEND\n", encoding="utf-8")
    command.chmod(0o755)


def test_what_slurm_says_since(tmp_path: Path, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drained after it passed: excluded. Down and without a report: both are said. A failure keeps its own reason."""
    (nodes / "gpu-2").mkdir()
    run_of(nodes / "gpu-4", "gpu-4", rows=[failed()])
    run_of(nodes / "gpu-5", "gpu-5")
    states = {"gpu-1": "ALLOCATED", "gpu-2": "DOWN*", "gpu-3": "IDLE+DRAIN", "gpu-4": "IDLE+DRAIN", "gpu-5": "IDLE"}
    slurm_says(tmp_path, **states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        code, options, said = excluded(nodes, capsys)
    assert (code, options) == (0, "--nodes=2 --nodelist=gpu-[1,5] --exclude=gpu-[2-4]")
    assert "excluded gpu-2: it never reported; it is DOWN+NOT_RESPONDING in Slurm\n" in said
    assert "excluded gpu-3: it passed, and now it is DRAIN in Slurm\n" in said
    assert "excluded gpu-4: bf16_tflops failed: failed at node0-gpu1\n" in said


def test_a_slurm_that_is_silent(tmp_path: Path, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said, and the runs decide."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho no controller >&2; exit 1\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    code, options, said = excluded(nodes, capsys)
    assert (code, options) == (0, GOOD)
    assert "what Slurm says of the nodes now is not known: " in said
    assert "no controller" in said
