"""Limits of a host that end jobs, settings that slow them, variables of CUDA and NCCL, and clocks that differ. Pure."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pytest_gpucluster.health.growth import CounterGroup, Counters, Limits, compare_counters
from pytest_gpucluster.inventory.host import UNLIMITED, HostFacts, MachineChecks, MemoryController, PcieErrors
from pytest_gpucluster.inventory.reading import NotAvailable, or_none, split
from pytest_gpucluster.judging.finding import BAD, HERE, NOBODY, REMARK, UNKNOWN, Finding, Said, finding_of, merge
from pytest_gpucluster.text import counted, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.measurements.host import HostErrors
    from pytest_gpucluster.places import Place

__all__ = [
    "ClockReading",
    "ClockTerms",
    "HostMinimum",
    "judge_clock",
    "judge_host_errors",
    "judge_limits",
    "judge_settings",
    "judge_shared_link",
    "judge_variables",
    "read_skews",
    "skews",
]

RDMA = ("infiniband", "roce", "efa")
"""Fabrics whose adapters need memory that stays where it is."""
MEMLOCK = "ulimit -l unlimited; docker run --ulimit memlock=-1; in a Pod the capability IPC_LOCK"
MIB = 2**20
SET_CLOCK = "have an NTP client set its clock (chronyc tracking); munge, and Slurm with it, refuses a host 5 minutes off"
NAMED = 4
FEWEST_GPUS = 2
"""Where fewer GPUs of a host were measured, nobody can say whether the host slows them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMinimum:
    """What a host must give: files that a process may open, GiB of /dev/shm, and memory to lock where the fabric needs it."""

    nofile: int
    shm_gib: float
    memlock_gib: float


def judge_limits(facts: HostFacts, least: HostMinimum, *, fabric: str) -> Finding:
    """Limits below which jobs end: NCCL without shared memory, RDMA without locked memory, too few files."""
    evidence = {"open files": facts.nofile, "shared memory GiB": str(facts.shm_gib), "memlock bytes": facts.memlock}
    return replace(finding_of(_limits(facts, least, fabric)), kind="host", evidence=evidence)


def _limits(facts: HostFacts, least: HostMinimum, fabric: str) -> Iterator[Said]:
    if isinstance(facts.nofile, int) and facts.nofile < least.nofile:
        yield HERE, BAD, f"a process may open {counted(facts.nofile, 'file')}, and {least.nofile} are needed (ulimit -n)"
    if isinstance(facts.shm_gib, NotAvailable):
        yield HERE, UNKNOWN, f"shared memory: {facts.shm_gib}"
    elif facts.shm_gib < least.shm_gib:
        size = f"{facts.shm_gib * 2**30 / MIB:.4g} MiB"
        yield HERE, BAD, f"shared memory has {size}, and {least.shm_gib:g} GiB are needed (docker run --shm-size)"
    locked = facts.memlock
    if fabric in RDMA and facts.ipc_lock is not True and locked != UNLIMITED and int(locked) < least.memlock_gib * 2**30:
        yield HERE, BAD, f"{int(locked) // 1024} KiB may be locked in memory, and RDMA needs more ({MEMLOCK})"


def judge_settings(facts: HostFacts) -> Finding:
    """Settings of the kernel that cost speed. A virtual machine may have neither governor nor IOMMU."""
    shown = {"CPU governor": facts.governors, "CPU idle states": facts.idle_states, "IOMMU": facts.iommu}
    evidence = {name: str(value) for name, value in shown.items()}
    return replace(finding_of(_settings(facts)), kind="host", evidence=evidence)


