"""What our readers said of a real GPU, beside ``nvidia-smi -q -x`` of the moment before and after; and what simulated GPUs say.

The files are kept in ``docs/results/RUN/raw``: ``before.xml``, ``info.json`` of ``gpucluster info all --json``, ``after.xml``;
of GPUs with NVLinks also ``links.txt`` of ``nvidia-smi nvlink -s``, and ``busy``: the same files while they use the links.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET  # our own files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import nvml_simulator

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
RAW = sorted(folder.parent for name in ("raw", "busy") for folder in RESULTS.glob(f"*/{name}/info.json"))
WITH_NVLINKS = [folder for folder in RAW if (folder / "links.txt").exists()]
"""A virtual machine with one GPU has none of its links; the simulated GPUs have them."""


def number(text: str) -> float:
    """``81559 MiB`` as 81559."""
    return float(text.partition(" ")[0].rstrip("x"))


def is_on(text: str) -> bool:
    """``Enabled``, ``Yes``."""
    return {"Enabled": True, "Yes": True, "Disabled": False, "No": False}[text]


def gib(text: str) -> float:
    """``81559 MiB`` in GiB."""
    return number(text) / 1024


def seconds(text: str) -> float:
    """``12 us`` in seconds."""
    return number(text) / 1e6


FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "uuid": ("uuid", str),
    "serial": ("serial", str),
    "pci": ("pci/pci_bus_id", str),
    "name": ("product_name", str),
    "vbios": ("vbios_version", str),
    "board_part_number": ("board_part_number", str),
    "module_id": ("platformInfo/module_id", int),
    "memory_gib": ("fb_memory_usage/total", gib),
    "memory_used_gib": ("fb_memory_usage/reserved fb_memory_usage/used", gib),
    "ecc_enabled": ("ecc_mode/current_ecc", is_on),
    "ecc_uncorrected_volatile": ("ecc_errors/volatile/dram_uncorrectable", int),
    "ecc_uncorrected_aggregate": ("ecc_errors/aggregate/dram_uncorrectable", int),
    "ecc_corrected_volatile": ("ecc_errors/volatile/dram_correctable", int),
    "remapped_rows_correctable": ("remapped_rows/remapped_row_corr", int),
    "remapped_rows_uncorrectable": ("remapped_rows/remapped_row_unc", int),
    "remapped_rows_pending": ("remapped_rows/remapped_row_pending", is_on),
    "remapped_rows_failed": ("remapped_rows/remapped_row_failure", is_on),
    **{
        f"spare_row_banks.{name}": (f"remapped_rows/row_remapper_histogram/row_remapper_histogram_{name}", number)
        for name in ("max", "high", "partial", "low", "none")
    },
    "pcie_gen": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen", int),
    "pcie_gen_max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen", int),
    "pcie_width": ("pci/pci_gpu_link_info/link_widths/current_link_width", number),
    "pcie_width_max": ("pci/pci_gpu_link_info/link_widths/max_link_width", number),
    "pcie_replay_count": ("pci/replay_counter", int),
    "sm_clock_mhz": ("clocks/sm_clock", number),
    "temperature_c": ("temperature/gpu_temp", number),
    "memory_temperature_c": ("temperature/memory_temp", number),
    "power_w": ("gpu_power_readings/average_power_draw", number),
    "power_limit_w": ("gpu_power_readings/current_power_limit", number),
    "power_limit_default_w": ("gpu_power_readings/default_power_limit", number),
    "mig": ("mig_mode/current_mig", is_on),
    "persistence": ("persistence_mode", is_on),
    "compute_mode": ("compute_mode", str.lower),
    "throttled_s.power": ("clocks_event_reasons_counters/clocks_event_reasons_counters_sw_power_cap", seconds),
    "throttled_s.sync boost": ("clocks_event_reasons_counters/clocks_event_reasons_counters_sync_boost", seconds),
    "repair.recovery_action": ("gpu_recovery_action", str.lower),
    "repair.channel_repair_pending": ("ecc_errors/channel_repair_pending", is_on),
    "repair.tpc_repair_pending": ("ecc_errors/tpc_repair_pending", is_on),
    "repair.memory_unrepairable": ("ecc_errors/unrepairable_memory", is_on),
    "repair.sram_threshold_exceeded": ("ecc_errors/aggregate/sram_threshold_exceeded", is_on),
}
"""Our field, the element of nvidia-smi, and how its text is read."""
RENAMED = {"held_back_s": "throttled_s"}
"""Fields that were called otherwise when the files were recorded."""
ROUNDED = {"memory_gib": 1e-3, "memory_used_gib": 2e-3, "throttled_s.power": 1.0, "power_w": 5.0, "sm_clock_mhz": 15}
"""By how much ours may lie outside both readings: digits, and what changes from one moment to the next."""


def recorded_gpus(folder: Path) -> list[dict[str, Any]]:
    """The GPUs of a kept file, by the names that the fields have now."""
    found = json.loads((folder / "info.json").read_text())["gpus"]["gpus"]
    return [{RENAMED.get(name, name): value for name, value in gpu.items()} for gpu in found]


def field(gpu: dict[str, Any], name: str) -> Any:
    """``repair.recovery_action`` of nested dictionaries."""
    found: Any = gpu
    for part in name.split("."):
        found = found[part]
    return found


def of_smi(file: Path, index: int, path: str, read: Callable[[str], Any]) -> Any:
    """An element of one GPU, or the sum of two."""
    gpu = ET.parse(file).getroot().findall("gpu")[index]  # noqa: S314 -- our own file
    elements = [gpu.find(one) for one in path.split()]
    values = [read(str(element.text)) for element in elements if element is not None]
    assert len(values) == len(elements), f"{file}: no {path}"
    return values[0] if len(values) == 1 else sum(values)


def links_of_smi(text: str) -> list[dict[int, str]]:
    """``nvidia-smi nvlink``'s lines by GPU: the number of a link, and all that it says of it."""
    gpus = [re.findall(r"Link (\d+): (.*\S)", part) for part in re.split(r"(?m)^GPU \d+: .*\n", text) if part.strip()]
    return [{int(link): ", ".join(said for other, said in lines if other == link) for link, _ in lines} for lines in gpus]


