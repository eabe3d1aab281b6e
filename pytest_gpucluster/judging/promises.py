"""What a run as a whole has to keep, beside its limits: duration of a soak, number of GPUs, level. Pure.

A run may ask for less than was promised elsewhere. Its verdict then says so, or is no acceptance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from pytest_gpucluster.config.settings import Expect, reaches
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.identity import Identity
    from pytest_gpucluster.places import Inventory, Place
    from pytest_gpucluster.thresholds.resolve import Profile


NO_SERIAL = {"", "N/A", "[N/A]", "UNKNOWN", "NONE"}
"""What a driver or hypervisor reports in a serial's place, zeros and blanks around it removed."""


PromisedShape: TypeAlias = "Expect | Profile"
"""A promised number of nodes and GPUs; None where nothing is promised."""


def short_soak(profile: Profile, *, level: str, soak_s: float | None) -> str | None:
    """Why a soak is too short for a profile that accepts at level soak. None if the soak is long enough, or there is none."""
    if profile.rehearsal or profile.accept_at != "soak" or level != "soak" or soak_s is None or soak_s >= profile.accept_soak_s:
        return None
    return f"a soak of {in_words(soak_s)}, and the profile asks for {in_words(profile.accept_soak_s)}"


def changed_terms(
    profile: Profile, standard: Profile | None, expected: Inventory, promises: Mapping[str, PromisedShape]
) -> list[str]:
    """What a run asks for that differs from the packaged profile, or is less than was promised.

    Args:
        profile: the profile of this run.
        standard: the packaged profile that it stands for; None if there is none for these GPUs.
        expected: the inventory that this run expects.
        promises: promised shapes by their source, in words.
    """
    if profile.rehearsal:
        return []
    found = [] if standard is None else [*_differences(profile, standard)]
    for name, here in (("nodes", expected.num_nodes), ("gpus_per_node", expected.gpus_per_node)):
        promised = {source: getattr(promise, name) for source, promise in promises.items()}
        more = {source: number for source, number in promised.items() if number is not None and here < number}
        if more:
            source = max(more, key=lambda source: more[source])
            found.append(f"{name} {here} instead of {more[source]} ({source})")
    return found


def _differences(profile: Profile, standard: Profile) -> Iterable[str]:
    if not reaches(profile.accept_at, standard.accept_at):
        yield f"accept_at {profile.accept_at} instead of {standard.accept_at}"
    elif profile.accept_at == standard.accept_at == "soak" and profile.accept_soak_s < standard.accept_soak_s:
        yield f"a soak of {in_words(profile.accept_soak_s)} instead of {in_words(standard.accept_soak_s)}"
    if profile.fabric != standard.fabric:
        yield f"fabric {profile.fabric} instead of {standard.fabric}"
    if profile.nodes_per_domain != standard.nodes_per_domain:
        yield f"nodes_per_domain {profile.nodes_per_domain} instead of {standard.nodes_per_domain}"
    promised, here = standard.nic_gb_s_per_gpu, profile.nic_gb_s_per_gpu
    if promised is not None and (here is None or here < promised):
        yield f"nic_gb_s_per_gpu {'not promised' if here is None else here} instead of {promised}"


def doubled_gpus(places: Iterable[Place]) -> list[str]:
    """GPUs that answer at several places: two launches on one machine are not two nodes, and another GPU was not measured."""
    names = {place: f"{place.on_host} ({place.id})" if place.hostname else place.id for place in places}
    found = grouped((place.uuid, name) for place, name in names.items() if place.uuid is not None)
    return [f"{uuid} answers at {' and '.join(ids)}" for uuid, ids in found.items() if len(ids) > 1]


def doubled_serials(places: Iterable[Place]) -> list[str]:
    """GPUs that report one serial number and are not known to be one GPU: no name tells them apart."""
    named = [(place.serial, place) for place in places if place.gpu is not None and place.serial is not None]
    found = grouped((serial, place) for serial, place in named if serial.strip(" 0").upper() not in NO_SERIAL)
    return [
        f"{'two' if len(some) == 2 else len(some)} GPUs report serial {serial}: {' and '.join(one.on_host for one in some)}"
        for serial, some in found.items()
        if len(some) > 1 and len({one.uuid or one.id for one in some}) > 1
    ]


