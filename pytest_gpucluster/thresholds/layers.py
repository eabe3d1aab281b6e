"""Layers: a file over the packaged file, and rules and overrides of a profile over an entry.

Both are merged alike: a key replaces the key below it, ``recipe`` and ``needs`` are merged key by key, and a limit (``above
below min max`` with ``of``, ``shapes`` and ``bound_waived``) replaces the whole limit below it. The packaged file and the one
that extends it are merged as they are read, each key keeping its line; what an entry says for a profile is merged with what
lost to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem, parse, read

Data: TypeAlias = dict[str | int, Any]

Kind: TypeAlias = Literal["above", "below", "min", "max"]
KINDS: tuple[Kind, ...] = ("above", "below", "min", "max")
"""How a limit is written: above and below are strict, min and max inclusive."""
LIMIT = (*KINDS, "of", "shapes", "bound_waived")
THE_LIMIT = "the limit"
MAPPINGS = ("recipe", "needs", "rules")
"""Keys of an entry, and of a profile, that are merged key by key."""
OLD_NEEDS = {f"needs_{part}": part for part in ("nodes", "domains", "shared_paths", "kernel_log", "rails", "slurm", "program")}
"""Deprecated keys of an entry, and what they are called under ``needs``."""


class Statement(NamedTuple):
    """What a layer says of one topic: where, which key (``recipe.size``), and its value.

    A limit is one topic, with all keys that belong to it; each key of a recipe is one.
    """

    path: KeyPath
    name: str
    value: Any


Layer: TypeAlias = "dict[str, Statement]"
"""What an entry, an override or a rule says, by topic."""


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A thresholds file as read. With ``extends: packaged``, ``document`` is the overlay and ``base`` the packaged file.

    ``refused`` is what is wrong with ``extends`` itself. The rest is then read as if it said what it may say.
    """

    path: Path
    is_packaged: bool = False
    document: Document = field(repr=False)
    base: Document | None = field(default=None, repr=False)
    refused: tuple[Problem, ...] = ()


def packaged_path() -> Path:
    """The packaged thresholds.yaml: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "thresholds.yaml"
    return inside if inside.is_file() else package.parent / "thresholds.yaml"


def shown(path: Path) -> str:
    """The name of a file in messages: relative when the file lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def read_source(path: Path | None) -> SourceFile:
    """Read a file (None: the packaged one). What is wrong is in ``document.problems``, never raised."""
    real, packaged = path or packaged_path(), packaged_path()
    document = _read(real)
    is_packaged = real.absolute() == packaged.absolute()
    if "extends" not in document.data:
        return SourceFile(path=real, is_packaged=is_packaged, document=document)
    if is_packaged:
        data = {key: value for key, value in document.data.items() if key != "extends"}
        refused = (document.problem(("extends",), "the packaged file extends nothing."),)
        return SourceFile(path=real, is_packaged=True, document=replace(document, data=data), refused=refused)
    base = _read(packaged)
    whole, extends = base, document.data["extends"]
    if not base.problems:  # entry by entry over the packaged file, each key keeping the line it came from
        data = _overlaid(base.data, {key: one for key, one in document.data.items() if key != "extends"}, ())
        whole = replace(document, data=data, where={**base.where, **document.where})
    text = f"'extends' must be 'packaged', not {extends!r}.{did_you_mean(str(extends), ['packaged'])}"
    problems = [] if extends == "packaged" else [document.problem(("extends",), text)]
    return SourceFile(path=real, document=whole, base=base, refused=tuple(problems))


def _read(path: Path) -> Document:
    return read(path, file=shown(path), parsed=_parsed)


@functools.lru_cache(maxsize=4)
def _parsed(content: bytes, file: str) -> Document:
    """A text with what each of its entries and overrides needs spelled in one way; the last few texts once: 20 ms each."""
    document = parse(content, file=file)
    entries = document.data.get("criteria")
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        overrides = entry.get("profiles") if isinstance(entry, dict) else None
        _spell_needs(document, ("criteria", key), entry)
        for name, override in overrides.items() if isinstance(overrides, dict) else ():
            _spell_needs(document, ("criteria", key, "profiles", name), override)
    return document


def _spell_needs(document: Document, path: KeyPath, layer: Any) -> None:
    """``needs: 2`` and ``needs_nodes: 2``, as files had it, become ``needs: {places: 2, nodes: 2}``. What is wrong stays."""
    needs = layer.get("needs", {}) if isinstance(layer, dict) else None
    if type(needs) is int:
        document.where[(*path, "needs", "places")] = document.find((*path, "needs"))
        needs = {"places": needs}
    if not isinstance(needs, dict):
        return
    for old in OLD_NEEDS.keys() & layer.keys():
        needs[OLD_NEEDS[old]] = layer.pop(old)
        document.where[(*path, "needs", OLD_NEEDS[old])] = document.find((*path, old))
    if needs:
        layer["needs"] = needs


def layer(path: KeyPath, written: Mapping[str, Any]) -> Layer:
    """What is written at ``path``, by topic."""
    found: Layer = {}
    kinds = [kind for kind in KINDS if kind in written]
    for name, value in written.items():
        if name in MAPPINGS:
            found |= {f"{name}.{key}": Statement((*path, name, key), f"{name}.{key}", one) for key, one in value.items()}
        elif not (kinds and name in LIMIT):
            found[name] = Statement((*path, name), name, value)
    if kinds:
        limit = {name: value for name, value in written.items() if name in LIMIT}
        found[THE_LIMIT] = Statement((*path, kinds[0]), kinds[0], limit)
    return found


def merge(layers: Iterable[Layer]) -> dict[str, list[Statement]]:
    """What the layers say of each topic, lowest first: the last statement wins, the others lose to it."""
    said: dict[str, list[Statement]] = {}
    for one in layers:
        if THE_LIMIT in one:
            for name in LIMIT:
                said.pop(name, None)
        for topic, statement in one.items():
            said.setdefault(topic, []).append(statement)
    return said


def winners(said: Mapping[str, list[Statement]]) -> dict[str, Any]:
    """The entry that is left of what the layers say."""
    merged: dict[str, Any] = {}
    for topic, (*_, (_, name, value)) in said.items():
        mapping, _, key = name.partition(".")
        if topic == THE_LIMIT:
            merged |= value
        elif mapping in MAPPINGS:
            merged.setdefault(mapping, {})[key] = value
        else:
            merged[name] = value
    return merged


def _overlaid(below: Any, above: Any, path: KeyPath) -> Any:
    """Merge entries and profiles one by one, each key by key, and the overrides of an entry as entries are merged."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if path in ((), ("criteria",), ("profiles",)) or path[2:] == ("profiles",):
        return {**below, **{key: _overlaid(below.get(key), value, (*path, key)) for key, value in above.items()}}
    has_limit = any(kind in above for kind in KINDS)
    merged = {key: value for key, value in below.items() if not (has_limit and key in LIMIT)}
    for key, value in above.items():
        both = key in MAPPINGS and isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    if "profiles" in above:
        merged["profiles"] = _overlaid(below.get("profiles"), above["profiles"], (*path, "profiles"))
    return merged
