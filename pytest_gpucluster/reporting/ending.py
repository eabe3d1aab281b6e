"""How the screen of a run ends: the command that measures again, good nodes, nodes to drain, the verdict. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from pytest_gpucluster.judging.culprits import HARDWARE
from pytest_gpucluster.judging.forecast import clock
from pytest_gpucluster.judging.verdict import BAD, PASSED, REJECTED, WAIVED, Verdict, counted_as
from pytest_gpucluster.reporting.hostlists import EXACT, hostlist, short_names
from pytest_gpucluster.reporting.lines import shell_command, tied, wrapped
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.judging.culprits import Culprit
    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.places import Place

MOST_COMMANDS = 4
MOST_GOOD = 6
"""Lines of good nodes."""
MINUTE_S = 60.0
PARTS_OF_TIME = {"startup_s": "start-up", "measuring_s": "measuring", "other_s": "other"}
WIDTH_OF_THE_REST = len("drain: scontrol update 'nodename=' \\")


def again(arguments: Sequence[str], command: Sequence[str], *, width: int, indent: str) -> list[str]:
    """The command that measures just this again, as a shell reads it.

    Args:
        arguments: of pytest, which select what is measured.
        command: the words of the command of this run; empty where it is not known.
        width: columns of the screen.
        indent: stands before the first line.
    """
    later = f"{indent}  "
    if command:
        return shell_command([*command, *arguments], width=width, indent=indent, later=later)
    return shell_command(arguments, width=width, indent=f"{indent}measure again: the same command with ", later=later)


def good_hosts(records: Iterable[Record], culprits: Iterable[Culprit], places: Mapping[str, Place]) -> list[str]:
    """The hostnames of all nodes at which something passed and nothing points to a fault."""
    measured: set[int] = set()
    bad = {places[name].node for culprit in culprits for name in culprit.places}
    for record in records:
        place = places.get(record.place or "")
        if place is not None and record.outcome == PASSED:
            measured.add(place.node)
        if record.outcome in BAD:
            named = (*record.culprits, *record.among, record.place or "")
            bad |= {places[name].node for name in named if name in places}
    hosts = hosts_by_node(places)
    bad_hosts = {hosts[node] for node in bad if node in hosts}
    return [host for node, host in sorted(hosts.items()) if node in measured - bad and host not in bad_hosts]


def hosts_by_node(places: Mapping[str, Place]) -> dict[int, str]:
    """The hostname of each node that said hello."""
    return {place.node: place.hostname for place in places.values() if place.hostname is not None}


def good_lines(hosts: Sequence[str], places: Mapping[str, Place], *, width: int) -> list[str]:
    """The good nodes as one list of hosts."""
    names = short_names(hosts, among=hosts_by_node(places).values())
    text = hostlist(names) if names else "no node"
    lines = wrapped(text.replace(",", ", "), width=width, indent="good: ", later="      ")
    lines = [line.replace(", ", ",") for line in lines]  # a list that Slurm reads has no blanks
    if len(lines) > MOST_GOOD:
        return [*lines[: MOST_GOOD - 1], f"      ... {counted(len(hosts), 'node')} in all; each is in results.json"]
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
    names = short_names([hosts[node] for node in sorted(nodes) if node in hosts], among=hosts.values())
    return [name for name in dict.fromkeys(names) if EXACT.match(name)]


def drain_lines(hosts: Sequence[str], reason: str, *, width: int) -> list[str]:
    """Commands for Slurm that take these hosts out of service, as a shell reads them."""
    lines: list[str] = []
    commands = _in_chunks(list(hosts), max(width - WIDTH_OF_THE_REST, 20))
    for some in commands[:MOST_COMMANDS]:
        words = ("scontrol", "update", f"nodename={hostlist(some)}", "state=drain", f"reason={reason}")
        lines += shell_command(words, width=width, indent="drain: ", later="       ")
    more = sum(map(len, commands[MOST_COMMANDS:]))
    return [*lines, *([f"drain: # and {counted(more, 'more node')}, in results.json"] if more else [])]


def _in_chunks(hosts: list[str], longest: int) -> list[list[str]]:
    """The hosts in parts whose lists have at most ``longest`` characters each, where one name is not longer."""
    if len(hosts) <= 1 or len(hostlist(hosts)) <= longest:
        return [hosts] if hosts else []
    middle = len(hosts) // 2
    return [*_in_chunks(hosts[:middle], longest), *_in_chunks(hosts[middle:], longest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What stands around the verdict line.

    Attributes:
        mode: why this run accepts nothing, whatever it measured; None if it may accept.
        timings: seconds by name, as results.json has them.
        folder: the results directory.
        files: the names of the reports in it, and the paths of other reports.
    """

    mode: str | None
    timings: Mapping[str, float]
    folder: str
    files: Sequence[str]


def verdict_block(verdict: Verdict, ending: Ending, *, width: int, quiet: bool) -> list[Text]:
    """A rule, the line that begins with ``verdict``, and what it does not say. pytest's last line, a rule too, ends the block.

    Without a rule if ``quiet``.
    """
    colour = "green" if verdict.is_acceptance else "red" if verdict.word == REJECTED else "yellow"
    rule = [] if quiet else [Text("=" * width, colour)]
    mode = [] if ending.mode is None else [Text(f"  {ending.mode}", "bold yellow")]
    seconds = ending.timings
    parts = ", ".join(f"{words} {tied(duration(seconds[name]))}" for name, words in PARTS_OF_TIME.items())
    files = f"  {', '.join(ending.files)}" if ending.files else ""
    waited = f"; ranks waited {tied(duration(seconds['waited_s']))}" if "waited_s" in seconds else ""
    facts = (f"took {tied(duration(seconds['total_s']))}: {parts}{waited}", f"reports in {ending.folder}{files}")
    lines = [Text(line) for fact in facts for line in wrapped(fact, width=width, indent="  ")]
    return [*rule, Text(f"verdict {verdict.line}", f"bold {colour}"), *mode, *lines]


def duration(seconds: float) -> str:
    """``8.2 s``, or ``3:14`` from a minute on."""
    return f"{seconds:.1f} s" if seconds < MINUTE_S else clock(seconds)
