"""The shape of the code: sizes of folders and files, names used once, one class for results, public names for the suite."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from typing import TYPE_CHECKING

import pytest

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

SHIPPED = ("pytest_gpucluster", "tests_acceptance", "finetune_smoke")
MOST_FILES = 25
FEWEST_LINES = 60
MOST_CODE_LINES = 42_827
"""Of all that is shipped, without docstrings, comments and blank lines. Growth is said in the changelog of each round."""
SHORT_FILES = {
    "pytest_gpucluster/cli.py": "the entry point; it may import nothing before the arguments are read",
    "pytest_gpucluster/commands/torchrun.py": "the program of a process of its own",
    "pytest_gpucluster/config/run_files.py": "every folder names these files; it may import none",
    "pytest_gpucluster/config/strict_json.py": "the plugin and the training proof both write by it",
    "pytest_gpucluster/grouping.py": "every folder imports it; it may import none",
    "pytest_gpucluster/measurements/progress.py": "every measurement imports it; it may import none",
    "pytest_gpucluster/plugin/fleet.py": "a plugin of its own: loaded by name, never by itself",
    "pytest_gpucluster/plugin/stash_keys.py": "every hook imports it; it may import none",
    "tests_acceptance/test_health_dcgm.py": "its name is the classname of JUnit, which CI compares",
    "tests_acceptance/test_links.py": "its name is the classname of JUnit, which CI compares",
    "tests_acceptance/test_memory.py": "its name is the classname of JUnit, which CI compares",
    "tests_acceptance/test_slurm.py": "its name is the classname of JUnit, which CI compares",
    "tests_acceptance/test_switches.py": "its name is the classname of JUnit, which CI compares",
}
"""Files below :data:`FEWEST_LINES`, each with the reason."""
BAD_WORDS = {"bad", "wrong", "over", "facts", "amiss"}
ONE_RESULT = "pytest_gpucluster/judging/finding.py"


def sources() -> Iterator[tuple[str, str]]:
    """Every shipped Python file: its name in the repository, and its text."""
    for package in SHIPPED:
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            yield str(file.relative_to(REPOSITORY)), file.read_text(encoding="utf-8")


@cache
def tree(text: str) -> ast.Module:
    """A file parsed, once for all tests: that takes 4 s of CPU for all that is shipped."""
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def _trees_end_here() -> Iterator[None]:
    """Keep no parsed file for the tests of other files."""
    yield
    tree.cache_clear()


def code_lines(text: str) -> int:
    """Lines that hold code: no docstring, no text that stands for itself, no comment, no blank line."""
    texts = set()
    for node in ast.walk(tree(text)):
        body = getattr(node, "body", [])
        for one in body if isinstance(body, list) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                texts |= set(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    ignored = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    )  # fmt: skip
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def classes(text: str) -> Iterator[ast.ClassDef]:
    """Every class of a file."""
    return (node for node in ast.walk(tree(text)) if isinstance(node, ast.ClassDef))


def fields(one: ast.ClassDef) -> set[str]:
    """The names that a class declares with a type."""
    return {node.target.id for node in one.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def imported(text: str) -> Iterator[str]:
    """The modules that a file imports from our packages."""
    for node in ast.walk(tree(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def second_results(name: str, text: str) -> list[str]:
    """Classes that say what is unknown beside a word for bad, and are not the one that is meant for it."""
    return [f"{name} {one.name}" for one in classes(text) if "unknown" in fields(one) and BAD_WORDS & fields(one)]


def foreign_imports(name: str, text: str) -> list[str]:
    """Imports of the suite that a site's own criterion could not have."""
    return [
        f"{name}: {module}"
        for module in imported(text)
        if module.split(".")[0] in ("pytest_gpucluster", "finetune_smoke")
        and module != "pytest_gpucluster"
        and not module.startswith("pytest_gpucluster.measurements")
    ]


def modules_named(importer: str, node: ast.AST, modules: Collection[str]) -> set[str]:
    """Those of ``modules`` that one statement of ``importer`` imports, or imports a name from."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(modules)
    if not isinstance(node, ast.ImportFrom):
        return set()
    is_folder = any(name.startswith(f"{importer}.") for name in modules)
    folder = importer if is_folder else importer.rpartition(".")[0]
    source = resolve_name("." * node.level + (node.module or ""), folder)
    inside = {alias.name: f"{source}.{alias.name}" for alias in node.names}
    return {module if module in modules else source for module in inside.values()} & set(modules)


def circle_of(texts: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, in functions and for types alone too; none: an empty list."""
    graph = {
        name: {one for node in ast.walk(tree(text)) for one in modules_named(name, node, texts)} for name, text in texts.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circles() -> None:
    """A reader can begin at the bottom, inside a folder too."""
    modules = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): text for name, text in sources()}
    assert len(modules) == sum(len([*python_files(package)]) for package in SHIPPED)
    assert circle_of(modules) == []


