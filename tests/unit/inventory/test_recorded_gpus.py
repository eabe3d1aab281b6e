"""What the readers make of a real H100 and H200: NVML's raw answers, beside what nvidia-smi said at the same moment.

The answers were recorded with nvidia-ml-py 13.615; serials and UUIDs were left out. ``recorded/*.json``: each call's value,
or NVML's error code.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from pytest_gpucluster.health.growth import judge_nvlink_counters, read_limits
from pytest_gpucluster.inventory import nvml
from pytest_gpucluster.inventory.nvlinks import GpuFabric, LinkCounters, NvLink
from pytest_gpucluster.inventory.nvml import GpuCounters, event_reason_names, read_counters
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.finding import HERE
from tests.support.nvml_simulator import Readers, build, readers
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORDED = [
    json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(__file__).with_name("recorded").glob("*.json"))
]
MOMENTS = [
    pytest.param(recorded["driver"], moment, id=f"{recorded['device']}-gpu{moment['gpu']}-{moment['when']}")
    for recorded in RECORDED
    for moment in recorded["moments"]
]
KINDS = {0: "corrected", 1: "uncorrected"}
SINCE = {0: "volatile", 1: "aggregate"}
LINK_ENDS = "nvmlDeviceGetNvLinkRemoteDeviceType"
READ_THEN = 24
"""So many readings at least were recorded and do not vary."""
UUID = "GPU-00000000-0000-0000-0000-000000000000"


def answer(name: str, value: Any) -> Callable[..., Any]:
    """A function of the binding that gives the recorded value, or raises the recorded error."""

    def call(_handle: object, *arguments: Any) -> Any:
        found = value(*arguments) if callable(value) else value
        if isinstance(found, dict) and set(found) == {"code"}:
            raise pynvml.NVMLError(found["code"])
        return found

    call.__name__ = name
    return call


def refused_field(number: int) -> NotAvailable:
    """What the reader makes of a numbered field that NVML does not support."""
    return NotAvailable(f"Not Supported (nvmlDeviceGetFieldValues, field {number})")


def by_link(values: list[Any]) -> Callable[..., Any]:
    """The recorded value of a link (and a counter); NVML refuses a link beyond the last."""

    def of(link: int, *counter: int) -> Any:
        if link >= len(values):
            return {"code": pynvml.NVML_ERROR_INVALID_ARGUMENT}
        return values[link][counter[0]] if counter else values[link]

    return of


def fields_of(recorded: dict[str, Any]) -> Callable[..., Any]:
    """NVML's numbered fields, by scope where there are several."""

    def one(number: int, scope: int) -> Any:
        found = recorded.get(str(number), {"code": pynvml.NVML_ERROR_NOT_SUPPORTED})  # those of generation 5: not recorded
        found = found[scope] if isinstance(found, list) else found
        code = found["code"] if isinstance(found, dict) else pynvml.NVML_SUCCESS
        return SimpleNamespace(fieldId=number, nvmlReturn=code, valueType=1, value=SimpleNamespace(uiVal=found))

    return lambda fields: [one(*field) for field in fields]


def fill_fabric(recorded: dict[str, Any]) -> Callable[..., Any]:
    """Fill the structure that the reader hands over."""

    def fill(reference: Any) -> None:
        info = reference._obj
        info.cluster_uuid[:] = recorded["clusterUuid"]
        info.status, info.clique, info.state = (recorded[name] for name in ("status", "cliqueId", "state"))
        info.health_mask, info.health_summary = recorded["healthMask"], recorded["healthSummary"]

    return fill


def replay(monkeypatch: pytest.MonkeyPatch, driver: str, moment: dict[str, Any]) -> None:
    """Let the binding answer as it did at this moment."""
    calls = moment["calls"]
    simple = {name: value for name, value in calls.items() if "[" not in name}
    made: dict[str, Any] = {
        **simple,
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=calls["nvmlDeviceGetPciInfo"]),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(**calls["nvmlDeviceGetMemoryInfo"]),
        "nvmlDeviceGetUUID": UUID,
        "nvmlDeviceGetSerial": "none recorded",
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetTemperature": calls["nvmlDeviceGetTemperature[0]"],
        "nvmlDeviceGetClockInfo": calls["nvmlDeviceGetClockInfo[1]"],
        "nvmlDeviceGetTotalEccErrors": lambda kind, since: calls[f"nvmlDeviceGetTotalEccErrors[{KINDS[kind]},{SINCE[since]}]"],
        "nvmlDeviceGetGpuFabricInfoV": fill_fabric(calls["nvmlDeviceGetGpuFabricInfoV"]),
        "nvmlDeviceGetNvLinkRemoteDeviceType": by_link(moment["link_ends"]),
        "nvmlDeviceGetSramEccErrorStatus": lambda _status: None,  # not recorded: the structure stays as it is
        "nvmlDeviceGetFieldValues": fields_of(moment["fields"]),
        "nvmlDeviceGetNvLinkState": by_link(moment["links"]),
        "nvmlDeviceGetNvLinkErrorCounter": by_link(moment["link_errors"]),
    }
    for name in {*made} | {name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")}:
        not_recorded = {"code": pynvml.NVML_ERROR_NOT_SUPPORTED}
        monkeypatch.setattr(pynvml, name, answer(name, made.get(name, not_recorded)))
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: driver)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)


