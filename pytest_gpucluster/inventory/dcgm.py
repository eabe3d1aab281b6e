"""NVIDIA's ``dcgmi``: found, run under a deadline, its numbers of the GPUs, and what its diagnostic reports.

The forms of ``dcgmi diag -j`` are those of ``dcgmi/Diag.cpp`` in NVIDIA's source (2.4.5, 3.3.9 and 4.6.0):

* DCGM 2: below ``DCGM GPU Diagnostic``; ``gpu_ids`` and ``warnings`` are texts, and the file has no version.
* DCGM 3: ``gpu_id`` in place of ``gpu_ids``; ``warnings`` is a list of objects; ``version`` at the top. In both, a test of
  the category ``Deployment`` has one result for all GPUs, which names one where it failed.
* DCGM 4: below ``DCGM Diagnostic``; each result names an entity (``entity_group`` and ``entity_id``), each test has a
  ``test_summary``, and the version is in ``metadata``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from pytest_gpucluster.errors import Part
from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.program import Ended, ProgramError

PROGRAM = "dcgmi"
GRACE_S = 30.0
"""After SIGTERM ``dcgmi diag`` stops the test in the host engine, for which it waits 25 s (dcgmi/Diag.cpp of DCGM 4.6.0)."""
_VERSION = re.compile(r"version:?\s*(\d+(?:\.\d+)+)", re.IGNORECASE)
_ROW = re.compile(r"^\|\s*(?P<number>\d*)\s*\|\s*(?P<fact>.*?)\s*\|\s*$")
_UUID = re.compile(r"^Device UUID:\s*(GPU-[0-9a-fA-F-]+)$")


class DcgmError(Exception):
    """``dcgmi`` could not be run to its end, or what it printed cannot be read: nothing is known of the hardware."""

    blames: ClassVar[Part] = "software"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmGpu:
    """A GPU as DCGM numbers it. Its number is neither CUDA's nor always NVML's: the host engine keeps it for its lifetime."""

    number: int
    uuid: str


def find_program() -> str | None:
    """The path of ``dcgmi``; None where it is not installed."""
    return shutil.which(PROGRAM)


def run(path: str, arguments: Sequence[str], *, within_s: float, grace_s: float = GRACE_S) -> Ended:
    """Run ``dcgmi``, and end it if it takes longer.

    Raises:
        DcgmError: it cannot be started, or had to be ended.
    """
    try:
        return program.run(path, arguments, within_s=within_s, grace_s=grace_s)
    except ProgramError as error:
        raise DcgmError(str(error)) from None


def read_version(path: str, *, within_s: float) -> str | None:
    """What ``dcgmi --version`` says; None where it says none.

    Raises:
        DcgmError: it cannot be run.
    """
    ended = run(path, ["--version"], within_s=within_s)
    found = _VERSION.search(ended.printed)
    return found[1] if found else None


def read_gpus(path: str, *, within_s: float) -> list[DcgmGpu]:
    """The GPUs that the host engine lists.

    Raises:
        DcgmError: the host engine does not answer, or lists no GPU.
    """
    ended = run(path, ["discovery", "-l"], within_s=within_s)
    gpus = parse_discovery(ended.printed)
    if ended.exit_code or not gpus:
        raise DcgmError(
            f"dcgmi discovery -l lists no GPU (exit code {ended.exit_code}: {ended.gist}); "
            "is DCGM's host engine, nv-hostengine, running on this host?"
        )
    return gpus


def parse_discovery(printed: str) -> list[DcgmGpu]:
    """The GPUs of the table of ``dcgmi discovery -l``; those without a UUID, and switches and CPUs, are left out.

    Raises:
        DcgmError: two GPUs have one number, or one UUID.
    """
    found: list[DcgmGpu] = []
    number: int | None = None
    for row in filter(None, map(_ROW.match, printed.splitlines())):
        number = int(row["number"]) if row["number"] else number
        uuid = _UUID.match(row["fact"])
        if uuid and number is not None:
            found.append(DcgmGpu(number=number, uuid=uuid[1]))
    if not len(found) == len({gpu.number for gpu in found}) == len({gpu.uuid for gpu in found}):
        raise DcgmError("dcgmi discovery -l gives two GPUs one number, or one UUID")
    return found


Scope: TypeAlias = Literal["gpu", "host", "other"]
ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
PASSED = "Pass"
BAD = ("fail", "warn")
"""Words, in small letters, of a test that found something. ``dcgmi`` itself writes a warning as ``Fail``."""
GPU = "GPU"
SOFTWARE = "software"
"""DCGM 4's name of the tests that DCGM 2 and 3 list one by one in the category Deployment."""
ALIASES = {"gpu_memory": "memory", "eud_test": "eud"}
"""Names of DCGM 2 and 3 by that of DCGM 4, where they differ by more than capitals and spaces."""
NO_RESULT = "no result"
"""The word of a test that the report lists without one."""
_GPU = re.compile(r"\bGPU(?: ID)?(?:[ #]|: )+(\d+)\b", re.IGNORECASE)
_ERROR = re.compile(r"\s*(?:GPU \d+[:,]?\s+)*error\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagResult:
    """What one test of DCGM says of one part.

    Attributes:
        test: the name that DCGM gives it.
        kind: the same for all versions of DCGM: ``software``, ``memory``, ``pcie``.
        scope: what it is about: one GPU, the host with all its GPUs, or something else (a CPU, a switch, a summary).
        gpu: DCGM's number of the GPU; None where it is not about one.
        part: the part in words.
        word: ``Pass``, ``Fail``, ``Skip`` or whatever else DCGM wrote.
        errors: the texts of what was wrong.
        severities: DCGM's number for what to do about each error, where it gives one.
        info: other texts.
    """

    test: str
    kind: str
    scope: Scope
    gpu: int | None
    part: str
    word: str
    errors: list[str]
    severities: list[int]
    info: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagReport:
    """The whole report; ``version`` is DCGM's, None where the report does not have it."""

    version: str | None
    results: list[DiagResult]


def parse_report(printed: str) -> DiagReport:
    """Read a report. Lines before it, such as warnings of a library, are left out.

    Raises:
        DcgmError: it is not whole, has another form, says that the diagnostic could not run, or has no result.
    """
    data = _object_in(printed)
    root = next((data[name] for name in ROOTS if isinstance(data.get(name), dict)), None)
    if root is None:
        raise DcgmError(f"dcgmi diag printed JSON without {' or '.join(map(repr, ROOTS))}")
    if root.get("runtime_error"):
        raise DcgmError(f"DCGM could not run the diagnostic: {root['runtime_error']}")
    results = [
        result
        for category in _list_of(root, "test_categories")
        for test in _list_of(category, "tests")
        for result in _results_of(category.get("category"), test)
    ]
    if all(result.word == NO_RESULT for result in results):
        raise DcgmError("dcgmi diag printed a report in which no test has a result")
    return DiagReport(version=_version_in(data, root), results=results)


def _object_in(printed: str) -> dict[str, Any]:
    begin = printed.find("{")
    if begin < 0:
        raise DcgmError("dcgmi diag printed no JSON")
    try:
        data, end = json.JSONDecoder().raw_decode(printed, begin)
    except (ValueError, RecursionError) as error:
        raise DcgmError(f"dcgmi diag printed JSON that is not whole: {error}") from error
    if printed[end:].strip():
        raise DcgmError("dcgmi diag printed more than its report")
    return dict(data)


def _list_of(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects, without the ``null`` that DCGM 2 and 3 write where something did not run."""
    items = [] if data.get(name) is None else data[name]
    if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
        raise DcgmError(f"dcgmi diag printed a report whose {name!r} is no list of objects")
    return [item for item in items if item is not None]


def _version_in(data: dict[str, Any], root: dict[str, Any]) -> str | None:
    metadata = data.get("metadata")
    places = (metadata if isinstance(metadata, dict) else {}, data, root)
    return next((place["version"] for place in places if isinstance(place.get("version"), str)), None)


def _results_of(category: Any, test: dict[str, Any]) -> list[DiagResult]:
    name = test.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DcgmError("dcgmi diag printed a test without a name")
    kind = kind_of(category, name)
    results = [_result(name, kind, number, one) for one in _list_of(test, "results") for number in _numbers_of(name, one)]
    summary = test.get("test_summary")
    if summary is not None:
        return [*results, *_summary_of(name, kind, summary, results)]
    return results or [_of_no_gpu(name, kind, "the report", NO_RESULT)]


def kind_of(category: Any, name: str) -> str:
    """One name for a test in all versions of DCGM."""
    if isinstance(category, str) and category.casefold() == "deployment":
        return SOFTWARE
    plain = re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")
    return ALIASES.get(plain, plain)


def _numbers_of(name: str, result: dict[str, Any]) -> list[int | None]:
    """DCGM's numbers of the GPUs that a result is about; None for the host, or for another part."""
    found = result.get("gpu_id", result.get("gpu_ids"))
    if "entity_id" in result:
        found = result["entity_id"] if _group_of(result) == GPU else None
    if found is None:
        return _numbers_in(_errors_of(result)[0] if _group_of(result) == GPU and "entity_id" not in result else [])
    try:
        numbers = [int(one) for one in str(found).split(",")]
    except ValueError:
        raise DcgmError(f"a result of {name!r} names no GPU that can be read: {str(found)[:100]!r}") from None
    return [None if number < 0 else number for number in numbers]


def _numbers_in(errors: list[str]) -> list[int | None]:
    """The GPUs that the errors of a result name in words; none of them where an error names none."""
    named = [_GPU.findall(error) for error in errors]
    return [*dict.fromkeys(int(number) for numbers in named for number in numbers)] if named and all(named) else [None]


def _result(name: str, kind: str, number: int | None, one: dict[str, Any]) -> DiagResult:
    errors, severities = _errors_of(one)
    group = _group_of(one)
    is_of_host = group == GPU and one.get("entity_id", GPU) is not None
    scope: Scope = "gpu" if number is not None else "host" if is_of_host else "other"
    return DiagResult(
        test=name,
        kind=kind,
        scope=scope,
        gpu=number,
        part={"gpu": f"GPU {number}", "host": "all GPUs of the host", "other": f"{group} {one.get('entity_id')}"}[scope],
        word=_word_of(one),
        errors=errors,
        severities=severities,
        info=_texts(one.get("info")),
    )


def _group_of(one: dict[str, Any]) -> str:
    """The group of DCGM 4's entity; without one, as in DCGM 2 and 3, a GPU."""
    return str(one.get("entity_group", GPU))


def _word_of(one: dict[str, Any]) -> str:
    word = one.get("status")
    return word.strip() or "no status" if isinstance(word, str) else "no status"


def _errors_of(one: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The texts of ``warnings``, which is DCGM's word for errors, and of lines of ``info`` that begin with ``Error``."""
    items = _items_of(one.get("warnings"))
    severities = [item.get("error_severity") for item in items if isinstance(item, dict)]
    errors = [*map(_text_of, items), *filter(_ERROR.match, _texts(one.get("info")))]
    return errors, [number for number in severities if type(number) is int]


def _text_of(item: Any) -> str:
    """A text, or the text of an object: ``warning``, in DCGM 3's tests of the host ``warnings``."""
    if isinstance(item, dict):
        item = next((item[name] for name in ("warning", "warnings") if item.get(name)), item)
    return item if isinstance(item, str) else json.dumps(item)


def _texts(found: Any) -> list[str]:
    return [*map(_text_of, _items_of(found))]


def _items_of(found: Any) -> list[Any]:
    """What a list holds, without ``null``; a value that is no list is one item, unless it is empty."""
    items = found if isinstance(found, list) else [] if found in (None, "") else [found]
    return [item for item in items if item is not None]


def _summary_of(name: str, kind: str, summary: Any, results: list[DiagResult]) -> list[DiagResult]:
    """What a summary says that no result of its test does: an error of no entity, or another word than any of them."""
    if not isinstance(summary, dict):
        raise DcgmError(f"dcgmi diag printed a summary of {name!r} that is no object")
    errors, severities = _errors_of(summary)
    known = {text for result in results for text in result.errors}
    more = [text for text in errors if text not in known]
    word = _word_of(summary)
    is_known = word.casefold() in {result.word.casefold() for result in results}
    if is_known and not more:
        return []
    own = _of_no_gpu(name, kind, "its summary", PASSED if is_known else word)
    return [replace(own, errors=more, severities=severities)]


def _of_no_gpu(name: str, kind: str, part: str, word: str) -> DiagResult:
    return DiagResult(test=name, kind=kind, scope="other", gpu=None, part=part, word=word, errors=[], severities=[], info=[])
