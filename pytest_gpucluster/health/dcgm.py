"""What NVIDIA's diagnostic (``dcgmi diag``) says of one GPU, judged. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.dcgm import BAD, PASSED, SOFTWARE, DiagResult
from pytest_gpucluster.judging.finding import HERE, Finding
from pytest_gpucluster.text import one_line, shortened

if TYPE_CHECKING:
    from pytest_gpucluster.measurements.dcgm import DcgmDiag

__all__ = ["judge_diag", "judge_whole_diag", "level_of_round"]

MOST_INFO = 3
ADVICE = {
    2: "take this GPU out of service (DCGM: isolate)",
    6: "drain the node and reset the GPU (DCGM: reset)",
    4: "have the GPU examined (DCGM: triage)",
    5: "change the setting that DCGM names (DCGM: config)",
    1: "watch the GPU (DCGM: monitor)",
}
"""By dcgmErrorSeverity_t (dcgmlib/dcgm_errors.h, DCGM 3 and 4), the most urgent first."""
CONFIG = 5
SKIPPED = "skip"
IN_USE = re.compile(
    r"\bMCUTIL\b|(?<!no )\b(?:an)?other (?:\w+ )?(?:program|process|application|client|job|workload|user|instance)"
    r"|\bprocess(?:es)? running on\b|\bactive (?:\w+ )?process|\butili[sz]ation .*\b(?:above|over|exceeds)\b"
    r"|\b(?:GPU|device)s?(?: \d+)?,? (?:(?:is|are|was|may be|already|currently|still) )*"
    r"(?:in use|busy|being used|used by|not idle)\b",
    re.IGNORECASE,
)
"""Errors that say that something else was on the GPU (nvbandwidth of DCGM 4.5: https://github.com/NVIDIA/DCGM/issues/272)."""


def judge_diag(diag: DcgmDiag, uuid: str, kind: str, *, kinds: Collection[str]) -> Finding:
    """Judge the tests of one ``kind`` on the GPU with this UUID.

    ``kinds`` are those that are judged at all. A test of another kind counts as ``software``, so that none is lost. What a
    test says of the host, or of a part that is no GPU, counts for every GPU of that host.
    """
    number = next((gpu.number for gpu in diag.gpus if gpu.uuid == uuid), None)
    if number is None:
        return _found([], [f"DCGM does not list {uuid}"], diag)
    own = [result for result in diag.results if (result.kind if result.kind in kinds else SOFTWARE) == kind]
    results = [result for result in own if result.gpu in (number, None)]
    tests = {result.test: None for result in own}
    with_result = {result.test for result in results if result.scope != "other"}
    silent = [f"{test}: no result for GPU {number}" for test in tests if test not in with_result]
    none = [] if any(result.kind == kind for result in own) else [f"dcgmi diag -r {diag.level} ran no test {kind!r}"]
    bad, busy = _bad_and_busy(results)
    unknown = [*none, *silent, *filter(None, map(_why_unknown, results)), *diag.doubts]
    found = _found(bad, [*unknown, *map(_not_idle, busy)], diag, results)
    return found if unknown or not busy else replace(found, unknown_kind="software")


def judge_whole_diag(diag: DcgmDiag) -> Finding:
    """Judge all tests of a long diagnostic on a host's GPUs. What DCGM skipped is a remark.

    Each GPU has to pass a test that loads it: the checks of the software pass without one.
    """
    bad, busy = _bad_and_busy(diag.results)
    skipped = [result for result in diag.results if result.word.casefold() == SKIPPED]
    of_gpus = [one for one in diag.results if one.scope != "other" and one.word.casefold() == PASSED.casefold()]
    touched = {one.gpu for one in of_gpus}
    loaded = {one.gpu for one in of_gpus if one.kind != SOFTWARE}
    without = {gpu.number: "" if not touched & {gpu.number, None} else " but of its software" for gpu in diag.gpus}
    silent = [f"no test passed on GPU {number}{but}" for number, but in without.items() if not loaded & {number, None}]
    silent += [] if diag.gpus else ["DCGM has none of the GPUs of this run here"]
    others = [_why_unknown(result) for result in diag.results if result not in skipped]
    unknown = [*silent, *filter(None, others), *map(_not_idle, busy), *diag.doubts]
    found = _found(bad, unknown, diag, diag.results)
    names = ", ".join(dict.fromkeys(f"{one.test} ({'; '.join(one.errors or one.info) or one.part})" for one in skipped))
    told = f"DCGM {diag.version or '(version unknown)'} -r {diag.level} skipped: {one_line(shortened(names))}"
    return replace(found, remark=told if skipped else None)


def level_of_round(number: int, takes_s: Mapping[str, float], *, left_s: float) -> int | None:
    """The level of dcgmi diag in a round of a soak: each once, the lowest first, if the soak has the time; None for none.

    Args:
        number: of the round, from 1.
        takes_s: by level (``r3``), the seconds that the soak must still have.
        left_s: the seconds that it has.
    """
    levels = sorted(takes_s)
    if number > len(levels) or left_s < takes_s[levels[number - 1]]:
        return None
    return int(levels[number - 1].removeprefix("r"))


def _bad_and_busy(results: Iterable[DiagResult]) -> tuple[list[DiagResult], list[DiagResult]]:
    """The tests that failed, without and then with those that something else on the GPU disturbed."""
    failed = [result for result in results if result.word.casefold() in BAD]
    busy = [result for result in failed if result.errors and all(map(IN_USE.search, result.errors))]
    return [result for result in failed if result not in busy], busy


def _not_idle(result: DiagResult) -> str:
    """A test that something else on the GPU disturbed: DCGM calls it a failure, and it is none of the GPU."""
    return f"GPU not idle: {_text(result, result.errors)}; free the GPU and run the diagnostic again"


def _why_unknown(result: DiagResult) -> str | None:
    """Why a result that is not bad does not show health; None if it does, or is bad."""
    if result.word.casefold() in BAD:
        return None
    if result.word.casefold() != PASSED.casefold():
        return _text(result, result.errors or result.info)
    return _text(result, result.errors) if result.errors else None


def _found(bad: list[DiagResult], unknown: list[str], diag: DcgmDiag, results: Iterable[DiagResult] = ()) -> Finding:
    severities = [severity for result in bad for severity in result.severities]
    words = [result.word.casefold() for result in results]
    info = [_text(result, result.info) for result in results if result.info]
    version = diag.version or "version unknown"
    evidence = {"DCGM": version, "-r": diag.level, "passed": words.count(PASSED.casefold())}
    return Finding(
        bad={HERE: [_text(result, result.errors) for result in bad]},
        unknown={HERE: [f"DCGM {diag.version or '(version unknown)'}: {doubt}" for doubt in dict.fromkeys(unknown)]},
        kind="settings" if severities and set(severities) == {CONFIG} else "gpu",
        unknown_kind="unknown",
        advice=next((text for severity, text in ADVICE.items() if severity in severities), None),
        evidence={**evidence, **({"info": info[:MOST_INFO]} if info else {})},
    )


def _text(result: DiagResult, details: Iterable[str]) -> str:
    """``PCIe, GPU 3: Fail: the text of DCGM``, in one line."""
    text = "; ".join(details)
    return one_line(shortened(f"{result.test}, {result.part}: {result.word}{': ' if text else ''}{text}"))
