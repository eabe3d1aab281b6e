"""Whether a bundle is what was packed and signed, and whether all in it follows from its journal: step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.evidence import signature
from pytest_gpucluster.evidence.checks import CHECKS, NOT_OK, OK, STALE, Bundle, Found
from pytest_gpucluster.evidence.contents import REQUIRED
from pytest_gpucluster.evidence.manifest import (
    MANIFEST,
    SIGNATURE,
    Manifest,
    NewerBundleError,
    differences,
    misplaced,
    read_manifest,
)
from pytest_gpucluster.reporting.rebuild import NOT_AN_EVENT
from pytest_gpucluster.text import counted, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpucluster.evidence.archive import Archive

UNSIGNED = "UNSIGNED"


class VerifyStep(NamedTuple):
    """One step of a verification; ``state`` is ok, not ok, stale, or UNSIGNED where no signature was asked for."""

    name: str
    state: str
    text: str


def steps(archive: Archive, *, signers: Path | None) -> Iterator[VerifyStep]:
    """Every step, as it is done. What one step finds keeps no other from being tried.

    Args:
        archive: the bundle.
        signers: a file of allowed signers (ssh-keygen(1), ALLOWED SIGNERS); None: any signature will do, or none.

    Raises:
        ConfigurationError: it is no bundle at all, a newer version made it, or ssh-keygen is missing.
    """
    if not {MANIFEST, SIGNATURE, JOURNAL, RESULTS} & archive.files.keys():
        raise ConfigurationError("the zip is no bundle of gpucluster: it has neither manifest nor results")
    manifest = _manifest(archive)
    yield _listed("zip", archive.faults, good=f"{counted(len(archive.files), 'file')}, whole")
    if isinstance(manifest, str):
        yield VerifyStep("manifest", NOT_OK, manifest)
    else:
        yield VerifyStep("manifest", OK, f"it names {counted(len(manifest.entries), 'file')}")
        yield _listed("files", [*differences(manifest, archive.files)], good="each has its size and SHA-256")
        yield _ordered(manifest, archive)
    yield _signed(manifest, archive, signers)
    gone = [name for name in REQUIRED if name not in archive.files]
    if gone:
        yield _listed("contents", [f"{name} is not in the bundle" for name in gone], good="")
    bundle = Bundle(archive.files)
    for name, check in CHECKS.items():
        yield VerifyStep(name, *_tried(lambda check=check: check(bundle)))  # type: ignore[misc]


def summary(taken: list[VerifyStep]) -> tuple[bool, str]:
    """Whether a bundle is valid, and the line that says so."""
    bad = [one.name for one in taken if one.state == NOT_OK]
    if bad:
        return False, f"NOT VALID: {', '.join(bad)}"
    notes = [state for state in (UNSIGNED, STALE) if any(one.state == state for one in taken)]
    return True, ", ".join(["valid", *notes])


def _manifest(archive: Archive) -> Manifest | str:
    """The manifest, or why there is none."""
    if MANIFEST not in archive.files:
        return f"{MANIFEST} is missing: it was removed or renamed"
    try:
        return read_manifest(archive.files[MANIFEST])
    except NewerBundleError:
        raise
    except ConfigurationError as error:
        return str(error)


def _listed(name: str, faults: tuple[str, ...] | list[str], *, good: str) -> VerifyStep:
    return VerifyStep(name, NOT_OK, "; ".join(faults)) if faults else VerifyStep(name, OK, good)


def _ordered(manifest: Manifest, archive: Archive) -> VerifyStep:
    name = misplaced(manifest, [*archive.files])
    if name is not None:
        return VerifyStep("order", NOT_OK, f"{name} does not stand where the manifest has it: the files were reordered")
    return VerifyStep("order", OK, "the files stand as the manifest has them")


def _signed(manifest: Manifest | str, archive: Archive, signers: Path | None) -> VerifyStep:
    """Who signed. A signature that the manifest speaks of must be there."""
    signed = archive.files.get(SIGNATURE)
    if signed is None:
        if isinstance(manifest, Manifest) and manifest.is_signed:
            return VerifyStep("signature", NOT_OK, f"{SIGNATURE} is missing: the manifest says that it was signed")
        return VerifyStep(
            "signature", NOT_OK if signers is not None else UNSIGNED, "nobody signed the bundle: anybody may have made it"
        )
    try:
        signer = signature.check(archive.files.get(MANIFEST, b""), signed, signers=signers)
    except signature.SignatureError as fault:
        return VerifyStep("signature", NOT_OK, str(fault))
    if signer.name is None:
        return VerifyStep("signature", OK, f"signed with {signer.key}; whose key that is was not asked (verify --signers FILE)")
    return VerifyStep("signature", OK, f"{signer.name} signed it with {signer.key}")


def _tried(check: Callable[[], Found]) -> Found:
    """What a check finds; a file that is missing or damaged is a fault of the bundle."""
    try:
        return check()
    except ConfigurationError as error:
        return Found(NOT_OK, one_line(str(error)))
    except NOT_AN_EVENT as error:
        return Found(NOT_OK, f"a file is damaged: {one_line(f'{type(error).__name__} {error}')}")
