"""What a run leaves besides its own reports, all made from results.json: page, metrics, summary, annotations.

None of it decides anything. What fails here is a sentence on the screen, and the run's exit code stays.

The run in Markdown for a job's summary, as annotations of GitHub, and as a Pod's termination message.

The run as metrics of Prometheus, for the textfile collector of node_exporter: ``metrics.prom``.

Written by hand: the format is one line a sample with three signs to escape. The package ``prometheus_client`` would make a
registry and its threads for what is a text of one moment (docs/decisions/0043-the-page.md).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from pytest_gpucluster.config.run_files import JOURNAL, METRICS, REPORT, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.failure_text import unit_beside
from pytest_gpucluster.judging.verdict import ACCEPTED, FAILED, OUTCOMES, REJECTED, VERDICTS, WAIVED, counted_as
from pytest_gpucluster.page.criteria_view import NOT_RECORDED, host_of
from pytest_gpucluster.page.document import RunDocument, document_of, markdown, read_document
from pytest_gpucluster.page.parts_view import NAMES, Miss, PartView
from pytest_gpucluster.page.render import PageModel, model_of, page_from
from pytest_gpucluster.reporting.files import require_unread, require_writable, write_atomically, write_report
from pytest_gpucluster.reporting.journal import texts_of
from pytest_gpucluster.reporting.rebuild import read_journal
from pytest_gpucluster.reporting.table_rows import readings_of, severest_records
from pytest_gpucluster.text import one_line, within_bytes

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
    terms = {"shown": SHOWN, "not_recorded": NOT_RECORDED, "most_parts": MOST_PARTS, "most_also": MOST_ALSO}
    text = markdown("summary.md.j2", model=model, **terms)
    content = text.encode()
    return text if len(content) <= MOST_BYTES else content[:MOST_BYTES].decode(errors="ignore") + CUT


def termination_of(model: PageModel) -> str:
    """The verdict, then each bad part in a line, as UTF-8 of at most 4,096 bytes; parts that have no room are counted."""
    lines = [within_bytes(one_line(text), MOST_LINE_BYTES) for text in (model.banner.line, model.banner.reason)]
    lines += [within_bytes(one_line(_brief(part)), MOST_LINE_BYTES // 2) for part in model.parts]
    text = "\n".join(lines) + "\n"
    for left_out in range(1, len(model.parts) + 1):
        if len(text.encode()) <= MOST_MESSAGE_BYTES:
            break
        text = "\n".join([*lines[:-left_out], f"and {left_out} more, in the results directory"]) + "\n"
    return text


def _brief(part: PartView) -> str:
    known = {name: text for name, text in part.where if text != NOT_RECORDED}
    name = next((f", {word} {known[word]}" for word in (NAMES["serial"], NAMES["uuid"]) if word in known), "")
    waived = ", waived" if part.is_waived else ""
    return f"{part.name}{name}{waived}: {_misses_of(part) or next(iter(part.evidence), part.kind)}"


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
    for part in model.parts[: MOST_ANNOTATIONS - 1]:
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


MOST_CULPRITS = 1_000
HELP = {
    "gpucluster_run_info": "The run: its id, profile, level and digests. Always 1.",
    "gpucluster_accepted": "1 if the verdict is ACCEPTED or ACCEPTED_WITH_WAIVERS, else 0.",
    "gpucluster_verdict": "1 for the verdict of the run, 0 for all others.",
    "gpucluster_run_end_timestamp_seconds": "When the run ended, or when its results were written.",
    "gpucluster_run_duration_seconds": "How long the run took.",
    "gpucluster_checks": "Outcomes by kind; a waived failure counts as waived.",
    "gpucluster_gpus": "GPUs that were expected, and that answered.",
    "gpucluster_bad_part": "A part that is to blame. Always 1.",
    "gpucluster_criterion_worst_value": "The worst value of a criterion, in its unit.",
    "gpucluster_criterion_limit": "The limit of the worst value.",
    "gpucluster_criterion_headroom_ratio": "How far the worst value is inside its limit, as a share of it; below 0: outside.",
    "gpucluster_criterion_failed_places": "Places at which a criterion failed.",
}
"""Every metric with its help text. All are gauges."""


Sample: TypeAlias = "tuple[str, tuple[Mapping[str, str], float]]"
"""The name of a metric, labels, and a value."""


def metrics_of(run: RunDocument, *, written_s: float) -> str:
    """The text of ``metrics.prom``. ``written_s``: when results.json was written, for a file that has no time of its own."""
    found = grouped([*_of_the_run(run, written_s), *_counts(run), *_parts(run), *_criteria(run)])
    lines = []
    for name in (name for name in HELP if name in found):
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(labels)} {value!r}" for labels, value in found[name]]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_label_value(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _label_value(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _of_the_run(run: RunDocument, written_s: float) -> Iterable[Sample]:
    ran = run.facts.get("run") or {}
    info = {
        "run": str(ran.get("id") or ""),
        "profile": str(run.facts.get("profile") or ""),
        "level": str(run.facts.get("level") or ""),
        "limits_sha256": str(run.facts.get("limits_sha256") or run.facts.get("thresholds_sha256") or ""),
        "results_sha256": run.digest,
        "simulated": "true" if run.facts.get("simulated") else "false",
    }
    yield "gpucluster_run_info", (info, 1)
    yield "gpucluster_accepted", ({}, int(run.word in VERDICTS[:2]))
    for word in VERDICTS:
        yield "gpucluster_verdict", ({"verdict": word}, int(word == run.word))
    yield "gpucluster_run_end_timestamp_seconds", ({}, _ended_s(ran.get("ended"), written_s))
    seconds = ran.get("duration_s", (run.facts.get("timings") or {}).get("total_s"))
    if isinstance(seconds, (int, float)):
        yield "gpucluster_run_duration_seconds", ({}, seconds)


def _ended_s(ended: object, written_s: float) -> float:
    try:
        return datetime.fromisoformat(str(ended)).timestamp()
    except ValueError:
        return round(written_s, 3)


def _counts(run: RunDocument) -> Iterable[Sample]:
    counts = Counter(counted_as(record) for record in run.records)
    for outcome in (*OUTCOMES, WAIVED):
        yield "gpucluster_checks", ({"outcome": outcome}, counts[outcome])
    expected = run.facts.get("expected") or {}
    nodes, gpus = expected.get("nodes"), expected.get("gpus_per_node")
    if isinstance(nodes, int) and isinstance(gpus, int):
        yield "gpucluster_gpus", ({"state": "expected"}, nodes * gpus)
    found = sum(place.gpu is not None and place.rank is not None for place in run.places.values())
    yield "gpucluster_gpus", ({"state": "found"}, found)


def _parts(run: RunDocument) -> Iterable[Sample]:
    for index, culprit in enumerate(run.culprits[:MOST_CULPRITS]):
        place = run.places.get(culprit["place"]["id"]) if culprit.get("place") is not None else None
        labels = {
            "part": str(index),
            "kind": str(culprit["kind"]),
            "host": host_of(place) if place is not None else "",
            "gpu": str(place.gpu) if place is not None and place.gpu is not None else "",
            "serial": (place.serial if place is not None else None) or "",
            "uuid": (place.uuid if place is not None else None) or "",
            "confidence": str(culprit.get("confidence") or ""),
        }
        yield "gpucluster_bad_part", (labels, 1)


def _criteria(run: RunDocument) -> Iterable[Sample]:
    for criterion, records in run.by_criterion.items():
        labels = {"criterion": criterion}
        failed = sum(counted_as(record) == FAILED for record in records)
        yield "gpucluster_criterion_failed_places", (labels, failed)
        readings = readings_of(severest_records(records)) or readings_of(records)
        if not readings:
            continue
        worst = max(readings, key=lambda reading: reading.badness)
        with_unit = {**labels, "unit": worst.limit.unit}
        yield "gpucluster_criterion_worst_value", (with_unit, worst.value)
        kind = {**with_unit, "kind": worst.limit.kind}
        yield "gpucluster_criterion_limit", (kind, worst.limit.value)
        margin = worst.limit.margin_percent(worst.value)
        if margin is not None:
            yield "gpucluster_criterion_headroom_ratio", (labels, margin / 100)


STEP_SUMMARY, ON_GITHUB = "GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Where a user wants files besides those in the results directory; ``environment`` is that of the process."""

    summary: Path | None = None
    metrics: Path | None = None
    termination: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Written] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the screen has to say: ``problems`` are sentences, ``annotations`` are lines for GitHub."""

    problems: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()


def write_outputs(folder: Path, wanted: Wanted) -> Said:
    """Write all files about the run whose results.json is in ``folder``. Nothing is raised."""
    step = wanted.environment.get(STEP_SUMMARY)
    problems: list[str] = []
    annotations: list[str] = []

    @contextlib.contextmanager
    def tried(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- a fault here must not take the verdict along
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            problems.append(f"{name} could not be written: {reason}")

    def put(file: Path | None, text: str) -> None:
        """Write a file where the user wants it, if anywhere."""
        if file is not None:
            with tried(str(file)):
                write_report(file, text)

    with tried(f"{REPORT} and what belongs to it"):
        run = read_document(folder / RESULTS)
        model = model_of(run)
        with tried(REPORT):
            write_atomically(folder / REPORT, page_from(model))
        with tried(METRICS):
            metrics = metrics_of(run, written_s=(folder / RESULTS).stat().st_mtime)
            with tried(METRICS):
                write_atomically(folder / METRICS, metrics)
            put(wanted.metrics, metrics)
        with tried("the termination message"):
            put(wanted.termination, termination_of(model) if wanted.termination is not None else "")
        with tried("the summary"):
            summary = markdown_of(model) if wanted.summary is not None or step else ""
            put(wanted.summary, summary)
            if step:
                with tried(f"${STEP_SUMMARY}"), Path(step).open("a", encoding="utf-8") as collected:
                    collected.write(summary)  # of all steps
        with tried("the annotations"):
            annotations = annotations_of(model, wanted.written) if wanted.environment.get(ON_GITHUB) == "true" else []
    return Said(problems=tuple(problems), annotations=tuple(annotations))


def page_about(source: Path, *, output: Path | None) -> tuple[Path, RunDocument]:
    """Write the page about a run that is over: its path, and the run.

    Args:
        source: a results directory, or a results.json. A directory without a whole results.json is read from its journal.
        output: where the page goes; ``report.html`` beside results.json by default.

    Raises:
        ConfigurationError: there is no run, its files are damaged, or the page cannot be written there.
        OSError: the disk refused the page.
    """
    folder = source if source.is_dir() else source.parent
    file = output if output is not None else folder / REPORT
    require_unread(file, (folder / RESULTS, folder / JOURNAL, source))
    run = _run_of(source)
    require_writable(file)
    write_report(file, page_from(model_of(run)))
    return file, run


def _run_of(source: Path) -> RunDocument:
    if not source.is_dir():
        return read_document(source)
    results, journal = source / RESULTS, source / JOURNAL
    if results.is_file():
        run = read_document(results)
        if not (run.facts.get("environment") or {}).get("unfinished") or not journal.is_file():
            return run
    elif not journal.is_file():
        raise ConfigurationError(f"{source} holds no run: there is neither {RESULTS} nor {JOURNAL}")
    state = read_journal(journal)
    text, _ = texts_of(state.report(state.close()), with_junit=False)
    return document_of(text.encode(), name=str(journal))
