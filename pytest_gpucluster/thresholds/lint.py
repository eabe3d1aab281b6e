"""Is a thresholds file well formed, consistent and physically possible? The whole file, whatever the profile."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pytest_gpucluster.config.schema_errors import did_you_mean, shape_problems
from pytest_gpucluster.config.yaml_lines import Document, Problem
from pytest_gpucluster.thresholds.layers import KINDS, chain_of, read_source
from pytest_gpucluster.thresholds.resolve import resolve, resolve_profile
from pytest_gpucluster.thresholds.schema import File, part_of
from pytest_gpucluster.thresholds.specs import FIELD_UNITS, load_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pytest_gpucluster.config.yaml_lines import KeyPath
    from pytest_gpucluster.thresholds.resolve import Profile, Threshold

__all__ = ["Problem", "check", "lint", "schema"]

CLUSTER_UNITS = {"gpus_per_node": "GPUs", "nodes": "nodes", "world_size": "GPUs"}
"""What ``of: cluster...`` may name, with the unit it is in."""
_KEY = re.compile(r"[a-z][a-z0-9_]*(\[[^\[\]]+\])?\Z")
_BOUND_LOWEST, _BOUND_HIGHEST = 0.40, 1.05
_HIGHEST = {"ratio": 1, "%": 100}
_MAY_BE_NEGATIVE = {"C"}


def lint(path: Path | None) -> list[Problem]:
    """Everything wrong with a file (None: the packaged one), in the file's order. Empty when it is good."""
    return check(read_source(path).document)


def schema() -> dict[str, Any]:
    """The JSON schema of a thresholds file, for editors. ``lint`` checks more than a schema can say."""
    return File.model_json_schema(by_alias=True)


def check(document: Document) -> list[Problem]:
    """Everything wrong with a document; an entry of the wrong shape is not looked at further."""
    if document.problems:
        return list(document.problems)
    found, sound = _check_shape(document)
    if sound:
        references = list(_check_profiles(sound))
        found += references or [*_check_entries(sound)]
    return sorted(set(found), key=lambda problem: (problem.file, problem.line, problem.message))


def _check_shape(document: Document) -> tuple[list[Problem], Document | None]:
    """The problems of shape, and the document without the entries that have one (None: nothing to go on with)."""
    try:
        File.model_validate(document.data)
    except ValidationError as error:
        problems = shape_problems(error.errors(), document, part_of=part_of)
        bad = {item["loc"][1] for item in error.errors() if item["loc"][:1] == ("criteria",) and len(item["loc"]) > 1}
        if not all(item["loc"][:1] == ("criteria",) and len(item["loc"]) > 1 for item in error.errors()):
            return problems, None
        criteria = {key: entry for key, entry in document.data["criteria"].items() if key not in bad}
        data = {**document.data, "criteria": criteria}
        return problems, Document(file=document.file, data=data, where=document.where)
    return [], document


def _check_profiles(document: Document) -> Iterator[Problem]:
    """Unknown GPUs and parents, circles, a profile that promises nothing."""
    profiles: Mapping[str | int, Any] = document.data["profiles"]
    specs = load_specs()
    for name, entry in profiles.items():
        path: KeyPath = ("profiles", name)
        parent, gpu = entry.get("inherits"), entry.get("gpu")
        if parent is not None and parent not in profiles:
            hint = did_you_mean(parent, [str(other) for other in profiles])
            known = ", ".join(str(other) for other in profiles)
            text = f"profile {name!r} inherits {parent!r}, which is not a profile. Profiles: {known}.{hint}"
            yield document.problem((*path, "inherits"), text)
        elif parent is not None and profiles[chain_of(profiles, str(name))[0]].get("inherits") in profiles:
            yield document.problem((*path, "inherits"), f"profile {name!r} inherits itself in a circle.")
        if gpu is not None and gpu not in specs:
            text = f"profile {name!r} names the GPU {gpu!r}, which has no spec. Specs: {', '.join(specs)}."
            hint = did_you_mean(gpu, list(specs))
            yield document.problem((*path, "gpu"), f"{text}{hint} To add one: a file in pytest_gpucluster/thresholds/specs.")
        lineage = [profiles[other] for other in chain_of(profiles, str(name))]
        if not any(ancestor.get("gpu") or ancestor.get("rehearsal") for ancestor in lineage):
            yield document.problem(path, f"profile {name!r} has no 'gpu' and is not a rehearsal ('rehearsal: true').")