def unexpected_gpus(identities: Iterable[Identity], expected: Inventory) -> list[str]:
    """Hosts where PyTorch sees more GPUs than are expected of a node: no rank was started for the others."""
    most = expected.gpus_per_node
    seen = {identity.hostname: identity.torch_gpus for identity in identities if identity.torch_gpus > most}
    return [f"{number} on {hostname}, {most} expected" for hostname, number in sorted(seen.items())]


def shape(inventory: Inventory, found: Mapping[str, str | None] | None) -> str:
    """The cluster that a verdict is about, in words: ``2 nodes x 8 NVIDIA H200``.

    Args:
        inventory: what is expected.
        found: the name of the GPU at each place that answered, by place id; None before any node has answered.
    """
    answering = {place.node for place in inventory.places if found is None or place.id in found}
    expected = counted(inventory.num_nodes, "node")
    nodes = expected if len(answering) == inventory.num_nodes else f"{len(answering)} of {expected}"
    due = [place.id for place in inventory.places if place.node in answering]
    absent = 0 if found is None else sum(place not in found for place in due)
    each = inventory.gpus_per_node
    if inventory.device == "cpu":
        unit = f"rank{'s' if each > 1 else ''} on the CPU"
    else:
        names = Counter(found[place] or "GPU" for place in due if found is not None and place in found)
        mixed = f"GPUs ({', '.join(f'{number} {name}' for name, number in names.most_common())})"
        unit = mixed if len(names) > 1 else next((name for name in names if name != "GPU"), f"GPU{'s' if each > 1 else ''}")
    missing = f", {absent} of {len(due)} absent" if absent else ""
    return f"{nodes} x {each} {unit}{missing}"


def hidden_gpus(identities: Iterable[Identity]) -> list[str]:
    """How many GPUs each node hides from its ranks, in words; a GPU that one rank sees is not hidden."""
    found = grouped(
        ((one.group_rank, one.hostname), (one.hidden_gpus, one.nvml_gpus))
        for one in identities
        if one.hidden_gpus is not None and one.nvml_gpus is not None
    )
    fewest = [(hostname, *min(seen)) for (_, hostname), seen in found.items()]
    return [f"CUDA_VISIBLE_DEVICES hides {number} of {of} GPUs on {hostname}" for hostname, number, of in fewest if number]


def other_variables(identities: Iterable[Identity]) -> list[str]:
    """The variables of other nodes that differ from the first node's, in words: each with both values and its nodes."""
    nodes = grouped(((one.group_rank, one.hostname), one.variables) for one in identities)
    return other_options([(hostname, variables[0]) for (_, hostname), variables in nodes.items()], absent="unset")


def other_options(nodes: Sequence[tuple[str, Mapping[str, str]]], *, absent: str = "not given") -> list[str]:
    """What the options of other nodes ask for otherwise than the first node's, in words.

    Args:
        nodes: the hostname of each node and what its options ask for, by option; the controller's first.
        absent: what an option without a value is called.
    """
    if not nodes:
        return []
    (first, ours), *others = nodes
    found = grouped(
        ((name, theirs.get(name)), hostname)
        for hostname, theirs in others
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )
    return [
        f"{name} {absent} on {_hosts(hosts)}, {ours[name]} on {first}"
        if value is None
        else f"{name}={value} on {_hosts(hosts)}, {ours.get(name, absent)} on {first}"
        for (name, value), hosts in sorted(found.items(), key=lambda item: (item[0][0], item[1]))
    ]


def _hosts(hostnames: Sequence[str]) -> str:
    return hostnames[0] if len(hostnames) == 1 else f"{counted(len(hostnames), 'node')} ({hostnames[0]}, ...)"
