"""Read and check a whole thresholds file, before anything runs; choose the profile; name the limits that were changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds import lint
from pytest_gpucluster.thresholds.layers import packaged_path, read_source
from pytest_gpucluster.thresholds.resolve import Profile, resolve, resolve_profile
from pytest_gpucluster.thresholds.specs import spec_for_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpucluster.config.yaml_lines import Document, Problem
    from pytest_gpucluster.thresholds.resolve import Threshold


_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """The ``cluster:`` section. None stands for ``auto``."""

    nodes: int | None = None
    gpus_per_node: int | None = None


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
        return ClusterSection(**numbers)

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
    source = read_source(path)
    problems = lint.check(source.document)
    if problems:
        raise ConfigurationError(_listed(problems))
    return ThresholdsFile(path=source.path, sha256=source.sha256, document=source.document)


def _judged(threshold: Threshold) -> tuple[object, ...]:
    """Everything of an entry that can change an outcome."""
    rules = (threshold.per, threshold.level, threshold.severity, threshold.needs, threshold.needs_nodes)
    limit = (threshold.kind, threshold.numbers, threshold.of, threshold.of_value, threshold.unit)
    return (*limit, *rules, threshold.skip, threshold.noise, threshold.recipe)


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name!r}" for name, count in Counter(names).most_common())


def _listed(problems: Sequence[Problem]) -> str:
    """One problem a line, at most 10."""
    lines = [str(problem) for problem in problems[:_MAX_SHOWN]]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"... and {more} more problems."] if more else lines)
