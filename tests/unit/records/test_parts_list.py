"""Parts serial by serial, and what differs from an order: each finding has a healthy twin, each bad file its sentence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands import compare, info
from pytest_gpucluster.commands.main import main
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.machine import read_dmi
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.records.parts_list import ListedPart, compare_with_order, csv_text, json_text, parts_of, read_parts

if TYPE_CHECKING:
    from pathlib import Path

WHY = {"not_available": "Permission denied (/sys/class/dmi/id/chassis_serial)"}
NIC = {
    "device": "mlx5_0", "board_id": "MT_0000000838", "guid": "946d:ae03:0011:2233", "firmware": "28.42.1000",
    "is_virtual": False, "is_nvswitch": False,
}  # fmt: skip
GPU = {"index": 0, "name": "NVIDIA H200", "serial": "1654024000001", "vbios": "96.00.A5.00.01"}
DMI = {
    "chassis_serial": "C-1", "board_serial": "B-1", "product_name": "DGX H200", "board_name": "G2", "bios_version": "1.2",
}  # fmt: skip
ORDER = "part,serial,model\nchassis,C-1,DGX H200\ngpu,1654024000001,NVIDIA H200\nnic,946d:ae03:0011:2233,\n"


def machine(**changed: Any) -> dict[str, Any]:
    """What ``read_machine`` gives of a host with one adapter and one GPU."""
    gpus = {"status": "ok", "error": None, "gpus": [GPU], "count": 1}
    return {"hostname": "node-1", "dmi": DMI, "nics": [NIC], "gpus": gpus, "gpus_on_pci_bus": 1, **changed}


def written(folder: Path, text: str, name: str = "order.csv") -> Path:
    """A file with this text."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def compared(folder: Path, order: str, found: list[ListedPart]) -> tuple[list[str], list[str]]:
    """What is wrong and what is unknown."""
    differs = compare_with_order(read_parts(written(folder, order), is_order=True), found)
    return [*differs.wrong], [*differs.undecided]


def test_all_as_ordered(tmp_path: Path) -> None:
    """Nothing to say; kinds that the order does not name are passed over, and letters count alike in both cases."""
    assert compared(tmp_path, ORDER, parts_of(machine())) == ([], [])
    assert compared(tmp_path, "serial,part\nc-1,Chassis\n", parts_of(machine())) == ([], [])


@pytest.mark.parametrize(
    ("changed", "wrong", "unknown"),
    [
        ({"nics": []}, ["nic 946d:ae03:0011:2233 is ordered, and is not there"], 0),
        ({"nics": {"not_available": "no such class"}}, [], 2),
        ({"nics": [{**NIC, "is_virtual": True}]}, ["nic 946d:ae03:0011:2233 is ordered, and is not there"], 0),
        ({"dmi": {**DMI, "product_name": "Other"}}, ["chassis C-1 (node-1): model is Other, and DGX H200 is ordered"], 0),
        ({"dmi": {**DMI, "chassis_serial": WHY}}, [], 2),
        ({"dmi": {**DMI, "chassis_serial": "To Be Filled By O.E.M."}}, [], 2),
        ({"gpus": {"status": "none", "error": "no NVML", "gpus": [], "count": 0}}, [], 2),
        ({"gpus": {"status": "ok", "error": None, "gpus": [], "count": 0}, "gpus_on_pci_bus": 1}, [], 2),
    ],
)
def test_what_differs(tmp_path: Path, changed: dict[str, Any], wrong: list[str], unknown: int) -> None:
    """Gone or another is wrong; a serial that could not be read is unknown, never missing."""
    found = compared(tmp_path, ORDER, parts_of(machine(**changed)))
    assert (found[0], len(found[1])) == (wrong, unknown)


