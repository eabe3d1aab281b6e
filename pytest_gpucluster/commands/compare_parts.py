"""What ``gpucluster compare`` says of parts: gone, new, moved, renamed.

A part is one line while few are concerned. Whole nodes are one line, and many parts of the same kind a line with their hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.records.matching import label_of
from pytest_gpucluster.reporting.hostlists import hostlist
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.records.matching import Matching

    Part = Mapping[str, Any]

FEW = 4
"""So many parts, or nodes, have a line each."""


def gone_lines(parts: Matching) -> list[str]:
    """The parts that the later run lacks."""
    hosts = {str(place.get("hostname")) for place in parts.places_after.values()} - parts.silent
    emptied = parts.emptied
    single = [place for place in parts.gone if place["node"] not in emptied]
    return [*_single(single), *_whole(emptied.values(), still_there=hosts)]


def new_lines(parts: Matching) -> list[str]:
    """The parts that only the later run has."""
    filled = parts.filled
    return [*_single([place for place in parts.new if place["node"] not in filled]), *_whole(filled.values(), still_there=())]


def renamed_lines(parts: Matching) -> list[str]:
    """The hosts that are called otherwise: their GPUs are those of a node of the earlier run."""
    pairs = [*parts.renamed.items()]
    if len(pairs) > FEW:
        return [f"{counted(len(pairs), 'host')}: {hostlist(old for old, _ in pairs)}, now {hostlist(new for _, new in pairs)}"]
    return [f"{old}, now {new}" for old, new in pairs]


def moved_lines(parts: Matching) -> list[str]:
    """The GPUs that are on another host, or elsewhere on the same one."""
    hosts = [(str(old.get("hostname")), str(new.get("hostname"))) for old, new in parts.moved]
    by_way = grouped(((parts.renamed.get(old, old), new), both) for (old, new), both in zip(hosts, parts.moved, strict=True))
    away = [line for way, some in by_way.items() if way[0] != way[1] for line in _away(some, parts)]
    return [*away, *_within([some for way, some in by_way.items() if way[0] == way[1]])]


def _away(some: Sequence[tuple[Part, Part]], parts: Matching) -> list[str]:
    """GPUs that went from one host to another one."""
    old, new = some[0]
    if len(some) == parts.sizes_before[old["node"]] > 1:
        return [f"{old.get('hostname')}: all of its {counted(len(some), 'GPU')}, now in {new.get('hostname')}"]
    return [f"{label_of(old)}, now {label_of(new)}" for old, new in some]


def _within(by_host: Sequence[Sequence[tuple[Part, Part]]]) -> list[str]:
    """GPUs at another address of the same host."""
    if sum(map(len, by_host)) <= FEW:
        return [f"{label_of(new)}: {_address(old, new)}" for some in by_host for old, new in some]
    numbers = grouped((len(some), str(some[0][1].get("hostname"))) for some in by_host)
    of_each = {number: f"{counted(number, 'GPU')}{' of each' if len(hosts) > 1 else ''}" for number, hosts in numbers.items()}
    return [f"{hostlist(hosts)}: {of_each[number]} at another PCI address or slot" for number, hosts in numbers.items()]


def _address(old: Part, new: Part) -> str:
    """What is another one: ``PCI 0000:10:00.0 -> 0000:ff:00.0``."""
    names = {"pci": "PCI", "slot": "slot"}
    return ", ".join(
        f"{word} {old.get(name) or 'unknown'} -> {new.get(name) or 'unknown'}"
        for name, word in names.items()
        if old.get(name) != new.get(name)
    )


def _single(places: Sequence[Part]) -> list[str]:
    """Parts of nodes that are there; of many GPUs the hosts, by which of their GPUs it is."""
    if len(places) <= FEW:
        return [label_of(place) for place in places]
    by_node = grouped((place["node"], place) for place in places if place["gpu"] is not None)
    hosts = grouped(
        (tuple(sorted(place["gpu"] for place in some)), str(some[0].get("hostname") or f"node{node}"))
        for node, some in by_node.items()
    )
    lines = []
    for gpus, names in hosts.items():
        text = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {', '.join(map(str, gpus[:-1]))} and {gpus[-1]}"
        lines.append(
            f"{hostlist(names)}: {text}" + (f" of each, {counted(len(gpus) * len(names), 'GPU')}" if len(names) > 1 else "")
        )
    return [*(label_of(place) for place in places if place["gpu"] is None), *lines]


def _whole(nodes: Iterable[Sequence[Part]], *, still_there: Iterable[str]) -> list[str]:
    """Nodes of which all GPUs are concerned."""
    alike = grouped(((str(gpus[0].get("hostname")) in still_there, len(gpus)), gpus[0]) for gpus in nodes)
    lines = []
    for (is_there, size), some in alike.items():
        if len(some) > FEW:
            names = hostlist(str(one.get("hostname") or f"node{one['node']}") for one in some)
            each = (
                f"all of the {counted(size, 'GPU')} of each"
                if is_there
                else f"{counted(len(some), 'node')} with {counted(size, 'GPU')} each"
            )
            lines.append(f"{names}: {each}")
            continue
        what = f"all of its {counted(size, 'GPU')}" if is_there else f"the node with its {counted(size, 'GPU')}"
        lines += [f"{one.get('hostname') or 'an unknown host'} (node{one['node']}): {what}" for one in some]
    return lines