def counters_of(driver: str, moment: dict[str, Any]) -> GpuCounters:
    """What the reader makes of a recorded moment."""
    with pytest.MonkeyPatch.context() as patched:
        replay(patched, driver, moment)
        return read_counters("handle")


def number(text: str) -> int:
    """``16x``, ``63 C`` or ``143771 MiB`` as a number."""
    return int("".join(filter(str.isdigit, text)))


@pytest.mark.parametrize(("driver", "moment"), MOMENTS)
def test_state_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, driver: str, moment: dict[str, Any]) -> None:
    """Field by field; temperatures were read a moment apart."""
    replay(monkeypatch, driver, moment)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    state, smi, calls = nvml.read_gpu(0), moment["nvidia_smi"], moment["calls"]
    link = "pci/pci_gpu_link_info"
    assert {
        "product_name": state.name,
        "vbios_version": state.vbios,
        "persistence_mode": "Enabled" if state.persistence is True else "Disabled",
        "mig_mode/current_mig": "Enabled" if state.mig is True else "Disabled",
        "ecc_mode/current_ecc": "Enabled" if state.ecc_enabled is True else "Disabled",
        "pci/pci_bus_id": state.pci,
        "remapped_rows/remapped_row_corr": str(state.remapped_rows_correctable),
        "remapped_rows/remapped_row_unc": str(state.remapped_rows_uncorrectable),
        "remapped_rows/remapped_row_pending": "Yes" if state.remapped_rows_pending is True else "No",
        "remapped_rows/remapped_row_failure": "Yes" if state.remapped_rows_failed is True else "No",
        f"{link}/pcie_gen/current_link_gen": str(state.pcie_gen),
        f"{link}/pcie_gen/max_link_gen": str(state.pcie_gen_max),
        f"{link}/link_widths/current_link_width": f"{state.pcie_width}x",
        f"{link}/link_widths/max_link_width": f"{state.pcie_width_max}x",
        "pci/replay_counter": str(state.pcie_replay_count),
        "board_part_number": state.board_part_number,
        "compute_mode": str(state.compute_mode).capitalize(),
        "gpu_recovery_action": str(state.repair.recovery_action).capitalize(),
        "ecc_errors/channel_repair_pending": "Yes" if state.repair.channel_repair_pending is True else "No",
        "ecc_errors/tpc_repair_pending": "Yes" if state.repair.tpc_repair_pending is True else "No",
        "ecc_errors/unrepairable_memory": "Yes" if state.repair.memory_unrepairable is True else "No",
        "ecc_errors/aggregate/sram_threshold_exceeded": "Yes" if state.repair.sram_threshold_exceeded is True else "No",
    }.items() <= smi.items()
    assert state.driver == driver
    assert number(smi["fb_memory_usage/total"]) == pytest.approx(state.memory_gib * 1024, abs=1)
    assert number(smi["temperature/gpu_temp"]) == pytest.approx(state.temperature_c, abs=5)
    assert number(smi["temperature/memory_temp"]) == pytest.approx(state.memory_temperature_c, abs=5)
    assert state.clocks_event_reasons == event_reason_names(calls["nvmlDeviceGetCurrentClocksEventReasons"])
    assert isinstance(state.fabric, GpuFabric)
    if moment["links"][0] == {"code": pynvml.NVML_ERROR_NOT_SUPPORTED}:
        assert state.nvlinks == NotAvailable("Not Supported (nvmlDeviceGetNvLinkState)")
        assert (state.fabric.state, smi["fabric/state"]) == ("not_supported", "N/A")
    else:
        assert state.nvlink_peer == "switch"
        assert (state.fabric.state.capitalize(), state.fabric.error) == (smi["fabric/state"], None)
        assert (state.fabric.cluster_uuid, str(state.fabric.clique)) == (smi["fabric/clusterUuid"], smi["fabric/cliqueId"])
        assert state.fabric.troubles == []
        refused = {name: refused_field(number) for name, number in (("effective_ber", 220), ("symbol_ber", 222))}
        assert state.nvlinks == [NvLink(link=link, is_up=True, speed_gb_s=26.562, **refused) for link in range(18)]
    assert state.power_w == calls["nvmlDeviceGetPowerUsage"] / 1000


