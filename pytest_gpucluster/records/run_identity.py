"""Which run it was: its id, when, by which command, who, where; and which limits it used, with their digest."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import pwd
import re
import sys
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.protocol.rank import own_hostname
from pytest_gpucluster.thresholds.limit import SIGNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.resolve import Threshold

HIDDEN = "***"
NAMES_OF_SECRETS = r"token(?!s)|secret|passw|passphrase|credential|authorization|api[-_]?key"
_SECRET_NAME = re.compile(rf"{NAMES_OF_SECRETS}|(?<![a-z0-9])(key|auth|pwd)(?![a-z0-9])", re.IGNORECASE)
_INSIDE = re.compile(
    rf"(?P<name>--[\w-]*(?:{NAMES_OF_SECRETS})[\w-]*[\s=]+|\w*(?:{NAMES_OF_SECRETS})\w*=)[^\s;&,]+", re.IGNORECASE
)
_OF_A_URL = re.compile(r"(?P<scheme>\w[\w+.-]*://)[^/@\s]+@")
_KNOWN_FORMS = re.compile(
    r"\b(hf_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|sk-|AKIA|nvapi-)[A-Za-z0-9_-]{8,}|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
)
_NOT_DIGESTED = ("where",)


def run_identity(run: str, *, now: dt.datetime | None = None) -> dict[str, Any]:
    """``run`` of results.json as far as it is known when a run begins.

    Args:
        run: the id that its journal has.
        now: when it begins, with a time zone; None: now.
    """
    started = now or dt.datetime.now(tz=dt.timezone.utc).astimezone()
    return {
        "id": run,
        "started": started.isoformat(timespec="milliseconds"),
        "command": without_secrets(sys.orig_argv),
        "user": _user(),
        "host": own_hostname() or None,
    }


def run_facts(run: Mapping[str, Any], places: Iterable[Place], *, last_s: float, has_ended: bool) -> dict[str, Any]:
    """``run`` of results.json at a moment.

    Args:
        run: what :func:`run_identity` made; without a start, as in a journal of an older version, it began at ``last_s``.
        places: the expected GPUs and nodes.
        last_s: when the last thing happened, in seconds since 1970.
        has_ended: whether that was the end of the run.
    """
    started = dt.datetime.fromisoformat(str(run.get("started") or zoned(last_s)))
    last = dt.datetime.fromtimestamp(last_s, tz=started.tzinfo)
    return {
        "id": run.get("id"),
        "started": started.isoformat(timespec="milliseconds"),
        "ended": last.isoformat(timespec="milliseconds") if has_ended else None,
        "duration_s": round(max(0.0, (last - started).total_seconds()), 3),
        "command": list(run.get("command") or ()),
        "user": run.get("user"),
        "host": run.get("host"),
        "hosts": list(dict.fromkeys(place.hostname for place in places if place.hostname)),
    }


def zoned(at_s: float) -> str:
    """A moment in seconds since 1970 as ISO 8601 with the offset of this machine's time zone."""
    return dt.datetime.fromtimestamp(at_s, tz=dt.timezone.utc).astimezone().isoformat(timespec="milliseconds")


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with ``***`` in place of what looks like a secret, by its option's name or by its own form."""
    found: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _value = word.partition("=")
        if hide_next and not word.startswith("--"):
            found.append(HIDDEN)
            hide_next = False
            continue
        is_secret = _SECRET_NAME.search(name) is not None
        hide_next = is_secret and not equals and word.startswith("-")
        shown = f"{name}={HIDDEN}" if is_secret and equals else word
        shown = _INSIDE.sub(rf"\g<name>{HIDDEN}", _OF_A_URL.sub(rf"\g<scheme>{HIDDEN}@", shown))
        found.append(_KNOWN_FORMS.sub(HIDDEN, shown))
    return found


def limits_used(criteria: Iterable[Threshold]) -> dict[str, dict[str, Any]]:
    """``limits`` of results.json: what each criterion of the profile asks, and why."""
    return {one.key: _limit_used(one) for one in criteria}


def limits_digest(limits: Mapping[str, Mapping[str, Any]]) -> str:
    """SHA-256 of ``limits`` without the keys ``where``, as JSON with sorted keys and without spaces."""
    kept = {key: {name: value for name, value in facts.items() if name not in _NOT_DIGESTED} for key, facts in limits.items()}
    text = json.dumps(strict_json(kept), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _limit_used(one: Threshold) -> dict[str, Any]:
    return {
        "title": one.criterion,
        "per": one.per,
        "level": one.level,
        "unit": one.unit,
        "kind": one.kind,
        "operator": SIGNS[one.kind],
        "numbers": {str(size): number for size, number in one.numbers.items()},
        "shapes": dict(one.by_shape),
        "of": one.of if "of" in one.model_fields_set else None,
        "advisory": one.severity == "advisory",
        "noise": one.noise,
        "why": one.why,
        "source": one.source,
        "where": f"{one.file}:{one.line}",
        "ids": list(one.ids),
        "recipe": dict(one.recipe),
    }


def _user() -> str | None:
    """The account that runs this process; None where the system does not know its name, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER") or None