@pytest.mark.parametrize(
    "order",
    [
        "\ufeffPart;Serial\r\nGPU; 1654024000001 \r\n",
        "part\tserial\rgpu\t1654024000001\r",
        "\n\nPART,SERIAL,,\n,,,\ngpu,1654024000001,,\n",
        '[{"Part": "GPU", " Serial": "1654024000001"}]',
        '\ufeff[{"part": "nic", "serial": "0x946DAE0300112233"}]',
        '"part";"serial"\n"gpu";"1654024000001\n"\n',
        "part,serial\ngpu,1654 0240 00001\nchassis,\u200bc-1\n",
        "part,serial\ngpu,'1654024000001\n",
        'part,serial\ngpu,"=""1654024000001"""\n',
        "part,serial\ngpu,01654024000001\n",
        "part,serial\nnic,946dae0300112233\n",
        "part,serial\nnic,946d-ae03-0011-2233\n",
    ],
    ids=[
        "Excel",
        "old Macs",
        "empty columns",
        "JSON in capitals",
        "a GUID in hex",
        "quoted, with a new line",
        "with blanks",
        "with an apostrophe",
        "as a formula",
        "with a zero",
        "a GUID without colons",
        "with hyphens",
    ],
)
def test_other_spellings_of_the_same_order(tmp_path: Path, order: str) -> None:
    """As spreadsheets and other tools write it."""
    assert compared(tmp_path, order, parts_of(machine())) == ([], [])


def test_a_zero_that_is_a_part_of_a_text(tmp_path: Path) -> None:
    """Only of numbers it counts for nothing."""
    chassis = machine(dmi={**DMI, "chassis_serial": "0C-1"})
    assert compared(tmp_path, "part,serial\nchassis,C-1\n", parts_of(chassis))[0] != []


def test_a_serial_that_is_no_text(tmp_path: Path) -> None:
    """Firmware that has bytes of another kind there: not known, so nothing is missing."""
    chassis = machine(dmi={**DMI, "chassis_serial": "\ufffd\ufffd"})
    wrong, unknown = compared(tmp_path, "part,serial\nchassis,C-1\n", parts_of(chassis))
    assert (wrong, len(unknown)) == ([], 2)


@pytest.mark.parametrize("serial", ["N/A", "none", "To be filled by O.E.M.", "0000000", "-"])
def test_a_serial_that_nobody_wrote(tmp_path: Path, serial: str) -> None:
    """An order is refused with its line; in an inventory the serial is not known, so nothing is missing."""
    with pytest.raises(ConfigurationError, match=":2: a gpu without a serial"):
        read_parts(written(tmp_path, f"part,serial\ngpu,{serial}\n"), is_order=True)
    found = read_parts(written(tmp_path, f"part,serial\ngpu,{serial}\n", "node.csv"), is_order=False)
    assert found[0].unread
    wrong, unknown = compared(tmp_path, "part,serial\ngpu,1\n", found)
    assert (wrong, len(unknown)) == ([], 2)


@pytest.mark.parametrize(
    ("changed", "ordered"),
    [
        ({"dmi": {**DMI, "product_name": WHY}}, "part,serial,model\nchassis,C-1,DGX H200\n"),
        ({"dmi": {**DMI, "bios_version": WHY}}, "part,serial,firmware\nboard,{board},1.2.3\n"),
        ({"nics": [{**NIC, "firmware": WHY}]}, "part,serial,firmware\nnic,{nic},28.39\n"),
    ],
    ids=["model", "firmware of the board", "firmware of a NIC"],
)
def test_what_could_not_be_read_is_not_another(tmp_path: Path, changed: dict[str, Any], ordered: str) -> None:
    """A part that is there, and whose model or firmware nobody could read: unknown, neither as ordered nor different."""
    order = ordered.format(board=DMI["board_serial"], nic=NIC["guid"])
    wrong, unknown = compared(tmp_path, order, parts_of(machine(**changed)))
    assert wrong == []
    assert len(unknown) == 1
    assert " is not known, and " in unknown[0]


def test_not_ordered_and_twice(tmp_path: Path) -> None:
    """A part beyond the order, and one serial at two hosts."""
    other = ListedPart(host="node-2", part="gpu", name="gpu0", serial="1654024000001", model="NVIDIA H200")
    more = ListedPart(host="node-2", part="gpu", name="gpu1", serial="77")
    wrong, unknown = compared(tmp_path, ORDER, [*parts_of(machine()), other, more])
    assert wrong == [
        "gpu 1654024000001 is there 2 times: node-1 gpu0, node-2 gpu0",
        "gpu 77 (node-2 gpu1) is there, and is not ordered",
    ]
    assert unknown == []


