"""Whether a bundle is what was packed and signed, and whether all in it follows from its journal: step by step.

What is derived in a bundle is derived again and compared: limits, results, JUnit, page, environment, statements.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpucluster.config.run_files import JOURNAL, JUNIT, REPORT, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.evidence import archive, signature
from pytest_gpucluster.evidence.archive import AS_READ, MANIFEST, SIGNATURE, Archive, Manifest
from pytest_gpucluster.evidence.junit_cases import difference_of_files, read_cases
from pytest_gpucluster.inventory.identity import digest_of_package, version_of
from pytest_gpucluster.page.document import RunDocument, document_of
from pytest_gpucluster.page.render import embedded_results, model_of, page_from
from pytest_gpucluster.records.reading import limits_digest, limits_used
from pytest_gpucluster.reporting.journal import FOUND_AT_END, texts_of
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT, JournalState, state_of
from pytest_gpucluster.text import counted, one_line, shortened
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.layers import read_source
from pytest_gpucluster.thresholds.released import DIGEST

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

OK, NOT_OK, STALE = "ok", "not ok", "stale"
FILES, PACKAGE = "pytest-gpucluster's files", "pytest-gpucluster"
"""The versions of a run's software that decide whether its reports can be made again to the byte."""
UNSIGNED = "UNSIGNED"


class Found(NamedTuple):
    """What a check found: :data:`OK`, :data:`NOT_OK` or :data:`STALE`, and a sentence about it."""

    state: str
    text: str


@dataclass(frozen=True)
class Bundle:
    """The files of a bundle, and what is made from them once. Each member raises ConfigurationError for a damaged file."""

    files: Mapping[str, bytes]

    def file(self, name: str) -> bytes:
        """The bytes of a file.

        Raises:
            ConfigurationError: it is not in the bundle.
        """
        if name not in self.files:
            raise ConfigurationError(f"{name} is not in the bundle")
        return self.files[name]

    @cached_property
    def run(self) -> RunDocument:
        """results.json as data."""
        return document_of(self.file(RESULTS))

    @cached_property
    def state(self) -> JournalState:
        """The state after the last event of the journal."""
        return state_of(self.file(JOURNAL))

    @cached_property
    def rebuilt(self) -> tuple[str, str]:
        """results.json and the JUnit file as the journal gives them."""
        return texts_of(self.state.report(self.state.close()))

    @property
    def is_of_this_version(self) -> bool:
        """Whether the files of this package are those that made the reports."""
        here = {FILES: digest_of_package(), PACKAGE: version_of(PACKAGE)}
        return all(self.state.versions.get(name) == version for name, version in here.items())

    def other(self, text: str) -> Found:
        """A report that is not what this version makes: a fault, unless another version made it."""
        if self.is_of_this_version:
            return Found(NOT_OK, text)
        return Found(STALE, f"another version made it ({self.state.versions.get(PACKAGE, 'unknown')}): {text}")


def limits(bundle: Bundle) -> Found:
    """The limits are those of the verdict: by digest, and, where this version can, worked out again from their file."""
    facts = bundle.run.facts
    stated = facts.get("thresholds_sha256")
    as_read = bundle.files.get(AS_READ)
    if as_read is not None and hashlib.sha256(as_read).hexdigest() != stated:
        return Found(NOT_OK, f"{AS_READ} is not the file of the verdict, which has the SHA-256 {stated}")
    entries = bundle.run.entries
    if entries and limits_digest(entries) != facts.get("limits_sha256"):
        return Found(NOT_OK, f"the limits in {RESULTS} are not those of its limits_sha256")
    packaged = hashlib.sha256(bundle.file(archive.AS_PACKAGED)).hexdigest()
    if packaged != DIGEST.read_text(encoding="ascii").strip():
        return bundle.other("the packaged limits are not those of this version; the verdict is about its own limits")
    if as_read is None:
        return Found(STALE, f"the file that the run read is not in the bundle; {RESULTS} has each limit")
    if entries and _resolved(as_read, str(facts.get("profile"))) != facts.get("limits_sha256"):
        return bundle.other(f"{AS_READ} gives other limits than those in {RESULTS}")
    return Found(OK, f"{AS_READ} is the file of the verdict, and gives the {counted(len(entries), 'limit')} in {RESULTS}")


