"""The zip of a bundle and its manifest: equal files give equal bytes, and one from a stranger is read without trust.

The manifest has name, size and SHA-256 of each file in order. ``sha256sum -c`` reads it, ssh-keygen signs it.
"""

from __future__ import annotations

import hashlib
import io
import re
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

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


class NewerBundleError(ConfigurationError):
    """A bundle that this version cannot judge."""


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
        NewerBundleError: a newer version wrote it.
        ConfigurationError: it is none, or it is damaged.
    """
    text = content.decode("ascii", "replace")
    version = NEWER.match(text)
    if version is not None and int(version[1]) > VERSION:
        raise NewerBundleError(f"the bundle has version {version[1]}; this version of gpucluster reads up to {VERSION}")
    entries = {one["name"]: (int(one["size"]), one["sha256"]) for one in ENTRY.finditer(text)}
    found = Manifest(entries=entries, is_signed=text.partition("\n")[0] == HEAD + SIGNED)
    if found.text != text:
        raise ConfigurationError(f"{MANIFEST} is not written as gpucluster writes it")
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


def misplaced(manifest: Manifest, names: Sequence[str]) -> str | None:
    """The first file that does not stand where the manifest has it; None if all that are there stand in order."""
    wanted = [MANIFEST, *([SIGNATURE] if SIGNATURE in names else []), *manifest.entries]
    kept = [name for name in names if name in wanted]
    expected = [name for name in wanted if name in names]
    return next((name for name, other in zip(kept, expected, strict=True) if name != other), None)


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
        raise ConfigurationError(f"{path} is no file" if path.exists() else f"there is no {path}")
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