def _settings(facts: HostFacts) -> Iterator[Said]:
    if isinstance(facts.governors, list) and facts.governors != ["performance"]:
        yield HERE, BAD, f"CPU governor {', '.join(facts.governors)}: launches wait for the clock; set performance"
    if facts.numa_balancing is True:
        yield HERE, BAD, "NUMA balancing is on: pages move below running jobs; set kernel.numa_balancing=0"
    if isinstance(facts.iommu, str) and "DMA" in facts.iommu:
        devices = shortlist(or_none(facts.translated) or [], most=NAMED)
        where = f" for {devices}" if devices else ""
        yield HERE, BAD, f"IOMMU translates ({facts.iommu}){where}: copies between devices cost more; boot with iommu=pt"
    if facts.transparent_huge_pages == "never":
        yield HERE, BAD, "transparent huge pages are off: large buffers cost more; set madvise"
    hidden = {"NUMA balancing": facts.numa_balancing, "transparent huge pages": facts.transparent_huge_pages}
    yield from ((HERE, UNKNOWN, f"{name} {why}") for name, why in split(hidden)[1].items())


def judge_shared_link(
    place: Place, rates: Mapping[Place, tuple[float, float]], *, holds: Callable[[float], bool], ways: tuple[str, str]
) -> Finding:
    """Who is to blame for a slow link to the host: the host where all of its GPUs are slow in that direction, else the GPU.

    Args:
        place: the judged GPU.
        rates: of each measured GPU, in GB/s (10^9 bytes a second): in the judged direction, and in the other one.
        holds: whether a rate in the judged direction is within its limit.
        ways: the judged direction and the other one, in words.
    """
    own_host = [rate for one, rate in rates.items() if one.node == place.node]
    if len(own_host) < FEWEST_GPUS or any(holds(judged) for judged, _ in own_host):
        return Finding()
    by_way = zip(ways, zip(*own_host, strict=True), strict=True)
    shown = [f"{way} {min(values):.4g} to {max(values):.4g} GB/s" for way, values in by_way]
    return Finding(
        bad={place.of_node: (f"all {counted(len(own_host), 'GPU')} of this host are slow {'; '.join(shown)}",)},
        kind="node",
        advice="look at what the GPUs share: memory channels, PCIe root complex, IOMMU and power settings of the host; "
        "a virtual machine cannot see what its neighbours do to the memory",
    )


Counted: TypeAlias = MemoryController | PcieErrors | MachineChecks
NAMES: Mapping[type[Counted], Mapping[str, str]] = {
    MemoryController: {"uncorrected": "memory_uncorrected", "corrected": "memory_corrected"},
    MachineChecks: {"exceptions": "machine_checks", "deferred": "deferred_machine_checks"},
    PcieErrors: {"fatal": "pcie_fatal", "nonfatal": "pcie_nonfatal", "corrected": "pcie_corrected"},
}
"""The counters by the names of their limits."""
NEVER = "memory_uncorrected"
"""A counter that a healthy host never raises: what it shows at the end is bad, whenever it was counted."""


def judge_host_errors(first: HostErrors, last: HostErrors, *, seconds: float, limits: Limits) -> Finding | None:
    """What a host's memory and PCIe ways counted during the run; None where its kernel shows no such counts.

    Counts that cannot be listed at one end are unknown: they may hold errors. Uncorrected errors of memory are bad, also those
    from before the run; others from before it are a remark.

    Args:
        first: the counts at the start.
        last: the counts at the end.
        seconds: between the two.
        limits: by the names of :data:`NAMES`.
    """
    unread = [
        f"the counts of its {name} are {counts}, at the {end}"
        for end, one in (("start", first), ("end", last))
        for name, counts in (("memory", one.memory), ("PCIe ways", one.pcie), ("CPUs", one.cpus))
        if isinstance(counts, NotAvailable)
    ]
    before, after = (_parts(one) for one in (first, last))
    if not unread and all(map(_is_silent, (*before.values(), *after.values()))):
        return None
    both = [name for name in before if name in after]
    groups = [CounterGroup(part=name, first=_counts(before[name]), last=_counts(after[name])) for name in both]
    shown = [name for names in NAMES.values() for name in names.values() if name not in limits]
    said: list[Said] = [*_before_the_run(before, limits), *((HERE, UNKNOWN, text) for text in unread)]
    if not unread:
        said += [(name, UNKNOWN, "shows no counts at the end") for name in before if name not in after]
        said += [(name, UNKNOWN, "showed no counts at the start") for name in after if name not in before]
    found = merge([compare_counters(groups, seconds=seconds, limits=limits, shown=shown), finding_of(said)])
    return replace(found, kind="host").with_evidence(parts=len(before))


