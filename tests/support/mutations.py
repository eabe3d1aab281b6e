"""Every way in which one field of JSON data may be another one: what a damaged, edited or foreign record looks like."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHERS: tuple[Any, ...] = (None, True, "x\x1b[31m\u202e", -1, 10**30, float("nan"), [], {}, "node9-gpu9", [None])
"""What stands in the place of a value: of another type, too large, unprintable, and the id of a place that nobody knows."""
Path = tuple[Any, ...]


class Mutation(NamedTuple):
    """Data with one field that is another one: ``where`` and ``what`` say which, ``data`` is all of it."""

    where: str
    what: str
    data: Any


def mutations(data: Any) -> Iterator[Mutation]:
    """One field after another: removed, replaced, and, of a list, doubled and cut. The last item of a list stands for all."""
    known = {_kind(path): path for path in _paths(data)}
    for path in known.values():
        where = ".".join(map(str, path))
        yield Mutation(where, "removed", _changed(data, path, remove=True))
        value = _at(data, path)
        lists = {"doubled": value * 2, "cut": value[:-1]} if isinstance(value, list) else {}
        others = {repr(other): other for other in OTHERS if repr(other) != repr(value)}
        yield from (Mutation(where, what, _changed(data, path, other)) for what, other in {**others, **lists}.items())


def _paths(data: Any, before: Path = ()) -> Iterator[Path]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*before, key)
        yield from _paths(value, (*before, key))


def _kind(path: Path) -> Path:
    return tuple("*" if isinstance(key, int) else key for key in path)


def _at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def _changed(data: Any, path: Path, value: Any = None, *, remove: bool = False) -> Any:
    """The data with another value at the path, or none; what does not lie on it is shared with the data."""
    (key, *rest), changed = path, data.copy()
    if rest:
        changed[key] = _changed(data[key], tuple(rest), value, remove=remove)
    elif remove:
        del changed[key]
    else:
        changed[key] = copy.deepcopy(value)
    return changed
