"""Functions by name: what may be named, what may be found, and by whom."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import sysconfig
import textwrap
import unittest.mock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.protocol.functions import RefusedError, digest_of, find_function, measurement, name_function
from pytest_gpucluster.protocol.messages import FunctionName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent


class Holder:
    """Functions that are none at module level."""

    def method(self) -> None:
        """Belongs to an object."""

    @staticmethod
    def static() -> None:
        """Belongs to a class."""


def local() -> Callable[[], None]:
    """A function inside a function."""

    def inside() -> None:
        """Nobody can import it."""

    return inside


def own() -> int:
    """A function of a test file."""
    return 42


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (lambda: 1, "lambda"),
        (Holder().method, "Holder.method"),
        (Holder.static, "Holder.static"),
        (local(), "inside"),
        (functools.partial(own), "partial"),
        (os.system, "system"),
        (math.sqrt, "sqrt"),
        (Holder, "Holder"),
        (3, "3"),
    ],
)
def test_only_functions_at_module_level_have_a_name(function: Any, called: str) -> None:
    """Everything else is refused by what it is called, before anything crosses."""
    with pytest.raises(RefusedError, match=called):
        name_function(function, rootdir=HERE)


def test_name_and_back() -> None:
    """Module, qualname, file and digest lead to the same function, signed or not."""
    name = name_function(own, rootdir=HERE)
    assert (name.module, name.qualname, name.relative) == (__name__, "own", Path(__file__).name)
    assert name.digest == digest_of(Path(__file__))
    for trusted in (False, True):
        assert find_function(name, trusted=trusted)() == 42


def test_a_measurement_of_the_package_needs_no_mark_and_no_secret() -> None:
    """What is shipped runs on an unsigned channel."""
    assert find_function(name_function(gemm, rootdir=HERE), trusted=False) is gemm


def test_another_version_of_the_file_is_refused() -> None:
    """Nodes with different checkouts must not measure different things; the file is named."""
    name = replace(name_function(own, rootdir=HERE), digest="0" * 64)
    with pytest.raises(RefusedError, match=rf"{Path(__file__).name} differs from the controller's copy"):
        find_function(name, trusted=True)


def test_a_file_that_is_not_here() -> None:
    """A node without the file says so."""
    name = FunctionName(module="no_such_module_at_all", qualname="f", file="/nowhere/f.py", relative="f.py", digest="")
    with pytest.raises(RefusedError, match=r"/nowhere/f\.py is not on this node"):
        find_function(name, trusted=True)


def name_in(file: Path, qualname: str, *, module: str | None = None) -> FunctionName:
    """A function of a file, by name."""
    return FunctionName(
        module=module or file.stem, qualname=qualname, file=str(file), relative=file.name, digest=digest_of(file)
    )


@pytest.mark.parametrize(
    ("module", "qualname"), [(os, "system"), (os, "popen"), (os, "makedirs"), (textwrap, "dedent"), (textwrap, "re")]
)
def test_the_standard_library_is_no_measurement(module: Any, qualname: str) -> None:
    """An unsigned ``os:system`` is refused, and so is every function of Python itself."""
    with pytest.raises(RefusedError):
        find_function(name_in(Path(module.__file__), qualname, module=module.__name__), trusted=False)


@pytest.mark.parametrize("qualname", ["Holder", "pytest", "HERE", "os.system", "absent", "name_function", "__builtins__"])
def test_only_functions_of_that_very_module(qualname: str) -> None:
    """Classes, constants, imported functions and dotted ways are refused, even signed."""
    name = replace(name_function(own, rootdir=HERE), qualname=qualname)
    with pytest.raises(RefusedError, match="is not a function of that module"):
        find_function(name, trusted=True)


def installed_module(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A module in a folder that counts as site-packages, with one marked and one unmarked function."""
    source = (
        "from pytest_gpucluster import measurement\n\ndef bare():\n    return 1\n\n@measurement\ndef marked():\n    return 2\n"
    )
    file = folder / "gpucluster_installed_thing.py"
    file.write_text(source, encoding="utf-8")
    real = sysconfig.get_paths()
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda *_args, **_options: {**real, "purelib": str(folder), "platlib": str(folder)}
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, file.stem, None)
    monkeypatch.delitem(sys.modules, file.stem)
    return file


