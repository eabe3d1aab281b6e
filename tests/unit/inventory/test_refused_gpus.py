"""Which GPU is which where NVML refuses one: addresses from the PCI bus, and the ranks that CUDA gives no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from pytest_gpucluster.cluster.binding import _in_bus_order
from pytest_gpucluster.inventory import gpu_index
from pytest_gpucluster.inventory.gpu_index import complete_addresses, expected_index
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.inventory.nvml_calls import GpuLostError, GpuNeedsResetError, NvmlError, naming, required
from pytest_gpucluster.measurements import timing
from pytest_gpucluster.worker.raised import failure_of, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

BUS = ("0000:10:00.0", "0000:18:00.0", "0000:2a:00.0", "0000:2b:00.0")
NVML = tuple(f"0000{address.upper()}" for address in BUS)
UUIDS = ["GPU-0", "GPU-1", "", "GPU-3"]


@pytest.mark.parametrize(
    ("refused", "on_bus", "left"),
    [
        ((2,), BUS, {2: f"0000{BUS[2]}"}),
        ((0,), BUS, {0: f"0000{BUS[0]}"}),
        ((3,), BUS, {3: f"0000{BUS[3]}"}),
        ((1, 2), BUS, {1: f"0000{BUS[1]}", 2: f"0000{BUS[2]}"}),
        ((0, 3), BUS, {0: f"0000{BUS[0]}", 3: f"0000{BUS[3]}"}),
        ((0, 1, 2, 3), BUS, {number: f"0000{address}" for number, address in enumerate(BUS)}),
        ((2,), (), {2: ""}),
        ((2,), BUS[:2], {2: ""}),
        ((2,), (*BUS, "0000:2a:01.0"), {2: ""}),
        ((2,), (*BUS, "0000:0a:00.0", "0001:00:00.0"), {2: f"0000{BUS[2]}"}),
        ((), BUS, {}),
    ],
)
def test_the_address_that_only_the_bus_has(refused: tuple[int, ...], on_bus: Sequence[str], left: dict[int, str]) -> None:
    """It is one between those of the neighbours, if just as many fit there."""
    by_nvml = ["" if number in refused else address for number, address in enumerate(NVML)]
    found = complete_addresses(by_nvml, on_bus)
    assert {number: found[number] for number in refused} == left
    assert [address for number, address in enumerate(found) if number not in refused] == list(filter(None, by_nvml))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_gpu_of_torch_that_nvml_does_not_list(monkeypatch: pytest.MonkeyPatch, *, is_cut: bool) -> None:
    """An instance of a GPU in MIG mode has a UUID of its own. A GPU that NVML refuses says nothing of its mode."""
    monkeypatch.setattr(gpu_index, "read_uuids", lambda: UUIDS)
    monkeypatch.setattr(gpu_index, "is_in_mig_mode", {0: False, 1: is_cut, 3: False}.__getitem__)
    with pytest.raises(NvmlError, match=r"torch uses GPU GPU-7, which NVML does not show") as caught:
        gpu_index.own_index("GPU-7")
    assert ("MIG" in str(caught.value)) is is_cut


@pytest.mark.parametrize(
    ("taken", "indices"),
    [
        ((), [0, 1, 2, 3, None]),
        (("GPU-0", "GPU-1", "GPU-3"), [None, None, None, 2, None]),
        (("GPU-3", "GPU-0"), [None, None, 1, 2, None]),
    ],
)
def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch, taken: tuple[str, ...], indices: list[int | None]) -> None:
    """Where CUDA leaves out a lost GPU, the last rank has it, and not one of another rank."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [expected_index(UUIDS, rank, taken) for rank in range(5)] == indices


@pytest.mark.parametrize(
    ("known", "order"),
    [
        ([(BUS[0], None), (BUS[1], None), (BUS[2], None), (BUS[3], None)], [0, 1, 2, 3]),
        ([(BUS[3], None), (BUS[1], None), (None, 0), (BUS[2], None)], [2, 1, 3, 0]),
        ([(BUS[0], None), (BUS[1], None), (None, 2), (BUS[3], None)], [0, 1, 2, 3]),
        ([(BUS[0], None), (BUS[1], None), (BUS[3], None), (None, 2)], [0, 1, 3, 2]),
        ([(BUS[0], None), (None, None), (BUS[2], None), (BUS[3], None)], [0, 1, 2, 3]),
        ([("0000:2B:00.0", None), ("0000:2a:00.0", None)], [1, 0]),
        ([(None, None), (None, None)], [0, 1]),
    ],
)
def test_the_order_of_the_ranks(known: list[tuple[str | None, int | None]], order: list[int]) -> None:
    """By address, whatever its case; one without an address keeps its own number, and takes nobody else's."""
    ranks = {
        rank: Identity(hostname="h", group_rank=0, local_rank=rank, versions={}, torch_gpus=0, pci=pci, gpu_number=number)
        for rank, (pci, number) in enumerate(known)
    }
    assert _in_bus_order(ranks) == order


@pytest.mark.parametrize(("local_rank", "uuid"), [("0", "GPU-a"), ("1", None)])
def test_a_rank_for_which_torch_has_no_gpu(monkeypatch: pytest.MonkeyPatch, local_rank: str, uuid: str | None) -> None:
    """The current GPU of torch is then another rank's."""
    cuda: Any = timing.torch.cuda
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a"))
    assert timing.gpu_uuid() == uuid
    assert timing.gpu_uuids() == ["GPU-a"]


@pytest.mark.parametrize(("code", "kind", "word"), [(15, GpuLostError, "reboot"), (16, GpuNeedsResetError, "reset")])
def test_what_nvml_says_of_a_gpu_that_is_gone(code: int, kind: type[NvmlError], word: str) -> None:
    """It blames the GPU, and says what to do, also with the GPU's name before it."""

    def refused() -> None:
        raise pynvml.NVMLError(code)

    with pytest.raises(kind) as caught, naming("GPU 2"):
        required(refused)
    failure = failure_of(caught.value)
    assert (part_of(caught.value), failure.blames) == ("gpu", "gpu")
    assert word in str(failure.advice)
    assert failure_of(NvmlError("Not Supported", code=3)).advice is None
