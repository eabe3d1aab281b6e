"""The host link on a CPU: its arithmetic, its refusals, where its memory lies, and that wrong data is an error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import mmap
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpucluster.inventory import numa
from pytest_gpucluster.measurements import host_link as module
from pytest_gpucluster.measurements import progress, timing
from pytest_gpucluster.measurements.host_link import HostLink, gb_s, host_link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpucluster.inventory.numa import Locality

SMALL = 1 << 16
GPU = "0000:1b:00.0"


def small(**changes: Any) -> HostLink:
    """Copies small enough for any CPU."""
    return host_link(**{"size_bytes": SMALL, "iterations": 2, "warmup": 1, **changes})


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """The reported steps, in order."""
    heard: list[str] = []
    progress.listen(lambda step, _fraction: heard.append(step))
    yield heard
    progress.listen(lambda _step, _fraction: None)


@pytest.fixture
def plant_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A GPU and a host with NUMA nodes, by a planted sysfs."""

    def plant(*, cpus: dict[int, str], gpu_on: int, free_kb: int = 1 << 30) -> None:
        for number, text in cpus.items():
            folder = tmp_path / "devices" / "system" / "node" / f"node{number}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(text)
            (folder / "distance").write_text(" ".join("10" if other == number else "21" for other in cpus))
            sizes = {"MemTotal": 1 << 31, "MemFree": free_kb, "Active(file)": 0, "Inactive(file)": 0}
            (folder / "meminfo").write_text("".join(f"Node {number} {name}: {size} kB\n" for name, size in sizes.items()))
        device = tmp_path / "bus" / "pci" / "devices" / GPU
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{gpu_on}\n")
        read = functools.partial(numa.read_locality, root=tmp_path)
        monkeypatch.setattr(module, "_pci_address", lambda: GPU)
        monkeypatch.setattr(module.numa, "read_locality", read)

    return plant


@pytest.fixture
def own_cpus() -> list[int]:
    """Where this process may run; the same afterwards, whatever a test leaves."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def harm(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[torch.Tensor], None]) -> None:
    """Every copy is done, and then its destination handed to ``wrong``."""

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
        wrong(destination)

    monkeypatch.setattr(module, "_copy", copy)


def made(**changes: Any) -> HostLink:
    """A healthy GPU on the second of two sockets, with what was seen on H200 (h200x4-peers)."""
    fields: dict[str, Any] = {
        "h2d_gb_s": 55.5,
        "d2h_gb_s": 55.4,
        "both_gb_s": 100.0,
        "repeats_h2d_gb_s": [55.5],
        "repeats_d2h_gb_s": [55.4],
        "repeats_both_gb_s": [100.0],
        "h2d_remote_gb_s": 55.3,
        "d2h_remote_gb_s": 41.0,
        "numa_node": 1,
        "remote_node": 0,
        "memory_nodes": [0, 1],
        "cpus": "4-7",
        "cpus_allowed": "0-7",
        "cpus_are_local": True,
        "pages_on": [1],
        "size_bytes": 1 << 29,
        "device": "NVIDIA H200",
    }
    return HostLink(**{**fields, **changes})


# --- arithmetic ---


def test_published_bandwidth_is_reproduced() -> None:
    """8 x H200, nvbandwidth (ml-engineering): 55.43 GB/s, 88 % of what PCIe 5.0 x16 leaves after its encoding.

    At nvbandwidth's 512 MiB that is 9.686 ms a copy; in GiB it would read 51.6 and in both-ways figures 44 %.
    """
    found = gb_s(512 << 20, 9.6856e-3)
    assert round(found, 2) == 55.43
    one_way_gb_s = 16 * 32e9 / 8 * 128 / 130 / 1e9
    assert round(one_way_gb_s, 1) == 63.0
    assert round(100 * found / one_way_gb_s) == 88


def test_span_is_divided_by_its_copies_and_the_middle_one_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer each way; both ways at once move as many bytes in all, half of them each way."""
    milliseconds = iter([5, 1, 2, 8, 4, 2, 1, 8, 2])
    launched: list[int] = []

    def time_span(call: Callable[[], object], *, launches: int, **_watched: Any) -> float:
        call()
        launched.append(launches)
        return next(milliseconds) / 1000

    monkeypatch.setattr(timing, "time_span", time_span)
    found = small(iterations=3)
    assert set(launched) == {module.COPIES_PER_SPAN}
    assert found.repeats_d2h_gb_s == [timing.rounded(SMALL / ms / 1e6) for ms in (5, 1, 2)]
    assert found.d2h_gb_s == pytest.approx(SMALL / 2e-3 / 1e9, abs=1e-6)
    assert found.h2d_gb_s == pytest.approx(SMALL / 4e-3 / 1e9, abs=1e-6)
    assert found.both_gb_s == pytest.approx(SMALL / 2e-3 / 1e9, abs=1e-6)


