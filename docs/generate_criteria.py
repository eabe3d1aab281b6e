"""Write docs/criteria.md from the packaged thresholds.yaml; with ``--check``, fail when the page is stale."""  # noqa: INP001 -- a script

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_gpucluster.thresholds.limit import Limit  # noqa: E402 -- from this checkout, installed or not
from pytest_gpucluster.thresholds.load import load  # noqa: E402 -- from this checkout, installed or not

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpucluster.thresholds.load import ThresholdsFile
    from pytest_gpucluster.thresholds.resolve import Profile, Threshold

TARGET = ROOT / "docs" / "criteria.md"
COMMAND = "python docs/generate_criteria.py"
NO_UNIT = ("count",)
HEAD = f"""\
<!-- Generated from thresholds.yaml by `{COMMAND}`. Change the file, then run it again. -->
# The criteria

What `pytest tests_acceptance` judges, and by which numbers. The same as in [thresholds.yaml](../thresholds.yaml), whose
format is in [thresholds.md](thresholds.md); how a criterion is added is in [writing-a-criterion.md](writing-a-criterion.md).
A limit and its recipe belong together: another size, another statistic, another number. Each source says on which
hardware its number was seen, and where it never was.
"""


def page(file: ThresholdsFile) -> str:
    """The whole page as Markdown."""
    profiles = list(file.profiles.values())
    by_profile = {profile.name: file.criteria(profile) for profile in profiles}
    lines = [HEAD, *_profiles(profiles), *_overview(profiles, by_profile)]
    for key in by_profile[profiles[0].name]:
        lines += _criterion({name: criteria[key] for name, criteria in by_profile.items()})
    return "\n".join(lines).rstrip() + "\n"


def _profiles(profiles: Sequence[Profile]) -> list[str]:
    rows = [
        (
            f"`{profile.name}`",
            profile.spec.title if profile.spec else "none",
            profile.fabric,
            "never: it is a rehearsal" if profile.rehearsal else profile.accept_at,
            f"{profile.nodes} x {profile.gpus_per_node}" if profile.nodes and profile.gpus_per_node else "not fixed",
            profile.spec.seen if profile.spec else "-",
        )
        for profile in profiles
    ]
    headings = ("profile", "GPU", "between nodes", "accepted at level", "nodes x GPUs", "GPU was run")
    return ["## Profiles", "", *_table(headings, rows), ""]


def _overview(profiles: Sequence[Profile], by_profile: Mapping[str, Mapping[str, Threshold]]) -> list[str]:
    first = by_profile[profiles[0].name]
    rows = []
    for key, threshold in first.items():
        limits = [_limit(by_profile[profile.name][key]) for profile in profiles]
        rows.append((f"[`{key}`](#{_anchor(key)})", threshold.per, threshold.level, *limits))
    headings = ("criterion", "per", "level", *(f"`{profile.name}`" for profile in profiles))
    return ["## Limits", "", *_table(headings, rows), ""]


def _criterion(by_profile: Mapping[str, Threshold]) -> Iterator[str]:
    """One entry: the sentence, when it applies, then limit, recipe, reason and source, once for all that share them."""
    names = list(by_profile)
    first = by_profile[names[0]]
    yield from (f"## `{first.key}`", "", first.criterion, "")
    rules = [f"{first.needs} GPUs that work together"] if first.needs > 1 else []
    rules += [f"{first.needs_nodes} nodes"] if first.needs_nodes > 1 else []
    if rules:
        yield f"Needs {' and '.join(rules)}; with fewer it is skipped by rule."
        yield ""
    if first.requires is not None:
        yield f"Requires `{first.requires}`; a GPU without it in its spec is skipped by rule."
        yield ""
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, threshold in by_profile.items():
        shared.setdefault(_body(threshold), []).append(name)
    for body, owners in shared.items():
        if len(shared) > 1:
            yield f"For {', '.join(f'`{name}`' for name in owners)}:"
            yield ""
        yield from (*body, "")


def _body(threshold: Threshold) -> tuple[str, ...]:
    if threshold.skip is not None:
        return (f"- skipped: {threshold.skip}",)
    lines = [f"- limit: {_limit(threshold)}{_advisory(threshold)}"]
    if threshold.recipe:
        lines.append(f"- recipe: {', '.join(f'`{name}: {_plain(value)}`' for name, value in threshold.recipe.items())}")
    if threshold.deadline_s is not None:
        lines.append(f"- deadline: {threshold.deadline_s:g} s")
    return (*lines, f"- why: {_line(threshold.why)}", f"- source: {_line(threshold.source)}")


def _limit(threshold: Threshold) -> str:
    if threshold.skip is not None:
        return "skipped"
    sizes = {
        size: Limit(kind=threshold.kind, value=number, unit=threshold.unit).text for size, number in threshold.numbers.items()
    }
    if threshold.unit in NO_UNIT:
        sizes = {size: text.removesuffix(f" {threshold.unit}") for size, text in sizes.items()}
    if threshold.of is not None:
        sizes = {size: f"{text.removesuffix(f' {threshold.unit}')} x {threshold.of}" for size, text in sizes.items()}
    if list(sizes) == ["any"]:
        return sizes["any"]
    return ", ".join(f"{text} ({size if size != 'any' else 'other'} GPUs)" for size, text in sizes.items())


def _advisory(threshold: Threshold) -> str:
    return " (advisory: a miss is a remark)" if threshold.severity == "advisory" else ""


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _line(text: str) -> str:
    return " ".join(text.split())


def _anchor(key: str) -> str:
    """The heading's anchor as GitHub makes it: small letters, no punctuation."""
    return re.sub(r"[^\w\- ]", "", key.lower()).replace(" ", "-")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def main(arguments: Sequence[str]) -> int:
    """Write the page, or compare it: 0 when it is (now) fresh, 1 when it is stale, 2 for wrong usage."""
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write(f"usage: {COMMAND} [--check]\n")
        return 2
    text = page(load(None))
    if arguments and (not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text):
        sys.stderr.write(f"{TARGET.name} does not agree with thresholds.yaml; run: {COMMAND}\n")
        return 1
    if not arguments:
        TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
