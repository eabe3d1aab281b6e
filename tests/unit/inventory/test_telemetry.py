"""Telemetry of a measured GPU, as the result holds it: the real binding over the simulated NVML."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster import health as judges
from pytest_gpucluster.inventory import nvml_calls, telemetry
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.telemetry import Sampler, Snapshots, Telemetry, evidence, from_rows, to_row
from pytest_gpucluster.measurements import (
    collectives,
    digest,
    gemm,
    hbm,
    hbm_pattern,
    health,
    host_link,
    sustained,
    timing,
    training,
)
from pytest_gpucluster.protocol import plain_data
from tests.support import REPOSITORY
from tests.support.nvml_simulator import build, environment

if TYPE_CHECKING:
    from collections.abc import Callable

UUIDS = [f"GPU-{index:08x}-0000-0000-0000-{index:012x}" for index in range(8)]
HOT = "clock.sm 1755\npower_mw 691500\ntemp 88\nthrottle 0x24\npcie.gen 4\n"
TOLD = {"SM MHz": 1755, "W": 691.5, "C": 88, "event reasons": ["sw_power_cap", "sw_thermal_slowdown"]}
SMALL: dict[str, Callable[[], Any]] = {
    "hbm": lambda: hbm.hbm_bandwidth(size_bytes=1 << 16, iterations=2, warmup=0),
    "host_link": lambda: host_link.host_link(size_bytes=1 << 16, iterations=3, warmup=0),
    "hbm_pattern": lambda: hbm_pattern.hbm_pattern(limit_bytes=1 << 16, chunk_bytes=1 << 14, reserve_bytes=0),
    "digests": lambda: digest.digests(rounds=2, size=16, seed=1, kinds=["softmax"]),
    "all_reduce": lambda: collectives.all_reduce(size_bytes=4096, iterations=10, warmup=0),
    "finetune": lambda: training.finetune(preset="tiny", steps=2, heldout_rows=4, greedy_rows=0, restore_check=False),
}
ALONE = ("hbm", "host_link", "hbm_pattern", "digests")


def seen(**changes: Any) -> Telemetry:
    """A GPU at its power limit."""
    fields: dict[str, Any] = {
        "samples": 3,
        "sm_clock_min_mhz": 1455.0,
        "sm_clock_mean_mhz": 1500.0,
        "sm_clock_max_mhz": 1980.0,
        "temperature_max_c": 59.0,
        "power_mean_w": 691.7,
        "power_max_w": 694.0,
        "pcie_gen_max": 5,
        "pcie_width_min": 16,
        "event_reasons": ["sw_power_cap"],
        "fault_reasons": [],
    }
    return Telemetry(**{**fields, **changes})


# --- how much of a load was watched ---

WINDOW_S, INTERVAL_S = 0.6, 0.05


def sampled(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> Telemetry | None:
    """What a sampler sees of a GPU in a window; ``before`` each reading, by its number, something happens."""
    count, one = iter(range(1000)), telemetry._Sample(at_s=0, reasons=0, values=dict.fromkeys(telemetry.SAMPLED, 1.0))

    def sample(_handle: Any) -> Any:
        before(next(count))
        return dataclasses.replace(one, at_s=time.monotonic())

    monkeypatch.setattr(telemetry, "_sample", sample)
    monkeypatch.setattr(telemetry, "handle_of", lambda uuid: uuid)
    monkeypatch.setattr(nvml_calls, "session", contextlib.nullcontext)
    monkeypatch.setattr(telemetry, "JOIN_S", 0.01)
    with Sampler(UUIDS[0], interval_s=INTERVAL_S) as sampler:
        time.sleep(WINDOW_S)
        return sampler.summary()


def _refuse(number: int) -> None:
    if number == 4:
        raise nvml_calls.NvmlError("GPU is lost")


def doubts_of(seen: Telemetry | None) -> str:
    """What the judge of clocks under load does not know."""
    assert seen is not None
    return " ".join(judges.judge_clocks(seen).doubts)


@pytest.mark.parametrize(("refused", "is_known"), [(0, True), (6, True), (7, False), (29, False), (30, False)])
def test_a_link_that_most_samples_do_not_show(refused: int, *, is_known: bool) -> None:
    """NVML gives clocks and refuses the link for a part of the load: what that part was like is unknown."""
    one = telemetry._Sample(at_s=0, reasons=0, values=dict.fromkeys(telemetry.SAMPLED, 16.0))
    no_link = dict.fromkeys(("pcie_gen", "pcie_width"), NotAvailable("Unknown Error"))
    mute = dataclasses.replace(one, values={**one.values, **no_link})
    samples = [*[one] * (30 - refused), *[mute] * refused]
    found = telemetry._summary(samples, reasons_of=samples, stopped=None)
    assert found.samples == 30
    for value in (found.pcie_gen_max, found.pcie_width_min):
        assert value == (16 if is_known else NotAvailable("Unknown Error"))


@pytest.mark.parametrize("reading_s", [0.0, 0.04])
def test_a_steady_driver_is_watched_all_the_time(monkeypatch: pytest.MonkeyPatch, reading_s: float) -> None:
    """Also if a reading takes most of the interval: the next one is due when it was due."""
    assert doubts_of(sampled(monkeypatch, lambda _: time.sleep(reading_s))) == ""


@pytest.mark.parametrize(
    "before",
    [
        lambda _: time.sleep(0.25),
        lambda number: time.sleep(2.0 if number == 5 else 0.0),
        lambda number: time.sleep(0.0 if number else 0.3),
        _refuse,
    ],
    ids=["slow", "hangs", "first late", "refused later"],
)
def test_a_load_that_was_partly_watched_is_unknown(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """What happened meanwhile, nobody knows: it is never health."""
    seen = sampled(monkeypatch, before)
    assert seen is not None
    assert seen.samples < seen.due
    assert doubts_of(seen)


# --- inside a window ---


def test_timed_calls_are_watched_while_they_run() -> None:
    """Once, and for nothing on the way: what is timed is the calls."""
    done: list[str] = []
    timed = timing.time_each(lambda: done.append("call"), iterations=3, meanwhile=lambda: done.append("look"))
    assert (done.count("call"), done.count("look"), len(timed.samples_s)) == (3, 1, 3)
    timing.time_span(lambda: done.append("call"), launches=4, meanwhile=lambda: done.append("look"))
    assert (done.count("call"), done.count("look")) == (7, 2)


def test_gpu_is_looked_at_when_all_is_queued_and_the_first_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking delays no launch, and what is seen is the window and not the warm-up before it."""
    done: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, _other: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timed = timing.time_each(lambda: done.append("call"), iterations=2, meanwhile=lambda: done.append("look"))
    assert done == [*["record", "call", "record"] * 2, "wait", "look", "wait"]
    assert timed.samples_s == [0.002, 0.002]


