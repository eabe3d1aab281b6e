"""The hosts that a run expects, in the order of their node numbers: the launcher's list, else Slurm's. Pure."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Mapping

from pytest_gpucluster.errors import ConfigurationError

VARIABLE = "GPUCLUSTER_HOSTS"
"""The variable with the hosts in the order of their node numbers, for which ``gpucluster launch`` takes care."""
STEP, JOB = "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"
MOST = 100_000
OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")
BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expected_hosts(variables: Mapping[str, str], *, num_nodes: int, own: str) -> tuple[str, ...]:
    """The expected host of each node, as far as a list names them; empty without a list.

    Slurm's list counts where ``own``, the name of this host, is in it and where it has no more hosts than ``num_nodes``:
    otherwise it names other things than the nodes of this run. The hosts of a step are meant where there are as many.

    Raises:
        ConfigurationError: :data:`VARIABLE` is no list of hosts.
    """
    if variables.get(VARIABLE, "").strip(" ,"):
        return hosts_in(variables, VARIABLE)
    try:
        step, job = (expand(variables.get(name, "")) for name in (STEP, JOB))
    except ValueError:
        return ()  # no version of Slurm writes such a list
    hosts = step if len(step) == num_nodes else job
    return hosts if len(hosts) <= num_nodes and any(is_same_host(own, host) for host in hosts) else ()


def hosts_in(variables: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The hosts that a variable lists; none where it is not set.

    Raises:
        ConfigurationError: it is no list of hosts.
    """
    text = variables.get(name, "")
    try:
        return expand(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text!r} is no list of hosts: {error}") from None


def expand(text: str) -> tuple[str, ...]:
    """``a,gpu-[08-10]`` as ``a``, ``gpu-08``, ``gpu-09``, ``gpu-10``: names with commas between, or Slurm's short form.

    Raises:
        ValueError: a bracket does not end, or does not hold numbers and ranges of them; or there are too many names.
    """
    parts = filter(None, (part.strip() for part in OUTSIDE_BRACKETS.split(text)))
    found = tuple(itertools.islice((name for part in parts for name in _names(part)), MOST + 1))
    if len(found) > MOST:
        raise ValueError(f"it has more than {MOST} hosts")
    return found


def is_same_host(name: str, other: str) -> bool:
    """Whether both are names of one host: equal, or equal up to a domain that only one of them has."""
    low, high = sorted((name.lower(), other.lower()), key=len)
    return low == high or (high.startswith(f"{low}.") and not is_address(high))


def is_address(name: str) -> bool:
    """Whether this is an IP address, which no hostname can equal."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _names(pattern: str) -> Iterator[str]:
    found = BRACKETS.search(pattern)
    if found is None:
        if "[" in pattern or "]" in pattern:
            raise ValueError(f"{pattern!r} has a bracket without its end")
        yield pattern
        return
    for number in _numbers(found[1]):
        for rest in _names(pattern[found.end() :]) if found.end() < len(pattern) else ("",):
            yield f"{pattern[: found.start()]}{number}{rest}"


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
            raise ValueError(f"{part!r} is no number and no range of numbers")
        if not 0 <= int(last) - int(first) < MOST:
            raise ValueError(f"{part!r} is no range of up to {MOST} hosts")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
