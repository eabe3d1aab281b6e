"""Lists of hosts: in Slurm's short form, ``gpu-node-[0-16,18-22]``; and those that an earlier run met."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.host_list import expand, is_same_host
from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.files import PREVIOUS
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpucluster.places import Place

NUMBERED = re.compile(r"(.*[A-Za-z._-][0-9]*?)([0-9]{1,9})\Z")
"""A name that ends with a number, after a beginning of its own. Of a longer row of digits the last 9 are the number."""
EXACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
"""A name that Slurm and a shell take as it is."""
SEPARATORS = " ,[]\\"
MOST_RUNS = 20
"""So many runs of a results directory are looked at, the newest first: the last ones may have bound nothing."""
MOST_BYTES = 256 << 20
"""No journal has its line of bound places later, and no list of hosts is so long."""


def hostlist(names: Iterable[str]) -> str:
    r"""The names in the shortest list that Slurm expands to just these; zeros before a number stay.

    Equal names count once. Names with the same beginning share one pair of brackets. A name has no brackets if it does not end
    with a number, or is nothing but a number. What no hostname has is escaped, as ``\x2c`` for a comma.
    """
    return ",".join(pieces(names))


def pieces(names: Iterable[str]) -> list[str]:
    """The parts of :func:`hostlist`, one for each beginning."""
    numbers: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        found = NUMBERED.match(name) if EXACT.match(name) else None
        prefix, number = found.groups() if found is not None else (_escaped(name), "")
        numbers[prefix].append(number)
    return [piece for prefix, found in sorted(numbers.items()) for piece in _folded(prefix, found)]


def names_of_absent(nodes: Sequence[Place]) -> str:
    """The hosts of absent nodes in Slurm's short form, as far as a list names them: ``gpu-node-[1,7], 2 unknown hosts``."""
    known = [node.hostname for node in nodes if node.hostname is not None]
    unknown = len(nodes) - len(known)
    rest = [counted(unknown, "unknown host")] if unknown else []
    return ", ".join([*([hostlist(known)] if known else []), *rest])


def short_names(hostnames: Sequence[str], *, among: Iterable[str]) -> list[str]:
    """Hostnames without their domains, as Slurm calls its nodes; unchanged where that is the name of several hosts.

    Args:
        hostnames: what to shorten.
        among: all hosts of the run.
    """
    hosts: dict[str, set[str]] = defaultdict(set)
    for name in (*hostnames, *among):
        hosts[_label(name).lower()].add(name.lower())
    return [_label(name) if len(hosts[_label(name).lower()]) == 1 else name for name in hostnames]


def _label(hostname: str) -> str:
    """The first label; an address as it is."""
    first = hostname.partition(".")[0]
    return first if first and not first.isdigit() else hostname


def _escaped(name: str) -> str:
    return "".join(one if one.isprintable() and one not in SEPARATORS else _escape(one) for one in name)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _folded(prefix: str, numbers: Sequence[str]) -> list[str]:
    """One beginning with all its numbers; the name without a number apart."""
    unnumbered = [prefix] if "" in numbers else []
    given = sorted((number for number in numbers if number), key=lambda number: (int(number), len(number)))
    if len(given) <= 1:
        return [*unnumbered, *(f"{prefix}{number}" for number in given)]
    left = set(given)
    ranges: list[str] = []
    for first in given:
        if first not in left:
            continue
        last = first
        left.remove(first)
        while (following := str(int(last) + 1).zfill(len(first))) in left:
            last = following
            left.remove(last)
        ranges.append(first if first == last else f"{first}-{last}")
    return [*unnumbered, f"{prefix}[{','.join(ranges)}]"]


def hosts_of_earlier_run(folder: Path) -> tuple[str, ...]:
    """The host of each node in the newest run of a results directory that knew all of them; empty where none did.

    A simulated run tells nothing of real hosts.
    """
    shelves = sorted((folder / PREVIOUS).glob("*"), reverse=True)
    for run in [folder, *shelves][:MOST_RUNS]:
        hosts = _bound_hosts(run / JOURNAL)
        if hosts:
            return hosts
    return ()


def remembered_hosts(folder: Path, *, num_nodes: int, own: str) -> tuple[str, ...]:
    """The same, where that run had as many nodes, and this host, ``own``, among them: else it was another cluster."""
    hosts = hosts_of_earlier_run(folder)
    return hosts if len(hosts) == num_nodes and any(is_same_host(own, host) for host in hosts) else ()


def hosts_from(text: str) -> tuple[str, ...]:
    """The hosts that ``--hosts`` names: names with commas between, as Slurm writes them too, or a path of what has them.

    A path has a ``/``. A folder is the results directory of an earlier run. A file has the names, a line each or with commas.

    Raises:
        ConfigurationError: no hosts are there, or the text is no list of hosts.
    """
    if "/" not in text and "[" not in text:
        return tuple(host.strip() for host in text.split(","))
    path = Path(text)
    if path.is_dir():
        hosts = hosts_of_earlier_run(path)
        if not hosts:
            raise ConfigurationError(f"--hosts {text}: no run in this folder knew the hosts of all its nodes")
        return hosts
    try:
        written = path.read_text(encoding="utf-8").splitlines() if "/" in text else [text]
        hosts = expand(",".join(line.partition("#")[0] for line in written))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--hosts {text}: {getattr(error, 'strerror', None) or error}") from None
    if not hosts:
        raise ConfigurationError(f"--hosts {text}: it names no host")
    return hosts


def _bound_hosts(journal: Path) -> tuple[str, ...]:
    for event in _events(journal):
        facts = event.get("facts")
        if event.get("event") == "started" and isinstance(facts, dict) and facts.get("simulated"):
            return ()
        if event.get("event") == "bound":
            return _hosts(event.get("nodes"))
    return ()


def _hosts(nodes: Any) -> tuple[str, ...]:
    """The hostnames by node number; empty where one is not known."""
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        return ()
    by_number = {node.get("node"): node.get("hostname") for node in nodes}
    hosts = [by_number.get(number) for number in range(len(nodes))]
    return tuple(map(str, hosts)) if all(isinstance(host, str) and host for host in hosts) else ()


def _events(journal: Path) -> Iterator[dict[str, Any]]:
    """The events at the begin of a journal; what is no event is passed over. A link or a pipe is not read."""
    try:
        descriptor = os.open(journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        for line in file:
            if file.tell() > MOST_BYTES:
                return
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