def test_nothing_is_read_without_a_gpu() -> None:
    """On a CPU: no thread, no NVML, no value."""
    threads = {*threading.enumerate()}  # those of other tests may end meanwhile
    with Snapshots(None) as snapshots:
        snapshots.of("copy")()
        assert {*threading.enumerate()} <= threads
    assert snapshots.summary("copy") is None
    assert evidence(None) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has telemetry")
@pytest.mark.parametrize("name", ALONE)
def test_measurement_on_a_cpu_has_no_telemetry(name: str) -> None:
    """And is otherwise as it was."""
    found = SMALL[name]()
    seen = {**(found.evidence("h2d") if name == "host_link" else found.evidence)}
    seen.pop("host load", None)  # of this machine, where others work on it
    assert seen == {}


@pytest.mark.parametrize(
    "result",
    [
        gemm.GemmRate,
        sustained.Sustained,
        digest.Digests,
        health.ClocksUnderLoad,
        hbm.HbmBandwidth,
        hbm_pattern.PatternResult,
        host_link.HostLink,
        collectives.CollectiveTiming,
        training.Finetuned,
        training.Trained,
    ],
)
def test_every_result_has_telemetry_and_evidence(result: Any) -> None:
    """One name for each, so that a criterion shows them without knowing the measurement."""
    assert "telemetry" in {field.name for field in dataclasses.fields(result)}
    assert hasattr(result, "evidence")


def test_what_was_timed_is_all_that_counts() -> None:
    """Samples and event reasons between two moments; none before or after, as while layers were compiled."""
    sampler = telemetry.Sampler(None)
    assert sampler.between(0.0, 100.0) is None
    sampler._samples = [
        telemetry._Sample(at_s=at_s, reasons=bits, values=dict.fromkeys(telemetry.SAMPLED, float(value)))
        for at_s, bits, value in ((1.0, 0x8, 100), (2.0, 0x4, 200), (3.0, 0x0, 300), (4.0, 0x8, 400))
    ]
    found = sampler.between(1.5, 3.5)
    assert found is not None
    assert (found.samples, found.sm_clock_mean_mhz, found.sm_clock_max_mhz) == (2, 250, 300)
    assert found.event_reasons == telemetry.event_reason_names(0x4)


# --- a group, in brief ---


def test_group_in_brief() -> None:
    """The slowest clock and the hottest GPU by rank, the ranks of each event reason; a missing value does no harm."""
    of_rank = {
        4: seen(),
        5: seen(sm_clock_mean_mhz=1200.0, event_reasons=["sw_power_cap", "hw_slowdown"]),
        6: seen(temperature_max_c=91.0, power_mean_w=None),
        7: None,
    }
    found = from_rows([to_row(rank, own) for rank, own in of_rank.items()])
    assert evidence(found) == {
        "SM MHz": "1200 (rank 5) to 1500",
        "W": "692 to 692",
        "C": "up to 91 (rank 6)",
        "event reasons": ["sw_power_cap (rank 4-6)", "hw_slowdown (rank 5)"],
    }