def _parts(errors: HostErrors) -> dict[str, Counted]:
    listed: tuple[Sequence[Counted] | NotAvailable, ...] = (errors.memory, errors.pcie, errors.cpus)
    return {part.name: part for counts in listed for part in or_none(counts) or ()}


def _before_the_run(parts: Mapping[str, Counted], limits: Limits) -> Iterator[Said]:
    """What was counted before the run: :data:`NEVER` is bad, other counts with a limit are a remark."""
    old = []
    for part in parts.values():
        counts = {name: count for name, value in _counts(part).items() if name in limits and (count := or_none(value))}
        if NEVER in counts:
            yield part.name, BAD, f"{NEVER} {counts.pop(NEVER)} before the run"
        old += [f"{part.name} {name} {count}" for name, count in counts.items()]
    if old:
        yield HERE, REMARK, f"counted before the run: {', '.join(old)}"


def _counts(part: Counted) -> Counters:
    return {name: getattr(part, field) for field, name in NAMES[type(part)].items()}


def _is_silent(part: Counted) -> bool:
    """Processors that reported nothing: a virtual machine has them too, where the hypervisor keeps all other counts."""
    return isinstance(part, MachineChecks) and not or_none(part.exceptions)


@dataclass(frozen=True, slots=True)
class Hint:
    """What a variable does when its value fits the pattern; on this fabric alone, where one is named."""

    variable: str
    pattern: str
    advice: str
    fabrics: tuple[str, ...] = ()


