"""Everything a person or CI runs here: ``python3 noxfile.py -s accept``, ``python3 noxfile.py -l`` for the list.

Needs Python 3.10 or newer and nothing else: run as a script, it fetches nox into .nox/bootstrap when there is none, and
hands over to it. What sessions install lies under .nox/ too; remove that folder to start afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).resolve().parent
STATE = ROOT / ".nox"
OLDEST_PYTHON = (3, 10)
HOST_PYTHON = "GPUCLUSTER_HOST_PYTHON"  # the interpreter that the user called, across the step into nox's own

TOO_OLD = "Python {oldest} or newer is needed; {python} is {version}"

NO_VENV_MODULE = """\
{python} cannot make virtual environments: its ensurepip is missing. Install it and run this again:
  Debian, Ubuntu   apt install python{major}.{minor}-venv
  others           a Python that has venv and ensurepip, or nox itself (then: nox -s accept)"""

NO_NOX = """\
pip could not fetch nox (its message is above). Without an index, but with the dependencies installed, start pytest
yourself from this folder:
  python3 -m pytest -p pytest_gpucluster.plugin tests_acceptance"""


# --- Before nox is there: only the standard library ---


def hand_over(argv: list[str]) -> NoReturn:
    """Become ``nox`` with these arguments, fetching it first where this Python has none."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(TOO_OLD.format(oldest=oldest, python=sys.executable, version=sys.version.split()[0]))
    python = sys.executable if importlib.util.find_spec("nox") else bootstrapped_python(STATE / "bootstrap")
    environment = {**os.environ, HOST_PYTHON: sys.executable}
    sys.stdout.flush()
    arguments = [python, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *argv]
    os.execve(python, arguments, environment)  # noqa: S606 -- no shell is the point


def bootstrapped_python(folder: Path) -> str:
    """The Python of a private environment that has nox, made on first use.

    Raises:
        SystemExit: this Python cannot make environments, or pip could not fetch nox; the text says what to do.
    """
    folder = folder.with_name(f"{folder.name}-{sys.version_info[0]}.{sys.version_info[1]}")
    python = folder / "bin" / "python"
    if (folder / "bin" / "nox").exists():  # written last by pip: an interrupted attempt has none
        return str(python)
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(NO_VENV_MODULE.format(python=sys.executable, major=sys.version_info[0], minor=sys.version_info[1]))
    print(f"fetching nox into {folder} (once)", flush=True)  # noqa: T201 -- a script's word to its user
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if subprocess.run([str(python), "-m", "pip", "install", "--quiet", "nox"], check=False).returncode != 0:
        sys.exit(NO_NOX)
    return str(python)


if __name__ == "__main__":
    hand_over(sys.argv[1:])

import nox  # noqa: E402 -- first there after the step above
from packaging.requirements import Requirement  # noqa: E402 -- comes with nox
from packaging.utils import canonicalize_name  # noqa: E402 -- as above

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "imports", "tests"]

PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
FAST = "not slow and not soak"
SHORT = f"{FAST} and not long"
LONG = f"{FAST} and long"  # whole runs: minutes of their own, so that `tests` stays below eight
FAULTS = "tests/faults"
LAUNCHES = ("tests/launch", FAULTS)  # real torchruns by the dozen: minutes of their own, one after the other
PARALLEL = ("-n", "2", "--dist", "loadfile")  # tests mostly wait for the ranks they started; a file shares its runs
# A dump of every thread after this long in one test, then the end of the session: a hang must not cost the CI its hour.
HANG = ("-o", "faulthandler_timeout=240", "-o", "faulthandler_exit_on_timeout=true")
FOR_TESTS = {
    "OMP_NUM_THREADS": "1",  # several processes share few cores
    "TOKENIZERS_PARALLELISM": "false",  # tokenizers warn about forks otherwise
    "HF_HUB_OFFLINE": "1",  # no test may need the network
}
ASK_TORCH = """
import importlib.util, json, site, sys
found = None
if importlib.util.find_spec("torch"):
    import torch
    if torch.cuda.is_available():
        folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        found = {"version": torch.__version__, "gpus": torch.cuda.device_count(), "folders": folders}
print(json.dumps(found and {**found, "python": list(sys.version_info[:2])}))
"""
ASK_INSTALLED = """
import importlib.metadata as metadata, json
print(json.dumps([[d.metadata["Name"], d.version] for d in metadata.distributions()]))
"""


# --- One environment for all sessions, because a torch costs half a minute and a gigabyte ---