def test_group_of_which_little_is_known() -> None:
    """No rank has telemetry: None. Some values are missing: the others are shown."""
    assert from_rows([to_row(rank, None) for rank in range(3)]) is None
    bare = seen(sm_clock_mean_mhz=None, power_mean_w=None, temperature_max_c=None, event_reasons=["unknown_0x4000"])
    row = to_row(0, bare)
    assert [math.isnan(value) for value in row] == [False, False, False, True, True, True]
    assert evidence(from_rows([row])) == {"event reasons": ["unknown_0x4000 (rank 0)"]}


def test_group_is_as_small_for_a_thousand_ranks() -> None:
    """Every rank of every group returns it."""
    found = from_rows([to_row(rank, seen()) for rank in range(1024)])
    assert found is not None
    assert found.event_reasons == {"sw_power_cap": "0-1023"}
    assert len(json.dumps(plain_data.to_plain(found))) < 600


# --- the measurements, each in a process of its own that sees simulated GPUs ---


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the simulated library."""
    return build(tmp_path_factory.mktemp("nvml"))


def measure(simulator: Path, folder: Path, names: list[str], scenario: str, *, ranks: int) -> list[dict[str, Any]]:
    """The results of these measurements on each CPU rank; each rank takes a simulated GPU for its own."""
    variables = {**environment(simulator, scenario), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(ranks), *names], env={**variables, "RANK": str(rank)}, cwd=REPOSITORY
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=150) for process in started] == [0] * ranks
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def alone(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that a GPU measures by itself, the GPU being hot."""
    return measure(simulator, tmp_path_factory.mktemp("alone"), [*ALONE], HOT, ranks=1)[0]


@pytest.mark.e2e
@pytest.mark.parametrize("name", ALONE)
def test_value_of_one_gpu_carries_its_telemetry(alone: dict[str, Any], name: str) -> None:
    """Clock, power, temperature and event reasons, as the failure message shows them."""
    found = plain_data.from_plain(alone[name])
    if name == "host_link":
        for way in ("h2d", "d2h", "both"):
            seen = {**found.evidence(way)}
            seen.pop("host load", None)  # of this machine, where others work on it
            assert seen == {"PCIe gen": 4, "PCIe width": 16, **TOLD}
            assert found.telemetry[way].samples == 3  # one in each span
    else:
        assert found.evidence == TOLD


@pytest.mark.e2e
def test_each_kind_of_copy_has_its_own_window(alone: dict[str, Any]) -> None:
    """One reading each; the judged kind's is the evidence."""
    found = plain_data.from_plain(alone["hbm"])
    assert {kind: telemetry.samples for kind, telemetry in found.telemetry.items()} == dict.fromkeys(
        ("copy", "triad", "read", "write"), 1
    )
    other = dataclasses.replace(found, telemetry={**found.telemetry, found.judged: None})
    assert other.evidence == {}


@pytest.mark.e2e
@pytest.mark.long
def test_value_of_a_group_carries_that_of_all_ranks(simulator: Path, tmp_path: Path) -> None:
    """The same on every rank: the rank with the low clock, and the hot one."""
    scenario = "0.clock.sm 1755\n1.temp 88\n1.throttle 0x40\n"
    both = measure(simulator, tmp_path, ["all_reduce", "finetune"], scenario, ranks=2)
    for name in ("all_reduce", "finetune"):
        first, second = (plain_data.from_plain(rank[name]) for rank in both)
        assert first.evidence == second.evidence
        assert first.evidence["SM MHz"] == "1755 (rank 0) to 1980"
        assert first.evidence["C"] == "up to 88 (rank 1)"
        assert first.evidence["event reasons"] == ["hw_thermal_slowdown (rank 1)"]
    assert plain_data.from_plain(both[0]["finetune"]).outcome.steps == 2


@pytest.mark.e2e
def test_gpu_that_gets_lost_costs_no_value(simulator: Path, tmp_path: Path) -> None:
    """NVML stops to answer: the measurement has its value, and no telemetry."""
    found = plain_data.from_plain(measure(simulator, tmp_path, ["hbm"], "0.err.nvmlDeviceGetClockInfo 15", ranks=1)[0]["hbm"])
    assert found.tb_s > 0
    assert found.evidence == {}


def main() -> None:
    """Main function of a rank: take the simulated GPU of its number for its own, and measure on the CPU."""
    folder, ranks, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rank = int(os.environ["RANK"])
    timing.gpu_uuid = lambda: UUIDS[rank]  # type: ignore[assignment]
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {name: plain_data.to_plain(SMALL[name]()) for name in names}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()
        os._exit(0)  # as workers do: the threads of Gloo may outlive their group


if __name__ == "__main__":
    main()
