"""Hosts on this machine: network namespaces with a hostname and interfaces of their own, joined by a bridge for each interface.

Interface ``eth0`` of all hosts is one network (10.77.0.0/24), ``eth1`` another (10.77.1.0/24). A fault is planted at one
interface of one host; it goes with the host. Everything has this process's pid in its name and is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.programs import why_not_working

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

COMMAND_S = 20.0
NEEDED = ("ip", "tc", "unshare")
UNPACKED = "GPUCLUSTER_TEST_IPTABLES"
"""The variable that names the folder of an unpacked iptables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of the lab. ``space`` is its network namespace, ``number`` counts from 0."""

    number: int
    space: str

    @property
    def hostname(self) -> str:
        """The name that the host itself knows."""
        return f"gpu-node-{self.number}"

    def address(self, rail: int = 0) -> str:
        """Of its interface with this number."""
        return f"10.77.{rail}.{self.number + 1}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command to run it on this host."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname {self.hostname} && exec "$@"', "sh")
        return ("ip", "netns", "exec", self.space, *named, "env", "GLOO_SOCKET_IFNAME=eth0")

    def limit_rate(self, rail: int, mbit_s: int) -> None:
        """What it sends through an interface leaves at this rate."""
        _shape(("ip", "netns", "exec", self.space, "tc"), f"eth{rail}", mbit_s)

    def take_down(self, rail: int) -> None:
        """An interface goes down, as without its cable."""
        run("ip", "-n", self.space, "link", "set", f"eth{rail}", "down")

    def lose_packets(self, rail: int, share: float) -> None:
        """This share of the packets that arrive at an interface is lost, one by one at random, as by a bad cable.

        The packets have the size that a cable carries: of the few large ones that a kernel passes on whole, TCP sends most
        again without a wait.
        """
        run("ip", "link", "set", port_of(self.number, rail), "gso_max_segs", "1")
        chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        rule = ("-w", "-A", "INPUT", "-i", f"eth{rail}", *chance, "-j", "DROP")
        run("ip", "netns", "exec", self.space, *(iptables() or ["iptables"]), *rule)

    def drop_packets(self, rail: int) -> None:
        """The switch forwards nothing from or to the host, which sees a link that is up."""
        run("ip", "link", "set", port_of(self.number, rail), "nomaster")


def run(*command: str) -> None:
    """Run a command of the lab.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)


def iptables() -> list[str] | None:
    """The command that drops packets: installed, or unpacked by ``noxfile.py -s netlab``. None where there is none."""
    if why_not_working("iptables", "--version") is None:
        return ["iptables"]
    root = Path(os.environ.get(UNPACKED) or "/nonexistent")
    if not root.is_dir():
        return None
    extensions = next(root.rglob("libxt_*.so")).parent
    libraries = f"LD_LIBRARY_PATH={extensions.parent}", f"XTABLES_LIBDIR={extensions}"
    return ["env", *libraries, str(root / "usr" / "sbin" / "iptables-legacy")]


def bridge_of(rail: int) -> str:
    """The switch of an interface."""
    return f"gb{os.getpid():x}r{rail}"


def port_of(host: int, rail: int) -> str:
    """The port at the switch where an interface of a host ends."""
    return f"gv{os.getpid():x}h{host}r{rail}"


def why_not() -> str | None:
    """Why there can be no lab here; None where it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    try:
        with lab(hosts=1, rails=1) as (host,):
            host.limit_rate(0, 100)
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"no network namespaces with limited interfaces here: {said}"
    return None


@contextlib.contextmanager
def lab(*, hosts: int, rails: int = 2) -> Iterator[tuple[Host, ...]]:
    """So many hosts with so many interfaces each; gone at the end, whatever happened."""
    made = tuple(Host(number=number, space=f"gpc{os.getpid():x}h{number}") for number in range(hosts))
    try:
        for rail in range(rails):
            run("ip", "link", "add", bridge_of(rail), "type", "bridge")
            run("ip", "link", "set", bridge_of(rail), "up")
        for host in made:
            _add(host, made, rails)
        yield made
    finally:
        for host in made:
            for rail in range(rails):  # the namespace, and all in it, may outlive its name by a minute: a socket still sends
                _quietly("ip", "link", "del", port_of(host.number, rail))
            _quietly("ip", "netns", "del", host.space)
            shutil.rmtree(_names_of(host), ignore_errors=True)
        for rail in range(rails):
            _quietly("ip", "link", "del", bridge_of(rail))


@contextlib.contextmanager
def second_switch(hosts: Sequence[Host], rail: int = 0) -> Iterator[Callable[[int], None]]:
    """Interface ``rail`` of these hosts is at a switch of its own, joined to the first one; limits what the way carries."""
    switch, ends = f"{bridge_of(rail)}x", tuple(f"gt{os.getpid():x}r{rail}{end}" for end in "ab")

    def limit_way(mbit_s: int) -> None:
        for end in ends:
            _shape(("tc",), end, mbit_s)

    try:
        run("ip", "link", "add", switch, "type", "bridge")
        run("ip", "link", "set", switch, "up")
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, at in zip(ends, (bridge_of(rail), switch), strict=True):
            run("ip", "link", "set", end, "master", at, "up")
        for host in hosts:
            run("ip", "link", "set", port_of(host.number, rail), "master", switch)
        yield limit_way
    finally:
        _quietly("ip", "link", "del", ends[0])
        _quietly("ip", "link", "del", switch)


def _shape(tc: Sequence[str], interface: str, mbit_s: int) -> None:
    shape = ("rate", f"{mbit_s}mbit", "burst", "512kb", "latency", "20ms")
    run(*tc, "qdisc", "replace", "dev", interface, "root", "tbf", *shape)


def _add(host: Host, hosts: tuple[Host, ...], rails: int) -> None:
    run("ip", "netns", "add", host.space)
    names = _names_of(host)
    names.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{one.address()} {one.hostname}" for one in hosts)]
    (names / "hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for rail in range(rails):
        port = port_of(host.number, rail)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", f"eth{rail}", "netns", host.space)
        run("ip", "link", "set", port, "master", bridge_of(rail), "up")
        run("ip", "-n", host.space, "addr", "add", f"{host.address(rail)}/24", "dev", f"eth{rail}")
        run("ip", "-n", host.space, "link", "set", f"eth{rail}", "up")
    run("ip", "-n", host.space, "link", "set", "lo", "up")


def _names_of(host: Host) -> Path:
    """``ip netns exec`` shows the files in this folder as if they lay in /etc."""
    return Path("/etc/netns", host.space)


def _quietly(*command: str) -> None:
    """What was never made cannot be removed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        run(*command)
