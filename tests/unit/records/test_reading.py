"""Kept results for people and for spreadsheets: every number is read back, and hostile text stays text."""

from __future__ import annotations

import csv
import datetime as dt
import functools
import io
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from pytest_gpucluster.commands import main
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import Terms, decide
from pytest_gpucluster.records.reading import (
    limits_digest,
    limits_used,
    read_results,
    rows_of,
    run_facts,
    run_identity,
    without_secrets,
)
from pytest_gpucluster.records.spreadsheet import csv_text
from pytest_gpucluster.reporting.junit import requirements_of, suite_element
from pytest_gpucluster.reporting.results import SCHEMA_FILE, RunReport
from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.lint import load
from tests.support.kept_runs import KeptCluster, keep
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "=HYPERLINK(evil)\x1b[2J"


@functools.cache
def document() -> Any:
    """A run with a slow GPU, a criterion of the cluster, evidence, and a host with a hostile name."""
    cluster = KeptCluster()
    rows = cluster.records({"node1-gpu1": 498.0}, evidence={"SM MHz": 1290.5, "sizes": [{"bytes": 8, "us": 13.25}] * 3})
    rows[5] = replace(rows[5], outcome="failed", reason=HOSTILE)
    file = packaged()
    latency = Limit(kind="max", value=20.5, unit="us")
    rows += [type(rows[0])(criterion="latency[all_reduce]", place=None, outcome="passed", value=13.3, limit=latency)]
    facts = {
        "expected": {"nodes": 2, "gpus_per_node": 4},
        "limits": limits_used(file.criteria(file.profiles["h100-sxm"]).values()),
        "run": run_facts(run_identity("abc"), cluster.places.values(), last_s=1.8e9, has_ended=True),
    }
    return cluster.document(rows, **facts)


def numbers(value: Any) -> list[float]:
    """Every number in plain data."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def test_every_number_is_in_the_csv() -> None:
    """Each number of results.json is found again, whatever member it stands in."""
    found = document()
    lines = list(csv.DictReader(io.StringIO(csv_text(found))))
    cells = {float(cell) for line in lines for cell in line.values() if is_number(cell)}
    cells |= {float(number) for line in lines if line["evidence"] for number in numbers(json.loads(line["evidence"]))}
    assert {float(number) for number in numbers(found)} - cells == set()
    outcomes = [line for line in lines if line["member"] == "outcome"]
    assert [float(line["value"]) for line in outcomes] == [row["value"] for row in rows_of(found)]
    assert (outcomes[5]["serial"], outcomes[5]["operator"], outcomes[5]["limit_value"]) == ("S-node1-gpu1", ">", "700")


def is_number(cell: str) -> bool:
    """Whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("text", ["=1+1", "+1", "-cmd", "@SUM(A1)"])
