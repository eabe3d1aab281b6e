"""NVML as the inventory reads it: the real binding over the simulated library, in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pynvml
import pytest
import torch

from pytest_gpucluster.inventory import detect, gpu_index, nvml, nvml_calls
from pytest_gpucluster.inventory.nvlinks import GENERATION_5
from pytest_gpucluster.inventory.reading import healthy as healthy_of
from pytest_gpucluster.inventory.telemetry import Sampler
from tests.support import REPOSITORY
from tests.support.nvml_simulator import (
    LIBRARY,
    SOURCE,
    Readers,
    build,
    environment,
    getters,
    healthy_answers,
    plant,
    readers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDS_NOTHING = {
    "recovery_action": "none",
    "channel_repair_pending": False,
    "tpc_repair_pending": False,
    "memory_unrepairable": False,
    "sram_threshold_exceeded": False,
}
NO_RATES = {
    name: {"why": f"Not Supported (nvmlDeviceGetFieldValues, field {number})"}
    for name, number in (("effective_ber", 220), ("symbol_ber", 222))
}
"""Links of Hopper tell no bit error rates."""
SPARE_ROWS = {"max": 2560, "high": 0, "partial": 0, "low": 0, "none": 0}
NEVER_THROTTLED = {"power": 0.0, "heat": 0.0, "sync boost": 0.0, "board": 0.0, "reliability": 0.0}
UNKNOWN_HEALTH = {"why": "its summary is 4 and its mask 0x0: not known here"}
JOINED: dict[str, Any] = {
    "state": "completed",
    "error": None,
    "cluster_uuid": "00000000-0000-0000-0000-000000000000",
    "clique": 0,
    "troubles": [],
}
NEITHER = {"why": "2 is neither yes nor no"}
"""Of a flag for which NVML answers 2."""
UUIDS = [f"GPU-{index:08x}-0000-0000-0000-{index:012x}" for index in range(8)]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the simulated library."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def simulated(simulator: Path) -> Iterator[Readers]:
    """One process that reads all scenarios; what ends or hangs a process has one of its own."""
    with readers(simulator) as started:
        yield started


@pytest.fixture(scope="module")
def healthy(simulated: Readers) -> list[dict[str, Any]]:
    """Eight healthy GPUs."""
    found: list[dict[str, Any]] = simulated.survey()["gpus"]
    return found


def run_python(arguments: list[str], environment: dict[str, str]) -> Any:
    """The JSON on the last line that a Python process prints in this environment."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def survey_as_command(folder: Path) -> dict[str, Any]:
    """What the inventory prints as a program."""
    answer = run_python(["-m", "pytest_gpucluster.inventory.detect"], environment(folder))
    assert isinstance(answer, dict)
    return answer


def refused(call: str) -> dict[str, str]:
    """What stands for a value that NVML does not give."""
    return {"why": f"Not Supported ({call})"}


def test_healthy_node(simulator: Path) -> None:
    """Eight GPUs, in PCI order, with everything a health criterion reads."""
    answer = survey_as_command(simulator)
    assert (answer["status"], answer["error"], len(answer["gpus"])) == ("ok", None, 8)
    gpu = answer["gpus"][3]
    assert gpu["uuid"] == UUIDS[3]
    assert (gpu["index"], gpu["cuda_index"], gpu["visible"]) == (3, 3, True)
    assert (gpu["name"], gpu["driver"], gpu["serial"]) == ("NVIDIA H200", "570.133.20", "1654024000003")
    assert gpu["pci"] == "00000000:61:00.0"
    assert gpu["memory_gib"] == pytest.approx(140.4, abs=0.01)
    assert (gpu["ecc_enabled"], gpu["mig"], gpu["persistence"]) == (True, False, True)
    assert (gpu["ecc_uncorrected_volatile"], gpu["ecc_uncorrected_aggregate"]) == (0, 0)
    assert (gpu["pcie_gen"], gpu["pcie_width"]) == (5, 16)
    assert gpu["nvlinks"] == [{"link": link, "is_up": True, "speed_gb_s": 26.562, **NO_RATES} for link in range(18)]
    assert (gpu["sm_clock_mhz"], gpu["temperature_c"], gpu["power_w"]) == (1980, 41, 115.2)
    assert gpu["clocks_event_reasons"] == []
    assert (gpu["board_part_number"], gpu["compute_mode"]) == ("692-2G520-0282-001", "default")
    assert (gpu["memory_temperature_c"], gpu["repair"]) == (42, NEEDS_NOTHING)
    assert (gpu["nvlink_peer"], gpu["fabric"]) == ("switch", JOINED)
    assert (gpu["spare_row_banks"], gpu["throttled_s"]) == (SPARE_ROWS, NEVER_THROTTLED)


