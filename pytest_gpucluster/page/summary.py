"""The run in Markdown for a job's summary, as annotations of GitHub, and as a Pod's termination message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.failure_text import unit_beside
from pytest_gpucluster.judging.verdict import ACCEPTED, REJECTED
from pytest_gpucluster.page.criteria_view import NOT_RECORDED
from pytest_gpucluster.page.document import markdown
from pytest_gpucluster.page.parts_view import NAMES, Miss, PartView
from pytest_gpucluster.text import one_line, within_bytes

if TYPE_CHECKING:
    from pytest_gpucluster.page.render import PageModel

MOST_PARTS = 200
MOST_ALSO = 12
"""Names of criteria below the table of a part."""
MOST_NAMED = 4
"""Of a part in a line."""
MOST_BYTES = 900_000
"""GitHub takes 1 MiB of a step's summary, and shows none of a larger one."""
MOST_ANNOTATIONS = 10
"""GitHub shows so many errors of a step."""
SHOWN = ("Expected", "Found", "Started", "Duration", "Profile and level", "Limits (SHA-256)", "results.json (SHA-256)")
MOST_MESSAGE_BYTES = 4096
"""Kubernetes keeps so much of the termination message of a container."""
MOST_LINE_BYTES = 1024
"""Of the verdict line; a part's has less."""
CUT = "\n\nThe rest is in report.html and results.json.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Where the limit of a criterion is written: a file, as GitHub knows it, and a line."""

    file: str
    line: int


def markdown_of(model: PageModel) -> str:
    """The summary, always below 1 MiB. Foreign text stays text: it makes no HTML, no link, no mention, no row of a table."""
    parts = [*model.parts, *model.more_parts]
    terms = {"shown": SHOWN, "not_recorded": NOT_RECORDED, "most_parts": MOST_PARTS, "most_also": MOST_ALSO}
    text = markdown("summary.md.j2", model=model, parts=parts, **terms)
    content = text.encode()
    return text if len(content) <= MOST_BYTES else content[:MOST_BYTES].decode(errors="ignore") + CUT


def termination_of(model: PageModel) -> str:
    """The verdict, then each bad part in a line, as UTF-8 of at most 4,096 bytes; parts that have no room are counted."""
    parts = [*model.parts, *model.more_parts]
    lines = [within_bytes(one_line(text), MOST_LINE_BYTES) for text in (model.banner.line, model.banner.reason)]
    lines += [within_bytes(one_line(_brief(part)), MOST_LINE_BYTES // 2) for part in parts]
    rooms = (len(lines) - left for left in range(len(parts) + 1))
    texts = ("\n".join([*lines[:kept], *_left_out(len(lines) - kept)]) + "\n" for kept in rooms)
    return next(text for text in texts if len(text.encode()) <= MOST_MESSAGE_BYTES)


def _brief(part: PartView) -> str:
    known = {name: text for name, text in part.where if text != NOT_RECORDED}
    name = next((f", {word} {known[word]}" for word in (NAMES["serial"], NAMES["uuid"]) if word in known), "")
    waived = ", waived" if part.is_waived else ""
    return f"{part.name}{name}{waived}: {_misses_of(part) or next(iter(part.evidence), part.kind)}"


def _left_out(number: int) -> list[str]:
    return [f"and {number} more, in the results directory"] if number else []


def _misses_of(part: PartView) -> str:
    """The first values that miss their limit, and how many more; their number stands first, where nothing cuts it off."""
    shown = [*map(_miss_of, part.misses[:MOST_NAMED])]
    total = len(part.misses) + len(part.more_criteria)
    count, rest = (f"{total} bad: ", f"; and {total - len(shown)} more") if total > len(shown) else ("", "")
    return f"{count}{'; '.join(shown)}{rest}" if part.misses else ""


def _miss_of(one: Miss) -> str:
    return f"{one.criterion} {one.value.text}{unit_beside(one.unit, one.value.text)}, limit {one.limit.text}"


def annotations_of(model: PageModel, written: Mapping[str, Written]) -> list[str]:
    """Workflow commands of GitHub: one for the verdict, and one for each bad part, at the line of a limit that it misses.

    Args:
        model: the view of the run.
        written: where the limits stand, by criterion.
    """
    banner = model.banner
    level = "notice" if banner.word == ACCEPTED else "error" if banner.word == REJECTED else "warning"
    lines = [_command(level, banner.word, banner.reason, None)]
    parts = [*model.parts, *model.more_parts]
    for part in parts[: MOST_ANNOTATIONS - 1]:
        known = next((written[one.criterion] for one in part.misses if one.criterion in written), None)
        text = _misses_of(part) or next(iter(part.evidence), part.kind)
        lines.append(_command("warning" if part.is_waived else "error", f"{part.name}: {part.kind}", text, known))
    return lines


def _command(level: str, title: str, text: str, known: Written | None) -> str:
    where = [("file", known.file), ("line", str(known.line))] if known is not None else []
    fields = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in (*where, ("title", title)))
    return f"::{level} {fields}::{_escaped(text)}"


def _escaped(text: str, more: Iterable[str] = "") -> str:
    """The text as a workflow command takes it: in one line, its own signs as percent codes."""
    for sign in ("%", "\r", "\n", *more):
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text
