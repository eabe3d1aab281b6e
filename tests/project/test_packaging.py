"""What is shipped and how it is checked: metadata, contents, the promises of pyproject.toml and CI, size budgets."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT_TEXT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
PYPROJECT: dict[str, Any] = tomllib.loads(PYPROJECT_TEXT)
RELEASED = "pytest_gpucluster/thresholds/packaged_limits.json"
SHIPPED = ("pytest_gpucluster", "tests_acceptance", "finetune_smoke")
MAX_FUNCTION_LINES = 50
MAX_MODULE_LINES = 500
MAX_CLASS_METHODS = 20
MAX_CLASS_ATTRIBUTES = 12
OVERSIZED_CLASSES = {"Log"}
"""Classes above the budget. Log of the fine-tune is a record that training fills while it runs."""


def uncommented(text: str, key: str) -> list[str]:
    """The entries of the TOML list ``key = [`` (each on a line of its own) with a comment neither beside nor above."""
    body = re.search(rf"(?ms)^{re.escape(key)} = \[\n(.*?)^\]", text)
    assert body is not None, f"no list {key} in this text"
    found, above = [], ""
    for line in body[1].splitlines():
        entry = re.match(r'\s*"([^"]+)",?\s*(#.*)?$', line)
        if entry and not entry[2] and not above:
            found.append(entry[1])
        above = line if line.strip().startswith("#") else ""
    return found


def sessions_of_noxfile() -> set[str]:
    """The names of the functions under @nox.session."""
    tree = ast.parse((REPOSITORY / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {function.name for function in functions if "nox.session" in ast.unparse(function.decorator_list[0])}


def sessions_named_in(text: str) -> set[str]:
    """The sessions that a text asks for: ``noxfile.py -s NAME NAME``, and ``session NAME`` as .ci/run has it."""
    calls = re.findall(r"(?:noxfile\.py -s|^(?:begin_beside )?session) ((?:[a-z]\w* ?)+)", text, flags=re.MULTILINE)
    return {name for call in calls for name in call.split()}


def oversized(source: str, name: str) -> list[str]:
    """Where a file breaks the hard budgets: lines of a function without its docstring, lines of the module."""
    lines = source.count("\n")
    found = [f"{name}: {lines} lines"] if lines > MAX_MODULE_LINES else []
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    long = [function for function in functions if _length(function) > MAX_FUNCTION_LINES]
    return found + [f"{name}:{function.lineno} {function.name}: {_length(function)} lines" for function in long]


def _length(function: ast.FunctionDef) -> int:
    first = function.body[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    skipped = (first.end_lineno or first.lineno) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - skipped


def oversized_classes(source: str, name: str) -> list[str]:
    """Classes with too many methods or attributes.

    A frozen dataclass, and a class without methods (a pydantic model), may have any number of attributes: a reader takes
    one field at a time. Where methods change attributes, each one more multiplies the states that a reader has to think of.
    """
    found = []
    for one in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        methods = [node for node in one.body if isinstance(node, ast.FunctionDef)]
        is_data = not methods or any("frozen=True" in ast.unparse(decorator) for decorator in one.decorator_list)
        attributes = set() if is_data else _attributes(one)
        for number, allowed, what in (
            (len(methods), MAX_CLASS_METHODS, "methods"),
            (len(attributes), MAX_CLASS_ATTRIBUTES, "attributes"),
        ):
            if number > allowed and one.name not in OVERSIZED_CLASSES:
                found.append(f"{name}:{one.lineno} {one.name}: {number} {what}")
    return found


def _attributes(one: ast.ClassDef) -> set[str]:
    """The names that a class declares with a type, and those that its methods assign to ``self``."""
    declared = {node.target.id for node in one.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    stored = [node for node in ast.walk(one) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return declared | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def shipped_sources() -> list[Path]:
    """Every Python file that is shipped."""
    return sorted(file for package in SHIPPED for file in (REPOSITORY / package).rglob("*.py"))


def test_entry_point_is_the_plugin() -> None:
    """Pytest finds the plugin under the name users write in `-p no:gpucluster`, and the module exists."""
    assert PYPROJECT["project"]["entry-points"]["pytest11"] == {"gpucluster": "pytest_gpucluster.plugin"}
    assert (REPOSITORY / "pytest_gpucluster" / "plugin" / "__init__.py").is_file()


def test_everything_shipped_is_listed() -> None:
    """The wheel takes the three packages and the thresholds, and each package can be found by `--pyargs`."""
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == set(SHIPPED)
    assert wheel["force-include"] == {"thresholds.yaml": "pytest_gpucluster/thresholds.yaml"}
    assert (REPOSITORY / PYPROJECT["tool"]["hatch"]["build"]["hooks"]["custom"]["path"]).is_file()
    assert [name for name in SHIPPED if not (REPOSITORY / name / "__init__.py").is_file()] == []
    assert (REPOSITORY / "pytest_gpucluster" / "py.typed").is_file()


def test_reasons_are_given() -> None:
    """Every runtime dependency and every ignored rule says why."""
    assert uncommented(PYPROJECT_TEXT, "dependencies") == []
    assert uncommented(PYPROJECT_TEXT, "ignore") == []
    assert uncommented(PYPROJECT_TEXT, '"tests/**"') == []


def test_a_missing_reason_is_found() -> None:
    """The check above sees an entry without a comment, and accepts one beside it or above it."""
    text = 'ignore = [\n    "A1",  # why\n    "B2",\n    # why\n    "C3",\n    "D4",\n]\n'
    assert uncommented(text, "ignore") == ["B2", "D4"]


def test_dependencies_are_those_argued_for() -> None:
    """A new dependency is a decision: it is added here on purpose."""
    names = [re.split(r"[<>=\[; ]", text)[0] for text in PYPROJECT["project"]["dependencies"]]
    given = ["pytest", "torch", "pytest-xdist", "pyyaml", "junit-xml", "transformers", "peft", "safetensors"]
    assert names == [*given, "pydantic", "rich", "numpy", "filelock", "msgspec", "jinja2", "nvidia-ml-py"]


def test_pinned_torch_is_exact() -> None:
    """Only an exact pin without a local version takes the CPU build where there is one, and any build elsewhere."""
    assert re.search(r"(?m)^torch==\d+\.\d+\.\d+$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"))


def test_ci_calls_the_runner() -> None:
    """The workflow runs what a person can run: .ci/run and sessions that exist."""
    workflow = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.search(r"(?m)^\s+- run: \.ci/run$", workflow)
    assert sessions_named_in(workflow) <= sessions_of_noxfile()


def test_the_runner_is_sound() -> None:
    """.ci/run can be executed, parses, and asks for every gate there is; `tests` are measured for `coverage`."""
    runner = REPOSITORY / ".ci" / "run"
    assert os.access(runner, os.X_OK)
    subprocess.run(["bash", "-n", str(runner)], check=True)
    text = runner.read_text(encoding="utf-8")
    named, gates = sessions_named_in(text), "lint types imports docs tests coverage launches netlab slurm build"
    assert set(gates.split()) <= named <= sessions_of_noxfile()
    assert "export MEASURE_COVERAGE=1" in text


def test_readme_commands_exist() -> None:
    """What the README tells a newcomer to run is there: at least `accept` and `tests`."""
    named = sessions_named_in((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert {"accept", "tests"} <= named <= sessions_of_noxfile()


def test_no_index_is_named() -> None:
    """Where packages come from is the machine's matter, never a file's."""
    files = ["pyproject.toml", "noxfile.py", "constraints.txt", ".ci/environment.py", ".ci/run", ".github/workflows/ci.yml"]
    named = re.compile(r"index-url|find-links|https?://")
    assert [file for file in files if named.search((REPOSITORY / file).read_text(encoding="utf-8"))] == []


def test_licence_is_complete() -> None:
    """The whole Apache License 2.0, as the metadata say."""
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def wrong_version(version: str, changelog: str) -> str | None:
    """What is wrong with the version of this tree: it is the newest release itself, or a ``.dev`` version after that one."""
    headings = re.findall(r"(?m)^## \[(.*?)\](?: - \d{4}-\d\d-\d\d)?$", changelog)
    is_between = "Unreleased" in headings[:1] and re.search(r"(?ms)^## \[Unreleased\]\n(.*?)^## ", changelog)[1].strip() != ""
    newest = next((name for name in headings if name != "Unreleased"), "0")
    base, dev, _ = version.partition(".dev")
    if not is_between:
        return None if version == newest else f"{version} is not {newest}, the release of this tree"
    later = [int(part) for part in base.split(".")] > [int(part) for part in newest.split(".")]
    return None if dev and later else f"{version} is not a .dev version after the release {newest}"


def test_version_differs_from_the_release() -> None:
    """What is not released has a version of its own, so that a record of acceptance does not name the release."""
    assert wrong_version(PYPROJECT["project"]["version"], (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")) is None


def test_a_wrong_version_is_seen() -> None:
    """That of the release while there is more, one before it, one without ``.dev``; and a ``.dev`` version that is released."""
    between = "## [Unreleased]\n\n- more\n\n## [0.10.0] - 2026-11-22\n"
    assert [wrong_version(one, between) is None for one in ("0.10.0", "0.9.0.dev0", "0.11.0", "0.11.0.dev0", "1.0.0.dev3")] == [
        False,
        False,
        False,
        True,
        True,
    ]
    released = "## [Unreleased]\n\n## [0.10.0] - 2026-11-22\n"
    assert wrong_version("0.10.0", released) is None
    assert wrong_version("0.11.0.dev0", released) is not None


@pytest.mark.parametrize("file", shipped_sources(), ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_sizes_are_within_budget(file: Path) -> None:
    """No shipped function is longer than 50 lines, no module longer than 500, no class has too many members."""
    source, name = file.read_text(encoding="utf-8"), str(file.relative_to(REPOSITORY))
    assert [*oversized(source, name), *oversized_classes(source, name)] == []


def test_oversize_is_found() -> None:
    """The check above counts what it should: a docstring is free, the 51st line is not."""
    body = "    x = 1\n" * 49
    assert oversized(f'def f():\n    """Long.\n\n    Text.\n    """\n{body}', "a.py") == []
    assert oversized(f"def f():\n{body}    x = 1\n", "a.py") == ["a.py:1 f: 51 lines"]
    assert oversized("x = 1\n" * 501, "a.py") == ["a.py: 501 lines"]


def test_oversized_class_is_found() -> None:
    """The check above counts methods, declared fields and assignments to ``self``; fields of a frozen dataclass are free."""
    methods = "".join(f"    def f{number}(self): self.a{number} = 1\n" for number in range(12))
    fields = "".join(f"    b{number}: int\n" for number in range(13))
    more = "".join(f"    def g{number}(self): pass\n" for number in range(9))
    assert oversized_classes(f"class A:\n{methods}", "a.py") == []
    assert oversized_classes(f"class A:\n    b: int\n{methods}", "a.py") == ["a.py:1 A: 13 attributes"]
    assert oversized_classes(f"class A:\n{methods}{more}", "a.py") == ["a.py:1 A: 21 methods"]
    assert oversized_classes(f"class A:\n{fields}", "a.py") == []
    assert oversized_classes(f"@dataclass(frozen=True)\nclass A:\n{fields}    def f(self): pass\n", "a.py") == []
    assert oversized_classes(f"@dataclass\nclass A:\n{fields}    def f(self): pass\n", "a.py") == ["a.py:2 A: 13 attributes"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fresh wheel and sdist, built without a network."""
    pytest.importorskip("hatchling", reason="the build backend is needed to build")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "--directory", str(folder)], cwd=REPOSITORY, check=True)
    return folder


