"""What ``dcgmi diag`` says of one GPU: passed, failed, or not known; each fault beside a healthy twin."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.dcgm import judge_diag, judge_whole_diag, level_of_round
from pytest_gpucluster.inventory.dcgm import DcgmError, DcgmGpu, parse_report
from pytest_gpucluster.measurements.dcgm import DcgmDiag
from pytest_gpucluster.text import LONGEST
from tests.support.dcgm import Json, entity, report_2, report_3, report_4, warning

if TYPE_CHECKING:
    from pytest_gpucluster.judging.finding import Finding

KINDS = ("software", "memory", "pcie")
GPUS = [DcgmGpu(number=number, uuid=f"GPU-{number}") for number in (0, 1)]


def diag_of(report: Json, *doubts: str) -> DcgmDiag:
    """A diagnostic of two GPUs that printed this report."""
    read = parse_report(json.dumps(report))
    return DcgmDiag(version=read.version, level=2, gpus=GPUS, results=read.results, doubts=list(doubts))


def judge(report: Json, *, gpu: int = 0, kind: str = "memory", kinds: tuple[str, ...] = KINDS, doubt: str = "") -> Finding:
    """One kind of test of one GPU."""
    return judge_diag(diag_of(report, *filter(None, [doubt])), f"GPU-{gpu}", kind, kinds=kinds)


def report(memory: list[Json], **more: Any) -> Json:
    """DCGM 4, all kinds."""
    return report_4(software=[entity(0), entity(1)], memory=memory, pcie=[entity(0), entity(1)], **more)


HEALTHY = report([entity(0), entity(1)])


@pytest.mark.parametrize("made", [report_2([0, 1]), report_3([0, 1]), HEALTHY], ids=["DCGM 2", "DCGM 3", "DCGM 4"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", [0, 1])
def test_healthy(made: Json, kind: str, gpu: int) -> None:
    """In the form of each version."""
    found = judge(made, gpu=gpu, kind=kind)
    assert (found.judged, found.doubts) == (0, ())
    assert found.evidence["passed"]


@pytest.mark.parametrize("word", ["Fail", "FAIL", "Warn", "WARN"])
def test_a_failure_is_that_gpus(word: str) -> None:
    """With DCGM's text and advice; the other GPU, and the other kinds, stay as they are."""
    made = report([entity(0), entity(1, word, warning("A row remap failed", severity=6))])
    found = judge(made, gpu=1)
    assert found.facts == (f"memory, GPU 1: {word}: A row remap failed",)
    assert (found.kind, found.advice) == ("gpu", "drain the node and reset the GPU (DCGM: reset)")
    assert judge(made, gpu=0) == judge(HEALTHY, gpu=0)
    assert judge(made, gpu=1, kind="pcie") == judge(HEALTHY, gpu=1, kind="pcie")


def test_the_most_urgent_advice_and_a_setting() -> None:
    """Isolate before all; where only settings are wrong, no part is."""
    both = report([entity(0, "Fail", warning("a", severity=1), warning("b", severity=2)), entity(1)])
    setting = report([entity(0, "Fail", warning("ECC is off", severity=5)), entity(1)])
    assert (judge(both).kind, judge(both).advice) == ("gpu", "take this GPU out of service (DCGM: isolate)")
    assert (judge(setting).kind, judge(setting).advice) == ("settings", "change the setting that DCGM names (DCGM: config)")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (entity(0, "Skip", warning("ECC is off")), "memory, GPU 0: Skip: ECC is off"),
        (entity(0, "Skip", info=["not supported"]), "memory, GPU 0: Skip: not supported"),
        (entity(0, "Skip"), "memory, GPU 0: Skip"),
        (entity(0, "Not Run"), "memory, GPU 0: Not Run"),
        (entity(0, "Excellent"), "memory, GPU 0: Excellent"),
        (entity(0) | {"status": None}, "memory, GPU 0: no status"),
        (entity(0, "Pass", warning("one page was retired")), "memory, GPU 0: Pass: one page was retired"),
        (entity(0, "Pass", info=["Error: no counter. Checking was skipped."]), "memory, GPU 0: Pass: Error: no counter"),
    ],
)
def test_what_is_not_green(result: Json, said: str) -> None:
    """A skip, an unknown word, and an error beside a pass: not known, neither good nor bad."""
    found = judge(report([result, entity(1)]))
    assert found.facts == ()
    assert any(said in text for text in found.doubts), found.doubts
    assert judge(report([result, entity(1)]), gpu=1).facts == ()