def test_simulated_gpus_are_healthy_by_the_table(simulated: Readers, healthy: list[dict[str, Any]]) -> None:
    """What the table says of a healthy GPU, the simulator answers to the readers, in every field; so do the counters."""
    of_table = healthy_of(nvml.GpuState, index=0, cuda_index=0, visible=True)
    assert healthy[0] == dataclasses.asdict(of_table)
    assert simulated.answer(COUNTERS)[0] == dataclasses.asdict(healthy_of(nvml.GpuCounters))


def test_a_call_that_the_simulator_lacks_is_made_for_it() -> None:
    """A row with a new call that gives one number needs no line of C; texts, and calls that are there, are left alone."""
    source, known = SOURCE.read_text(encoding="utf-8"), healthy_answers()
    new = {"nvmlDeviceGetNew": 3, "nvmlDeviceGetNewText": "x", "field.999": 1}
    added = getters({**known, **new}, source).removeprefix(getters(known, source))
    assert added == 'GETTER(nvmlDeviceGetNew, unsigned, "nvmlDeviceGetNew")\n'


@pytest.mark.parametrize(
    ("scenario", "gpu", "field", "value"),
    [
        ("3.ecc.unc.vol 2", 3, "ecc_uncorrected_volatile", 2),
        ("3.ecc.unc.agg 4", 3, "ecc_uncorrected_aggregate", 4),
        ("3.ecc.unc.vol -1", 3, "ecc_uncorrected_volatile", {"why": "NVML answers -1, its word for no value"}),
        ("3.ecc.unc.agg -1", 3, "ecc_uncorrected_aggregate", {"why": "NVML answers -1, its word for no value"}),
        ("0.ecc 0", 0, "ecc_enabled", False),
        ("5.remap.failed 1", 5, "remapped_rows_failed", True),
        ("5.remap.pending 1", 5, "remapped_rows_pending", True),
        ("5.spare.max 2559\n5.spare.none 1", 5, "spare_row_banks", {**SPARE_ROWS, "max": 2559, "none": 1}),
        ("5.spare.high 3", 5, "spare_row_banks", {**SPARE_ROWS, "high": 3}),
        ("5.violation.0 2500000000", 5, "throttled_s", {**NEVER_THROTTLED, "power": 2.5}),
        ("5.violation.1 1000000", 5, "throttled_s", {**NEVER_THROTTLED, "heat": 0.001}),
        ("5.err.nvmlDeviceGetRowRemapperHistogram 3", 5, "spare_row_banks", refused("nvmlDeviceGetRowRemapperHistogram")),
        ("5.err.nvmlDeviceGetViolationStatus 3", 5, "throttled_s", refused("nvmlDeviceGetViolationStatus")),
        ("4.throttle 0x44", 4, "clocks_event_reasons", ["sw_power_cap", "hw_thermal_slowdown"]),
        ("6.pcie.width 8", 6, "pcie_width", 8),
        ("1.mig 1", 1, "mig", True),
        ("1.persistence 0", 1, "persistence", False),
        ("1.compute.mode 3", 1, "compute_mode", "exclusive_process"),
        ("1.compute.mode 7", 1, "compute_mode", {"why": "compute mode 7 is not known"}),
        ("1.mig 2", 1, "mig", NEITHER),
        ("1.persistence 2", 1, "persistence", NEITHER),
        ("0.ecc 2", 0, "ecc_enabled", NEITHER),
        ("5.remap.failed 2", 5, "remapped_rows_failed", NEITHER),
        ("5.remap.pending 2", 5, "remapped_rows_pending", NEITHER),
        ("2.repair.channel 2", 2, "repair", {**NEEDS_NOTHING, "channel_repair_pending": NEITHER}),
        ("2.repair.tpc 2", 2, "repair", {**NEEDS_NOTHING, "tpc_repair_pending": NEITHER}),
        ("2.unrepairable 2", 2, "repair", {**NEEDS_NOTHING, "memory_unrepairable": NEITHER}),
        ("2.sram.threshold 2", 2, "repair", {**NEEDS_NOTHING, "sram_threshold_exceeded": NEITHER}),
        ("6.nvlink.end 255", 6, "nvlink_peer", {"why": "what NVLinks end at: 255 is not known"}),
        ("6.fabric.summary 4", 6, "fabric", {**JOINED, "troubles": UNKNOWN_HEALTH}),
        ("4.part 692-2G520-0000-000", 4, "board_part_number", "692-2G520-0000-000"),
        ("4.module 11", 4, "module_id", 11),
        ("4.platform 1821924190012 3 2 1", 4, "platform", {"chassis_serial": "1821924190012", "slot": 3, "tray": 2, "host": 1}),
        ("4.power.limit_mw 500000", 4, "power_limit_w", 500.0),
        (
            "4.power.limit_mw 4294967295",
            4,
            "power_limit_w",
            {"why": "NVML answers -1, its word for no value"},
        ),
        ("4.power.default_mw 600000", 4, "power_limit_default_w", 600.0),
        ("4.temp.mem 95", 4, "memory_temperature_c", 95),
        ("6.nvlink.end 0", 6, "nvlink_peer", "gpu"),
        ("6.fabric.state 2", 6, "fabric", {**JOINED, "state": "in_progress"}),
        ("6.fabric.state 9", 6, "fabric", {"why": "its state 9 is not known"}),
        ("6.fabric.status 10", 6, "fabric", {**JOINED, "error": "Timeout"}),
        ("6.fabric.clique 4", 6, "fabric", {**JOINED, "clique": 4}),
        ("6.fabric.cluster 0xab", 6, "fabric", {**JOINED, "cluster_uuid": "ab000000-0000-0000-0000-000000000000"}),
        ("6.fabric.health 0x1", 6, "fabric", {**JOINED, "troubles": ["degraded bandwidth"]}),
        ("6.fabric.health 0x10", 6, "fabric", {**JOINED, "troubles": ["route unhealthy"]}),
        ("6.fabric.health 0x500", 6, "fabric", {**JOINED, "troubles": ["insufficient NVLinks"]}),
        ("6.fabric.health 0xf00", 6, "fabric", {**JOINED, "troubles": ["incorrect configuration 15"]}),
        ("6.fabric.health 0x2000", 6, "fabric", {**JOINED, "troubles": ["no partition assigned"]}),
        ("6.fabric.summary 2", 6, "fabric", {**JOINED, "troubles": ["unhealthy"]}),
        ("2.recovery 1", 2, "repair", {**NEEDS_NOTHING, "recovery_action": "gpu_reset"}),
        ("2.recovery 42", 2, "repair", {**NEEDS_NOTHING, "recovery_action": "unknown_42"}),
        ("2.repair.channel 1", 2, "repair", {**NEEDS_NOTHING, "channel_repair_pending": True}),
        ("2.repair.tpc 1", 2, "repair", {**NEEDS_NOTHING, "tpc_repair_pending": True}),
        ("2.unrepairable 1", 2, "repair", {**NEEDS_NOTHING, "memory_unrepairable": True}),
        ("2.sram.threshold 1", 2, "repair", {**NEEDS_NOTHING, "sram_threshold_exceeded": True}),
        ("7.serial none of ours", 7, "serial", "none of ours"),
    ],
)
def test_fault_is_read_on_the_right_gpu(simulated: Readers, scenario: str, gpu: int, field: str, value: object) -> None:
    """Each planted fault shows in its field, on its GPU and on no other."""
    gpus = simulated.survey(scenario)["gpus"]
    assert gpus[gpu][field] == value
    assert all(other[field] != value for other in gpus if other["index"] != gpu)


