"""A thresholds file for one kind of cluster: profiles with what they inherit, entries with their overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_gpucluster.config.yaml_lines import Document
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.layers import KINDS, MAPPINGS, THE_LIMIT, Kind, Statement, winners
from pytest_gpucluster.thresholds.limit import Bound, Limit, all_to_all_gb_s, most_by_nvlink_gb_s, most_possible_gb_s, ring_gb_s
from pytest_gpucluster.thresholds.schema import EntryKeys, ProfileEntry, ProfileTerms
from pytest_gpucluster.thresholds.specs import SHEETS_ROUND, GpuSpec, load_specs

CANNOT_CHANGE_AN_OUTCOME = frozenset(
    {
        "key",
        "criterion",
        "why",
        "source",
        "ids",  # of contracts that ask for the criterion
        "file",
        "line",
        "bound_waived",  # lint alone reads it
        "bound_value",  # the figure that ``bound`` names
        "requires",  # acts through ``skip``
        "takes_s",  # the forecast reads this key and the next; :meth:`Threshold.differences` names a far shorter time
        "measured_with",
        "rates",  # a term of the profile, which is named by itself where it is less
    }
)
"""Fields of :class:`Threshold` that a site may change without changing a limit. Every other field counts."""
BUDGET = 3.0
"""A measurement that can be made shorter takes at most so many times its entry's ``takes_s``."""
RING = "fabric.ring_gb_s"
"""What ``of`` names for a part of the rate of rings over all nodes."""
ALL_TO_ALL = "fabric.all_to_all_gb_s"
"""What ``of`` names for a part of the most that an all_to_all over all nodes can reach."""
DOMAIN = "fabric.domain_gb_s"
"""What ``of`` names for a part of the rate of a GPU's NVLinks, where these reach every GPU of the group."""
OF_FABRIC = (RING, ALL_TO_ALL, DOMAIN)
MOST = "fabric.most_gb_s"
"""What ``bound`` names for the most that any collective over all nodes but an all_to_all can reach."""
OF_SUMS = ("gpu.nvlink_gb_s", "gpu.nvlink_sum_gb_s")
"""What ``bound`` names for the most that an all_reduce over NVLinks can reach, where their switches add up."""
BOUNDS_OF_FABRIC = (MOST, ALL_TO_ALL)
STATED = 2.0
"""By so much a network over sockets may exceed what was stated: a provider guarantees less than a quiet network carries."""
SEEN_PORTS = "nic_gb_s_per_gpu"
"""Under this name the facts of a cluster have what the ports of a node carry for each GPU, in 10^9 bytes/s one way."""
LIMIT = frozenset({"kind", "numbers", "of", "of_value", "shapes", "unit"})
"""Names in :attr:`Threshold.decisive` that :meth:`Threshold.differences` shows as one limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricRates:
    """What a profile promises of the links: GB/s one way of a GPU's ports and NVLinks, and the nodes of an NVLink domain.

    ``is_stated``: what the ports carry is a provider's word, as with sockets, and not in a data sheet.
    """

    nic_gb_s_per_gpu: float | None
    nvlink_gb_s: float
    nodes_per_domain: int
    is_stated: bool = False

    def domains(self, *, nodes: int, gpus_per_node: int) -> tuple[int, int]:
        """How many NVLink domains so many nodes are, and how many GPUs one has."""
        return -(-nodes // self.nodes_per_domain), gpus_per_node * min(nodes, self.nodes_per_domain)

    def bound_gb_s(self, of: str, *, nodes: int, gpus_per_node: int) -> float | None:
        """The figure that ``of`` names (:data:`OF_FABRIC`) for a group of nodes; None where it is not known.

        What NVLink reaches counts as one node.
        """
        domains, gpus = self.domains(nodes=nodes, gpus_per_node=gpus_per_node)
        if of == DOMAIN:
            return self.nvlink_gb_s if domains == 1 else None
        if self.nic_gb_s_per_gpu is None:
            return None
        rates = {"nic_gb_s_per_gpu": self.nic_gb_s_per_gpu, "nvlink_gb_s": self.nvlink_gb_s}
        if of == RING:
            return ring_gb_s(gpus_per_node=gpus, **rates)
        return all_to_all_gb_s(nodes=domains, gpus_per_node=gpus, **rates)

    def most_gb_s(self, bound: str, *, nodes: int, gpus_per_node: int) -> float | None:
        """More than this no collective over a group of nodes can reach (:data:`BOUNDS_OF_FABRIC`); None where it is not known.

        What NVLink reaches counts as one node.
        """
        domains, gpus = self.domains(nodes=nodes, gpus_per_node=gpus_per_node)
        if gpus * domains < 2:
            return None
        if domains == 1:
            return most_by_nvlink_gb_s(gpus=gpus, nvlink_gb_s=self.nvlink_gb_s)
        if self.nic_gb_s_per_gpu is None:
            return None
        most = most_possible_gb_s if bound == MOST else all_to_all_gb_s
        port_gb_s = self.nic_gb_s_per_gpu * (STATED if self.is_stated else 1.0)
        return most(nodes=domains, gpus_per_node=gpus, nic_gb_s_per_gpu=port_gb_s, nvlink_gb_s=self.nvlink_gb_s)


class Profile(ProfileTerms):
    """One kind of cluster, with what it inherits. ``chain``: its ancestors and itself, oldest first.

    ``gpu`` is the id of ``spec``; both are None when the profile promises no GPU. ``accept_soak_s`` is how long a soak
    must last where ``accept_at`` is soak.
    """

    name: str
    spec: GpuSpec | None
    chain: tuple[str, ...]


class Threshold(EntryKeys):
    """One entry of thresholds.yaml, resolved for one profile.

    ``of`` is what the limit's numbers are multiplied by; ``of_value`` its value when the GPU's spec gives it, None when
    the cluster's shape does. ``shapes`` are plain numbers for clusters of stated shapes, before all others. ``rates`` are
    what the profile promises of the links, where ``of`` or ``bound`` needs them and its GPU is known. ``bound`` is the best
    value that is possible, and ``bound_value`` that of one GPU; None where the shape decides, and for a rehearsal.
    ``file`` and ``line`` are where the limit is written. Without what it ``needs``, such as so many nodes, the criterion
    is skipped by rule, as where the profile promises none of its ``fabrics`` (None: any will do). ``skip``: why it is
    skipped in any case, because the entry says so or the profile's GPU lacks what the entry ``requires``
    (``gpu.fp8_tflops``: FP8 units). ``noise`` is the relative spread of repeats above which a value is measured
    on before it is judged; ``stalls`` the share of repeats that may take more than twice as long as the median.
    ``takes_s`` is about how long the measurement takes on the profile's GPUs (at level soak: one round);
    ``measured_with`` names the entry whose measurement gives this value too.
    """

    key: str
    file: str
    line: int
    skip: str | None = None
    of_value: float | None = None
    bound_value: float | None = None
    rates: FabricRates | None = None

    @property
    def kind(self) -> Kind:
        """How the limit is written."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def numbers(self) -> Mapping[int | str, float]:
        """The limit's numbers by group size in GPUs, ``"any"`` for all other sizes."""
        written = getattr(self, self.kind)
        return written if isinstance(written, dict) else {"any": written}

    @property
    def decisive(self) -> dict[str, object]:
        """Everything that can change an outcome."""
        left_out = {*CANNOT_CHANGE_AN_OUTCOME, *KINDS}
        fields = {name: getattr(self, name) for name in type(self).model_fields if name not in left_out}
        return {**fields, "kind": self.kind, "numbers": self.numbers}

    def differences(self, other: Threshold) -> list[str]:
        """In words, what can make the outcome by ``other`` another one than by this entry; empty if nothing can."""
        ours, theirs = self.decisive, other.decisive
        found = [name for name in ours if ours[name] != theirs.get(name)]
        recipes = self.recipe, other.recipe
        keys = [key for key in {**recipes[0], **recipes[1]} if any(key not in one for one in recipes)]
        keys += [key for key in recipes[0] if key in recipes[1] and recipes[0][key] != recipes[1][key]]
        words = [f"recipe {key}" for key in keys]
        words += [f"needs {part}" for part, value in self.needs if value != getattr(other.needs, part)]
        if not LIMIT.isdisjoint(found):
            words.insert(0, f"{other.written_limit} instead of {self.written_limit}")
        if "bound" in found:
            words.append(f"bound {other.bound} instead of {self.bound}")
        if self.takes_s is not None and other.takes_s is not None and BUDGET * other.takes_s < self.takes_s:
            words.append(f"takes_s {other.takes_s} instead of {self.takes_s}")
        return [*words, *(name for name in found if name not in {*LIMIT, *MAPPINGS, "bound"})]

    @property
    def written_limit(self) -> str:
        """``above 700``, ``min 0.98 of gpu.memory_gib``, with one number for each size where there are several."""
        numbers = self.numbers
        number = numbers["any"] if [*numbers] == ["any"] else ", ".join(f"{size}: {one}" for size, one in numbers.items())
        written = f"{self.kind} {number}"
        if "of" in self.model_fields_set:
            written += f" of {self.of}" + (f" ({self.of_value:g})" if self.of_value is not None else "")
        return written + "".join(f", {shape}: {one}" for shape, one in self.by_shape.items())

    @property
    def by_shape(self) -> Mapping[str, float]:
        """The limits of stated shapes (``2x8``); empty without any."""
        return self.shapes if "shapes" in self.model_fields_set else {}

    def limit(self, *, gpus: int, cluster: Mapping[str, int]) -> Limit:
        """The limit for a group.

        Args:
            gpus: number of GPUs in the group.
            cluster: ``nodes``, ``gpus_per_node`` and ``world_size``, for limits ``of: cluster...`` and by shape.

        Raises:
            ConfigurationError: the table has no number for this size, or ``cluster`` lacks what ``of`` names.
        """
        number, basis = self._number(gpus=gpus, cluster=cluster)
        bound = self.best_possible(gpus=gpus, cluster=cluster)
        return Limit(kind=self.kind, value=number, unit=self.unit, basis=basis, bound=bound)

    def best_possible(self, *, gpus: int, cluster: Mapping[str, float]) -> Bound | None:
        """The best value that hardware can give a group; None where nobody knows. Arguments as :meth:`limit`.

        Where ``cluster`` has :data:`SEEN_PORTS`, and they are faster than the profile promises, they count.
        """
        value = self._most(gpus, cluster)
        if value is None:
            return None
        by = f"{self.file}: {self.key!r} has " + (f"'of: {self.of}'" if self.bound is None else f"'bound: {self.bound}'")
        seen = cluster.get(SEEN_PORTS)
        if seen is not None and self.bound in BOUNDS_OF_FABRIC:
            by += f"; the ports that were seen carry {seen:g} GB/s for each GPU"
        return Bound(value=value, unit=self.unit, is_most=self.kind in {"above", "min"}, by=by)

    def _most(self, gpus: int, cluster: Mapping[str, float]) -> float | None:
        if self.bound in BOUNDS_OF_FABRIC:
            if self.rates is None or not {"nodes", "gpus_per_node"} <= {*cluster}:
                return None
            rates, seen = self.rates, cluster.get(SEEN_PORTS)
            if rates.nic_gb_s_per_gpu is not None and seen is not None:
                rates = replace(rates, nic_gb_s_per_gpu=max(rates.nic_gb_s_per_gpu, seen))
            nodes, gpus_per_node = int(cluster["nodes"]), int(cluster["gpus_per_node"])
            most = rates.most_gb_s(str(self.bound), nodes=nodes, gpus_per_node=gpus_per_node)
            return None if most is None else most * SHEETS_ROUND
        if self.bound in OF_SUMS and self.bound_value is not None and gpus > 1:
            return most_by_nvlink_gb_s(gpus=gpus, nvlink_gb_s=self.bound_value)
        return self.bound_value

    def _number(self, *, gpus: int, cluster: Mapping[str, int]) -> tuple[float, str | None]:
        """The number to compare with, and which one of several it is, in words."""
        shape = f"{cluster.get('nodes')}x{cluster.get('gpus_per_node')}"
        if shape in self.by_shape:
            return self.by_shape[shape], f"the limit for {shape}"
        number = self.numbers.get(gpus, self.numbers.get("any"))
        where = f"{self.file}:{self.line}"
        if number is None:
            sizes = ", ".join(str(size) for size in self.numbers)
            message = f"{where}: '{self.key}' has no limit for {counted(gpus, 'GPU')}, only for {sizes}. "
            message += "Add that size, or 'any'."
            raise ConfigurationError(message)
        if self.of is None:
            return number, None
        is_of_fabric = self.of in OF_FABRIC
        factor = self.of_value or cluster.get(self.of.removeprefix("cluster."))
        if is_of_fabric and self.rates is not None and {"nodes", "gpus_per_node"} <= {*cluster}:
            factor = self.rates.bound_gb_s(self.of, nodes=cluster["nodes"], gpus_per_node=cluster["gpus_per_node"])
        if factor is None:
            message = f"{where}: '{self.key}' is a part of {self.of}, which is not known here."
            need = "" if self.of == DOMAIN else "'nic_gb_s_per_gpu' in the profile, or "
            how = f" Say {need}the limit for {shape} under 'shapes'." if is_of_fabric else ""
            raise ConfigurationError(message + how)
        return number * factor, f"{number:g} of {self.of}, {factor:g} {self.unit}" if is_of_fabric else None


