"""What to do after a run with bad parts: the command that measures again, good nodes, nodes to drain. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.culprits import HARDWARE
from pytest_gpucluster.judging.verdict import ERROR, FAILED, MISSING, NOISY, PASSED, WAIVED, counted_as
from pytest_gpucluster.reporting.hostlists import EXACT, hostlist, short_names
from pytest_gpucluster.reporting.lines import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.judging.culprits import Culprit
    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.places import Place

NOT_GOOD = (FAILED, ERROR, MISSING, NOISY)
MOST_COMMANDS = 4
MOST_GOOD = 6
"""Lines of good nodes."""
CONTINUED = " \\"
TIED = "\N{NO-BREAK SPACE}"
"""A space at which no line is broken."""


def again(selection: str, command: Sequence[str], *, width: int, indent: str) -> list[str]:
    r"""The command that measures just this again, broken for a shell with ``\`` where it is wider than the screen.

    Args:
        selection: what pytest's ``-k`` selects.
        command: the words of the command of this run; empty where it is not known.
        width: columns of the screen.
        indent: stands before the first line.
    """
    words = shlex.join(command) if command else "the same command with"
    lines = wrapped(f'{words} -k{TIED}"{selection}"', width=width, indent=indent, end=CONTINUED if command else "")
    return [line.replace(TIED, " ") for line in lines]


def good_hosts(records: Iterable[Record], culprits: Iterable[Culprit], places: Mapping[str, Place]) -> list[str]:
    """The hostnames of all nodes at which something passed and nothing points to a fault."""
    measured: set[int] = set()
    bad = {places[name].node for culprit in culprits for name in culprit.places}
    for record in records:
        place = places.get(record.place or "")
        if place is not None and record.outcome == PASSED:
            measured.add(place.node)
        if record.outcome in NOT_GOOD:
            named = (*record.culprits, *record.among, record.place or "")
            bad |= {places[name].node for name in named if name in places}
    hosts = hosts_by_node(places)
    spoilt = {hosts[node] for node in bad if node in hosts}
    return [host for node, host in sorted(hosts.items()) if node in measured - bad and host not in spoilt]


def hosts_by_node(places: Mapping[str, Place]) -> dict[int, str]:
    """The hostname of each node that said hello."""
    return {place.node: place.hostname for place in places.values() if place.hostname is not None}


def good_lines(hosts: Sequence[str], *, width: int) -> list[str]:
    """The good nodes as one list of hosts."""
    text = hostlist(short_names(hosts)) if hosts else "no node"
    lines = wrapped(text.replace(",", ", "), width=width, indent="good: ", later="      ")
    lines = [line.replace(", ", ",") for line in lines]
    if len(lines) > MOST_GOOD:
        return [*lines[: MOST_GOOD - 1], f"      ... {len(hosts)} nodes in all; each is in results.json"]
    return lines


def hosts_to_drain(culprits: Iterable[Culprit], places: Mapping[str, Place]) -> list[str]:
    """The hostnames of nodes with bad hardware or without any answer; software, settings and what is unknown drain nothing."""
    hosts = hosts_by_node(places)
    nodes = {
        places[culprit.place].node
        for culprit in culprits
        if culprit.place is not None
        and culprit.kind in HARDWARE
        and any(counted_as(record) != WAIVED for record in culprit.records)
    }
    names = short_names([hosts[node] for node in sorted(nodes) if node in hosts])
    return [name for name in dict.fromkeys(names) if EXACT.match(name)]


def drain_lines(hosts: Sequence[str], reason: str, *, width: int) -> list[str]:
    """Commands for Slurm that take these hosts out of service, as a shell reads them."""
    lines: list[str] = []
    commands = _in_chunks(list(hosts), max(width - len("drain: scontrol update nodename=''") - len(CONTINUED), 20))
    for names in commands[:MOST_COMMANDS]:
        words = ("scontrol", "update", f"nodename={shlex.quote(names)}", "state=drain", f"reason={shlex.quote(reason)}")
        lines += wrapped(" ".join(words), width=width, indent="drain: ", later="       ", end=CONTINUED)
    if len(commands) > MOST_COMMANDS:
        lines.append("drain: more nodes than these; each is in results.json")
    return lines


def _in_chunks(hosts: list[str], longest: int) -> list[str]:
    """Lists of hosts of at most ``longest`` characters each, where one name is not longer."""
    if not hosts:
        return []
    text = hostlist(hosts)
    if len(text) <= longest or len(hosts) == 1:
        return [text]
    middle = len(hosts) // 2
    return [*_in_chunks(hosts[:middle], longest), *_in_chunks(hosts[middle:], longest)]