@pytest.mark.parametrize(
    ("scenario", "seen"),
    [
        ("2.nvlink.4 2", {"link": 4, "is_up": NEITHER, "speed_gb_s": 26.562, **NO_RATES}),
        ("2.nvlink.4 0", {"link": 4, "is_up": False, "speed_gb_s": 26.562, **NO_RATES}),
        ("2.nvlink.4.speed 12500", {"link": 4, "is_up": True, "speed_gb_s": 12.5, **NO_RATES}),
    ],
)
def test_fault_of_one_link_is_read_there(
    simulated: Readers, healthy: list[dict[str, Any]], scenario: str, seen: dict[str, Any]
) -> None:
    """On its GPU and its link; all others stay as they were."""
    gpus = simulated.survey(scenario)["gpus"]
    assert gpus[2]["nvlinks"] == [*healthy[2]["nvlinks"][:4], seen, *healthy[2]["nvlinks"][5:]]
    assert [gpu["nvlinks"] for gpu in gpus if gpu["index"] != 2] == [healthy[0]["nvlinks"]] * 7


FIELDS = {
    82: lambda gpu: gpu["memory_temperature_c"],
    164: lambda gpu: gpu["nvlinks"][17]["speed_gb_s"],
    230: lambda gpu: gpu["repair"]["recovery_action"],
}
"""The reading that each numbered field of NVML gives."""


@pytest.mark.parametrize("field", FIELDS)
def test_no_refused_field_is_silent(simulated: Readers, field: int) -> None:
    """A field that an older driver does not know says so, as any other refusal; a lost GPU is an error."""
    planted = "".join(f"{index}.err.field.{field} {code}\n" for index, code in enumerate(CODES))
    answer = simulated.survey(f"count {len(CODES)}\n{planted}")
    found = {CODES[gpu["index"]]: FIELDS[field](gpu) for gpu in answer["gpus"]}
    assert {2, 3, 4, 13} <= set(found)
    assert all(f"(nvmlDeviceGetFieldValues, field {field})" in value["why"] for value in found.values())
    for index, code in enumerate(CODES):
        assert (code in found) is not (f"GPU {index}: " in answer["error"])


