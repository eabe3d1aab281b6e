"""The noxfile: what it does before nox is there, what it installs, and the links it checks. No network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support import REPOSITORY

pytest.importorskip("nox", reason="nox runs these tests; without it there is no noxfile to test")

NOXFILE = REPOSITORY / "noxfile.py"


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    """The noxfile as a module of its own."""
    spec = importlib.util.spec_from_file_location("noxfile_under_test", NOXFILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def execve(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What hand_over would have become."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.extend(arguments))
    return calls


def test_hands_over_to_the_nox_of_this_python(noxfile: ModuleType, execve: list[Any]) -> None:
    """With nox installed nothing is fetched, and the arguments arrive unchanged."""
    noxfile.hand_over(["-s", "accept", "--", "-k", "bf16"])
    python, arguments, environment = execve
    assert python == sys.executable
    assert arguments[1:] == ["-m", "nox", "--noxfile", str(NOXFILE), "-s", "accept", "--", "-k", "bf16"]
    assert environment[noxfile.HOST_PYTHON] == sys.executable


def test_hands_over_to_a_fetched_nox(noxfile: ModuleType, execve: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nox the private one is used, and it still learns which Python the user called."""
    monkeypatch.setattr(noxfile.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(noxfile, "bootstrapped_python", lambda folder: "/private/python")
    noxfile.hand_over([])
    assert execve[0] == execve[1][0] == "/private/python"
    assert execve[2][noxfile.HOST_PYTHON] == sys.executable


def test_refuses_an_old_python(noxfile: ModuleType, execve: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Python is told what is needed, in one line."""
    monkeypatch.setattr(noxfile.sys, "version_info", (3, 9, 18))
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("an old Python went on"))
    with pytest.raises(SystemExit, match=r"Python 3\.10 or newer is needed"):
        noxfile.hand_over([])


def test_fetches_nox_once(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first call makes the environment and installs nox; the second finds it."""
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> SimpleNamespace:
        commands.append(command)
        if command[-1] == "nox":
            programs = Path(command[0]).parent
            programs.mkdir(parents=True)
            (programs / "nox").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(noxfile.subprocess, "run", run)
    first = noxfile.bootstrapped_python(tmp_path / "bootstrap")
    assert [command[2] for command in commands] == ["venv", "pip"]
    assert noxfile.bootstrapped_python(tmp_path / "bootstrap") == first
    assert len(commands) == 2


def test_an_interrupted_fetch_is_begun_again(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without nox in it is not taken for a finished one; a failing pip is said with a way out."""
    name = f"bootstrap-{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / name / "bin").mkdir(parents=True)
    (tmp_path / name / "bin" / "python").touch()
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(noxfile.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"pytest_gpucluster\.plugin tests_acceptance"):
        noxfile.bootstrapped_python(tmp_path / "bootstrap")
    assert "--clear" in commands[0]


def test_says_what_to_install_without_ensurepip(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Debian's Python without its venv package gets the name of that package."""
    monkeypatch.setattr(noxfile.importlib.util, "find_spec", lambda name: None)
    package = rf"python{sys.version_info[0]}\.{sys.version_info[1]}-venv"
    with pytest.raises(SystemExit, match=package):
        noxfile.bootstrapped_python(tmp_path / "bootstrap")


def test_only_what_is_missing_is_installed(noxfile: ModuleType) -> None:
    """Present is left alone, too old and absent are asked for, markers hold, names are compared as indexes do."""
    installed = [("PyYAML", "6.0.3"), ("torch", "2.11.0+cu128"), ("rich", "12.0"), ("rich", "15.0")]
    wanted = ["pyyaml>=6.0", "torch>=2.4", "rich>=13", "peft>=0.18", "tomli>=2; python_version < '3'"]
    assert noxfile.unsatisfied(wanted, installed) == ["rich>=13", "peft>=0.18"]


def test_a_torch_without_gpus_is_not_shared(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """None for no torch or no GPU, for another Python's torch, and for one that cannot be imported."""
    here = list(sys.version_info[:2])
    seen = {"version": "2.11.0", "gpus": 8, "folders": ["/x/site-packages"], "python": here}
    asked: list[str] = []

    def answer(value: Any) -> None:
        def ask(python: str, program: str) -> Any:
            asked.append(python)
            return value

        monkeypatch.setattr(noxfile, "ask", ask)

    answer(None)
    assert noxfile.torch_of_host({}, "/usr/bin/python3") is None
    answer({**seen, "python": [2, 7]})
    assert noxfile.torch_of_host({}, "/usr/bin/python3") is None
    answer(seen)
    assert noxfile.torch_of_host({noxfile.HOST_PYTHON: "/opt/python"}, "/usr/bin/python3") == seen
    assert asked == ["/usr/bin/python3", "/usr/bin/python3", "/opt/python"]
    monkeypatch.undo()
    monkeypatch.setattr(noxfile, "STATE", Path(__file__).parent)
    assert noxfile.torch_of_host({}, "/nonexistent/python") is None


def test_a_torch_with_gpus_is_seen(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program that asks a Python for its torch answers with version, GPUs and the folders to share."""
    packages = tmp_path / "site-packages"
    (packages / "torch").mkdir(parents=True)
    cuda = "is_available = lambda: True; device_count = lambda: 8"
    (packages / "torch" / "__init__.py").write_text(f"__version__ = '9.9'\nclass cuda: {cuda}\n")
    monkeypatch.setattr(noxfile, "STATE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    torch = noxfile.torch_of_host({}, sys.executable)
    assert torch["version"] == "9.9"
    assert torch["gpus"] == 8
    assert torch["folders"][0] == str(packages)


def test_a_shared_torch_is_pinned(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment sees the host's folders, and its constraints hold the host's torch instead of CI's."""

    def run(*arguments: str, **options: Any) -> None:
        (Path(arguments[-1]) / "lib" / "python3.11" / "site-packages").mkdir(parents=True)

    torch = {"version": "2.11.0+cu128", "gpus": 8, "folders": ["/a/site-packages", "/b/dist-packages"]}
    monkeypatch.setattr(noxfile, "STATE", tmp_path)
    monkeypatch.setattr(noxfile, "torch_of_host", lambda environment, fallback: torch)
    venv = noxfile.Venv(SimpleNamespace(run=run, log=lambda text: None, warn=pytest.fail))
    assert "\ntorch==2.11.0+cu128\n" in venv.constraints.read_text()
    assert "torch==2.13" not in venv.constraints.read_text()
    (link,) = venv.path.rglob("host.pth")
    assert link.read_text().split() == torch["folders"]


def test_gpus_without_a_torch_that_sees_them_are_said(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine with nvidia-smi and no usable torch warns instead of rehearsing in silence."""
    said: list[str] = []
    session = SimpleNamespace(run=lambda *arguments, **options: Path(arguments[-1]).mkdir(), warn=said.append)
    monkeypatch.setattr(noxfile, "STATE", tmp_path)
    monkeypatch.setattr(noxfile, "torch_of_host", lambda environment, fallback: None)
    monkeypatch.setattr(noxfile.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    venv = noxfile.Venv(session)
    assert "nvidia-smi" in said[0]
    assert venv.constraints.read_text() == (NOXFILE.parent / "constraints.txt").read_text()


def test_broken_links_are_found(noxfile: ModuleType, tmp_path: Path) -> None:
    """Relative links are followed; addresses, anchors, code blocks and hidden folders are left alone."""
    (tmp_path / "docs").mkdir()
    (tmp_path / ".nox").mkdir()
    (tmp_path / ".nox" / "a.md").write_text("[x](gone.md)")
    (tmp_path / "docs" / "b.md").write_text(
        "[up](../README.md#part) [here](#part) [there](https://example.org/x) [gone](gone.md)\n```\n[x](no.md)\n```\n"
    )
    (tmp_path / "README.md").write_text("[docs](docs/b.md)")
    assert noxfile.broken_links(tmp_path) == ["docs/b.md: gone.md"]


def test_every_session_says_what_it_does() -> None:
    """`nox -l` is the help page: the promised sessions are there, each with a line of its own."""
    command = [sys.executable, "-m", "nox", "--noxfile", str(NOXFILE), "--list"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    promised = [
        "accept",
        "tests",
        "coverage",
        "lint",
        "types",
        "imports",
        "build",
        "pytest8",
        "nightly",
        "launches",
        "soak",
        "docs",
    ]
    described = re.findall(r"(?m)^[*-] (\w+) -> \S", page)
    assert [name for name in promised if name not in described] == []
