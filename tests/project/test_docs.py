"""The documentation: links lead somewhere, and the example runs as printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.at_a_glance import HANDOVER
from tests.support import REPOSITORY
from tests.support.thresholds_files import entry, packaged, write_limits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import ModuleType

DOCS = REPOSITORY / "docs"
EXAMPLE = DOCS / "writing-a-criterion.md"
MAX_WIDTH = 100
MAX_LINES = 250
MARKDOWN = sorted([*DOCS.rglob("*.md"), *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))])
FENCE = re.compile(r"(?ms)^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ ]*$")


def script(path: str) -> ModuleType:
    """A script below docs/ as a module of its own."""
    spec = importlib.util.spec_from_file_location("script", DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def generator() -> ModuleType:
    """docs/generate_limits.py."""
    return script("generate_limits.py")


def runnable_blocks(text: str) -> dict[str, str]:
    """Bodies of the fenced blocks marked ``runnable``, by ``file=NAME``, else by their language."""
    found = {}
    for fence in FENCE.finditer(text):
        language, *marks = fence["info"].split() or [""]
        if "runnable" in marks:
            names = [mark.removeprefix("file=") for mark in marks if mark.startswith("file=")]
            found[names[0] if names else language] = fence["body"]
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#{1,6} +(.*)$", FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(folder: Path) -> list[str]:
    """``file: target`` for each relative link below ``folder`` without its file or heading; hidden folders are left out."""
    dead = []
    pages = [file for file in folder.rglob("*.md") if not any(part[0] == "." for part in file.relative_to(folder).parts)]
    for file in sorted(pages):
        prose = FENCE.sub("", file.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path, _, anchor = target.partition("#")
            page = file.parent / path if path else file
            if "://" in target or target.startswith("mailto:"):
                continue
            if not page.exists() or (anchor and anchor not in anchors(page.read_text(encoding="utf-8"))):
                dead.append(f"{file.relative_to(folder)}: {target}")
    return dead


def wide_lines(text: str) -> list[int]:
    """Numbers of the lines of prose wider than MAX_WIDTH. Not prose: code, tables and a link that fills its line."""
    kept = re.sub(r"(?ms)^ *```.*?^ *```$", lambda fence: "\n" * fence[0].count("\n"), text)
    not_prose = re.compile(r"\s*(\||<!--|(?:[-*] )?\S*\]\(\S+\)\S*$)")
    lines = enumerate(kept.splitlines(), start=1)
    return [number for number, line in lines if len(line) > MAX_WIDTH and not not_prose.match(line)]


def unknown_files(text: str, sources: Sequence[str]) -> list[str]:
    """Python files named in backquotes of which ``sources``, paths in this checkout, have none that ends so."""
    named = set(re.findall(r"`([\w./-]+\.py)`", text))
    return sorted(name for name in named if not any(f"/{source}".endswith(f"/{name}") for source in sources))


def unknown_names(text: str, root: Path) -> list[str]:
    """Rows ``| `file` | `name` |`` of a table whose file, at ``root`` or in the package, defines no such name."""
    unknown = []
    for file, name in re.findall(r"(?m)^\| `([\w/]+\.py)` \| `(\w+)` \|", text):
        paths = [path for path in (root / file, root / "pytest_gpucluster" / file) if path.is_file()]
        if not any(re.search(rf"(?m)^ *(?:def|class) {name}\b", path.read_text(encoding="utf-8")) for path in paths):
            unknown.append(f"{file}: {name}")
    return unknown


def sources_without_a_page(text: str) -> list[str]:
    """What a thresholds file says of its sources wrongly: pages that do not exist, and dates of runs without a page."""
    named = set(re.findall(r"docs/[\w./-]*\w", text))
    gone = sorted(name for name in named if not (REPOSITORY / name).is_file())
    sources = re.findall(r"(?m)^ +source: (?:>-\n)?(.*(?:\n {6,}(?!\w+:)\S.*)*)", text)
    undated = [source for source in sources if re.search(r"20\d\d-\d\d-\d\d|h200x|h100x", source) and "docs/" not in source]
    return gone + undated


def pytest_command(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest with our plugin, installed or not, in ``folder``."""
    installed = any(point.name == "gpucluster" for point in metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pytest_gpucluster.plugin"]
    path = {} if installed else {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "pytest", *plugin, *arguments]
    environment = {**os.environ, **path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_the_page_of_limits(generator: ModuleType) -> None:
    """It has a row for each criterion, a column for each profile, and links that lead somewhere; it is as narrow as others."""
    file, text = packaged(), generator.page(packaged())
    assert [key for key in file.content.criteria if f"\n| `{key}` | " not in text] == []
    assert [name for name in file.profiles if f"| `{name}` |" not in text] == []
    assert "| `bf16_tflops` | gpu | quick | > 700 TFLOPS | > 700 TFLOPS |" in text
    assert [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not (DOCS / target).exists()] == []
    assert wide_lines(text) == []


def test_a_changed_limit_is_seen_by_its_digest(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No digest and that of other limits fail the check; writing it makes it pass."""
    digest = tmp_path / "packaged_limits.sha256"
    monkeypatch.setattr(generator, "TARGET", tmp_path / "limits.md")
    assert generator.main(["--check"]) == 0
    monkeypatch.setattr(generator.released, "DIGEST", digest)
    assert generator.main(["--check"]) == 1
    digest.write_text("0" * 64 + "\n", encoding="ascii")
    assert generator.main(["--check"]) == 1
    assert "python docs/generate_limits.py" in capsys.readouterr().err
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    (tmp_path / "tests.sha256").write_text("0" * 64 + "\n", encoding="ascii")
    monkeypatch.setattr(generator.released, "TESTS", tmp_path / "tests.sha256")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    assert (tmp_path / "limits.md").read_text(encoding="utf-8") == generator.page(packaged())


def test_where_a_criterion_was_measured(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only values on GPUs count: neither a run on CPUs nor an outcome without a value."""
    kept = {
        "2026-11-22-h100x1": (["NVIDIA H100"], {"bf16_tflops": 790.0, "drift": None}),
        "2026-11-23-h200x2-98e5417/four": (["NVIDIA H200"], {"bf16_tflops": 790.0}),
        "2026-11-23-cpu-faults": ([], {"drift": 0.0}),
    }
    for name, (gpus, values) in kept.items():
        criteria = {key: {"values": {"node0": value}} for key, value in values.items()}
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "summary.json").write_text(json.dumps({"gpus": gpus, "criteria": criteria}), encoding="utf-8")
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert generator.measured_on() == {"bf16_tflops": {"H100", "H200"}}


def test_generator_refuses_other_arguments(generator: ModuleType) -> None:
    """A misspelt --check must not rewrite the digest and look like success."""
    assert generator.main(["--chek"]) == 2


def strayed_examples(text: str, root: Path) -> list[str]:
    """Indented or ``yaml`` examples of a page whose lines do not stand together in the file that was named last before them."""
    strayed, named = [], None
    for part in re.finditer(
        r"`(?P<file>[\w/]+\.(?:py|yaml))`|^```(?:python|yaml)\n(?P<code>.*?)^```", text, re.DOTALL | re.MULTILINE
    ):
        if part["code"] is None:
            named = root / part["file"]
        elif named is None or not named.is_file() or part["code"] not in named.read_text(encoding="utf-8"):
            strayed.append(part["code"].splitlines()[0])
    return strayed


def test_examples_of_contributing_are_real() -> None:
    """What the page shows of a criterion, a counter, a reading, a judge and a GPU stands in the files that it names."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    examples = text[text.index("## A packaged criterion") : text.index("## English")]
    assert examples.count("```python") + examples.count("```yaml") >= 10
    assert strayed_examples(examples, REPOSITORY) == []
    named = re.findall(r"\b(?:pytest_gpucluster|tests|tests_acceptance|docs)/[\w/]+\.\w+", text)
    assert [name for name in named if not (REPOSITORY / name).is_file()] == []


def test_strayed_examples_are_seen(tmp_path: Path) -> None:
    """An example that the file does not have, or that names no file."""
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n", encoding="utf-8")
    page = "```python\nx = 1\n```\n`a.py`:\n```python\nx = 1\ny = 2\n```\n```python\nx = 3\n```\n`b.py`\n```yaml\ny = 2\n```\n"
    assert strayed_examples(page, tmp_path) == ["x = 1", "x = 3", "y = 2"]


def test_links_of_the_documentation_lead_somewhere() -> None:
    """Every relative link of a Markdown file has its file, and its heading where it names one."""
    assert dead_links(REPOSITORY) == []


def test_dead_links_are_seen(tmp_path: Path) -> None:
    """A missing file and a missing heading are found; code blocks, web addresses and hidden folders are left alone."""
    (tmp_path / ".nox").mkdir()
    (tmp_path / ".nox" / "a.md").write_text("[x](gone.md)")
    (tmp_path / "a.md").write_text(
        "# One `key[x]`\n[b](b.md) [c](#two) [d](#one-keyx) [e](https://example.org)\n```\n[f](f.md)\n```\n"
    )
    assert dead_links(tmp_path) == ["a.md: b.md", "a.md: #two"]


MADE = ("README.md", "limits.md", "requirements.md")
"""The index, and the pages that are generated."""


def test_index_names_every_page() -> None:
    """No page under docs/ is unreachable from docs/README.md, but for the folder of results and the pages that are made."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = [file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md") if file.name not in MADE]
    assert [page for page in pages if not page.startswith("results/") and f"({page})" not in index] == []


