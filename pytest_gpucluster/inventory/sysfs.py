"""Files of the kernel's sysfs: their text or number, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_gpucluster.inventory.reading import NotAvailable, apply

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")
SYS = Path("/sys")
PROC = Path("/proc")


def read_at(path: Path, look: Callable[[], Value]) -> Value | NotAvailable:
    """What a look at this path shows, or why the kernel refuses it."""
    try:
        return look()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return NotAvailable(f"{getattr(error, 'strerror', error)} ({path})")


def read_text(file: Path) -> str | NotAvailable:
    """The stripped text of a file; an empty file has no value."""
    text = read_at(file, lambda: file.read_bytes()[:65536].decode("utf-8", "replace").strip())
    return apply(lambda known: known or NotAvailable(f"empty ({file})"), text)


def read_number(file: Path) -> int | NotAvailable:
    """The whole number, zero or more, that a file holds."""

    def in_text(text: str) -> int | NotAvailable:
        return int(text) if text.isascii() and text.isdecimal() else NotAvailable(f"{text[:80]!r} is no number ({file})")

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
        folder.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")
    return list_names(folder)


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
