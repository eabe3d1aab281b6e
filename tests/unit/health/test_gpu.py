"""What a GPU asks for, in words, and what to do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpucluster.health.gpu import (
    ADVICE,
    DIAGNOSE,
    REPAIRS,
    RESET,
    advice_for,
    judge_clocks,
    judge_gpu_count,
    judge_pcie_width,
    judge_recovery,
    judge_repair,
)
from pytest_gpucluster.inventory.nvml import ACTIONS, GpuRepair
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.inventory.telemetry import Telemetry
from pytest_gpucluster.measurements.health import GpuHealth

HEALTHY = healthy(GpuRepair)
REFUSED = NotAvailable("Not Supported")


def test_every_action_but_none_has_its_advice() -> None:
    """Also one that a newer driver invents."""
    assert set(ADVICE) == set(ACTIONS.values()) - {"none"}
    assert advice_for("none") is None
    assert advice_for("unknown_42") is not None


def test_healthy_gpu_needs_nothing() -> None:
    """No fact, no advice."""
    needs = judge_repair(HEALTHY)
    assert (needs.facts, needs.advice, needs.doubts) == ((), None, ())


@pytest.mark.parametrize("flag", REPAIRS)
def test_each_flag(flag: str) -> None:
    """Raised, it is a need; refused, it is not known; beside a raised one, both are shown."""
    raised, refused = judge_repair(replace(HEALTHY, **{flag: True})), judge_repair(replace(HEALTHY, **{flag: REFUSED}))
    assert (raised.facts, raised.advice, raised.doubts) == ((REPAIRS[flag][0],), REPAIRS[flag][1], ())
    assert (refused.facts, refused.doubts) == ((), (f"{flag} is not available: Not Supported",))
    other = next(name for name in REPAIRS if name != flag)
    both = judge_repair(replace(HEALTHY, **{flag: REFUSED, other: True}))
    assert (len(both.facts), len(both.doubts)) == (1, 1)


def test_the_worst_need_decides_what_to_do() -> None:
    """A GPU that must be replaced is not reset first."""
    assert judge_repair(replace(HEALTHY, memory_unrepairable=True, channel_repair_pending=True)).advice == DIAGNOSE
    assert judge_repair(replace(HEALTHY, tpc_repair_pending=True)).advice == RESET


@pytest.mark.parametrize(("action", "judged"), [("none", 0), ("gpu_reset", 1), ("unknown_42", 1), (REFUSED, None)])
def test_recovery_action(action: str | NotAvailable, judged: int | None) -> None:
    """Any action but none is bad, and says what to do; a refused one is unknown."""
    found = judge_recovery(replace(HEALTHY, recovery_action=action))
    assert found.judged == judged
    assert (found.advice is not None) is (judged == 1)


BUS = tuple(f"0000:{bus:02x}:00.0" for bus in (0x0F, 0x2D, 0x44, 0x5B, 0x89, 0xA8, 0xC0, 0xD8))


def counted(
    listed: int | None, on_bus: tuple[str, ...] | NotAvailable, *, missing: int = 7, driver: str = "nvidia"
) -> GpuHealth:
    """A node of which NVML lists so many GPUs, not the one on the bus with the number ``missing``."""
    shown = [address for address in BUS if address != BUS[missing]][: listed or 0] if listed != len(BUS) else list(BUS)
    of_bus = on_bus if isinstance(on_bus, NotAvailable) else {one: "nvidia" if one in shown else driver for one in on_bus}
    return GpuHealth(
        gpu=NotAvailable("not read here"),
        torch_sees=True,
        torch_device_count=listed or 0,
        nvml_device_count=listed,
        pci_gpus=of_bus,
        nvml_pci=[f"0000{address.upper()}" for address in shown],
        torch_device_name=None,
    )


@pytest.mark.parametrize("missing", range(8))
@pytest.mark.parametrize("driver", ["nvidia", "no driver", "vfio-pci"])
def test_a_gpu_that_only_the_bus_shows_is_no_green(missing: int, driver: str) -> None:
    """Nobody stated how many: an error, which names the GPU by its address and driver, and says how to go on."""
    found = judge_gpu_count(counted(7, BUS, missing=missing, driver=driver), is_stated=False)
    assert (found.value, found.facts) == (7, ())
    (doubt,) = found.doubts
    assert f"NVML lists 7 of the 8 NVIDIA GPUs on the PCI bus; not {BUS[missing]} ({driver}). " in doubt
    assert "--gpucluster-expect gpus_per_node=N" in doubt


def test_a_part_of_the_gpus_that_somebody_stated() -> None:
    """A container that was given 2 of 8: no false alarm, and the others are named."""
    found = judge_gpu_count(counted(2, BUS), is_stated=True)
    assert (found.judged, found.doubts) == (2, ())
    assert found.remark is not None
    assert found.remark.startswith(f"NVML lists 2 of the 8 NVIDIA GPUs on the PCI bus; not {BUS[2]} (nvidia), ")
    assert BUS[7] in found.evidence["not in NVML"]
    assert found.advice is not None
    assert BUS[7] in found.advice


@pytest.mark.parametrize("is_stated", [False, True])
@pytest.mark.parametrize("on_bus", [BUS, BUS[:3], ()])
def test_all_gpus_of_the_bus(on_bus: tuple[str, ...], is_stated: bool) -> None:  # noqa: FBT001 -- a parameter
    """As many as on the bus, or more: a host that hides its bus hides no GPU."""
    found = judge_gpu_count(counted(8, on_bus), is_stated=is_stated)
    assert (found.judged, found.doubts, found.remark) == (8, (), None)


def test_a_bus_that_cannot_be_read() -> None:
    """Then nothing but a stated number is a measure of NVML's list."""
    unread = NotAvailable("No such file or directory (/sys/bus/pci/devices)")
    assert judge_gpu_count(counted(7, unread), is_stated=True).doubts == ()
    assert "the PCI bus is not available" in judge_gpu_count(counted(7, unread), is_stated=False).doubts[0]