@pytest.mark.parametrize("file", MARKDOWN, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_pages_are_short_and_narrow(file: Path) -> None:
    """Prose is wrapped at 100 columns, and no page is longer than 250 lines; a list of changes grows with each of them."""
    text = file.read_text(encoding="utf-8")
    assert wide_lines(text) == []
    assert text.count("\n") <= MAX_LINES or file.name == "CHANGELOG.md"


def test_wide_lines_are_seen() -> None:
    """Prose counts; a table, a code block and a bare link do not."""
    wide = "word " * 30
    assert wide_lines(f"short\n{wide}\n| {wide} |\n```sh\n{wide}\n```\n* {wide}\n") == [2, 7]


@pytest.mark.parametrize("file", [*DOCS.glob("architecture/*.md"), *DOCS.glob("decisions/*.md")], ids=lambda file: file.name)
def test_files_named_in_pages_about_the_code_exist(file: Path) -> None:
    """A page that names a module which moved is corrected in the same commit."""
    folders = ("pytest_gpucluster", "finetune_smoke", "tests_acceptance", "tests", "benchmarks", "docs")
    sources = [path.relative_to(REPOSITORY).as_posix() for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    assert unknown_files(file.read_text(encoding="utf-8"), sources) == []


def test_rooms_are_those_of_the_contract() -> None:
    """The picture of the rooms has the layers of import-linter's contract, in its order."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.search(r"(?s)containers = \[\"pytest_gpucluster\"\].*?layers = \[(.*?)\]", text)
    picture = re.search(r"(?s)## Rooms.*?```\n(.*?)```", (DOCS / "architecture" / "README.md").read_text(encoding="utf-8"))
    assert layers is not None
    assert picture is not None
    levels = [re.findall(r"\w+", level) for level in re.findall(r'"([^"]*)"', layers[1])]
    shown = [line.split()[: len(level)] for line, level in zip(picture[1].splitlines(), levels, strict=True)]
    assert [sorted(rooms) for rooms in shown] == [sorted(level) for level in levels]


def test_journeys_name_what_is_there() -> None:
    """Each station of the walks through the code is a file that defines the name beside it."""
    text = (DOCS / "architecture" / "journeys.md").read_text(encoding="utf-8")
    assert text.count(".py` | `") > 40
    assert unknown_names(text, REPOSITORY) == []


def test_unknown_names_are_seen(tmp_path: Path) -> None:
    """A file that is gone and a name that its file does not define."""
    (tmp_path / "a.py").write_text("class Some:\n    def one(self): ...\n")
    rows = "| `a.py` | `one` | |\n| `a.py` | `two` | |\n| `b.py` | `one` | |\n"
    assert unknown_names(rows, tmp_path) == ["a.py: two", "b.py: one"]


def test_pages_named_in_sources_exist() -> None:
    """A page that a docstring or a comment names is there, by its whole path or by the number of a decision."""
    folders = ("pytest_gpucluster", "finetune_smoke", "tests_acceptance", "benchmarks")
    sources = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\bdocs/[\w./-]*\w", path.read_text(encoding="utf-8"))}
    assert named
    assert [name for name in sorted(named) if not any(REPOSITORY.glob(f"{name}*"))] == []


def test_unknown_files_are_seen() -> None:
    """A name counts with or without its folder, and as a whole."""
    text = "`worker.py`, `a/worker.py`, `orker.py` and `gone.py`"
    assert unknown_files(text, ["package/a/worker.py"]) == ["gone.py", "orker.py"]


def test_summaries_of_kept_runs_are_theirs(tmp_path: Path) -> None:
    """Beside every results.json of an acceptance lies its summary, as the script writes it."""
    summarize = script("results/summarize.py")
    kept = sorted(DOCS.glob("results/*/*/results.json"))
    assert kept
    for results in kept:
        copy = tmp_path / "results.json"
        copy.write_bytes(results.read_bytes())
        assert summarize.main([str(copy)]) == 0
        assert (tmp_path / "summary.json").read_text() == results.with_name("summary.json").read_text(), results
    assert summarize.main([]) == 2


def test_picture_of_the_readme_shows_the_kept_run() -> None:
    """It is drawn anew when the table changes. It has each subject, the handover's rows and the verdict, and loads nothing."""
    draw = script("images/draw.py")
    svg = draw.picture(json.loads(draw.RUN.read_text(encoding="utf-8")))
    shown = svg.replace("&#160;", " ")
    rows = [name for names in draw.SHOWN.values() for name in names if name in HANDOVER]
    assert [name for name in [*rows, *draw.SHOWN, "verdict ACCEPTED: 153 passed, 7 do not apply"] if name not in shown] == []
    assert draw.TARGET.read_text(encoding="utf-8") == svg
    assert "url(http" not in svg


@pytest.mark.parametrize("name", ["watch-h200", "info-h100"])
def test_pictures_of_real_machines_show_the_kept_text(name: str) -> None:
    """What was printed there, and nothing else."""
    draw = script("images/draw.py")
    svg = draw.kept_picture(name)
    assert (draw.IMAGES / f"{name}.svg").read_text(encoding="utf-8") == svg
    shown = svg.replace("&#160;", " ")
    words = [word for word in draw.KEPT[name][1].read_text(encoding="utf-8").split() if word.isalnum()]
    assert [word for word in words if word not in shown] == []


def test_sources_name_pages_that_exist() -> None:
    """Every page that thresholds.yaml names is there, and a source with the date of a run names its page."""
    text = (REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8")
    assert text.count("docs/results/") > 50
    assert sources_without_a_page(text) == []


def test_reasons_name_no_page() -> None:
    """A failure shows the reason of its limit also where a wheel is installed, which has no docs."""
    file = packaged()
    entries = [entry for profile in file.profiles.values() for entry in file.criteria(profile).values()]
    assert [entry.key for entry in entries if "docs/" in entry.why + entry.criterion] == []


def test_sources_without_a_page_are_seen() -> None:
    """A page that is gone and a run that is only dated are found, in one line and in folded text."""
    folded = "H200 7\n      (2026-11-20, h200x1-peers)"
    text = f"  a:\n    source: seen (docs/results/gone.md)\n    why: x\n  b:\n    source: >-\n      {folded}\n"
    assert sources_without_a_page(text) == ["docs/results/gone.md", f"      {folded}"]


@pytest.mark.long
@pytest.mark.e2e
def test_example_runs_as_printed(tmp_path: Path) -> None:
    """The files and the command of writing-a-criterion.md, taken from the page, rehearsed with 2 ranks."""
    blocks = runnable_blocks(EXAMPLE.read_text(encoding="utf-8"))
    for name in ("test_site.py", "site.yaml"):
        (tmp_path / name).write_text(blocks[name], encoding="utf-8")
    program, *arguments = shlex.split(blocks["sh"])
    assert program == "pytest"
    done = pytest_command([*arguments, "--gpucluster-profile", "rehearsal", "--junitxml=junit.xml"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpucluster-results" / "results.json").read_text(encoding="utf-8"))
    outcomes = {row["criterion"]: row["outcome"] for row in results["criteria"] if row["outcome"] != "not_selected"}
    assert outcomes == {"scratch_free": "passed", "sum_of_ranks": "passed"}
    assert results["verdict"] == "INCOMPLETE"
    assert "gpucluster.verdict" in (tmp_path / "junit.xml").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.e2e
def test_example_of_a_soak_runs_as_printed(tmp_path: Path) -> None:
    """The page's soak, with its criterion's function and limits of the test, rehearsed for a round."""
    blocks = runnable_blocks(EXAMPLE.read_text(encoding="utf-8"))
    function = blocks["test_site.py"].partition("@pytest.fixture")[0]
    imports = "from pytest_gpucluster import Finding, SoakWork\n"
    (tmp_path / "test_soak.py").write_text(imports + function + blocks["test_soak.py"], encoding="utf-8")
    limits = {"scratch_soak": entry(per="node", level="soak", unit="GiB", recipe={"path": "."}, deadline_s=5, takes_s=0.2)}
    chosen = write_limits(tmp_path / "limits.yaml", limits, extends=False)
    done = pytest_command(["--gpucluster", "test_soak.py", chosen, "--gpucluster-level", "soak:2s"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpucluster-results" / "results.json").read_text(encoding="utf-8"))
    assert [(row["criterion"], row["outcome"]) for row in results["criteria"]] == [("scratch_soak", "passed")]


def test_every_requirement_is_answered_once() -> None:
    """By a criterion with its id or name, a place where it is shown, or a reason; and each list is counted."""
    made = script("generate_requirements.py")
    content, criteria = made.read(), packaged().criteria(None)
    found = made.answers(content, criteria)
    assert found["N-011"] == ("judged", "`shared_paths`")
    assert [name for name, (kind, words) in found.items() if kind == "refused" and not words.endswith(".")] == []
    by_id = {one for entry in criteria.values() for one in entry.ids}
    assert {name for name, (kind, _) in found.items() if kind == "judged" and name not in by_id} == {
        name for name, one in content["requirements"].items() if one["list"] == "expectations" and "judged" in one
    }
    page = made.page(content, criteria)
    for name in content["requirements"]:
        assert f"| {name} | " in page
    assert "5 listed: 2 judged, 0 shown, 3 refused. It has 33 in all." in page
    assert sum(one["list"] == "cmax" for one in content["requirements"].values()) == content["lists"]["cmax"]["numbered"]


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("ABC1", {}, "ABC1 has 0 answers"),
        ("ABC1", {"refused": ""}, "ABC1 has 0 answers"),
        ("ABC1", {"refused": "Why.", "shown": "there"}, "ABC1 has 2 answers"),
        ("ABC1", {"judged": ["no_such"]}, "ABC1 names no_such"),
        ("ABC1", {"asks": True, "refused": "Why."}, "ABC1 asks for True, which YAML takes for no text"),
        ("ABC1", {"refused": "Why", "and why not.": None}, "ABC1 has and why not., which is no key"),
        ("N-011", {"refused": "Why."}, "N-011 has 2 answers"),
        ("N-011", None, "thresholds.yaml has the ids N-011, which docs/requirements.yaml does not list"),
    ],
)
def test_a_requirement_without_one_answer_is_noticed(name: str, answer: dict[str, object] | None, told: str) -> None:
    """No answer, an empty one, two of them, one that names nothing, and an id that no list has."""
    made = script("generate_requirements.py")
    content = made.read()
    if answer is None:
        del content["requirements"][name]
    else:
        content["requirements"][name] = {"list": "nvidia", "asks": "something", **answer}
    with pytest.raises(ValueError, match=re.escape(told)):
        made.answers(content, packaged().criteria(None))