def _resolved(content: bytes, profile: str) -> str | None:
    """The digest of the limits that a file of limits gives a profile; None where it gives none."""
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder:
        path = Path(folder) / "limits.yaml"
        path.write_bytes(content)
        file, _ = ThresholdsFile.validate(read_source(path))
    if file is None or profile not in file.profiles:
        return None
    return limits_digest(limits_used(file.criteria(file.profiles[profile]).values()))


def results(bundle: Bundle) -> Found:
    """results.json follows from the journal: verdict, outcomes, values and all else that the journal has."""
    kept, text = json.loads(bundle.file(RESULTS)), bundle.rebuilt[0].encode()
    made = kept if text == bundle.file(RESULTS) else json.loads(text)
    changed = [name for name in sorted(kept.keys() | made.keys()) if kept.get(name) != made.get(name)]
    if made["environment"].get("rebuilt_from_journal"):
        changed = [name for name in changed if name not in FOUND_AT_END]
    word = str(kept["verdict_line"]).partition(":")[0].replace(" ", "_")
    if {kept["verdict"], word} != {made["verdict"]}:
        return Found(NOT_OK, f"the verdict is {kept['verdict']}, and the journal gives {made['verdict']}")
    fault = _other_outcome(bundle.run, document_of(text)) if changed else None
    if fault is not None:
        return Found(NOT_OK, fault)
    if (kept.get("environment") or {}).get("versions") != bundle.state.versions:
        return Found(NOT_OK, "the versions in its environment are not those of the journal")
    for name in sorted(changed, key=lambda name: name not in archive.COPIED):
        path, one, other = first_difference(kept.get(name), made.get(name), name)
        why = f"{path} is {_short(one)}, and the journal gives {_short(other)}"
        return Found(NOT_OK, why) if name in archive.COPIED else bundle.other(why)
    return Found(OK, f"the verdict {kept['verdict']} and {counted(len(bundle.run.records), 'outcome')} follow from the journal")


def _other_outcome(kept: RunDocument, made: RunDocument) -> str | None:
    """The first outcome, value or limit that the journal does not give; every version writes these."""
    known = {(one.criterion, one.place): one for one in made.records}
    for one in kept.records:
        where = f"{one.criterion}{f' at {one.place}' if one.place else ''}"
        other = known.pop((one.criterion, one.place), None)
        if other is None:
            return f"{where} is {one.outcome}, and the journal does not have it"
        for name in ("outcome", "value", "limit_text"):
            if getattr(one, name) != getattr(other, name):
                return f"{where}: {name} is {_short(getattr(one, name))}, the journal gives {_short(getattr(other, name))}"
    return next((f"{one.criterion} at {one.place} is in the journal only" for one in known.values()), None)


