"""The manifest of a bundle: name, size and SHA-256 of each file in order. ``sha256sum -c`` reads it, ssh-keygen signs it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MANIFEST, SIGNATURE = "MANIFEST.sha256", "MANIFEST.sha256.sig"
VERSION = 1
HEAD = f"# gpucluster bundle {VERSION}"
SIGNED = f", signed in {SIGNATURE}"
NEWER = re.compile(r"# gpucluster bundle (\d+)")
ENTRY = re.compile(r"# (?P<size>\d+) bytes\n(?P<sha256>[0-9a-f]{64})  (?P<name>[A-Za-z0-9._/-]+)\n")


class NewerBundleError(ConfigurationError):
    """A bundle that this version cannot judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file as the manifest describes it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a bundle holds besides manifest and signature, in order."""

    entries: tuple[Entry, ...]
    is_signed: bool

    @property
    def text(self) -> str:
        """The manifest as a file. Lines that begin with ``#`` are comments to sha256sum."""
        head = HEAD + (SIGNED if self.is_signed else "") + "\n"
        return head + "".join(f"# {one.size} bytes\n{one.sha256}  {one.name}\n" for one in self.entries)


def manifest_of(files: Mapping[str, bytes], *, is_signed: bool) -> Manifest:
    """The manifest of these files in their order."""
    entries = tuple(
        Entry(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest()) for name, content in files.items()
    )
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
    entries = tuple(Entry(name=one["name"], size=int(one["size"]), sha256=one["sha256"]) for one in ENTRY.finditer(text))
    found = Manifest(entries=entries, is_signed=text.partition("\n")[0] == HEAD + SIGNED)
    if found.text != text:
        raise ConfigurationError(f"{MANIFEST} is not written as gpucluster writes it")
    return found


def differences(manifest: Manifest, files: Mapping[str, bytes]) -> Iterator[str]:
    """What was changed, removed, added or renamed, in words. ``files`` are all of the zip."""
    there = manifest_of({name: one for name, one in files.items() if name not in (MANIFEST, SIGNATURE)}, is_signed=True)
    known, found = _by_name(manifest.entries), _by_name(there.entries)
    gone, new = known.keys() - found.keys(), found.keys() - known.keys()
    for name in sorted(gone):
        match = next((one for one in sorted(new) if found[one].sha256 == known[name].sha256), None)
        if match is None:
            yield f"{name} is missing: it was removed"
        else:
            new -= {match}
            yield f"{name} was renamed to {one_line(match)}"
    yield from (f"{one_line(name)} was added: the manifest does not name it" for name in sorted(new))
    for name, entry in known.items():
        if name in found and found[name] != entry:
            yield f"{name} was changed: it has {found[name].size} bytes and another SHA-256, the manifest says {entry.size}"


def misplaced(manifest: Manifest, names: Sequence[str]) -> str | None:
    """The first file that does not stand where the manifest has it; None if all that are there stand in order."""
    wanted = [MANIFEST, *([SIGNATURE] if SIGNATURE in names else []), *(one.name for one in manifest.entries)]
    kept = [name for name in names if name in wanted]
    expected = [name for name in wanted if name in names]
    return next((name for name, other in zip(kept, expected, strict=True) if name != other), None)


def _by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    return {one.name: one for one in entries}
