"""The zip of a bundle and its manifest: equal files give equal bytes, and one from a stranger is read without trust.

The manifest has name, size and SHA-256 of each file in order. ``sha256sum -c`` reads it, ssh-keygen signs it.

What goes into a bundle: the files of a results directory as they lie there, and what other programs read of the run.

These are two in-toto Statements v1, and its environment. The predicate test-result of in-toto knows PASSED, WARNED and FAILED.
What is no acceptance is FAILED there, an INCOMPLETE run too. The verdict itself stands in a statement of our own.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.run_files import JOURNAL, JUNIT, REPORT, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import ACCEPTED, NOT_SELECTED, PASSED, SKIPPED, WITH_WAIVERS, Record
from pytest_gpucluster.page.document import RunDocument, document_of
from pytest_gpucluster.page.render import model_of, page_from
from pytest_gpucluster.reporting.files import require_no_links
from pytest_gpucluster.reporting.journal import texts_of
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT, state_of
from pytest_gpucluster.text import one_line
from pytest_gpucluster.thresholds.layers import packaged_path
from pytest_gpucluster.thresholds.released import packaged_files, released_text

MANIFEST, SIGNATURE = "MANIFEST.sha256", "MANIFEST.sha256.sig"
VERSION = 1
HEAD = f"# gpucluster bundle {VERSION}"
SIGNED = f", signed in {SIGNATURE}"
NEWER = re.compile(r"# gpucluster bundle (\d+)")
ENTRY = re.compile(r"# (?P<size>\d+) bytes\n(?P<sha256>[0-9a-f]{64})  (?P<name>[A-Za-z0-9._/-]+)\n")
FIXED_TIME = (1980, 1, 1, 0, 0, 0)
"""The oldest time that a zip can hold."""
MODE = (stat.S_IFREG | 0o644) << 16
UNIX = 3
MOST_MEMBERS = 64
MOST_PACKED_BYTES = 512 << 20
MOST_BYTES = 1 << 30
"""Of all files together. A run of 128 x 8 has about 100 MB."""
MOST_RATIO = 200
"""A larger file than :data:`SMALL_BYTES` that packs better is a bomb. The journal of 128 x 8 reaches 32."""
SMALL_BYTES = 1 << 20
IS_ENCRYPTED = 0x1
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
END, LOCATOR64 = b"PK\5\6", b"PK\6\7"
END_BYTES, LOCATOR64_BYTES, LONGEST_COMMENT = 22, 20, 65_535
LOCAL = struct.Struct("<4s5H3I2H")
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, struct.error, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle holds besides manifest and signature, in order: the size and the SHA-256 of each file, by name."""

    entries: Mapping[str, tuple[int, str]]
    is_signed: bool

    @property
    def text(self) -> str:
        """The manifest as a file. Lines that begin with ``#`` are comments to sha256sum."""
        head = HEAD + (SIGNED if self.is_signed else "") + "\n"
        return head + "".join(f"# {size} bytes\n{sha256}  {name}\n" for name, (size, sha256) in self.entries.items())


def manifest_of(files: Mapping[str, bytes], *, is_signed: bool) -> Manifest:
    """The manifest of these files in their order."""
    entries = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    return Manifest(entries=entries, is_signed=is_signed)


def read_manifest(content: bytes) -> Manifest:
    """The manifest in these bytes, which have to be written exactly as :attr:`Manifest.text` writes it.

    Raises:
        ConfigurationError: a newer version wrote it, and this one cannot judge it.
        ValueError: it is none, or it is damaged.
    """
    text = content.decode("ascii", "replace")
    version = NEWER.match(text)
    if version is not None and int(version[1]) > VERSION:
        raise ConfigurationError(f"the bundle has version {version[1]}; this version of gpucluster reads up to {VERSION}")
    entries = {one["name"]: (int(one["size"]), one["sha256"]) for one in ENTRY.finditer(text)}
    found = Manifest(entries=entries, is_signed=text.partition("\n")[0] == HEAD + SIGNED)
    if found.text != text:
        raise ValueError(f"{MANIFEST} is not written as gpucluster writes it")
    return found


