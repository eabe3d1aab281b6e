"""The environment that the noxfile makes on a bare machine, and its sessions. No network."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support import REPOSITORY

PACKAGES = Path("lib") / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """.ci/environment.py as a module of its own, which makes its environments in a folder of the test."""
    spec = importlib.util.spec_from_file_location("environment_under_test", REPOSITORY / ".ci" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("# why\ntorch==2.13.0\nruff==0.1\n", encoding="utf-8")
    return module


@pytest.fixture
def commands(bare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started; none does anything, and pip fails where the first one is the word ``offline``."""
    found: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        found.append(command)
        if "venv" in command:
            (Path(command[-1]) / PACKAGES).mkdir(parents=True, exist_ok=True)
        failed = "pip" in command and found[0] == ["offline"]
        return SimpleNamespace(returncode=int(failed), stdout="")

    monkeypatch.setattr(bare, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    return found


def test_nox_is_fetched_once(bare: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call makes the environment and installs nox; the second finds it, and the arguments arrive unchanged."""
    became: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: became.extend(arguments))
    for _ in range(2):
        bare.hand_over(["-s", "accept", "--", "-k", "bf16"])
    assert [command[2] for command in commands if command[1] == "-m"] == ["venv", "pip"]
    python = str(bare.environment() / "bin" / "python")
    noxfile = str(bare.ROOT / "noxfile.py")
    assert became[:2] == [python, [python, "-m", "nox", "--noxfile", noxfile, "-s", "accept", "--", "-k", "bf16"]]


def test_an_interrupted_fetch_is_begun_again(bare: ModuleType, commands: list[list[str]]) -> None:
    """An environment without nox in it is not taken for a finished one; a failing pip is reported with a way out."""
    commands.append(["offline"])
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"pytest_gpucluster\.plugin tests_acceptance"):
            bare.environment()
    assert [command[3] for command in commands if "venv" in command] == ["--clear", "--clear"]


def test_an_old_python_is_refused(bare: ModuleType, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made, and one line says what is needed."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"Python 3\.10 or newer is needed"):
        bare.hand_over([])
    assert commands == []


def test_without_ensurepip_the_package_is_named(bare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Python without its venv package gets the name of that package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=rf"apt install python{re.escape(bare.VERSION)}-venv"):
        bare.environment()


CUDA = {"torch": "2.13.0", "nvidia-cublas": "13.0", "nvidia-nccl-cu13": "2.28"}
CPU = {"torch": "2.13.0+cpu", "sympy": "1.14"}


@pytest.mark.parametrize(
    ("found", "has_gpu", "said"),
    [
        (CUDA, False, ["torch 2.13.0, with CUDA: 3 packages, about 2.5 GB", "no GPU here", "about 0.2 GB", "PIP_FIND_LINKS"]),
        (CUDA, True, ["torch 2.13.0, with CUDA: 3 packages, about 2.5 GB"]),
        (CPU, False, ["torch 2.13.0+cpu, a CPU build: 2 packages, about 0.2 GB"]),
        (CPU, True, ["torch 2.13.0+cpu, a CPU build", "a CPU build cannot measure"]),
    ],
)
def test_what_is_fetched_is_said(  # noqa: PLR0913 -- a case, and what it stands on
    bare: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    found: dict[str, str],
    has_gpu: bool,
    said: list[str],
) -> None:
    """Before pip fetches gigabytes: which build, how large, what to do where it does not fit the machine. No host is named."""
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in found.items()]}
    asked: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=int("-c" in command), stdout=json.dumps(report))

    monkeypatch.setattr(bare, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(bare.shutil, "which", lambda _name: "/usr/bin/nvidia-smi" if has_gpu else None)
    monkeypatch.setattr(bare, "NVIDIA_DRIVER", tmp_path / "absent")
    assert bare.announce_torch(tmp_path) is (found is CUDA)
    text = capsys.readouterr().err
    assert [words for words in said if words not in text] == []
    assert text.count("\n") == len({"no GPU here", "a CPU build cannot measure"} & {*said}) * (2 if found is CUDA else 1) + 1
    assert "://" not in text
    assert asked[-1][-1] == "torch==2.13.0"


@pytest.mark.parametrize(
    ("returncode", "printed"), [(0, "{}"), (1, ""), (1, "no JSON"), (1, "{}"), (1, '{"install": [1]}'), (1, None)]
)
def test_nothing_is_said_of_a_torch_that_is_there_or_unknown(  # noqa: PLR0913 -- as above
    bare: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    returncode: int,
    printed: str | None,
) -> None:
    """A torch that is installed is not fetched; where pip cannot tell, or gives no answer, the installation will."""

    def run(command: list[str], *, timeout: float | None = None, **_options: Any) -> SimpleNamespace:
        if timeout is not None and printed is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=returncode, stdout=printed)

    monkeypatch.setattr(bare, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    assert bare.announce_torch(tmp_path) is False
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def sessions() -> ModuleType:
    """The noxfile, loaded once: nox keeps each session."""
    pytest.importorskip("nox", reason="the noxfile imports it")
    return loaded("noxfile")


def loaded(name: str) -> ModuleType:
    """A file of the repository as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", REPOSITORY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("groups", [(), ("tests",), ("types", "tests")])
def test_a_fresh_environment_gets_the_project(
    sessions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: tuple[str, ...]
) -> None:
    """Once, whatever groups a session wants: ``accept`` wants none. What another session installed does not count."""
    (tmp_path / "constraints.txt").write_text("", encoding="utf-8")
    made: list[tuple[str, ...]] = []
    (tmp_path / "pyproject.toml").write_text("[dependency-groups]\nlint = []\ntests = []\ntypes = []\n", encoding="utf-8")
    monkeypatch.setattr(sessions, "ROOT", tmp_path)
    monkeypatch.setattr(sessions, "environment", lambda _name="dev": tmp_path)
    monkeypatch.setattr(sessions, "announce_torch", lambda _folder: False)
    monkeypatch.setattr(sessions, "run", lambda _session, *words, **_options: made.append(words))
    sessions.install(None, "lint", project=False)
    for _ in range(2):
        sessions.install(None, *groups)
    assert [words[-1] == str(tmp_path) for words in made] == [False, True]


@pytest.mark.parametrize(("found", "taken"), [((0, 9), True), ((os.ST_NOEXEC, 9), False), ((0, 1), False)])
def test_files_of_tests_lie_in_memory(
    sessions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: tuple[int, int], *, taken: bool
) -> None:
    """Where there is room and programs may start; every user has a way to them, and nothing is left there."""
    shown = SimpleNamespace(f_flag=found[0], f_bavail=found[1] << 18, f_frsize=4096)
    given: list[str | None] = []

    def run(_session: object, *_words: str, **variables: str) -> None:
        given.append(variables.get("TMPDIR"))
        assert all(Path(folder).stat().st_mode & 0o777 == 0o711 for folder in given if folder)

    monkeypatch.setattr(sessions, "IN_MEMORY", tmp_path)
    monkeypatch.setattr(sessions.os, "statvfs", lambda _folder: shown)
    monkeypatch.setattr(sessions, "run", run)
    sessions.run_tests(None, "pytest")
    (folder,) = given
    assert (folder is not None and Path(folder).parent == tmp_path) == taken
    assert not any(tmp_path.iterdir())


def test_a_machine_without_such_a_folder(sessions: ModuleType, tmp_path: Path) -> None:
    """Files lie where they usually do."""
    assert not sessions.has_room(tmp_path / "absent")


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_torch_that_sees_gpus_is_shared(
    bare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: int
) -> None:
    """The environment sees its folder, and pip keeps its version. A torch without a GPU is not shared, and that is said."""
    host, made = tmp_path / "host" / "site-packages", tmp_path / "made"
    (host / "torch").mkdir(parents=True)
    (made / PACKAGES).mkdir(parents=True)
    cuda = f"class cuda: is_available = lambda: {gpus > 0}"
    (host / "torch" / "__init__.py").write_text(f"__version__ = '9.9+cu1'\n{cuda}\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(host))
    monkeypatch.setattr(bare.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    constraints = bare.share_torch(made)
    link = made / PACKAGES / "host.pth"
    if gpus:
        assert constraints == "# why\ntorch==9.9+cu1\nruff==0.1\n"
        assert link.read_text(encoding="utf-8").splitlines()[0] == str(host)
    else:
        assert constraints == (tmp_path / "constraints.txt").read_text(encoding="utf-8")
        assert not link.exists()
        assert "nvidia-smi is here" in capsys.readouterr().err


def test_every_session_says_what_it_does() -> None:
    """`nox -l` is the help page: the promised sessions are there, each with a line of its own."""
    pytest.importorskip("nox", reason="nox lists the sessions")
    command = [sys.executable, "-m", "nox", "--noxfile", str(REPOSITORY / "noxfile.py"), "--list"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    promised = "accept build container coverage deploy docs imports launches lint lock netlab nightly page prepare"
    promised += " pytest8 site slurm soak tests types wheel"
    assert sorted(re.findall(r"(?m)^[*-] (\w+) -> \S", page)) == promised.split()


def test_launches_run_every_long_test(sessions: ModuleType) -> None:
    """A file whose mark comes from elsewhere than its own text would be left out in silence."""
    assert {folder.name for folder in loaded("conftest").LAUNCHES} == {*sessions.LONG_FOLDERS}
    assert not [file for file in REPOSITORY.glob("tests/**/conftest.py") if "mark.long" in file.read_text(encoding="utf-8")]
    _, expression, *files = sessions.long_tests()
    assert expression.endswith(" and long")
    expected = {"tests/launch/test_launch_gate.py", "tests/faults/test_faults_ends.py", "tests/unit/measurements/test_rails.py"}
    assert expected <= {*files} < {str(file.relative_to(REPOSITORY)) for file in REPOSITORY.glob("tests/**/test_*.py")}


NIGHT_ONLY = {
    "tests/e2e/test_deploy_container.py": "builds an image for 8 minutes; the session `container` runs it",
    "tests/finetune/test_compatibility.py": "20 restarts in other worlds; by day, one of two ranks by one (test_reading.py)",
    "tests/finetune/test_errors_on_one_rank.py": "an error in each function; test_ranks.py has two by day",
}
"""Files of which CI runs no test, each with the reason."""


def run_by_day(text: str) -> list[str]:
    """The tests of a file that are not marked slow or soak as a whole."""
    tree = ast.parse(text)
    whole = [ast.unparse(line) for line in tree.body if isinstance(line, (ast.Assign, ast.AnnAssign))]
    if any(line.startswith("pytestmark") and NIGHT.search(line) for line in whole):
        return []
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")]
    return [one.name for one in functions if not any(NIGHT.fullmatch(ast.unparse(mark)) for mark in one.decorator_list)]


NIGHT = re.compile(r"pytest\.mark\.(slow|soak)\b")


def test_every_file_of_runs_has_a_test_by_day() -> None:
    """A family that only the nightly run has would be broken for a day."""
    folders = ("launch", "faults", "e2e", "netlab", "finetune")
    files = [file for folder in folders for file in sorted((REPOSITORY / "tests" / folder).glob("test_*.py"))]
    assert len(files) > 80
    none = {str(file.relative_to(REPOSITORY)) for file in files if not run_by_day(file.read_text(encoding="utf-8"))}
    assert none == {*NIGHT_ONLY}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("@pytest.mark.slow\ndef test_a(): pass\n", []),
        ("@pytest.mark.soak\n@pytest.mark.fault\ndef test_a(): pass\ndef helps(): pass\n", []),
        ("pytestmark = [pytest.mark.e2e, pytest.mark.slow]\ndef test_a(): pass\n", []),
        ("@pytest.mark.parametrize('a', [1, pytest.param(2, marks=pytest.mark.slow)])\ndef test_a(a): pass\n", ["test_a"]),
        ("@pytest.mark.slow\ndef test_a(): pass\ndef test_b(): pass\n", ["test_b"]),
    ],
)
def test_a_file_without_a_test_by_day_is_seen(text: str, found: list[str]) -> None:
    """One value that is slow leaves the others; one test that is slow leaves the file its others."""
    assert run_by_day(text) == found
