"""The parts of hosts, serial by serial, as CSV and JSON; and how they differ from an order. Pure, but for reading files.

A row is one part: chassis, board, NIC or GPU. A serial that could not be read is not known: it is never missing. An adapter
is known by its GUID, which the kernel shows to anybody; its serial number only to root.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.records.spreadsheet import FORMULA, as_csv, as_text
from pytest_gpucluster.text import counted, one_line

KINDS = ("chassis", "board", "nic", "gpu")
NOT_WRITTEN = ("to be filled", "not specified", "default string", "system serial", "chassis serial", "none", "n/a")
PLACEHOLDERS = (*NOT_WRITTEN, "0123456789")
"""What firmware has in place of a serial that nobody wrote."""
SHORTENED = re.compile(r"\d(?:[.,]\d+)?[eE]\+?\d+|\d+[.,]0+")
"""A serial that a spreadsheet took for a number: its digits are lost."""
NO_DIGIT = re.compile("[\\s\u200b\ufeff'\"=]")
"""What people and spreadsheets put into or around a serial."""
MOST_BYTES = 64 * 2**20
"""Of a file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPart:
    """One part of a host. An empty text is not known, or not asked for; ``unread`` says why the serial is not known."""

    host: str = ""
    part: str
    name: str = ""
    model: str = ""
    serial: str = ""
    firmware: str = ""
    unread: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Which part it is: letters count alike in both cases, a number with and without zeros before it, a GUID as it may be.

        Spreadsheets drop such zeros, and write ``="0324"`` or an apostrophe to keep them.
        """
        serial = NO_DIGIT.sub("", self.serial).casefold()
        if self.part == "nic":
            return self.part, re.sub("^0x|[:-]", "", serial)
        return self.part, serial.lstrip("0") if serial.isdecimal() else serial

    @property
    def label(self) -> str:
        """As people call it."""
        at = f" ({' '.join(filter(None, (self.host, self.name)))})" if self.host or self.name else ""
        return one_line(f"{self.part} {self.serial or 'without a known serial'}{at}")


COLUMNS = tuple(field.name for field in fields(ListedPart))
COMPARED = ("host", "model", "firmware")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDifferences:
    """What differs from an order: ``wrong`` is certain; ``undecided`` is what no serial decides, as one was not read."""

    wrong: tuple[str, ...]
    undecided: tuple[str, ...]
    same: int


def parts_of(machine: Mapping[str, Any]) -> list[ListedPart]:
    """The parts of a machine, from the plain data of ``read_machine``."""
    host, dmi, nics, gpus = (machine[name] for name in ("hostname", "dmi", "nics", "gpus"))
    found = [
        _part(host, "chassis", "", (dmi["product_name"], dmi["chassis_serial"], "")),
        _part(host, "board", "", (dmi["board_name"], dmi["board_serial"], dmi["bios_version"])),
    ]
    if isinstance(nics, list):
        own = (nic for nic in nics if nic["is_virtual"] is not True and nic["is_nvswitch"] is not True)
        found += [_part(host, "nic", nic["device"], (nic["board_id"], nic["guid"], nic["firmware"])) for nic in own]
    else:
        found.append(ListedPart(host=host, part="nic", unread=one_line(str(nics["not_available"]))))
    for gpu in gpus["gpus"]:
        found.append(_part(host, "gpu", f"gpu{gpu['index']}", (gpu["name"], gpu["serial"], gpu["vbios"])))
    on_bus = machine["gpus_on_pci_bus"]
    hidden = max(gpus["count"], on_bus if isinstance(on_bus, int) else 0) - len(gpus["gpus"])
    if gpus["error"] and not gpus["gpus"]:
        hidden = max(hidden, 1)
    why = one_line(str(gpus["error"] or "NVML does not show it"))
    return [*found, *(ListedPart(host=host, part="gpu", unread=why) for _ in range(hidden))]


def _part(host: str, kind: str, name: str, readings: tuple[Any, Any, Any]) -> ListedPart:
    """One part, by the readings of its model, serial and firmware."""
    model, serial, firmware = map(_text, readings)
    hidden, unread = readings[1], ""
    if not _is_serial(serial):
        unread = one_line(str(hidden["not_available"]) if isinstance(hidden, dict) else f"the firmware says {serial!r}")
        serial = ""
    return ListedPart(host=host, part=kind, name=name, model=model, serial=serial, firmware=firmware, unread=unread)


def _is_serial(text: str) -> bool:
    return bool(text.strip("0:. -")) and "\ufffd" not in text and not text.casefold().startswith(PLACEHOLDERS)


def _text(value: Any) -> str:
    return one_line(value).strip() if isinstance(value, str) else ""


def json_text(parts: Iterable[ListedPart]) -> str:
    """The parts as a JSON list of objects, every column a text."""
    return json.dumps([asdict(one) for one in parts], indent=1) + "\n"


def csv_text(parts: Iterable[ListedPart]) -> str:
    """The parts as CSV with a head; what a spreadsheet would take for a formula comes behind an apostrophe."""
    return as_csv(COLUMNS, (map(as_text, asdict(one).values()) for one in parts))


def read_parts(file: Path, *, is_order: bool) -> list[ListedPart]:
    """The parts that a CSV or JSON file lists; of an order each has a serial of its own.

    Raises:
        ConfigurationError: the file cannot be read, has other columns, another kind of part, or a serial that is none.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        text = content.replace(b"\0", b"\xff").decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{file} is no text in UTF-8; save it as CSV UTF-8") from None
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"{file} is larger than {MOST_BYTES >> 20} MiB; an inventory is far smaller")
    rows = [*(_json_rows(text, file) if text.lstrip()[:1] in ("[", "{") else _csv_rows(text, file))]
    if not rows:
        raise ConfigurationError(f"{file} lists no part")
    parts = [_checked(row, where, is_order=is_order) for where, row in rows]
    seen: dict[tuple[str, str], str] = {}
    for (where, _), one in zip(rows, parts, strict=True) if is_order else ():
        if one.key in seen:
            raise ConfigurationError(f"{where}: {one.part} {one.serial} is listed twice, first at {seen[one.key]}")
        seen[one.key] = where
    return parts


