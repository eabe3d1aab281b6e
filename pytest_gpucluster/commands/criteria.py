"""``gpucluster show CRITERION``, ``run CRITERION``, ``plan``, ``audit``, ``demo``: criteria, by the suite's own pytest."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.text import Text

from pytest_gpucluster.commands.arguments import EXAMPLE, FORM, read_arguments
from pytest_gpucluster.commands.info_tables import Shown, pairs, print_parts
from pytest_gpucluster.commands.launch import SUITE
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.fleet.simulation import parse_simulation, require_model
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.records.reading import place_of, read_results, rows_of
from pytest_gpucluster.text import one_line
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.limit import SIGNS, Limit
from pytest_gpucluster.thresholds.lint import load
from pytest_gpucluster.thresholds.resolve import Threshold

AUDIT_DIR = "gpucluster-audit"
"""Where the results of an audit lie: never among those of whole runs."""
DEMO_DIR = "gpucluster-demo"
RESULTS_DIR = "gpucluster-run"
"""Where the results of a demo, and of one criterion, lie: never among those of whole runs."""
MOST_NAMED = 4
"""Criteria that begin with what was typed."""
NAMED_PER = {"gpu": "GPU", "node": "node", "cluster": "run"}


def keys_of(name: str, known: Sequence[str]) -> list[str]:
    """The criterion, or all criteria of a family: ``busbw`` for each ``busbw[...]``; none where nothing is called so."""
    return [key for key in known if key == name] or [key for key in known if key.partition("[")[0] == name]


def is_criterion(name: str) -> bool:
    """Whether a packaged criterion, or a family of them, is called so."""
    return bool(keys_of(name, [*load(None).content.criteria]))


def may_be_criterion(name: str) -> bool:
    """Whether what is to be run can be a criterion, perhaps misspelt. A function has a colon, a file a path."""
    return bool(name) and not {":", "/"} & {*name.partition("[")[0]} and not name.endswith(".py")


def show(name: str, *, limits: Path | None = None) -> int:
    """Print what a criterion asks, why, by which recipe, and its limit in each profile.

    Raises:
        ConfigurationError: no criterion is called so, or the file of limits is wrong.
    """
    file = load(limits)
    keys = _known(name, file, otherwise=f"there is no criterion {name!r}, and no results directory.")
    print_parts(part for key in keys for part in (Text(""), *_about(key, file)))
    return 0


def _known(name: str, file: ThresholdsFile, *, otherwise: str) -> list[str]:
    known = [*file.content.criteria]
    keys = keys_of(name, known)
    if not keys:
        begun = [key for key in known if name and key.startswith(name)][:MOST_NAMED]
        hint = f" Did you mean {' or '.join(map(repr, begun))}?" if begun else did_you_mean(name, known)
        raise ConfigurationError(otherwise + (hint or " 'gpucluster plan --fleet 2x8' lists criteria."))
    return keys


def _about(key: str, file: ThresholdsFile) -> list[Shown]:
    entry = file.criteria(None)[key]
    recipe = ", ".join(f"{one} {_written(value)}" for one, value in entry.recipe.items())
    takes = f", about {entry.takes_s:g} s" if entry.takes_s else ""
    known = {
        "limit": _limit(entry),
        "judged": f"once per {NAMED_PER.get(entry.per, entry.per)}, from level {entry.level} on{takes}",
        "noise": f"{100 * entry.noise:g} % between repeats" if entry.noise else "",
        "recipe": recipe,
        "measured": f"with {entry.measured_with}" if entry.measured_with else "",
        "why": entry.why,
        "source": entry.source,
        "ids": ", ".join(entry.ids),
        "written": f"{Path(entry.file).name}:{entry.line}",
        "run it": f"gpucluster run {shlex.quote(key)}",
    }
    limits = ((name, file.criteria(profile)[key]) for name, profile in file.profiles.items())
    alike = grouped((f"does not apply: {one.skip}" if one.skip else _limit(one), name) for name, one in limits)
    named = {", ".join(names) if len(alike) > 1 else "all": limit for limit, names in alike.items()}
    return [
        Text(f"{key}: {one_line(entry.criterion)}", style="bold"),
        pairs([(caption, one_line(str(text))) for caption, text in known.items() if text]),
        Text(""),
        Text("limit by profile", style="bold"),
        pairs([(names, one_line(limit)) for names, limit in named.items()]),
    ]


def _limit(entry: Threshold) -> str:
    """``> 700 TFLOPS``, by number of GPUs where that decides; what asks for any value judges nothing."""
    written = f"{entry.written_limit.replace(entry.kind, SIGNS[entry.kind], 1)} {entry.unit}"
    written += ", by number of GPUs" if len(entry.numbers) > 1 else ""
    is_none = all(Limit(kind=entry.kind, value=one, unit=entry.unit).is_none for one in entry.numbers.values())
    return f"{written}: measured, not judged" if is_none and not entry.by_shape else written


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else str(value)


# --- One criterion, measured and judged ---


def run(chosen: argparse.Namespace) -> int:
    """Measure and judge one criterion, or a family, by its recipe; the exit code is that of the run.

    Arguments ``key=value`` take the place of those of the recipe, in a file of limits that is removed afterwards.

    Raises:
        ConfigurationError: no such criterion, a key that its recipe does not have, or an option that its recipe decides.
    """
    file = load(None)
    no_function = f"{chosen.function!r} is no criterion, and names no function; {FORM}, for example {EXAMPLE}."
    keys = _known(chosen.function, file, otherwise=no_function)
    if all(file.content.criteria[key].level == "soak" for key in keys):
        say = f"pytest {' '.join(SUITE)} --gpucluster-level soak:10m -k {chosen.function.partition('[')[0]}"
        raise ConfigurationError(f"{chosen.function} is judged over a soak alone; say {say}")
    if chosen.per != "gpu" or chosen.deadline_s is not None:
        raise ConfigurationError(f"--per and --deadline-s are for a function; the recipe of {chosen.function} decides them")
    places = [word for word in chosen.place if "=" not in word]
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SUITE, "-k", _expression(keys, places, file)]
    words += [f"--gpucluster-results={RESULTS_DIR}"]
    words += ["--gpucluster-profile=rehearsal"] if chosen.device == "cpu" else []
    words += [f"--gpucluster-expect={chosen.expect}"] if chosen.expect else []
    words += ["--gpucluster-inline"] if chosen.inline else []
    changed = read_arguments([*chosen.words, *(word for word in chosen.place if "=" in word)])
    with tempfile.TemporaryDirectory(prefix="gpucluster-run-") as folder:
        if changed:
            words.append(f"--gpucluster-thresholds={_with_recipe(Path(folder), keys, changed, file)}")
        sys.stdout.flush()
        code = subprocess.call(words, stdout=sys.stderr if chosen.json else None)  # noqa: S603 -- this very interpreter
    if chosen.json and code in (0, 1):
        values = [
            row for row in rows_of(read_results(Path(RESULTS_DIR))) if row["criterion"] in keys and row["value"] is not None
        ]
        print_values(values, is_family=len(keys) > 1)
    return code


def print_values(rows: Sequence[Mapping[str, Any]], *, is_family: bool) -> None:
    """The values as one JSON object by place id, of a family by criterion first; the whole cluster is ``cluster``."""
    found: dict[str, Any] = {}
    for row in rows:
        of_one = found.setdefault(row["criterion"], {}) if is_family else found
        of_one[place_of(row) or "cluster"] = {name: row[name] for name in ("value", "unit", "outcome")}
    sys.stdout.write(json.dumps(found, indent=1, allow_nan=False) + "\n")


def _expression(keys: Sequence[str], places: Sequence[str], file: ThresholdsFile) -> str:
    """What ``-k`` needs to select the tests of these criteria, and of no criterion whose name begins alike."""
    head, _, inner = keys[0].partition("[")
    every = dict.fromkeys(key.partition("[")[0] for key in file.content.criteria)
    terms = [f"test_{head}", *(f"not test_{other}" for other in every if other != head and other.startswith(head))]
    terms += [inner] if inner and len(keys) == 1 else []
    terms += [f"({' or '.join(places)})"] if places else []
    return " and ".join(terms)


def _with_recipe(folder: Path, keys: Sequence[str], changed: Mapping[str, Any], file: ThresholdsFile) -> Path:
    """A file of limits in which these recipes have other values, in each profile: some have recipes of their own."""
    entries = file.criteria(None)
    for key in keys:
        unknown = [name for name in changed if name not in entries[key].recipe]
        if unknown:
            known = ", ".join(entries[key].recipe) or "nothing"
            raise ConfigurationError(f"the recipe of {key} has no {', '.join(unknown)}; it has {known}")
        for name, value in changed.items():
            usual = _kind(entries[key].recipe[name])
            if {usual, _kind(value)} - {usual, ""} and usual:
                raise ConfigurationError(f"{name}={value}: the recipe of {key} has {usual} there, not {_kind(value)}")
    path = folder / "thresholds.yaml"
    ours = {"profiles": {name: {"recipe": dict(changed)} for name in file.profiles}}
    content = {"extends": "packaged", "criteria": dict.fromkeys(keys, ours)}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def _kind(value: Any) -> str:
    """What a value of a recipe is; nothing where another kind may take its place."""
    kinds = {"yes or no": bool, "a number": (int, float), "a list": (list, tuple), "a word": str}
    return next((word for word, one in kinds.items() if isinstance(value, one)), "")  # type: ignore[arg-type]


# --- What would run here, what needs no load, and a fleet that is not here ---


def plan(chosen: argparse.Namespace) -> int:
    """Become a pytest that collects, prints what would run here or on a fleet of that shape, and measures nothing.

    Raises:
        ConfigurationError: a shape or a profile that is not understood.
    """
    words = ["-p", "pytest_gpucluster.plugin.plan_only", *_fleet(chosen), "--collect-only", "-qq"]
    _become_pytest([*words, *SUITE, *chosen.beyond])


def audit(chosen: argparse.Namespace) -> int:
    """Become a pytest that judges what only needs to be read: no load, no root, beside jobs; it never accepts.

    Raises:
        ConfigurationError: a shape or a profile that is not understood.
    """
    words = [*_fleet(chosen), *SUITE, "--gpucluster-audit", f"--gpucluster-results={AUDIT_DIR}"]
    _become_pytest([*words, *chosen.beyond])


def demo(chosen: argparse.Namespace) -> NoReturn:
    """Become a pytest that runs the suite on a simulated fleet, for a look at what a run prints and writes.

    Raises:
        ConfigurationError: a shape, a fault or a profile that cannot be simulated.
    """
    fleet = _fleet(chosen, seed=chosen.seed, faults=chosen.bad)
    again = shlex.join(["gpucluster", *chosen.typed, "--", *chosen.beyond])
    planted = [f"--fleet-seed={chosen.seed}", *(f"--fleet-bad={fault}" for fault in chosen.bad), f"--fleet-command={again}"]
    _become_pytest([*fleet, *planted, f"--gpucluster-results={DEMO_DIR}", *SUITE, *chosen.beyond])


def _fleet(chosen: argparse.Namespace, *, seed: int = 0, faults: Sequence[str] = ()) -> list[str]:
    """The arguments for a simulated fleet, where one is asked for."""
    if chosen.fleet is None:
        return []
    parse_simulation(chosen.fleet, seed=seed, faults=[*faults])
    require_model(chosen.profile)
    return ["-p", "pytest_gpucluster.plugin.fleet", f"--fleet={chosen.fleet}", f"--gpucluster-profile={chosen.profile}"]


def _become_pytest(words: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    os.execv(command[0], command)  # noqa: S606 -- this very interpreter