@pytest.mark.parametrize(("driver", "moment"), MOMENTS)
def test_counters_are_what_nvidia_smi_says(driver: str, moment: dict[str, Any]) -> None:
    """The totals of ECC are the sums of device memory and SRAM; each link has its own counters."""
    counters, smi = counters_of(driver, moment), moment["nvidia_smi"]
    corrected = sum(number(smi[f"ecc_errors/volatile/{kind}_correctable"]) for kind in ("dram", "sram"))
    kinds = ("dram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded")
    assert counters.ecc_corrected == corrected
    assert counters.ecc_uncorrected == sum(number(smi[f"ecc_errors/volatile/{kind}"]) for kind in kinds)
    assert counters.pcie_replays == number(smi["pci/replay_counter"])
    if moment["links"][0] == {"code": pynvml.NVML_ERROR_NOT_SUPPORTED}:
        assert counters.nvlinks == NotAvailable("Not Supported (nvmlDeviceGetNvLinkState)")
        return
    assert counters.nvlinks == [
        LinkCounters(
            link=link, replays=replays, recoveries=recoveries, crc_flits=flits, crc_data=data, nvlink5=refused_field(221)
        )
        for link, (replays, recoveries, flits, data, _ecc) in enumerate(moment["link_errors"])
    ]


@pytest.mark.parametrize("gpu", [0, 1])
def test_healthy_links_are_within_the_limits(gpu: int) -> None:
    """From idle, through a load, to afterwards: CRC errors of data grew on every link, and that is healthy."""
    recorded = next(one for one in RECORDED if one["device"] == "h200x2")
    first, last = (counters_of(recorded["driver"], moment) for moment in recorded["moments"] if moment["gpu"] == gpu)
    file = packaged()
    limits = read_limits(file.criteria(file.profiles["h200-sxm"])["nvlink_errors"].recipe["limits"])
    found = judge_nvlink_counters({HERE: (first, last)}, seconds=10.0, limits=limits)
    assert (found.bad, found.unknown) == ({}, {})
    assert found.evidence["within"][0].startswith("crc_data, most on link")


ALONE = "err.nvmlDeviceGetNvLinkState 3\nerr.nvmlDeviceGetNvLinkRemoteDeviceType 3\nfabric.state 0\n"
SCENARIOS = {
    "h200x2": "count 2\n",
    "h100x1": f"count 1\nname NVIDIA H100 80GB HBM3\nmem.total 85520809984\npart 695-2G520-0200-000\n{ALONE}",
}
VARIES = {
    "uuid", "serial", "pci", "driver", "vbios", "module_id", "memory_used_gib", "clocks_event_reasons", "sm_clock_mhz",
    "temperature_c", "memory_temperature_c", "power_w", "index", "cuda_index",
}  # fmt: skip
"""What differs between healthy GPUs of a model, or from one moment to the next."""


def is_recorded(value: Any, moment: dict[str, Any]) -> bool:
    """Whether a reading is not newer than the recordings: then what stands for it is the refusal of another call."""
    refusal = re.search(r"\((nvml\w+)(?:, field (\d+))?\)", value.get("why", "") if isinstance(value, dict) else "")
    calls = {name.partition("[")[0] for name in moment["calls"]} | {"nvmlDeviceGetNvLinkState", LINK_ENDS}
    return refusal is None or (refusal[2] in moment["fields"] if refusal[2] else refusal[1] in calls)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    """One process that reads all scenarios."""
    with readers(build(tmp_path_factory.mktemp("nvml"))) as started:
        yield started


@pytest.mark.parametrize(("driver", "moment"), MOMENTS)
def test_simulated_gpu_answers_as_the_real_one(
    monkeypatch: pytest.MonkeyPatch, simulated: Readers, driver: str, moment: dict[str, Any]
) -> None:
    """Every field that a healthy GPU of this model gives or refuses, with NVML's words; the others are of the same type."""
    device = "h200x2" if moment["calls"]["nvmlDeviceGetName"] == "NVIDIA H200" else "h100x1"
    of_simulator = simulated.survey(SCENARIOS[device])["gpus"][0]
    replay(monkeypatch, driver, moment)
    real = json.loads(json.dumps(dataclasses.asdict(nvml.read_gpu(0))))
    compared = {name for name in of_simulator.keys() - VARIES if is_recorded(real[name], moment)}
    assert len(compared) >= READ_THEN
    assert {name: real[name] for name in compared} == {name: of_simulator[name] for name in compared}
    assert real.keys() == of_simulator.keys()
    assert {name: type(real[name]) for name in VARIES - {"cuda_index"}} == {
        name: type(of_simulator[name]) for name in VARIES - {"cuda_index"}
    }
