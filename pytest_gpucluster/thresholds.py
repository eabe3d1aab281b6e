"""thresholds.yaml as frozen objects: which limits apply to which profile, and where each is written.

Knows YAML and the GPU specs; knows nothing of pytest, torch or measurements. ``load`` checks the whole file, whatever
the profile, before anything runs.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.settings import SOAK_S
from pytest_gpucluster.specs import GpuSpec, load_specs, spec_for_gpu
from pytest_gpucluster.thresholds_merge import KINDS, Kind, chain_of, layers, merge_entry, packaged_path, read_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpucluster.yaml_lines import Document, KeyPath, Problem

Per: TypeAlias = Literal["gpu", "node", "cluster"]
Level: TypeAlias = Literal["quick", "standard", "soak"]
Severity: TypeAlias = Literal["required", "advisory"]

LEVELS: tuple[Level, ...] = ("quick", "standard", "soak")
_SIGNS = {"above": ">", "below": "<", "min": ">=", "max": "<="}
_MAX_SHOWN = 10


def at_or_below(level: Level, wanted: Level) -> bool:
    """Whether a criterion of ``level`` is part of a run at ``wanted``."""
    return LEVELS.index(level) <= LEVELS.index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One number to compare with. ``above`` and ``below`` are strict, ``min`` and ``max`` inclusive."""

    kind: Kind
    value: float
    unit: str

    @property
    def is_floor(self) -> bool:
        """Whether higher is better."""
        return self.kind in {"above", "min"}

    @property
    def text(self) -> str:
        """``> 700 TFLOPS``."""
        return f"{_SIGNS[self.kind]} {_number(self.value)} {self.unit}"

    def holds(self, value: object) -> bool:
        """Whether a value is within the limit. Anything but a finite int or float is not."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        return {
            "above": value > self.value,
            "below": value < self.value,
            "min": value >= self.value,
            "max": value <= self.value,
        }[self.kind]

    def margin_percent(self, value: float) -> float | None:
        """How far inside the limit (above 0) or outside (below 0) a value is, in percent of the limit.

        None when the limit is 0 or the value is not finite.
        """
        if self.value == 0 or not math.isfinite(value):
            return None
        distance = value - self.value if self.is_floor else self.value - value
        return 100.0 * distance / abs(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """The ``cluster:`` section. None stands for ``auto``."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    shared_paths: tuple[str, ...] = ()


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


