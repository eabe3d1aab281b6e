"""Counters of this node's links and ports, as rates: of a made sysfs, and of any two readings."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.inventory import watched_node
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.watched_node import NodeReader, rate_gb_s, read_ports
from tests.support.sysfs import MadeSys, efa, infiniband, roce

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = NotAvailable("Not Supported")


def ports_of(sys: MadeSys) -> dict[str, Any]:
    """The ports by name."""
    found = read_ports(root=sys.root)
    assert isinstance(found, list)
    return {port.name: port for port in found}


def test_ports_of_every_fabric(tmp_path: Path) -> None:
    """InfiniBand and RoCE count words of 4 bytes, EFA counts bytes."""
    sys = MadeSys(tmp_path, infiniband(0, ports=2), roce(1), efa(2))
    for name in ("mlx5_0", "mlx5_1"):
        sys.change(name, "counters/port_xmit_data", "1000")
        sys.change(name, "counters/port_rcv_data", "7")
    sys.change("rdmap2s27", "hw_counters/tx_bytes", "1000")
    sys.pull_down("mlx5_1")
    found = ports_of(sys)
    assert [*found] == ["mlx5_0/1", "mlx5_0/2", "mlx5_1/1", "rdmap2s27/1"]
    assert {name: port.counted_bytes for name, port in found.items()} == {
        "mlx5_0/1": {"tx": 4000, "rx": 28},
        "mlx5_0/2": {"tx": 0, "rx": 0},
        "mlx5_1/1": {"tx": 4000, "rx": 28},
        "rdmap2s27/1": {"tx": 1000, "rx": 0},
    }
    assert [(port.state, port.rate_gbit_s) for port in found.values()] == [
        ("ACTIVE", 400), ("ACTIVE", 400), ("DOWN", 10), ("ACTIVE", 100),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["counters/port_xmit_data", "counters"])
def test_a_refused_counter_is_not_zero(tmp_path: Path, path: str) -> None:
    """Of one port; the others keep theirs."""
    sys = MadeSys(tmp_path, infiniband(0), infiniband(1))
    sys.refuse("mlx5_0", path)
    found = ports_of(sys)
    assert isinstance(found["mlx5_0/1"].counted_bytes["tx"], NotAvailable)
    assert found["mlx5_1/1"].counted_bytes["tx"] == 0


def test_no_adapter_at_all(tmp_path: Path) -> None:
    """The kernel has no such class."""
    assert isinstance(read_ports(root=tmp_path), NotAvailable)


@given(before=st.integers(0, 2**64), grown=st.integers(0, 2**50), elapsed_s=st.floats(0.01, 1e6))
def test_a_rate_is_what_was_added_over_the_time(before: int, grown: int, elapsed_s: float) -> None:
    """And none where a counter shrank."""
    assert rate_gb_s(before, before + grown, elapsed_s) == pytest.approx(grown / elapsed_s / 1e9)
    assert rate_gb_s(before + grown + 1, before, elapsed_s) is None


@pytest.mark.parametrize(
    ("before", "now", "elapsed_s"),
    [(None, 1, 1.0), (1, None, 1.0), (REFUSED, 1, 1.0), (1, REFUSED, 1.0), (1, 2, 0.0), (1, 2, -1.0)],
)
def test_no_rate_without_two_readings(before: Any, now: Any, elapsed_s: float) -> None:
    """No division, no zero."""
    assert rate_gb_s(before, now, elapsed_s) is None


def test_the_reader_keeps_the_last_two_readings(tmp_path: Path) -> None:
    """In a thread that ends with the block; without NVML the ports are read all the same."""
    sys = MadeSys(tmp_path, infiniband(0))
    with NodeReader(interval_s=0.01, root=sys.root) as reader:
        reader.wait_for_two(60)
        before, now = reader.last
        assert before is not None
        assert now is not None
        assert now.at_s > before.at_s
        assert isinstance(now.ports, list)
        assert [port.name for port in now.ports] == ["mlx5_0/1"]
    reader._thread.join(120)  # the reader itself waits a second for it
    assert not reader._thread.is_alive()


def test_a_reader_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends, the silence is counted, and the block is left."""
    hang = threading.Event()
    monkeypatch.setattr(watched_node, "read_ports", lambda **_: hang.wait(60))
    now_s = iter(range(0, 10_000, 10))
    with NodeReader(interval_s=0.01, root=tmp_path, clock=lambda: float(next(now_s))) as reader:
        reader.wait_for_two(5)
        assert reader.last == (None, None)
        assert reader.silent_s > 0
        hang.set()
