"""Arguments of a command line: ``MODULE:FUNCTION`` as a function, ``key=value`` as plain data.

The tests in Python files by name, found in their source. No file is imported, so nothing runs and no torch is loaded.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from pytest_gpucluster.config import yaml_lines
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.protocol import functions, plain_data

EXAMPLE = "pytest_gpucluster.measurements.gemm:gemm dtype=bfloat16"
FORM = "say MODULE:FUNCTION or path/to/file.py:FUNCTION"
TAKEN = ("self", "function", "per", "places", "at_once", "deadline_s")
"""Names that ``cluster.run`` keeps for itself."""


def read_arguments(words: Iterable[str]) -> dict[str, Any]:
    """``sizes=[4096,8192] dtype=bfloat16`` as keyword arguments; values are read as thresholds.yaml is.

    Raises:
        ConfigurationError: no ``=``, no name before it, a name given twice, or a value that is not plain YAML.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigurationError(f"{word!r} is not an argument; say KEY=VALUE, for example iterations=50")
        if key in found:
            raise ConfigurationError(f"{key} is given twice")
        found[key] = _value(key, text)
    return found


def _value(key: str, text: str) -> Any:
    document = yaml_lines.parse(f"value: {text}".encode("utf-8", "surrogateescape"), file=key)
    problem = document.problems[0].message if document.problems else "more than one value."
    if set(document.data) != {"value"}:
        raise ConfigurationError(
            f"{key}={text}: {problem} Values are plain YAML: 5, 0.5, bfloat16, [4096, 8192], true, '\"5\"'"
        )
    try:
        return plain_data.from_plain(plain_data.to_plain(document.data["value"]))
    except plain_data.NotPlainDataError as error:
        raise ConfigurationError(f"{key}={text}: {error}") from None


def find_function(text: str) -> Callable[..., Any]:
    """The function that ``text`` names.

    Raises:
        ConfigurationError: no such module, file or function, or nothing that a worker could import.
    """
    where, _, name = text.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigurationError(f"{text!r} names no function; {FORM}, for example {EXAMPLE}")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if function is None:
        known = _functions_of(module)
        hint = did_you_mean(name, known, most=3)
        hint = f".{hint}" if hint else f"; its functions: {', '.join(known) or 'none'}"
        raise ConfigurationError(f"{where} has no function {name!r}{hint}")
    try:
        functions.name_function(function, rootdir=Path.cwd())
    except functions.RefusedError as refused:
        raise ConfigurationError(str(refused)) from None
    return function  # type: ignore[no-any-return]


def _functions_of(module: ModuleType) -> list[str]:
    own: dict[str, FunctionType] = dict(inspect.getmembers(module, inspect.isfunction))
    return [name for name, function in own.items() if function.__module__ == module.__name__ and not name.startswith("_")]


def _load_module(name: str) -> ModuleType:
    """Import a module; the current directory is searched too, as with ``python -m``."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as absent:
        if absent.name is not None and f"{name}.".startswith(f"{absent.name}."):
            raise ConfigurationError(f"there is no module {name!r}; {FORM}") from None
        raise _not_imported(name, absent) from absent
    except Exception as error:
        raise _not_imported(name, error) from error


def _load_file(path: Path) -> ModuleType:
    """Import a file: as a module of its package if it has one, else under a name that no other module can have."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}; {FORM}")
    path = path.resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # its neighbours can be imported; the worker gets the same path
    if len(parts) == 1:
        return _load_alone(path)
    module = _load_module(".".join(parts))
    if Path(module.__file__ or "").resolve() != path:
        raise ConfigurationError(f"{path} is not what Python imports as {module.__name__}: that is {module.__file__}")
    return module


def _load_alone(path: Path) -> ModuleType:
    name = f"gpucluster_run_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _not_imported(str(path), error) from error
    return module


def _not_imported(name: str, error: Exception) -> ConfigurationError:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return ConfigurationError(f"{name} cannot be imported: {type(error).__name__}: {error}{where}")