def differences(manifest: Manifest, files: Mapping[str, bytes]) -> Iterator[str]:
    """What was changed, removed, added or renamed, in words. ``files`` are all of the zip."""
    there = manifest_of({name: one for name, one in files.items() if name not in (MANIFEST, SIGNATURE)}, is_signed=True)
    known, found = manifest.entries, there.entries
    gone, new = known.keys() - found.keys(), found.keys() - known.keys()
    for name in sorted(gone):
        match = next((one for one in sorted(new) if found[one][1] == known[name][1]), None)
        if match is None:
            yield f"{name} is missing: it was removed"
        else:
            new -= {match}
            yield f"{name} was renamed to {one_line(match)}"
    yield from (f"{one_line(name)} was added: the manifest does not name it" for name in sorted(new))
    for name, entry in known.items():
        if name in found and found[name] != entry:
            yield f"{name} was changed: it has {found[name][0]} bytes and another SHA-256, the manifest says {entry[0]}"


def misplaced(manifest: Manifest, names: Sequence[str]) -> Iterator[str]:
    """A sentence about the first file that does not stand where the manifest has it; nothing if all that are there do."""
    wanted = [MANIFEST, SIGNATURE, *manifest.entries]
    kept = [name for name in names if name in wanted]
    name = next((name for name, other in zip(kept, sorted(kept, key=wanted.index), strict=True) if name != other), None)
    if name is not None:
        yield f"{name} does not stand where the manifest has it: the files were reordered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A bundle that was read.

    Attributes:
        files: the content of each file by name, in the order of the zip; without those that cannot be unpacked.
        faults: what is wrong with the zip itself, in words.
    """

    files: Mapping[str, bytes]
    faults: tuple[str, ...]


def packed(files: Mapping[str, bytes]) -> bytes:
    """The zip of these files in their order. Its times are fixed: equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, FIXED_TIME)
            info.external_attr, info.create_system = MODE, UNIX
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, 6)
    return buffer.getvalue()