def test_healthy_fabric_of_all_words(simulated: Readers) -> None:
    """A fabric that tells every part of its health, all good, has no trouble; so has a driver that knows an older structure."""
    told = simulated.survey("count 1\nfabric.health 0x51aa\nfabric.summary 1")["gpus"][0]
    older = simulated.survey("count 1\nfabric.version 2\nfabric.clique 3\nfabric.summary 2")["gpus"][0]
    assert (told["fabric"], older["fabric"]) == (JOINED, {**JOINED, "clique": 3})


@pytest.mark.parametrize("function", ["nvmlDeviceGetTemperature", "nvmlDeviceGetHandleByIndex"])
def test_lost_gpu_is_an_error_that_names_it(simulated: Readers, function: str) -> None:
    """The lost GPU is named in NVML's words; the others are still described."""
    answer = simulated.survey(f"2.err.{function} 15")
    assert answer["status"] == "error"
    assert answer["error"].startswith("GPU 2: GPU is lost")
    assert answer["count"] == 8
    assert [gpu["index"] for gpu in answer["gpus"]] == [0, 1, 3, 4, 5, 6, 7]


def test_serial_of_one_gpu(simulated: Readers) -> None:
    """By UUID; None if NVML does not give it, knows no such GPU, or is not there."""
    code = f"from pytest_gpucluster.inventory.identity import read_by_uuid; answer = read_by_uuid({UUIDS[3]!r}).get('serial')"
    serials = [simulated.answer(code, scenario) for scenario in ("", "3.err.nvmlDeviceGetSerial 3", "count 2", "init 9")]
    assert serials == ["1654024000003", None, None, None]


def test_board_of_one_gpu(simulated: Readers) -> None:
    """What a spare-parts desk asks for, as text; what NVML refuses is left out; nothing without such a GPU or a driver."""
    code = (
        f"from pytest_gpucluster.inventory.identity import read_by_uuid; answer = read_by_uuid({UUIDS[3]!r}).get('board', {{}})"
    )
    known = {"part_number": "692-2G520-0282-001", "vbios": "96.00.A5.00.01", "module": "4"}
    rack = {"chassis_serial": "1821924190012", "slot": "3", "tray": "2", "host": "1"}
    boards = [
        simulated.answer(code, scenario)
        for scenario in ("", "3.platform 1821924190012 3 2 1", "3.err.nvmlDeviceGetBoardPartNumber 3", "count 2", "init 9")
    ]
    assert boards == [known, {**known, **rack}, {name: known[name] for name in ("vbios", "module")}, {}, {}]


@pytest.mark.parametrize(
    ("scenario", "fabric"),
    [
        ("", None),
        ("fabric.cluster 0xab\nfabric.clique 3", "ab000000-0000-0000-0000-000000000000/3"),
        ("fabric.cluster 0xab\nfabric.state 2", None),
        ("fabric.cluster 0xab\nerr.nvmlDeviceGetGpuFabricInfoV 3", None),
        ("init 9", None),
    ],
    ids=["HGX", "NVL72", "not joined", "refused", "no driver"],
)
def test_fabric_that_spans_nodes(simulated: Readers, scenario: str, fabric: str | None) -> None:
    """The UUID of the cluster and the clique; none where NVLink ends at the node."""
    code = f"from pytest_gpucluster.inventory.identity import read_by_uuid; answer = read_by_uuid({UUIDS[3]!r}).get('fabric')"
    assert simulated.answer(code, scenario) == fabric


def test_no_chassis_is_no_place_in_a_rack(simulated: Readers) -> None:
    """An H100 and an H200 answer with slot 0 of a chassis without a name: nothing is known. A refusal has NVML's word."""
    named, refused_one = simulated.survey("count 2\n1.err.nvmlDeviceGetPlatformInfo 3")["gpus"]
    assert named["platform"] == {"why": "it names no chassis (nvmlDeviceGetPlatformInfo)"}
    assert refused_one["platform"] == refused("nvmlDeviceGetPlatformInfo")


@pytest.mark.parametrize(("scenario", "cuda"), [("", "12.8"), ("driver.cuda 13010", "13.1")])
def test_newest_cuda_of_the_driver(simulated: Readers, scenario: str, cuda: str) -> None:
    """As nvidia-smi shows it."""
    assert simulated.survey(scenario)["driver_cuda"] == cuda


