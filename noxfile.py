"""Everything a person or CI runs here: ``python3 noxfile.py -s accept``, ``python3 noxfile.py -l`` for the list.

As a script it makes one environment under .nox/ with nox in it and hands over to that nox; the sessions install into the
same environment, because a torch costs half a minute and a gigabyte. Remove .nox/ to start afresh.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / ".ci"))

from environment import ROOT, announce_torch, environment, hand_over

if __name__ == "__main__":
    hand_over(sys.argv[1:])

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", "imports", "tests"]
nox.options.default_venv_backend = "none"

FAST = "not slow and not soak"
NETLAB = "tests/netlab"  # hosts in network namespaces, which only root makes
# Tests wait for starts, beats and ends: one process more than cores leaves no core idle. A file shares its runs. A worker that
# a timeout ends is not replaced: with "loadfile", xdist may then wait without an end. The longest files come first, by
# tests/conftest.py; xdist alone would begin with those of most tests.
SPLIT = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0")
WORKERS = ("-n", str((os.cpu_count() or 1) + 1), *SPLIT)
QUICK = ("-m", f"{FAST} and not long", *WORKERS, f"--ignore={NETLAB}", "tests")
LONG_FOLDERS = ("launch", "faults")  # as conftest.py has them
# A dump of every thread after this long in one test, then the end of the session: a hang must not cost the CI its hour.
SHOWN = ("-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true", "-ra", "--durations=15")
PACKAGING = "8"  # of pyroma's 10: an address of the project and of an author are missing until there is one
# Several processes share few cores; tokenizers warn about forks otherwise; no test may need the network. Bytecode is kept, but
# never beside the sources: without it each of the thousand processes compiles the whole package.
BYTECODE = {"PYTHONPYCACHEPREFIX": str(ROOT / ".nox" / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 8 << 30  # noqa: S108 -- the files below are in a folder with a name by chance
FOR_TESTS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **BYTECODE}


def run(session: nox.Session, *arguments: str, name: str = "dev", **variables: str) -> None:
    """Run a module, ``python -m``, as if the environment were activated."""
    folder = environment(name)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "VIRTUAL_ENV": str(folder), **variables}
    session.run(str(folder / "bin" / "python"), "-m", *arguments, env=variables)


def run_tests(session: nox.Session, *arguments: str, name: str = "dev", **variables: str) -> None:
    """Run tests with their temporary files in memory, where there is room.

    Tests write some hundred thousand small files. A slow disk makes 160 s of what takes 9 s in memory.
    """
    with ExitStack() as kept:
        if has_room(IN_MEMORY):
            made = tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="gpucluster-", ignore_cleanup_errors=True)
            folder = kept.enter_context(made)
            Path(folder).chmod(0o711)  # some tests are two users, who both have a way to /tmp
            variables["TMPDIR"] = folder
        run(session, *arguments, name=name, **FOR_TESTS, **variables)


def has_room(folder: Path) -> bool:
    """Whether tests can write into it, and start programs there."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    found = os.statvfs(folder)
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize > ROOM_BYTES


def install(session: nox.Session, *groups: str, project: bool = True, name: str = "dev") -> None:
    """Install dependency groups, and the project in place, unless that was done for this pyproject.toml."""
    pyproject, constraints = ROOT / "pyproject.toml", environment(name) / "constraints.txt"
    wanted = nox.project.dependency_groups(nox.project.load_toml(pyproject), *groups)
    stamps = [environment(name) / f"installed-{group}" for group in groups or ("project",)]
    digest = hashlib.sha256(pyproject.read_bytes() + constraints.read_bytes()).hexdigest()
    if not all(stamp.exists() and stamp.read_text() == digest for stamp in stamps):
        ours = ("--editable", str(ROOT)) if project else ()
        quiet = () if project and announce_torch(environment(name)) else ("--quiet",)  # gigabytes show how far they are
        run(session, "pip", "install", *quiet, "--constraint", str(constraints), *wanted, *ours, name=name)
        for stamp in stamps:
            stamp.write_text(digest)


