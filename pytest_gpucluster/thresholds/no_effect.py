"""What a thresholds file says without effect, because a packaged override, a child profile or a skip wins over it.

Only what the file itself says is looked at, never a layer of the packaged file. Text that judges nothing (``why``) counts
as little as a value that the winner has too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem, Where
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.layers import OLD_NEEDS, Statement, layer, merge
from pytest_gpucluster.thresholds.resolve import CANNOT_CHANGE_AN_OUTCOME, Profile
from pytest_gpucluster.thresholds.schema import ProfileTerms
from pytest_gpucluster.thresholds.specs import load_specs

REHEARSAL = "rehearsal"


class _Fate(NamedTuple):
    """What becomes of one statement of the file for one profile.

    ``loses_to`` says which line wins, None where the statement has effect. ``is_meant``: the same file has both, one below the
    other, as layers are written.
    """

    said: Statement
    profile: str
    loses_to: str | None
    is_meant: bool


def remarks(file: ThresholdsFile) -> list[Problem]:
    """What has no effect for some profile though another file has the last word, for the profiles that a run may take.

    These are the profiles that GPUs choose and those that the file writes. A rehearsal judges no limit, and is left out.
    """
    specs = load_specs()
    own = [name for name in file.profiles if _is_own(file, ("profiles", name))]
    taken = [one for one in file.profiles.values() if not one.rehearsal and one.name in {*specs, *own}]
    lost = _by_path(fate for profile in taken for fate in _lost(file, profile))
    found = [_never_chosen(file, name) for name in _taken_by_name_only(file)]
    return _sorted([*found, *(_remark(file, fates) for fates in lost), *_deprecated(file)])


def _deprecated(file: ThresholdsFile) -> Iterator[Problem]:
    for path in file.document.where:
        match path:
            case ("criteria", _, old) | ("criteria", _, "profiles", _, old) if old in OLD_NEEDS and _is_own(file, path):
                text = f"{old!r} is deprecated: write 'needs: {{{OLD_NEEDS[str(old)]}: ...}}' (in {str(path[1])!r})."
                yield file.document.problem(path, text)


def remarks_of_run(file: ThresholdsFile, profile: Profile) -> list[Problem]:
    """What has no effect on a run with this profile though another file has the last word, or another profile was taken."""
    found = []
    for name in _taken_by_name_only(file):
        if name not in profile.chain:
            other = f"profile {name!r} is not the profile of this run, {profile.name}"
            text = f"no effect: {other}; say --gpucluster-profile {name}."
            found.append(file.document.problem(("profiles", name), text))
    return _sorted([*found, *(_remark(file, [fate]) for fate in _lost(file, profile))])


def problems(file: ThresholdsFile) -> list[Problem]:
    """What an entry or its override says and no profile uses, whichever file wins."""
    fates = _by_path(fate for profile in file.profiles.values() for fate in _criteria_fates(file, profile))
    return _sorted(_dead(file.document, of_one) for of_one in fates if all(fate.loses_to for fate in of_one))


def _by_path(fates: Iterable[_Fate]) -> list[list[_Fate]]:
    """The fates of each statement together."""
    return [*grouped((fate.said.path, fate) for fate in fates).values()]


def _sorted(found: Iterable[Problem]) -> list[Problem]:
    return sorted(set(found), key=lambda one: (one.file, one.line, one.message))


def _dead(document: Document, fates: list[_Fate]) -> Problem:
    winners = grouped((fate.loses_to, fate.profile) for fate in fates)
    losses = "; ".join(f"{winner} for {', '.join(profiles)}" for winner, profiles in winners.items())
    return document.problem(fates[0].said.path, f"no effect for any profile: {losses} ({_described(fates[0].said)}).")


def _lost(file: ThresholdsFile, profile: Profile) -> Iterator[_Fate]:
    """The fates of what has no effect for a profile, and is not meant to have none."""
    for fate in (*_terms_fates(file, profile), *_criteria_fates(file, profile)):
        if fate.loses_to is not None and not fate.is_meant:
            yield fate


def _remark(file: ThresholdsFile, fates: list[_Fate]) -> Problem:
    """One thing that has no effect: what wins over it for the first of these profiles, and for which others it is so too."""
    first, *others = fates
    is_entry = first.said.path[0] == "criteria" and str(first.loses_to).endswith("overrides it")
    advice = f" Write yours under 'profiles: {{{first.profile}: ...}}'." if is_entry else ""
    profiles = dict.fromkeys(fate.profile for fate in others if fate.profile != first.profile)
    more = f" So it is for {', '.join(profiles)}." if profiles else ""
    text = f"no effect for profile {first.profile}: {first.loses_to} ({_described(first.said)}).{advice}{more}"
    return file.document.problem(first.said.path, text)


def _described(said: Statement) -> str:
    match said.path:
        case ("criteria", key, "profiles", profile, *_):
            return f"{said.name!r} in {key!r}, profile {profile!r}"
        case ("criteria", key, *_):
            return f"{said.name!r} in {key!r}"
        case ("profiles", profile, "rules", rule, *_):
            return f"{said.name!r} in rule {rule!r} of profile {profile!r}"
        case _:
            return f"{said.name!r} in profile {said.path[1]!r}"


def _never_chosen(file: ThresholdsFile, name: str) -> Problem:
    text = f"profile {name!r} is taken with --gpucluster-profile {name} only: no GPU has a spec of that name."
    return file.document.problem(("profiles", name), text)


def _taken_by_name_only(file: ThresholdsFile) -> list[str]:
    """The file's own profiles that no GPU chooses, and that no profile inherits which a GPU chooses."""
    chosen = {REHEARSAL, *load_specs()} & {*file.profiles}
    used = {ancestor for name in chosen for ancestor in file.profiles[name].chain} | {*file.packaged.content.profiles}
    return [name for name in file.profiles if name not in used and _is_own(file, ("profiles", name))]


