"""Every command of the documentation is one that the real parsers take: pytest's, gpucluster's, torchrun's, finetune_smoke's.

What a command does is tested elsewhere; here, that its options and their values are no fiction. ``...`` stands for something
left out, ``$NAME`` for a number.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import TYPE_CHECKING

import pytest
from _pytest.config import Config, get_config

from finetune_smoke.settings import options
from pytest_gpucluster.commands import main
from pytest_gpucluster.config.settings import OPTIONS, settings_from
from pytest_gpucluster.errors import ConfigurationError
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGES = sorted([*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md"))])
FENCE = re.compile(r"(?ms)^[ ]*```[^\n]*\n(?P<body>.*?)^[ ]*```[ ]*$")
PROGRAMS = ("gpucluster", "pytest-gpucluster", "pytest", "torchrun", "finetune_smoke")
MODULES = {
    "pytest": "pytest",
    "finetune_smoke": "finetune_smoke",
    "pytest_gpucluster.cli": "gpucluster",
    "torch.distributed.run": "torchrun",
}
OUTPUT = re.compile(r"(gpucluster|pytest)( run)?(:| \d| +\S+:)| \| ")
"""Lines that begin as a command does and are what a program prints, or the form of a command."""
BEFORE = re.compile(r"(\$ |[A-Z_]+=\S* |srun |nice |sudo |env |--?[\w-]+(=\S+)? |OUT=.*?; )*")
"""What may stand before the program."""


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a page's fenced blocks, the program first."""
    for fence in FENCE.finditer(text):
        for line in re.sub(r"\\\n\s*", " ", fence["body"]).splitlines():
            plain = line.strip()
            plain = plain[BEFORE.match(plain).end() :]  # type: ignore[union-attr]  # it matches nothing too
            if OUTPUT.match(plain) or (" | " in plain.partition("#")[0] and "[" in plain):
                continue
            if " [" in plain:  # the form of a command: what may be left out is read too
                plain = re.sub(r"(?<=\s)\[|\]+(?=\s|$)", " ", plain)
            with contextlib.suppress(ValueError):  # a quotation mark of prose
                words = [re.sub(r"\$\{?\w+\}?", "0", word) for word in shlex.split(plain, comments=True)]
                yield from _of_words([word for word in words if word not in ("...", "[...]")])


def _of_words(words: list[str]) -> Iterator[list[str]]:
    """The command among these words: a program, or a module that ``python -m`` runs."""
    for end in ("|", ">", "<", "&", "&&", ";"):
        words = words[: words.index(end)] if end in words else words
    if words[:1] and re.fullmatch(r"(\S*/)?python3?", words[0]) and words[1:2] == ["-m"] and words[2:]:
        if words[2] in MODULES:
            yield [MODULES[words[2]], *words[3:]]
    elif words and words[0].rpartition("/")[2] in PROGRAMS:
        yield [words[0].rpartition("/")[2].removeprefix("pytest-"), *words[1:]]


@pytest.fixture(scope="module")
def config() -> Config:
    """A pytest with the options of every installed plugin."""
    made = get_config()
    made.pluginmanager.load_setuptools_entrypoints("pytest11")
    if not made.pluginmanager.hasplugin("pytest_gpucluster.plugin") and not made.pluginmanager.hasplugin("gpucluster"):
        made.pluginmanager.import_plugin("pytest_gpucluster.plugin")
    made.pluginmanager.import_plugin("pytest_gpucluster.plugin.fleet")
    return made


def said(act: Callable[[], object]) -> str | None:
    """What a parser says of words that it refuses, without its usage; None where it takes them."""
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):
        try:
            act()
        except SystemExit as left:
            return error.getvalue().strip().rpartition("error: ")[2].partition("\n")[0] if left.code else None
        except (ConfigurationError, pytest.UsageError) as refused:
            return str(refused)
    return None


def wrong(words: list[str], config: Config) -> str | None:
    """What the parser of a command says of it; None where it takes all of it."""
    program, *arguments = words
    if program == "pytest":
        return said(lambda: _read_pytest(arguments, config))
    if program == "torchrun":
        return _wrong_torchrun(arguments, config)
    if program == "finetune_smoke":
        return said(lambda: _read_finetune(arguments))
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return said(lambda: main._parse(arguments)) or said(lambda: _read_pytest(arguments[end + 1 :], config))


