"""Reports of ``dcgmi diag -j`` in the forms of DCGM 2, 3 and 4, and reports that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.inventory.dcgm import DcgmError, DiagResult, parse_report
from tests.support.dcgm import OF_HOST, PERSISTENCE, category, entity, one_test, report_2, report_3, report_4, warning

# DCGM 4.2.3 on a GB10, `-r 1`, exit code 226 (github.com/baldwinSPC/glimmer-burnin, runners/dcgm-diag/diagjson_test.go at
# fefeec8): the facts of that recording, in our own words.
SRAM = "Error getting the SRAM Threshold Count for GPU 0. SRAM Threshold checking was skipped."
GB10 = report_4(software=[entity(0, "Fail", PERSISTENCE)])
GB10["DCGM Diagnostic"]["test_categories"][0]["tests"][0]["test_summary"] = {"info": [SRAM], "status": "Fail"}


def read(report: Any, *, before: str = "") -> list[DiagResult]:
    """The results of a report as ``dcgmi`` prints it."""
    return parse_report(before + json.dumps(report, indent=1)).results


def facts(results: list[DiagResult]) -> list[tuple[str, int | None, str, list[str]]]:
    """Kind, GPU, word and errors of each."""
    return [(one.kind, one.gpu, one.word, one.errors) for one in results]


def test_dcgm_2() -> None:
    """Tests of the host name no GPU; an error is a text. The report does not tell the version."""
    report = report_2([0, 1], pcie={1: {"status": "Fail", "warnings": "PCIe width 8"}})
    assert facts(read(report)) == [
        *[("software", None, "Pass", [])] * len(OF_HOST),
        ("pcie", 0, "Pass", []),
        ("pcie", 1, "Fail", ["PCIe width 8"]),
        ("memory", 0, "Pass", []),
        ("memory", 1, "Pass", []),
    ]
    assert parse_report(json.dumps(report)).version is None
    assert [one.scope for one in read(report)] == ["host"] * len(OF_HOST) + ["gpu"] * 4


def test_dcgm_3() -> None:
    """An error has a number for what to do; a test of the host names the GPU at which it failed, or none."""
    off = {"status": "Fail", "gpu_id": 1, "warnings": [{"warnings": "Persistence mode is off", "error_severity": 5}]}
    old = {"status": "Fail", "gpu_id": -1, "warnings": [{"warnings": "no CUDA", "error_severity": 2}]}
    report = report_3([0, 1], host={"Persistence Mode": off, "NVML Library": old}, memory={0: {"status": "Skip"}})
    results = {(one.test, one.gpu): one for one in read(report)}
    failed = results["Persistence Mode", 1]
    assert (failed.word, failed.errors, failed.severities) == ("Fail", ["Persistence mode is off"], [5])
    assert results["NVML Library", None].scope == "host"
    assert results["GPU Memory", 0].word == "Skip"
    assert parse_report(json.dumps(report)).version == "3.3.9"


def test_dcgm_4_as_recorded() -> None:
    """The result of a GPU; and what the summary alone says, which is an error of the test that passed or failed."""
    assert facts(read(GB10)) == [("software", 0, "Fail", [PERSISTENCE["warning"]]), ("software", None, "Pass", [SRAM])]
    assert [one.scope for one in read(GB10)] == ["gpu", "other"]
    assert parse_report(json.dumps(GB10)).version == "4.2.3"


def test_a_summary_that_repeats_its_results_adds_nothing() -> None:
    """DCGM 4.5 and later repeat every error in the summary."""
    bad = warning("row remap failed")
    report = report_4(memory=[entity(0), entity(1, "Fail", bad)])
    report["DCGM Diagnostic"]["test_categories"][0]["tests"][0]["test_summary"] = {"status": "Fail", "warnings": [bad]}
    assert [one.gpu for one in read(report)] == [0, 1]


@pytest.mark.parametrize("word", ["Fail", "Skip", "Not Run"])
def test_a_summary_that_contradicts_its_results_stands_beside_them(word: str) -> None:
    """Whichever of the two is wrong."""
    report = report_4(memory=[entity(0), entity(1)])
    report["DCGM Diagnostic"]["test_categories"][0]["tests"][0]["test_summary"] = {"status": word}
    assert facts(read(report))[-1] == ("memory", None, word, [])


def test_other_parts_and_all_gpus_of_a_list() -> None:
    """A CPU or an instance of a GPU is no GPU; DCGM's own tool (nvvs) lists GPUs with commas."""
    instance = {"entity_group": "GPU_I", "entity_group_id": 3, "entity_id": 0, "status": "Fail"}
    listed = {"gpu_ids": "0,1", "status": "PASS"}
    tests = [one_test("memory", instance, None), None, one_test("Denylist", listed)]
    found = read({"DCGM GPU Diagnostic": {"test_categories": [None, category("Hardware", *tests)]}}, before="WARNING: odd\n")
    assert [(one.part, one.gpu, one.scope) for one in found] == [
        ("GPU_I 0", None, "other"),
        ("GPU 0", 0, "gpu"),
        ("GPU 1", 1, "gpu"),
    ]


