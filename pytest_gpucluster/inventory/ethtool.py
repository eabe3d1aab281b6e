"""The statistics of a network interface, as ``ethtool -S`` shows them, by the kernel's own call: no tool, no root is needed.

Layouts and numbers are those of Linux' ``include/uapi/linux/ethtool.h``.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING, Protocol

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping

SIOCETHTOOL = 0x8946
GET_SIZES, GET_NAMES, GET_VALUES = 0x37, 0x1B, 0x1D
OF_STATISTICS = 1
NAME_BYTES = 32
LONGEST_INTERFACE = 15
SPARE = 4096
"""The kernel writes as many entries as there are by then, however many were asked for: room for those that came since."""


class Call(Protocol):
    """One request to the driver of an interface: it fills ``buffer``."""

    def __call__(self, interface: str, buffer: array.array[int]) -> None:
        """Raise OSError where the kernel or the driver refuses it."""


def ask(interface: str, buffer: array.array[int]) -> None:
    """The call on this machine."""
    request = struct.pack("16sQ16x", interface.encode(), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def read_statistics(interface: str, *, call: Call = ask) -> Mapping[str, int] | NotAvailable:
    """Every number that the driver counts for this interface, by the driver's own names."""
    if not 0 < len(interface.encode()) <= LONGEST_INTERFACE:
        return NotAvailable(f"{interface[:80]!r} is no name of an interface")
    try:
        number = _number(interface, call)
        names = _buffer(struct.pack("III", GET_NAMES, OF_STATISTICS, number), (number + SPARE) * NAME_BYTES)
        call(interface, names)
        values = _buffer(struct.pack("II", GET_VALUES, number), (number + SPARE) * 8)
        call(interface, values)
    except OSError as error:
        return NotAvailable(f"{os.strerror(error.errno) if error.errno else error} (statistics of {interface})")
    texts = names.tobytes()[12:]
    keys = [texts[at : at + NAME_BYTES].partition(b"\0")[0].decode("ascii", "replace") for at in _steps(number, NAME_BYTES)]
    return dict(zip(keys, struct.unpack_from(f"={number}Q", values.tobytes(), 8), strict=True))


def _number(interface: str, call: Call) -> int:
    """How many statistics there are; the kernel clears the bit of a set that the driver does not have."""
    sizes = _buffer(struct.pack("=IIQ", GET_SIZES, 0, 1 << OF_STATISTICS), 4)
    call(interface, sizes)
    _, _, known, number = struct.unpack_from("=IIQI", sizes.tobytes())
    return int(number) if known else 0


def _steps(number: int, size: int) -> range:
    return range(0, number * size, size)


def _buffer(head: bytes, more_bytes: int) -> array.array[int]:
    return array.array("B", head + bytes(more_bytes))
