"""Files of the kernel's sysfs: their text or number, or the reason why there is none."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pytest_gpucluster.inventory.reading import NotAvailable, apply

Value = TypeVar("Value")
USUAL_BYTES, MOST_BYTES = 1 << 16, 1 << 26
"""Of a file that is read: nearly all, and the most. ``/proc/interrupts`` of a host with 512 processors has 17 MB."""
MOST_DIGITS = 20
"""Of a number of 64 bits."""
SYS = Path("/sys")
PROC = Path("/proc")


def read_at(path: Path, look: Callable[[], Value]) -> Value | NotAvailable:
    """What a look at this path shows, or why the kernel refuses it."""
    try:
        return look()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return NotAvailable(f"{getattr(error, 'strerror', error)} ({path})")


def read_text(file: Path) -> str | NotAvailable:
    """The stripped text of a file; an empty file has no value, nor has one of which only a part would be read."""

    def content() -> bytes:
        with file.open("rb") as opened:
            begin = opened.read(USUAL_BYTES)
            return begin + opened.read(MOST_BYTES) if len(begin) == USUAL_BYTES else begin

    def text(known: bytes) -> str | NotAvailable:
        if len(known) > MOST_BYTES:
            return NotAvailable(f"longer than {MOST_BYTES >> 20} MiB ({file})")
        return known.decode("utf-8", "replace").strip() or NotAvailable(f"empty ({file})")

    return apply(text, read_at(file, content))


def number_in(text: str) -> int | None:
    """The whole number, zero or more, that a text of the kernel is; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def read_number(file: Path) -> int | NotAvailable:
    """The whole number, zero or more, that a file holds."""

    def in_text(text: str) -> int | NotAvailable:
        number = number_in(text)
        return NotAvailable(f"{text[:80]!r} is no number ({file})") if number is None else number

    return apply(in_text, read_text(file))


def read_numbers(folder: Path) -> dict[str, int | NotAvailable] | NotAvailable:
    """The number in each entry of a folder, by name."""
    return apply(lambda names: {name: read_number(folder / name) for name in names}, list_names(folder))


def list_names(folder: Path) -> list[str] | NotAvailable:
    """The names in a folder, sorted."""
    return read_at(folder, lambda: sorted(path.name for path in folder.iterdir()))


def list_if_there(folder: Path) -> list[str] | NotAvailable:
    """The names in a folder, sorted; none where the kernel has no such folder. One that cannot be listed says nothing."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")


def is_there(path: Path) -> bool:
    """Whether something is there; what this process may not look at, or has no possible name, is not."""
    try:
        return path.exists()
    except OSError:
        return False


def target_of(link: Path) -> str | NotAvailable:
    """The name of what a link leads to."""
    return read_at(link, lambda: link.resolve(strict=True).name)


@dataclass(frozen=True, slots=True)
class SysfsFile:
    """A source of readings: a file or folder below that of a part."""

    name: str
    how: Callable[[Path], Any] = read_text

    def __call__(self, folder: Path) -> Any:
        """Its content, or why there is none."""
        return self.how(folder / self.name)


# --- Statistics of network interfaces, which are in no file ---

SIOCETHTOOL = 0x8946
GET_SIZES, GET_NAMES, GET_VALUES = 0x37, 0x1B, 0x1D
OF_STATISTICS = 1
NAME_BYTES = 32
LONGEST_INTERFACE = 15
SPARE = 4096
"""The kernel writes as many entries as there are by then, however many were asked for: room for those that came since."""


def ask(interface: str, buffer: array.array[int]) -> None:
    """The call on this machine."""
    request = struct.pack("16sQ16x", interface.encode(), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def read_statistics(interface: str, *, call: Callable[[str, array.array[int]], None] = ask) -> Mapping[str, int] | NotAvailable:
    """Every number that the driver counts for this interface, by its own names, as `ethtool -S` does; no root is needed.

    ``call`` has the driver fill a buffer, or raises OSError. Layouts: Linux' ``include/uapi/linux/ethtool.h``.
    """
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
    texts = struct.iter_unpack(f"{NAME_BYTES}s", names.tobytes()[12 : 12 + number * NAME_BYTES])
    keys = [text.partition(b"\0")[0].decode("ascii", "replace") for (text,) in texts]
    return dict(zip(keys, struct.unpack_from(f"={number}Q", values.tobytes(), 8), strict=True))


def _number(interface: str, call: Callable[[str, array.array[int]], None]) -> int:
    """How many statistics there are; the kernel clears the bit of a set that the driver does not have."""
    sizes = _buffer(struct.pack("=IIQ", GET_SIZES, 0, 1 << OF_STATISTICS), 4)
    call(interface, sizes)
    _, _, known, number = struct.unpack_from("=IIQI", sizes.tobytes())
    return int(number) if known else 0


def _buffer(head: bytes, more_bytes: int) -> array.array[int]:
    return array.array("B", head + bytes(more_bytes))