def of_one_result(result: Any) -> Any:
    """A report of DCGM 4 with this in place of its results."""
    return {"DCGM Diagnostic": {"test_categories": [category("Hardware", one_test("memory", result))]}}


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("", "no JSON"),
        ("Segmentation fault", "no JSON"),
        (json.dumps(report_2([0]))[:-40], "not whole"),
        (json.dumps(report_2([0])) + "{}", "more than its report"),
        ("{}", "without 'DCGM Diagnostic'"),
        (json.dumps({"DCGM Diagnostic": []}), "without 'DCGM Diagnostic'"),
        (json.dumps({"DCGM Diagnostic": {"version": "4.6.0", "runtime_error": "MIG is on"}}), "could not run .*: MIG is on"),
        (json.dumps({"DCGM Diagnostic": {}}), "no test has a result"),
        (json.dumps({"DCGM Diagnostic": {"test_categories": "all"}}), "'test_categories' is no list"),
        (json.dumps(of_one_result("Pass")), "'results' is no list"),
        (json.dumps(of_one_result({"gpu_id": "first", "status": "Pass"})), "names no GPU"),
        (json.dumps(of_one_result({"gpu_ids": [0], "status": "Pass"})), "names no GPU"),
        (json.dumps({"DCGM Diagnostic": {"test_categories": [category("A", {"results": []})]}}), "without a name"),
        (json.dumps({"DCGM Diagnostic": {"test_categories": [category("A", one_test("b", test_summary=3))]}}), "no object"),
        ("[" * 100_000 + "{" + '"a":[' * 100_000, "not whole"),
    ],
)
def test_what_is_no_report(printed: str, said: str) -> None:
    """Said as it is, and never a report without a failure."""
    with pytest.raises(DcgmError, match=said):
        parse_report(printed)


@pytest.mark.parametrize("status", [None, "", 1, ["Pass"], {}])
def test_a_status_that_is_no_word_is_no_pass(status: Any) -> None:
    """Nor is a result without one."""
    (found,) = read(of_one_result(entity(0) | {"status": status}))
    assert found.word == "no status"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["warning", "status", "gpu_id", "x"]), inner),
    max_leaves=6,
)


@settings(max_examples=50)
@given(changed=st.dictionaries(st.sampled_from(["status", "warnings", "info", "entity_id", "entity_group", "gpu_id"]), JSON))
def test_any_result_is_read_or_refused(changed: dict[str, Any]) -> None:
    """Whatever stands in a field, no other error than ours comes out."""
    try:
        results = read(of_one_result(entity(0) | changed))
    except DcgmError:
        return
    assert all(isinstance(text, str) for one in results for text in (one.word, *one.errors, *one.info))
