"""What an unsigned message may have run: the run's own tests, and nothing of any Python installation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import fields, replace

from pytest_gpucluster.inventory.identity import identity
from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.protocol.functions import RefusedError, digest_of, find_function, may_import_from, name_function
from pytest_gpucluster.protocol.messages import FunctionName, ReplicateJournal, read_command
from pytest_gpucluster.reporting.files import write_atomically
from pytest_gpucluster.selftest.planted import add_up
from pytest_gpucluster.worker.worker import leave_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = """
import pathlib

pathlib.Path({marker!r}).touch()

def measure():
    return 42
"""
MARKED = "from pytest_gpucluster import measurement\n{source}\n@measurement\ndef marked():\n    return 43\n"

INSTALLED = (
    "venv/lib/python3.9/site-packages/tool.py",
    "venv/lib64/python3.12/site-packages/package/tool.py",
    "usr/lib/python3/dist-packages/tool.py",
    "home/.local/lib/python3.10/site-packages/tool.py",
    "env/Lib/site-packages/tool.py",
    "target/tool.py",
)
STANDARD = (
    "python/lib/python3.8/tool.py",
    "python/lib/python3.13/package/tool.py",
    "pypy/lib/pypy3.10/tool.py",
    "usr/lib64/python3.6/tool.py",
    "free/lib/python3.14t/tool.py",
    "copied/tool.py",
    "copied/package/tool.py",
)
OWN = (
    "test_tool.py",
    "conftest.py",
    "tests/test_tool.py",
    "tests/deep/conftest.py",
    "helpers/tool.py",
    "lib/tool.py",
    "library/python_tools/tool.py",
)


class Run:
    """The folder of a run's tests, and a file that shows whether anything strange was imported."""

    def __init__(self, folder: Path) -> None:
        """Other Pythons lie below it too."""
        self.root = folder / "root"
        self.executed = folder / "executed"
        (self.root / "target" / "tool-1.0.dist-info").mkdir(parents=True)
        (self.root / "copied").mkdir()
        (self.root / "copied" / "os.py").touch()

    def add(self, place: str, *, marked: bool = False) -> FunctionName:
        """Write a module there; the name of its function."""
        file = self.root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        source = SOURCE.format(marker=str(self.executed))
        file.write_text(MARKED.format(source=source) if marked else source, encoding="utf-8")
        function = "marked" if marked else "measure"
        return FunctionName(module=file.stem, qualname=function, file=str(file), relative=file.name, digest=digest_of(file))

    def find(self, name: FunctionName, *, trusted: bool = False) -> Callable[..., Any]:
        """The function, as a worker would find it."""
        return find_function(name, trusted=trusted, roots=[self.root])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run, whose modules are forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield Run(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("place", [*INSTALLED, *STANDARD])
def test_nothing_of_any_python_below_the_root(run: Run, place: str) -> None:
    """Whatever interpreter it belongs to: refused, and not even imported. A signed message may name it."""
    name = run.add(place)
    with pytest.raises(RefusedError, match=r"belongs to Python itself|lies outside the tests"):
        run.find(name)
    assert not run.executed.exists()
    assert not may_import_from(Path(name.file).parent, [run.root])
    assert run.find(name, trusted=True)() == 42


@pytest.mark.parametrize("place", OWN)
def test_everything_of_the_run(run: Run, place: str) -> None:
    """Any module-level function of a test file, a conftest or a helper runs, whether or not its folder is importable."""
    name = run.add(place)
    assert run.find(name)() == 42
    assert may_import_from(Path(name.file).parent, [run.root])


def test_an_importable_module_elsewhere(run: Run, tmp_path: Path) -> None:
    """What the node itself would import is run too; a file that it would not import is not."""
    elsewhere = tmp_path / "elsewhere"
    name = run.add("../elsewhere/shared_tool.py")
    with pytest.raises(RefusedError, match="is not on this node"):
        run.find(name)
    assert not run.executed.exists()
    sys.path.append(str(elsewhere))
    assert run.find(name)() == 42


@pytest.mark.parametrize("place", INSTALLED)
def test_an_installed_measurement_needs_its_mark(run: Run, place: str) -> None:
    """Who marked a function meant it to run, and the source says so before it is imported."""
    assert run.find(run.add(place, marked=True))() == 43


@pytest.mark.parametrize("place", STANDARD)
def test_a_mark_makes_no_measurement_of_the_standard_library(run: Run, place: str) -> None:
    """Not even there."""
    with pytest.raises(RefusedError, match="belongs to Python itself"):
        run.find(run.add(place, marked=True))
    assert not run.executed.exists()


def test_no_other_module_is_imported_beside_an_allowed_file(run: Run, tmp_path: Path) -> None:
    """The name of a module that does not belong to the file leads nowhere, and its packages are not imported."""
    sys.path.append(str(tmp_path / "elsewhere"))
    run.add("../elsewhere/strange/__init__.py")
    run.add("../elsewhere/strange/inner.py")
    run.add("../elsewhere/strange_top.py")
    (run.root / "test_good.py").write_text("def measure():\n    return 42\n", encoding="utf-8")
    good = replace(run.add("test_any.py"), file=str(run.root / "test_good.py"), digest=digest_of(run.root / "test_good.py"))
    for module in (
        "strange",
        "strange.inner",
        "strange_top",
        "strange.absent",
        "subprocess",
        "os.path",
        "",
        ".",
        "a..b",
        "a\0",
    ):
        with pytest.raises(RefusedError):
            run.find(replace(good, module=module))
        with pytest.raises(RefusedError):
            run.find(replace(good, module=module, file="/nowhere.py", relative="nowhere.py"))
    assert not run.executed.exists()
    assert run.find(replace(good, module="test_good"))() == 42


def test_a_namesake_is_not_imported(run: Run, tmp_path: Path) -> None:
    """The node would import another file of the same name and content: the named file runs, its namesake's package does not."""
    run.add("../elsewhere/strange/__init__.py")
    for folder in (tmp_path / "elsewhere" / "strange", run.root / "strange"):
        folder.mkdir(exist_ok=True)
        (folder / "tool.py").write_text("def measure():\n    return 42\n", encoding="utf-8")
    sys.path.append(str(tmp_path / "elsewhere"))
    file = run.root / "strange" / "tool.py"
    name = FunctionName(module="strange.tool", qualname="measure", file=str(file), relative="tool.py", digest=digest_of(file))
    assert run.find(name)() == 42
    assert not run.executed.exists()


@pytest.mark.parametrize("function", [gemm, identity, leave_group, add_up])
def test_what_runs_call_in_this_package(function: Callable[..., Any]) -> None:
    """Measurements, the start-up's questions, and the call that ends process groups."""
    assert find_function(name_function(function, rootdir=Path.cwd()), trusted=False, roots=[]) is function


@pytest.mark.parametrize("function", [write_atomically, find_function, name_function])
def test_the_rest_of_this_package_is_no_measurement(function: Callable[..., Any]) -> None:
    """A checkout lies below the root, and what writes reports or starts processes is still not called."""
    with pytest.raises(RefusedError, match="is no measurement of this package"):
        find_function(name_function(function, rootdir=Path.cwd()), trusted=False, roots=[Path("/")])


def test_no_message_names_where_to_write() -> None:
    """The command that makes an agent keep the journal says which ranks, and never a path."""
    forged = {"t": "replicate", "ranks": [[0, 0]], "target": {"folder": "/etc", "junit": "/etc/passwd"}}
    command = read_command(json.dumps(forged).encode())
    assert isinstance(command, ReplicateJournal)
    assert {field.name for field in fields(command)} == {"ranks"}
