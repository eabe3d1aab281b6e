"""``gpucluster bundle`` and ``gpucluster verify``: a run as one file that can be checked by somebody who was not there."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from pytest_gpucluster.config.process import collector_off
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.evidence import signature
from pytest_gpucluster.evidence.archive import MANIFEST, SIGNATURE, Archive, contents_of, manifest_of, packed, read_archive
from pytest_gpucluster.evidence.verification import OK, UNSIGNED, VerifyStep, steps, summary
from pytest_gpucluster.reporting.files import whole_file
from pytest_gpucluster.text import counted, one_line, visible

VALID, NOT_VALID = 0, 1
WIDEST = 12


@collector_off()
def main(chosen: argparse.Namespace) -> int:
    """Write the bundle of a run; 0 whatever its verdict is, 1 if ``verify`` will not call the bundle valid.

    Raises:
        ConfigurationError: there is no run that has ended, the file is there already, or the key cannot sign.
        OSError: a file cannot be read or written.
    """
    target: Path = chosen.output
    _require_new(target)
    files, run = contents_of(chosen.folder)
    manifest = manifest_of(files, is_signed=chosen.key is not None).text.encode()
    signed = {SIGNATURE: signature.sign(manifest, chosen.key)} if chosen.key is not None else {}
    whole = {MANIFEST: manifest, **signed, **files}
    content = packed(whole)
    try:
        with whole_file(target) as temporary:
            temporary.write_bytes(content)
            _require_new(target)
    except OSError as error:
        raise ConfigurationError(f"the bundle {target} cannot be written: {error.strerror}") from None
    sys.stdout.write(f"{target}  {len(content):,} bytes, {counted(len(whole), 'file')}\n")
    sys.stdout.write(f"SHA-256 of the manifest {hashlib.sha256(manifest).hexdigest()}\n")
    sys.stdout.write(f"verdict {one_line(str(run.facts.get('verdict_line') or run.word))}\n")
    return VALID if _foretell(whole) else NOT_VALID


def _require_new(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConfigurationError(f"{target} is there already, and a bundle replaces nothing; choose another name")
    if not target.parent.is_dir():
        raise ConfigurationError(f"there is no folder {target.parent}")


def _foretell(files: dict[str, bytes]) -> bool:
    """Say who signed, and now already what ``gpucluster verify`` will object to; whether it will call the bundle valid."""
    for step in (taken := [*steps(Archive(files=files, faults=()), signers=None)]):
        if step.state == UNSIGNED:
            sys.stdout.write(f"{UNSIGNED}: nobody vouches for it; --key SSHKEY signs it\n")
        elif step.name == "signature":
            sys.stdout.write(f"{visible(step.text)}\n")
        elif step.state != OK:
            sys.stderr.write(f"gpucluster bundle: verify will say '{step.state}' of its {step.name}: {visible(step.text)}\n")
    return summary(taken)[0]


@collector_off()
def verify(chosen: argparse.Namespace) -> int:
    """Check a bundle, a line a step; 0: valid, 1: not valid, or not signed by one of ``--signers``.

    Raises:
        ConfigurationError: it is no bundle, it is hostile, there are no signers, or ssh-keygen is missing.
        OSError: a file cannot be read.
    """
    if chosen.signers is not None and not chosen.signers.is_file():
        raise ConfigurationError(f"there is no file of signers {chosen.signers}")
    taken = [_said(step) for step in steps(read_archive(chosen.file), signers=chosen.signers)]
    is_valid, line = summary(taken)
    sys.stdout.write(f"{line}\n")
    return VALID if is_valid else NOT_VALID


def _said(step: VerifyStep) -> VerifyStep:
    """A step, after its line was printed."""
    sys.stdout.write(f"{step.state:<8}  {step.name:<{WIDEST}}  {one_line(step.text)}\n")
    sys.stdout.flush()
    return step
