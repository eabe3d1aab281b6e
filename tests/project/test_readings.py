"""The table of readings, docs/readings.md and its sister pages: nothing that is read goes unjudged in silence."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import TYPE_CHECKING

import pytest

import pytest_gpucluster.inventory
import pytest_gpucluster.measurements
from pytest_gpucluster.inventory import reading
from pytest_gpucluster.protocol.node_events import NodeLoss, NodeSxid, NodeXid
from tests.project.test_docs import script
from tests.support import REPOSITORY
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = tuple(sorted((REPOSITORY / "docs").glob("readings*.md")))
WITHOUT_CRITERION = ("evidence", "the run", "nobody")
ROW = re.compile(r"\| (?P<fields>`[^|]+`) \| (?P<judged>[^|]+?) \| (?P<remark>[^|]*)\|")
NAME = re.compile(r"`([^`]+)`")
NOT_READ = ("NotAvailable", "NvmlPart", "ReadingRow")
"""Dataclasses of the inventory that are no readings: how a reading is made."""
READINGS = (pytest_gpucluster.inventory, pytest_gpucluster.measurements)
OF_THE_LOG = (NodeXid, NodeSxid, NodeLoss)
"""What the kernel log shows is a message of the node's listener as well."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the page: who judges these fields."""

    kind: str
    fields: tuple[str, ...]
    judged: str
    remark: str


def modules() -> Iterator[object]:
    """Every module that reads or measures."""
    for package in READINGS:
        for found in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def dataclasses_here() -> dict[str, type]:
    """Every dataclass of these modules by name; a name twice would be ambiguous only if it were returned."""
    found = {
        name: kind
        for module in modules()
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__  # type: ignore[attr-defined]
    }
    return {**found, **{kind.__name__: kind for kind in OF_THE_LOG}}


def callables(module: object) -> Iterator[object]:
    """Public functions of a module, and public methods of its public classes."""
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:  # type: ignore[attr-defined]
            continue
        if inspect.isfunction(found):
            yield found
        elif inspect.isclass(found):
            yield from (method for key, method in vars(found).items() if inspect.isfunction(method) and not key.startswith("_"))


def returned() -> dict[str, tuple[str, ...]]:
    """The fields of every dataclass that is returned, or that lies in a field of one."""
    known = dataclasses_here()
    texts = [
        str(getattr(found, "__annotations__", {}).get("return", "")) for module in modules() for found in callables(module)
    ]
    waiting = [word for text in texts for word in re.findall(r"\w+", text) if word in known]
    found: dict[str, tuple[str, ...]] = {}
    while waiting:
        name = waiting.pop()
        if name in found or name.startswith("_"):
            continue
        fields = dataclasses.fields(known[name])
        found[name] = tuple(field.name for field in fields)
        waiting += [word for field in fields for word in re.findall(r"\w+", str(field.type)) if word in known]
    return {name: fields for name, fields in found.items() if name not in NOT_READ}


def rows() -> list[Row]:
    """The rows beside the fields, and those of all tables below a heading that names classes."""
    found = [
        Row(kind, (name,), ", ".join(one if one in WITHOUT_CRITERION else f"`{one}`" for one in row.judged), row.remark)
        for kind in returned()
        for name, row in reading.rows(dataclasses_here()[kind]).items()
    ]
    sections = [section for page in PAGES for section in page.read_text(encoding="utf-8").split("\n## ")[1:]]
    for section in sections:
        heading, _, body = section.partition("\n")
        for row in ROW.finditer(body):
            for kind in NAME.findall(heading):
                fields = tuple(NAME.findall(row["fields"]))
                found.append(Row(kind, fields, row["judged"], row["remark"].strip()))
    return found


def test_every_field_has_its_row() -> None:
    """A new field says who judges it, or that nobody does; a removed one leaves the page."""
    listed = sorted(f"{row.kind}.{field}" for row in rows() for field in row.fields)
    assert listed == sorted(f"{kind}.{field}" for kind, fields in returned().items() for field in fields)


def test_the_readers_are_found() -> None:
    """One of each kind: returned by a function, by a method, inside another one."""
    assert {"GpuHealth", "Telemetry", "GpuState", "Identity", "Occupancy", "GpuProcess", "HostLink"} <= set(returned())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.kind}.{row.fields[0]}")
def test_the_judge_exists(row: Row) -> None:
    """A criterion of thresholds.yaml; otherwise one of three words and a reason."""
    if row.judged in WITHOUT_CRITERION:
        assert row.remark
        return
    file = packaged()
    names = NAME.findall(row.judged)
    assert names
    assert ", ".join(f"`{name}`" for name in names) == row.judged
    assert set(names) <= set(file.criteria(file.profiles["h200-sxm"]))


def test_health_reads_what_it_judges() -> None:
    """The fields of NVML that have a judge stand in the acceptance's health tests by name, but for those that are compared."""
    text = (REPOSITORY / "tests_acceptance" / "test_health.py").read_text(encoding="utf-8")
    elsewhere = (*WITHOUT_CRITERION, "`drift`")
    judged = {field: row.judged not in elsewhere for row in rows() if row.kind == "GpuState" for field in row.fields}
    by_name = {field for field in judged if f'"{field}"' in text}
    evidence = {field for row in rows() if row.kind == "GpuState" and row.judged == "evidence" for field in row.fields}
    assert by_name - evidence == {field for field, is_judged in judged.items() if is_judged}


def test_the_printed_table_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    """With its source, what a healthy part answers, and who judges it."""
    assert script("generate_readings.py").main() == 0
    printed = capsys.readouterr().out
    table = {kind: reading.rows(found) for kind, found in dataclasses_here().items() if reading.rows(found)}
    assert printed.count("\n## ") == len(table)
    assert len(re.findall(r"(?m)^\| `", printed)) == sum(map(len, table.values()))
    assert "| `ecc_enabled` | `nvmlDeviceGetEccMode` | True | `ecc_enabled`, `gpu_worsened` |  |" in printed
    assert "| `recovery_action` | field 230 | none | `recovery_action` |  |" in printed
