"""Bundles in which one field of one file is another one: a step that is not ok or a sentence, and never a good word for it."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.evidence.archive import MANIFEST, SIGNATURE, manifest_of, packed, read_archive
from tests.support.evidence import keep_run, make_key, signers_of, with_ssh
from tests.support.mutations import mutations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Changes = Iterator[tuple[str, bytes]]
    Signed = tuple[dict[str, bytes], Path]

pytestmark = with_ssh
UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
JSON = ("results.json", "environment.json", "statements/test-result.json", "statements/verdict.json")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    """The files of a signed bundle, and who may sign."""
    folder = tmp_path_factory.mktemp("run")
    key = make_key(folder)
    assert main(["bundle", str(keep_run(folder / "r")), "-o", str(folder / "b.zip"), "--key", str(key)]) == 0
    return dict(read_archive(folder / "b.zip").files), signers_of(key)


def of_json(content: bytes) -> Changes:
    """Every other field. Limits are not changed here: there are 151, and each has its digest."""
    data = json.loads(content)
    rest = data.get("facts", data)
    limits = {"limits": rest.pop("limits")} if "limits" in rest else {}
    for where, what, changed in mutations(data):
        if changed != data:
            again = changed.get("facts", changed)
            yield f"{where} {what}", json.dumps(changed | limits if again is changed else again_with(changed, limits)).encode()


def again_with(event: dict[str, object], limits: dict[str, object]) -> dict[str, object]:
    """An event with its limits, where its facts are still a mapping."""
    facts = event["facts"]
    return {**event, "facts": {**facts, **limits}} if isinstance(facts, dict) else event


def of_journal(content: bytes) -> Changes:
    """Every other field of the first event of each kind, and each such line removed, there twice, and cut."""
    lines = content.splitlines(keepends=True)
    first = {json.loads(line)["event"]: at for at, line in reversed([*enumerate(lines)])}
    for name, at in first.items():
        for what, new in (("removed", b""), ("twice", lines[at] * 2), ("cut", lines[at][:-9] + b"\n")):
            yield f"{name} {what}", b"".join([*lines[:at], new, *lines[at + 1 :]])
        for what, new in of_json(lines[at]):
            yield f"{name} {what}", b"".join([*lines[:at], new + b"\n", *lines[at + 1 :]])


def of_junit(content: bytes) -> Changes:
    """Every attribute of an element of each kind, its text and the element itself."""
    first = {one.tag: at for at, one in reversed([*enumerate(ET.XML(content).iter())])}
    for tag, at in first.items():
        for name in ("removed", "text", *[*ET.XML(content).iter()][at].attrib):
            for value in ("x", "", "0", "\x85\u202e"):
                root = ET.XML(content)
                one = [*root.iter()][at]
                parents = [parent for parent in root.iter() if one in parent]
                if name == "removed" and parents:
                    parents[0].remove(one)
                elif name == "text":
                    one.text = value
                elif name != "removed":
                    one.set(name, value)
                yield f"{tag} {name} {value!r}", ET.tostring(root)


def of_lines(content: bytes) -> Changes:
    """Each 7th byte another one, gone, and the last; a manifest or a signature."""
    for at in range(0, len(content), 7):
        yield f"{at} changed", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        yield f"{at} gone", content[:at] + content[at + 1 :]
        yield f"{at} the last", content[:at]


WAYS = {
    **dict.fromkeys(JSON, of_json),
    "journal.jsonl": of_journal,
    "junit.xml": of_junit,
    MANIFEST: of_lines,
    SIGNATURE: of_lines,
}


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WAYS)
def test_any_other_field(name: str, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], signed: Signed) -> None:
    """No traceback, nothing unprintable, and never valid, also where the manifest was written anew over the change."""
    files, signers = signed
    file, wrong = tmp_path / "b.zip", []
    is_of_manifest = name in (MANIFEST, SIGNATURE)
    words = ["verify", str(file), *(["--signers", str(signers)] if is_of_manifest else [])]
    for what, content in islice(WAYS[name](files[name]), [*WAYS].index(name), None, step):
        inner = {one: files[one] for one in files if one not in (MANIFEST, SIGNATURE)} | {name: content}
        anew = {MANIFEST: manifest_of(inner, is_signed=False).text.encode(), **inner}
        file.write_bytes(packed({**files, name: content} if is_of_manifest else anew))
        try:
            code = main(words)
        except Exception as error:  # noqa: BLE001 -- each is a fault, and all are shown
            wrong.append(f"{what}: {error!r}")
            continue
        said = capsys.readouterr()
        if code not in (1, 4) or UNFIT.search(said.out + said.err):
            wrong.append(f"{what}: exit code {code}, {said.out[-200:]!r} {said.err[:200]!r}")
    assert wrong == []
