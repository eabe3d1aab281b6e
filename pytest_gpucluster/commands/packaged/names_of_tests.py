"""The tests in Python files by name, found in their source. No file is imported, so nothing runs and no torch is loaded."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pytest_gpucluster.errors import ConfigurationError

SUITE = "tests_acceptance"
PARAMETER_FIRST = ("dcgm_diag",)
"""Tests whose ids have the parameter before the place."""
MAX_DEPTH, MAX_FILES = 3, 200
"""How far test files are looked for below the folder of a thresholds file."""
_NO_WAY_TO_CRITERION = {"self", "place", "node", "cluster", "recipe", "soak", "process_group", "rank", "world_size", "device"}
_PACKAGES = {"site-packages", "node_modules", "venv", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgingTests:
    """The tests of one file that may judge: the ids of their parameters by name without ``test_``.

    An empty set stands for a test without parameters, None for parameters that the source does not have as text.
    """

    parameters: Mapping[str, frozenset[str] | None]

    def judges(self, key: str) -> bool:
        """Whether one of the tests judges the entry ``key``, such as ``busbw[all_reduce]``."""
        name, _, parameter = key.removesuffix("]").partition("[")
        if name not in self.parameters:
            return False
        known = self.parameters[name]
        return known is None or (parameter in known if parameter else not known)


def read_tests(paths: Iterable[Path]) -> list[JudgingTests]:
    """The tests of the named files, and of the test files below the named folders.

    Raises:
        ConfigurationError: no such file or folder, or no Python.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"--tests: there is no file or folder {path}")
        for file in _test_files(path, depth=100, most=100_000) if path.is_dir() else [path]:
            names = _read(file)
            if names is None:
                raise ConfigurationError(f"--tests: {file} is not Python that can be read")
            found.append(names)
    return found


@lru_cache(maxsize=1)
def _suite() -> dict[str, Path]:
    """The file of each test of the packaged suite, by the test's name without ``test_``."""
    spec = importlib.util.find_spec(SUITE)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("test_*.py"))
    return {name: file for file in files for found in read_tests([file]) for name in found.parameters}


def file_in_suite(name: str) -> Path:
    """The file of the packaged suite that has the test of a criterion, by its name without parameter."""
    return _suite()[name]


def nodeid_in_suite(key: str, place: str | None, *, root: Path) -> str:
    """The node id that pytest gives to the packaged test of a criterion at a place, started in ``root``."""
    name, _, parameter = key.removesuffix("]").partition("[")
    if name not in _suite():  # an entry of one's own, whose test only pytest finds
        return f"{key}[{place}]" if place is not None else key
    file = file_in_suite(name)
    address = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
    parts = [part for part in (place, parameter) if part]
    ids = "-".join(reversed(parts) if name in PARAMETER_FIRST else parts)
    return f"{address}::test_{name}" + (f"[{ids}]" if ids else "")


def tests_beside(path: Path) -> list[JudgingTests]:
    """The tests of the test files in the folder of a thresholds file, and a little below it. What is no Python is left out."""
    files = _test_files(path.absolute().parent, depth=MAX_DEPTH, most=MAX_FILES)
    return [names for names in map(_read, files) if names is not None]


def _test_files(folder: Path, *, depth: int, most: int) -> list[Path]:
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        below = len(Path(here).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if below < depth and name not in _PACKAGES and not name.startswith("."))
        found += [Path(here, name) for name in sorted(files) if _is_test_file(name)]
        if len(found) >= most:
            break
    return found[:most]


def _is_test_file(name: str) -> bool:
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _read(file: Path) -> JudgingTests | None:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    is_generated = any(name in ("pytest_generate_tests", "pytestmark") for name, _ in _names(tree.body))
    found: dict[str, frozenset[str] | None] = {}
    for name, function in _names(tree.body):
        if name.startswith("test_") and (function is None or _may_judge(function)):
            found[name.removeprefix("test_")] = None if is_generated or function is None else _parameters(function)
    return JudgingTests(parameters=found)


def _names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | None]]:
    """What a module or its test classes define, each with its function if it is one."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield statement.name, statement
            case ast.ClassDef() if statement.decorator_list:
                yield from ((name, None) for name, _ in _names(statement.body))
            case ast.ClassDef():
                yield from _names(statement.body)
            case ast.ImportFrom():
                yield from ((alias.asname or alias.name, None) for alias in statement.names)
            case ast.Assign():
                yield from ((target.id, None) for target in statement.targets if isinstance(target, ast.Name))


def _may_judge(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a test takes ``criterion``, or another fixture than ours, which may take it."""
    arguments = function.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return bool(names - _NO_WAY_TO_CRITERION)


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str] | None:
    """The ids of a test's parameters: empty without a decorator, None where the source does not tell."""
    marks = [one for one in function.decorator_list if isinstance(one, ast.Call) and _called(one) == "parametrize"]
    if not marks:
        return frozenset()
    if len(marks) > 1 or len(marks[0].args) != 2 or marks[0].keywords:
        return None
    names, values = (_literal(argument) for argument in marks[0].args)
    if not isinstance(names, str) or "," in names or not isinstance(values, (list, tuple)):
        return None
    return frozenset(map(str, values)) if all(isinstance(one, (str, int)) for one in values) else None


def _called(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