def chain_of(profiles: Mapping[str, ProfileEntry], name: str) -> list[str]:
    """A profile and its ancestors, oldest first. Stops at an unknown parent, and where ``inherits`` goes in a circle."""
    chain: list[str] = []
    current: str | None = name
    while current is not None and current in profiles and current not in chain:
        chain.insert(0, current)
        current = profiles[current].inherits
    return chain


def resolve_profile(profiles: Mapping[str, ProfileEntry], name: str, *, specs: Mapping[str, GpuSpec] | None = None) -> Profile:
    """A profile with what it inherits; ``specs`` are the figures of GPUs, None for the installed ones."""
    chain = chain_of(profiles, name)
    written = {term: value for ancestor in chain for term, value in profiles[ancestor].written().items()}
    merged = {term: value for term, value in written.items() if term in ProfileTerms.model_fields}
    spec = (load_specs() if specs is None else specs).get(merged.get("gpu") or "")
    return Profile(name=name, spec=spec, chain=tuple(chain), **merged)


def resolve(key: str, said: Mapping[str, list[Statement]], document: Document, *, profile: Profile | None) -> Threshold:
    """The entry that is left of what its layers say for a profile. ``document`` knows where the limit is written."""
    spec = profile.spec if profile else None
    merged = winners(said)
    of, requires = merged.get("of"), merged.get("requires")
    if requires is not None and spec is not None and _figure(requires, spec) is None:
        merged["skip"] = merged.get("skip") or f"needs {requires}, and {spec.title} has none"
    file, line = document.find(said[THE_LIMIT][-1].path if THE_LIMIT in said else ("criteria", key))
    needs_rates = of in OF_FABRIC or merged.get("bound") in BOUNDS_OF_FABRIC
    rates = rates_of(profile) if profile is not None and needs_rates else None
    # A floor that is a share of what one GPU has: no GPU has more.
    is_share = merged.get("per") == "gpu" and not merged.keys().isdisjoint({"above", "min"})
    of_value, bound_value = _figure(of, spec), _most(merged.get("bound") or (of if is_share else None), profile)
    return Threshold(key=key, of_value=of_value, bound_value=bound_value, rates=rates, file=file, line=line, **merged)


def _most(bound: str | float | None, profile: Profile | None) -> float | None:
    """What ``bound`` allows one GPU at most; None without one, where only the shape says it, and for a rehearsal."""
    if profile is None or profile.rehearsal:
        return None
    if isinstance(bound, str):
        return profile.spec.most(bound.removeprefix("gpu.")) if bound.startswith("gpu.") and profile.spec else None
    return bound


def rates_of(profile: Profile) -> FabricRates | None:
    """What a profile promises of the links; None without a GPU."""
    if profile.spec is None:
        return None
    return FabricRates(
        nic_gb_s_per_gpu=profile.nic_gb_s_per_gpu,
        nvlink_gb_s=profile.spec.peer_gb_s,
        nodes_per_domain=profile.nodes_per_domain,
        is_stated=profile.fabric == "sockets",
    )


def _figure(reference: str | None, spec: GpuSpec | None) -> float | None:
    """The figure in a GPU's spec that ``gpu.<field>`` names; None if the spec has none."""
    if reference is None or not reference.startswith("gpu."):
        return None
    figure: float | None = getattr(spec, reference.removeprefix("gpu."), None)
    return figure