def first_difference(one: Any, other: Any, path: str) -> tuple[str, Any, Any]:
    """Where two values differ first, and how: the path, and what each has there."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys: Iterator[Any] = (key for key in (*one, *other) if one.get(key, ...) != other.get(key, ...))
        key = next(keys)
        return first_difference(one.get(key, "nothing"), other.get(key, "nothing"), f"{path}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        at = next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)
        return first_difference(one[at], other[at], f"{path}[{at}]")
    return path, one, other


def junit(bundle: Bundle) -> Found:
    """The JUnit file follows from the journal, case by case. Tests of the site that judge nothing may stand in it too."""
    kept, made = read_cases(bundle.file(JUNIT)), read_cases(bundle.rebuilt[1].encode())
    fault, is_of_wording = difference_of_files(kept, made, own_files=bundle.state.history.files)
    if fault is not None:
        return bundle.other(fault) if is_of_wording else Found(NOT_OK, fault)
    more = len(kept.cases) - len(made.cases)
    own = f"; {counted(more, 'test')} of the site without a criterion" if more else ""
    return Found(OK, f"{counted(len(made.cases), 'testcase follows', 'testcases follow')} from the journal{own}")


def page(bundle: Bundle) -> Found:
    """The page is the one that results.json gives, to the byte."""
    kept = bundle.file(REPORT)
    held = embedded_results(kept.decode("utf-8", "replace"))
    if held is not None and held != bundle.file(RESULTS):
        return Found(NOT_OK, f"the page holds another {RESULTS} than the bundle")
    if held is None and bundle.run.digest.encode() not in kept:
        return Found(NOT_OK, f"the page is of another {RESULTS}: it does not name the SHA-256 of this one")
    made = page_from(model_of(bundle.run)).encode()
    if kept == made:
        return Found(OK, f"it is the page of {RESULTS}, to the byte")
    at = next((at for at, (one, other) in enumerate(zip(kept, made, strict=False)) if one != other), min(len(kept), len(made)))
    line = kept.count(b"\n", 0, at) + 1
    start = max(0, at - 30)
    one, other = (content[start : at + 30].decode("utf-8", "replace") for content in (kept, made))
    return bundle.other(f"line {line} of the page has {_short(one)}, and {RESULTS} gives {_short(other)}")


def environment(bundle: Bundle) -> Found:
    """environment.json says what results.json says."""
    if bundle.file(archive.ENVIRONMENT) != archive.as_json(archive.environment_of(bundle.run)):
        return Found(NOT_OK, f"{archive.ENVIRONMENT} does not say what {RESULTS} says")
    versions = bundle.state.versions
    return Found(OK, ", ".join(f"{name} {version}" for name, version in versions.items()) or "no versions are recorded")


def statements(bundle: Bundle) -> Found:
    """The in-toto statements are about these files, and say this verdict."""
    for name, make in archive.STATEMENTS.items():
        made = make(bundle.run, bundle.files)
        kept = json.loads(bundle.file(name))
        if not isinstance(kept, dict) or kept.get("subject") != made["subject"]:
            return Found(NOT_OK, f"{name} is about other files than those of the bundle")
        if kept != made:
            path, one, other = first_difference(kept, made, Path(name).stem)
            return bundle.other(f"{path} is {_short(one)}, and the bundle gives {_short(other)}")
    return Found(OK, f"they are about these files and say {bundle.run.word}")


def version(bundle: Bundle) -> Found:
    """Which version of the package made the reports: with another one, some cannot be compared to the byte."""
    if bundle.is_of_this_version:
        return Found(OK, "the reports are of this version")
    text = "another version of gpucluster made the run; what it writes otherwise is not compared"
    return Found(STALE, f"{text} ({FILES}: {bundle.state.versions.get(FILES, 'not recorded')}, here {digest_of_package()})")


CHECKS: dict[str, Callable[[Bundle], Found]] = {
    "version": version,
    "limits": limits,
    "results": results,
    "JUnit": junit,
    "page": page,
    "environment": environment,
    "statements": statements,
}


BESIDE = ("limits", "page")
"""Checks that need nothing of the journal, and so go on beside it in another process."""
WITHIN_S = 300.0
"""For each of them. A minute is the most that was computed, of 1,024 nodes; what takes longer is done again here."""


def _checked(name: str, bundle: Bundle) -> Found:
    """What a check finds; a file that is missing or damaged is a fault of the bundle."""
    try:
        return CHECKS[name](bundle)
    except ConfigurationError as error:
        return Found(NOT_OK, one_line(str(error)))
    except NOT_AN_EVENT as error:
        return Found(NOT_OK, f"a file is damaged: {one_line(f'{type(error).__name__} {error}')}")


def _check_beside(sent: Connection, bundle: Bundle) -> None:
    for name in BESIDE:
        sent.send((name, _checked(name, bundle)))


def _found_beside(received: Connection, name: str) -> Found | None:
    """What the other process found; None if it was killed or is late."""
    with contextlib.suppress(OSError, EOFError):  # killed before, or while it sent
        if received.poll(WITHIN_S):
            about, found = received.recv()
            return Found(*found) if about == name else None
    return None


def _short(value: Any) -> str:
    return shortened(one_line(json.dumps(value, default=str)))[:120]


class VerifyStep(NamedTuple):
    """One step of a verification; ``state`` is ok, not ok, stale, or UNSIGNED where no signature was asked for."""

    name: str
    state: str
    text: str


def steps(whole: Archive, *, signers: Path | None) -> Iterator[VerifyStep]:
    """Every step, as it is done. What one step finds keeps no other from being tried.

    Args:
        whole: the bundle.
        signers: a file of allowed signers (ssh-keygen(1), ALLOWED SIGNERS); None: any signature will do, or none.

    Raises:
        ConfigurationError: it is no bundle at all, a newer version made it, or ssh-keygen is missing.
    """
    if not {MANIFEST, SIGNATURE, JOURNAL, RESULTS} & whole.files.keys():
        raise ConfigurationError("the zip is no bundle of gpucluster: it has neither manifest nor results")
    manifest = _manifest(whole)
    yield _listed("zip", whole.faults, good=f"{counted(len(whole.files), 'file')}, whole")
    if isinstance(manifest, str):
        yield VerifyStep("manifest", NOT_OK, manifest)
    else:
        yield VerifyStep("manifest", OK, f"it names {counted(len(manifest.entries), 'file')}")
        yield _listed("files", [*archive.differences(manifest, whole.files)], good="each has its size and SHA-256")
        out_of_order = [*archive.misplaced(manifest, [*whole.files])]
        yield _listed("order", out_of_order, good="the files stand as the manifest has them")
    yield _signed(manifest, whole, signers)
    gone = [name for name in archive.REQUIRED if name not in whole.files]
    if gone:
        yield _listed("contents", [f"{name} is not in the bundle" for name in gone], good="")
    bundle = Bundle(whole.files)
    # A fork has the bundle already. An executor of the standard library sends it through a pipe, and can wait for ever where
    # the process that reads there dies (Python 3.10 and 3.11.2, python/cpython issue 94777).
    context = multiprocessing.get_context("fork")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=_check_beside, args=(sent, bundle), daemon=True)
    process.start()
    sent.close()
    try:
        for name in CHECKS:
            found = _found_beside(received, name) if name in BESIDE else None
            if name in BESIDE and found is None:  # it was killed, or hangs
                process.kill()
            yield VerifyStep(name, *(found or _checked(name, bundle)))
    finally:
        process.kill()
        process.join()


def summary(taken: list[VerifyStep]) -> tuple[bool, str]:
    """Whether a bundle is valid, and the line that says so."""
    bad = [one.name for one in taken if one.state == NOT_OK]
    if bad:
        return False, f"NOT VALID: {', '.join(bad)}"
    notes = [state for state in (UNSIGNED, STALE) if any(one.state == state for one in taken)]
    return True, ", ".join(["valid", *notes])


def _manifest(whole: Archive) -> Manifest | str:
    """The manifest, or why there is none."""
    if MANIFEST not in whole.files:
        return f"{MANIFEST} is missing: it was removed or renamed"
    try:
        return archive.read_manifest(whole.files[MANIFEST])
    except ValueError as error:
        return str(error)


def _listed(name: str, faults: Sequence[str], *, good: str) -> VerifyStep:
    return VerifyStep(name, NOT_OK, "; ".join(faults)) if faults else VerifyStep(name, OK, good)


def _signed(manifest: Manifest | str, whole: Archive, signers: Path | None) -> VerifyStep:
    """Who signed. A signature that the manifest speaks of must be there."""
    signed = whole.files.get(SIGNATURE)
    if signed is None:
        if isinstance(manifest, Manifest) and manifest.is_signed:
            return VerifyStep("signature", NOT_OK, f"{SIGNATURE} is missing: the manifest says that it was signed")
        state = UNSIGNED if signers is None else NOT_OK
        return VerifyStep("signature", state, "nobody signed the bundle: anybody may have made it")
    try:
        who = signature.check(whole.files.get(MANIFEST, b""), signed, signers=signers)
    except signature.SignatureError as fault:
        return VerifyStep("signature", NOT_OK, str(fault))
    return VerifyStep("signature", OK, who)