def make_checkout(root: Path) -> Path:
    """A copy of what a build reads."""
    ignored = shutil.ignore_patterns("__pycache__", ".*cache")
    for name in (*SHIPPED, ".ci"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "thresholds.yaml"):
        shutil.copy(REPOSITORY / name, root / name)
    return root


@pytest.mark.slow
def test_limits_without_their_digest_are_not_built(tmp_path: Path) -> None:
    """A looser limit with the old digest ends the build, of a wheel and of an sdist; an editable install goes on."""
    root = make_checkout(tmp_path / "checkout")
    text = (root / "thresholds.yaml").read_text(encoding="utf-8")
    (root / "thresholds.yaml").write_text(text.replace("above: 700", "above: 600", 1), encoding="utf-8")
    for target in ("wheel", "sdist", "wheel:editable"):
        command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(tmp_path / "dist")]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        refused = "the limits changed and packaged_limits.sha256 did not" in done.stderr
        assert refused == ("editable" not in target), done.stderr
        assert done.returncode != 0 or not refused


IN_A_WHEEL = """
import sys
from pytest_gpucluster.thresholds.lint import load
file = load(None)
print(file.changed_entries(file.profiles["h200-sxm"]), file.changed_figures(["NVIDIA H200"]))
"""


@pytest.mark.slow
def test_an_edited_wheel_is_named(built: Path, tmp_path: Path) -> None:
    """Which limit of an installed packaged file differs, and whose figures; nothing of one that nobody edited."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)  # noqa: S202 -- ours

    def compared() -> str:
        command = [sys.executable, "-c", IN_A_WHEEL]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    assert compared() == "{} []"
    for name, old, new in (
        ("thresholds.yaml", "above: 700", "above: 600"),
        ("thresholds/specs/h200-sxm.yaml", "power_w: 700", "power_w: 600"),
    ):
        path = tmp_path / "pytest_gpucluster" / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    assert compared() == "{'bf16_tflops': ['above 600 instead of above 700']} ['figures of NVIDIA H200']"


def relative_files(package: str) -> set[str]:
    """Files of a package in this checkout that must be shipped."""
    files = (file for file in (REPOSITORY / package).rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(REPOSITORY)) for file in files}


@pytest.mark.slow
def test_wheel_holds_everything(built: Path) -> None:
    """All files of the three packages, the thresholds inside the package, the licence, the entry point; no more."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    expected = {file for package in SHIPPED for file in relative_files(package)}
    assert expected <= names
    named = ("inventory/error_codes", "inventory/error_actions", "records/quantities")
    tables = {f"pytest_gpucluster/{name}.csv" for name in named}
    assert {"pytest_gpucluster/thresholds.yaml", RELEASED, *tables} <= names
    assert any(name.startswith("pytest_gpucluster/thresholds/specs/") and name.endswith(".yaml") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    pages = {name.removeprefix("pytest_gpucluster/docs/") for name in names if name.startswith("pytest_gpucluster/docs/")}
    kept = {str(file.relative_to(REPOSITORY / "docs")) for file in (REPOSITORY / "docs").rglob("*.md")}
    assert pages == {name for name in kept if not name.startswith("results/")}
    assert "gpucluster = pytest_gpucluster.plugin" in entry_points
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(SHIPPED)


@pytest.mark.slow
def test_sdist_holds_everything(built: Path) -> None:
    """What one needs to build, test and judge from the sources alone."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {file for package in (*SHIPPED, "tests") for file in relative_files(package)}
    tops = {
        "thresholds.yaml",
        "noxfile.py",
        "conftest.py",
        "constraints.txt",
        ".ci/environment.py",
        ".ci/run",
        "LICENSE",
        "README.md",
    }
    assert (expected | tops | {RELEASED}) - names == set()
    assert [name for name in names if name.startswith("docs/results/")] == []
