"""Whose code a file is, and whether an unsigned message may have it run. Nothing is imported to find that out.

Without a secret anybody who reaches the store can name a function. Then workers run what ships with this package for them,
what lies in the folders of the run's tests, and what this node itself would import. They run nothing of a Python installation,
of whatever interpreter, except functions with the mark :func:`~pytest_gpucluster.protocol.functions.measurement`.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

PACKAGE = Path(__file__).resolve().parents[1]
CALLED = ("measurements", "selftest", "inventory/identity.py", "inventory/occupancy.py", "worker/worker.py")
"""What runs call in this package."""
BESIDE = ("tests_acceptance", "finetune_smoke")
MARKS = ("measurement", "without_device", "beside_others")
INSTALLED = ("site-packages", "dist-packages")
LIBRARIES = re.compile(r"lib\w*/(python|pypy)\d[\w.]*", re.IGNORECASE)
LANDMARK = "os.py"
"""By this file Python itself recognizes its standard library."""


def refusal(file: Path, *, module: str, function: str) -> str | None:
    """Why an unsigned message may not have this function run, after its name; None if it may."""
    if _is_in(file, PACKAGE):
        return None if any(_is_in(file, PACKAGE / part) for part in CALLED) else "is no measurement of this package"
    if any(_is_in(file, PACKAGE.parent / name) for name in BESIDE):
        return None
    if not _fits(file, module):
        return f"is not defined in {file}"
    if module.partition(".")[0] in sys.stdlib_module_names or is_standard_library(file.parent.resolve()):
        return "belongs to Python itself and is no measurement"
    if is_installed(file.parent.resolve()) and not is_marked(file, function):
        return "lies outside the tests; mark it with @measurement, or give the run a secret in GPUCLUSTER_SECRET"
    return None


def file_of_module(name: str) -> Path | None:
    """The file that this process would import under a name. Unlike :func:`importlib.util.find_spec` it imports no parent."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    spec, locations = None, None
    for dot in re.finditer(r"\.|$", name):
        spec = _find_spec(name[: dot.start()], locations)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


@functools.lru_cache(maxsize=256)
def is_standard_library(folder: Path) -> bool:
    """Whether a folder belongs to the standard library of any Python. Folders of installed packages in it do not count."""
    for one in (folder, *folder.parents):
        if one.name in INSTALLED or one in _folders("purelib", "platlib"):
            return False
        if (
            (one / LANDMARK).is_file()
            or LIBRARIES.fullmatch("/".join(one.parts[-2:]))
            or one in _folders("stdlib", "platstdlib")
        ):
            return True
    return False


@functools.lru_cache(maxsize=256)
def is_installed(folder: Path) -> bool:
    """Whether a folder belongs to any Python, or to what a package manager put beside it."""
    return is_standard_library(folder) or any(
        one.name in INSTALLED or one in _folders("purelib", "platlib") or any(one.glob("*.dist-info"))
        for one in (folder, *folder.parents)
    )


def is_marked(file: Path, function: str) -> bool:
    """Whether the source gives a module-level function the mark of a measurement."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    found = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == function]
    return any(_last_name(decorator) in MARKS for one in found for decorator in one.decorator_list)


def _is_in(file: Path, folder: Path) -> bool:
    return folder in (resolved := file.resolve()).parents or resolved == folder


def _fits(file: Path, module: str) -> bool:
    """Whether a module of this name may be this file. pytest's import mode ``importlib`` replaces dots in names of files."""
    parts = [part.replace(".", "_") for part in file.with_suffix("").parts]
    names = module.split(".")
    return names == parts[-len(names) :] or [*names, "__init__"] == parts[-len(names) - 1 :]


def _find_spec(name: str, locations: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find_spec(name, locations) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def _folders(*keys: str) -> set[Path]:
    return {Path(sysconfig.get_paths()[key]).resolve() for key in keys}


def _last_name(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