def _is_own(file: ThresholdsFile, path: KeyPath) -> bool:
    """Whether the file itself has this key. The packaged file means its layers as they are, so none of them counts."""
    where = file.document.where.get(path)
    return not file.is_packaged and where is not None and where.file == file.document.file


def _terms_fates(file: ThresholdsFile, profile: Profile) -> Iterator[_Fate]:
    """Fates of the terms of a profile: a child's wins over its parent's, and the cluster section over a shape."""
    own = ProfileTerms.model_fields.keys() - {"inherits"}
    written = {name: file.content.profiles[name].written() for name in profile.chain}
    layers = [layer(("profiles", name), {term: terms[term] for term in own & terms.keys()}) for name, terms in written.items()]
    shape = {name: getattr(file.cluster, name) for name in ("nodes", "gpus_per_node")}
    layers.append(layer(("cluster",), {name: value for name, value in shape.items() if value is not None}))
    yield from _fates(file, profile, merge(layers))


def _criteria_fates(file: ThresholdsFile, profile: Profile) -> Iterator[_Fate]:
    """Fates of what entries, their overrides and the rules for them say."""
    thresholds = file.criteria(profile)
    for key, said in file.said(profile).items():
        skip = thresholds[key].skip
        if skip is None:
            yield from _fates(file, profile, said)
            continue
        yield from _fates(file, profile, {topic: said[topic] for topic in said if topic == "skip"})
        written = said["skip"][-1] if "skip" in said and said["skip"][-1].value is not None else None
        loses_to = f"it {skip}" if written is None else f"{_shown(file.document.find(written.path))} skips it"
        is_meant = _is_own(file, said["requires"][-1].path if written is None else written.path)
        for one in (one for topic in said if topic != "skip" for one in said[topic] if _counts(file, one)):
            yield _Fate(one, profile.name, None if is_meant else loses_to, is_meant)


def _fates(file: ThresholdsFile, profile: Profile, said: Mapping[str, list[Statement]]) -> Iterator[_Fate]:
    """Fates of the file's own statements: of each topic the last one wins."""
    for statements in said.values():
        winner = statements[-1]
        for one in (one for one in statements if _counts(file, one)):
            if one is winner or one.value == winner.value:
                yield _Fate(one, profile.name, None, is_meant=True)
            else:
                loses_to = f"{_shown(file.document.find(winner.path))} overrides it"
                is_meant = _is_own(file, winner.path) and winner.path[0] != "cluster"
                yield _Fate(one, profile.name, loses_to, is_meant)


def _counts(file: ThresholdsFile, said: Statement) -> bool:
    """Whether a statement is the file's own, and can change an outcome."""
    return said.name not in CANNOT_CHANGE_AN_OUTCOME and _is_own(file, said.path)


def _shown(where: Where) -> str:
    return f"{Path(where.file).name}:{where.line}"
