"""Every reader of GPUs over an NVML that answers garbage: each call gives bytes, no text, -1, or a number of no meaning.

A reader never raises but NVML's own error, what it says is never what it says of a healthy GPU, and the GPU beside it stays as
it was. The calls are those of the simulated library, so that a new one is here too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.growth import state_changes
from pytest_gpucluster.health.nvlink import judge_fabric
from pytest_gpucluster.inventory.nvlinks import ALONE
from pytest_gpucluster.inventory.nvml import GpuState
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from tests.support.nvml_simulator import SOURCE, Readers, build, getters, healthy_answers, readers

if TYPE_CHECKING:
    from collections.abc import Iterator

UUID = "GPU-00000001-0000-0000-0000-000000000001"
READING = f"""
import dataclasses, json
from pytest_gpucluster.inventory import detect, gpu_index, identity, nvml, nvml_calls, occupancy

def tried(read):
    try:
        with nvml_calls.session():
            return read()
    except nvml_calls.NvmlError as error:
        return {{"raised": str(error)}}

answer = {{
    "survey": detect.survey(),
    "occupancy": tried(lambda: dataclasses.asdict(occupancy.read_occupancy(looks=1))),
    "counters": tried(lambda: dataclasses.asdict(nvml.read_counters(gpu_index.handle_of({UUID!r})))),
    "label": tried(lambda: gpu_index.read_label(1)),
    "identity": identity.read_by_uuid({UUID!r}),
    "driver": tried(gpu_index.read_driver_version),
}}
json.dumps(answer, allow_nan=False)
"""
NOT_ANSWERS = {"clock.mem", "fabric.version", "field.82", "field.164", "field.230", "nvlink5"}
"""Keys of the simulator that no reader asks for, or that another key answers."""
OF_ONE = {
    "nvlink.3",
    "nvlink.3.speed",
    "nvlink.3.replay",
    "recovery",
    "temp.mem",
    "ecc.unc.vol",
    "violation.1",
    "pcie.field.173",
}
BAD_TEXTS = ("\udc80\udcff", "", "\x1b[2J", "x" * 120)
BAD_NUMBERS = ("-1", "255", "7", "9223372036854775807")
BITS = ("0x7ff8000000000000", "0x7ff0000000000000", "-1", "5")
"""Not a number, infinite, -1 and nearly 0 as a number of eight bytes."""


def keys_of_numbers() -> list[str]:
    """What the simulator answers by numbers."""
    source, answers = SOURCE.read_text(encoding="utf-8"), healthy_answers()
    found = {*re.findall(r'number\(device->index, "([\w.]+)"', source), *re.findall(r'"([\w.]+)"\)', getters(answers, source))}
    found |= {*re.findall(r'^(?:GETTER|MODE)\(\w+,(?: [\w ]+,)? "([\w.]+)"\)', source, re.MULTILINE)}
    return sorted((found | OF_ONE | {name for name in answers if name.startswith("field.")}) - NOT_ANSWERS)


NUMBERS = [f"{key} {value}" for key in keys_of_numbers() for value in BAD_NUMBERS]
TEXTS = [
    f"{key} {value}"
    for key in re.findall(r'text\(device->index, "([\w.]+)"', SOURCE.read_text(encoding="utf-8"))
    for value in BAD_TEXTS
]
FIELDS = [f"field.type {kind}\n1.field.bits {bits}" for kind in (0, 6, 7, 99, -1) for bits in BITS]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    """One process that reads all scenarios."""
    with readers(build(tmp_path_factory.mktemp("nvml"))) as started:
        yield started


def read(simulated: Readers, scenario: str) -> Any:
    """What all readers say of the second of two GPUs."""
    return simulated.answer(READING, f"count 2\n{scenario}", LOCAL_RANK="1")


@pytest.mark.parametrize("planted", [NUMBERS, TEXTS, FIELDS], ids=["numbers", "texts", "fields"])
def test_no_garbage_is_a_healthy_gpu(simulated: Readers, planted: list[str]) -> None:
    """Nor an exception, nor a fault of the GPU beside it."""
    right = read(simulated, "")
    assert len(planted) >= len(BAD_TEXTS) * 5
    for scenario in planted:
        found = read(simulated, f"1.{scenario}")
        assert found != right, scenario
        assert found["survey"]["gpus"][0] == right["survey"]["gpus"][0], scenario


@pytest.mark.parametrize("value", BAD_TEXTS)
def test_garbage_as_the_version_of_the_driver(simulated: Readers, value: str) -> None:
    """It is of all GPUs."""
    assert read(simulated, f"driver {value}")["driver"] != read(simulated, "")["driver"]


@pytest.mark.parametrize(
    ("key", "field"),
    [("ecc", "ecc_enabled"), ("persistence", "persistence"), ("mig", "mig"), ("remap.failed", "remapped_rows_failed")],
)
def test_neither_yes_nor_no_is_unknown(simulated: Readers, key: str, field: str) -> None:
    """Never on, and never off."""
    gpu = read(simulated, f"1.{key} 7")["survey"]["gpus"][1]
    assert gpu[field] == {"why": "7 is neither yes nor no"}


@pytest.mark.parametrize("planted", ["util 4294967295", "mem.used -1\n1.mem.reserved 0"])
def test_garbage_is_nobody_on_the_gpu(simulated: Readers, planted: str) -> None:
    """More than 100 % busy, or more memory in use than there is: that value is not known, and blames no process."""
    found = read(simulated, f"1.{planted}")["occupancy"]
    assert None in (found["utilization_percent"], found["memory_used_gib"])
    assert found["processes"] == []


@pytest.mark.parametrize("count", ["-1", "257"])
def test_more_gpus_than_any_host_has(simulated: Readers, count: str) -> None:
    """An error at once: a loop over 4,294,967,295 GPUs would be called a driver that hangs."""
    found = simulated.survey(f"count {count}")
    assert (found["status"], found["gpus"]) == ("error", [])
    assert "GPUs, and no host has more than 256" in found["error"]


@pytest.mark.parametrize("planted", ["health 0x3", "health 0xf000", "summary 4"])
def test_a_health_of_the_fabric_that_is_not_known(simulated: Readers, planted: str) -> None:
    """It has its reason; beside a known trouble, that counts."""
    found = [
        read(simulated, f"1.fabric.{planted}{more}")["survey"]["gpus"][1]["fabric"] for more in ("", "\n1.fabric.health 0x501")
    ]
    assert "not known here" in found[0]["troubles"]["why"]
    if "summary" in planted:
        assert found[1]["troubles"] == ["degraded bandwidth", "insufficient NVLinks"]


def test_who_judges_it() -> None:
    """Unknown for the state of the fabric, and for what has changed; a state that is bad stays bad."""
    state = healthy(GpuState, index=0, cuda_index=0, visible=True)
    fabric = replace(ALONE, troubles=NotAvailable("x"))
    for found in (judge_fabric({"g": "switch"}, {"g": fabric}), state_changes(state, replace(state, fabric=fabric))):
        assert (found.facts, len(found.doubts)) == ((), 1)
    assert state_changes(replace(state, fabric=fabric), replace(state, fabric=fabric)).doubts == ()
    bad = replace(fabric, state="in_progress")
    for found in (judge_fabric({"g": "switch"}, {"g": bad}), state_changes(state, replace(state, fabric=bad))):
        assert len(found.facts) == 1