def test_driver_not_loaded(simulated: Readers) -> None:
    """A driver that does not start is an error, not a machine without GPUs."""
    answer = simulated.survey("init 9")
    assert answer["status"] == "error"
    assert "Driver Not Loaded" in answer["error"]


def test_missing_gpu(simulated: Readers) -> None:
    """Seven GPUs are seven, without an error: only the expected inventory knows that one is missing."""
    answer = simulated.survey("count 7")
    assert (answer["status"], len(answer["gpus"])) == ("ok", 7)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "file too short"),
        (b"\x7fELF", "file too short"),
        (b"no library at all\n" * 64, "invalid ELF header"),
        (b"\x7fELF\x02\x01\x01" + bytes(4096), "ELF file"),
    ],
)
def test_a_library_that_does_not_load_is_not_a_missing_one(content: bytes, why: str, tmp_path: Path) -> None:
    """A mount that is half done, a file of another kind: an error with the loader's words, never a machine without GPUs."""
    (tmp_path / LIBRARY).write_bytes(content)
    answer = survey_as_command(tmp_path)
    assert (answer["status"], answer["gpus"]) == ("error", [])
    assert f"{tmp_path / LIBRARY}: " in answer["error"]
    assert why in answer["error"]


def test_a_link_to_a_library_that_is_not_there(tmp_path: Path) -> None:
    """A mount that took the link along and not its file: the loader says what it says of a machine without a driver."""
    (tmp_path / LIBRARY).symlink_to("libnvidia-ml.so.570.133.20")
    answer = survey_as_command(tmp_path)
    assert (answer["status"], answer["gpus"]) == ("error", [])
    assert answer["error"].startswith(f"{tmp_path / LIBRARY} is a link to libnvidia-ml.so.570.133.20, which is not there")


def test_a_library_that_lacks_another_one(simulated: Readers) -> None:
    """NVML's own "not found" is about what it needs: the driver's library is there."""
    answer = simulated.survey(f"init {pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}")
    assert (answer["status"], answer["error"]) == ("error", f"{LIBRARY} does not find a library that it needs (nvmlInit)")


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed at all is a status of its own."""

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    monkeypatch.setattr(nvml_calls, "LIBRARY", "libnvidia-ml-of-no-machine.so.1")
    answer = detect.survey()
    assert (answer["status"], answer["gpus"]) == ("no_library", [])
    assert "Not Found" in answer["error"]


def test_value_the_gpu_does_not_give_says_why(simulated: Readers) -> None:
    """Not supported (3), no permission (4) and an unknown function (13) give NVML's word, never 0."""
    answer = simulated.survey(
        "0.err.nvmlDeviceGetTotalEccErrors 3\n0.err.nvmlDeviceGetSerial 4\n0.err.nvmlDeviceGetMigMode 13\n"
        "0.err.nvmlDeviceGetNvLinkState 3\n0.err.nvmlDeviceGetCurrentClocksEventReasons 13\n0.throttle 0x4",
    )
    gpu = answer["gpus"][0]
    assert answer["status"] == "ok"
    assert gpu["ecc_uncorrected_volatile"] == {"why": "Not Supported (nvmlDeviceGetTotalEccErrors)"}
    assert gpu["serial"] == {"why": "Insufficient Permissions (nvmlDeviceGetSerial)"}
    assert gpu["mig"] == {"why": "Function Not Found (nvmlDeviceGetMigMode)"}
    assert gpu["nvlinks"] == {"why": "Not Supported (nvmlDeviceGetNvLinkState)"}
    assert gpu["clocks_event_reasons"] == ["sw_power_cap"]  # read under the name older drivers know


@pytest.mark.parametrize(("variables", "hidden"), [({}, 0), ({"CUDA_VISIBLE_DEVICES": "5,1"}, 6)])
def test_hidden_gpus_are_counted(simulator: Path, variables: dict[str, str], hidden: int) -> None:
    """So that a verdict over the others can say so."""
    code = "from pytest_gpucluster.inventory.detect import detect_gpus as d; f = d(); print([f.num_gpus, f.num_hidden])"
    assert run_python(["-c", code], {**environment(simulator), **variables}) == [8 - hidden, hidden]


def test_visible_devices_are_flagged(simulated: Readers) -> None:
    """Hidden GPUs are listed and marked; CUDA's own numbering follows the variable's order."""
    gpus = simulated.survey(CUDA_VISIBLE_DEVICES="5,1")["gpus"]
    assert [gpu["cuda_index"] for gpu in gpus] == [None, 1, None, None, None, 0, None, None]
    assert [gpu["visible"] for gpu in gpus].count(True) == 2


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("2,9,0", [2]),
        ("1,1", []),
        ("GPU-00000006-0000,GPU-00000001", [6, 1]),
        ("GPU-0000000", []),
        ("MIG-00000001-0000", []),
    ],
)
def test_visible_gpus_as_cuda_reads_them(setting: str | None, shown: list[int]) -> None:
    """The list ends at its first invalid entry; a repeated entry shows none; an ambiguous UUID is invalid."""
    assert gpu_index.visible_gpus(UUIDS, setting) == shown


