"""What Slurm says of this host and of the job that runs here, by ``scontrol`` with one line for each record (``-o``).

That form is the same in all versions; ``--json`` came with 23.02, and its fields change with the version. No field is taken
from text that a user may write: the state stands before the reason, and what a job has of a host is one fixed group of words.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.config.host_list import expand
from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.numa import parse_cpulist
from pytest_gpucluster.inventory.reading import NotAvailable, apply
from pytest_gpucluster.inventory.sysfs import PROC

DEADLINE_S = 15.0
"""For one command. Slurm itself says after 9 s that no controller is there, so its own words come first."""
LONGEST = 300
"""Characters of an error message that are kept."""
PARENT_AT, STARTED_AT = 1, 19
"""Where /proc/PID/stat has the parent and the start, in ticks since the boot, counted from behind the name."""
SIGNS = {
    "*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN",
    "$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED",
}  # fmt: skip
"""What the sign behind a state means, by Slurm's manual of sinfo (NODE STATE CODES)."""
SAME = {
    "ALLOC": "ALLOCATED", "MIX": "MIXED", "COMP": "COMPLETING", "MAINT": "MAINTENANCE", "INVAL": "INVALID_REG",
    "DRAINED": "DRAIN", "DRAINING": "DRAIN", "FAILING": "FAIL", "RESV": "RESERVED", "REBOOT": "REBOOT_REQUESTED",
}  # fmt: skip
"""Other words of the same states, as sinfo and older versions write them."""
NONE = ("", "(null)", "N/A")
_STATE = re.compile(r" State=(\S+) ThreadsPerCore=(\d+) ")
_PARTITION = re.compile(r"PartitionName=(\S+) .*\bState=([A-Z]+) ")
_BLOCK = re.compile(r"(?:^|\s)BlockName=(\S+) (?:.*\s)?Nodes=(\S+)")
_REASON = re.compile(r" Reason=(.*?)(?: (?:Comment|Extra)=.*)?$")
_SHARE = re.compile(r" Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)(?=\s+[A-Z][\w/:]*=)")
_GPUS = re.compile(r"gpu(?::[^:()]+)*?:(\d+)(?:\(.*\))?")
_OUTSIDE_BRACKETS = re.compile(r",(?![^\[(]*[\])])")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A host in the eyes of its controller.

    ``host`` is its hostname. ``states`` are the base state and each flag, in the words of Slurm's source. ``gpus`` are those of
    its GRES, 0 where it has none. ``memory_mib`` is what Slurm may give to jobs.
    """

    name: str
    host: str | NotAvailable
    states: list[str]
    reason: str
    gpus: int | NotAvailable
    threads_per_core: int
    memory_mib: int | NotAvailable
    partitions: str | NotAvailable
    version: str | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmShare:
    """What a job has of a host. ``cpus`` is a number only: Slurm counts CPUs in an order of its own. 0 MiB: all memory."""

    cpus: int
    memory_mib: int
    gpus: int | NotAvailable


def read_node(name: str, *, hostname: str, within_s: float | None = None) -> SlurmNode | NotAvailable:
    """The host with this name in Slurm. A variable of another host may name another one, so the hostname has to fit."""
    node = apply(parse_node, ask("-o", "show", "node", name, within_s=within_s))
    if isinstance(node, SlurmNode) and isinstance(node.host, str) and _without_domain(node.host) != _without_domain(hostname):
        return NotAvailable(f"Slurm's node {name} is the host {node.host}, and this one is {hostname}")
    return node


def read_nodes(names: Sequence[str]) -> dict[str, SlurmNode] | NotAvailable:
    """The hosts with these names in Slurm, by name; what Slurm does not know is left out."""
    return apply(parse_nodes, ask("-o", "show", "node", ",".join(names)))


def read_share(job: str, name: str) -> SlurmShare | NotAvailable:
    """What the job has of the host with this name in Slurm."""
    return apply(lambda text: parse_share(text, name), ask("-d", "-o", "show", "job", job))


def read_controller() -> str | NotAvailable:
    """Slurm's own words: ``Slurmctld(primary) at head1 is UP``, a line for each controller."""
    return ask("ping")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """What a site has set in Slurm, in the words of ``scontrol show config``; empty where it set nothing.

    ``interval_s``: between two runs of the health check sysfs, 0 for never. ``pyxis``: whether srun knows its option
    ``--container-image``. ``enroot``: its path here. ``packing``: the plugin that chooses nodes, and its parameters. ``mpi``:
    the ways of srun to start MPI. ``prolog_most_s``: from the job's start to the first process of its step here, which holds
    the prolog and what the job's script did before.
    """

    health_check: str
    interval_s: int | NotAvailable
    prolog: str
    accounting: str
    topology: str
    pyxis: bool | NotAvailable
    enroot: str | None
    packing: str
    mpi: str | NotAvailable
    prolog_most_s: float | NotAvailable


