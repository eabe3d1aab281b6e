"""Cause before consequence: from the replies of ranks that worked together, which one is to blame, and in what words.

Pure: replies in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.protocol.rank import ranges

Reply = Mapping[str, Any]
Name = Callable[[int], str]

CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|socket (timeout|closed)|remote process exited"
    r"|ncclRemoteError|ncclSystemError|unhandled (system|cuda) error|Connection refused",
    re.IGNORECASE,
)
TAIL_LINES = 12
SHOWN_STACKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Whom to blame for a call that failed."""

    culprits: tuple[int, ...]
    kind: str
    text: str


def diagnose(replies: Mapping[int, Reply], *, name: Name, what: str) -> Diagnosis:
    """Why ``what`` happened to these ranks, of which at least one failed.

    Args:
        replies: the answer of each rank of one group (or of one rank that worked alone).
        name: a rank in words, for example ``rank 2 (node0-gpu2, host)``.
        what: what did not work, for example ``gemm was not measured``.
    """
    failed = {rank: reply for rank, reply in replies.items() if not reply["ok"]}
    culprits, headline = _cause(failed, replies)
    kind = str(failed[culprits[0] if culprits else min(failed)]["kind"])
    lines = [f"{what}: {headline(name)}"]
    rest = [rank for rank in failed if rank not in culprits]
    lines += [f"  {text}" for text in _consequences(rest, failed)]
    lines += _evidence(_telling(culprits or tuple(failed), failed), failed, name)
    return Diagnosis(culprits=culprits, kind=kind, text="\n".join(lines))


def _cause(failed: Mapping[int, Reply], replies: Mapping[int, Reply]) -> tuple[tuple[int, ...], Callable[[Name], str]]:
    own = _first_causes(failed)
    if own:
        return tuple(own), lambda name: _each_said(own, failed, name)
    if any(reply["kind"] == "hung" for reply in failed.values()):
        return _who_hung(failed, replies)
    everyone = sorted(failed)
    return (), lambda name: f"ranks {ranges(everyone)} failed together: {name(everyone[0])} {_said(failed[everyone[0]])}"


def _first_causes(failed: Mapping[int, Reply]) -> list[int]:
    """Who died or was lost; else who raised something that is not the echo of another's end."""
    for kinds in (("died", "lost"), ("refused", "raised")):
        own = [rank for rank in sorted(failed) if failed[rank]["kind"] in kinds and not is_consequence(failed[rank])]
        if own:
            return own
    return []


def is_consequence(reply: Reply) -> bool:
    """Whether a rank raised what somebody else's end does to it: a connection that closed, not an error of its own."""
    return reply["kind"] == "raised" and bool(CONSEQUENCE.search(str(reply.get("error", ""))))


def _who_hung(failed: Mapping[int, Reply], replies: Mapping[int, Reply]) -> tuple[tuple[int, ...], Callable[[Name], str]]:
    counts = {rank: int(reply.get("collectives", 0)) for rank, reply in failed.items()}
    furthest = max(counts.values())
    behind = sorted(rank for rank in failed if counts[rank] < furthest)
    stopped = sorted(rank for rank in failed if failed[rank].get("state") == "T")
    late = str(next(reply["error"] for reply in failed.values() if reply["kind"] == "hung"))
    entered = sorted(rank for rank in failed if counts[rank] == furthest)
    collective = next((str(failed[rank].get("collective")) for rank in entered), "")
    if stopped:
        return tuple(stopped), lambda name: f"{_names(stopped, name)} is stopped (SIGSTOP): the call {late}"
    if behind and len(replies) > 1:
        where = f"{collective} (collective {furthest} of the call)"
        return (
            tuple(behind),
            lambda name: (
                f"{_names(behind, name)} never arrived in {where}, which ranks {ranges(entered)} had entered: the call {late}"
            ),
        )
    if len(replies) == 1:
        return tuple(failed), lambda name: f"{_names(sorted(failed), name)} {late}{_in(failed[min(failed)])}"
    return (
        (),
        lambda _name: (
            f"ranks {ranges(sorted(failed))} all entered {collective or 'no collective'} and none returned: the call {late}"
        ),
    )


def _in(reply: Reply) -> str:
    return f", last in {reply['collective']}" if reply.get("collective") else ""


def _each_said(ranks: Sequence[int], failed: Mapping[int, Reply], name: Name) -> str:
    """Equal failures collapsed: ``ranks 3, 5, 8-15``."""
    said: dict[str, list[int]] = {}
    for rank in ranks:
        said.setdefault(_said(failed[rank]), []).append(rank)
    return "; ".join(f"{_names(same, name)}: {text}" for text, same in said.items())


def _said(reply: Reply) -> str:
    kind, error = reply["kind"], str(reply.get("error", ""))
    if kind in ("raised", "refused") and reply.get("type"):
        return f"{reply['type']}: {error}" if error else str(reply["type"])
    return f"{error}{_in(reply)}"


def _names(ranks: Sequence[int], name: Name) -> str:
    if len(ranks) == 1:
        return name(ranks[0])
    return f"ranks {ranges(ranks)} ({name(ranks[0])} first)"


def _consequences(ranks: Sequence[int], failed: Mapping[int, Reply]) -> list[str]:
    suffered: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        reply = failed[rank]
        where = f" in {reply['collective']}" if reply.get("collective") else ""
        suffered.setdefault(f"waited{where} and did not finish because of it", []).append(rank)
    return [f"rank{'s' if len(same) > 1 else ''} {ranges(same)} {text}" for text, same in suffered.items()]


def _telling(ranks: Sequence[int], failed: Mapping[int, Reply]) -> tuple[int, ...]:
    """Whose evidence to show: the culprits', and in a hang without any stacks of theirs (SIGSTOP) those of one that waits."""
    hung = any(reply["kind"] == "hung" for reply in failed.values())
    if not hung or any(failed[rank].get("stacks") for rank in ranks):
        return tuple(ranks)
    return (*ranks, *[rank for rank in sorted(failed) if failed[rank].get("stacks")][:1])


def _evidence(ranks: Sequence[int], failed: Mapping[int, Reply], name: Name) -> list[str]:
    lines: list[str] = []
    shown: set[str] = set()
    for rank in ranks[:SHOWN_STACKS]:
        reply = failed[rank]
        for title, text in (
            ("traceback", reply.get("traceback")),
            ("Python stacks", reply.get("stacks")),
            ("flight recorder", reply.get("flight")),
            ("last output", reply.get("output")),
        ):
            if text and str(text).strip() and str(text) not in shown:
                shown.add(str(text))
                told = str(text).rstrip().splitlines()
                tail = told[:TAIL_LINES] if title == "Python stacks" else told[-TAIL_LINES:]
                lines += [f"  {title} of {name(rank)}:", *(f"    {line}" for line in tail)]
    return lines