def test_reading_needs_no_torch(simulator: Path) -> None:
    """The controller reads GPUs before it starts anything: loading torch would take seconds."""
    program = (
        "import json, sys; from pytest_gpucluster.inventory import detect;"
        "detect.survey(); print(json.dumps('torch' in sys.modules))"
    )
    assert run_python(["-c", program], environment(simulator)) is False


def test_event_reasons_and_which_are_faults() -> None:
    """Power capping and idling are normal; slowdowns and the power brake are not; unknown bits are shown."""
    assert nvml.event_reason_names(0) == []
    names = nvml.event_reason_names(0x1 | 0x4 | 0x8 | 0x20 | 0x40 | 0x80 | 0x4000)
    assert names[-1] == "unknown_0x4000"
    faults = ["hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"]
    assert nvml.fault_reasons(names) == faults
    assert nvml.fault_reasons(["gpu_idle", "sw_power_cap", "applications_clocks_setting", "sync_boost"]) == []


SAMPLING = """
import dataclasses, json, sys, time
from pytest_gpucluster.inventory import telemetry
from pytest_gpucluster.inventory.telemetry import Sampler
telemetry.SILENT_S = telemetry.JOIN_S = float(sys.argv[2])
with Sampler(sys.argv[1], interval_s=0.02) as sampler:
    for command in sys.stdin:
        if command == "window\\n":
            since = time.monotonic()
        wanted = len(sampler._samples) + 2
        while len(sampler._samples) < wanted and sampler.error is None:
            sampler.summary()  # notices a driver that hangs
            time.sleep(0.01)
        print("sampled", flush=True)
    summary = sampler.summary(since_s=since)
print(json.dumps([summary and dataclasses.asdict(summary), sampler.error]))
"""


