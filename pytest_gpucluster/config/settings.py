"""The options of a run, once: pytest, ``gpucluster launch`` and the tests read this table; and what they ask for, checked.

Once the options are parsed, only the frozen :class:`Settings` are used.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pytest_gpucluster.config.run_files import RESULTS_DIR
from pytest_gpucluster.config.schema_errors import closest, did_you_mean
from pytest_gpucluster.errors import ConfigurationError

LEVELS = ("quick", "standard", "soak")
JUNIT_FORMS = ("place", "node", "criterion")
"""What one testcase of the JUnit file is about."""
DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SOAK_S = 8 * 3600.0
"""How long ``soak`` without a duration lasts."""
Resume: TypeAlias = Literal["never", "unfinished", "always"]
DEADLINES_S = {"quick": 120.0, "standard": 300.0, "soak": 600.0}
"""The deadline of a call without a deadline in its recipe, by level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option as argparse and pytest take it. Without a ``metavar`` it is a switch; ``repeats``: it may be given again."""

    name: str
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str
    repeats: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of ``add_argument`` and of pytest's ``addoption``."""
        if self.metavar is None:
            return {"action": "store_true", "help": self.help}
        repeats = {"action": "append"} if self.repeats else {}
        return {"metavar": self.metavar, "type": self.type, "help": self.help, **repeats}


def _folder(text: str) -> Path:
    """A folder; an empty text, of a variable that is not set, would be the folder that the run starts in."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


OPTIONS = (
    Option(name="--gpucluster", help="treat these tests as an acceptance run"),
    Option(name="--gpucluster-thresholds", metavar="FILE", type=Path, help="limits to judge by, instead of the packaged"),
    Option(name="--gpucluster-profile", metavar="NAME", help="profile of the thresholds file (default: by GPU name)"),
    Option(name="--gpucluster-expect", metavar="nodes=N,gpus_per_node=M", help="the inventory that was promised"),
    Option(name="--gpucluster-level", metavar="LEVEL", help="quick, standard (default), soak or soak:8h"),
    Option(name="--gpucluster-results", metavar="DIR", type=_folder, help=f"results directory (default: {RESULTS_DIR})"),
    Option(name="--gpucluster-gate", help="exit 0 only for the verdict ACCEPTED"),
    Option(name="--gpucluster-inline", help="run functions in this process, for one place (pdb)"),
    Option(
        name="--gpucluster-only",
        metavar="HOST[:PART]",
        repeats=True,
        help="the tests of this part alone, by its identity: UUID, serial number or gpuN; repeatable",
    ),
    Option(
        name="--gpucluster-junit",
        metavar="place|node|criterion",
        help="what a testcase of the JUnit file is about (default: place; of more than 20,000 testcases node)",
    ),
    Option(name="--gpucluster-junit-strict", help="a JUnit file without properties inside testcases, for strict schemas"),
    Option(name="--gpucluster-audit", help="only read what needs no load, beside jobs too; accepts nothing"),
    Option(name="--gpucluster-selftest", help="plant faults before the run, and say which it finds"),
    Option(name="--gpucluster-summary", metavar="FILE", type=Path, help="write a summary in Markdown"),
    Option(name="--gpucluster-metrics", metavar="FILE", type=Path, help="write metrics of Prometheus (a textfile collector's)"),
    Option(
        name="--gpucluster-termination-message",
        metavar="FILE",
        type=Path,
        help="write verdict and bad parts in at most 4,096 bytes: a Pod's termination message (/dev/termination-log)",
    ),
)
PREFIX = "--gpucluster-"
_SAME_BUT_A_LETTER = 0.85
"""difflib's ratio: ``--gpu-cluster-level`` is 0.97 from ``--gpucluster-level``."""
RESUME = "gpucluster_resume"
"""Of an option that ``gpucluster resume`` gives and no person: go on with a run, or with nothing."""
DEMO = "fleet_command"
"""Of an option that has the words of ``gpucluster demo``, where that started the run."""
COMPARED = ("--gpucluster-profile", "--gpucluster-expect", "--gpucluster-level")
"""The options whose words are compared between nodes as they are, where they are not understood."""
INI_HELP = "treat every run here as an acceptance run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """A promised inventory; None where nothing is promised."""

    nodes: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """A part by its identity: a host, and a GPU of it by UUID, serial number or ``gpuN``; ``part`` None: all of the host."""

    host: str
    part: str | None = None

    def __str__(self) -> str:
        """As it is written on the command line."""
        return self.host if self.part is None else f"{self.host}:{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that the options ask for.

    Attributes:
        audit: only tests that read are selected, no worker opens a GPU, and nothing is accepted.
        only: the parts whose tests are selected; all without one.
        summary: where the summary in Markdown goes; None: nowhere.
        metrics: where the metrics go besides the results directory.
        termination: where the verdict and the bad parts go as a Pod's termination message; None: nowhere.
        junit: what a testcase of the JUnit file is about; None: by their number.
        junit_strict: the JUnit file has no properties inside testcases.
        resume: go on with the unfinished run in the results directory: never, where there is one, or nothing else.
    """

    thresholds: Path | None
    profile: str | None
    expect: Expect
    level: str
    soak_s: float | None
    results_dir: Path
    gate: bool
    inline: bool
    selftest: bool = False
    audit: bool = False
    only: tuple[PartName, ...] = ()
    summary: Path | None = None
    metrics: Path | None = None
    termination: Path | None = None
    junit: str | None = None
    junit_strict: bool = False
    resume: Resume = "never"


