"""Layers of plain data: a file over the packaged one, and a profile's overrides over an entry.

Both use one rule (``merge_entry``): a key replaces the key below it, ``recipe`` is merged key by key, and a limit
(``above below min max`` with ``of`` and ``bound_waived``) replaces the whole limit below it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_gpucluster.config.yaml_lines import Document, Problem, parse, read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.config.yaml_lines import KeyPath, Where

    Data: TypeAlias = dict[str | int, Any]

Kind: TypeAlias = Literal["above", "below", "min", "max"]
KINDS: tuple[Kind, ...] = ("above", "below", "min", "max")
"""How a limit is written: above and below are strict, min and max inclusive."""
_LIMIT = (*KINDS, "of", "bound_waived")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A thresholds file as read: its digest and, with ``extends: packaged``, already merged over the packaged one."""

    path: Path
    sha256: str
    document: Document


def packaged_path() -> Path:
    """The packaged thresholds.yaml: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "thresholds.yaml"
    return inside if inside.is_file() else package.parent / "thresholds.yaml"


def shown(path: Path) -> str:
    """How messages name a file: relative when it lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def read_source(path: Path | None) -> Source:
    """Read a file (None: the packaged one). What is wrong is in ``document.problems``, never raised."""
    real = path or packaged_path()
    document, sha256 = _read(real)
    if "extends" not in document.data:
        return Source(path=real, sha256=sha256, document=document)
    if real.absolute() == packaged_path().absolute():
        return Source(path=real, sha256=sha256, document=_refused(document, "the packaged file extends nothing."))
    if document.data["extends"] != "packaged":
        text = f"'extends' must be 'packaged', not {document.data['extends']!r}."
        return Source(path=real, sha256=sha256, document=_refused(document, text))
    base, _ = _read(packaged_path())
    return Source(path=real, sha256=sha256, document=base if base.problems else _overlay(base, document))


def _read(path: Path) -> tuple[Document, str]:
    """Parse one file."""
    content, problems = read_bytes(path, file=shown(path))
    if problems:
        return Document(file=shown(path), problems=problems), ""
    return parse(content, file=shown(path)), hashlib.sha256(content).hexdigest()


def _refused(document: Document, message: str) -> Document:
    """The same file with a problem at its ``extends``."""
    problem: Problem = document.problem(("extends",), message)
    return Document(file=document.file, problems=(problem,))


def merge_entry(below: Mapping[str | int, Any], above: Mapping[str | int, Any]) -> Data:
    """One layer over another; neither is changed."""
    merged = {key: value for key, value in below.items() if not (_has_limit(above) and key in _LIMIT)}
    for key, value in above.items():
        both = key == "recipe" and isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _has_limit(entry: Mapping[str | int, Any]) -> bool:
    return any(kind in entry for kind in KINDS)


def _overlay(base: Document, top: Document) -> Document:
    """``extends: packaged``: entry by entry over the packaged file, each key keeping the line it came from."""
    where: dict[KeyPath, Where] = {**base.where, **top.where}
    data: Data = {**base.data}
    for section, value in top.data.items():
        data[section] = _overlay_section(data.get(section), value, section=section)
    del data["extends"]
    return replace(top, data=data, where=where)


def _overlay_section(below: Any, above: Any, *, section: str | int) -> Any:
    """Merge ``cluster`` key by key, ``profiles`` and ``criteria`` entry by entry."""
    if not (isinstance(below, dict) and isinstance(above, dict)) or section not in {"cluster", "profiles", "criteria"}:
        return above
    if section == "cluster":
        return {**below, **above}
    return {**below, **{key: _overlay_entry(below.get(key), value) for key, value in above.items()}}


def _overlay_entry(below: Any, above: Any) -> Any:
    """Merge one entry; its ``profiles`` override by override."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = merge_entry(below, above)
    overrides, more = below.get("profiles"), above.get("profiles")
    if isinstance(overrides, dict) and isinstance(more, dict):
        merged["profiles"] = {**overrides, **{name: _overlay_entry(overrides.get(name), x) for name, x in more.items()}}
    return merged


def layers(entry: Mapping[str | int, Any], chain: Sequence[str]) -> list[tuple[KeyPath, Data]]:
    """What an entry says for a profile, lowest first: itself, then the overrides of ``chain`` (oldest ancestor first).

    Each with its path below the entry.
    """
    base = {key: value for key, value in entry.items() if key != "profiles"}
    overrides = entry.get("profiles") or {}
    return [((), base), *((("profiles", name), overrides[name]) for name in chain if name in overrides)]


def chain_of(profiles: Mapping[str | int, Any], name: str) -> list[str]:
    """A profile and its ancestors, oldest first. Stops at an unknown parent or before going round in a circle."""
    chain: list[str] = []
    current: Any = name
    while isinstance(current, str) and current in profiles and current not in chain:
        chain.insert(0, current)
        current = profiles[current].get("inherits")
    return chain