def read_archive(path: Path) -> Archive:
    """Unpack a bundle into memory; nothing is written.

    Raises:
        ConfigurationError: it is no whole zip, it is too large, or it holds what no bundle has: links, paths that lead out of
            it, encrypted files, two files of one name.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path} is no file; gpucluster bundle makes one" if path.exists() else f"there is no {path}")
    if path.stat().st_size > MOST_PACKED_BYTES:
        raise ConfigurationError(f"{path} is larger than {MOST_PACKED_BYTES >> 20} MiB, which no bundle is")
    content = path.read_bytes()
    _require_few(content, path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos = archive.infolist()
            for refused in _refusals(infos):
                raise ConfigurationError(f"{path} is refused: {refused}")
            files, damaged = _unpacked(archive, infos)
            return Archive(files=files, faults=(*damaged, *_frame_faults(content, infos, archive.start_dir)))
    except (*DAMAGED, UnicodeError) as error:
        raise ConfigurationError(f"{path} is no whole zip file: {one_line(str(error))}") from None


def _require_few(content: bytes, path: Path) -> None:
    """Look at the number of files before zipfile makes an object of each."""
    at = content.rfind(END, max(0, len(content) - END_BYTES - LONGEST_COMMENT))
    if not content.startswith(b"PK") or at < 0 or len(content) - at < END_BYTES:
        raise ConfigurationError(f"{path} is no zip file, or only the beginning of one")
    (number,) = struct.unpack_from("<H", content, at + 10)
    is_64 = content[max(0, at - LOCATOR64_BYTES) : at].startswith(LOCATOR64)
    if number > MOST_MEMBERS or is_64:
        raise ConfigurationError(f"{path} is refused: it holds more than {MOST_MEMBERS} files, or is made for huge ones")


def _refusals(infos: list[zipfile.ZipInfo]) -> Iterator[str]:
    """What no bundle holds, in words."""
    if len(infos) > MOST_MEMBERS:
        yield f"it holds more than {MOST_MEMBERS} files"
    if sum(info.file_size for info in infos) > MOST_BYTES:
        yield f"its files are larger than {MOST_BYTES >> 20} MiB together"
    seen: set[str] = set()
    for info in infos:
        name = one_line(info.orig_filename)
        if info.orig_filename in seen:
            yield f"it holds two files {name}"
        seen.add(info.orig_filename)
        if _leads_out(info.orig_filename):
            yield f"the path {name} leads out of it"
        if info.flag_bits & IS_ENCRYPTED:
            yield f"{name} is encrypted"
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or info.is_dir():
            yield f"{name} is a link, a folder or a device"
        if info.compress_type not in METHODS:
            yield f"{name} is packed by a method that no bundle uses"
        if info.file_size > max(SMALL_BYTES, MOST_RATIO * info.compress_size):
            yield f"{name} is more than {MOST_RATIO} times as large as its packed bytes: a zip bomb"


def _leads_out(name: str) -> bool:
    is_odd = not name.isprintable() or "\\" in name or ":" in name
    return is_odd or name.startswith("/") or any(part in ("", ".", "..") for part in name.rstrip("/").split("/"))


def _unpacked(archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo]) -> tuple[dict[str, bytes], list[str]]:
    """The files that are whole, and a sentence about each other one. zipfile reads no more than the size that is stated."""
    files: dict[str, bytes] = {}
    damaged = []
    for info in infos:
        try:
            files[info.filename] = archive.read(info)
        except DAMAGED as error:
            damaged.append(f"{info.filename} is damaged: {one_line(str(error))}")
    return files, damaged


def _frame_faults(content: bytes, infos: list[zipfile.ZipInfo], directory: int) -> Iterator[str]:
    """Where the zip contradicts itself: each file is described twice, and nothing lies between, before or behind them."""
    at = 0
    for info in infos:
        if info.header_offset != at:
            yield f"{info.filename} does not lie where the order of the files puts it"
            return
        _, version, flags, method, time, date, *sizes, name_bytes, extra_bytes = LOCAL.unpack_from(content, at)
        year, month, day, hour, minute, second = info.date_time
        stated = (year - 1980 << 9 | month << 5 | day, hour << 11 | minute << 5 | second // 2)
        known = (info.extract_version, info.flag_bits, info.compress_type, info.CRC, info.compress_size, info.file_size)
        if (version, flags, method, *sizes) != known or (date, time) != stated:
            yield f"{info.filename} is described in two ways"
            return
        at += LOCAL.size + name_bytes + extra_bytes + info.compress_size
    end = content.rfind(END)
    number, there, size, offset, comment = struct.unpack_from("<HHIIH", content, end + 8)
    if at != directory or offset != at or offset + size != end or comment or end + END_BYTES != len(content):
        yield "there are bytes before, between or behind the files"
    if number != len(infos) or there != len(infos):
        yield "the number of files is not the one that is stated"
    if len({(one.external_attr, one.create_system, one.create_version, one.comment, one.volume) for one in infos}) > 1:
        yield "the files are marked in different ways"


STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
"""https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md"""
VERDICT = "urn:x-pytest-gpucluster:verdict:v1"
RESULT = {ACCEPTED: "PASSED", WITH_WAIVERS: "WARNED"}
"""Every other verdict is FAILED."""
LIMITS = ("thresholds_sha256", "limits_sha256")
COPIED = ("profile", "level", "expected", "simulated", "changed_limits", "changed_terms", *LIMITS)
"""Members of results.json that stand in the journal as they are, whatever version makes the one from the other."""
ENVIRONMENT, AS_READ, AS_PACKAGED = "environment.json", "limits/as-read.yaml", "limits/packaged.json"


def as_json(value: Mapping[str, Any]) -> bytes:
    """A file of a bundle: equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def environment_of(run: RunDocument) -> dict[str, Any]:
    """Which run it was, and the software around it, as results.json has them."""
    return {name: run.facts.get(name) for name in ("run", "environment", "timings")}


