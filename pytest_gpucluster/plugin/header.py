"""The first lines of a run: what is required, how long it takes, and what has joined. Pure: facts in, lines out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import SIMULATED
from pytest_gpucluster.reporting import hostlists
from pytest_gpucluster.reporting.hostlists import names_of_absent
from pytest_gpucluster.reporting.lines import cut, tied, wrapped
from pytest_gpucluster.text import counted, one_line, with_commas

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.cluster.binding import Binding
    from pytest_gpucluster.judging.forecast import Forecast
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.run_setup import RunSetup

ACCEPTANCE, REHEARSAL = "ACCEPTANCE", "REHEARSAL on the CPU: accepts nothing"
SHOWN_GROUPS, SHOWN_ABSENT = 3, 6
INDENT = "      "


def accepts_nothing(setup: RunSetup) -> bool:
    """Whether no GPU is measured: a rehearsal, or a simulated fleet."""
    return setup.rehearsal or setup.simulation is not None


def mode(setup: RunSetup) -> str:
    """Whether this run can accept a cluster, and if not, why."""
    if setup.settings.audit:
        return f"{SIMULATED}: AUDIT: only reads" if setup.simulation is not None else "AUDIT: only reads, accepts nothing"
    if accepts_nothing(setup):
        return f"{SIMULATED}: accepts nothing" if setup.simulation is not None else REHEARSAL
    return ACCEPTANCE if setup.level_reached else f"{ACCEPTANCE} of nothing yet: the profile asks for {setup.profile.accept_at}"


def run_lines(setup: RunSetup, *, version: str, width: int) -> list[str]:
    """What the run is: version, kind, shape, level, profile, limits."""
    inventory = setup.inventory
    parts = "ranks" if inventory.device == "cpu" else "GPUs"
    changed = f" ({len(setup.changed_limits)} changed)" if setup.changed_limits else ""
    limits = "packaged" if setup.settings.thresholds is None else setup.thresholds.path.name
    facts = [
        f"gpucluster {version}",
        mode(setup),
        f"{counted(inventory.num_nodes, 'node')} x {inventory.gpus_per_node} {parts}",
        f"level {setup.settings.level}",
        f"profile {setup.profile.name}",
        f"limits {limits}{changed}",
    ]
    return wrap(facts, width=width, separator="   ")


def plan_lines(plan: Forecast, *, width: int) -> list[str]:
    """What will run, and how long that takes."""
    return wrap(["plan:", *plan.plan], width=width)


def joined_lines(binding: Binding, *, width: int) -> list[str]:
    """What answers: the nodes folded by hardware and software, then how many of the expected ones joined, and which did not."""
    groups = groups_of(binding)
    lines: list[str] = []
    for what, hostnames in groups[:SHOWN_GROUPS]:
        lines += wrap([*hosts(hostnames), *what], width=width)
    if len(groups) > SHOWN_GROUPS:
        lines.append(f"{INDENT}and {len(groups) - SHOWN_GROUPS} other kinds of node")
    return [*lines, *_count_lines(binding, width=width)]


def hosts(hostnames: Sequence[str]) -> list[str]:
    """The hostnames in Slurm's short form, in pieces that may be wrapped, with a colon at the end."""
    *firsts, last = with_commas(hostlists.pieces(hostnames))
    return [*firsts, f"{last}:"]


def groups_of(binding: Binding) -> list[tuple[tuple[str, ...], list[str]]]:
    """The nodes that answer by what is in them, the most frequent kind first: its facts in words, and its hostnames."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    gpus = _present(binding.places)
    for node in binding.nodes:
        here = gpus.get(node.node, [])
        if here:
            kinds.setdefault(_facts_of(here, binding), []).append(node.hostname or node.id)
    found = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    return [(_with_count(what, len(hosts)), hosts) for what, hosts in found]


def _with_count(what: tuple[str, ...], num_nodes: int) -> tuple[str, ...]:
    return what if num_nodes == 1 else (f"{counted(num_nodes, 'node')} x {what[0]}", *what[1:])


def _facts_of(gpus: Sequence[Place], binding: Binding) -> tuple[str, ...]:
    """What is on one node: GPUs by name, then versions."""
    identities = [binding.identities[place.id] for place in gpus if place.id in binding.identities]
    nameless = "ranks on the CPU" if binding.inventory.device == "cpu" else "GPUs without a name"
    names = Counter(one.gpu_name or nameless for one in identities)
    versions = {**identities[0].stack, "torch": identities[0].versions.get("torch", "of no known version")}
    pieces = [
        " and ".join(f"{number} {name}" for name, number in names.items()),
        *(f"{name} {version}" for name, version in versions.items()),
    ]
    return (*tuple(f"{piece}," for piece in pieces[:-1]), pieces[-1])


def _count_lines(binding: Binding, *, width: int) -> list[str]:
    """How many nodes and GPUs joined; nothing where that is one node and all of it."""
    gpus, nodes = _present(binding.places), binding.nodes
    answering, expected = sum(map(len, gpus.values())), len(binding.places)
    if len(nodes) == 1 and answering == expected:
        return []
    parts = "ranks" if binding.inventory.device == "cpu" else "GPUs"
    counts = f"joined {len(gpus)} of {counted(len(nodes), 'node')}, {answering} of {expected} {parts}"
    if answering == expected:
        return [counts]
    lost = [node for node in nodes if node.node not in gpus]
    absent = [names_of_absent(lost)] if lost else []
    absent += [place.on_host for place in binding.places if place.rank is None and place.node in gpus]
    more = [f"and {len(absent) - SHOWN_ABSENT} more"] if len(absent) > SHOWN_ABSENT else []
    why = [f"({one_line(reason)})" for reason in list(binding.unidentified.values())[:1]]
    return wrap([f"{counts};", "absent:", *with_commas([*absent[:SHOWN_ABSENT], *more]), *why], width=width)


def _present(places: Iterable[Place]) -> Mapping[int, list[Place]]:
    """The GPUs at which a rank answers, by node."""
    found: dict[int, list[Place]] = {}
    for place in places:
        if place.rank is not None:
            found.setdefault(place.node, []).append(place)
    return found


def wrap(pieces: Iterable[str], *, width: int, separator: str = " ") -> list[str]:
    """The pieces in lines of at most ``width`` columns, later lines set in. A piece is not broken; a longer one is cut."""
    text = separator.join(tied(one_line(piece)) for piece in pieces)
    return [cut(line, width) for line in wrapped(text, width=width, indent="", later=INDENT)]