@nox.session
def prepare(session: nox.Session) -> None:
    """Install what the sessions of .ci/run need, so that they can run beside each other."""
    install(session, "types", "tests", "deploy", "build")


def long_tests() -> list[str]:
    """What selects the long tests: by their files, because each worker would take 18 CPU seconds to collect all others."""
    files = [file for file in sorted(ROOT.glob("tests/**/test_*.py")) if file.parent.name != Path(NETLAB).name]
    long = [file for file in files if file.parent.name in LONG_FOLDERS or "mark.long" in file.read_text(encoding="utf-8")]
    return ["-m", f"{FAST} and long", *(str(file.relative_to(ROOT)) for file in long)]


@nox.session
def accept(session: nox.Session) -> None:
    """Judge this machine: all GPUs it has, else a rehearsal on the CPU; `-- ARGS` go to pytest (`-- -k bf16`)."""
    install(session)
    run(session, "pytest", "tests_acceptance", "--junitxml=gpucluster-results/junit.xml", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the project's own tests but `launches` and the slow ones (no GPU); `-- ARGS` run some.

    With MEASURE_COVERAGE=1 they are measured for `coverage`: two cases of each test, no import of torch.
    """
    install(session, "tests")
    if os.environ.get("MEASURE_COVERAGE") == "1" and not session.posargs:
        run(session, "coverage", "erase")
        run_tests(session, "coverage", "run", "-m", "pytest", *SHOWN, *QUICK)
    else:
        run_tests(session, "pytest", *SHOWN, *(session.posargs or QUICK))


@nox.session
def launches(session: nox.Session) -> None:
    """Start whole runs and real torchruns, and plant the faults they have to survive (minutes, no GPU); not measured."""
    install(session, "tests")
    # Not measured: a tracer in every process of a run costs 40 % more CPU, and `tests` alone covers 90 %.
    chosen = ("-m", FAST, *session.posargs) if session.posargs else (*WORKERS, *long_tests())
    run_tests(session, "pytest", *SHOWN, *chosen)


def unpack(session: nox.Session, *packages: str, program: str) -> str:
    """Unpack Debian packages under .nox/ and install none; their folder.

    It is "" where the program is installed, and where the packages cannot be had: tests that need them are then skipped.
    """
    root = ROOT / ".nox" / packages[0]
    if not root.exists():
        if shutil.which(program) is not None or shutil.which("apt-get") is None:
            return ""
        wanted = ("install", "--simulate", "--no-install-recommends", *packages)
        every = range(256)  # exit codes: a machine without the network, or without lists of packages, runs all else
        planned = str(session.run("apt-get", *wanted, external=True, silent=True, success_codes=every))
        files = re.findall(r"(?m)^Inst (\S+)", planned)
        with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder, session.chdir(folder):
            session.run("apt-get", "download", *files, external=True, success_codes=every)
            if not files or len([*Path(folder).glob("*.deb")]) < len(files):
                session.warn(f"apt-get cannot download {packages[0]}, so its tests are skipped (apt-get update may help)")
                return ""
            for package in Path(folder).glob("*.deb"):
                session.run("dpkg", "--extract", package.name, "unpacked", external=True)
            shutil.move("unpacked", root)
    return str(root)


@nox.session
def netlab(session: nox.Session) -> None:
    """Plant network faults between hosts that are network namespaces (Linux, root, iproute2; 3 minutes); skips elsewhere."""
    install(session, "tests")
    variables = {"GPUCLUSTER_TEST_IPTABLES": unpack(session, "iptables", program="iptables")}
    run_tests(session, "pytest", *SHOWN, "-n", "2", *SPLIT, "-m", FAST, *(session.posargs or [NETLAB]), **variables)


def unpack_slurm(session: nox.Session) -> dict[str, str]:
    """The variable that shows Slurm to the tests that start one."""
    return {"GPUCLUSTER_TEST_SLURM": unpack(session, "slurmctld", "slurmd", "munge", program="slurmctld")}


@nox.session
def slurm(session: nox.Session) -> None:
    """Run rehearsals as jobs of a real Slurm; Debian's packages are unpacked under .nox/slurmctld, nothing is installed."""
    install(session, "tests")
    files = map(str, sorted(ROOT.glob("tests/e2e/test_*_slurm*.py")))
    chosen = session.posargs or ("-m", FAST, *files)
    run_tests(session, "pytest", *SHOWN, *("-n", "2", *SPLIT), *chosen, **unpack_slurm(session))


@nox.session
def deploy(session: nox.Session) -> None:
    """Check deploy/: schemas of Kubernetes, models of Kubeflow, kustomize (if kubectl is there), hadolint, promtool."""
    install(session, "deploy")
    names = ("project/test_deploy", "project/test_deploy_kubernetes", "project/test_deploy_container", "unit/page/test_metrics")
    variables = {"GPUCLUSTER_TEST_PROMTOOL": unpack(session, "prometheus", program="promtool")}
    run_tests(session, "pytest", *SHOWN, *(session.posargs or [f"tests/{name}.py" for name in names]), **variables)


@nox.session
def container(session: nox.Session) -> None:
    """Build the image of deploy/container on a base made here, and run its self-test inside (root, buildah; 8 minutes)."""
    install(session, "tests")
    run(session, "pytest", *SHOWN, *(session.posargs or ["tests/e2e/test_deploy_container.py"]), **FOR_TESTS)


@nox.session
def lock(session: nox.Session) -> None:
    """Write the lock files of deploy/container anew: each version with its hashes; torch and its CUDA in their own file."""
    install(session, "lock", project=False)
    folder = ROOT / "deploy" / "container"
    head = "# Made by: noxfile.py -s lock. Pinned with hashes, for Python 3.11 and later on x86_64 and aarch64.\n"
    options = ("--no-config", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-header")
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as made:
        tools, whole = Path(made, "tools.in"), Path(made, "whole.txt")
        tools.write_text("uv\ncyclonedx-bom\n")
        sources = {folder / "requirements-build.txt": (str(tools),), whole: ("pyproject.toml", "-c", "constraints.txt")}
        for file, wanted in sources.items():
            run(session, "uv", "pip", "compile", *options, "--no-annotate", "-o", str(file), *wanted)
        entries = re.split(r"\n(?=[a-z])", whole.read_text().rstrip())
    of_torch = re.compile(r"(torch|triton|cuda-[\w-]+|nvidia-(?!ml-py)[\w-]+)==")
    elsewhere = re.compile(r"[^\\]*sys_platform == '(win32|emscripten)'")
    kept = [entry for entry in entries if not elsewhere.match(entry)]
    for name, is_torch in (("requirements-torch.txt", True), ("requirements.txt", False)):
        found = [entry for entry in kept if bool(of_torch.match(entry)) == is_torch]
        (folder / name).write_text(head + "\n".join(found) + "\n")
    build = folder / "requirements-build.txt"
    build.write_text(head + build.read_text())


@nox.session
def page(session: nox.Session) -> None:
    """Open pages in Chromium, search and print them, ask axe-core (Debian: `apt-get install chromium`); skips elsewhere."""
    install(session, "page")
    run_tests(session, "pytest", *SHOWN, *(session.posargs or ["tests/page"]))


@nox.session
def coverage(session: nox.Session) -> None:
    """Judge what `tests` covered with MEASURE_COVERAGE=1, the processes that they started included."""
    install(session, "tests")
    run(session, "coverage", "combine", "--quiet", "--keep")
    run(session, "coverage", "report")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format (ruff); `-- --fix` repairs what it can."""
    install(session, "lint", project=False)
    run(session, "ruff", "check", *session.posargs, ".")
    run(session, "ruff", "format", *([] if session.posargs == ["--fix"] else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types (mypy --strict)."""
    install(session, "types")
    run(session, "mypy", *session.posargs)
    run(session, "mypy", ".ci/environment.py", ".ci/build_hook.py", "noxfile.py", "conftest.py")


@nox.session
def imports(session: nox.Session) -> None:
    """Check who imports whom (import-linter; the contracts are in pyproject.toml)."""
    install(session, "imports", project=False)
    session.run(str(environment() / "bin" / "lint-imports"), env={"PYTHONPATH": str(ROOT)})


@nox.session
def docs(session: nox.Session) -> None:
    """Write docs/limits.md, then check the documentation: every link leads somewhere, and limits have their digest."""
    install(session, "tests")
    run(session, "docs.generate_limits", "--check")
    run(session, "docs.generate_limits")
    run(session, "docs.generate_requirements")
    if os.environ.get("MEASURE_COVERAGE") == "1":  # in CI, `tests` runs them next, and `site` runs beside it
        return
    pages = ("tests/project/test_docs.py", "tests/project/test_docs_commands.py", "tests/project/test_docs_site.py")
    run_tests(session, "pytest", "-q", "-m", "not e2e", *pages)
    session.notify("site")


@nox.session
def site(session: nox.Session) -> None:
    """Make the site of docs/ in .nox/site (mkdocs-material); a link that leads nowhere fails it (half a minute)."""
    install(session, "docs", project=False, name="site")
    run(session, "mkdocs", "build", "--strict", "--quiet", name="site", NO_MKDOCS_2_WARNING="1")


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel, look into them and at their metadata, then run `wheel`."""
    install(session, "build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(session, "build", "--outdir", "dist", ".")  # the wheel from the sdist: what is not in the one fails the other
    run(session, "twine", "check", "--strict", *map(str, (ROOT / "dist").iterdir()))
    run(session, "pyroma", "--min", PACKAGING, *map(str, (ROOT / "dist").glob("*.tar.gz")))
    run_tests(session, "pytest", "tests/project/test_packaging.py", "-m", "slow", "-q")
    session.notify("wheel")


@nox.session
def wheel(session: nox.Session) -> None:
    """Install the built wheel by itself and rehearse the quick criteria from it in an empty folder."""
    wheels = [str(path) for path in sorted((ROOT / "dist").glob("*.whl"))] or session.error("run -s build first")
    run(session, "pip", "uninstall", "--yes", "pytest-gpucluster", name="wheel")  # pip keeps an older build of one version
    limits = str(environment("wheel") / "constraints.txt")
    run(session, "pip", "install", "--quiet", "--constraint", limits, wheels[-1], name="wheel")
    quick = ("tests_acceptance", "--gpucluster-level", "quick", "--junitxml=junit.xml", *session.posargs)
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder, session.chdir(folder):
        run(session, "pytest", "--pyargs", *quick, name="wheel")
        Path("junit.xml").stat()  # raises where the run wrote none
        session.run(str(environment("wheel") / "bin" / "pytest-gpucluster"), "--version")  # what `uvx` starts


@nox.session
def pytest8(session: nox.Session) -> None:
    """Run the fast tests on pytest 8, in an environment of its own."""
    install(session, "pytest8", name="pytest8")
    chosen = session.posargs or ["-m", FAST, *WORKERS, f"--ignore={NETLAB}", "tests"]
    run_tests(session, "pytest", *SHOWN, *chosen, name="pytest8")


@nox.session
def nightly(session: nox.Session) -> None:
    """Run every test, the slow ones too, then `soak` and `pytest8`."""
    install(session, "tests")
    iptables = unpack(session, "iptables", program="iptables")
    programs = {**unpack_slurm(session), "GPUCLUSTER_TEST_IPTABLES": iptables}
    night = {**programs, "HYPOTHESIS_PROFILE": "night"}  # examples by chance
    run_tests(session, "pytest", "-ra", "--durations=25", "tests", **night)
    session.notify("soak", posargs=[])
    session.notify("pytest8", posargs=[])


@nox.session
def soak(session: nox.Session) -> None:
    """Repeat the fault tests, 10 rounds or as many as said (`-- 50`); the first round that fails ends it."""
    install(session, "tests")
    for _ in range(int(session.posargs[0] if session.posargs else 10)):
        run_tests(session, "pytest", "-q", "-x", "-m", FAST, *WORKERS, "tests/faults")
