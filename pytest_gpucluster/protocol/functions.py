"""Names of functions that cross the channel: how the controller names one, how a worker finds it again.

Only the name, the file and its digest cross; never code. A worker runs a module-level Python function that was defined
in the very module that was named, and refuses everything else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

MEASUREMENT_MARK = "__gpucluster_measurement__"
NO_DEVICE_MARK = "__gpucluster_without_device__"
COMPANY_MARK = "__gpucluster_beside_others__"
Function = TypeVar("Function", bound=Callable[..., Any])


class RefusedError(Exception):
    """A function that must not, or cannot, run in a worker."""


def measurement(function: Function) -> Function:
    """Mark a module-level function as something that workers may run, wherever its file lies."""
    setattr(function, MEASUREMENT_MARK, True)
    return function


def without_device(function: Function) -> Function:
    """Mark a measurement that reads about a GPU without using it: it runs even where torch cannot open the GPU."""
    setattr(function, NO_DEVICE_MARK, True)
    return measurement(function)


def beside_others(function: Function) -> Function:
    """Mark a measurement that uses a GPU and finds the same whoever else does: it runs on a GPU that is not idle, too."""
    setattr(function, COMPANY_MARK, True)
    return measurement(function)


def needs_idle_gpu(function: Callable[..., Any]) -> bool:
    """Whether somebody else on the GPU would make what this function returns a wrong number."""
    return not hasattr(function, NO_DEVICE_MARK) and not hasattr(function, COMPANY_MARK)


def name_function(function: Callable[..., Any], *, rootdir: Path) -> dict[str, Any]:
    """What crosses the channel for ``function``: module, qualname, file, digest of the file.

    Raises:
        RefusedError: a lambda, a method, a local function, a partial, a builtin: nothing a worker could import.
    """
    if not isinstance(function, FunctionType) or "." in function.__qualname__ or function.__name__ == "<lambda>":
        name = getattr(function, "__qualname__", repr(function))
        raise RefusedError(
            f"{name} cannot run in a worker: it must be a function at module level (no lambda, method, partial or "
            "function inside a function), so that every rank can import it by name"
        )
    file = Path(inspect.getfile(function)).resolve()
    relative = os.path.relpath(file, rootdir)
    return {
        "module": function.__module__,
        "qualname": function.__qualname__,
        "file": str(file),
        "relative": relative,
        "digest": digest_of(file),
    }


@functools.lru_cache(maxsize=256)
def digest_of(file: Path) -> str:
    """SHA-256 of a source file: nodes with different checkouts must not measure different things."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def is_below(path: Path, roots: Collection[Path]) -> bool:
    """Whether a path is one of these folders or lies in one of them."""
    resolved = path.resolve()
    return any(root == resolved or root in resolved.parents for root in roots)


def find_function(
    name: dict[str, Any], *, trusted: bool, roots: Collection[Path] | None = None, rewrite: bool = False
) -> Callable[..., Any]:
    """The function behind what :func:`name_function` sent.

    Args:
        name: module, qualname, file, relative, digest.
        trusted: the message was signed with the run's secret; otherwise a function from the standard library or from
            site-packages must carry :func:`measurement`'s mark or belong to this project.
        roots: the folders of this run's tests; without trust, a file elsewhere must be what this node itself imports
            under that module's name. None: anywhere.
        rewrite: load the file with pytest's assertion rewriting, so that a failing assert shows its values.

    Raises:
        RefusedError: not found, another version of the file, or not allowed.
    """
    file = _local_file(name, None if trusted else roots)
    if not trusted and _is_standard_library(file):
        raise RefusedError(f"{name['module']}:{name['qualname']} belongs to Python itself and is no measurement")
    module = _load_rewritten(name["module"], file) if rewrite else _load(name, file)
    function = getattr(module, name["qualname"], None)
    if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
        raise RefusedError(f"{name['module']}:{name['qualname']} is not a function of that module")
    if not trusted and not getattr(function, MEASUREMENT_MARK, False) and _is_foreign(file):
        raise RefusedError(
            f"{name['module']}:{name['qualname']} lies outside the tests; mark it with @measurement, or give the run a "
            "secret in GPUCLUSTER_SECRET"
        )
    return function


def _local_file(name: dict[str, Any], roots: Collection[Path] | None) -> Path:
    candidates = [
        path for path in (Path(name["file"]), Path.cwd() / name["relative"]) if roots is None or is_below(path, roots)
    ]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        found = _file_of_module(name["module"])
    if found is None:
        raise RefusedError(f"{name['file']} is not on this node, and no module {name['module']} is installed here")
    if digest_of(found) != name["digest"]:
        raise RefusedError(f"{found} differs from the controller's copy: bring every node to the same version")
    return found


def _file_of_module(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _load(name: dict[str, Any], file: Path) -> ModuleType:
    try:
        module = importlib.import_module(name["module"])
    except ImportError:
        return _load_file(name["module"], file)
    origin = getattr(module, "__file__", None)
    if origin is not None and digest_of(Path(origin)) == name["digest"]:
        return module
    return _load_file(f"gpucluster_files.{name['digest'][:16]}.{name['module'].replace('.', '_')}", file)


def _load_file(module_name: str, file: Path) -> ModuleType:
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RefusedError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _load_rewritten(module_name: str, file: Path) -> ModuleType:
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts

    key = f"gpucluster_rewritten.{module_name}"
    if key in sys.modules:
        return sys.modules[key]
    source = file.read_bytes()
    tree = ast.parse(source, filename=str(file))
    rewrite_asserts(tree, source, str(file))
    module = ModuleType(module_name)
    module.__file__ = str(file)
    module.__package__ = module_name.rpartition(".")[0]
    sys.modules[key] = module
    exec(compile(tree, str(file), "exec"), module.__dict__)  # noqa: S102 -- the test file itself, found by its digest
    return module


def _is_standard_library(file: Path) -> bool:
    """Whether a file is part of Python (site-packages lies below it, and is not)."""
    paths = sysconfig.get_paths()
    own, installed = Path(paths["stdlib"]).resolve(), {Path(paths[key]).resolve() for key in ("purelib", "platlib")}
    parents = file.resolve().parents
    return own in parents and not any(folder in parents for folder in installed)


def _is_foreign(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed distribution other than this one."""
    own = Path(__file__).resolve().parents[1]
    ours = (own, own.parent / "tests_acceptance", own.parent / "finetune_smoke")
    if any(folder in file.parents for folder in ours):
        return False
    paths = sysconfig.get_paths()
    places = {Path(paths[key]).resolve() for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(place in file.resolve().parents for place in places)