def read_config(variables: Mapping[str, str]) -> SlurmConfig | NotAvailable:
    """How Slurm is set up; ``variables`` are those of this process in its job."""

    def of_text(text: str) -> SlurmConfig | NotAvailable:
        found = parse_config(text)
        if "HealthCheckProgram" not in found:
            return NotAvailable(f"scontrol's answer is no configuration: {_short(text)}")
        interval = re.match(r"\d+", found.get("HealthCheckInterval", ""))
        return SlurmConfig(
            health_check=found["HealthCheckProgram"],
            interval_s=int(interval[0]) if interval else NotAvailable("scontrol does not say HealthCheckInterval"),
            prolog=found.get("Prolog") or found.get("Prolog[0]", ""),
            accounting=found.get("AccountingStorageType", ""),
            topology=found.get("TopologyPlugin", ""),
            pyxis=apply(lambda text: "--container-image" in text, _run(("--help",), name="srun")),
            enroot=shutil.which("enroot"),
            packing=" ".join(filter(None, (found.get("SelectType"), found.get("SelectTypeParameters")))),
            mpi=read_mpi(),
            prolog_most_s=read_start(variables),
        )

    return apply(of_text, ask("show", "config"))


def read_mpi() -> str | NotAvailable:
    """The plugins of ``srun --mpi=list``, a line each below a heading, by commas; some versions print them as errors."""
    ended = program.run_by_name("srun", ("--mpi=list",), within_s=DEADLINE_S, absent="is not on the PATH")

    def of_text(said: program.Ended) -> str | NotAvailable:
        lines = [line.strip().removeprefix("srun: ") for line in f"{said.printed}\n{said.complained}".splitlines()]
        found = [line for line in lines if re.fullmatch(r"(none|cray_shasta|pmi2|pmix\w*|openmpi)", line)]
        return ", ".join(dict.fromkeys(found)) or NotAvailable(f"srun lists no way to start MPI: {_short(said.gist)}")

    return apply(of_text, ended)


def parse_config(text: str) -> dict[str, str]:
    """``HealthCheckProgram      = (null)``, a line each; what is not set is empty."""
    lines = (line.partition("=") for line in text.splitlines())
    return {name.strip(): "" if value.strip() in NONE else value.strip() for name, sign, value in lines if sign}