HINTS = (
    Hint("NCCL_ALGO", "(?i)(ring|tree)([,;:].*)?", "forbids NVLink SHARP, which is faster in the node; leave it unset"),
    Hint("NCCL_PROTO", ".+", "takes the choice of protocol from NCCL; leave it unset"),
    Hint("NCCL_P2P_DISABLE", "1", "copies between GPUs go through the host; unset it"),
    Hint("NCCL_P2P_LEVEL", "(?i)loc|0", "copies between GPUs go through the host; unset it"),
    Hint("NCCL_SHM_DISABLE", "1", "GPUs without NVLink speak over the network; unset it"),
    Hint("NCCL_NVLS_ENABLE", "0", "switches NVLink SHARP off; unset it"),
    Hint("NCCL_CUMEM_ENABLE", "0", "switches NVLink SHARP off too; unset it"),
    Hint("NCCL_IB_DISABLE", "1", "NCCL takes sockets in place of RDMA; unset it", RDMA),
    Hint("NCCL_NET_GDR_LEVEL", "(?i)loc|0", "the network reads GPUs' memory through the host; unset it", RDMA),
    Hint("NCCL_NET_GDR_READ", "0", "the network reads GPUs' memory through the host; unset it", RDMA),
    Hint("NCCL_IB_GID_INDEX", ".+", "is for RoCE; on InfiniBand leave it unset", ("infiniband",)),
    Hint("NCCL_SOCKET_IFNAME", "lo", "keeps NCCL's start to this host; name the interface between hosts"),
    Hint("NCCL_MAX_NCHANNELS", "[1-7]", "too few channels for the links of a GPU; unset it"),
    Hint("NCCL_LAUNCH_MODE", "(?i)group", "launches wait for each other; unset it"),
    Hint("CUDA_LAUNCH_BLOCKING", "1", "each launch waits for its end; unset it"),
    Hint("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "each tensor asks the driver for memory; unset it"),
    Hint("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits for each collective; unset it"),
)


def judge_variables(variables: Mapping[str, str], *, fabric: str) -> Finding:
    """The variables of CUDA and NCCL that cost speed here, with what each does and what to do."""
    bad = [
        f"{hint.variable}={variables[hint.variable]}: {hint.advice}"
        for hint in HINTS
        if hint.variable in variables
        and (not hint.fabrics or fabric in hint.fabrics)
        and re.fullmatch(hint.pattern, variables[hint.variable])
    ]
    return Finding(bad={HERE: bad}, kind="settings", evidence={"variables": variables})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A host's clock as it was shown at some moment between two moments of the controller's clock, all in seconds."""

    shown_s: float
    sent_s: float
    received_s: float

    @property
    def offset_s(self) -> float:
        """How far the host's clock is ahead of the controller's, up to :attr:`doubt_s` more or less."""
        return self.shown_s - (self.sent_s + self.received_s) / 2

    @property
    def doubt_s(self) -> float:
        """Half the time that the question took: when the host read its clock is not known better."""
        return max(0.0, self.received_s - self.sent_s) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How far a clock is from the others, in seconds, and how much of that is not known."""

    skew_s: float
    doubt_s: float

    def is_known(self, limit_s: float) -> bool:
        """Whether the doubt leaves no question which side of the limit the skew is on."""
        return abs(self.skew_s - limit_s) > self.doubt_s

    def is_within(self, limit_s: float) -> bool:
        """Whether the skew is surely within the limit."""
        return self.skew_s < limit_s and self.is_known(limit_s)


def skews(readings: Mapping[str, ClockReading]) -> dict[str, Skew]:
    """The skew of each host: within so many seconds of its clock are the clocks of most hosts. A single host has none.

    Of two hosts that is the distance to the other one. Where no majority agrees, all hosts are far from most.
    """
    offsets = {host: reading.offset_s for host, reading in readings.items()}
    found = {}
    for host, offset_s in offsets.items():
        others = [other for other in offsets if other != host]
        if not others:
            continue
        distances_s = sorted(abs(offset_s - offsets[other]) for other in others)
        doubt_s = readings[host].doubt_s + statistics.median(readings[other].doubt_s for other in others)
        found[host] = Skew(skew_s=distances_s[len(offsets) // 2 - 1], doubt_s=doubt_s)  # with itself more than half
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTerms:
    """How clocks are read: that of a host which is not surely within ``within_s`` is read ``looks`` times more.

    Who is still in doubt then is asked for up to ``wait_s`` seconds: the time of a question is mostly the load of the
    controller's own host, and that passes.
    """

    looks: int
    within_s: float
    wait_s: float


PAUSE_S = 0.25
"""Between questions while the controller's host is busy."""


def read_skews(
    ask: Callable[[Sequence[str]], Mapping[str, ClockReading]],
    hosts: Sequence[str],
    terms: ClockTerms,
    *,
    now_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Skew]:
    """The skew of each host that answers, by its quickest answer.

    Args:
        ask: asks these hosts in one call; without the hosts that do not answer.
        hosts: all of them. They are asked together, so that all are compared at the same moment, and then one by one, which
            is quicker.
        terms: how often, and for how long.
        now_s: seconds of a clock that nobody sets.
        pause: waits so many seconds.
    """
    deadline_s, best = now_s() + terms.wait_s, dict(ask(hosts))
    for look in itertools.count(1):
        found, is_waiting = skews(best), look > terms.looks
        is_clear = Skew.is_known if is_waiting else Skew.is_within
        unclear = [host for host, skew in found.items() if not is_clear(skew, terms.within_s)]
        if not unclear or (is_waiting and now_s() >= deadline_s):
            break
        if is_waiting:
            pause(PAUSE_S)
        for group in ([*best], *([host] for host in unclear)):
            answers = ask(group)
            best |= {host: one for host, one in answers.items() if host in best and one.doubt_s < best[host].doubt_s}
            if now_s() >= deadline_s:
                break
    return skews(best)


def judge_clock(skew: Skew | None, *, limit_s: float) -> Finding:
    """How far a host's clock is from those of the others, in seconds; None: no other host answered."""
    if skew is None:
        return Finding(unknown={NOBODY: ("its clock cannot be compared: no other host answered",)})
    if not skew.is_known(limit_s):
        why = f"its clock cannot be compared: {skew.skew_s:.3g} s, up to {skew.doubt_s:.3g} s more or less"
        return Finding(unknown={HERE: (why,)}, unknown_kind="unknown")
    return Finding(value=skew.skew_s, evidence={"s more or less": skew.doubt_s}, advice=SET_CLOCK)
