"""Finds the ranks that caused a failed call, from the replies of all ranks, and describes the failure.

Among them are ranks that entered another collective than the others, or the same one on tensors that do not match. PyTorch's
own matcher (``torch.distributed.flight_recorder``) compares with the first rank and needs the whole record of every rank;
decision 23 says why it is not used. Pure: replies in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pytest_gpucluster.errors import Part
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.protocol.messages import Failure, FailureKind, Reply
from pytest_gpucluster.protocol.rank import ranges, rank_list
from pytest_gpucluster.text import barred_below, first_line
from pytest_gpucluster.text import lines as lines_of

Name = Callable[[int], str]
Failures: TypeAlias = "Mapping[int, Failure]"

ONE_WAY = "correct the program: its ranks take different ways through it (other code, data or variables of the environment)"


Cause: TypeAlias = "tuple[list[int], str, str | None]"
"""The culprits, the failure in words, and what to do if it can only be the program's."""


CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|socket (timeout|closed)|remote process exited"
    r"|ncclRemoteError|ncclSystemError|unhandled (system|cuda) error|Connection refused",
    re.IGNORECASE,
)
TAIL_LINES = 12
FIRST_LINES = {"traceback": 60, "Python stacks": 12}
"""What is shown from its first line on: a worker has cut its traceback, and the first cause stands first."""
SHOWN_STACKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a call failed.

    Attributes:
        culprits: the ranks that caused it; none if all failed alike.
        kind: the kind of failure.
        text: the failure in words.
        blames: the kind of part that is to blame.
        cause: what happened, in one line without the ranks.
        failed: the ranks without a value.
        advice: what to do next, where the failures of all culprits say the same.
    """

    culprits: tuple[int, ...]
    kind: FailureKind
    text: str
    blames: Part
    cause: str
    failed: tuple[int, ...]
    advice: str | None = None


def diagnose(replies: Mapping[int, Reply], *, name: Name, what: str) -> Diagnosis:
    """Why ``what`` happened to these ranks, of which at least one failed.

    Args:
        replies: the reply of each rank of one group, or of one rank without a group.
        name: describes a rank, for example ``rank 2 (node0-gpu2, host)``.
        what: the outcome, for example ``gemm was not measured``.
    """
    failed = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}
    culprits, headline, advice = _find_cause(failed, replies, name)
    blamed = [rank for rank in culprits if rank in failed]  # a rank that returned too early has not failed itself
    first = failed[blamed[0] if blamed else min(failed)]
    parts: set[Part] = {"software"} if advice else {failed[rank].blames or "unknown" for rank in blamed}
    advices = {failed[rank].advice for rank in blamed}
    advice = advice or (advices.pop() if len(advices) == 1 else None)
    lines = [f"{what}: {headline}", *([f"  next: {advice}"] if advice is not None else [])]
    lines += [f"  {text}" for text in _consequences([rank for rank in failed if rank not in culprits], failed)]
    lines += _evidence(_with_stacks(blamed or ([] if culprits else list(failed)), failed), failed, name)
    return Diagnosis(
        culprits=tuple(culprits),
        kind="hung" if culprits and not blamed else first.kind,
        text="\n".join(lines),
        blames=parts.pop() if len(parts) == 1 else "unknown",
        cause=first_line(_describe(first)),
        failed=tuple(sorted(failed)),
        advice=advice,
    )


def _find_cause(failed: Failures, replies: Mapping[int, Reply], name: Name) -> Cause:
    causes = _first_causes(failed)
    if causes:
        return causes, _describe_each(causes, failed, name), None
    if any(reply.kind == "hung" for reply in failed.values()):
        return _find_cause_of_hang(failed, replies, name)
    first = min(failed)
    return [], f"ranks {ranges(failed)} failed together: {name(first)} {_describe(failed[first])}", None


def _first_causes(failed: Failures) -> list[int]:
    """The ranks that died or were lost. If there are none: those that raised an error of their own."""
    for kinds in (("died", "lost"), ("refused", "raised")):
        causes = [rank for rank in sorted(failed) if failed[rank].kind in kinds and not is_consequence(failed[rank])]
        if causes:
            return causes
    return []


def is_consequence(failure: Failure) -> bool:
    """Whether the rank raised only because another rank ended: its connection closed. What has advice of its own did not."""
    return failure.advice is None and failure.kind == "raised" and bool(CONSEQUENCE.search(failure.cause or failure.error))


def _find_cause_of_hang(failed: Failures, replies: Mapping[int, Reply], name: Name) -> Cause:
    """Stopped processes; otherwise ranks that never arrived in a collective; otherwise a single rank."""
    late = next(reply.error for reply in failed.values() if reply.kind == "hung")
    stopped = sorted(rank for rank in failed if failed[rank].state == "T")
    if stopped:
        return stopped, f"{_names(stopped, name)} is stopped (SIGSTOP): the call {late}", None
    if len(replies) == 1:
        (alone,) = failed
        return [alone], f"{name(alone)} {late}{_last_collective(failed[alone])}", None
    furthest = max(reply.collectives for reply in failed.values())
    entered = sorted(rank for rank in failed if failed[rank].collectives == furthest)
    collective = next((failed[rank].collective for rank in entered), "")
    absent = _find_absent(failed, replies, failed[entered[0]])
    if absent:
        where = f"{collective} (collective {furthest} of the call), which {rank_list(entered)} had entered"
        returned = [rank for rank in absent if rank not in failed]
        why = f"{rank_list(returned)} returned from the function; " if returned else ""
        headline = f"{_names(absent, name)} never arrived in {where}: {why}the call {late}"
        return absent, headline, ONE_WAY if returned == absent else None
    differing = find_mismatch({rank: failed[rank] for rank in entered if failed[rank].members == failed[entered[0]].members})
    if len(differing) > 1:
        odd = odd_ranks(differing)
        each = ", ".join(f"{rank_list(ranks)} {words}" for words, ranks in differing.items())
        where = f"({each}; collective {furthest} of the call): the call {late}"
        who = f"{_names(odd, name)} did not enter what the others did" if odd else "the ranks did not enter the same collective"
        return odd, f"{who} {where}", ONE_WAY
    return [], f"{rank_list(failed)} all entered {collective or 'no collective'} and none returned: the call {late}", None


def _find_absent(failed: Failures, replies: Mapping[int, Reply], waiting: Failure) -> list[int]:
    """The ranks that never arrived in the collective in which a rank waits, although they are members of it.

    A rank that returned with fewer collectives than every rank that waits is the cause: those behind the furthest wait for it
    as well. Otherwise a rank that returned is no cause, and those behind the furthest are.
    """
    spans = waiting.members or ((min(replies), max(replies)),)
    members = [rank for rank in replies if any(first <= rank <= last for first, last in spans)]
    lowest = min((failed[rank].collectives for rank in failed if rank in members), default=0)
    behind = {rank: replies[rank].collectives for rank in members if replies[rank].collectives < waiting.collectives}
    returned = [rank for rank, count in behind.items() if rank not in failed and count <= lowest]
    last_arrival = max((behind[rank] for rank in returned), default=waiting.collectives)
    return sorted([*returned, *[rank for rank, count in behind.items() if rank in failed and count <= last_arrival]])


def _last_collective(failure: Failure) -> str:
    return f", last in {failure.collective}" if failure.collective else ""


def _describe_each(ranks: Sequence[int], failed: Failures, name: Name) -> str:
    """The failures of these ranks; equal ones are collapsed: ``ranks 3, 5, 8-15``."""
    ranks_of = grouped((_describe(failed[rank]), rank) for rank in ranks)
    return "; ".join(f"{_names(same, name)}: {text}" for text, same in ranks_of.items())


def _describe(failure: Failure) -> str:
    if failure.kind in ("raised", "refused") and failure.type:
        text = f"{failure.type}: {failure.error}" if failure.error else failure.type
        return barred_below(f"{text}; first cause: {lines_of(failure.cause)[0]}" if failure.cause else text)
    return barred_below(f"{failure.error}{_last_collective(failure)}")


def _names(ranks: Sequence[int], name: Name) -> str:
    if len(ranks) == 1:
        return name(ranks[0])
    return f"ranks {ranges(ranks)} ({name(ranks[0])} first)"


def _consequences(ranks: Sequence[int], failed: Failures) -> list[str]:
    """What the failure did to the other ranks."""
    ranks_of = grouped((failed[rank].collective, rank) for rank in sorted(ranks))
    where = {name: f" in {name}" if name else "" for name in ranks_of}
    return [f"{rank_list(same)} waited{where[name]} and did not finish because of it" for name, same in ranks_of.items()]


def _with_stacks(ranks: Sequence[int], failed: Failures) -> tuple[int, ...]:
    """The ranks whose evidence is shown: these, and one that waits if these hang and have no stacks (SIGSTOP)."""
    hung = any(reply.kind == "hung" for reply in failed.values())
    if not hung or any(failed[rank].stacks for rank in ranks):
        return tuple(ranks)
    return (*ranks, *[rank for rank in sorted(failed) if failed[rank].stacks][:1])


def _evidence(ranks: Sequence[int], failed: Failures, name: Name) -> list[str]:
    lines: list[str] = []
    shown: set[str] = set()
    for rank in ranks[:SHOWN_STACKS]:
        failure = failed[rank]
        for title, text in (
            ("traceback", failure.traceback),
            ("Python stacks", failure.stacks),
            ("flight recorder", failure.flight),
            ("NCCL RAS", failure.ras),
            ("last output", failure.output),
        ):
            if text.strip() and text not in shown:
                shown.add(text)
                all_lines = lines_of(text.rstrip())
                num_first = FIRST_LINES.get(title)
                tail = all_lines[-TAIL_LINES:] if num_first is None else all_lines[:num_first]
                lines += [f"  {title} of {name(rank)}:", *(f"    {line}" for line in tail)]
    return lines


DIFFER_BY_RANK = frozenset({"send", "recv"})
SAME_TENSORS = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
)
"""Collectives whose input has the same size and data type on every rank. The others may differ, or have inputs on one rank."""


def find_mismatch(waiting: Mapping[int, Failure]) -> dict[str, list[int]]:
    """The collectives that these ranks wait in, with the ranks of each, the largest group first.

    Args:
        waiting: ranks of one process group that entered equally many collectives and did not return.

    Returns:
        Fewer than two entries if the ranks match as far as is known.
    """
    names = {failure.collective for failure in waiting.values()}
    if names & DIFFER_BY_RANK:
        return {}
    told = {rank: _tensor(failure) if names <= SAME_TENSORS else "" for rank, failure in waiting.items()}
    known = all(told.values())
    ranks_of = grouped(
        (f"{one.collective} of {told[rank]}" if known else one.collective, rank) for rank, one in sorted(waiting.items())
    )
    return dict(sorted(ranks_of.items(), key=lambda item: -len(item[1])))


def odd_ranks(found: Mapping[str, list[int]]) -> list[int]:
    """The ranks outside the largest group, if that is more than half of all; otherwise nobody can say who is wrong."""
    sizes = [len(ranks) for ranks in found.values()]
    if 2 * sizes[0] <= sum(sizes):
        return []
    return sorted(rank for ranks in list(found.values())[1:] for rank in ranks)


def _tensor(failure: Failure) -> str:
    """What the flight recorder's last line says of the input: ``Float [4]``."""
    last = failure.flight.strip().rpartition("\n")[2]
    return last.partition(": ")[2].partition(", ")[2]