def test_result(run: RunDocument, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The statement that any reader of in-toto knows. Criteria stand in it by name; those not selected are left out."""
    found: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for criterion, records in run.by_criterion.items():
        kind = _kind_of(records)
        if kind is not None:
            found[kind].append(criterion)
    limits = _subjects({name: content for name, content in files.items() if name.startswith("limits/")})
    predicate = {"result": RESULT.get(run.word, "FAILED"), "configuration": limits, **found}
    return _statement(TEST_RESULT, predicate, files)


def verdict_statement(run: RunDocument, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The statement that says the verdict as it is, and by which limits it was reached."""
    predicate = {
        "verdict": run.word,
        "verdict_line": run.facts.get("verdict_line"),
        "run": run.facts.get("run"),
        "limits": {name: run.facts.get(name) for name in LIMITS},
        **{name: run.facts.get(name) for name in (*COPIED, "waivers", "remarks") if name not in LIMITS},
    }
    return _statement(VERDICT, predicate, files)


STATEMENTS: dict[str, Callable[[RunDocument, Mapping[str, bytes]], dict[str, Any]]] = {
    "statements/test-result.json": test_result,
    "statements/verdict.json": verdict_statement,
}
REQUIRED = (ENVIRONMENT, JOURNAL, JUNIT, AS_PACKAGED, REPORT, RESULTS, *STATEMENTS)
"""What every bundle holds. The file of limits is left out where it is no longer there."""


def _statement(kind: str, predicate: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    return {"_type": STATEMENT, "subject": _subjects(files), "predicateType": kind, "predicate": predicate}


def _subjects(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Every file but the statements, with its digest; and but the manifest, which names the statements."""
    return [
        {"name": name, "digest": {"sha256": hashlib.sha256(content).hexdigest()}}
        for name, content in sorted(files.items())
        if name not in (MANIFEST, SIGNATURE, *STATEMENTS)
    ]


def _kind_of(records: Iterable[Record]) -> str | None:
    """Where a criterion stands: the worst of its outcomes decides. None where it was not selected or does not apply."""
    judged = [one for one in records if one.outcome not in (NOT_SELECTED, SKIPPED)]
    if not judged:
        return None
    if any(one.outcome != PASSED and one.waiver is None for one in judged):
        return "failedTests"
    return "warnedTests" if any(one.advisory or one.waiver is not None for one in judged) else "passedTests"


def contents_of(folder: Path) -> tuple[dict[str, bytes], RunDocument]:
    """Every file of the bundle of a run by name, in order, and the run.

    A page or a JUnit file that the run did not write is made. What is there is taken as it lies: ``verify`` judges it.

    Raises:
        ConfigurationError: there is no run that has ended, its files are damaged, or a link lies among them.
        OSError: a file cannot be read.
    """
    files, run = _kept(folder)
    files |= {name: (folder / name).read_bytes() for name in (REPORT, JUNIT) if (folder / name).is_file()}
    if REPORT not in files:
        files[REPORT] = page_from(model_of(run)).encode()
    if JUNIT not in files:
        state = state_of(files[JOURNAL])
        files[JUNIT] = texts_of(state.report(state.close()))[1].encode()
    files[ENVIRONMENT] = as_json(environment_of(run))
    limits = _limits_as_read(files[JOURNAL], run)
    if limits is not None:
        files[AS_READ] = limits
    files[AS_PACKAGED] = released_text(packaged_files(packaged_path())).encode()
    files |= {name: as_json(make(run, files)) for name, make in STATEMENTS.items()}
    return dict(sorted(files.items())), run


def _kept(folder: Path) -> tuple[dict[str, bytes], RunDocument]:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no results directory" if folder.exists() else f"there is no {folder}")
    require_no_links(folder)
    for name in (JOURNAL, RESULTS):
        if not (folder / name).is_file():
            advice = f"; 'gpucluster report {folder}' writes it" if name == RESULTS and (folder / JOURNAL).is_file() else ""
            raise ConfigurationError(f"{folder} has no {name}{advice}")
    files = {name: (folder / name).read_bytes() for name in (JOURNAL, RESULTS)}
    run = document_of(files[RESULTS], name=str(folder / RESULTS))
    if (run.facts.get("environment") or {}).get("unfinished"):
        raise ConfigurationError(f"the run in {folder} has not ended; if it was killed, 'gpucluster report {folder}' ends it")
    return files, run


def _limits_as_read(journal: bytes, run: RunDocument) -> bytes | None:
    """The file of limits that the run read: the first that has its digest, else the one that it named; None without any.

    A journal may be forged, and name a file that nobody should see.
    """
    contents = [(path, path.read_bytes()) for path in _candidates(journal) if path.is_file()]
    stated = run.facts.get("thresholds_sha256")
    same = (content for _, content in contents if hashlib.sha256(content).hexdigest() == stated)
    named = (content for path, content in contents if path != packaged_path() and b"criteria:" in content)
    return next(chain(same, named), None)


def _candidates(journal: bytes) -> Iterator[Path]:
    try:
        started: dict[str, Any] = json.loads(journal.partition(b"\n")[0])
        named = started.get("settings", {}).get("thresholds", "None")
        if named != "None":
            yield Path(started.get("command", {}).get("folder", ".")) / named
    except NOT_AN_EVENT:  # half a journal: verify names it
        pass
    yield packaged_path()
