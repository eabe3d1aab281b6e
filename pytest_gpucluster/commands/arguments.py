"""Arguments of a command line: ``MODULE:FUNCTION`` as a function, ``key=value`` as plain data."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

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