def test_site_packages_need_the_mark_or_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unsigned, only what its author marked runs; the message names both ways out."""
    file = installed_module(monkeypatch, tmp_path)
    assert find_function(name_in(file, "marked"), trusted=False)() == 2
    assert find_function(name_in(file, "bare"), trusted=True)() == 1
    with pytest.raises(RefusedError, match=r"@measurement.*GPUCLUSTER_SECRET"):
        find_function(name_in(file, "bare"), trusted=False)


def test_the_mark_changes_nothing_else() -> None:
    """It is the same function afterwards."""

    def anything() -> None:
        """Not called."""

    assert measurement(anything) is anything


def test_rewritten_asserts_show_their_values(tmp_path: Path) -> None:
    """The body of a distributed test fails with both sides in the message, as in pytest."""
    file = tmp_path / "test_rewritten_here.py"
    file.write_text("def test_sum():\n    left = 3\n    assert left == 4\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="3 == 4"):
        find_function(name_in(file, "test_sum"), trusted=False, rewrite=True)()


USERS_FILES = {
    "dataclass": """
import dataclasses
@dataclasses.dataclass
class Seen:
    rank: 'int'
def test_it():
    Seen(1)
""",
    "dataclass with annotations put off": """
from __future__ import annotations
import dataclasses
@dataclasses.dataclass
class Seen:
    rank: int
def test_it():
    Seen(1)
""",
    "annotations are objects": """
def test_it(x: int = 1):
    assert test_it.__annotations__ == {'x': int}
""",
    "annotations put off": """
from __future__ import annotations
def test_it(x: Unknown = 1):
    assert test_it.__annotations__ == {'x': 'Unknown'}
""",
    "hints": """
import typing
class Seen(typing.NamedTuple):
    rank: 'int'
def test_it():
    assert typing.get_type_hints(Seen) == {'rank': int}
""",
    "pickle": """
import pickle
class Seen:
    pass
def test_it():
    assert isinstance(pickle.loads(pickle.dumps(Seen())), Seen)
""",
    "source": """
import inspect
def test_it():
    assert 'getsource' in inspect.getsource(test_it)
""",
    "names": """
import sys
def test_it():
    assert sys.modules[__name__].test_it is test_it
""",
}


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("case", USERS_FILES)
def test_the_body_of_a_test_is_loaded_as_python_loads_it(case: str, *, is_loaded: bool, tmp_path: Path) -> None:
    """A class looks its module up by name, and the file's own ``__future__`` holds, not ours."""
    file = tmp_path / f"test_of_a_user_{list(USERS_FILES).index(case)}{is_loaded}.py"
    file.write_text(USERS_FILES[case], encoding="utf-8")
    if is_loaded:
        find_function(name_in(file, "test_it"), trusted=False)()
    find_function(name_in(file, "test_it"), trusted=False, rewrite=True)()


def test_the_body_of_a_test_imports_its_neighbours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test file in a package has relative imports."""
    package = tmp_path / "users_own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("TWO = 2\n", encoding="utf-8")
    file = package / "test_relative.py"
    file.write_text("from .helper import TWO\ndef test_it():\n    assert TWO == 2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = replace(name_in(file, "test_it"), module="users_own_package.test_relative")
    find_function(name, trusted=False, rewrite=True)()


@pytest.mark.parametrize("rewrite", [False, True])
@pytest.mark.parametrize("line", ["import no_such_module_here", "raise RuntimeError('no')", "raise SystemExit(0)"])
def test_a_file_that_this_rank_cannot_import_is_refused(line: str, *, rewrite: bool, tmp_path: Path) -> None:
    """The test did not run, so it did not fail; a second call says the same, not that the function is missing."""
    file = tmp_path / f"test_not_here_{len(line)}{rewrite}.py"
    file.write_text(f"{line}\ndef test_it(): ...\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"cannot be imported on this rank: \w+(Error|Exit)"):
            find_function(name_in(file, "test_it"), trusted=False, rewrite=rewrite)


@torch.no_grad()
def without_gradients() -> bool:
    """Decorated by a module of somebody else, as users do."""
    return not torch.is_grad_enabled()


@unittest.mock.patch("os.getpid", return_value=-1)
def patched(getpid: Any) -> bool:
    """Decorated by the standard library."""
    return os.getpid() == -1 and getpid.called


@contextlib.contextmanager
def anything() -> Iterator[None]:
    """A context manager decorates, too."""
    yield


@anything()
def in_a_context() -> bool:
    """Decorated by contextlib."""
    return True


@pytest.mark.parametrize("rewrite", [False, True])
@pytest.mark.parametrize("function", [without_gradients, patched, in_a_context])
def test_a_decorated_function_is_found_in_its_own_file(function: Callable[[], bool], *, rewrite: bool) -> None:
    """The code that runs first lies in the decorator's file; the name, and the digest, are of the file of the function."""
    name = name_function(function, rootdir=HERE)
    assert name.file == __file__
    assert find_function(name, trusted=False, rewrite=rewrite)()