def unrecognized(words: Iterable[str], *, guessed_only: bool = False) -> str | None:
    """What to say of options that nobody takes and that look like ours, each with the option that was meant.

    Args:
        words: what the parser left over. What does not look like ours is passed over.
        guessed_only: pass over those too for which there is no guess: a project may have options that begin as ours do.
    """
    names = [option.name for option in OPTIONS]
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    guesses = {name: _guess(name.lower().replace("_", "-"), names) for name in typed}
    found = [
        f"unrecognized arguments: {name}. Did you mean {guess!r}?" if guess else f"unrecognized arguments: {name}"
        for name, guess in guesses.items()
        if guess or (name.startswith(PREFIX) and not guessed_only)
    ]
    has_all = all(guesses[name] for name in typed if name.startswith(PREFIX))
    return "; ".join(found) + ("" if has_all else f"; options of gpucluster: {', '.join(names)}") if found else None


def _guess(typed: str, names: list[str]) -> str | None:
    """The option that was meant: the rest of its name misspelt, cut short or without the beginning; or one letter of all."""
    rests = {name.removeprefix(PREFIX): name for name in names}
    if typed.startswith(PREFIX):
        rest = typed.removeprefix(PREFIX)
        begun = [name for begin, name in rests.items() if rest and begin.startswith(rest)]
        return next(iter(begun), None) or next((rests[near] for near in closest(rest, list(rests))), None)
    return rests.get(typed.removeprefix("--")) or next(iter(get_close_matches(typed, names, 1, _SAME_BUT_A_LETTER)), None)


def results_dir(given: argparse.Namespace, *, start: Path) -> Path:
    """The results directory; a relative one is in ``start``."""
    return start / (given.gpucluster_results or RESULTS_DIR)


def settings_from(given: argparse.Namespace, *, start: Path) -> Settings:
    """Turn parsed options into one frozen object.

    Args:
        given: what argparse or pytest parsed by :data:`OPTIONS`.
        start: the directory that a relative results directory is in.

    Raises:
        ConfigurationError: an option's value is not understood.
    """
    level, soak_s = parse_level(given.gpucluster_level or "standard")
    return Settings(
        thresholds=given.gpucluster_thresholds,
        profile=given.gpucluster_profile,
        expect=parse_expect(given.gpucluster_expect),
        level=level,
        soak_s=soak_s,
        results_dir=results_dir(given, start=start),
        gate=given.gpucluster_gate,
        inline=given.gpucluster_inline,
        selftest=given.gpucluster_selftest,
        audit=getattr(given, "gpucluster_audit", False),
        only=tuple(map(parse_part, given.gpucluster_only or ())),
        summary=_placed(given, "gpucluster_summary", start=start),
        metrics=_placed(given, "gpucluster_metrics", start=start),
        termination=_placed(given, "gpucluster_termination_message", start=start),
        junit=parse_junit(getattr(given, "gpucluster_junit", None)),
        junit_strict=getattr(given, "gpucluster_junit_strict", False),
        resume=_resume(given, soak_s=soak_s),
    )


def _resume(given: argparse.Namespace, *, soak_s: float | None) -> Resume:
    """A run goes on where its user names its directory, as ``gpucluster demo`` does not.

    A soak that was cut short goes on by rules of its own, without an option.
    """
    if getattr(given, RESUME, False):
        return "always"
    is_named = given.gpucluster_results is not None and not getattr(given, DEMO, None)
    return "unfinished" if is_named and soak_s is None else "never"


def _placed(given: argparse.Namespace, name: str, *, start: Path) -> Path | None:
    file: Path | None = getattr(given, name, None)
    return start / file if file is not None else None


def reaches(level: str, other: str) -> bool:
    """Whether a run at ``level`` includes what belongs to the level ``other``."""
    return LEVELS.index(level) >= LEVELS.index(other)


MOST_EXPECTED = {"nodes": 4096, "gpus_per_node": 64}
"""Beyond them pytest collects for minutes and takes tens of GiB: 3,000 x 8 are 1.1 million tests and 4 GiB."""


