"""Print the table of readings as Markdown: each field, where it comes from, what a healthy part answers, who judges it."""  # noqa: INP001 -- a script

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest_gpucluster.inventory  # noqa: E402 -- from this checkout, installed or not
import pytest_gpucluster.measurements  # noqa: E402 -- from this checkout, installed or not
from pytest_gpucluster.inventory.nvml_calls import NvmlField, NvmlFieldsByName  # noqa: E402 -- from this checkout, installed or not
from pytest_gpucluster.inventory.reading import NotAvailable, rows  # noqa: E402 -- from this checkout, installed or not
from pytest_gpucluster.inventory.sysfs import SysfsFile  # noqa: E402 -- from this checkout, installed or not

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpucluster.inventory.reading import ReadingRow

WITHOUT_CRITERION = ("evidence", "the run", "nobody")


def tables() -> Iterator[type]:
    """The dataclasses of readings and measurements that have rows, by module and name."""
    for package in (pytest_gpucluster.inventory, pytest_gpucluster.measurements):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(kind) and kind.__module__ == module.name and dataclasses.is_dataclass(kind) and rows(kind):
                    yield kind


def lines_of(kind: type) -> Iterator[str]:
    """The heading and the table of one dataclass."""
    yield from (f"## `{kind.__name__}`", "", str(kind.__doc__).partition("\n")[0].replace("``", "`"), "")
    yield from ("| field | source | healthy | judged by | remark |", "|---|---|---|---|---|")
    for name, row in rows(kind).items():
        judges = ", ".join(one if one in WITHOUT_CRITERION else f"`{one}`" for one in row.judged)
        healthy = "" if row.healthy is None else short(row.value_of(row.healthy))
        yield f"| `{name}` | {source_of(row)} | {healthy} | {judges} | {row.remark} |"
    yield ""


def source_of(row: ReadingRow) -> str:
    """The call, the numbered field, the file, or the function where one is needed; nothing for one that has no name."""
    source: Any = row.source
    if source is None:
        return ""
    if isinstance(source, NvmlField):
        return f"field {source.number}"
    if isinstance(source, NvmlFieldsByName):
        return f"field {', '.join(map(str, source.by_name.values()))}"
    name = str(getattr(source, "name", None) or getattr(source, "__name__", ""))
    return f"`{name}`" if name.strip("_").isidentifier() or isinstance(source, SysfsFile) else ""


def short(value: Any) -> str:
    """A number, a word, or why a healthy part of this generation has no value; empty for what does not fit a cell."""
    return str(value) if isinstance(value, (bool, int, float, str, NotAvailable)) else ""


def main() -> int:
    """Print the tables of all dataclasses."""
    print("# The table of readings\n")  # noqa: T201 -- what this script is for
    for kind in tables():
        print("\n".join(lines_of(kind)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