def test_a_gpu_without_a_result() -> None:
    """And a kind that did not run at all."""
    assert judge(report([entity(0)]), gpu=1).doubts == ("DCGM 4.2.3: memory: no result for GPU 1",)
    assert judge(report_4(software=[entity(0), entity(1)])).doubts == ("DCGM 4.2.3: dcgmi diag -r 2 ran no test 'memory'",)


def test_a_result_of_no_gpu_is_no_green() -> None:
    """DCGM 4 says of which GPU a result is: one that names none stands for none."""
    found = judge(report([entity(0) | {"entity_id": None}]))
    assert (found.judged, found.doubts) == (None, ("DCGM 4.2.3: memory: no result for GPU 0",))


@pytest.mark.parametrize("number", ["", "null", 0.5])
def test_a_number_that_is_none_is_refused(number: Any) -> None:
    """Whatever stands there."""
    with pytest.raises(DcgmError, match="names no GPU that can be read"):
        judge(report([entity(0) | {"entity_id": number}]))


def test_a_gpu_that_dcgm_does_not_list() -> None:
    """By its UUID."""
    assert judge(HEALTHY, gpu=7).doubts == ("DCGM 4.2.3: DCGM does not list GPU-7",)


def test_a_test_of_the_host_that_failed() -> None:
    """In DCGM 2 at every GPU; in DCGM 3 at the one that it names, and of the others it says nothing."""
    old = report_2([0, 1], host={"NVML Library": {"status": "Fail", "warnings": "not found"}})
    named = {"status": "Fail", "gpu_id": 1, "warnings": [{"warnings": "Persistence mode is off", "error_severity": 5}]}
    new = report_3([0, 1], host={"Persistence Mode": named})
    assert judge(old, kind="software").facts == ("NVML Library, all GPUs of the host: Fail: not found",)
    assert judge(new, kind="software", gpu=1).facts == ("Persistence Mode, GPU 1: Fail: Persistence mode is off",)
    assert judge(new, kind="software", gpu=0).doubts == ("DCGM 3.3.9: Persistence Mode: no result for GPU 0",)


def test_another_part_counts_for_every_gpu() -> None:
    """A CPU or an instance (MIG) that failed; where it passed, it stands for no GPU."""
    instance = {"entity_group": "GPU_I", "entity_group_id": 3, "entity_id": 0, "status": "Fail"}
    assert judge(report([entity(0), entity(1), instance])).facts == ("memory, GPU_I 0: Fail",)
    assert judge(report([instance | {"status": "Pass"}])).doubts == ("DCGM 4.2.3: memory: no result for GPU 0",)


def test_a_summary_that_contradicts() -> None:
    """``Fail`` is bad wherever it stands; any other word leaves it open."""
    made = report([entity(0), entity(1)])
    summary = made["DCGM Diagnostic"]["test_categories"][1]["tests"][0]["test_summary"]
    summary["status"] = "Fail"
    assert judge(made).facts == ("memory, its summary: Fail",)
    summary["status"] = "Skip"
    assert judge(made).doubts == ("DCGM 4.2.3: memory, its summary: Skip",)


def test_a_test_that_no_entry_judges_counts_as_software() -> None:
    """It is not lost; with an entry of its own it is judged there."""
    made = report([entity(0), entity(1)], eud=[entity(0, "Skip"), entity(1, "Fail")])
    assert judge(made, kind="software").doubts == ("DCGM 4.2.3: eud, GPU 0: Skip",)
    assert judge(made, kind="software", gpu=1).facts == ("eud, GPU 1: Fail",)
    with_entry = (*KINDS, "eud")
    assert judge(made, kind="software", kinds=with_entry) == judge(HEALTHY, kind="software")
    assert judge(made, kind="eud", gpu=1, kinds=with_entry).facts == ("eud, GPU 1: Fail",)


@pytest.mark.parametrize("tests", [None, [], "absent"])
@pytest.mark.parametrize("kinds", [("software",), ("software", "memory")])
def test_no_test_of_software_is_no_green(tests: Any, kinds: tuple[str, ...]) -> None:
    """The category without tests beside a memory test that passed: the memory test is none of software."""
    made = report_4(memory=[entity(0), entity(1)])
    deployment = {"category": "Deployment", **({} if tests == "absent" else {"tests": tests})}
    made["DCGM Diagnostic"]["test_categories"].insert(0, deployment)
    found = judge(made, kind="software", kinds=kinds)
    assert (found.facts, found.doubts) == ((), ("DCGM 4.2.3: dcgmi diag -r 2 ran no test 'software'",))


