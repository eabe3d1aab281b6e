"""Settings of a run as frozen objects: only they are used once the options are parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = ("quick", "standard", "soak")
DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SOAK_S = 8 * 3600.0
"""How long ``soak`` without a duration lasts."""
DEADLINES_S = {"quick": 120.0, "standard": 300.0, "soak": 600.0}
"""The deadline of a call without a deadline in its recipe, by level."""


def reaches(level: str, other: str) -> bool:
    """Whether a run at ``level`` includes what belongs to the level ``other``."""
    return LEVELS.index(level) >= LEVELS.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """A promised inventory; None where nothing is promised."""

    nodes: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that the options ask for."""

    thresholds: Path | None
    profile: str | None
    expect: Expect
    level: str
    soak_s: float | None
    results_dir: Path
    gate: bool
    inline: bool
    selftest: bool = False


def parse_expect(text: str | None) -> Expect:
    """``nodes=2,gpus_per_node=8`` as an :class:`Expect`.

    Raises:
        ConfigurationError: an empty text, an unknown key, a key given twice, or a value that is no whole number above zero.
    """
    if text is not None and not text.strip(" ,"):
        raise ConfigurationError("--gpucluster-expect: nothing is given; say nodes=2,gpus_per_node=8, or leave the option out")
    found: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        key, _, number = (piece.strip() for piece in part.partition("="))
        if key not in ("nodes", "gpus_per_node") or key in found:
            hint = did_you_mean(key, [name for name in ("nodes", "gpus_per_node") if name not in found])
            raise ConfigurationError(f"--gpucluster-expect: {part!r} is not understood; say nodes=2,gpus_per_node=8.{hint}")
        if not re.fullmatch(r"[1-9]\d{0,6}", number):
            raise ConfigurationError(f"--gpucluster-expect: {key} must be a whole number above zero, not {number!r}")
        found[key] = int(number)
    return Expect(nodes=found.get("nodes"), gpus_per_node=found.get("gpus_per_node"))


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
