"""A run as its results directory has it, its bundle, keys, and bundles that somebody has changed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.evidence.archive import MANIFEST, SIGNATURE, manifest_of, packed, read_archive
from pytest_gpucluster.inventory.identity import read_versions
from pytest_gpucluster.judging.verdict import PENDING, Terms, decide
from pytest_gpucluster.page.outputs import Wanted, write_outputs
from pytest_gpucluster.records.reading import limits_used
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.results import bound_facts
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.layers import read_source
from tests.support.fleet_records import failed, fleet, outcomes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpucluster.judging.verdict import Record

NAMESPACE = "gpucluster-handover"
with_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed (openssh-client)")


def keep_run(
    folder: Path,
    *,
    thresholds: Path | None = None,
    bad: tuple[Record, ...] | None = None,
    versions: dict[str, str] | None = None,
    **terms: Any,
) -> Path:
    """The results directory of a run on 2 x 4 GPUs that has ended. By default one GPU is too slow."""
    folder.mkdir(parents=True)
    file = _limits(thresholds)
    profile = file.profiles["h200-sxm"]
    places = fleet(2, 4)
    planted = bad if bad is not None else (failed("bf16_tflops", "node1-gpu2", 543.25),)
    rows = [replace(one, started=True) for one in outcomes(places, planted)]
    expected = [f"tests_acceptance/test_compute.py::test_{one.criterion}[{one.place}]" for one in rows]
    of_verdict = Terms(**{"rehearsal": False, "level_reached": True, "shape": "2 nodes x 4 NVIDIA H200", **terms})
    facts = {
        "level": "standard",
        "profile": "h200-sxm",
        "expected": {"nodes": 2, "gpus_per_node": 4},
        "thresholds_sha256": file.sha256,
        "changed_limits": [],
        "waivers": [],
        "limits": limits_used(file.criteria(profile).values()),
    }
    journal = Journal(folder / "journal.jsonl")
    settings = {"thresholds": str(thresholds), "junit": "None", "junit_strict": "False"}
    known = versions if versions is not None else read_versions()
    journal.write("started", run="6f1c0f3e", versions=known, settings=settings, facts=facts)
    pending = [
        {"nodeid": nodeid, "criterion": one.criterion, "place": one.place, "outcome": PENDING, "reason": None}
        for nodeid, one in zip(expected, rows, strict=True)
    ]
    journal.write("planned", expected=pending, terms=asdict(of_verdict))
    bound = [bound_facts(one) for one in places.values()]
    journal.write("bound", places=[one for one in bound if one["gpu"] is not None], nodes=bound[:0], shape=of_verdict.shape)
    for one in rows:
        journal.write("outcome", record=record_facts(one))
    verdict = decide(rows, of_verdict)
    found = {"environment": {"versions": known, "gpus": ["NVIDIA H200"]}, "timings": {"total_s": 21.8, "startup_s": 7.6}}
    journal.write("verdict", verdict=verdict.word, line=verdict.line, objections=list(of_verdict.objections), **found)
    journal.close()
    rebuild(folder)
    assert write_outputs(folder, Wanted()).problems == ()
    return folder


@lru_cache
def _limits(path: Path | None) -> ThresholdsFile:
    file, problems = ThresholdsFile.validate(read_source(path))
    assert file is not None
    assert not problems
    return file


def make_key(folder: Path, name: str = "key", *, passphrase: str = "") -> Path:
    """A key of this test alone."""
    key = folder / name
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", str(key)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return key


def signers_of(key: Path, *, options: str = "", name: str = "vendor@example.org") -> Path:
    """A file that allows one key."""
    file = key.with_name(f"{key.name}-signers")
    kind, blob, *_ = key.with_suffix(".pub").read_text(encoding="utf-8").split()
    file.write_text(f"# who may sign\n{name} {options} {kind} {blob}\n", encoding="utf-8")
    return file


def changed(bundle: Path, target: Path, change: Callable[[dict[str, bytes]], object], *, key: Path | None = None) -> Path:
    """A bundle in which somebody changed files; with a key, manifest and signature are made anew over the change."""
    files = dict(read_archive(bundle).files)
    change(files)
    if key is not None:
        inner = {name: one for name, one in files.items() if name not in (MANIFEST, SIGNATURE)}
        manifest = manifest_of(inner, is_signed=True).text.encode()
        files = {MANIFEST: manifest, SIGNATURE: signature_of(manifest, key, target.parent), **inner}
    target.write_bytes(packed(files))
    return target


def signature_of(manifest: bytes, key: Path, folder: Path) -> bytes:
    """The signature by ssh-keygen itself."""
    file = folder / "signed"
    file.write_bytes(manifest)
    words = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(file)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    made = file.with_name("signed.sig")
    content = made.read_bytes()
    made.unlink()
    return content


def verify(capsys: pytest.CaptureFixture[str], bundle: Path, *words: object) -> tuple[int, dict[str, tuple[str, str]], str]:
    """What ``gpucluster verify`` does: exit code, each step's state and text, and the last line."""
    code = main(["verify", str(bundle), *map(str, words)])
    *lines, last = capsys.readouterr().out.splitlines() or [""]
    found = {}
    for line in lines:
        state, name, text = line[:8].strip(), *line[10:].split(maxsplit=1)
        found[name] = (state, text)
    return code, found, last