def read_start(variables: Mapping[str, str], *, proc: Path = PROC) -> float | NotAvailable:
    """Seconds from the job's start to that of the ``slurmstepd`` above this process."""
    begun = variables.get("SLURM_JOB_START_TIME", "")
    if not begun.isdecimal():
        return NotAvailable("SLURM_JOB_START_TIME is not set: Slurm before 22.05")
    pid = "self"
    try:
        booted_s = int(re.findall(r"(?m)^btime (\d+)$", (proc / "stat").read_text(encoding="utf-8"))[0])
        while pid not in ("0", "1"):
            text = (proc / pid / "stat").read_text(encoding="utf-8", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            if name == "slurmstepd":
                started_s = booted_s + int(rest.split()[STARTED_AT]) / os.sysconf("SC_CLK_TCK")
                return max(0.0, started_s - int(begun))
            pid = rest.split()[PARENT_AT]
    except (OSError, IndexError, ValueError) as error:
        return NotAvailable(f"no slurmstepd is seen above this process: {error}")
    return NotAvailable("no slurmstepd is seen above this process")


def read_partitions() -> dict[str, str] | NotAvailable:
    """The state of every partition by name: ``UP``, ``DOWN``, ``DRAIN`` or ``INACTIVE``."""
    return apply(parse_partitions, ask("-o", "show", "partition"))


def parse_partitions(text: str) -> dict[str, str] | NotAvailable:
    """The records of ``scontrol -o show partition``, a line each."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        state = _PARTITION.match(line)
        if state is None:
            return NotAvailable(f"scontrol's answer is no record of a partition: {_short(line)}")
        found[state[1]] = state[2]
    return found


def read_block(name: str) -> str | NotAvailable | None:
    """The block in which Slurm's topology/block plugin has the host with this name in Slurm; None in none."""
    return apply(lambda text: parse_block(text, name), ask("-o", "show", "topology"))


def parse_block(text: str, name: str) -> str | None:
    """The block of a host, by the records of ``scontrol show topology``; of switches and groups of blocks there is none."""
    blocks = (_BLOCK.search(line) for line in text.splitlines())
    return next((found[1] for found in blocks if found is not None and is_in(name, found[2])), None)


def parse_node(text: str) -> SlurmNode | NotAvailable:
    """A record of ``scontrol -o show node``."""
    line = text.strip()
    found = _STATE.search(f"{line} ")
    if found is None or not line.startswith("NodeName="):
        return NotAvailable(f"scontrol's answer is no record of a node: {_short(line)}")
    before = line[: line.find(" Reason=")] if " Reason=" in line else line
    memory = _word(before, "RealMemory")
    reason = _REASON.search(line)
    return SlurmNode(
        name=str(_word(before, "NodeName")),
        host=_word(before, "NodeHostName"),
        states=parse_states(found[1]),
        reason="" if reason is None else reason[1],
        gpus=apply(gpus_of, _word(before, "Gres")),
        threads_per_core=max(1, int(found[2])),
        memory_mib=int(memory) if isinstance(memory, str) and memory.isdecimal() else NotAvailable("no RealMemory"),
        partitions=_word(before, "Partitions"),
        version=_word(before, "Version"),
    )


def parse_states(text: str) -> list[str]:
    """``IDLE*+DRAIN`` as ``IDLE``, ``NOT_RESPONDING`` and ``DRAIN``."""
    states: list[str] = []
    for part in text.upper().split("+"):
        word = part.rstrip("".join(SIGNS))
        states += [SAME.get(word, word), *(SIGNS[sign] for sign in part[len(word) :])]
    return [*dict.fromkeys(filter(None, states))]


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """The records of ``scontrol -o show node``, a line each; other lines are passed over."""
    nodes = (parse_node(line) for line in text.splitlines())
    return {node.name: node for node in nodes if isinstance(node, SlurmNode)}


def parse_share(text: str, name: str) -> SlurmShare | NotAvailable:
    """What ``scontrol -d -o show job`` says of one host. A job may be several hosts, each group with its own share."""
    shares = {found.groups()[1:] for found in _SHARE.finditer(text) if is_in(name, found[1])}
    if len(shares) != 1:
        what = "says nothing of this host" if not shares else "says several things of this host"
        return NotAvailable(f"scontrol's record of the job {what} ({name}): {_short(text)}")
    ((cpus, memory, gres),) = shares
    try:
        return SlurmShare(cpus=len(parse_cpulist(cpus)), memory_mib=int(memory), gpus=gpus_of(gres))
    except ValueError as error:
        return NotAvailable(str(error))


def gpus_of(gres: str) -> int | NotAvailable:
    """The GPUs in ``gpu:h100:8(S:0-1),nic:2``, of all types together."""
    if gres in NONE:
        return 0
    parts = [part for part in _OUTSIDE_BRACKETS.split(gres) if part == "gpu" or part.startswith(("gpu:", "gpu("))]
    found = [_GPUS.fullmatch(part) for part in parts]
    if None in found:
        return NotAvailable(f"{_short(gres)} does not say how many GPUs")
    return sum(int(one[1]) for one in found if one is not None)


def is_in(name: str, hosts: str) -> bool:
    """Whether a list of hosts as Slurm writes it, ``gpu[01-16,18],login1``, has this name."""
    with contextlib.suppress(ValueError):
        return name in expand(hosts)
    return False


def ask(*arguments: str, within_s: float | None = None) -> str | NotAvailable:
    """What ``scontrol`` prints; why not, where it is absent, fails, is silent (:data:`DEADLINE_S`) or prints nothing."""
    printed = _run(arguments, within_s=within_s)
    return apply(lambda text: text or NotAvailable(f"scontrol {' '.join(arguments)}: it printed nothing"), printed)


def change(*arguments: str, within_s: float | None = None) -> NotAvailable | None:
    """Have ``scontrol`` change something, which prints nothing where it was done; why it was not done, else None."""
    printed = _run(arguments, within_s=within_s)
    return printed if isinstance(printed, NotAvailable) else None


def _run(arguments: Sequence[str], *, name: str = "scontrol", within_s: float | None = None) -> str | NotAvailable:
    deadline_s = DEADLINE_S if within_s is None else within_s
    ended = program.run_by_name(name, arguments, within_s=deadline_s, absent="is not on the PATH")
    if isinstance(ended, NotAvailable):
        return ended
    printed = ended.printed.strip()
    if ended.exit_code != 0:
        complaint = _short(ended.complained.strip() or printed)
        return NotAvailable(f"{name} {' '.join(arguments)}: exit code {ended.exit_code}: {complaint}")
    return printed


def _word(line: str, key: str) -> str | NotAvailable:
    found = re.search(rf"(?:^| ){key}=(\S*)", line)
    return NotAvailable(f"scontrol does not say {key}") if found is None else found[1]


def _without_domain(hostname: str) -> str:
    return hostname.partition(".")[0].lower()


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST]