@pytest.mark.parametrize("made", [report_2([0, 1]), report_3([0, 1]), HEALTHY], ids=["DCGM 2", "DCGM 3", "DCGM 4"])
@pytest.mark.parametrize("results", [None, [], [None], "absent"])
@pytest.mark.parametrize("with_summary", [False, True])
def test_a_test_without_results_is_no_green(made: Json, results: Any, with_summary: bool) -> None:  # noqa: FBT001 -- a parameter
    """Listed, and its results are null, empty or absent: not known at any GPU."""
    made = json.loads(json.dumps(made))
    (root,) = [part for name, part in made.items() if name.endswith("Diagnostic")]
    first = root["test_categories"][0]["tests"][0]
    del first["results"]
    if results != "absent":
        first["results"] = results
    if not with_summary:
        first.pop("test_summary", None)
    for gpu in (0, 1):
        found = judge(made, gpu=gpu, kind="software")
        assert found.facts == ()
        assert any(first["name"] in doubt and "no result" in doubt for doubt in found.doubts), found.doubts


BUSY = [
    "GPU 0: MCUTIL is 14%, above 10%; another program may be using the device.",
    "MCUTIL > 10 %",
    "GPU 0 is in use",
    "The GPU is currently in use by pid 4711",
    "GPU 0 is busy",
    "Another process is using the GPU",
    "Other CUDA processes run on the GPU",
    "device is being used",
    "Detected 3 processes running on the GPU",
    "GPU 0 has 2 active compute processes",
    "Memory utilization of GPU 0 is above 10 % before the test began",
    "The GPU is used by another user",
    "Another diag instance is running",
]
BROKEN = [
    "GPU 0 used more power than its limit",
    "GPU 0 failed: verify that no other process runs",
    "A row remap failed",
    "ECC errors in use of memory",
    "Unused GPU 0",
    "the bus is busy",
    "2 processes of the test ended with an error",
    "the utilization that the test reached is below 90 %",
]


@pytest.mark.parametrize("text", BUSY)
@pytest.mark.parametrize("word", ["Fail", "Warn"])
def test_a_gpu_that_was_in_use_is_not_broken(text: str, word: str) -> None:
    """Measured beside something: an error with the next step, and no advice to reset anything."""
    found = judge(report([entity(0, word, warning(text, severity=6)), entity(1)]))
    assert (found.judged, found.facts, found.advice) == (None, (), None)
    (doubt,) = found.doubts
    assert "GPU not idle: memory, GPU 0" in doubt
    assert "free the GPU and run the diagnostic again" in doubt
    assert found.unknown_kind == "software"
    assert judge(report([entity(0, word, warning(text, severity=6)), entity(1)]), gpu=1).doubts == ()


@pytest.mark.parametrize("text", BROKEN)
def test_a_fault_beside_another_program_stays_a_fault(text: str) -> None:
    """By itself, and in one result with a word about another program."""
    alone = judge(report([entity(0, "Fail", warning(text)), entity(1)]))
    both = judge(report([entity(0, "Fail", warning(text), warning(BUSY[0])), entity(1)]))
    assert (alone.judged, alone.kind, both.judged, both.doubts) == (1, "gpu", 1, ())


@pytest.mark.parametrize("name", ["GPU 1", "gpu 1", "GPU #1", "GPU ID 1", "GPU: 1", "Gpu id: 1"])
def test_the_ways_to_name_a_gpu_in_a_text(name: str) -> None:
    """Its own fault, and no other GPU's."""
    made = report_3([0, 1], host={"Page Retirement/Row Remap": {"status": "Fail", "warnings": f"{name} has an ECC fault"}})
    assert [len(judge(made, kind="software", gpu=gpu).facts) for gpu in (0, 1)] == [0, 1]


@pytest.mark.parametrize("name", ["GPU-1f2e3d4c", "2 GPUs of 1 host", "GPU memory 1", "GPU1fabric"])
def test_a_text_that_names_no_number_of_a_gpu(name: str) -> None:
    """It is about the host: every GPU of it."""
    made = report_3([0, 1], host={"Page Retirement/Row Remap": {"status": "Fail", "warnings": f"{name} has an ECC fault"}})
    assert [len(judge(made, kind="software", gpu=gpu).facts) for gpu in (0, 1)] == [1, 1]


def test_a_gpu_that_a_text_of_the_host_names() -> None:
    """A failure without a number whose text says GPU 1: that GPU's; of the other one DCGM said nothing."""
    fault = {"status": "Fail", "warnings": [{"warning": "GPU 1 has an ECC fault", "error_severity": 6}]}
    for host in ({"Page Retirement/Row Remap": fault}, {"Page Retirement/Row Remap": {**fault, "warnings": "GPU 1 is bad"}}):
        made = report_3([0, 1], host=host)
        assert len(judge(made, kind="software", gpu=1).facts) == 1
        assert judge(made, kind="software", gpu=0).facts == ()
        assert judge(made, kind="software", gpu=0).doubts == ("DCGM 3.3.9: Page Retirement/Row Remap: no result for GPU 0",)
    unnamed = {**fault, "warnings": [*fault["warnings"], {"warning": "the driver is of another version"}]}
    mixed = report_3([0, 1], host={"Page Retirement/Row Remap": unnamed})
    assert [len(judge(mixed, kind="software", gpu=gpu).facts) for gpu in (0, 1)] == [1, 1]