@pytest.mark.parametrize("text", [csv_text, json_text])
def test_written_and_read_again(tmp_path: Path, text: Any) -> None:
    """Both forms, with a serial that a spreadsheet would take for a formula, and a text of several lines."""
    parts = [*parts_of(machine()), ListedPart(part="gpu", serial="=1+1", host="a", model="x, y", unread="")]
    assert read_parts(written(tmp_path, text(parts)), is_order=False) == parts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lists no part"),
        ("part,serial\n", "lists no part"),
        ("part,model\ngpu,H200\n", "no column serial"),
        ("part,serial,modell\ngpu,1,x\n", "no column 'modell'"),
        ("part,serial,serial\ngpu,1,2\n", "a column is there twice"),
        ("part,serial\ngpu,1,2\n", ":2: 3 cells, and the head has 2"),
        ("part,serial\ngpu,\n", ":2: a gpu without a serial"),
        ("part,serial\ngpus,1\n", "'gpus' is no part; say chassis, board, nic, gpu. Did you mean 'gpu'?"),
        ("part,serial\ngpu,1\ngpu,1\n", ":3: gpu 1 is listed twice, first at"),
        ("part,serial\ngpu,1.65402E+12\n", "a number that a spreadsheet made"),
        ("part;serial\ngpu;1,65E+12\n", "a number that a spreadsheet made"),
        ("part,serial\ngpu,1654024000001.0\n", "a number that a spreadsheet made"),
        ("part,serial\nchassis,c-1\nchassis,C-1\n", ":3: chassis C-1 is listed twice"),
        ("part,serial\ngpu,01\ngpu,1\n", ":3: gpu 1 is listed twice"),
        ("part\ngpu\n", "no column serial"),
        ("part,serial,qty\ngpu,1,8\n", "no column 'qty'"),
        ("part,serial\npsu,1\n", "'psu' is no part"),
        ("sep=;\npart;serial\ngpu;1\n", "no column 'sep='"),
        ("p\0a\0r\0t\0,\0s\0e\0r\0i\0a\0l\0", "is no text in UTF-8"),
        ('part,serial\ngpu,"1\n', "no CSV"),
        ("[1]", "no list of objects"),
        ("{}", "no list of objects"),
        ("[", "is no JSON"),
        ('[{"part": "gpu", "serial": "1", "serial": "2"}]', "a key is there twice in part, serial, serial"),
        ('[{"part": "gpu", "serial": "1", "Serial": "2"}]', "a key is there twice"),
        ('[{"part": "gpu", "serial": "1", "model": null}]', "model is no text"),
        ('{"parts": [{"part": "gpu", "serial": "1"}]}', "no list of objects"),
        ('[{"part": "gpu", "serial": 1654024000001}]', "serial is no text"),
    ],
)
def test_a_wrong_order_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """With the line, and exit code 4; nothing is compared."""
    file = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_parts(file, is_order=True)
    assert told in str(caught.value)
    assert main(["compare", "--order", str(file)]) == 4


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    """The same."""
    (tmp_path / "order.xlsx").write_bytes(b"PK\x03\x04\xff\xfe")
    for name in ("gone.csv", "order.xlsx", "."):
        assert main(["compare", "--order", str(tmp_path / name)]) == 4


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit codes of both commands, and semicolons as some spreadsheets write them."""
    for command in (info, compare):
        monkeypatch.setattr(command, "read_machine", machine)
    assert main(["info", "--inventory"]) == 0
    inventory = written(tmp_path, capsys.readouterr().out, "node.csv")
    assert main(["info", "--inventory", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
    order = written(tmp_path, ORDER.replace(",", ";"))
    assert main(["compare", "--order", str(order)]) == 0
    assert main(["compare", "--order", str(order), str(inventory)]) == 0
    assert main(["compare", "--order", str(order), str(inventory), str(inventory)]) == 1
    monkeypatch.setattr(info, "read_machine", lambda: machine(dmi={**DMI, "board_serial": WHY}))
    assert main(["info", "--inventory"]) == 3
    assert "board without a known serial (node-1): Permission denied" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["compare", str(tmp_path)])
    assert left.value.code == 4


def test_firmware_without_such_files(tmp_path: Path) -> None:
    """In a container or without permission each value has its reason."""
    folder = tmp_path / "class" / "dmi" / "id"
    folder.mkdir(parents=True)
    (folder / "product_name").write_text("DGX\n")
    found = read_dmi(root=tmp_path)
    assert found.pop("product_name") == "DGX"
    assert all(isinstance(value, NotAvailable) for value in found.values())
