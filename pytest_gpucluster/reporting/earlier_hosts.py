"""The hosts that an earlier run met, in the order of their node numbers: its journal says them where no other list does."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.host_list import expand, is_same_host
from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.files import PREVIOUS

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_RUNS = 20
"""So many runs of a results directory are looked at, the newest first: the last ones may have bound nothing."""
MOST_BYTES = 256 << 20
"""No journal has its line of bound places later, and no list of hosts is so long."""


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
