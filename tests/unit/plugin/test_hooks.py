"""Each hook of pytest has one file, so that a reader finds in one place what happens there, in order."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.plugin import options
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = REPOSITORY / "pytest_gpucluster" / "plugin"
APART = {
    "xdist.py": "processes of pytest-xdist, which other projects and most runs do not have",
    "fleet.py": "a plugin of its own, loaded by `gpucluster demo` alone",
    "plan_only.py": "a plugin of its own, loaded by `gpucluster plan` alone",
}
TWICE = {
    "pytest_collection": "options.py has a hint for every command line; collection.py belongs to a run",
    "pytest_collection_modifyitems": "options.py starts a run that nothing asked for; collection.py belongs to a run",
    "pytest_runtest_protocol": "second_chance.py runs a test in place of pytest; phases.py is round that",
    "pytest_runtest_setup": "second_chance.py ends what is measured again; phases.py says whether a test begins",
    "pytest_runtestloop": "run.py has what comes before the first test, second_chance.py what comes after the last one",
    "pytest_sessionstart": "all_tests.py is there in every project; run.py belongs to a run",
}


def files_by_hook(folder: Path) -> dict[str, set[str]]:
    """The files that implement each hook, by a function of its name or by ``specname``."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in folder.glob("*.py"):
        for function in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)):
            named = [
                word.value.value
                for decorator in function.decorator_list
                if isinstance(decorator, ast.Call)
                for word in decorator.keywords
                if word.arg == "specname" and isinstance(word.value, ast.Constant)
            ]
            if function.name.startswith("pytest_"):
                found[str(named[0]) if named else function.name].add(file.name)
    return found


def test_one_file_for_one_hook() -> None:
    """But for what is there in every project, or in other processes."""
    hooks = files_by_hook(PLUGIN)
    assert len(hooks) > 15
    shared = {hook for hook, files in hooks.items() if len(files - {*APART}) > 1}
    assert shared == {*TWICE}


def test_a_second_file_is_found(tmp_path: Path) -> None:
    """The check above sees a hook by name and by ``specname``."""
    (tmp_path / "a.py").write_text("class A:\n    def pytest_runtest_call(self): ...\n")
    (tmp_path / "b.py").write_text('@hookimpl(specname="pytest_runtest_call")\ndef pytest_other(): ...\n')
    assert files_by_hook(tmp_path) == {"pytest_runtest_call": {"a.py", "b.py"}}


@pytest.mark.parametrize("file", APART)
def test_what_is_apart_exists(file: str) -> None:
    """An exception that is not needed goes."""
    assert any(file in files for files in files_by_hook(PLUGIN).values())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("file or directory not found: tests_acceptance", "tests_acceptance"),
        ("file or directory not found: ./tests_acceptance/", "tests_acceptance"),
        ("file or directory not found: tests_acceptance/test_compute.py", "tests_acceptance.test_compute"),
        (
            "file or directory not found: tests_acceptance/test_compute.py::test_bf16_tflops",
            "tests_acceptance.test_compute::test_bf16_tflops",
        ),
        ("file or directory not found: my_tests_acceptance", None),
        ("file or directory not found: elsewhere/test_a.py", None),
    ],
)
def test_the_suite_outside_a_checkout_is_named(text: str, name: str | None) -> None:
    """As ``--pyargs`` takes it: the first mistake that everybody makes."""
    assert options.packaged_name(text) == name
