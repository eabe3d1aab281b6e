"""Read a whole thresholds file before anything runs, and check that every profile is consistent and physically possible."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from pytest_gpucluster.config.schema_errors import described, did_you_mean, listed
from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem, Where
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.thresholds import resolve, versions
from pytest_gpucluster.thresholds import schema as shape
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.layers import KINDS, SourceFile, read_source
from pytest_gpucluster.thresholds.limit import all_to_all_gb_s, most_by_nvlink_gb_s, most_gb_s
from pytest_gpucluster.thresholds.schema import CriterionEntry, Override
from pytest_gpucluster.thresholds.specs import DERIVED, FIELD_UNITS, NOT_AMD, load_specs, names_amd

CLUSTER_UNITS = {"gpus_per_node": "GPUs", "nodes": "nodes", "world_size": "GPUs"}
"""What ``of: cluster...`` may name, with the unit it is in."""
FABRIC_UNITS = {of.removeprefix("fabric."): "GB/s" for of in (*resolve.OF_FABRIC, *resolve.BOUNDS_OF_FABRIC)}
_KEY = re.compile(r"[a-z][a-z0-9_]*(\[[^\[\]]+\])?\Z")
_BOUND_LOWEST, _BOUND_HIGHEST = 0.40, 1.05
_HIGHEST = {"ratio": 1, "%": 100}
_MAY_BE_NEGATIVE = {"C"}
_WORK = {
    *("bursts", "chunk_bytes", "count", "depth", "files", "iterations", "large_size_bytes", "launches", "passes", "repeats"),
    *("rounds", "row_tokens", "rows", "seconds", "share", "size", "size_bytes", "sizes", "slice_s", "small_bytes", "steps"),
}
"""What a recipe calls its amounts of work: without one of them nothing is measured."""
_ABSURD = 10_000
"""So many times the largest amount of work in a packaged recipe, none ends."""


Fault: TypeAlias = tuple[KeyPath, str]
"""What is wrong, and the keys where it stands."""


def problems_of(file: ThresholdsFile) -> list[Problem]:
    """What is wrong with a file of the right shape."""
    of_versions = versions.problems_of(file.content.versions, file.document, ("versions",))
    of_profiles = [file.document.problem(*fault) for fault in _check_profiles(file)]
    return [*of_versions, *(of_profiles or _check_entries(file))]


def _check_profiles(file: ThresholdsFile) -> Iterator[Fault]:
    """Find unknown GPUs and parents, circles, and profiles that promise nothing."""
    profiles, specs = file.content.profiles, load_specs()
    for name, entry in profiles.items():
        path: KeyPath = ("profiles", name)
        parent, gpu = entry.inherits, entry.gpu
        chain = resolve.chain_of(profiles, name)
        if not name.isprintable() or name != name.strip() or not name:
            yield path, f"{name!r} cannot be a profile's name: printable text without spaces around it."
        if parent is not None and parent not in profiles:
            known = ", ".join(profiles)
            text = f"profile {name!r} inherits {parent!r}, which is not a profile. Profiles: {known}."
            yield (*path, "inherits"), text + did_you_mean(parent, list(profiles))
        elif parent is not None and profiles[chain[0]].inherits in profiles:
            yield (*path, "inherits"), f"profile {name!r} inherits itself in a circle."
        if gpu is not None and gpu not in specs:
            text = f"profile {name!r} names the GPU {gpu!r}, which has no spec. Specs: {', '.join(specs)}."
            how = NOT_AMD if names_amd(gpu) else "To add one: a file in pytest_gpucluster/thresholds/specs."
            yield (*path, "gpu"), f"{text}{did_you_mean(gpu, list(specs))} {how}"
        terms = ChainMap(*(profiles[ancestor].written() for ancestor in reversed(chain)))
        if not terms.get("gpu") and not terms.get("rehearsal"):
            yield path, f"profile {name!r} has no 'gpu' and is not a rehearsal ('rehearsal: true')."


def _check_entries(file: ThresholdsFile) -> Iterator[Problem]:
    """Check every entry as written, and sound entries also as every profile sees them."""
    faults = [*_check_rules(file), *(_check_recipes(file, file.base) if file.base else ())]
    sound = {}
    for key, entry in file.content.criteria.items():
        of_entry = list(_check_written(file, key, entry))
        faults += of_entry
        if not of_entry:
            sound[key] = entry
    yield from (file.document.problem(*fault) for fault in faults)
    if len(sound) < len(file.content.criteria):
        file = replace(file, content=file.content.model_copy(update={"criteria": sound}))
    yield from _check_limits(file)


def _check_rules(file: ThresholdsFile) -> Iterator[Fault]:
    """Check the rules of profiles: each name is that of an entry, and a limit is one."""
    known = list(file.content.criteria)
    for profile, entry in file.content.profiles.items():
        for name, rule in entry.rules.items():
            path: KeyPath = ("profiles", profile, "rules", name)
            yield from _check_limit_keys(path, rule)
            for key in filter(rule.names, file.content.criteria):
                yield from _check_unit(file, key, path, rule)
            for text in rule.unused_names(file.document.data.get("criteria", {})):
                where = f"{text!r} is no criterion{shape.part_of(path).inside}"
                yield (*path, "for"), f"{where}.{did_you_mean(text, known)}"


def _check_recipes(file: ThresholdsFile, base: Document) -> Iterator[Fault]:
    """Check the numbers that a file gives the recipes of packaged entries."""
    usual = grouped((path[-1], one) for path, one in _in_recipes(base) if type(one) in (int, float))
    for path, one in _in_recipes(file.document):
        name, is_number, most = path[-1], type(one) in (int, float), _ABSURD * max(usual.get(path[-1], [math.inf]))
        wrong = not is_number or not 0 < one <= most if name in _WORK else is_number and one < 0
        if wrong and (path[0] == "profiles" or path[1] in base.data["criteria"]):
            allowed = f"a number above 0, at most {most:g}" if name in _WORK else "at least 0"
            yield path, f"{name!r} must be {allowed}, not {described(one)}{shape.part_of(path).inside}."


def _in_recipes(document: Document) -> Iterator[tuple[KeyPath, Any]]:
    """What the recipes of a file say, the members of a list one by one."""
    for path in (path for path, where in document.where.items() if path[-2:-1] == ("recipe",) and where.file == document.file):
        value: Any = functools.reduce(operator.getitem, path, document.data)
        yield from ((path, one) for one in (value if isinstance(value, list) and value else [value]))


def _check_limits(file: ThresholdsFile) -> Iterator[Problem]:
    """Check every limit as every profile sees it. Profiles that share a limit share its problems.

    An entry that names no figure of a profile is one object for all that share it (``ThresholdsFile.criteria``).
    """
    found_in: set[tuple[str, str, int]] = set()
    checked: set[int] = set()
    for profile in (None, *file.profiles.values()):
        for threshold in file.criteria(profile).values():
            limit = (threshold.key, threshold.file, threshold.line)
            if limit in found_in or id(threshold) in checked:
                continue
            checked.add(id(threshold))
            for message in _check_resolved(threshold, profile):
                found_in.add(limit)
                blamed = _blamed(file, threshold)
                yield Problem(file=blamed.file, line=blamed.line, message=message)


def _blamed(file: ThresholdsFile, threshold: resolve.Threshold) -> resolve.Threshold | Where:
    """Where the limit stands; where that is the packaged file and the one that extends it changes the entry, the change."""
    entry = file.document.find(("criteria", threshold.key))
    is_changed = file.base is not None and threshold.file == file.base.file != entry.file
    return entry if is_changed else threshold


def _check_written(file: ThresholdsFile, key: str, entry: CriterionEntry) -> Iterator[Fault]:
    """Check what does not depend on a profile."""
    path: KeyPath = ("criteria", key)
    if not _KEY.match(key):
        yield path, f"{key!r} cannot be a test's name: small letters, digits, _ and [parameter]."
    yield from _check_limit_keys(path, entry)
    yield from _check_unit(file, key, path, entry)
    usual = ({} if file.base is None else file.base.data["criteria"]).get(key)
    if usual and usual.get("per", "gpu") != entry.per:
        yield (*path, "per"), f"{key!r} is judged per {usual.get('per', 'gpu')}, not per {entry.per}: leave 'per' out."
    if "measured_with" in entry.written():
        yield from _check_measured_with(file, key, entry)
    for name, override in entry.profiles.items():
        here: KeyPath = (*path, "profiles", name)
        if name not in file.content.profiles:
            known = list(file.content.profiles)
            text = f"{name!r} is not a profile (in {key!r}). Profiles: {', '.join(known)}.{did_you_mean(name, known)}"
            yield here, text
        yield from _check_limit_keys(here, override)
        yield from _check_unit(file, key, here, override)


def _check_unit(file: ThresholdsFile, key: str, path: KeyPath, layer: CriterionEntry | Override) -> Iterator[Fault]:
    """Check that a file that extends the packaged one leaves the units of its entries: their tests measure in those."""
    if file.base is None or (measured := file.base.data["criteria"].get(key, {}).get("unit")) is None:
        return
    written = layer.written()
    unit = written.get("unit", measured)
    if unit != measured:
        own = [written[kind] for kind in KINDS if file.document.find((*path, kind)).file != file.base.file and kind in written]
        number = own[0] if len(own) == 1 and isinstance(own[0], (int, float)) and "of" not in written else None
        text = f"{key!r} is measured in {measured}, not in {unit}: leave 'unit' out{shape.part_of(path).inside}."
        yield (*path, "unit"), text + shape.said_in(number, unit, measured)


def _check_measured_with(file: ThresholdsFile, key: str, entry: CriterionEntry) -> Iterator[Fault]:
    """Check that ``measured_with`` names another entry, which has the measurement and its ``takes_s``."""
    path: KeyPath = ("criteria", key, "measured_with")
    criteria, other = file.content.criteria, entry.measured_with
    if other == key or (other not in criteria and ("criteria", other) not in file.document.where):
        known = [one for one in criteria if one != key]
        text = f"{key!r} is measured with {other!r}, which is no other criterion.{did_you_mean(other, known)}"
        yield path, text
    elif other in criteria and "measured_with" in criteria[other].written():
        owner = criteria[other].measured_with
        text = f"{other!r} is itself measured with {owner!r}: name that one (in {key!r})."
        yield path, text
    if any(layer.takes_s is not None for layer in (entry, *entry.profiles.values())):
        text = f"'takes_s' belongs to the entry that has the measurement, {other!r}, or the time counts twice (in {key!r})."
        yield path, text


def _check_limit_keys(path: KeyPath, layer: CriterionEntry | Override) -> Iterator[Fault]:
    """Check that an entry has one of the four kinds of limit, and an override at most one."""
    inside, written = shape.part_of(path).inside, layer.written()
    kinds = [kind for kind in KINDS if kind in written]
    if len(kinds) > 1:
        lowest, highest = written.get("min", 0.0), written.get("max", math.inf)
        are_numbers = isinstance(lowest, (int, float)) and isinstance(highest, (int, float))  # tables are not compared
        nothing = f" Nothing could pass: min {lowest} is above max {highest}." if are_numbers and lowest > highest else ""
        text = f"one limit only{inside}: found {' and '.join(kinds)}.{nothing}"
        yield (*path, kinds[1]), text
    if not kinds and isinstance(layer, shape.CriterionEntry):
        yield path, f"no limit{inside}: one of {', '.join(KINDS)}."
    for name in ("of", "shapes"):
        if not kinds and isinstance(layer, shape.Override) and name in written:
            yield (*path, name), f"{name!r} without a limit beside it{inside}: an override replaces both."
    yield from _check_references(path, written)


def _check_references(path: KeyPath, written: Mapping[str, Any]) -> Iterator[Fault]:
    """Check that ``of``, ``bound`` and ``requires`` name figures that exist."""
    inside = shape.part_of(path).inside
    for name in ("of", "bound", "requires"):
        reference = written.get(name)
        if not isinstance(reference, str):
            continue
        if _unit_of(reference) is None:
            known = [f"gpu.{field}" for field in FIELD_UNITS]
            known += [*resolve.OF_FABRIC, *(f"cluster.{field}" for field in CLUSTER_UNITS)] if name == "of" else []
            known += [*(f"gpu.{field}" for field in DERIVED), *resolve.BOUNDS_OF_FABRIC] if name == "bound" else []
            text = f"{name!r} is {reference!r}{inside}. Choose from: {', '.join(known)}."
            yield (*path, name), text + did_you_mean(reference, known)
        elif name == "bound" and not reference.startswith("gpu.") and reference not in resolve.BOUNDS_OF_FABRIC:
            others = f"{', '.join(resolve.BOUNDS_OF_FABRIC)} or a number"
            yield (*path, name), f"a bound is physics, so of the form gpu.<field>{inside}, {others}."
        elif name == "requires" and not reference.startswith("gpu."):
            text = f"what a GPU may lack stands in its spec, so of the form gpu.<field>{inside}."
            yield (*path, name), text


def _unit_of(reference: str) -> str | None:
    """The unit of ``gpu.<field>``, ``cluster.<field>`` or ``fabric.<field>``; None when there is no such field."""
    table, _, name = reference.partition(".")
    return {"gpu": {**FIELD_UNITS, **DERIVED}, "cluster": CLUSTER_UNITS, "fabric": FABRIC_UNITS}.get(table, {}).get(name)


def _check_resolved(threshold: resolve.Threshold, profile: resolve.Profile | None) -> Iterator[str]:
    """Check a limit as a profile sees it (None: as written, before any override)."""
    name = repr(threshold.key)
    for number in threshold.numbers.values():
        yield from _check_number(threshold, number, is_part=threshold.of is not None)
    for number in threshold.by_shape.values():
        yield from _check_number(threshold, number, is_part=False)
    if threshold.by_shape and threshold.per != "cluster":
        yield f"{name}: 'shapes' are of the whole cluster, and this is per {threshold.per}."
        return
    for what, reference in (("'of'", threshold.of), ("'bound'", threshold.bound)):
        if isinstance(reference, str) and _unit_of(reference) != threshold.unit:
            unit = _unit_of(reference)
            own = [*threshold.numbers.values()] if not threshold.of else []
            said = shape.said_in(own[0] if len(own) == 1 else None, threshold.unit, str(unit))
            yield f"{name} is in {threshold.unit}, but {what} {reference} is in {unit}. Write it in {unit}.{said}"
            return
    if isinstance(threshold.bound, str) and threshold.kind in {"below", "max"}:
        yield f"{name}: 'bound' belongs to a floor (above, min), not to a ceiling ({threshold.kind}), unless it is a number."
        return
    if isinstance(threshold.bound, (int, float)) and not threshold.of:
        yield from _check_plain_bound(threshold, threshold.bound)
    if profile is not None and threshold.skip is None:
        yield from _check_physics(threshold, profile)
        yield from _check_shapes(threshold, profile)


def _check_number(threshold: resolve.Threshold, number: float, *, is_part: bool) -> Iterator[str]:
    """Find a number that no value, or every value, satisfies."""
    limit = f"{threshold.key!r}: '{threshold.kind}: {number}'"
    unit, highest = threshold.unit, _HIGHEST.get(threshold.unit)
    if number < 0 and unit not in _MAY_BE_NEGATIVE:
        yield f"{limit} is negative; {unit} never is."
    elif highest is not None and number > highest:
        yield f"{limit} lies outside 0..{highest}, where a value in {unit} is."
    elif (threshold.kind, number) in (("max", highest), ("min", None if unit in _MAY_BE_NEGATIVE else 0)):
        yield f"{limit} {unit} holds for every value: it is no limit."
    elif number == 0 and unit not in _MAY_BE_NEGATIVE and (threshold.kind == "below" or is_part):
        yield f"{limit} {unit} can hold for no value."
    elif is_part and number > 1 and threshold.kind in {"above", "min"} and not str(threshold.of).startswith("gpu."):
        yield f"{limit} of {threshold.of} asks for more than there is."


def _check_plain_bound(threshold: resolve.Threshold, bound: float) -> Iterator[str]:
    """Find a number as bound that no value can be within beside the limit."""
    asks_for_more = operator.lt if threshold.kind in {"below", "max"} else operator.gt
    for number in (*threshold.numbers.values(), *threshold.by_shape.values()):
        if asks_for_more(number, bound):
            yield f"{threshold.key!r}: '{threshold.kind}: {number}' asks for more than its 'bound: {bound:g}' allows."


def _check_physics(threshold: resolve.Threshold, profile: resolve.Profile) -> Iterator[str]:
    """Check that a floor lies between 40 % and 105 % of its bound (without a bound: of what ``of`` names).

    A floor of 0 asks for nothing, and the verdict counts it as none.
    """
    name, of = repr(threshold.key), threshold.of or ""
    reference = threshold.bound or (of if of.startswith("gpu.") else None)
    if not isinstance(reference, str) or reference in resolve.BOUNDS_OF_FABRIC or reference.removeprefix("gpu.") in DERIVED:
        return
    top: float | None = getattr(profile.spec, reference.removeprefix("gpu."), None)
    if top is None:
        why = f"{profile.spec.title} has no {reference}" if profile.spec else "it has no GPU"
        if of.startswith("gpu.") or threshold.bound_waived is None:
            advice = "give a plain number" if of.startswith("gpu.") else "say 'bound_waived: reason' beside the limit"
            yield f"{name} cannot be checked for profile {profile.name!r}: {why}. Skip it there or {advice}."
        return
    if threshold.bound_waived is not None or threshold.kind in {"below", "max"}:
        return
    for number in threshold.numbers.values():
        value = number * (threshold.of_value or 1.0)
        share = value / top
        if number and not _BOUND_LOWEST <= share <= _BOUND_HIGHEST:
            yield (
                f"{name}: {value:g} {threshold.unit} is {100 * share:.0f} % of {reference} = {top:g} "
                f"(profile {profile.name!r}); a floor lies between 40 % and 105 %. "
                "For one kind of GPU write it under 'profiles: {NAME: ...}'; or say 'bound_waived: reason'."
            )


def _check_shapes(threshold: resolve.Threshold, profile: resolve.Profile) -> Iterator[str]:
    """Check that a cluster of a stated shape could reach its floor at all. Shapes that the profile rules out judge nothing."""
    if threshold.rates is None or threshold.kind in {"below", "max"} or threshold.bound_waived is not None:
        return
    rates = threshold.rates
    for written, number in threshold.by_shape.items():
        nodes, gpus = map(int, written.split("x"))
        if nodes < 2:
            yield f"{threshold.key!r}: the shape {written} has nothing between nodes."
            continue
        if profile.nodes not in (None, nodes) or profile.gpus_per_node not in (None, gpus):
            continue
        top, what = _most(rates, threshold.of, nodes, gpus)
        if number >= top:
            ports = "no known ports" if rates.nic_gb_s_per_gpu is None else f"{rates.nic_gb_s_per_gpu:g} GB/s of ports a GPU"
            yield (
                f"{threshold.key!r}: {number:g} {threshold.unit} for {written} is more than any {what} can reach there, "
                f"{top:.4g} (profile {profile.name!r}: {ports}, {rates.nvlink_gb_s:g} of NVLinks). "
                "Say 'nodes' and 'gpus_per_node' where the profile is of another shape."
            )


def _most(rates: resolve.FabricRates, of: str | None, nodes: int, gpus_per_node: int) -> tuple[float, str]:
    """More than this no such collective can reach, and its name. What NVLink reaches counts as one node."""
    domains, gpus = rates.domains(nodes=nodes, gpus_per_node=gpus_per_node)
    nic_gb_s = math.inf if rates.nic_gb_s_per_gpu is None else rates.nic_gb_s_per_gpu
    known = {"nic_gb_s_per_gpu": nic_gb_s, "nvlink_gb_s": rates.nvlink_gb_s}
    if domains == 1 and of != resolve.ALL_TO_ALL:
        return most_by_nvlink_gb_s(gpus=gpus, nvlink_gb_s=rates.nvlink_gb_s), "all-reduce"
    if of == resolve.ALL_TO_ALL:
        return all_to_all_gb_s(nodes=domains, gpus_per_node=gpus, **known), "all_to_all"
    return most_gb_s(nodes=domains, gpus_per_node=gpus, **known), "all-reduce"


def load(path: Path | None) -> ThresholdsFile:
    """Read and check a thresholds file; None stands for the packaged one.

    Raises:
        ConfigurationError: one line per problem, ``file:line`` first, at most 10 of them.
    """
    file, problems = check(path)
    if file is None or problems:
        raise ConfigurationError(listed(problems))
    return file


def check(path: Path | None) -> tuple[ThresholdsFile | None, list[Problem]]:
    """Read a file once and find everything that is wrong with it; None stands for the packaged one.

    Returns:
        The file, None where its shape is wrong outside of entries; and its problems, in its order. An entry of the wrong
        shape is left out, and checked no further.
    """
    source = read_source(path)
    file, problems = ThresholdsFile.validate(source)
    found = problems if file is None else problems + problems_of(file)
    # Problems of this file come first: they may be the cause of many in the packaged one.
    in_order = sorted(set(found), key=lambda one: (one.file != source.document.file, one.file, one.line, one.message))
    return file, [*source.refused, *_forgotten_extends(source, in_order), *in_order]


def _forgotten_extends(source: SourceFile, problems: list[Problem]) -> list[Problem]:
    """A file that says less than it must, and has ``extends`` nowhere: it may be meant as an overlay."""
    data = source.document.data
    if not problems or not data or "extends" in data or source.base is not None:
        return []
    packaged = read_source(None)
    required = {name for name, one in CriterionEntry.model_fields.items() if one.is_required()}
    known, entries = packaged.document.data.get("criteria", {}), data.get("criteria")
    shared = [entries[key] for key in entries if key in known] if isinstance(entries, dict) else []
    is_short = "profiles" not in data or any(isinstance(one, dict) and not required <= one.keys() for one in shared)
    if not is_short or source.path.absolute() == packaged.path.absolute():
        return []
    text = "did you forget `extends: packaged`? Without it a file stands alone and needs all that follows."
    return [Problem(file=source.document.file, line=1, message=text)]
