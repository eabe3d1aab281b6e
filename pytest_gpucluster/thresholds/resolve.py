"""thresholds.yaml as frozen objects: which limits apply to which profile, and where each is written.

Knows YAML and the GPU specs; knows nothing of pytest, torch or measurements. ``load`` checks the whole file, whatever
the profile, before anything runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_gpucluster.config.settings import SOAK_S
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.layers import KINDS, Kind, chain_of, layers, merge_entry
from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.specs import GpuSpec, load_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.config.yaml_lines import Document, KeyPath

Per: TypeAlias = Literal["gpu", "node", "cluster"]
Level: TypeAlias = Literal["quick", "standard", "soak"]
Severity: TypeAlias = Literal["required", "advisory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of cluster. ``gpu`` is the id of a spec, None when the profile promises no GPU.

    ``accept_soak_s`` is how long a soak must last where ``accept_at`` is soak.
    """

    name: str
    gpu: str | None
    spec: GpuSpec | None
    chain: tuple[str, ...]
    accept_at: Level = "standard"
    accept_soak_s: float = SOAK_S
    fabric: str = "none"
    rehearsal: bool = False
    nodes: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One entry of thresholds.yaml, resolved for one profile.

    ``numbers`` are the limit's, by group size in GPUs, ``"any"`` for all other sizes. ``of`` is what they are
    multiplied by; ``of_value`` its value when the GPU's spec gives it, None when the cluster's shape does.
    ``line`` is where the limit is written. ``needs`` and ``needs_nodes`` are the least GPUs and nodes in the group:
    with fewer the criterion is skipped by rule, as it is when ``skip`` holds a reason: the entry's own, or that the
    profile's GPU lacks what it ``requires`` (``gpu.fp8_tflops``: FP8 units). ``noise`` is the relative
    spread of repeats above which a value is not judged. ``takes_s`` is how long the measurement takes, about, on the
    profile's GPUs (at level soak: one round of it); ``measured_with`` names the entry whose measurement gives this
    value too.
    """

    key: str
    criterion: str
    per: Per
    level: Level
    unit: str
    severity: Severity
    kind: Kind
    numbers: Mapping[int | str, float]
    recipe: Mapping[str, Any]
    why: str
    source: str
    file: str
    line: int
    of: str | None = None
    of_value: float | None = None
    bound: str | None = None
    bound_waived: str | None = None
    needs: int = 1
    needs_nodes: int = 1
    requires: str | None = None
    skip: str | None = None
    noise: float | None = None
    deadline_s: float | None = None
    takes_s: float | None = None
    measured_with: str | None = None

    def limit(self, *, gpus: int, cluster: Mapping[str, int]) -> Limit:
        """The limit for a group.

        Args:
            gpus: number of GPUs in the group.
            cluster: ``nodes``, ``gpus_per_node`` and ``world_size``, for limits ``of: cluster...``.

        Raises:
            ConfigurationError: the table has no number for this size, or ``cluster`` lacks what ``of`` names.
        """
        number = self.numbers.get(gpus, self.numbers.get("any"))
        where = f"{self.file}:{self.line}"
        if number is None:
            sizes = ", ".join(str(size) for size in self.numbers)
            message = f"{where}: '{self.key}' has no limit for {gpus} GPUs, only for {sizes}. Add that size, or 'any'."
            raise ConfigurationError(message)
        if self.of is None:
            return Limit(kind=self.kind, value=number, unit=self.unit)
        factor = self.of_value if self.of.startswith("gpu.") else cluster.get(self.of.removeprefix("cluster."))
        if factor is None:
            raise ConfigurationError(f"{where}: '{self.key}' is a part of {self.of}, which is not known here.")
        return Limit(kind=self.kind, value=number * factor, unit=self.unit)


def resolve_profile(document: Document, name: str) -> Profile:
    """A profile with what it inherits."""
    profiles = document.data["profiles"]
    chain = chain_of(profiles, name)
    merged: dict[str, Any] = {}
    for ancestor in chain:
        merged.update(profiles[ancestor])
    merged.pop("inherits", None)
    gpu = merged.pop("gpu", None)
    return Profile(name=name, gpu=gpu, spec=load_specs().get(gpu), chain=tuple(chain), **merged)


def resolve(document: Document, key: str, *, profile: Profile | None) -> Threshold:
    """An entry with the overrides of a profile (None: without any)."""
    entry = document.data["criteria"][key]
    merged: dict[Any, Any] = {}
    limit_path: KeyPath = ("criteria", key)
    for path, layer in layers(entry, profile.chain if profile else ()):
        merged = merge_entry(merged, layer)
        limit_path = next((("criteria", key, *path, kind) for kind in KINDS if kind in layer), limit_path)
    kind = next(kind for kind in KINDS if kind in merged)
    value = merged.pop(kind)
    merged["skip"] = merged.get("skip") or _lacking(merged.get("requires"), profile.spec if profile else None)
    file, line = document.find(limit_path)
    defaults = {"recipe": {}, "level": "standard", "severity": "required"}
    return Threshold(
        key=key,
        kind=kind,
        numbers=dict(value) if isinstance(value, dict) else {"any": value},
        of_value=_of_value(merged.get("of"), profile.spec if profile else None),
        file=file,
        line=line,
        **copy.deepcopy({**defaults, **merged}),
    )


def _of_value(of: str | None, spec: GpuSpec | None) -> float | None:
    """The spec's value that a limit is a part of."""
    if of is None or spec is None or not of.startswith("gpu."):
        return None
    value: float | None = getattr(spec, of.removeprefix("gpu."), None)
    return value


def _lacking(requires: str | None, spec: GpuSpec | None) -> str | None:
    """Why a criterion does not apply to a GPU: its spec has no figure for what the criterion requires. None if it has."""
    if requires is None or spec is None or getattr(spec, requires.removeprefix("gpu."), None) is not None:
        return None
    return f"needs {requires}, and {spec.title} has none"