class Venv:
    """A virtual environment under .nox/, made on first use and filled with what is missing, never with more."""

    def __init__(self, session: nox.Session, name: str = "dev") -> None:
        """Make it, of the Python that runs nox; a torch of the host that sees GPUs shines through."""
        self.session = session
        self.path = STATE / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
        self.constraints = self.path / "constraints.txt"
        self._bin = self.path / "bin"
        if not self.constraints.exists():  # written last: an interrupted attempt has none
            session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(self.path), silent=True)
            self._share_torch_of_host()

    def run(self, *arguments: str | Path, **environment: str) -> None:
        """Run its Python with these arguments, as an activated environment would."""
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "VIRTUAL_ENV": str(self.path), **environment}
        self.session.run(str(self._bin / "python"), *map(str, arguments), env=variables)

    def test(self, *arguments: str) -> None:
        """Run a module, as ``python -m``, in the surroundings of our own tests."""
        self.run("-m", *arguments, **FOR_TESTS)

    def install(self, *groups: str, also: Iterable[str] = ()) -> None:
        """Install the project in place, its dependencies, those of ``groups``, and ``also``."""
        self.install_dependencies(*groups, also=also)
        digest = str(hash_of(ROOT / "pyproject.toml"))
        stamp = self.path / "project"
        if not stamp.exists() or stamp.read_text() != digest:  # entry points and metadata come from that file
            self.pip("install", "--no-deps", "--editable", str(ROOT))
            stamp.write_text(digest)

    def install_dependencies(self, *groups: str, also: Iterable[str] = ()) -> None:
        """Install what the project needs, without the project."""
        self.require(*PYPROJECT["project"]["dependencies"], *self._of_groups(groups), *also)

    def install_tools(self, *groups: str) -> None:
        """Install the tools of ``groups`` alone."""
        self.require(*self._of_groups(groups))

    def require(self, *requirements: str) -> None:
        """Install those that are not satisfied by what is there, the host's share included."""
        missing = unsatisfied(requirements, ask(self._bin / "python", ASK_INSTALLED))
        if missing:
            self.pip("install", "--constraint", str(self.constraints), *missing)

    def pip(self, command: str, *arguments: str) -> None:
        """Run its pip."""
        self.run("-m", "pip", command, "--quiet", *arguments)

    def _of_groups(self, groups: Iterable[str]) -> tuple[str, ...]:
        return nox.project.dependency_groups(PYPROJECT, *groups)

    def _share_torch_of_host(self) -> None:
        torch = torch_of_host(os.environ, sys.executable)
        lines = (ROOT / "constraints.txt").read_text()
        if torch is None:
            if shutil.which("nvidia-smi"):
                self.session.warn("nvidia-smi is here, but no torch of this python3 sees a GPU: installing one")
        else:
            self.session.log(f"using the torch {torch['version']} that is installed here; it sees {torch['gpus']} GPUs")
            packages = next((self.path / "lib").glob("python*")) / "site-packages"
            (packages / "host.pth").write_text("\n".join(torch["folders"]) + "\n")
            lines = re.sub(r"(?m)^torch==.*$", f"torch=={torch['version']}", lines)
        self.constraints.write_text(lines)