def test_a_doubt_about_the_report() -> None:
    """What passed is not believed; what failed stays failed."""
    made = report([entity(0), entity(1, "Fail")])
    assert judge(made, doubt="exit code 3").doubts == ("DCGM 4.2.3: exit code 3",)
    assert judge(made, gpu=1, doubt="exit code 3").facts == ("memory, GPU 1: Fail",)


def test_foreign_text_is_one_short_line() -> None:
    """Whatever DCGM writes."""
    (text,) = judge(report([entity(0, "Fail", warning("\x1b[31mred\n" + "x" * 10 * LONGEST))])).facts
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 2 * LONGEST


# The long diagnostics of a soak.


def test_a_long_diagnostic_that_finds_nothing() -> None:
    """All tests of all GPUs; what was skipped is told with DCGM's reason, and is no doubt."""
    found = judge_whole_diag(diag_of(HEALTHY))
    assert (found.count, found.doubts, found.remark) == (0, (), None)
    skips = report([entity(0), entity(1)], eud=[entity(0, "Skip", info=["needs root"]), entity(1, "Skip", info=["needs root"])])
    found = judge_whole_diag(diag_of(skips))
    assert (found.count, found.doubts) == (0, ())
    assert found.remark == "DCGM 4.2.3 -r 2 skipped: eud (needs root)"


def test_a_long_diagnostic_that_finds_a_fault() -> None:
    """Each failure once, with the urgent advice."""
    made = report([entity(0), entity(1, "Fail", warning("A row remap failed", severity=6))])
    found = judge_whole_diag(diag_of(made))
    assert found.facts == ("memory, GPU 1: Fail: A row remap failed",)
    assert found.advice == "drain the node and reset the GPU (DCGM: reset)"


@pytest.mark.parametrize(
    ("memory", "doubt", "said"),
    [
        ([entity(0), entity(1, "Not Run")], "", "memory, GPU 1: Not Run"),
        ([entity(0), entity(1)], "exit code 3", "exit code 3"),
        ([entity(0), entity(1, "Fail", warning("GPU is in use by another process"))], "", "GPU not idle"),
    ],
)
def test_a_long_diagnostic_that_cannot_tell(memory: list[Json], doubt: str, said: str) -> None:
    """Never a pass."""
    found = judge_whole_diag(diag_of(report(memory), *filter(None, [doubt])))
    assert found.count == 0
    assert any(said in text for text in found.doubts)


def test_a_gpu_on_which_nothing_passed() -> None:
    """Skipped throughout, or not in the report; a CPU that passed is no GPU."""
    made = report_4(memory=[entity(0), entity(1, "Skip")], cpu_eud=[{"entity_group": "CPU", "entity_id": 0, "status": "Pass"}])
    found = judge_whole_diag(diag_of(made))
    assert [text for text in found.doubts if "no test passed on GPU 1" in text]
    assert not [text for text in found.doubts if "on GPU 0" in text]
    nobody = dataclasses.replace(diag_of(HEALTHY), gpus=[])
    assert any("none of the GPUs of this run" in text for text in judge_whole_diag(nobody).doubts)


def test_software_alone_is_no_diagnostic_of_a_gpu() -> None:
    """Its checks pass on every GPU, also where all that loads a GPU was skipped."""
    skipped = [entity(0, "Skip", info=["needs root"]), entity(1, "Skip", info=["needs root"])]
    made = report_4(software=[entity(0), entity(1)], memory=skipped, pcie=skipped)
    found = judge_whole_diag(diag_of(made))
    told = [text.partition(": ")[2] for text in found.doubts]
    assert [text for text in told if text.startswith("no test passed on GPU")] == [
        "no test passed on GPU 0 but of its software",
        "no test passed on GPU 1 but of its software",
    ]


@pytest.mark.parametrize(
    ("number", "left_s", "level"),
    [(1, 28800, 3), (1, 1200, 3), (1, 1199, None), (2, 28000, 4), (2, 7199, None), (3, 28000, None)],
)
def test_the_level_of_a_round(number: int, left_s: float, level: int | None) -> None:
    """Each once, the shorter one first, where the soak has the time."""
    assert level_of_round(number, {"r4": 7200, "r3": 1200}, left_s=left_s) == level
