"""What other programs read of a run: two in-toto Statements v1, and its environment.

The predicate test-result of in-toto knows PASSED, WARNED and FAILED. What is no acceptance is FAILED there, an INCOMPLETE run
too. The verdict itself stands in a statement of our own.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.evidence.manifest import MANIFEST, SIGNATURE
from pytest_gpucluster.judging.verdict import ACCEPTED, NOT_SELECTED, PASSED, SKIPPED, WITH_WAIVERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
