"""What a function raised, as a failure: type, text, first cause and traceback, whatever the exception does when it is read."""

from __future__ import annotations

import itertools
import traceback
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.protocol.functions import RefusedError
from pytest_gpucluster.protocol.messages import Failure
from pytest_gpucluster.worker.blame import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_CHARACTERS = 4000
NAME_CHARACTERS = 200
LINE_CHARACTERS = 400
FRAMES = 4
"""Of each exception the frames nearest to where it was raised."""
LINES = 17
"""The title, the frames with up to three lines each, and four lines of the message."""
MAX_LINKS = 100
DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"


def failure_of(error: BaseException) -> Failure:
    """The failure of a call in which the function raised ``error``. Nothing that the exception's class does escapes."""
    chain = _chain_of(error)
    return Failure(
        kind="refused" if issubclass(type(error), RefusedError) else "raised",
        type=_name_of(error),
        error=_text_of(error),
        blames=part_of(error),
        cause=_describe(chain[0]) if len(chain) > 1 else "",
        traceback="\n".join(_traceback(chain)),
    )


def _chain_of(error: BaseException) -> list[BaseException]:
    """The exceptions that led to this one, the first cause first."""
    chain: list[BaseException] = []
    following: Any = error
    while isinstance(following, BaseException) and len(chain) < MAX_LINKS and all(following is not one for one in chain):
        chain.insert(0, following)
        cause = _cause_of(following)
        hides_context = cause is not None or _read("__suppress_context__", following)
        following = cause if hides_context else _read("__context__", following)
    return chain


def _cause_of(error: BaseException) -> Any:
    return _read("__cause__", error)


def _read(name: str, error: BaseException) -> Any:
    """An attribute as BaseException has it, whatever the class made of it."""
    return BaseException.__dict__[name].__get__(error)


def _name_of(error: BaseException) -> str:
    name: str = type.__dict__["__name__"].__get__(type(error))
    return name[:NAME_CHARACTERS]


def _text_of(error: BaseException) -> str:
    try:
        return str.__getitem__(str(error), slice(TEXT_CHARACTERS))
    except BaseException as failed:  # noqa: BLE001 -- the function's own code, which may raise anything
        return f"(no text: str() of it raised {_name_of(failed)})"


def _describe(error: BaseException) -> str:
    text = _text_of(error)
    return f"{_name_of(error)}: {text}" if text else _name_of(error)


def _traceback(chain: Sequence[BaseException]) -> list[str]:
    """The first cause, and the last two exceptions; what lies between them is counted."""
    lines = _lines_of(chain[0])
    shown = chain[1:] if len(chain) <= 3 else chain[-2:]
    if len(shown) < len(chain) - 1:
        lines += ["", f"... {len(chain) - 1 - len(shown)} more exceptions, each raised because of the one before ..."]
    for error in shown:
        lines += ["", DIRECT if _cause_of(error) is not None else HANDLING, "", *_lines_of(error)]
    return lines


def _lines_of(error: BaseException) -> list[str]:
    """One exception without its causes: its last frames, and its message. Long ones are cut at the end."""
    try:
        found = traceback.TracebackException(type(error), error, _read("__traceback__", error))
        del found.stack[:-FRAMES]
        lines = "".join(itertools.islice(found.format(chain=False), 10 * LINES)).splitlines()
    except BaseException:  # noqa: BLE001 -- it reads attributes that the function's own code may have made
        lines = _describe(error).splitlines()
    cut = [f"  ... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return [line[:LINE_CHARACTERS] for line in lines[:LINES]] + cut
