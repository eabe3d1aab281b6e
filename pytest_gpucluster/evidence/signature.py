"""Signatures by ``ssh-keygen -Y``: with keys that sites have, without a network, and never with a question to a terminal."""

from __future__ import annotations

import base64
import datetime as dt
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.evidence.archive import MANIFEST, SIGNATURE
from pytest_gpucluster.text import one_line

NAMESPACE = "gpucluster-handover"
WITHIN_S = 60.0
"""For one call of ssh-keygen: a key on a token waits for a touch."""
GOOD = re.compile(r"signature with (\S+) key (\S+)")
VALIDITY = re.compile(r'(valid-before|valid-after)="?(\d{8,14})(Z?)"?')
NAMESPACES = re.compile(r'namespaces="([^"]*)"')
ASKING = ("SSH_ASKPASS", "DISPLAY", "WAYLAND_DISPLAY")


class SignatureError(Exception):
    """A signature that does not hold; its text says why."""


def sign(manifest: bytes, key: Path) -> bytes:
    """The signature over a manifest, by a private key or, through ssh-agent, by its public half.

    Raises:
        ConfigurationError: there is no such key, it has a passphrase and ssh-agent does not hold it, or there is no ssh-keygen.
    """
    if not key.is_file():
        raise ConfigurationError(f"there is no key {key}")
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder:
        file = Path(folder) / MANIFEST
        file.write_bytes(manifest)
        ended = _ssh_keygen("-Y", "sign", "-f", str(key.absolute()), "-n", NAMESPACE, str(file))
        if ended.returncode == 0:
            return (Path(folder) / SIGNATURE).read_bytes()
    if key.suffix != ".pub" and "incorrect passphrase" in _gist(_ssh_keygen("-y", "-P", "", "-f", str(key.absolute()))):
        raise ConfigurationError(f"the key {key} has a passphrase and ssh-agent does not hold it: run 'ssh-add {key}' first")
    is_open = key.suffix != ".pub" and key.stat().st_mode & 0o077
    advice = f"; others may read it, so ssh-keygen does not: chmod 600 {key}" if is_open else ""
    raise ConfigurationError(f"the key {key} cannot sign: {_gist(ended)}{advice}")


def check(manifest: bytes, signature: bytes, *, signers: Path | None) -> str:
    """Who signed the manifest, in words. Without ``signers``, a file of allowed signers, any key will do.

    Raises:
        SignatureError: the signature is of something else, or not by somebody who may sign now.
        ConfigurationError: there is no ssh-keygen.
    """
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder:
        file = Path(folder) / SIGNATURE
        file.write_bytes(signature)
        ended = _ssh_keygen("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(file), read=manifest)
        good = GOOD.search(ended.stdout.decode(errors="replace"))
        if ended.returncode != 0 or good is None:
            raise SignatureError(f"it is no signature of {MANIFEST}: {_gist(ended)}")
        key = f"{good[1]} {good[2]}"
        if signers is None:
            return f"signed with {key}; whose key that is was not asked (verify --signers FILE)"
        allowed = str(signers.absolute())
        found = _ssh_keygen("-Y", "find-principals", "-f", allowed, "-s", str(file), "-n", NAMESPACE)
        for name in found.stdout.decode(errors="replace").replace(",", "\n").split():
            ended = _ssh_keygen("-Y", "verify", "-f", allowed, "-I", name, "-n", NAMESPACE, "-s", str(file), read=manifest)
            if ended.returncode == 0:
                return f"{one_line(name)} signed it with {key}"
    raise SignatureError(_why_not(signature, key, signers, _gist(ended if found.returncode == 0 else found)))


def _why_not(signature: bytes, key: str, signers: Path, said: str) -> str:
    """Why a good signature does not count, read from the signers file; ``said`` is what ssh-keygen said."""
    blob = _key_of(signature)
    listed = [line for line in signers.read_text(encoding="utf-8", errors="replace").splitlines() if blob in line.split()]
    if not listed:
        return f"{key} signed it, and {signers} does not list that key: it is another's signature"
    now = dt.datetime.now(tz=dt.timezone.utc)
    for line in listed:
        for kind, digits, zone in VALIDITY.findall(line):
            at = dt.datetime.strptime(digits.ljust(14, "0"), "%Y%m%d%H%M%S")  # noqa: DTZ007 -- the next line gives the zone
            at = at.replace(tzinfo=dt.timezone.utc) if zone else at.astimezone()
            if kind == "valid-before" and at <= now:
                return f"{key} expired: {signers} says valid-before {at.isoformat()}"
            if kind == "valid-after" and at > now:
                return f"{key} is not valid yet: {signers} says valid-after {at.isoformat()}"
        named = NAMESPACES.search(line)
        if named is not None and NAMESPACE not in named[1].split(","):
            return f"{key} may not sign for {NAMESPACE}: {signers} says namespaces {named[1]}"
    return f"{key} is not accepted by {signers}: {said.rstrip('.')}; a line there is NAME ssh-ed25519 AAAA..."


def _key_of(signature: bytes) -> str:
    """The public key in a signature, as a signers file writes it (PROTOCOL.sshsig of OpenSSH); empty where there is none."""
    try:
        raw = base64.b64decode(b"".join(signature.strip().splitlines()[1:-1]))
        (length,) = struct.unpack_from(">I", raw, 10)
    except (ValueError, struct.error):
        return ""
    return base64.b64encode(raw[14 : 14 + length]).decode()


def _ssh_keygen(*words: str, read: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run it without a terminal, so that it cannot ask for anything. ``read`` is its standard input."""
    program = shutil.which("ssh-keygen")
    if program is None:
        raise ConfigurationError("ssh-keygen is not here, which makes and checks signatures: install openssh-client")
    variables = {name: value for name, value in os.environ.items() if name not in ASKING}
    variables |= {"SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
    try:
        return subprocess.run(  # noqa: S603 -- a program of the host, and words of this module
            [program, *words], input=read, capture_output=True, check=False, timeout=WITHIN_S, env=variables,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"ssh-keygen did not end within {WITHIN_S:.0f} s; a token may wait for a touch") from None


def _gist(ended: subprocess.CompletedProcess[bytes]) -> str:
    """The last line that it said."""
    said = (ended.stderr or ended.stdout).decode(errors="replace").split("\n")
    return one_line(next((line.strip() for line in reversed(said) if line.strip()), f"exit code {ended.returncode}"))