def ask(python: str | Path, program: str) -> Any:
    """What a short program prints as JSON on its last line when another Python runs it."""
    done = subprocess.run([str(python), "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=STATE)
    return json.loads(done.stdout.splitlines()[-1])


def torch_of_host(environment: Mapping[str, str], fallback: str) -> dict[str, Any] | None:
    """The torch of the Python the user called, if it sees a GPU and this Python can import it; else None."""
    python = environment.get(HOST_PYTHON, fallback)
    try:
        torch = ask(python, ASK_TORCH)
    except (subprocess.CalledProcessError, OSError, ValueError, IndexError):
        return None  # a torch that cannot even be imported is not worth sharing
    return torch if torch and torch["python"] == list(sys.version_info[:2]) else None


def unsatisfied(requirements: Iterable[str], installed: Iterable[tuple[str, str]]) -> list[str]:
    """Those requirements that apply here and that no installed distribution fulfils; the first of a name counts."""
    versions: dict[str, str] = {}
    for name, version in installed:
        versions.setdefault(canonicalize_name(name), version)
    return [text for text in requirements if not _is_satisfied(Requirement(text), versions)]


def _is_satisfied(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    version = versions.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def hash_of(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# --- The sessions; the first line of each docstring is its line in `nox -l` ---


@nox.session(python=False)
def accept(session: nox.Session) -> None:
    """Judge this machine: all GPUs it has, else a rehearsal on the CPU; `-- ARGS` go to pytest (`-- -k bf16`)."""
    venv = Venv(session)
    venv.install()
    venv.run("-m", "pytest", "tests_acceptance", "--junitxml=gpucluster-results/junit.xml", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Run the project's own tests but `launches` and the slow ones (no GPU), measured; `-- ARGS` run some, unmeasured."""
    venv = Venv(session)
    venv.install("tests")
    if session.posargs:
        venv.test("pytest", *HANG, *session.posargs)
        return
    ignored = [f"--ignore={path}" for path in LAUNCHES]
    venv.run("-m", "coverage", "erase")
    venv.test("coverage", "run", "-m", "pytest", *HANG, *PARALLEL, "-m", SHORT, "-ra", "--durations=15", *ignored, "tests")


@nox.session(python=False)
def launches(session: nox.Session) -> None:
    """Start real runs and plant the faults they have to survive (minutes, no GPU); adds to what `tests` measured."""
    venv = Venv(session)
    venv.install("tests")
    told = ("pytest", *HANG, "-ra", "--durations=15")
    if not session.posargs:
        ignored = [f"--ignore={path}" for path in LAUNCHES]
        venv.test("coverage", "run", "-m", *told, "-m", LONG, *PARALLEL, *ignored, "tests")
    venv.test(
        *told, "-m", FAST, *(session.posargs or LAUNCHES)
    )  # unmeasured: environment() in tests/support/launching.py says why


@nox.session(python=False)
def coverage(session: nox.Session) -> None:
    """Judge what `tests` covered, the processes it started included; run after it."""
    venv = Venv(session)
    venv.install_tools("tests")
    if not list(ROOT.glob(".coverage*")):
        session.error("nothing was measured yet: run -s tests coverage")
    if list(ROOT.glob(".coverage.*")):
        venv.run("-m", "coverage", "combine", "--quiet")
    venv.run("-m", "coverage", "report")


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Check style and format (ruff); `-- --fix` repairs what it can."""
    venv = Venv(session)
    venv.install_tools("lint")
    fix = session.posargs == ["--fix"]
    venv.run("-m", "ruff", "check", *session.posargs, ".")
    venv.run("-m", "ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """Check types (mypy --strict)."""
    venv = Venv(session)
    venv.install_dependencies("types")
    venv.run("-m", "mypy", *session.posargs)
    venv.run("-m", "mypy", "noxfile.py", "conftest.py")


@nox.session(python=False)
def imports(session: nox.Session) -> None:
    """Check who imports whom (import-linter; the contracts are in pyproject.toml)."""
    venv = Venv(session)
    venv.install_tools("imports")
    venv.run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", PYTHONPATH=str(ROOT))


@nox.session(python=False)
def build(session: nox.Session) -> None:
    """Build sdist and wheel, look into them, then run `wheel`."""
    venv = Venv(session)
    venv.install("build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    venv.run("-m", "build", "--outdir", "dist", ".")  # the wheel from the sdist: what is not in the one fails the other
    venv.test("pytest", "tests/project/test_packaging.py", "-m", "slow", "-q")
    session.notify("wheel")


@nox.session(python=False)
def wheel(session: nox.Session) -> None:
    """Install the built wheel by itself and rehearse the quick criteria from it in an empty folder."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        session.error("there is no wheel in dist/: run -s build")
    venv = Venv(session, "wheel")
    venv.pip("uninstall", "--yes", "pytest-gpucluster")  # else pip keeps an older build of the same version
    venv.pip("install", "--constraint", str(venv.constraints), str(wheels[-1]))
    with empty_folder(session) as folder:
        venv.run("-m", "pytest", "--pyargs", "tests_acceptance", "--collect-only", "-q")
        quick = ("--gpucluster-level", "quick", "--junitxml=junit.xml")
        venv.run("-m", "pytest", "--pyargs", "tests_acceptance", *quick, *session.posargs)
        if not (folder / "junit.xml").exists():
            session.error("the rehearsal ended well and wrote no junit.xml")


@contextlib.contextmanager
def empty_folder(session: nox.Session) -> Iterator[Path]:
    """A folder outside the checkout, as working directory: nothing of the sources can be found from it."""
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder, session.chdir(folder):
        yield Path(folder)


@nox.session(python=False)
def pytest8(session: nox.Session) -> None:
    """Run the fast tests on pytest 8, in an environment of its own."""
    venv = Venv(session, "pytest8")
    venv.install("tests", also=["pytest<9"])
    venv.test("pytest", "-m", FAST, *(session.posargs or ["tests"]))


@nox.session(python=False)
def nightly(session: nox.Session) -> None:
    """Run every test, the slow ones too, then `soak` and `pytest8`."""
    venv = Venv(session)
    venv.install("tests")
    venv.test("pytest", "-ra", "--durations=25", "tests")
    session.notify("soak", posargs=[])
    session.notify("pytest8", posargs=[])


@nox.session(python=False)
def soak(session: nox.Session) -> None:
    """Repeat the fault tests, 10 rounds or as many as said (`-- 50`); the first round that fails ends it."""
    rounds = int(session.posargs[0]) if session.posargs else 10
    venv = Venv(session)
    venv.install("tests")
    for number in range(1, rounds + 1):
        session.log(f"round {number} of {rounds}")
        venv.test("pytest", "-q", "-x", "-m", FAST, FAULTS)


@nox.session(python=False)
def docs(session: nox.Session) -> None:
    """Check that every relative link in the Markdown files leads somewhere."""
    broken = broken_links(ROOT)
    if broken:
        session.error("links that lead nowhere:\n" + "\n".join(broken))


def broken_links(root: Path) -> list[str]:
    """``file: target`` for each relative link of a Markdown file under ``root`` to a path that does not exist."""
    found = []
    for file in sorted(root.rglob("*.md")):
        if any(part.startswith(".") for part in file.relative_to(root).parts):
            continue  # what tools keep there is not ours
        prose = re.sub(r"(?ms)^```.*?^```", "", file.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path = target.partition("#")[0]
            if path and "://" not in path and not path.startswith("mailto:") and not (file.parent / path).exists():
                found.append(f"{file.relative_to(root)}: {target}")
    return found