def test_no_text_is_a_formula(text: str) -> None:
    """What a spreadsheet would run comes behind an apostrophe; numbers below 0 stay numbers."""
    cluster = KeptCluster(nodes=1, gpus=1)
    found = cluster.document(cluster.records({"node0-gpu0": -1.5}, criterion=text))
    line = next(csv.DictReader(io.StringIO(csv_text(found))))
    assert (line["criterion"], line["value"]) == (f"'{text}", "-1.5")


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ((), ["bf16_tflops", "1 failed of 8", "498", "> 700 TFLOPS", "latency[all_reduce]", "abc"]),
        (("bf16_tflops",), ["Every GPU reaches the dense BF16 rate.", "S-node1-gpu1", "-28.9 %", "limit"]),
        (("latency",), ["latency", "the cluster", "13.3"]),
        (("node1-gpu1",), ["GPU-node1-gpu1", "498"]),
        (("host1",), ["node1-gpu1", "node1-gpu3"]),
        (("S-node0-gpu2",), ["node0-gpu2", "750"]),
    ],
)
def test_show(subject: tuple[str, ...], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run, a criterion, a family of them, a place by any of its names."""
    folder = keep(tmp_path, document())
    assert main.main(["show", str(folder), *subject]) == 0
    text = capsys.readouterr().out
    assert [words for words in said if words not in text] == []
    assert "\x1b" not in text


def wide_document() -> Any:
    """A run with a long name of a criterion, long limits, small values, and hosts with long names."""
    cluster = KeptCluster(nodes=2, gpus=2)
    cluster.places = {key: replace(one, hostname=f"rack-17-gpu-node-{one.node:03}") for key, one in cluster.places.items()}
    rate = Limit(kind="above", value=2000, unit="tokens/s/GPU")
    share = Limit(kind="max", value=1e-06, unit="of the runs' own spread")
    zero = Limit(kind="max", value=0, unit="count")
    rows = cluster.records({"node1-gpu1": 1234.5678}, criterion="straggler[training_throughput_gpu_of_all]", limit=rate)
    rows += cluster.records(criterion="finetune_check[of_the_step_time_and_its_spread]", limit=share)
    rows += [replace(row, value=0.0) for row in cluster.records(criterion="no_foreign_process", limit=zero)]
    rows += cluster.records(criterion="nvlink_domain", outcome="skipped", limit=None)[:1]
    rows[3] = replace(rows[3], outcome="failed", reason="it is slow", margin_percent=-38.27)
    facts = {"expected": {"nodes": 2, "gpus_per_node": 2}, "run": {"started": "2026-11-20T00:00:00.000+00:00"}}
    return cluster.document(rows, **facts)


@pytest.mark.parametrize("width", [60, 80, 100, 200, None])
@pytest.mark.parametrize("subject", [(), ("straggler",), ("rack-17-gpu-node-001",), ("node1-gpu1",)])
def test_no_table_cuts_a_cell(
    subject: tuple[str, ...],
    width: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each limit, number and name of a place is whole, on every screen; only in a pipe is a line as wide as its row."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    assert main.main(["show", str(keep(tmp_path, wide_document())), *subject]) == 0
    text = capsys.readouterr().out
    wanted = ["straggler[training_throughput_gpu_of_all]", "> 2000 tokens/s/GPU"]
    if subject[:1] != ("straggler",):
        wanted += ["finetune_check[of_the_step_time_and_its_spread]", "<= 1e-06 of the runs' own spread"]
    wanted += ["rack-17-gpu-node-001 (node1-gpu1)"] if subject and subject[0] != "node1-gpu1" else []
    assert [words for words in wanted if words not in text] == []
    assert re.search(r"\b1235\b", text)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    if width is not None:
        assert max(map(len, text.splitlines())) <= width


def test_yes_or_no_has_no_unit_and_what_does_not_apply_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``<= 0``, not ``<= 0 count``; a criterion that does not apply has no row of nothing."""
    folder = str(keep(tmp_path, wide_document()))
    assert main.main(["show", folder]) == 0
    text = capsys.readouterr().out
    assert "does not apply (1): nvlink_domain" in text
    assert len(re.findall("nvlink_domain", text)) == 1
    for subject in ([], ["no_foreign_process"], ["node0-gpu0"]):
        assert main.main(["show", folder, *subject]) == 0
        assert " count" not in capsys.readouterr().out
    assert main.main(["show", folder, "nvlink_domain"]) == 0
    assert "does not apply" in capsys.readouterr().out


@pytest.mark.parametrize("subject", ["bf16_tflops", "bf16"])
def test_an_absent_node_is_one_row(subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each criterion, with the number of its GPUs; one missing GPU, and one with another reason, keep their own rows."""
    cluster, rows = KeptCluster(nodes=3), []
    for name in ("bf16_tflops", "bf16"):
        lost = {"node1": "host1 never joined", "node2-gpu3": "it fell off the bus"}
        found = [(one, lost.get(str(one.place), lost.get(str(one.place)[:5]))) for one in cluster.records(criterion=name)]
        rows += [one if why is None else replace(one, outcome="missing", value=None, reason=why) for one, why in found]
    rows = [replace(one, criterion=f"bf16[{one.criterion}]") if subject == "bf16" else one for one in rows]
    assert main.main(["show", str(keep(tmp_path, cluster.document(rows))), subject]) == 0
    missing = [line for line in capsys.readouterr().out.splitlines() if " missing " in f"{line} " and "host" in line]
    of_node = [line for line in missing if "host1 (node1)" in line]
    assert len(of_node) == (2 if subject == "bf16" else 1)
    assert all("4 GPUs" in line for line in of_node)
    assert len(missing) == 2 * len(of_node)
    assert all("host2 (node2-gpu3)" in line for line in missing if line not in of_node)


@pytest.mark.parametrize("width", [60, 80, None])
def test_no_table_of_history_cuts_a_cell(
    width: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile, digest and folder are whole."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    folder = keep(tmp_path / "a-long-name-of-a-folder" / "of-the-second-week", wide_document())
    for subject in ([], ["straggler[training_throughput_gpu_of_all]", "--part", "node1-gpu1"]):
        assert main.main(["history", str(tmp_path), *subject]) == 0
        text = capsys.readouterr().out
        assert str(folder.relative_to(tmp_path)) in text
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert width is None or max(map(len, text.splitlines())) <= width
        assert all(words in text for words in ([] if subject else ["nodes x GPUs", "2 x 2", "h100-sxm", "standard"]))


def test_results_without_an_outcome_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head of the run alone reads as if all were good."""
    assert main.main(["show", str(keep(tmp_path, KeptCluster().document([])))]) == 0
    assert "nothing was judged in that run" in capsys.readouterr().out


@pytest.mark.parametrize("schema", [0, 2, "1", 1.5, [1]])
def test_another_schema_is_named_by_its_number(schema: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be older or newer: the sentence does not call it newer than it is."""
    folder = keep(tmp_path, {**document(), "schema": schema})
    assert main.main(["show", str(folder)]) == 4
    said = capsys.readouterr().err
    assert f"schema {schema!r}" in said
    assert ("newer" in said) is (schema == 2)


def test_show_refuses_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is a sentence with the nearest one."""
    assert main.main(["show", str(keep(tmp_path, document())), "bf16_tflop"]) == 4
    assert "Did you mean 'bf16_tflops'?" in capsys.readouterr().err
    assert main.main(["show", str(tmp_path), "hosts1"]) == 4
    assert "Did you mean 'host1'?" in capsys.readouterr().err


def test_csv_of_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the outcomes that were asked for, and no other number."""
    assert main.main(["show", str(keep(tmp_path, document())), "node1-gpu1", "--csv"]) == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (line["place"], line["value"]) == ("node1-gpu1", "498.0")


def test_the_record_has_the_shape_that_is_shipped() -> None:
    """The new members of results.json are in its schema."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    names = ("run", "places", "limits", "limits_sha256", "values", "criteria_omitted", "schema_version")
    part = {name: document()[name] for name in names}
    jsonschema.validate(
        part,
        {"required": list(names), "properties": {name: schema["properties"][name] for name in names}, "$defs": schema["$defs"]},
    )


def test_the_digest_of_the_limits() -> None:
    """It changes with a limit, and not with the folder in which the file lies."""
    limits = document()["limits"]
    moved = {name: {**one, "where": "elsewhere.yaml:1"} for name, one in limits.items()}
    assert limits_digest(limits) == limits_digest(moved) == document()["limits_sha256"]
    looser = {**limits, "bf16_tflops": {**limits["bf16_tflops"], "numbers": {"any": 1}}}
    assert limits_digest(looser) != limits_digest(limits)


def test_when_who_and_where() -> None:
    """Moments have their offset; a run that has not ended has no end."""
    zone = dt.timezone(dt.timedelta(hours=5, minutes=30))
    run = run_identity("abc", now=dt.datetime(2026, 11, 26, 18, 0, tzinfo=zone))
    places = KeptCluster().places.values()
    last_s = dt.datetime(2026, 11, 26, 12, 31, tzinfo=dt.timezone.utc).timestamp()
    found = run_facts(run, places, last_s=last_s, has_ended=True)
    assert found["started"] == "2026-11-26T18:00:00.000+05:30"
    assert (found["ended"], found["duration_s"]) == ("2026-11-26T18:01:00.000+05:30", 60.0)
    assert found["hosts"] == ["host0", "host1"]
    assert run_facts(run, places, last_s=last_s, has_ended=False)["ended"] is None
    assert found["user"]
    assert found["host"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["pytest", "--hf-token", "hf_abcdefghijkl", "-k", "bf16"], ["pytest", "--hf-token", "***", "-k", "bf16"]),
        (["--password=x", "HF_TOKEN=abc"], ["--password=***", "HF_TOKEN=***"]),
        (["-o", "addopts=--api-key abc -q"], ["-o", "addopts=--api-key *** -q"]),
        (["https://me:secret@host/x"], ["https://***@host/x"]),
        (["--note", "ghp_0123456789abcdef"], ["--note", "***"]),
        (["-k", "token or key", "--max_tokens=5", "keyword=1"], ["-k", "token or key", "--max_tokens=5", "keyword=1"]),
        (["--gpucluster-expect", "nodes=2,gpus_per_node=8"], ["--gpucluster-expect", "nodes=2,gpus_per_node=8"]),
    ],
)
def test_no_secret_is_kept(words: list[str], shown: list[str]) -> None:
    """What an option's name or its own form calls a secret is hidden, and nothing else."""
    assert without_secrets(words) == shown


def test_ids_of_contracts(tmp_path: Path) -> None:
    """A site gives a packaged criterion the ids that its contract asks for: no limit is changed by that, and JUnit has them."""
    file = tmp_path / "site.yaml"
    file.write_text("schema: 1\nextends: packaged\ncriteria:\n  bf16_tflops: {ids: [BM01-005, 'N 1']}\n")
    site = load(file)
    profile = site.profiles["h100-sxm"]
    assert site.changed_entries(profile) == {}
    limits = limits_used(site.criteria(profile).values())
    assert limits["bf16_tflops"]["ids"] == ["BM01-005", "N 1"]
    assert limits["hbm_bandwidth"]["ids"] == []
    expected = (("requirement", "BM01-005 bf16_tflops"), ("requirement", "N 1 bf16_tflops"))
    of_the_site = [one for one in requirements_of({"limits": limits}) if one[1].endswith(" bf16_tflops")]
    assert of_the_site == [*expected]
    suite = suite_element(report_with({"limits": limits}))
    found = [(one.get("name"), one.get("value")) for one in suite.findall("properties/property")]
    assert set(expected) <= set(found)


def report_with(facts: dict[str, Any]) -> RunReport:
    """A run without outcomes."""
    verdict = decide([], Terms(rehearsal=False, level_reached=True))
    return RunReport(cases=(), verdict=verdict, places={}, facts=facts, is_rehearsal=False)


@pytest.mark.parametrize("ids", ["BM01", "[1]", "['']", "{a: b}"])
def test_ids_are_a_list_of_texts(ids: str, tmp_path: Path) -> None:
    """Anything else is refused with its line."""
    file = tmp_path / "site.yaml"
    file.write_text(f"schema: 1\nextends: packaged\ncriteria:\n  bf16_tflops: {{ids: {ids}}}\n")
    with pytest.raises(ConfigurationError, match=r"site.yaml:4"):
        load(file)


def test_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs in the order of their dates, wherever they lie; the trend of a criterion; a part wherever it was."""
    cluster = KeptCluster()
    for number, (folder, value) in enumerate([("b", 750.0), ("deep/er/a", 740.0)]):
        if number:
            cluster.swap("node0-gpu0", "node1-gpu1")
        slow = "node1-gpu1" if number else "node0-gpu0"
        run = {"started": f"2026-11-2{number}T00:00:00.000+00:00"}
        keep(tmp_path / folder, cluster.document(cluster.records({slow: value - 100}), run=run))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "journal.jsonl").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    assert main.main(["history", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.index("2026-11-20") < said.out.index("2026-11-21")
    assert "cut has a journal and no results.json" in said.err
    assert "broken" in said.err
    assert main.main(["history", str(tmp_path), "bf16_tflops", "--part", "S-node0-gpu0"]) == 0
    text = capsys.readouterr().out.replace("\n", " ")
    assert "650 -> 640 TFLOPS, -1.54 %" in text
    for words in (["nothing"], ["bf16_tflops", "--part", "nobody"], ["--part", "x"]):
        assert main.main(["history", str(tmp_path), *words]) == 4


def test_a_copied_run_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that ended last counts, wherever it lies; runs whose files have no id are all counted."""
    cluster = KeptCluster()
    first, second = ({"id": name, "started": f"2026-11-20T0{name}:00:00.000+00:00"} for name in "12")
    kept = {"b": ({**first, "ended": "2026-11-20T02"}, 740.0), "copy": ({**first, "ended": "2026-11-20T02"}, 740.0)}
    kept |= {"a": ({**first, "ended": "2026-11-20T01"}, 500.0), "c": (second, 750.0), "c/previous/x": (first, 500.0)}
    kept |= {"d": ({"id": None}, 760.0), "e": ({}, 760.0)}
    for folder, (run, value) in kept.items():
        keep(tmp_path / folder, cluster.document(cluster.records(dict.fromkeys(cluster.places, value)), run=run))
    assert main.main(["history", str(tmp_path), "bf16_tflops"]) == 0
    said = capsys.readouterr()
    assert "over 4 runs: " in said.out
    assert ("740" in said.out, "500" in said.out) == (True, False)
    assert sorted(line.partition(f"{tmp_path}/")[2] for line in said.err.splitlines()) == [
        f"{name} is a copy of the run in {tmp_path}/copy" for name in ("a", "b", "c/previous/x")
    ]


def test_a_file_is_read_by_its_folder_and_its_name(tmp_path: Path) -> None:
    """``RESULTS`` is the folder or its results.json."""
    folder = keep(tmp_path / "r", document())
    assert read_results(folder) == read_results(folder / "results.json")