def _read_pytest(arguments: list[str], config: Config) -> None:
    parsed, unknown = config._parser.parse_known_and_unknown_args(arguments)
    wrong_words = [word for word in unknown if word.startswith("-")]
    if wrong_words:
        raise pytest.UsageError(f"unrecognized arguments: {' '.join(wrong_words)}")
    settings_from(parsed, start=REPOSITORY)


def _read_finetune(arguments: list[str]) -> None:
    """By the parser alone: a file of settings is another matter."""
    command = arguments[0] if arguments[:1] in (["evaluate"], ["preprocess"]) else ""
    options._parser(command, quiet=False).parse_args(arguments[bool(command) :])


def _wrong_torchrun(arguments: list[str], config: Config) -> str | None:
    from torch.distributed.run import get_args_parser  # noqa: PLC0415 -- torch takes seconds

    parsed = get_args_parser()
    refused = said(lambda: parsed.parse_args(arguments))
    if refused is not None or not arguments:
        return refused
    found = parsed.parse_args(arguments)
    program = MODULES.get(found.training_script) if found.module else None
    return wrong([program, *found.training_script_args], config) if program is not None else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_commands_of_a_page_are_taken(page: Path, config: Config) -> None:
    """Each of them, by the parser that a reader's shell would start."""
    found = {shlex.join(words): wrong(words, config) for words in commands(page.read_text(encoding="utf-8"))}
    assert {command: why for command, why in found.items() if why is not None} == {}


def test_the_pages_have_commands() -> None:
    """The check above reads something: each program is shown somewhere."""
    found = [words[0] for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]
    assert {program: found.count(program) >= least for program, least in LEAST.items()} == dict.fromkeys(LEAST, True)


LEAST = {"gpucluster": 40, "pytest": 15, "torchrun": 3, "finetune_smoke": 5}
PLANTED = {
    "pytest tests_acceptance --gpucluster-lvel quick": "unrecognized arguments: --gpucluster-lvel",
    "pytest --gpucluster-level often": "'often' is not one of",
    "pytest --pyargs tests_acceptance \\\n    --gpucluster-expect 2x8": "'2x8' is not understood",
    "$ NCCL_DEBUG=INFO pytest -k x --zzz": "unrecognized arguments: --zzz",
    "gpucluster lnit a.yaml": "there is no command 'lnit'. Did you mean 'lint'?",
    "gpucluster info --jsn": "unrecognized arguments: --jsn",
    "gpucluster launch --run --nnodes two -- -q": "invalid int value: 'two'",
    "gpucluster launch --nnodes 2 -- --gpucluster-gait": "unrecognized arguments: --gpucluster-gait",
    "srun --ntasks-per-node=1 gpucluster launch --rnu -- -q": "unrecognized arguments: --rnu",
    "torchrun --nnode=2 --nprocs=3 -m pytest": "unrecognized arguments",
    "torchrun --nnodes=2 -m pytest --gpucluster-gait": "unrecognized arguments: --gpucluster-gait",
    "torchrun -m pytest_gpucluster.cli resum x": "there is no command 'resum'. Did you mean 'resume'?",
    "python -m finetune_smoke --stepz 3": "unrecognized arguments: --stepz 3",
    "torchrun -m finetune_smoke evaluate --adaptor x": "unrecognized arguments: --adaptor x",
    "python3 -m pytest_gpucluster.cli watch --onec | head": "unrecognized arguments: --onec",
}


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_mistake_is_seen(text: str, config: Config) -> None:
    """An option, a value, a command, also behind a line's end, behind ``--`` and below torchrun."""
    (words,) = commands(f"text\n\n```sh\n{text}   # why\n```\n")
    assert PLANTED[text] in str(wrong(words, config))


@pytest.mark.parametrize(
    "text",
    ["gpucluster 0.1.0   ACCEPTANCE   2 nodes", "gpucluster: will be an ERROR", "gpucluster info [a | b]", "it's pytest"],
)
def test_what_is_no_command(text: str) -> None:
    """Output, the form of a command, prose."""
    assert list(commands(f"```\n{text}\n```\n")) == []


def test_options_of_ours_named_in_prose_exist() -> None:
    """``--gpucluster-...`` anywhere in a page, in a job file or in an example is an option."""
    places = [*PAGES, *(file for file in (REPOSITORY / "deploy").rglob("*") if file.is_file())]
    known = {option.name for option in OPTIONS}
    named = {
        name for file in places for name in re.findall(r"--gpucluster-[a-z][a-z-]*[a-z]", file.read_text(encoding="utf-8"))
    }
    assert named - known == set()