def state_of(link: dict[str, Any]) -> str:
    """As ``nvidia-smi nvlink -s`` says it."""
    return f"{link['speed_gb_s']:g} GB/s" if link["is_up"] else "<inactive>"


def errors_of(link: dict[str, Any]) -> str:
    """As ``nvidia-smi nvlink -e`` says it."""
    return f"Replay Errors: {link['replays']}, Recovery Errors: {link['recoveries']}, CRC Errors: {link['crc_flits']}"


def differing(links: list[dict[str, Any]], said: dict[int, str], say: Callable[[dict[str, Any]], str] = state_of) -> set[int]:
    """The links of one GPU of which ours and nvidia-smi's words are not the same."""
    ours = {link["link"]: say(link) for link in links}
    return {link for link in ours.keys() | said.keys() if ours.get(link) != said.get(link)}


def is_alike(name: str, ours: Any, before: Any, after: Any) -> bool:
    """The same, or between both readings."""
    if isinstance(before, (bool, str)) or not isinstance(before, (int, float)):
        return bool(ours in (before, after))
    room = ROUNDED.get(name, 1 if name.endswith("temperature_c") else 0)
    return bool(min(before, after) - room <= ours <= max(before, after) + room)


@pytest.mark.parametrize("folder", RAW, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
@pytest.mark.parametrize("name", FIELDS)
def test_ours_is_nvidia_smi_s(folder: Path, name: str) -> None:
    """Field by field, of every GPU."""
    path, read = FIELDS[name]
    for gpu in recorded_gpus(folder):
        before, after = (of_smi(folder / file, gpu["index"], path, read) for file in ("before.xml", "after.xml"))
        ours = field(gpu, name)
        assert is_alike(name, ours, before, after), f"{name}: {ours!r}, nvidia-smi {before!r}, then {after!r}"


@pytest.mark.parametrize(
    ("name", "ours", "alike"),
    [("pcie_replay_count", 3, False), ("pcie_replay_count", 1, True), ("mig", True, False), ("temperature_c", 30, False)],
)
def test_a_difference_is_seen(name: str, ours: Any, *, alike: bool) -> None:
    """The comparison can fail."""
    before, after = {"pcie_replay_count": (1, 2), "mig": (False, False), "temperature_c": (40, 41)}[name]
    assert is_alike(name, ours, before, after) is alike


@pytest.mark.parametrize("folder", WITH_NVLINKS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_nvlinks_are_those_of_nvidia_smi(folder: Path) -> None:
    """State and rate of each link of each GPU, at rest and while all GPUs sum up over them; another one would be seen."""
    found, said = recorded_gpus(folder), links_of_smi((folder / "links.txt").read_text())
    assert len(found) == len(said) > 1
    for gpu, of_gpu in zip(found, said, strict=True):
        assert len(of_gpu) == 18
        assert not differing(gpu["nvlinks"], of_gpu)
        assert differing(gpu["nvlinks"], {**of_gpu, 3: "<inactive>"}) == {3}
        assert differing(gpu["nvlinks"][1:], of_gpu) == {0}
        assert differing([{**link, "speed_gb_s": 25.781} for link in gpu["nvlinks"]], of_gpu) == set(range(18))


@pytest.mark.parametrize("folder", WITH_NVLINKS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_errors_of_nvlinks_are_those_of_nvidia_smi(folder: Path) -> None:
    """Three counters of each link of each GPU; one more error would be seen."""
    found, said = json.loads((folder / "counters.json").read_text()), links_of_smi((folder / "errors.txt").read_text())
    assert len(found) == len(said) > 1
    for gpu, of_gpu in zip(found, said, strict=True):
        assert len(of_gpu) == 18
        assert not differing(gpu["nvlinks"], of_gpu, errors_of)
        for name in ("replays", "recoveries", "crc_flits"):
            worse = [{**link, name: link[name] + (link["link"] == 5)} for link in gpu["nvlinks"]]
            assert differing(worse, of_gpu, errors_of) == {5}


def test_the_links_were_busy() -> None:
    """What nvidia-smi counts on each of them grew from one reading to the next: over 1 GB on each, each way."""
    folder = next(folder for folder in WITH_NVLINKS if folder.name == "busy")
    before, after = ((folder / f"moved-{when}.txt").read_text() for when in ("before", "after"))
    kib = [[int(one) for one in re.findall(r"Data [TR]x: (\d+) KiB", text)] for text in (before, after)]
    grown = [last - first for first, last in zip(*kib, strict=True)]
    assert len(grown) == 2 * 2 * 18
    assert min(grown) > 1e6


def test_event_reasons_are_those_of_nvidia_smi() -> None:
    """All active ones by name, in each kept file."""
    assert RAW
    for folder in RAW:
        for gpu in recorded_gpus(folder):
            root = ET.parse(folder / "before.xml").getroot().findall("gpu")[gpu["index"]]  # noqa: S314 -- our own file
            reasons = root.find("clocks_event_reasons")
            assert reasons is not None
            active = {one.tag.removeprefix("clocks_event_reason_") for one in reasons if one.text == "Active"}
            assert set(gpu["clocks_event_reasons"]) == active


def shape(value: Any) -> Any:
    """The kind of a value and the names in it; ``not available`` for a refused field."""
    if isinstance(value, dict):
        if value.keys() == {"not_available"}:
            return "not available"
        return {name: shape(one) for name, one in value.items()}
    return type(value).__name__


@pytest.mark.parametrize("folder", RAW, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_simulated_gpus_answer_as_real_ones(folder: Path, tmp_path: Path) -> None:
    """The same fields, with a value or refused, each of the same kind; NVLinks only where there are any."""
    variables = nvml_simulator.environment(nvml_simulator.build(tmp_path))
    command = [sys.executable, "-m", "pytest_gpucluster.cli", "info", "all", "--json"]
    ran = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    assert not json.loads(ran.stdout)["gpus"]["error"], ran.stdout
    simulated = json.loads(ran.stdout)["gpus"]["gpus"][0]
    for real in recorded_gpus(folder):
        assert real.keys() <= simulated.keys()  # newer readings are not in the kept files
        for name in real.keys() - ({"nvlinks", "nvlink_peer"} if folder not in WITH_NVLINKS else set()):
            assert shape(real[name]) == shape(simulated[name]), name
