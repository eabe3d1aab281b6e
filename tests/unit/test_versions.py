"""Versions that are too old are refused by a sentence, whichever way they come in; pip is not always asked."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.plugin import activation
from tests.support import REPOSITORY
from tests.support.launching import environment

if TYPE_CHECKING:
    from pathlib import Path

PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
OLD_PYTEST = """
import sys, pytest
pytest.__version__, pytest.version_tuple = {version!r}, {parts!r}
sys.exit(pytest.main([*sys.argv[1:], "-p", "no:cacheprovider"]))
"""
OLD_PYTHON = "import sys\nsys.version_info = ({major}, {minor}, 1)\nimport {module}\n"


def started(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env=environment(measured=False),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize(("major", "minor"), [(3, 9), (3, 6), (2, 7)])
@pytest.mark.parametrize("module", ["pytest_gpucluster.cli", "pytest_gpucluster.plugin"])
def test_an_old_python(major: int, minor: int, module: str, tmp_path: Path) -> None:
    """Of a checkout: one sentence, no traceback."""
    done = started(tmp_path, OLD_PYTHON.format(major=major, minor=minor, module=module))
    assert done.returncode == 1
    assert done.stderr == f"pytest-gpucluster needs Python 3.10 or newer; {sys.executable} is {major}.{minor}\n"


def test_the_oldest_python_is_that_of_pip() -> None:
    """Said twice; both say the same, and so do the classifiers."""
    text = (REPOSITORY / "pytest_gpucluster" / "__init__.py").read_text(encoding="utf-8")
    (oldest,) = re.findall(r"sys\.version_info < \((\d+), (\d+)\)", text)
    assert f'requires-python = ">={".".join(oldest)}"' in PYPROJECT
    assert re.findall(r"Python :: (3\.\d+)", PYPROJECT)[0] == ".".join(oldest)


@pytest.mark.parametrize("version", [(6, 2, 5), (7, 4, 4)])
def test_an_old_pytest_is_refused(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version that is there and the one that is needed."""
    monkeypatch.setattr(pytest, "version_tuple", version)
    monkeypatch.setattr(pytest, "__version__", ".".join(map(str, version)))
    with pytest.raises(pytest.UsageError, match=rf"pytest {version[0]}\.\d\.\d is too old for gpucluster: at least 8 is"):
        activation.refuse_old_pytest()


@pytest.mark.parametrize("version", [(8, 0, 0), (9, 1, 1), (10, 0, 0)])
def test_a_pytest_that_will_do(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared as numbers."""
    monkeypatch.setattr(pytest, "version_tuple", version)
    activation.refuse_old_pytest()


def test_the_oldest_pytest_is_that_of_pip() -> None:
    """Said twice; both say the same."""
    assert f'"pytest>={activation.OLDEST_PYTEST}",' in PYPROJECT


def test_a_run_under_an_old_pytest(tmp_path: Path) -> None:
    """A usage error, and no report; a project that does not use the plugin is left alone."""
    script = OLD_PYTEST.format(version="7.4.4", parts=(7, 4, 4))
    done = started(tmp_path, script, "--pyargs", "tests_acceptance", "--gpucluster-level", "quick")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: pytest 7.4.4 is too old for gpucluster" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "gpucluster-results").exists()
    (tmp_path / "test_other.py").write_text("def test_other(): pass\n", encoding="utf-8")
    assert started(tmp_path, script, "test_other.py").returncode == 0


def test_uvx_finds_a_command(tmp_path: Path) -> None:
    """``uvx pytest-gpucluster`` starts the script that has the name of the package: it is the command itself."""
    scripts = dict(re.findall(r'(?m)^([\w-]+) = "(pytest_gpucluster\.[\w.]+:\w+)"', PYPROJECT))
    assert scripts["pytest-gpucluster"] == scripts["gpucluster"] == "pytest_gpucluster.cli:main"
    script = "import sys\nfrom pytest_gpucluster.cli import main\nsys.argv[0] = 'pytest-gpucluster'\nsys.exit(main())"
    done = started(tmp_path, script, "--version")
    assert (done.returncode, done.stdout) == (0, f"pytest-gpucluster {metadata.version('pytest-gpucluster')}\n")