def _csv_rows(text: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    head = text.lstrip("\n").partition("\n")[0]
    delimiter = next((one for one in ",;\t" if one in head), ",")
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(filter(None, reader), [])]
        named = [name.casefold() for name in names if name]
        if len({*named}) != len(named):
            raise ConfigurationError(f"{file}:{reader.line_num}: a column is there twice")
        for cells in reader:
            where = f"{file}:{reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(names):
                raise ConfigurationError(f"{where}: {counted(len(cells), 'cell')}, and the head has {len(names)}")
            yield where, {name: cell for name, cell in zip(names, cells, strict=True) if name or cell.strip()}
    except csv.Error as error:
        raise ConfigurationError(f"{file}:{reader.line_num}: no CSV: {error}") from None


def _json_rows(text: str, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is no JSON: {one_line(str(error))}") from None
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise ConfigurationError(f"{file} is no list of objects, each with part and serial")
    yield from ((f"{file}, object {number}", one) for number, one in enumerate(content, 1))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        ValueError: a key is there twice, and nobody knows which one counts.
    """
    if len({name.strip().casefold() for name, _ in pairs}) != len(pairs):
        raise ValueError(f"a key is there twice in {', '.join(name for name, _ in pairs)}")
    return dict(pairs)


def _checked(row: Mapping[str, Any], where: str, *, is_order: bool) -> ListedPart:
    row = {name.strip().casefold(): cell for name, cell in row.items()}
    unknown = [name for name in row if name not in COLUMNS]
    if unknown:
        hints = "".join(did_you_mean(name, COLUMNS) for name in unknown)
        raise ConfigurationError(f"{where}: no column {', '.join(map(repr, unknown))}; there are {', '.join(COLUMNS)}.{hints}")
    missing = [name for name in ("part", "serial") if name not in row]
    if missing:
        raise ConfigurationError(f"{where}: no column {' and '.join(missing)}, which every line needs")
    wrong = [name for name, cell in row.items() if not isinstance(cell, str)]
    if wrong:
        raise ConfigurationError(f"{where}: {', '.join(wrong)} is no text; write it in quotes, so that no digit is lost")
    texts = {name: _cell(cell) for name, cell in row.items()}
    kind, serial = texts["part"].casefold(), texts["serial"]
    if kind not in KINDS:
        raise ConfigurationError(f"{where}: {texts['part']!r} is no part; say {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    if not _is_serial(serial):
        if is_order:
            raise ConfigurationError(f"{where}: a {kind} without a serial")
        texts |= {"serial": "", "unread": texts.get("unread") or f"the file says {serial!r}"}
    if SHORTENED.fullmatch(serial):
        raise ConfigurationError(f"{where}: {serial!r} is a number that a spreadsheet made, and no serial")
    return ListedPart(**{**texts, "part": kind})


def _cell(text: str) -> str:
    text = one_line(text.strip()).strip()
    return text[1:] if text[:1] == "'" and text[1:].startswith(FORMULA) else text


def compare_with_order(order: Sequence[ListedPart], found: Sequence[ListedPart]) -> OrderDifferences:
    """What is ordered and not there, there and not ordered, there twice, or another than ordered.

    Parts of a kind that the order does not name are passed over. Where a part of that kind has no known serial, an ordered
    one that was not seen may be that part: nobody knows.
    """
    kinds, ordered = {one.part for one in order}, {one.key for one in order}
    there = grouped((one.key, one) for one in found if one.part in kinds and one.serial)
    unread = grouped((one.part, one) for one in found if one.part in kinds and not one.serial)
    wrong, unknown, same = [], [], 0
    for one in order:
        if one.key in there:
            differs, open_ones = _differences(one, there[one.key][0])
            wrong += differs
            unknown += open_ones
            same += not differs and not open_ones
        elif one.part in unread:
            others = counted(len(unread[one.part]), f"{one.part} has", f"{one.part} have")
            unknown.append(f"{one.label} is ordered and was not seen; {others} no known serial")
        else:
            wrong.append(f"{one.label} is ordered, and is not there")
    for key, parts in there.items():
        if key not in ordered:
            wrong.append(f"{parts[0].label} is there, and is not ordered")
        if len(parts) > 1:
            places = ", ".join(filter(None, (f"{one.host} {one.name}".strip() for one in parts)))
            wrong.append(f"{parts[0].part} {parts[0].serial} is there {len(parts)} times: {places}")
    unknown += [f"{one.label}: {one.unread or 'no serial'}" for parts in unread.values() for one in parts]
    return OrderDifferences(wrong=tuple(wrong), undecided=tuple(unknown), same=same)


def _differences(ordered: ListedPart, found: ListedPart) -> tuple[list[str], list[str]]:
    """What is another than ordered, and what could not be read of the part."""
    wrong: list[str] = []
    unknown: list[str] = []
    for name in COMPARED:
        wanted, is_there = getattr(ordered, name), getattr(found, name)
        if wanted and wanted.casefold() != is_there.casefold():
            text = f"{found.label}: {name} is {is_there or 'not known'}, and {wanted} is ordered"
            (wrong if is_there else unknown).append(text)
    return wrong, unknown
