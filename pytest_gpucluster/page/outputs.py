"""What a run leaves besides its own reports, all made from results.json: page, metrics, summary, annotations.

None of it decides anything. What fails here is a sentence on the screen, and the run's exit code stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pytest_gpucluster.config.run_files import JOURNAL, METRICS, REPORT, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.page.document import RunDocument, document_of, read_document
from pytest_gpucluster.page.metrics import metrics_of
from pytest_gpucluster.page.render import model_of, page_from
from pytest_gpucluster.page.summary import Written, annotations_of, markdown_of, termination_of
from pytest_gpucluster.reporting.files import require_unread, require_writable, write_atomically, write_report
from pytest_gpucluster.reporting.journal import texts_of
from pytest_gpucluster.reporting.rebuild import read_journal

T = TypeVar("T")
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
    problems: list[str] = []

    def tried(name: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception as error:  # noqa: BLE001 -- a fault here must not take the verdict along
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            problems.append(f"{name} could not be written: {reason}")
            return None

    whole = f"{REPORT} and what belongs to it"
    run = tried(whole, lambda: read_document(folder / RESULTS))
    model = tried(whole, lambda: model_of(run)) if run is not None else None
    if run is None or model is None:
        return Said(problems=tuple(problems))
    tried(REPORT, lambda: write_atomically(folder / REPORT, page_from(model)))
    metrics = tried(METRICS, lambda: metrics_of(run, written_s=(folder / RESULTS).stat().st_mtime))
    if metrics is not None:
        tried(METRICS, lambda: write_atomically(folder / METRICS, metrics))
        _write_wanted(wanted.metrics, metrics, tried)
    step = wanted.environment.get(STEP_SUMMARY)
    summary = tried("the summary", lambda: markdown_of(model)) if wanted.summary is not None or step else None
    if wanted.termination is not None:
        message = tried("the termination message", lambda: termination_of(model))
        _write_wanted(wanted.termination if message is not None else None, message or "", tried)
    if summary is not None:
        _write_wanted(wanted.summary, summary, tried)
        if step:
            tried(f"${STEP_SUMMARY}", lambda: _append(Path(step), summary))
    is_github = wanted.environment.get(ON_GITHUB) == "true"
    annotations = tried("the annotations", lambda: tuple(annotations_of(model, wanted.written))) if is_github else ()
    return Said(problems=tuple(problems), annotations=annotations or ())


def _write_wanted(file: Path | None, text: str, tried: Callable[[str, Callable[[], None]], None]) -> None:
    """Write a file where the user wants it, if anywhere."""
    if file is not None:
        tried(str(file), lambda: write_report(file, text))


def _append(file: Path, text: str) -> None:
    """GitHub's file collects what all steps append."""
    with file.open("a", encoding="utf-8") as summary:
        summary.write(text)


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