@pytest.mark.parametrize(
    "back",
    [
        "from p.b import B",
        "import p.b",
        "from p import b",
        "from p import NAME, b",
        "from . import b",
        "from .b import B",
        "if TYPE_CHECKING:\n    from p.b import B",
        "def f():\n    from p.b import B",
    ],
)
@pytest.mark.parametrize("length", [2, 3])
def test_a_circle_is_found(back: str, length: int) -> None:
    """The check above sees a way back of each form, over one module and over two."""
    forth = {2: {"p.b": "from p.a import A"}, 3: {"p.b": "from p.c import C", "p.c": "from p.a import A"}}[length]
    assert set(circle_of({"p": "NAME = 1", "p.a": back, **forth})) == {"p.a", *forth}


def test_a_circle_through_a_folder_is_found() -> None:
    """What a folder itself holds is a module as any other."""
    assert set(circle_of({"p": "from .a import A", "p.a": "from p import NAME"})) == {"p", "p.a"}


def test_two_ways_are_no_circle() -> None:
    """There and there again is not there and back."""
    assert circle_of({"p.a": "from p.b import B\nfrom p import c", "p.b": "from p import c", "p.c": "import os"}) == []


def test_folders_are_small() -> None:
    """A reader sees a folder at a glance."""
    folders = Counter(str(file.parent.relative_to(REPOSITORY)) for package in SHIPPED for file in python_files(package))
    assert {folder: number for folder, number in folders.items() if number > MOST_FILES} == {}


def python_files(package: str) -> Iterator[Path]:
    """The Python files of a package."""
    return (REPOSITORY / package).rglob("*.py")


def test_files_are_no_crumbs() -> None:
    """A subject has a file of some length, or a reason why not; a reason whose file has grown leaves the list."""
    short = {name for name, text in sources() if text.count("\n") < FEWEST_LINES and not name.endswith("__init__.py")}
    assert short == set(SHORT_FILES)


def test_a_class_name_is_used_once() -> None:
    """A reader who searches for a name finds one class."""
    names = Counter(one.name for _, text in sources() for one in classes(text))
    assert {name: number for name, number in names.items() if number > 1} == {}


def test_there_is_one_result() -> None:
    """Every judge of hardware returns a Finding."""
    assert [found for name, text in sources() if name != ONE_RESULT for found in second_results(name, text)] == []


def test_a_second_result_is_found() -> None:
    """The check above sees a class with both, and no other."""
    text = "class A:\n    bad: int\n    unknown: str\n\nclass B:\n    unknown: str\n\nclass C:\n    facts: str\n"
    assert second_results("a.py", text) == ["a.py A"]


def test_the_suite_uses_public_names_only() -> None:
    """What tests_acceptance has, a site's own criterion can have."""
    found = [one for name, text in sources() if name.startswith("tests_acceptance") for one in foreign_imports(name, text)]
    assert found == []


def test_no_criterion_rests_on_an_assert() -> None:
    """``python -O --assert=plain`` leaves every one out: a host that nobody could read would be like all others."""
    asserts = [
        f"{name}:{node.lineno}"
        for name, text in sources()
        if name.startswith("tests_acceptance/")
        for node in ast.walk(tree(text))
        if isinstance(node, ast.Assert)
    ]
    assert asserts == []


@pytest.mark.parametrize(
    ("line", "is_public"),
    [
        ("from pytest_gpucluster import Finding", True),
        ("from pytest_gpucluster.measurements.gemm import gemm", True),
        ("from pytest_gpucluster.judging.finding import Finding", False),
        ("import pytest_gpucluster.health", False),
        ("from finetune_smoke.settings import config", False),
        ("import pytest", True),
    ],
)
def test_what_is_public(line: str, *, is_public: bool) -> None:
    """The check above sees an import of each kind."""
    assert (foreign_imports("a.py", line) == []) is is_public


def test_the_code_does_not_grow_in_silence() -> None:
    """Whoever needs more lines says so here and in the changelog."""
    assert sum(code_lines(text) for _, text in sources()) <= MOST_CODE_LINES


def test_code_lines_are_counted() -> None:
    """A docstring, the text below a constant, a comment and a blank line are free; a string in code is not."""
    text = '"""Module."""\n\nA = 1  # why\n"""What A is."""\n# comment\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert code_lines(text) == 4