def sample(environment: dict[str, str], before: str, after: str, *, silent_s: float = 5.0) -> Any:
    """Summary and error of a sampler of GPU 4; in its window the scenario ``before`` is followed by ``after``."""
    watching = subprocess.Popen(
        [sys.executable, "-c", SAMPLING, UUIDS[4], str(silent_s)],
        env=environment,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with watching:
        assert watching.stdin is not None
        assert watching.stdout is not None

        def wait_for_samples(command: str) -> None:
            watching.stdin.write(f"{command}\n")
            watching.stdin.flush()
            assert watching.stdout.readline() == "sampled\n"

        wait_for_samples("sample")
        plant(environment, before)
        wait_for_samples("sample")
        wait_for_samples("window")
        plant(environment, after)
        wait_for_samples("sample")
        watching.stdin.close()
        return json.loads(watching.stdout.readline())


def test_sampler_keeps_a_short_fault_and_the_window_s_clocks(simulator: Path) -> None:
    """Event reasons are the union over everything seen; clocks are of the asked window."""
    hot = "4.throttle 0x40\n4.clock.sm 345\n4.temp 91\n"
    busy = "4.throttle 0x4\n4.clock.sm 1485\npower_mw 691000"
    summary, error = sample(environment(simulator, "throttle 4"), hot, busy)
    assert error is None
    assert summary["event_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert summary["fault_reasons"] == ["hw_thermal_slowdown"]
    assert summary["sm_clock_max_mhz"] == 1485
    assert summary["sm_clock_min_mhz"] == 345  # the window opened while the GPU was hot
    assert summary["temperature_max_c"] == 91
    assert summary["power_max_w"] == 691
    assert (summary["pcie_gen_max"], summary["pcie_width_min"]) == (5, 16)
    assert summary["samples"] >= 2


def test_sampler_survives_a_gpu_that_gets_lost(simulator: Path) -> None:
    """The samples so far stay, and the error is kept; nothing is raised."""
    summary, error = sample(environment(simulator), "4.err 15", "4.err 15")
    assert summary["sm_clock_max_mhz"] == 1980
    assert "GPU is lost" in error
    assert "GPU is lost" in summary["fault_reasons"]["why"]  # what came after the last sample is not known to be good


@pytest.mark.parametrize(("code", "word"), [(3, "Not Supported"), (4, "Insufficient Permissions")])
def test_refused_event_reasons_are_no_health(simulator: Path, code: int, word: str) -> None:
    """A slowdown that NVML does not tell of is not the same as none."""
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    refused = "\n".join(f"4.err.{name} {code}" for name in names)
    summary, error = sample(environment(simulator, refused), refused, refused)
    assert error is None
    assert word in summary["fault_reasons"]["why"]
    assert word in summary["event_reasons"]["why"]
    assert summary["sm_clock_max_mhz"] == 1980


def test_driver_that_hangs_half_way_is_no_health(simulator: Path) -> None:
    """NVML that stops answering raises nothing; the sampler notices."""
    hung = "4.delay_ms.nvmlDeviceGetClockInfo 600000"
    summary, error = sample(environment(simulator), hung, hung, silent_s=0.5)
    assert "NVML has not answered for" in error
    assert "NVML has not answered for" in summary["fault_reasons"]["why"]


def test_sampler_of_nothing_says_nothing(simulator: Path) -> None:
    """No GPU, an unknown GPU or no NVML: the summary is None, never an exception."""
    with Sampler(None) as sampler:
        assert sampler.summary() is None
    summary, error = sample(environment(simulator, "count 2"), "count 2", "count 2")
    assert summary is None
    assert UUIDS[4] in error


HEALTH = """
import dataclasses, json, os, sys
from pathlib import Path
from pytest_gpucluster.inventory import nvml_calls
from pytest_gpucluster.measurements import health
answers = []
for variables, scenario in json.loads(sys.argv[1]):
    os.environ.update(variables)
    Path(os.environ["FAKE_NVML"]).write_text(scenario)
    try:
        answers.append(dataclasses.asdict(health.gpu_state()))
    except nvml_calls.NvmlError as error:
        answers.append({"raised": type(error).__name__, "text": str(error)})
print(json.dumps(answers))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees real GPUs, which the simulator does not know")
def test_own_gpu_where_torch_sees_none(simulator: Path) -> None:
    """Without torch's word, LOCAL_RANK counts through what CUDA should show; lost or absent GPUs are errors."""
    cases = [
        ({"LOCAL_RANK": "2"}, "2.err 15"),
        ({"LOCAL_RANK": "7"}, "count 7"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "6,4"}, ""),
    ]
    lost, absent, hidden = run_python(["-c", HEALTH, json.dumps(cases)], environment(simulator))
    assert (lost["lost"], lost["nvml_device_count"]) == (True, 8)
    assert "GPU 2: GPU is lost" in lost["gpu"]["why"]
    assert "LOCAL_RANK 7 has no GPU" in absent["gpu"]["why"]
    assert hidden["gpu"]["index"] == 4
    assert (len(hidden["nvml_pci"]), hidden["nvml_pci"][4]) == (8, hidden["gpu"]["pci"])
    assert {*hidden["nvml_pci"]} - {*lost["nvml_pci"]} <= {hidden["nvml_pci"][2]}
    assert (hidden["torch_sees"], hidden["torch_device_count"], hidden["nvml_device_count"]) == (False, 0, 8)


READERS = (
    "nvmlDeviceGetSerial", "nvmlDeviceGetVbiosVersion", "nvmlDeviceGetMigMode", "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetBoardPartNumber",
    "nvmlDeviceGetComputeMode", "nvmlDeviceGetModuleId", "nvmlDeviceGetRepairStatus", "nvmlDeviceGetUnrepairableMemoryFlag_v1",
    "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetNvLinkRemoteDeviceType",
)  # fmt: skip
FATAL = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetName",
)
CODES = (1, 2, 3, 4, 6, 9, 13, 14, 15, 16, 18, 20, 21, 23, 25, 999)
"""Of NVML's return codes all that a query of one GPU may give; 15 is GPU_IS_LOST, 999 UNKNOWN."""


def readings(gpu: dict[str, Any]) -> dict[str, Any]:
    """Every reading of a GPU by name, those of its links and repairs too."""
    links = gpu["nvlinks"] if isinstance(gpu["nvlinks"], list) else []
    of_links = {f"link {link['link']} {name}": value for link in links for name, value in link.items()}
    nvlinks = len(links) if links else gpu["nvlinks"]
    return {**of_links, **gpu, **gpu["repair"], "repair": None, "nvlinks": nvlinks}


@pytest.fixture(scope="module")
def sixteen_healthy(simulated: Readers) -> list[dict[str, Any]]:
    """A healthy GPU for each of NVML's codes."""
    found: list[dict[str, Any]] = simulated.survey(f"count {len(CODES)}")["gpus"]
    return found