def test_it_really_measures(steps: list[str]) -> None:
    """Without any stand-in: positive finite bandwidths, plain data, a report for each kind."""
    found = small(size_bytes=(1 << 20) + 9, iterations=3)
    assert found.size_bytes == 1 << 20
    for kind in ("h2d", "d2h", "both"):
        repeats = getattr(found, f"repeats_{kind}_gb_s")
        assert len(repeats) == 3
        assert min(repeats) <= getattr(found, f"{kind}_gb_s") <= max(repeats)
        assert 0 < min(repeats) <= max(repeats) < 10_000
    assert steps == ["device to host", "host to device", "both at once", "done"]
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    if not torch.cuda.is_available():
        assert (found.numa_node, found.cpus_are_local, found.h2d_remote_gb_s, found.misplaced) == (None, None, None, [])


# --- wrong data ---


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("device to host", "device to host: 1 of the elements 0 to 8191 are wrong"),
        ("host to device", "host to device: 1 of the elements 0 to 8191 are wrong"),
        ("both at once", "while both: 1 of the elements 0 to 4095 are wrong"),
    ],
)
def test_one_wrong_element_is_an_error(monkeypatch: pytest.MonkeyPatch, steps: list[str], step: str, text: str) -> None:
    """One bit of one element, whatever the kind of copy that did it."""

    def wrong(destination: torch.Tensor) -> None:
        if steps[-1] == step:
            destination[777] ^= 1 << 40

    harm(monkeypatch, wrong)
    with pytest.raises(ArithmeticError, match=text):
        small()


