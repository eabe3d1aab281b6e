"""Write docs/limits.md, the limits of every profile in one table, and their digest; ``--check`` only compares the digest."""  # noqa: INP001 -- a script

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_gpucluster.thresholds import released  # noqa: E402 -- from this checkout, installed or not
from pytest_gpucluster.thresholds.limit import Limit  # noqa: E402 -- from this checkout, installed or not
from pytest_gpucluster.thresholds.lint import load  # noqa: E402 -- from this checkout, installed or not

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.thresholds.file import ThresholdsFile
    from pytest_gpucluster.thresholds.resolve import Profile, Threshold

TARGET = ROOT / "docs" / "limits.md"
RESULTS = ROOT / "docs" / "results"
MODEL = re.compile(r"-(?P<model>[a-z]+\d+)x\d")
"""Of the name of a kept run: ``2026-11-23-h200x2-98e5417``."""
COMMAND = "python docs/generate_limits.py"
NO_UNIT = ("count",)
HEAD = f"""\
<!-- Generated from thresholds.yaml by `{COMMAND}`, and not kept in git. -->
# The limits of every profile

From [thresholds.yaml](../thresholds.yaml), which has the reasons, recipes and sources.
[criteria.md](criteria.md) says how to read it. "Measured on" names the GPUs of
[kept runs](results/README.md) that gave a value. Without one a criterion ran on simulated GPUs,
made adapters or CPUs; a page of results may say more.
"""


def page(file: ThresholdsFile) -> str:
    """The whole page as Markdown."""
    profiles = list(file.profiles.values())
    by_profile = {profile.name: file.criteria(profile) for profile in profiles}
    untried = [profile for profile in profiles if profile.spec is not None and profile.spec.is_untried]
    tried = [profile for profile in profiles if profile not in untried]
    lines = [HEAD, *_profiles(profiles), *_limits(tried, by_profile), *_untried_limits(tried[0], untried, by_profile)]
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


def _limits(profiles: Sequence[Profile], by_profile: Mapping[str, Mapping[str, Threshold]]) -> list[str]:
    first = by_profile[profiles[0].name]
    measured = measured_on()
    rows = []
    for key, threshold in first.items():
        limits = [_limit(by_profile[profile.name][key]) for profile in profiles]
        on = ", ".join(sorted(measured[key])) or "no kept run"
        rows.append((f"`{key}`", threshold.per, threshold.level, *limits, _bound(threshold), on))
    headings = ("criterion", "per", "level", *(f"`{profile.name}`" for profile in profiles), "possible", "measured on")
    note = (
        "An advisory limit that is missed is a remark and not a failure. *Possible*: a better value is an\n"
        f"error; shown for `{profiles[0].name}` and 8 GPUs of a node\n"
        "([decision 30](decisions/0030-more-than-the-hardware-can.md))."
    )
    return ["## Limits", "", note, "", *_table(headings, rows), ""]


def _untried_limits(base: Profile, profiles: Sequence[Profile], by_profile: Mapping[str, Mapping[str, Threshold]]) -> list[str]:
    """The limits of GPUs on which nothing ever ran, where one of them differs from the first profile's."""
    rows = []
    for key, threshold in by_profile[base.name].items():
        limits = [_untried(by_profile[profile.name][key]) for profile in profiles]
        if any(limit != _untried(threshold) for limit in limits):
            rows.append((f"`{key}`", *limits))
    headings = ("criterion", *(f"`{profile.name}`" for profile in profiles))
    note = (
        "The other criteria have the limit of `" + base.name + "`. *None*: nobody published a number, so the value is\n"
        "shown and not judged ([decision 25](decisions/0025-nvlink-domains.md))."
    )
    return ["## Limits of GPUs that were never tried", "", note, "", *_table(headings, rows), ""]


def _bound(threshold: Threshold) -> str:
    """The best value that is possible: 8 GPUs in a node, 2 nodes."""
    shape = {"nodes": 2, "gpus_per_node": 8, "world_size": 16}
    bound = threshold.best_possible(gpus={"gpu": 1, "node": 8, "cluster": 16}[threshold.per], cluster=shape)
    if bound is None:
        return "-"
    limit = Limit(kind="max" if bound.is_most else "min", value=round(bound.value, 3), unit=bound.unit)
    return limit.text if not isinstance(threshold.bound, str) else f"{limit.text} (`{threshold.bound}`)"


def _untried(threshold: Threshold) -> str:
    has_none = threshold.skip is None and threshold.numbers == {"any": 0} and threshold.kind == "above"
    return "none" if has_none else _limit(threshold)


def measured_on() -> dict[str, set[str]]:
    """The models of GPUs on which each criterion gave a value, by the kept runs; none for one that never did."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in RESULTS.rglob("summary.json"):
        run, model = json.loads(file.read_text(encoding="utf-8")), MODEL.search(file.relative_to(RESULTS).parts[0])
        if model is None or not run["gpus"]:
            continue
        for key, row in run["criteria"].items():
            if any(value is not None for value in row["values"].values()):
                found[key].add(model["model"].upper())
    return found


def _limit(threshold: Threshold) -> str:
    if threshold.skip is not None:
        return "skipped"
    sizes = {size: _text(threshold, number) for size, number in threshold.numbers.items()}
    shapes = [f", {_plain(threshold, number)} ({shape})" for shape, number in threshold.by_shape.items()]
    advisory = " (advisory)" if threshold.severity == "advisory" else ""
    if list(sizes) == ["any"]:
        return "".join((sizes["any"], *shapes)) + advisory
    return ", ".join(f"{text} ({size if size != 'any' else 'other'} GPUs)" for size, text in sizes.items()) + advisory


def _plain(threshold: Threshold, number: float) -> str:
    return Limit(kind=threshold.kind, value=number, unit=threshold.unit).text


def _text(threshold: Threshold, number: float) -> str:
    text = _plain(threshold, number)
    if threshold.unit in NO_UNIT or threshold.of is not None:
        text = text.removesuffix(f" {threshold.unit}")
    return text if threshold.of is None else f"{text} x {threshold.of}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def main(arguments: Sequence[str]) -> int:
    """Write the page and the digests, or compare the digests: 0 when it is (now) right, 1 when it is not, 2 for wrong usage."""
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write(f"usage: {COMMAND} [--check]\n")
        return 2
    files = sorted((ROOT / "tests_acceptance").glob("*.py"))
    tests = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)
    digest = released.digest_of(released.released_text(released.packaged_files(ROOT / "thresholds.yaml"))) + "\n"
    if not arguments:
        released.DIGEST.write_text(digest, encoding="ascii")
        released.TESTS.write_text(tests, encoding="ascii")
        TARGET.write_text(page(load(None)), encoding="utf-8")
    elif not released.DIGEST.is_file() or released.DIGEST.read_text(encoding="ascii") != digest:
        sys.stderr.write(f"the limits changed and {released.DIGEST.name} did not; if that is meant, run: {COMMAND}\n")
        return 1
    elif not released.TESTS.is_file() or released.TESTS.read_text(encoding="ascii") != tests:
        sys.stderr.write(f"the packaged tests changed and {released.TESTS.name} did not; if that is meant, run: {COMMAND}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