@dataclass(frozen=True, kw_only=True)
class ThresholdsFile:
    """A checked thresholds file. ``sha256`` is that of the file at ``path`` itself, as ``sha256sum`` prints it."""

    path: Path
    sha256: str
    document: Document = field(repr=False)

    @cached_property
    def cluster(self) -> ClusterSection:
        """The expected shape."""
        section = self.document.data.get("cluster", {})
        sizes = {name: section.get(name, "auto") for name in ("nodes", "gpus_per_node")}
        numbers = {name: None if size == "auto" else size for name, size in sizes.items()}
        return ClusterSection(**numbers, shared_paths=tuple(section.get("shared_paths", ())))

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """Every profile by name, inheritance applied."""
        return {str(name): resolve_profile(self.document, str(name)) for name in self.document.data["profiles"]}

    def profile_for(self, *, name: str | None, gpu_names: Sequence[str]) -> Profile:
        """Choose a profile; never guess.

        Args:
            name: the profile asked for, None to choose by GPU.
            gpu_names: NVML's name of every GPU, empty for none.

        Raises:
            ConfigurationError: no such profile, other GPUs than it promises, mixed or unknown GPUs.
        """
        if name is not None:
            return self._named(name, gpu_names)
        if not gpu_names:
            return self._existing("rehearsal", "No GPU was found, and without a GPU only a rehearsal is possible.")
        if len(set(gpu_names)) > 1:
            raise ConfigurationError(f"GPUs of several models: {_counted(gpu_names)}. Name one: --gpucluster-profile.")
        spec = spec_for_gpu(gpu_names[0])
        return self._existing(spec.id, f"The GPUs are {gpu_names[0]!r}.")

    def _existing(self, name: str, because: str) -> Profile:
        if name in self.profiles:
            return self.profiles[name]
        known = ", ".join(self.profiles)
        text = f"{because} {self.document.file} has no profile {name!r}; profiles: {known}. Add it under 'profiles:'"
        raise ConfigurationError(f"{text}, with limits that were measured on such a cluster.")

    def _named(self, name: str, gpu_names: Sequence[str]) -> Profile:
        if name not in self.profiles:
            close = get_close_matches(name, self.profiles, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            known = ", ".join(self.profiles)
            raise ConfigurationError(f"{self.document.file} has no profile {name!r}. Profiles: {known}.{hint}")
        profile = self.profiles[name]
        if profile.rehearsal or profile.spec is None:
            return profile
        if not gpu_names:
            message = f"No GPU but a GPU profile asked for: {name!r} is for {profile.spec.title}."
            raise ConfigurationError(f"{message} Without a GPU use --gpucluster-profile rehearsal.")
        if not any(found in profile.spec.names for found in gpu_names):
            message = f"Profile {name!r} is for {profile.spec.title}, but the GPUs are {_counted(gpu_names)}."
            raise ConfigurationError(f"{message} Use the profile of these GPUs or leave --gpucluster-profile out.")
        return profile

    def criteria(self, profile: Profile) -> Mapping[str, Threshold]:
        """Every entry resolved for a profile, in the file's order."""
        keys = [str(key) for key in self.document.data.get("criteria", {})]
        return {key: resolve(self.document, key, profile=profile) for key in keys}

    @property
    def _is_packaged(self) -> bool:
        return self.path.absolute() == packaged_path().absolute()

    def standard(self, profile: Profile) -> Profile | None:
        """The packaged profile that this one stands for.

        The nearest packaged ancestor for the same GPU, else the packaged profile of that GPU, else the nearest ancestor;
        never a rehearsal's for one that accepts. None where there is none.
        """
        packaged = self.profiles if self._is_packaged else load(None).profiles
        known = [packaged[name] for name in (*reversed(profile.chain), profile.gpu) if name is not None and name in packaged]
        fit = [one for one in known if one.rehearsal == profile.rehearsal]
        return next((one for one in fit if one.gpu == profile.gpu), next(iter(fit), None))

    def changed_limits(self, profile: Profile) -> list[str]:
        """Entries of the packaged file that are judged otherwise here, or are not here any more.

        Compared is with the profile's :meth:`standard`, else with the entries as they stand before any override.
        """
        if self._is_packaged:
            return []
        here = self.criteria(profile)
        before = load(None).criteria(self.standard(profile) or Profile(name="", gpu=None, spec=profile.spec, chain=()))
        return [key for key, threshold in before.items() if key not in here or _judged(here[key]) != _judged(threshold)]


def load(path: Path | None) -> ThresholdsFile:
    """Read and check a thresholds file; None stands for the packaged one.

    Raises:
        ConfigurationError: one line per problem, ``file:line`` first, at most 10 of them.
    """
    from pytest_gpucluster import lint  # noqa: PLC0415  # lint builds on this module, and brings pydantic

    source = read_source(path)
    problems = lint.check(source.document)
    if problems:
        raise ConfigurationError(_listed(problems))
    return ThresholdsFile(path=source.path, sha256=source.sha256, document=source.document)


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


def _judged(threshold: Threshold) -> tuple[object, ...]:
    """Everything of an entry that can change an outcome."""
    rules = (threshold.per, threshold.level, threshold.severity, threshold.needs, threshold.needs_nodes)
    limit = (threshold.kind, threshold.numbers, threshold.of, threshold.of_value, threshold.unit)
    return (*limit, *rules, threshold.skip, threshold.noise, threshold.recipe)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name!r}" for name, count in Counter(names).most_common())


def _listed(problems: Sequence[Problem]) -> str:
    """One problem a line, at most 10."""
    lines = [str(problem) for problem in problems[:_MAX_SHOWN]]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"... and {more} more problems."] if more else lines)