@pytest.mark.parametrize(("part", "way"), [(0, "host to device"), (SMALL // 16, "device to host")])
def test_each_way_of_both_is_verified(monkeypatch: pytest.MonkeyPatch, steps: list[str], part: int, way: str) -> None:
    """The first half goes to the device, the second to the host; an error names the direction."""

    def wrong(destination: torch.Tensor) -> None:
        if steps[-1] == "both at once" and destination.storage_offset() == part:
            destination[-1] += 1

    harm(monkeypatch, wrong)
    with pytest.raises(ArithmeticError, match=f"{way} while both: 1 of"):
        small()


def test_swapped_parts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right numbers at wrong places are wrong, in a later chunk too."""
    monkeypatch.setattr(module, "CHUNK", 1024)

    def wrong(destination: torch.Tensor) -> None:
        destination[2048:4096] = destination[2048:4096].roll(1024)

    harm(monkeypatch, wrong)
    with pytest.raises(ArithmeticError, match="device to host: 1024 of the elements 2048 to 3071 are wrong"):
        small()


@pytest.mark.parametrize(
    ("step", "left_out", "text"),
    [
        ("device to host", {0}, "device to host: 8192 of"),
        ("host to device", {0}, "host to device: 8192 of"),
        ("both at once", {0}, "host to device while both: 4096 of"),
        ("both at once", {SMALL // 16}, "device to host while both: 4096 of"),
    ],
)
def test_copies_that_copy_nothing_are_an_error(
    monkeypatch: pytest.MonkeyPatch, steps: list[str], step: str, left_out: set[int], text: str
) -> None:
    """However fast: what an earlier kind of copy brought is not taken for what this one should have brought."""

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        if steps[-1] != step or destination.storage_offset() not in left_out:
            destination.copy_(source)

    monkeypatch.setattr(module, "_copy", copy)
    with pytest.raises(ArithmeticError, match=text):
        small()


# --- refusals ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size_bytes": 15}, "size_bytes must be at least 16 on .*, not 15"),
        ({"size_bytes": -1}, "size_bytes must be at least"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"warmup": -1}, "warmup at least 0, not 2 and -1"),
    ],
)
def test_nothing_to_measure_is_refused(changes: dict[str, Any], text: str) -> None:
    """Each with what would do."""
    with pytest.raises(ValueError, match=text):
        small(**changes)


def test_launches_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU copies of a few bytes would time the launch."""
    monkeypatch.setattr(module, "_smallest_bytes", lambda: module.SMALLEST_ON_GPU_BYTES)
    with pytest.raises(ValueError, match="at least 16777216"):
        small()


def test_memory_that_is_short_is_said() -> None:
    """With both numbers, before anything is allocated."""
    with pytest.raises(MemoryError, match=r"2097152\.00 GiB are needed on the host, .* GiB are free"):
        small(size_bytes=1 << 50)


def test_memory_is_that_of_the_gpu_s_node_and_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, plant_host: Callable[..., None], own_cpus: list[int]
) -> None:
    """Eight ranks may ask the one node at once; what other nodes have is no help."""
    plant_host(cpus={0: "0", 1: "1"}, gpu_on=1, free_kb=1 << 10)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(MemoryError, match="are needed on the host's NUMA node 1, "):
        small(size_bytes=1 << 17)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert small(size_bytes=1 << 17).numa_node == 1


# --- where it runs, and where its memory lies ---


def test_thread_runs_beside_the_gpu_and_then_where_it_was(
    monkeypatch: pytest.MonkeyPatch, plant_host: Callable[..., None], own_cpus: list[int]
) -> None:
    """While it copies; afterwards, and after an error, it may run where it might before."""
    plant_host(cpus={0: f"{own_cpus[-1]}"}, gpu_on=0)
    seen: set[frozenset[int]] = set()
    harm(monkeypatch, lambda _destination: seen.add(frozenset(os.sched_getaffinity(0))))
    found = small()
    assert seen == {frozenset(own_cpus[-1:])}
    assert found.cpus == str(own_cpus[-1])
    assert (found.cpus_allowed, found.cpus_are_local) == (numa.format_cpulist(own_cpus), True)
    assert sorted(os.sched_getaffinity(0)) == own_cpus

    harm(monkeypatch, lambda destination: destination.zero_())
    with pytest.raises(ArithmeticError):
        small()
    assert sorted(os.sched_getaffinity(0)) == own_cpus


def test_process_held_away_from_its_gpu_is_misplaced(plant_host: Callable[..., None], own_cpus: list[int]) -> None:
    """The link is measured from the allowed CPUs, and the result says so."""
    away = max(own_cpus) + 1
    plant_host(cpus={0: str(away)}, gpu_on=0)
    found = small()
    assert found.cpus_are_local is False
    assert found.cpus == found.cpus_allowed == numa.format_cpulist(own_cpus)
    text = f"this process may use CPUs {found.cpus_allowed}, none of them on the GPU's NUMA node 0"
    assert found.misplaced[0] == text


def test_kernel_tells_where_pages_lie(own_cpus: list[int]) -> None:
    """Real memory on a node of this very machine, or no answer where the kernel gives none."""
    nodes = numa.read_locality(None).memory_nodes
    for node in nodes[:1]:
        with module._host_memory(SMALL, node=node) as host:
            assert module._pages_on(host) in ([node], None)
            assert int(host.sum()) == 0
            assert host.data_ptr() % 4096 == 0
    fresh = mmap.mmap(-1, 1 << 27)  # unlike torch's, never memory that was used before: no page of it is anywhere yet
    untouched = torch.frombuffer(fresh, dtype=torch.int64)
    assert module._pages_on(untouched[1 << 20 :]) is None


def test_machine_whose_system_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured unbound, and nothing is said about where."""
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    with module._host_memory(SMALL, node=0) as host:
        assert module._pages_on(host) is None


def test_far_node_is_measured_too(
    monkeypatch: pytest.MonkeyPatch, plant_host: Callable[..., None], own_cpus: list[int], steps: list[str]
) -> None:
    """With its memory and on its CPUs, each way alone."""
    plant_host(cpus={0: str(own_cpus[0]), 1: str(own_cpus[-1])}, gpu_on=1)
    asked: list[int] = []
    monkeypatch.setattr(module, "_bind", lambda _tensor, node: asked.append(node))
    monkeypatch.setattr(module, "_pages_on", lambda _tensor: asked[-1:])
    found = small(iterations=5)
    assert asked == [1, 0]
    assert (found.numa_node, found.remote_node, found.memory_nodes, found.pages_on) == (1, 0, [0, 1], [1])
    assert found.h2d_remote_gb_s is not None
    assert found.d2h_remote_gb_s is not None
    assert steps[-2:] == ["NUMA node 0", "done"]


@pytest.mark.parametrize("pages_on", [[1], [0, 1], None])
def test_far_memory_that_is_not_there_is_no_far_memory(
    monkeypatch: pytest.MonkeyPatch, plant_host: Callable[..., None], own_cpus: list[int], pages_on: list[int] | None
) -> None:
    """Pages elsewhere, or at an unknown node without CPUs: not measured, rather than called remote."""
    plant_host(cpus={0: str(max(own_cpus) + 1), 1: str(own_cpus[0])}, gpu_on=1)
    monkeypatch.setattr(module, "_bind", lambda _tensor, _node: None)
    monkeypatch.setattr(module, "_pages_on", lambda _tensor: pages_on)
    found = small()
    assert (found.remote_node, found.h2d_remote_gb_s, found.d2h_remote_gb_s) == (0, None, None)


def test_far_node_without_room_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, plant_host: Callable[..., None], own_cpus: list[int]
) -> None:
    """The comparison is an extra; a full node is not the GPU's fault."""
    plant_host(cpus={0: "0", 1: "1"}, gpu_on=1)
    real: Callable[[Locality, int | None], int | None] = numa.Locality.available_bytes
    monkeypatch.setattr(numa.Locality, "available_bytes", lambda self, number: 0 if number == 0 else real(self, number))
    found = small()
    assert (found.remote_node, found.h2d_remote_gb_s) == (0, None)


# --- what the numbers mean ---


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"pages_on": None, "h2d_remote_gb_s": None, "d2h_remote_gb_s": None}, []),
        ({"h2d_remote_gb_s": 58.0}, []),
        ({"cpus_are_local": False, "cpus_allowed": "0-3"}, ["this process may use CPUs 0-3, none of them on"]),
        ({"pages_on": [0]}, ["memory asked of NUMA node 1, the GPU's, lies on [0]"]),
        ({"pages_on": [0, 1]}, ["memory asked of NUMA node 1, the GPU's, lies on [0, 1]"]),
        (
            {"h2d_gb_s": 41.2, "d2h_gb_s": 36.04},
            [
                "host to device, NUMA node 0 reaches 55.3 GB/s and the GPU's own 1 41.2",
                "device to host, NUMA node 0 reaches 41.0 GB/s and the GPU's own 1 36.0",
            ],
        ),
        ({"numa_node": None, "cpus_are_local": None, "h2d_gb_s": 41.2}, []),
    ],
)
def test_misplacement_is_told(changes: dict[str, Any], found: list[str]) -> None:
    """A node that is 4.5 % faster is noise, one that is a third faster is where the GPU really is."""
    misplaced = made(**changes).misplaced
    assert len(misplaced) == len(found)
    assert all(text.startswith(beginning) for text, beginning in zip(misplaced, found, strict=True))


