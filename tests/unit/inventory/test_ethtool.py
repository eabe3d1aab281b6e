"""The statistics of a network interface, by a made driver and by this machine's."""

from __future__ import annotations

import array
import errno
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory import nics
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import GET_NAMES, GET_SIZES, NAME_BYTES, read_statistics
from tests.support.sysfs import MadeSys, roce

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTED = {"rx_prio3_pause": 7, "tx_prio3_pause_duration": 2**40, "tx_pause_storm_error_events": 1, "rx_bytes": 12}


class Driver:
    """It answers as the kernel does; ``refuses`` is the errno of every call, ``more`` come between the calls."""

    def __init__(self, counted: Mapping[str, int], *, refuses: int = 0, more: int = 0) -> None:
        """What it counts."""
        self.counted, self.refuses, self.more = dict(counted), refuses, more

    def __call__(self, _interface: str, buffer: array.array[int]) -> None:
        """Fill what was asked for."""
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        (command,) = struct.unpack_from("I", buffer.tobytes())
        if command == GET_SIZES:
            answer = struct.pack("=IIQI", command, 0, bool(self.counted) << 1, len(self.counted))
            self.counted |= {f"new{number}": 0 for number in range(self.more)}
        elif command == GET_NAMES:
            names = b"".join(name.encode().ljust(NAME_BYTES, b"\0") for name in self.counted)
            answer = struct.pack("III", command, 1, len(self.counted)) + names
        else:
            answer = struct.pack("II", command, len(self.counted)) + struct.pack(
                f"{len(self.counted)}Q", *self.counted.values()
            )
        assert len(answer) <= len(buffer), "the kernel would write beyond the buffer"
        buffer[: len(answer)] = array.array("B", answer)


def test_names_and_numbers() -> None:
    """As the driver has them, up to 64 bits."""
    assert read_statistics("eth0", call=Driver(COUNTED)) == COUNTED


@pytest.mark.parametrize("more", [1, 1000])
def test_statistics_that_come_between_the_calls(more: int) -> None:
    """The kernel writes them too: there is room, and those that were asked for are read."""
    assert read_statistics("eth0", call=Driver(COUNTED, more=more)) == COUNTED


def test_a_driver_that_counts_nothing() -> None:
    """No statistics are none, and no failure."""
    assert read_statistics("eth0", call=Driver({})) == {}


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENODEV, errno.EPERM, errno.EACCES])
def test_a_refusal_has_its_reason(number: int) -> None:
    """A driver without statistics, no such interface, a container without the permission."""
    found = read_statistics("eth0", call=Driver(COUNTED, refuses=number))
    assert found == NotAvailable(f"{os.strerror(number)} (statistics of eth0)")


@pytest.mark.parametrize("name", ["", "x" * 16, "x" * 1000])
def test_what_is_no_name(name: str) -> None:
    """The kernel's field has 16 bytes."""
    assert isinstance(read_statistics(name), NotAvailable)


def test_interfaces_of_this_machine() -> None:
    """Whatever they are: numbers by name, or a reason."""
    for folder in Path("/sys/class/net").iterdir():
        found = read_statistics(folder.name)
        assert isinstance(found, NotAvailable) or all(isinstance(value, int) for value in found.values())


def test_pauses_of_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause counters of its interface, and no other number; why, where the interface refuses."""
    made = MadeSys(tmp_path, roce(1))
    read = {"enp1s0f0np0": read_statistics("eth0", call=Driver(COUNTED))}
    monkeypatch.setattr(nics, "read_statistics", lambda name: read[name])
    port = nics.read_nics(root=made.root)[0].ports[0]  # type: ignore[index, union-attr]
    assert port.pauses == {key: value for key, value in COUNTED.items() if "pause" in key}
    read["enp1s0f0np0"] = NotAvailable("not permitted")
    port = nics.read_nics(root=made.root)[0].ports[0]  # type: ignore[index, union-attr]
    assert port.pauses == NotAvailable("not permitted")