@pytest.mark.parametrize("is_stated", [False, True])
def test_no_nvml_to_count_with(is_stated: bool) -> None:  # noqa: FBT001 -- a parameter
    """Whatever was stated."""
    found = judge_gpu_count(counted(None, BUS), is_stated=is_stated)
    assert (found.judged, found.doubts) == (None, ("there is no NVML to count GPUs with",))


# --- clocks under load ---


def clocks(samples: int, due: int, *reasons: str) -> Telemetry:
    """A GPU at 1755 MHz that was read so many times."""
    return Telemetry(
        samples=samples,
        due=due,
        **dict.fromkeys(("sm_clock_min_mhz", "sm_clock_mean_mhz", "sm_clock_max_mhz"), 1755.0),
        **dict.fromkeys(("temperature_max_c", "power_mean_w", "power_max_w"), 60.0),
        pcie_gen_max=5,
        pcie_width_min=16,
        event_reasons=["sw_power_cap", *reasons],
        fault_reasons=[*reasons],
    )


@pytest.mark.parametrize(("samples", "is_whole"), [(30, True), (31, True), (24, True), (23, False), (8, False), (2, False)])
def test_fewer_samples_than_due_are_unknown(samples: int, *, is_whole: bool) -> None:
    """NVML of 2 s a reading, or one that hangs after 0.8 s of 3 s, has seen a part of the load."""
    found = judge_clocks(clocks(samples, 30))
    needed = f"clocks event reasons were read {samples} of 30 times under load, and 80 % are needed"
    assert (found.bad, found.doubts) == ({}, () if is_whole else (needed,))


@pytest.mark.parametrize(("samples", "is_whole"), [(30, True), (24, True), (23, False), (8, False), (1, False)])
def test_a_link_that_was_seen_for_a_part_of_the_load(samples: int, *, is_whole: bool) -> None:
    """It may have lost lanes in the rest. One that was seen with too few lanes has lost them."""
    most = {"gen": 5, "lanes": 16}
    found = judge_pcie_width(clocks(samples, 30), most)
    needed = f"the PCIe link was read {samples} of 30 times under load, and 80 % are needed"
    assert (found.bad, found.doubts) == ({}, () if is_whole else (needed,))
    narrow = judge_pcie_width(replace(clocks(samples, 30), pcie_width_min=8), most)
    assert narrow.facts == ("lanes 8 of 16",)


def test_a_slowdown_in_few_samples_is_one() -> None:
    """What was seen counts, whatever else there was."""
    assert judge_clocks(clocks(2, 30, "hw_slowdown")).facts == ("hw_slowdown",)