@pytest.mark.parametrize(
    ("node", "memory_nodes", "known"), [(1, [0, 1], True), (None, [0], True), (None, [0, 1], False), (None, [], False)]
)
def test_unknown_place_is_said(node: int | None, memory_nodes: list[int], *, known: bool) -> None:
    """On one node everything is local. On several nodes, or without sysfs, a GPU without a node has no known place."""
    assert made(numa_node=node, memory_nodes=memory_nodes).numa_is_known is known


# --- together with other GPUs ---


def test_together_lines_up_before_each_kind(
    monkeypatch: pytest.MonkeyPatch, plant_host: Callable[..., None], own_cpus: list[int], steps: list[str]
) -> None:
    """Once for each kind, after its data is ready; no other NUMA node is tried then, and a single rank waits for no other."""
    plant_host(cpus={0: str(own_cpus[0]), 1: str(own_cpus[-1])}, gpu_on=1)
    asked: list[int] = []
    monkeypatch.setattr(module, "_bind", lambda _tensor, node: asked.append(node))
    monkeypatch.setattr(module, "_pages_on", lambda _tensor: asked[-1:])
    met: list[str] = []
    monkeypatch.setattr(module.dist, "barrier", lambda: met.append(steps[-1]))
    found = small(together=True)
    assert met == ["device to host", "host to device", "both at once"]
    assert asked == [1]
    assert (found.h2d_remote_gb_s, found.d2h_remote_gb_s) == (None, None)
    small()
    assert len(met) == 3


def test_together_needs_a_group() -> None:
    """Without one nothing would be together."""
    with pytest.raises(ValueError, match="process group"):
        small(together=True)


# --- pinning, on a stand-in for the CUDA runtime ---


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_memory_is_pinned_and_released_after_the_last_copy(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Registered once as it is, released when the GPU is done with it, after an error too."""
    done: list[Any] = []

    class Runtime:
        cudaHostRegister = staticmethod(lambda *arguments: done.append(("register", *arguments)) or 0)  # noqa: N815
        cudaHostUnregister = staticmethod(lambda address: done.append(("unregister", address)) or 0)  # noqa: N815

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", done.append)
    monkeypatch.setattr(timing, "synchronize", lambda: done.append("synchronize"))
    host = torch.zeros(8, dtype=torch.int64)
    with contextlib.suppress(ArithmeticError), module._pinned(host):
        done.append("copy")
        if ends == "with an error":
            raise ArithmeticError
    assert done == [("register", host.data_ptr(), 64, 0), 0, "copy", "synchronize", ("unregister", host.data_ptr()), 0]


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies would be of pageable memory, at half the rate."""

    def refuse(code: int) -> None:
        raise RuntimeError(f"out of memory ({code})")

    class Runtime:
        cudaHostRegister = staticmethod(lambda *_arguments: 2)  # noqa: N815

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(RuntimeError, match=r"out of memory \(2\)"), module._pinned(torch.zeros(8)):
        pytest.fail("entered")
