"""Files of the kernel's sysfs: their text or number, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Callable

SYS = Path("/sys")
PROC = Path("/proc")


def read_text(file: Path) -> str | NotAvailable:
    """The stripped text of a file; an empty file has no value."""
    try:
        text = file.read_bytes()[:65536].decode("utf-8", "replace").strip()
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({file})")
    return text or NotAvailable(f"empty ({file})")


def read_number(file: Path) -> int | NotAvailable:
    """The whole number, zero or more, that a file holds."""
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    if not (text.isascii() and text.isdecimal()):
        return NotAvailable(f"{text[:80]!r} is no number ({file})")
    return int(text)


def read_numbers(folder: Path) -> dict[str, int | NotAvailable] | NotAvailable:
    """The number in each entry of a folder, by name."""
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    return {name: read_number(folder / name) for name in names}


def list_names(folder: Path) -> list[str] | NotAvailable:
    """The names in a folder, sorted."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")


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
    try:
        return link.resolve(strict=True).name
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return NotAvailable(f"{getattr(error, 'strerror', error)} ({link})")


@dataclass(frozen=True, slots=True)
class SysfsFile:
    """A source of readings: a file or folder below that of a part."""

    name: str
    how: Callable[[Path], Any] = read_text

    def __call__(self, folder: Path) -> Any:
        """Its content, or why there is none."""
        return self.how(folder / self.name)
