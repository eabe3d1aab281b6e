"""What goes into a bundle: the files of a results directory as they lie there, and what other programs read of the run.

These are two in-toto Statements v1, and its environment. The predicate test-result of in-toto knows PASSED, WARNED and FAILED.
What is no acceptance is FAILED there, an INCOMPLETE run too. The verdict itself stands in a statement of our own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.run_files import JOURNAL, JUNIT, REPORT, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.evidence.archive import MANIFEST, SIGNATURE
from pytest_gpucluster.judging.verdict import ACCEPTED, NOT_SELECTED, PASSED, SKIPPED, WITH_WAIVERS
from pytest_gpucluster.page.document import RunDocument, document_of
from pytest_gpucluster.page.render import model_of, page_from
from pytest_gpucluster.reporting.files import require_no_links
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT, state_of
from pytest_gpucluster.reporting.writer import texts_of
from pytest_gpucluster.thresholds.layers import packaged_path
from pytest_gpucluster.thresholds.released import packaged_files, released_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.page.document import RunDocument

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
"""https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md"""
VERDICT = "urn:x-pytest-gpucluster:verdict:v1"
RESULT = {ACCEPTED: "PASSED", WITH_WAIVERS: "WARNED"}
"""Every other verdict is FAILED."""
KEPT = ("profile", "level", "expected", "simulated", "changed_limits", "changed_terms", "waivers", "remarks")
LIMITS = ("thresholds_sha256", "limits_sha256")
ENVIRONMENT, AS_READ, AS_PACKAGED = "environment.json", "limits/as-read.yaml", "limits/packaged.json"


def as_json(value: Mapping[str, Any]) -> bytes:
    """A file of a bundle: equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def environment_of(run: RunDocument) -> dict[str, Any]:
    """Which run it was, and the software around it, as results.json has them."""
    return {name: run.facts.get(name) for name in ("run", "environment", "timings")}


def test_result(run: RunDocument, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The statement that any reader of in-toto knows. Criteria stand in it by name; those not selected are left out."""
    found: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for criterion, records in run.by_criterion.items():
        kind = _kind_of(records)
        if kind is not None:
            found[kind].append(criterion)
    limits = [one for one in _subjects(files) if one["name"].startswith("limits/")]
    predicate = {"result": RESULT.get(run.word, "FAILED"), "configuration": limits, **found}
    return _statement(TEST_RESULT, predicate, files)


def verdict_statement(run: RunDocument, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The statement that says the verdict as it is, and by which limits it was reached."""
    predicate = {
        "verdict": run.word,
        "verdict_line": run.facts.get("verdict_line"),
        "run": run.facts.get("run"),
        "limits": {name: run.facts.get(name) for name in LIMITS},
        **{name: run.facts.get(name) for name in KEPT},
    }
    return _statement(VERDICT, predicate, files)


STATEMENTS: dict[str, Callable[[RunDocument, Mapping[str, bytes]], dict[str, Any]]] = {
    "statements/test-result.json": test_result,
    "statements/verdict.json": verdict_statement,
}
REQUIRED = (ENVIRONMENT, JOURNAL, JUNIT, AS_PACKAGED, REPORT, RESULTS, *STATEMENTS)
"""What every bundle holds. The file of limits is left out where it is no longer there."""


def _statement(kind: str, predicate: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    return {"_type": STATEMENT, "subject": _subjects(files), "predicateType": kind, "predicate": predicate}


def _subjects(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Every file but the statements, with its digest; and but the manifest, which names the statements."""
    return [
        {"name": name, "digest": {"sha256": hashlib.sha256(content).hexdigest()}}
        for name, content in sorted(files.items())
        if name not in (MANIFEST, SIGNATURE, *STATEMENTS)
    ]


def _kind_of(records: Iterable[Record]) -> str | None:
    """Where a criterion stands: the worst of its outcomes decides. None where it was not selected or does not apply."""
    judged = [one for one in records if one.outcome not in (NOT_SELECTED, SKIPPED)]
    if not judged:
        return None
    if any(one.outcome != PASSED and one.waiver is None for one in judged):
        return "failedTests"
    return "warnedTests" if any(one.advisory or one.waiver is not None for one in judged) else "passedTests"


def contents_of(folder: Path) -> tuple[dict[str, bytes], RunDocument]:
    """Every file of the bundle of a run by name, in order, and the run.

    A page or a JUnit file that the run did not write is made. What is there is taken as it lies: ``verify`` judges it.

    Raises:
        ConfigurationError: there is no run that has ended, its files are damaged, or a link lies among them.
        OSError: a file cannot be read.
    """
    files, run = _kept(folder)
    page = folder / REPORT
    files[REPORT] = page.read_bytes() if page.is_file() else page_from(model_of(run)).encode()
    if (folder / JUNIT).is_file():
        files[JUNIT] = (folder / JUNIT).read_bytes()
    else:
        state = state_of(files[JOURNAL])
        files[JUNIT] = texts_of(state.report(state.close()))[1].encode()
    files[ENVIRONMENT] = as_json(environment_of(run))
    limits = _limits_as_read(files[JOURNAL], run)
    if limits is not None:
        files[AS_READ] = limits
    files[AS_PACKAGED] = released_text(packaged_files(packaged_path())).encode()
    for name, make in STATEMENTS.items():
        files[name] = as_json(make(run, files))
    return dict(sorted(files.items())), run


def _kept(folder: Path) -> tuple[dict[str, bytes], RunDocument]:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no results directory" if folder.exists() else f"there is no {folder}")
    require_no_links(folder)
    for name in (JOURNAL, RESULTS):
        if not (folder / name).is_file():
            advice = f"; 'gpucluster report {folder}' writes it" if name == RESULTS and (folder / JOURNAL).is_file() else ""
            raise ConfigurationError(f"{folder} has no {name}{advice}")
    files = {name: (folder / name).read_bytes() for name in (JOURNAL, RESULTS)}
    run = document_of(files[RESULTS], name=str(folder / RESULTS))
    if (run.facts.get("environment") or {}).get("unfinished"):
        raise ConfigurationError(f"the run in {folder} has not ended; if it was killed, 'gpucluster report {folder}' ends it")
    return files, run


def _limits_as_read(journal: bytes, run: RunDocument) -> bytes | None:
    """The file of limits that the run read: the first that has its digest, else the one that it named; None without any."""
    found = []
    for path in _candidates(journal):
        if path.is_file():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == run.facts.get("thresholds_sha256"):
                return content
            found.append((path, content))
    return next((content for path, content in found if path != packaged_path()), None)


def _candidates(journal: bytes) -> Iterator[Path]:
    try:
        started: dict[str, Any] = json.loads(journal.partition(b"\n")[0])
        named = started.get("settings", {}).get("thresholds", "None")
        if named != "None":
            yield Path(started.get("command", {}).get("folder", ".")) / named
    except NOT_AN_EVENT:  # half a journal: verify names it
        pass
    yield packaged_path()
