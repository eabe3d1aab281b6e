"""A whole thresholds file, validated: its profiles, its limits for each, and which of them are not the packaged ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from pytest_gpucluster.config.schema_errors import did_you_mean, listed
from pytest_gpucluster.config.settings import Expect
from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds import layers, released, schema, versions
from pytest_gpucluster.thresholds.layers import THE_LIMIT, Layer, SourceFile, Statement, layer, merge
from pytest_gpucluster.thresholds.resolve import Profile, Threshold, resolve, resolve_profile
from pytest_gpucluster.thresholds.specs import NOT_AMD, GpuSpec, load_specs, names_amd, spec_for_gpu

REMOVED = "removed"
"""What differs of an entry that a file does not have."""
FIGURES = frozenset({"of", "bound", "requires"})
"""Keys of an entry whose meaning depends on the profile: figures of its GPU or its links."""
NOT_FIGURES = {"title", "source", "seen"}
"""Keys of a spec that change no outcome."""


@dataclass(frozen=True, kw_only=True)
class ThresholdsFile(SourceFile):
    """A validated thresholds file. Limits are resolved once for each profile: lint and the run share them.

    ``specs``: the figures of GPUs by id; None stands for the installed ones.
    """

    content: schema.File = field(repr=False)
    specs: Mapping[str, GpuSpec] | None = field(default=None, repr=False)
    _criteria: dict[Profile | None, dict[str, Threshold]] = field(default_factory=dict, repr=False)
    _said: dict[Profile | None, dict[str, dict[str, list[Statement]]]] = field(default_factory=dict, repr=False)
    # By identity, and so never handed to another file: by that of layers, and by that of what is said, in ``_merged``.
    _merged: dict[tuple[int, ...], dict[str, list[Statement]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _shared: dict[int, Threshold] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def validate(cls, source: SourceFile) -> tuple[ThresholdsFile | None, list[Problem]]:
        """Validate the shape of a file. Entries of the wrong shape are left out; other faults of shape leave no file.

        What is wrong with ``extends`` is in ``source.refused``.
        """
        packaged = source.base.data.get("criteria", {}) if source.base is not None else {}
        content, problems = schema.validate(source.document, packaged=packaged)
        if content is None:
            return None, problems
        own = {one.name: getattr(source, one.name) for one in fields(SourceFile)}
        return cls(**own, content=content), problems

    @property
    def sha256(self) -> str:
        """The digest of the file at ``path`` itself, as ``sha256sum`` prints it."""
        return self.document.sha256

    @cached_property
    def cluster(self) -> Expect:
        """The expected shape; None stands for ``auto``."""
        section = self.content.cluster
        nodes, gpus_per_node = (None if size == "auto" else size for size in (section.nodes, section.gpus_per_node))
        return Expect(nodes=nodes, gpus_per_node=gpus_per_node)

    @cached_property
    def profiles(self) -> Mapping[str, Profile]:
        """Every profile by name, inheritance applied."""
        return {name: resolve_profile(self.content.profiles, name, specs=self.specs) for name in self.content.profiles}

    @cached_property
    def versions(self) -> Mapping[str, tuple[schema.KnownFault, ...]]:
        """What is known of versions, by component: the packaged table, under that of this file."""
        return versions.of_file(self.content)

    def criteria(self, profile: Profile | None) -> dict[str, Threshold]:
        """Every entry resolved for a profile (None: without overrides), in the file's order."""
        if profile not in self._criteria:
            said = self.said(profile).items()
            self._criteria[profile] = {key: self._resolved(key, one, profile) for key, one in said}
        return dict(self._criteria[profile])

    def _resolved(self, key: str, said: dict[str, list[Statement]], profile: Profile | None) -> Threshold:
        """Resolve an entry; once for all profiles that share what is said of it, where that names no figure of theirs."""
        limit = said[THE_LIMIT][-1].value if THE_LIMIT in said else {}
        if not FIGURES.isdisjoint((*said, *limit)):
            return resolve(key, said, self.document, profile=profile)
        if id(said) not in self._shared:
            self._shared[id(said)] = resolve(key, said, self.document, profile=None)
        return self._shared[id(said)]

    def said(self, profile: Profile | None) -> dict[str, dict[str, list[Statement]]]:
        """What is said of every entry for a profile, topic by topic: what wins comes last, after what loses to it."""
        if profile not in self._said:
            self._said[profile] = {key: self._merge([*self._layers_of(key, profile)]) for key in self.content.criteria}
        return self._said[profile]

    def _merge(self, layers: list[Layer]) -> dict[str, list[Statement]]:
        """Merge layers once for all profiles that share them: of the packaged file 435 merges for 2,533 limits.

        Layers are known by identity: all of them are in ``_layers``, which lives as long as this file.
        """
        known = tuple(map(id, layers))
        if known not in self._merged:
            self._merged[known] = merge(layers)
        return self._merged[known]

    def _layers_of(self, key: str, profile: Profile | None) -> Iterator[Layer]:
        """What an entry says for a profile, lowest first: itself, then for each ancestor its rules and the entry's override."""
        yield self._layers["criteria", key]
        for name in profile.chain if profile is not None else ():
            yield from self._rules_of(key, name)
            if name in self.content.criteria[key].profiles:
                yield self._layers["criteria", key, "profiles", name]

    def _rules_of(self, key: str, profile: str) -> list[Layer]:
        """The rules of a profile for an entry. One that skips stands alone.

        A rule is for the entries of the file that has it, and for those that this file extends.
        """
        base, found = self.base, []
        for name, rule in self.content.profiles[profile].rules.items():
            path = ("profiles", profile, "rules", name)
            if rule.names(key):
                is_others = base is not None and key not in base.data["criteria"] and self.document.find(path).file == base.file
                found += [] if is_others else [self._layers[path]]
        return next(([one] for one in found if "skip" in one and one["skip"].value is not None), found)

    @cached_property
    def _layers(self) -> dict[KeyPath, Layer]:
        """Every entry, override and rule, split into topics once for all profiles."""
        written: dict[KeyPath, dict[str, Any]] = {}
        for key, entry in self.content.criteria.items():
            written["criteria", key] = {name: value for name, value in entry.written().items() if name != "profiles"}
            written |= {("criteria", key, "profiles", name): one.written() for name, one in entry.profiles.items()}
        for name, profile in self.content.profiles.items():
            written |= {("profiles", name, "rules", rule): one.written() for rule, one in profile.rules.items()}
        return {path: layer(path, keys) for path, keys in written.items()}

    def profile_for(self, *, name: str | None, gpu_names: Sequence[str]) -> Profile:
        """Choose a profile; never guess.

        Args:
            name: the profile that is wanted, None to choose by GPU.
            gpu_names: NVML's name of every GPU, empty for none.

        Raises:
            ConfigurationError: no such profile, a profile of other GPUs, mixed or unknown GPUs.
        """
        if name is not None:
            return self._named(name, gpu_names)
        if not gpu_names:
            return self._existing("rehearsal", "No GPU was found, and without a GPU only a rehearsal is possible.")
        if len(set(gpu_names)) > 1:
            raise ConfigurationError(f"GPUs of several models: {_counted(gpu_names)}. Name one: --gpucluster-profile.")
        spec = spec_for_gpu(gpu_names[0])
        return self._existing(spec.id, f"The GPUs are {gpu_names[0]!r}.")

    def standard(self, profile: Profile) -> Profile | None:
        """The packaged profile that a profile stands for; None if there is none.

        It is the packaged profile of the profile's GPU, whatever the profile inherits: a lab profile stands for the
        production profile of the GPUs that are there. Without one it is the nearest packaged ancestor. A profile that
        accepts never stands for a rehearsal.
        """
        packaged = self.packaged.profiles
        known = [packaged[name] for name in (profile.gpu, *reversed(profile.chain)) if name is not None and name in packaged]
        return next((one for one in known if one.rehearsal == profile.rehearsal), None)

    def changed_entries(self, profile: Profile) -> dict[str, list[str]]:
        """Packaged entries that this file judges otherwise, or does not have, each with what differs, in words.

        The comparison is with the profile's :meth:`standard`, else with the entries as they stand before any override.
        """
        here = self.criteria(profile)
        standard = self.standard(profile) or Profile(name="", spec=profile.spec, chain=())
        packaged = self.packaged.criteria(standard)
        found = {key: entry.differences(here[key]) if key in here else [REMOVED] for key, entry in packaged.items()}
        known = self.packaged.content.versions
        for component, faults in self.versions.items():
            if versions.judged(faults) != versions.judged(tuple(getattr(known, component))):
                found.setdefault(versions.JUDGES[component], []).append(f"versions of {versions.SCHEMES[component].title}")
        return {key: words for key, words in found.items() if words}

    def changed_figures(self, gpu_names: Sequence[str]) -> list[str]:
        """The GPUs, by NVML's names, whose figures are not the released ones.

        A GPU that was not known at the release is not named: nothing was promised for it.
        """
        known, here = self.packaged.specs or {}, load_specs()
        changed = (name for name in sorted(set(gpu_names)) if _figures(name, known) not in (None, _figures(name, here)))
        return [f"figures of {name}" for name in changed]

    @cached_property
    def packaged(self) -> ThresholdsFile:
        """What was packaged, by content: never what somebody made of the packaged file since it was released."""
        data = released.read_released(layers.packaged_path())
        specs = {name: GpuSpec(id=name, **figures) for name, figures in data.pop("specs").items()}
        document = Document(file=released.PATH.name, data=data)
        content, problems = schema.validate(document)
        if content is None or problems:
            raise ConfigurationError(listed(problems))
        return ThresholdsFile(path=released.PATH, document=document, content=content, specs=specs)

    def _existing(self, name: str, because: str) -> Profile:
        if name in self.profiles:
            return self.profiles[name]
        known = ", ".join(self.profiles)
        text = f"{because} {self.document.file} has no profile {name!r}; profiles: {known}. Add it under 'profiles:'"
        raise ConfigurationError(f"{text}, with limits that were measured on such a cluster.")

    def _named(self, name: str, gpu_names: Sequence[str]) -> Profile:
        if name not in self.profiles:
            hint = f" {NOT_AMD}" if names_amd(name) else did_you_mean(name, list(self.profiles))
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


def _figures(name: str, specs: Mapping[str, GpuSpec]) -> dict[str, object] | None:
    found = next((spec for spec in specs.values() if name in spec.names), None)
    return None if found is None else found.model_dump(exclude=NOT_FIGURES)


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name!r}" for name, count in Counter(names).most_common())