def _check_entries(document: Document) -> Iterator[Problem]:
    """Every entry as written, then as every profile sees it."""
    profiles = [resolve_profile(document, str(name)) for name in document.data["profiles"]]
    for key, entry in document.data.get("criteria", {}).items():
        as_written = list(_check_written(document, str(key), entry))
        yield from as_written
        if as_written:
            continue
        seen: set[tuple[str, int]] = set()
        for profile in (None, *profiles):
            threshold = resolve(document, str(key), profile=profile)
            if (threshold.file, threshold.line) in seen:
                continue
            for message in _check_resolved(threshold, profile):
                seen.add((threshold.file, threshold.line))
                yield Problem(file=threshold.file, line=threshold.line, message=message)


def _check_written(document: Document, key: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    """What can be said of an entry without a profile."""
    path: KeyPath = ("criteria", key)
    if not _KEY.match(key):
        yield document.problem(path, f"{key!r} cannot be a test's name: small letters, digits, _ and [parameter].")
    yield from _check_limit_keys(document, path, entry, required=True)
    if "measured_with" in entry:
        yield from _check_company(document, key, entry)
    for name, override in entry.get("profiles", {}).items():
        here: KeyPath = (*path, "profiles", name)
        if name not in document.data["profiles"]:
            known = [str(other) for other in document.data["profiles"]]
            text = f"{name!r} is not a profile (in {key!r}). Profiles: {', '.join(known)}.{did_you_mean(name, known)}"
            yield document.problem(here, text)
        yield from _check_limit_keys(document, here, override, required=False)


def _check_company(document: Document, key: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    """``measured_with`` names another entry, the one that has the measurement and tells how long it takes."""
    path: KeyPath = ("criteria", key, "measured_with")
    criteria, other = document.data["criteria"], entry["measured_with"]
    if (other not in criteria and ("criteria", other) not in document.where) or other == key:
        known = [str(one) for one in criteria if one != key]
        text = f"{key!r} is measured with {other!r}, which is no other criterion.{did_you_mean(other, known)}"
        yield document.problem(path, text)
    elif "measured_with" in criteria.get(other, {}):
        owner = criteria[other]["measured_with"]
        yield document.problem(path, f"{other!r} is itself measured with {owner!r}: name that one (in {key!r}).")
    layers = (entry, *entry.get("profiles", {}).values())
    if any(layer.get("takes_s") is not None for layer in layers):
        text = f"'takes_s' belongs to the entry that has the measurement, {other!r}, or the time counts twice (in {key!r})."
        yield document.problem(path, text)


def _check_limit_keys(document: Document, path: KeyPath, entry: Mapping[str, Any], *, required: bool) -> Iterator[Problem]:
    """Exactly one of the four kinds (at most one in an override); references name something that exists."""
    inside = part_of(path).inside
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) > 1:
        lowest, highest = entry.get("min", 0.0), entry.get("max", math.inf)
        nothing = f" Nothing could pass: min {lowest} is above max {highest}." if _exceeds(lowest, highest) else ""
        text = f"one limit only{inside}: found {' and '.join(kinds)}.{nothing}"
        yield document.problem((*path, kinds[1]), text)
    if not kinds and required:
        yield document.problem(path, f"no limit{inside}: one of {', '.join(KINDS)}.")
    if not kinds and not required and "of" in entry:
        yield document.problem((*path, "of"), f"'of' without a limit beside it{inside}: an override replaces both.")
    for name in ("of", "bound", "requires"):
        if entry.get(name) is not None and _unit_of(entry[name]) is None:
            known = [f"gpu.{field}" for field in FIELD_UNITS]
            known += [f"cluster.{field}" for field in CLUSTER_UNITS] if name == "of" else []
            text = f"{name!r} is {entry[name]!r}{inside}. Choose from: {', '.join(known)}."
            yield document.problem((*path, name), text + did_you_mean(entry[name], known))
        elif name != "of" and str(entry.get(name) or "gpu.").startswith("cluster."):
            what = "a bound is physics" if name == "bound" else "what a GPU may lack stands in its spec"
            yield document.problem((*path, name), f"{what}, so of the form gpu.<field>{inside}.")


def _exceeds(lowest: object, highest: object) -> bool:
    """Whether two plain numbers are the wrong way round; tables are not compared."""
    return isinstance(lowest, (int, float)) and isinstance(highest, (int, float)) and lowest > highest


def _unit_of(reference: str) -> str | None:
    """The unit of ``gpu.<field>`` or ``cluster.<field>``; None when there is no such thing."""
    table, _, name = reference.partition(".")
    return {"gpu": FIELD_UNITS, "cluster": CLUSTER_UNITS}.get(table, {}).get(name)


def _check_resolved(threshold: Threshold, profile: Profile | None) -> Iterator[str]:
    """What is wrong with a limit as a profile sees it (None: as written, before any override)."""
    name = repr(threshold.key)
    for number in threshold.numbers.values():
        yield from _check_number(threshold, number)
    for what, reference in (("'of'", threshold.of), ("'bound'", threshold.bound)):
        if reference is not None and _unit_of(reference) != threshold.unit:
            yield f"{name} is in {threshold.unit}, but {what} {reference} is in {_unit_of(reference)}."
            return
    if threshold.bound is not None and threshold.kind in {"below", "max"}:
        yield f"{name}: 'bound' belongs to a floor (above, min), not to a ceiling ({threshold.kind})."
        return
    if profile is not None and threshold.skip is None:
        yield from _check_physics(threshold, profile)


def _check_number(threshold: Threshold, number: float) -> Iterator[str]:
    """A number that no value, or every value, satisfies."""
    limit = f"{threshold.key!r}: '{threshold.kind}: {number}'"
    unit, highest = threshold.unit, _HIGHEST.get(threshold.unit)
    is_part = threshold.of is not None
    if number < 0 and unit not in _MAY_BE_NEGATIVE:
        yield f"{limit} is negative; {unit} never is."
    elif highest is not None and number > highest:
        yield f"{limit} lies outside 0..{highest}, where a value in {unit} is."
    elif number == 0 and unit not in _MAY_BE_NEGATIVE and threshold.kind == "min":
        yield f"{limit} {unit} holds for every value: it is no limit."
    elif number == 0 and unit not in _MAY_BE_NEGATIVE and (threshold.kind == "below" or is_part):
        yield f"{limit} {unit} can hold for no value."
    elif is_part and number > 1 and threshold.kind in {"above", "min"} and str(threshold.of).startswith("cluster."):
        yield f"{limit} of {threshold.of} asks for more than there is."


def _check_physics(threshold: Threshold, profile: Profile) -> Iterator[str]:
    """A floor lies between 40 % and 105 % of its bound (of what it is a part of, when no bound is given)."""
    name, of = repr(threshold.key), threshold.of or ""
    reference = threshold.bound or (of if of.startswith("gpu.") else None)
    if reference is None:
        return
    top: float | None = getattr(profile.spec, reference.removeprefix("gpu."), None)
    if top is None:
        lacking = f"{profile.spec.title} has no {reference}" if profile.spec else "it has no GPU"
        if of.startswith("gpu.") or threshold.bound_waived is None:
            advice = "give a plain number" if of.startswith("gpu.") else "say 'bound_waived: reason' beside the limit"
            yield f"{name} cannot be checked for profile {profile.name!r}: {lacking}. Skip it there or {advice}."
        return
    if threshold.bound_waived is not None or threshold.kind in {"below", "max"}:
        return
    for number in threshold.numbers.values():
        value = number * (threshold.of_value or 1.0)
        share = value / top
        if not _BOUND_LOWEST <= share <= _BOUND_HIGHEST:
            yield (
                f"{name}: {value:g} {threshold.unit} is {100 * share:.0f} % of {reference} = {top:g} "
                f"(profile {profile.name!r}); a floor lies between 40 % and 105 %, or say 'bound_waived: reason'."
            )