@pytest.mark.parametrize("function", [*READERS, *FATAL])
def test_no_error_of_a_reader_is_silent(simulated: Readers, sixteen_healthy: list[dict[str, Any]], function: str) -> None:
    """Every reader refused with every error: the field says why in NVML's words, or the GPU is an error; never 0 or None."""
    assert len(sixteen_healthy) == len(CODES)
    planted = "".join(f"{index}.err.{function} {code}\n" for index, code in enumerate(CODES))
    if function == "nvmlDeviceGetCurrentClocksEventReasons":  # older drivers know it under another name
        planted += "".join(
            f"{index}.err.nvmlDeviceGetCurrentClocksThrottleReasons {code}\n" for index, code in enumerate(CODES)
        )
    answer = simulated.survey(f"count {len(CODES)}\n{planted}")
    found = {gpu["index"]: gpu for gpu in answer["gpus"]}
    for index, code in enumerate(CODES):
        if index not in found:
            assert f"GPU {index}: " in answer["error"], (function, code)
            continue
        before = sixteen_healthy[index]
        changed = [value for field, value in readings(found[index]).items() if value != readings(before)[field]]
        is_last_link = function == "nvmlDeviceGetNvLinkState" and code == 2  # how NVML says that there are no more links
        assert changed, (function, code)
        for value in changed:
            assert isinstance(value, dict), (function, code, value)
            assert function in value["why"] or is_last_link, (function, code, value)


COUNTERS = """
import dataclasses
from pytest_gpucluster.inventory import nvml_calls
from pytest_gpucluster.inventory.nvml import read_counters
import pynvml
with nvml_calls.session():
    answer = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            answer.append(dataclasses.asdict(read_counters(pynvml.nvmlDeviceGetHandleByIndex(index))))
        except nvml_calls.NvmlError as error:
            answer.append({"raised": str(error)})
"""


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetTotalEccErrors", {"ecc_corrected", "ecc_uncorrected", "ecc_uncorrected_aggregate"}),
        ("nvmlDeviceGetPcieReplayCounter", {"pcie_replays"}),
        ("nvmlDeviceGetNvLinkState", {"nvlinks"}),
        ("nvmlDeviceGetNvLinkErrorCounter", {"nvlinks"}),
    ],
)
def test_no_error_of_a_counter_is_silent(simulated: Readers, function: str, fields: set[str]) -> None:
    """Every counter refused with every error: it says why in NVML's words, or the GPU is an error; never 0."""
    scenario = f"count {len(CODES)}\n" + "".join(f"{index}.err.{function} {code}\n" for index, code in enumerate(CODES))
    healthy = simulated.answer(COUNTERS, "count 1")[0]
    assert [link["recoveries"] for link in healthy["nvlinks"]] == [0] * 18
    for code, found in zip(CODES, simulated.answer(COUNTERS, scenario), strict=True):
        if "raised" in found:
            assert function in found["raised"], code
            continue
        assert {name for name, value in found.items() if value != healthy[name]} == fields, code
        for value in (found[name] for name in fields):
            refused = value[3]["recoveries"] if isinstance(value, list) else value
            is_last_link = function == "nvmlDeviceGetNvLinkState" and code == 2
            assert function in refused["why"] or is_last_link, (code, refused)


def test_each_counter_of_a_link(simulated: Readers) -> None:
    """Each planted counter shows in its own field, on its own link."""
    scenario = "count 1\nnvlink.3.replay 1\nnvlink.3.recovery 2\nnvlink.3.crc_flit 3\nnvlink.3.crc_data 4"
    links = simulated.answer(COUNTERS, scenario)[0]["nvlinks"]
    refused = [link.pop("nvlink5") for link in links]
    assert links[3] == {"link": 3, "replays": 1, "recoveries": 2, "crc_flits": 3, "crc_data": 4}
    assert all(set(link.values()) == {0, link["link"]} for link in links if link["link"] != 3)
    assert {text["why"].partition(" (")[0] for text in refused} == {"Not Supported"}


def test_each_counter_of_a_link_of_generation_5(simulated: Readers) -> None:
    """By NVML's numbers of the fields; the links of other GPUs refuse them."""
    planted = "".join(f"nvlink.3.field.{field} {number}\n" for number, field in enumerate(GENERATION_5.values(), start=1))
    links = simulated.answer(COUNTERS, f"count 1\nnvlink5 1\n{planted}")[0]["nvlinks"]
    assert links[3]["nvlink5"] == {name: number for number, name in enumerate(GENERATION_5, start=1)}
    assert links[4]["nvlink5"] == dict.fromkeys(GENERATION_5, 0)


def test_bit_error_rates_of_a_link(simulated: Readers) -> None:
    """Packed as in nvml.h: the exponent in the lowest byte, the mantissa above it."""
    planted = f"nvlink.3.field.220 {3 << 8 | 9}\nnvlink.3.field.222 {15 << 8 | 255}\n"
    states = simulated.survey(f"count 1\nnvlink5 1\n{planted}")["gpus"][0]["nvlinks"]
    assert (states[3]["effective_ber"], states[3]["symbol_ber"]) == (3e-9, 1.5e-254)
    assert states[4]["effective_ber"] == 1.5e-254
