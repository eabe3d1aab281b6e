"""What earlier runs had read for a soak is judged by the packaged tests themselves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import CriterionFailedError
from pytest_gpucluster.inventory.nvlinks import LinkCounters
from pytest_gpucluster.inventory.nvml import GpuCounters, GpuRepair, GpuState
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.measurements.health import GpuHealth, GpuXids, XidSeen
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin.pairing import Pairing
from pytest_gpucluster.plugin.stash_keys import CRITERION, PAIR
from pytest_gpucluster.plugin.whole_run.run_readings import Readings
from pytest_gpucluster.protocol.plain_data import to_plain
from pytest_gpucluster.reporting.run_spans import Snapshot, Span
from tests.support.entries import limit
from tests.support.thresholds_files import packaged
from tests_acceptance import test_health

if TYPE_CHECKING:
    from collections.abc import Callable

GPU, NODE = Place(id="node0-gpu0", node=0, gpu=0), Place(id="node0", node=0)
BY_ID = {"node0-gpu0": GPU, "node0": NODE}
CRITERIA = packaged().criteria(packaged().profiles["h200-sxm"])
LINK = healthy(LinkCounters, link=4)
COUNTERS = healthy(GpuCounters, nvlinks=[LINK])
STATE = healthy(GpuState, index=0, visible=True, cuda_index=0, repair=healthy(GpuRepair), nvlinks=[])


def state(**changes: Any) -> GpuHealth:
    """A GPU by NVML."""
    known: dict[str, Any] = {"torch_sees": True, "torch_device_count": 1, "nvml_device_count": 1, "pci_gpus": {}}
    return GpuHealth(gpu=replace(STATE, **changes), torch_device_name=None, nvml_pci=[], **known)


def xids(*codes: int, before: tuple[int, ...] = ()) -> GpuXids:
    """Xids in the kernel log."""
    during, old = ([XidSeen(code=code, pid=None, is_own=False) for code in some] for some in (codes, before))
    return GpuXids(nvml=[], nvml_why=None, kernel_log=during, kernel_log_why=None, before=old)


def span(first: Any, last: Any, **changes: Any) -> Span:
    """An hour."""
    ends = (Snapshot(at_s=at_s, values={GPU.id: to_plain(one)}) for at_s, one in ((0.0, first), (3600.0, last)))
    known: dict[str, Any] = {"kind": "watched", "seconds": 3600.0, **changes}
    return Span(first=next(ends), last=next(ends), **known)


def judged(key: str, *spans: Span, **of_readings: Any) -> tuple[str, str]:
    """What a packaged test makes of these spans, and its reason, or its remark."""
    function: Callable[..., Any] = getattr(test_health, f"test_{key}")
    mark = next(one for one in function.pytestmark if one.name == "over_run")  # type: ignore[attr-defined]
    place = NODE if key == "nvlink_errors" else GPU
    criterion = Criterion(threshold=CRITERIA[key], limit=limit("max", 8 if key == "pcie_replays" else 0, "events"), place=place)
    arguments = {"over_run": None, "criterion": criterion, "recipe": lambda name: {**CRITERIA[name].recipe}}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    item: Any = SimpleNamespace(
        get_closest_marker=lambda _name: mark,
        stash={PAIR: Pairing(criterion=key, place=place, judges=True), CRITERION: criterion},
        funcargs={name: arguments.get(name, place) for name in names},
        obj=function,
        _fixtureinfo=SimpleNamespace(argnames=names),
    )
    readings = Readings(lambda: item, item)
    readings.earlier = {f"{mark.args[0].__module__}.{mark.args[0].__qualname__} gpu": spans}
    for name, value in of_readings.items():
        setattr(readings, name, value)
    try:
        unknown = readings.judge_earlier(item, BY_ID)
    except CriterionFailedError:
        assert criterion.judged is not None
        return "failed", str(criterion.judged.reason)
    readings.remark_on(item)
    remark = criterion.judged.remark if criterion.judged is not None else None
    return ("passed", remark or "") if unknown is None else ("error", str(unknown))


BAD = [
    ("xid_during_run", xids(), xids(79)),
    ("xid_during_run", xids(), xids(94, 48)),
    ("ecc_growth", COUNTERS, replace(COUNTERS, ecc_uncorrected=7)),
    ("pcie_replays", COUNTERS, replace(COUNTERS, pcie_replays=100_000)),
    ("nvlink_errors", COUNTERS, replace(COUNTERS, nvlinks=[replace(LINK, recoveries=3)])),
    ("gpu_held_back", COUNTERS, replace(COUNTERS, power_brake_s=60.0)),
    ("gpu_worsened", state(), state(repair=replace(STATE.repair, recovery_action="reset"))),
    ("gpu_worsened", state(), state(remapped_rows_pending=True)),
]


@pytest.mark.parametrize(("key", "first", "last"), BAD)
@pytest.mark.parametrize("is_needed", [True, False])
def test_a_part_before_the_cut(key: str, first: Any, last: Any, *, is_needed: bool) -> None:
    """It fails, also where a new soak begins; after it a healthy time follows, and nothing is bad without it."""
    gone = span(last, last, kind="between", is_needed=is_needed)
    outcome, reason = judged(key, span(first, last, is_needed=is_needed), gone)
    assert outcome == "failed"
    assert "seen in a soak that was cut short before this run" in reason
    assert judged(key, span(first, first, is_needed=is_needed)) == ("passed", "")


@pytest.mark.parametrize(("key", "first", "last"), [*BAD[2:], ("xid_during_run", xids(), xids(before=(79,)))])
def test_the_time_between_two_runs(key: str, first: Any, last: Any) -> None:
    """Of a soak that goes on, all counts; of a new one, what no boot clears."""
    outcome, reason = judged(key, span(first, last, kind="between"))
    assert outcome == "failed"
    assert "while nobody watched" in reason
    assert judged(key, span(first, last, kind="between", is_needed=False))[0] == ("failed" if key == "ecc_growth" else "passed")


def test_memory_errors_over_a_boot() -> None:
    """The other counter is 0 again."""
    before = replace(COUNTERS, ecc_uncorrected=2, ecc_uncorrected_aggregate=3)
    after = replace(COUNTERS, ecc_uncorrected=0, ecc_uncorrected_aggregate=10)
    assert judged("ecc_growth", span(before, after, kind="between", is_needed=False))[0] == "failed"
    same = replace(after, ecc_uncorrected_aggregate=3)
    assert judged("ecc_growth", span(before, same, kind="between", is_needed=False)) == ("passed", "")
    assert judged("ecc_growth", span(before, same, kind="between"))[0] == "error"


@pytest.mark.parametrize(("is_needed", "outcome"), [(True, "error"), (False, "passed")])
def test_what_is_not_known(outcome: str, *, is_needed: bool) -> None:
    """It is an error of a soak that goes on, and of no other one."""
    refused = replace(COUNTERS, pcie_replays=NotAvailable("Not Supported"))
    assert judged("pcie_replays", span(COUNTERS, refused, is_needed=is_needed))[0] == outcome
    nothing = replace(span(COUNTERS, COUNTERS, is_needed=is_needed), last=Snapshot(at_s=9.0, values={}))
    assert judged("pcie_replays", nothing)[0] == outcome


@pytest.mark.parametrize(("key", "first", "last"), BAD)
def test_an_earlier_part_of_this_run(key: str, first: Any, last: Any) -> None:
    """What it saw fails, in words of its own."""
    outcome, reason = judged(key, span(first, last), span(last, last, kind="between"), goes_on=True)
    assert outcome == "failed"
    assert reason.endswith("seen in an earlier part of this run")


def test_an_earlier_part_that_was_not_read() -> None:
    """Nobody knows what came in it: an error, but for a part that was not there."""
    assert judged("ecc_growth", goes_on=True, earlier={})[0] == "error"
    assert judged("ecc_growth", goes_on=True, earlier={}, newcomers=frozenset({GPU.id})) == ("passed", "")
    assert judged("ecc_growth", earlier={}) == ("passed", "")


def test_a_kernel_log_that_nobody_can_read() -> None:
    """What came between two parts is a remark: nothing was measured then. What is known to be bad fails all the same."""
    unread = replace(xids(), kernel_log_why="/dev/kmsg: Permission denied")
    quiet, gap = span(unread, unread), span(unread, unread, kind="between")
    outcome, remark = judged("xid_during_run", quiet, gap, goes_on=True)
    assert (outcome, "what came while nobody watched is not known" in remark) == ("passed", True)
    assert judged("xid_during_run", quiet, gap)[0] == "error", "of a soak"
    lost = span(unread, replace(unread, lost_before=["a line"]), kind="between")
    assert judged("xid_during_run", quiet, lost, goes_on=True)[0] == "failed"