def parse_expect(text: str | None) -> Expect:
    """``nodes=2,gpus_per_node=8`` as an :class:`Expect`.

    Raises:
        ConfigurationError: an empty text, an unknown key, a key given twice, a value that is no whole number above zero, or one
            that is beyond :data:`MOST_EXPECTED`.
    """
    if text is not None and not text.strip(" ,"):
        raise ConfigurationError("--gpucluster-expect: nothing is given; say nodes=2,gpus_per_node=8, or leave the option out")
    found: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        key, _, number = (piece.strip() for piece in part.partition("="))
        if key not in ("nodes", "gpus_per_node") or key in found:
            hint = did_you_mean(key, [name for name in ("nodes", "gpus_per_node") if name not in found])
            why = f"gives {key} twice" if key in found else "is not understood"
            raise ConfigurationError(f"--gpucluster-expect: {part!r} {why}; say nodes=2,gpus_per_node=8.{hint}")
        if not re.fullmatch(r"[1-9]\d{0,99}", number):
            raise ConfigurationError(f"--gpucluster-expect: {key} must be a whole number above zero, not {number!r}")
        if int(number) > MOST_EXPECTED[key]:
            beyond = f"{key}={number} is more than one run takes, {MOST_EXPECTED[key]}"
            raise ConfigurationError(f"--gpucluster-expect: {beyond}; parts of a cluster: gpucluster sweep, gpucluster merge")
        found[key] = int(number)
    return Expect(nodes=found.get("nodes"), gpus_per_node=found.get("gpus_per_node"))


def parse_part(text: str) -> PartName:
    """``gpu-node-3:GPU-5f...`` as a :class:`PartName`.

    Raises:
        ConfigurationError: no host is named, or no part after a colon.
    """
    host, colon, part = (piece.strip() for piece in text.partition(":"))
    if not host or (colon and not part):
        raise ConfigurationError(f"--gpucluster-only: {text!r} names no part; say HOST, HOST:UUID, HOST:SERIAL or HOST:gpu3")
    return PartName(host=host, part=part or None)


def parse_junit(text: str | None) -> str | None:
    """What a testcase of the JUnit file is about.

    Raises:
        ConfigurationError: another word than :data:`JUNIT_FORMS`.
    """
    if text is not None and text not in JUNIT_FORMS:
        raise ConfigurationError(
            f"--gpucluster-junit: {text!r} is not one of {', '.join(JUNIT_FORMS)}.{did_you_mean(text, JUNIT_FORMS)}"
        )
    return text


def parse_level(text: str) -> tuple[str, float | None]:
    """``quick``, ``standard``, ``soak`` (8 h) or ``soak:30m`` as (level, soak duration in s or None).

    Raises:
        ConfigurationError: another word, or a duration that is not a number with one of s, m, h, d.
    """
    level, colon, duration = text.partition(":")
    if level not in LEVELS or (colon and (level != "soak" or not duration)):
        hint = did_you_mean(level, LEVELS) if level not in LEVELS else ""
        raise ConfigurationError(f"--gpucluster-level: {text!r} is not one of {', '.join(LEVELS)} or soak:8h.{hint}")
    if not duration:
        return level, SOAK_S if level == "soak" else None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if match is None or float(match[1]) == 0:
        raise ConfigurationError(f"--gpucluster-level: {duration!r} is not a duration such as 30m, 8h or 2d")
    return level, float(match[1]) * DURATION_UNITS_S[match[2]]


def requested(settings: Settings) -> dict[str, str]:
    """What the options ask for, by option, so that nodes can be compared; an option that is not given is left out.

    Two spellings of one meaning are one text. A thresholds file is known by its content. The results directory and the places
    of other files are left out:
    each node may have its own.
    """
    level = settings.level if settings.soak_s is None else f"{settings.level}:{settings.soak_s:g}s"
    shape = {"nodes": settings.expect.nodes, "gpus_per_node": settings.expect.gpus_per_node}
    texts = {
        "--gpucluster-thresholds": _digest(settings.thresholds) if settings.thresholds is not None else None,
        "--gpucluster-profile": settings.profile,
        "--gpucluster-expect": ",".join(f"{key}={number}" for key, number in shape.items() if number is not None),
        "--gpucluster-level": level,
        **{f"--gpucluster-{name}": "given" for name in ("gate", "selftest", "audit") if getattr(settings, name)},
        "--gpucluster-only": " ".join(map(str, settings.only)),
    }
    return {name: text for name, text in texts.items() if text}


def requested_of_node(given: argparse.Namespace, *, start: Path) -> dict[str, str]:
    """:func:`requested` of a node that becomes an agent. What is not understood stays as it was given: no error there."""
    try:
        return requested(settings_from(given, start=start))
    except ConfigurationError:
        texts = {name: getattr(given, name[2:].replace("-", "_")) for name in COMPARED}
        return {name: str(text) for name, text in texts.items() if text}


def _digest(file: Path) -> str:
    try:
        return f"a file with the SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