def require_fit(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Whether the function can be called like this.

    Raises:
        ConfigurationError: an argument it does not take, or one that is absent; shows what it takes.
    """
    taken = [name for name in TAKEN if name in arguments]
    if taken:
        raise ConfigurationError(f"an argument called {taken[0]} cannot be passed on: cluster.run has one of that name")
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = [*signature.parameters]
        unknown = [name for name in arguments if name not in known]
        is_open = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        said = str(error) if is_open or not unknown else f"got an unexpected keyword argument {unknown[0]!r}"
        near = did_you_mean(unknown[0], known) if unknown and not is_open else ""
        raise ConfigurationError(f"{function.__name__}: {said}; it takes {signature}.{near}") from None


SUITE = "tests_acceptance"
PARAMETER_FIRST = ("dcgm_diag",)
"""Tests whose ids have the parameter before the place. They judge whatever entry has their name, with any parameter."""
MAX_DEPTH = 3
"""How far test files are looked for below the folder of a thresholds file."""
_NO_WAY_TO_CRITERION = {"self", "place", "node", "cluster", "recipe", "soak", "process_group", "rank", "world_size", "device"}
_PACKAGES = {"site-packages", "node_modules", "venv", "__pycache__"}


TestsOfFile: TypeAlias = "Mapping[str, frozenset[str] | None]"
"""The tests of one file that may judge: the ids of their parameters by name without ``test_``.

An empty set stands for a test without parameters, None for parameters that the source does not have as text.
"""


def judges(tests: TestsOfFile, key: str) -> bool:
    """Whether one of the tests judges the entry ``key``, such as ``busbw[all_reduce]``."""
    name, _, parameter = key.removesuffix("]").partition("[")
    if name not in tests:
        return False
    known = tests[name]
    return known is None or (parameter in known if parameter else not known)


def read_tests(paths: Iterable[Path]) -> list[TestsOfFile]:
    """The tests of the named files, and of the test files below the named folders.

    Raises:
        ConfigurationError: no such file or folder, or no Python.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"--tests: there is no file or folder {path}")
        for file in _test_files(path, depth=100) if path.is_dir() else [path]:
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
    return {name: file for file in files for found in read_tests([file]) for name in found}


def nodeid_in_suite(key: str, place: str | None, *, root: Path) -> str:
    """The node id that pytest gives to the packaged test of a criterion at a place, started in ``root``."""
    name, _, parameter = key.removesuffix("]").partition("[")
    file = _suite().get(name)
    if file is None:  # an entry of one's own, whose test only pytest finds
        return f"{key}[{place}]" if place is not None else key
    address = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
    parts = [part for part in (place, parameter) if part]
    ids = "-".join(reversed(parts) if name in PARAMETER_FIRST else parts)
    return f"{address}::test_{name}" + (f"[{ids}]" if ids else "")


def tests_beside(path: Path, keys: Iterable[str]) -> list[TestsOfFile]:
    """The tests of the test files in the folder of a thresholds file, and a little below it. What is no Python is left out.

    A file without the name of a test of one of ``keys`` has no tests here: to parse all that a home directory holds takes
    minutes.
    """
    texts = [f"test_{key.partition('[')[0]}".encode() for key in keys]
    files = _test_files(path.absolute().parent, depth=MAX_DEPTH)
    return [names for file in files if (names := _read(file, texts)) is not None]


def _test_files(folder: Path, *, depth: int) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        below = len(Path(here).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if below < depth and name not in _PACKAGES and not name.startswith("."))
        yield from (Path(here, name) for name in sorted(files) if fnmatch(name, "test_*.py") or fnmatch(name, "*_test.py"))


def _read(file: Path, texts: Iterable[bytes] = (b"",)) -> TestsOfFile | None:
    try:
        content = file.read_bytes()
        tree = ast.parse(content if any(text in content for text in texts) else b"")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    is_generated = any(name in ("pytest_generate_tests", "pytestmark") for name, _ in _names(tree.body))
    found: dict[str, frozenset[str] | None] = {}
    for name, function in _names(tree.body):
        if name.startswith("test_") and (function is None or _may_judge(function)):
            found[name.removeprefix("test_")] = None if is_generated or function is None else _parameters(function)
    return found


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
    calls = (one for one in function.decorator_list if isinstance(one, ast.Call))
    marks = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "parametrize"]
    if not marks:
        return frozenset()
    if len(marks) > 1 or len(marks[0].args) != 2 or marks[0].keywords:
        return None
    try:
        names, values = map(ast.literal_eval, marks[0].args)
    except ValueError:
        return None
    if not isinstance(names, str) or "," in names or not isinstance(values, (list, tuple)):
        return None
    return frozenset(map(str, values)) if all(isinstance(one, (str, int)) for one in values) else None
