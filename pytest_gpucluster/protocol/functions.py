"""Functions by name: how the controller names a function, and how a worker finds it again.

The name, the file and the file's digest cross between processes, never code. A worker runs a module-level Python function
that is defined in the named module, and refuses everything else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pytest_gpucluster.protocol import origin
from pytest_gpucluster.protocol.messages import FunctionName

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.simulated_call import SimulatedCall


NO_DEVICE_MARK = "__gpucluster_without_device__"
SHARED_GPU_MARK = "__gpucluster_beside_others__"
SIMULATED_MARK = "__gpucluster_simulated__"
Function = TypeVar("Function", bound=Callable[..., Any])
Simulated: TypeAlias = "SimulatedCall"
"""A call as the model of a simulated fleet sees it: measurements name the type, and do not load the model."""


class RefusedError(Exception):
    """A function that must not, or cannot, run in a worker."""


def measurement(function: Function) -> Function:
    """Mark a module-level function as something that workers may run, wherever its file lies.

    A worker looks for the mark in the source (:mod:`~pytest_gpucluster.protocol.origin`), before it imports anything.
    """
    return function


def without_device(function: Function) -> Function:
    """Mark a measurement that reads facts about a GPU without using it. It runs even if torch cannot open the GPU."""
    setattr(function, NO_DEVICE_MARK, True)
    return function


def beside_others(function: Function) -> Function:
    """Mark a measurement whose result does not depend on other users of the GPU. It runs on a GPU that is not idle, too."""
    setattr(function, SHARED_GPU_MARK, True)
    return function


def simulated_by(answer: Callable[[Simulated], Any]) -> Callable[[Function], Function]:
    """Mark a packaged measurement with what a rank of a simulated fleet answers in its place: the same class, made up."""

    def mark(function: Function) -> Function:
        setattr(function, SIMULATED_MARK, answer)
        return function

    return mark


def uses_no_device(function: Callable[..., Any]) -> bool:
    """Whether this function only reads facts: :func:`without_device`."""
    return hasattr(function, NO_DEVICE_MARK)


def needs_idle_gpu(function: Callable[..., Any]) -> bool:
    """Whether another user of the GPU would falsify what this function measures."""
    return not hasattr(function, NO_DEVICE_MARK) and not hasattr(function, SHARED_GPU_MARK)


def name_function(function: Callable[..., Any], *, rootdir: Path) -> FunctionName:
    """The name under which a worker finds ``function``.

    Raises:
        RefusedError: a worker cannot import it: a lambda, a method, a local function, a partial or a builtin.
    """
    if not isinstance(function, FunctionType) or "." in function.__qualname__ or function.__name__ == "<lambda>":
        name = getattr(function, "__qualname__", repr(function))
        raise RefusedError(
            f"{name} cannot run in a worker: it must be a function at module level (no lambda, method, partial or "
            "function inside a function), so that every rank can import it by name"
        )
    file = Path(inspect.getfile(inspect.unwrap(function))).resolve()  # a decorator's own code may lie elsewhere
    return FunctionName(
        module=function.__module__,
        qualname=function.__qualname__,
        file=str(file),
        relative=os.path.relpath(file, rootdir),
        digest=digest_of(file),
    )


@functools.lru_cache(maxsize=256)
def digest_of(file: Path) -> str:
    """SHA-256 of a source file, by which a node with another checkout is noticed."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def is_below(path: Path, roots: Collection[Path]) -> bool:
    """Whether a path is one of these folders or lies in one of them."""
    resolved = path.resolve()
    return any(root == resolved or root in resolved.parents for root in roots)


def may_import_from(folder: Path, roots: Collection[Path]) -> bool:
    """Whether an unsigned message may add a folder to the import path: one of the tests, and of no Python installation."""
    return is_below(folder, roots) and not origin.is_installed(folder.resolve())


def find_function(
    name: FunctionName, *, trusted: bool, roots: Collection[Path] | None = None, rewrite: bool = False
) -> Callable[..., Any]:
    """The function that :func:`name_function` named.

    Args:
        name: the function's name, as the controller sent it.
        trusted: the message was signed with the run's secret. What an untrusted message may have run, and imported for it,
            says :mod:`~pytest_gpucluster.protocol.origin`.
        roots: the folders of this run's tests. A file outside them is run for a trusted message only, or if this node
            itself imports it under the module's name. None: any folder.
        rewrite: load the file with pytest's assertion rewriting, so that a failing assert shows its values.

    Raises:
        RefusedError: the function is not found, not allowed, or its file differs from the controller's.
    """
    file = _local_file(name, None if trusted else roots)
    if not trusted and (why := origin.refusal(file, module=name.module, function=name.qualname)) is not None:
        raise RefusedError(f"{name.module}:{name.qualname} {why}")
    try:
        module = _load_rewritten(name.module, file) if rewrite else _load(name, file)
    except (Exception, SystemExit) as error:
        raise RefusedError(f"{name.module} cannot be imported on this rank: {type(error).__name__}: {error}") from error
    function = getattr(module, name.qualname, None)
    if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
        raise RefusedError(f"{name.module}:{name.qualname} is not a function of that module")
    return function


def _local_file(name: FunctionName, roots: Collection[Path] | None) -> Path:
    candidates = [path for path in (Path(name.file), Path.cwd() / name.relative) if roots is None or is_below(path, roots)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        found = origin.file_of_module(name.module)
    if found is None:
        raise RefusedError(f"{name.file} is not on this node, and no module {name.module} is installed here")
    if digest_of(found) != name.digest:
        raise RefusedError(f"{found} differs from the controller's copy: bring every node to the same version")
    return found


def _load(name: FunctionName, file: Path) -> ModuleType:
    """The module of the file. It is imported by its name only if that leads to this very file."""
    loaded = sys.modules.get(name.module)
    found = origin.file_of_module(name.module) if loaded is None else Path(getattr(loaded, "__file__", None) or "")
    if found is None:
        return _load_file(name.module, file)
    if found.is_file() and found.samefile(file):
        return loaded or importlib.import_module(name.module)
    return _load_file(f"gpucluster_files_{name.digest[:16]}_{name.module.replace('.', '_')}", file)


def _load_file(module_name: str, file: Path) -> ModuleType:
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise RefusedError(f"{file} is not a Python file")
        _execute(module_name, importlib.util.module_from_spec(spec), spec.loader.exec_module)
    return sys.modules[module_name]


def _load_rewritten(module_name: str, file: Path) -> ModuleType:
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts

    key = f"gpucluster_rewritten_{module_name.replace('.', '_')}"  # no dot: pickle would import a package of that name
    if key not in sys.modules:
        source = file.read_bytes()
        tree = ast.parse(source, filename=str(file))
        rewrite_asserts(tree, source, str(file))
        code = compile(tree, str(file), "exec", dont_inherit=True)
        module = ModuleType(key)  # a class looks its module up by name, and the file may be loaded by its own name, too
        module.__file__, module.__package__ = str(file), module_name.rpartition(".")[0]
        _execute(key, module, lambda made: exec(code, made.__dict__))  # noqa: S102 -- the test file, found by its digest
    return sys.modules[key]


def _execute(key: str, module: ModuleType, run: Callable[[ModuleType], object]) -> None:
    sys.modules[key] = module
    try:
        run(module)
    except BaseException:
        del sys.modules[key]
        raise
