"""``gpucluster lint``: everything wrong with thresholds files, and what they say without effect. Nothing is run."""

from __future__ import annotations

import argparse
import json
import sys
from difflib import SequenceMatcher
from pathlib import Path

from pytest_gpucluster.commands.arguments import PARAMETER_FIRST, TestsOfFile, judges, read_tests, tests_beside
from pytest_gpucluster.config.schema_errors import closest, did_you_mean
from pytest_gpucluster.config.yaml_lines import Problem
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds import no_effect, versions
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.layers import packaged_path
from pytest_gpucluster.thresholds.lint import check
from pytest_gpucluster.thresholds.schema import File

_ONE_LETTER = 0.85
"""difflib's ratio: ``bf16_tflopz`` is 0.91 from ``bf16_tflops``."""


def main(chosen: argparse.Namespace) -> int:
    """Check each file; the exit code, 1 where one has a problem.

    Raises:
        ConfigurationError: a path of ``--tests`` is absent or no Python; or two files have waivers.
    """
    if chosen.schema:
        sys.stdout.write(json.dumps(File.model_json_schema(by_alias=True), indent=1) + "\n")
        return 0
    named = [] if chosen.tests is None else read_tests(chosen.tests)
    checks = [_lint(path, named, has_tests=chosen.tests is not None) for path in chosen.files or [packaged_path()]]
    return 0 if all(checks) else 1


def _lint(path: Path, named: list[TestsOfFile], *, has_tests: bool) -> bool:
    """Print what is to say of one file, and of the waivers of a run with it; whether there is no problem."""
    if path.name == waivers.NAME:
        sys.stdout.write(f"{path}: waivers are checked with the limits of their run: gpucluster lint [FILE of limits]\n")
        return False
    file, problems = check(path)
    remarks: list[Problem] = []
    if file is not None and not problems:
        problems, remarks = no_effect.problems(file), no_effect.remarks(file)
        remarks += versions.remarks_of(file.content.versions, file.document)
        is_problem = has_tests or _is_about_the_suite(file)
        for one, name in _without_test(file, named):
            (problems if is_problem or _is_near(name, file) else remarks).append(one)
        waived = waivers.find(path, Path.cwd())
        problems += waivers.check(waived, criteria=file.criteria(None))[1] if waived is not None else ()
    own = {one.message for one in problems if one.file == str(path)}
    problems = [one for one in problems if one.file == str(path) or one.message not in own]
    for one in sorted({*problems, *remarks}, key=lambda one: (one.file, one.line, one.message)) if file else problems:
        sys.stdout.write(f"{one}\n")
    if not problems:
        count = f", {counted(len(remarks), 'remark')}" if remarks else ""
        sys.stdout.write(f"{path}: no problems{count}\n")
    return not problems


def _without_test(file: ThresholdsFile, named: list[TestsOfFile]) -> list[tuple[Problem, str]]:
    """The entries that no test judges, with their names. Each packaged entry has a test in the packaged suite."""
    own = [key for key in file.content.criteria if key not in file.packaged.content.criteria]
    own = [key for key in own if not ("[" in key and key.partition("[")[0] in PARAMETER_FIRST)]
    tests = [*named, *tests_beside(file.path, own)] if own else []
    others = f", nor one of {counted(len(tests), 'other test file')}" if tests else ""
    return [(_untested(file, key, others), key) for key in own if not any(judges(one, key) for one in tests)]


def _untested(file: ThresholdsFile, key: str, others: str) -> Problem:
    hint = did_you_mean(key, list(file.packaged.content.criteria))
    how = "Name the files or folders of its test: gpucluster lint FILE --tests PATH ..."
    text = f"no test judges {key!r}: none of the packaged suite{others}.{hint} {how}"
    return file.document.problem(("criteria", key), text)


def _is_about_the_suite(file: ThresholdsFile) -> bool:
    """Whether the file judges the packaged suite. A file of other entries alone may have its tests anywhere."""
    return not file.content.criteria.keys().isdisjoint(file.packaged.content.criteria)


def _is_near(key: str, file: ThresholdsFile) -> bool:
    """Whether an entry is called like a packaged one but for a letter or two."""
    near = closest(key, list(file.packaged.content.criteria))
    return bool(near) and SequenceMatcher(None, key, near[0]).ratio() >= _ONE_LETTER
