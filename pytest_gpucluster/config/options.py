"""Every ``--gpucluster`` option of pytest, once: pytest, ``gpucluster launch`` and the tests read this table."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.settings import Settings, parse_expect, parse_level
from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

RESULTS_DIR = "gpucluster-results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option as argparse and pytest take it. Without a ``metavar`` it is a switch."""

    name: str
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of ``add_argument`` and of pytest's ``addoption``."""
        if self.metavar is None:
            return {"action": "store_true", "help": self.help}
        return {"metavar": self.metavar, "type": self.type, "help": self.help}


OPTIONS = (
    Option(name="--gpucluster", help="treat these tests as an acceptance run"),
    Option(name="--gpucluster-thresholds", metavar="FILE", type=Path, help="limits to judge by, instead of the packaged"),
    Option(name="--gpucluster-profile", metavar="NAME", help="profile of the thresholds file (default: by GPU name)"),
    Option(name="--gpucluster-expect", metavar="nodes=N,gpus_per_node=M", help="the inventory that was promised"),
    Option(name="--gpucluster-level", metavar="LEVEL", help="quick, standard (default), soak or soak:8h"),
    Option(name="--gpucluster-results", metavar="DIR", type=Path, help=f"results directory (default: {RESULTS_DIR})"),
    Option(name="--gpucluster-gate", help="exit 0 only for the verdict ACCEPTED"),
    Option(name="--gpucluster-inline", help="run functions in this process, for one place (pdb)"),
    Option(name="--gpucluster-selftest", help="plant faults before the run, and say which it finds"),
)
COMPARED = ("--gpucluster-profile", "--gpucluster-expect", "--gpucluster-level")
"""The options whose words are compared between nodes as they are, where they are not understood."""
INI_HELP = "treat every run here as an acceptance run"


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
    )


def asked(settings: Settings) -> dict[str, str]:
    """What the options ask for, by option, so that nodes can be compared; an option that is not given is left out.

    Two spellings of one meaning are one text. A thresholds file is told by its content. The results directory is left out:
    each node may have its own.
    """
    level = settings.level if settings.soak_s is None else f"{settings.level}:{settings.soak_s:g}s"
    shape = {"nodes": settings.expect.nodes, "gpus_per_node": settings.expect.gpus_per_node}
    texts = {
        "--gpucluster-thresholds": _digest(settings.thresholds) if settings.thresholds is not None else None,
        "--gpucluster-profile": settings.profile,
        "--gpucluster-expect": ",".join(f"{key}={number}" for key, number in shape.items() if number is not None),
        "--gpucluster-level": level,
        "--gpucluster-gate": "given" if settings.gate else None,
        "--gpucluster-selftest": "given" if settings.selftest else None,
    }
    return {name: text for name, text in texts.items() if text}


def asked_of_node(given: argparse.Namespace, *, start: Path) -> dict[str, str]:
    """:func:`asked` of a node that becomes an agent. What is not understood is no error there, and stays as it was given."""
    try:
        return asked(settings_from(given, start=start))
    except ConfigurationError:
        texts = {name: getattr(given, name[2:].replace("-", "_")) for name in COMPARED}
        return {name: str(text) for name, text in texts.items() if text}


def _digest(file: Path) -> str:
    try:
        return f"a file with the SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
