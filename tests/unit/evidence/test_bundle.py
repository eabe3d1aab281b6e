"""What a bundle holds, who may sign it, and what is refused; hostile bundles are a sentence, and write nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import struct
import subprocess
import zipfile
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.evidence import archive, signature
from pytest_gpucluster.evidence.archive import read_archive
from tests.support.evidence import keep_run, make_key, verify, with_ssh
from tests.support.fleet_records import failed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpucluster.judging.verdict import Record

FILES = [
    "MANIFEST.sha256", "environment.json", "journal.jsonl", "junit.xml", "limits/as-read.yaml", "limits/packaged.json",
    "report.html", "results.json", "statements/test-result.json", "statements/verdict.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory."""
    return keep_run(tmp_path_factory.mktemp("run") / "results")


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one sentence of a command that ends with exit code 4."""
    try:
        code = main([*map(str, words)])
    except SystemExit as left:
        code = int(left.code or 0)
    said = capsys.readouterr()
    assert code == 4, said
    assert "Traceback" not in said.err
    assert said.out == ""
    return said.err


def test_an_error_of_the_disk_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """The file and why, without the number that Python puts before it."""
    folder = shutil.copytree(kept, tmp_path / "r")
    taken = folder / f".results.json.{os.getpid()}.tmp"
    taken.mkdir()
    said = refusal(capsys, "report", folder)
    assert said.startswith(f"gpucluster report: {taken}: ")
    assert "Errno" not in said


def test_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """All files in order, as they lie there; equal runs give equal bytes; what is missing is made."""
    one, other = tmp_path / "one.zip", tmp_path / "other.zip"
    before = {file: file.read_bytes() for file in kept.rglob("*") if file.is_file()}
    assert main(["bundle", str(kept), "-o", str(one)]) == 0
    out = capsys.readouterr().out
    assert "UNSIGNED" in out
    assert "verdict REJECTED" in out
    files = read_archive(one).files
    assert [*files] == FILES
    assert all(files[name] == (kept / name).read_bytes() for name in ("journal.jsonl", "results.json", "report.html"))
    for name in ("report.html", "junit.xml"):
        (kept / name).unlink()
    assert main(["bundle", str(kept), "-o", str(other)]) == 0
    assert other.read_bytes() == one.read_bytes()
    for file, content in before.items():
        file.write_bytes(content)
    assert {file for file in kept.rglob("*") if file.is_file()} == {*before}


@pytest.mark.parametrize(
    ("bad", "terms", "result", "verdict"),
    [
        ((), {}, "PASSED", "ACCEPTED"),
        (None, {}, "FAILED", "REJECTED"),
        ((), {"objections": ("more GPUs than expected",)}, "FAILED", "INCOMPLETE"),
        ((), {"rehearsal": True}, "FAILED", "REHEARSED"),
        (
            (failed("bf16_tflops", "node0-gpu1", 650.0, waivable=True, waiver={"who": "ada", "why": "known"}),),
            {},
            "WARNED",
            "ACCEPTED_WITH_WAIVERS",
        ),
    ],
)
def test_statements(
    tmp_path: Path, bad: tuple[Record, ...] | None, terms: dict[str, object], result: str, verdict: str
) -> None:
    """in-toto knows no INCOMPLETE: it is FAILED there, and the verdict stands in a statement of our own."""
    kept, file = keep_run(tmp_path / "r", bad=bad, **terms), tmp_path / "b.zip"
    assert main(["bundle", str(kept), "-o", str(file)]) == 0
    files = read_archive(file).files
    vetted, own = (json.loads(files[name]) for name in FILES[-2:])
    assert vetted["_type"] == own["_type"] == "https://in-toto.io/Statement/v1"
    assert vetted["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert (vetted["predicate"]["result"], own["predicate"]["verdict"]) == (result, verdict)
    assert [one["name"] for one in vetted["subject"]] == FILES[1:-2]
    kinds = {name: vetted["predicate"][name] for name in ("passedTests", "warnedTests", "failedTests")}
    assert sorted(name for names in kinds.values() for name in names) == ["bf16_tflops", "clocks_under_load", "hbm_bandwidth"]
    worst = {"WARNED": "warnedTests", "FAILED": "failedTests"}.get(result, "passedTests") if bad != () else "passedTests"
    assert "bf16_tflops" in kinds[worst]
    assert main(["verify", str(file)]) == 0


@with_ssh
def test_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    """With a passphrase: a sentence at once, unless ssh-agent holds it. A key that is none, or not there: a sentence."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key, target = make_key(tmp_path, passphrase="secret words"), tmp_path / "b.zip"  # noqa: S106 -- of this test
    text = refusal(capsys, "bundle", kept, "-o", target, "--key", key)
    assert f"{key} has a passphrase and ssh-agent does not hold it: run 'ssh-add {key}' first" in text
    assert "there is no key" in refusal(capsys, "bundle", kept, "-o", target, "--key", tmp_path / "none")
    (tmp_path / "text").write_text("no key\n", encoding="utf-8")
    (tmp_path / "text").chmod(0o600)
    assert "cannot sign: " in refusal(capsys, "bundle", kept, "-o", target, "--key", tmp_path / "text")
    make_key(tmp_path, "open").chmod(0o644)
    assert f"chmod 600 {tmp_path}/open" in refusal(capsys, "bundle", kept, "-o", target, "--key", tmp_path / "open")
    assert not target.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install openssh-client" in refusal(capsys, "bundle", kept, "-o", target, "--key", key)
    assert [*tmp_path.glob(".*")] == []


@with_ssh
def test_a_key_in_the_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    """The agent signs for a key with a passphrase; its public half is enough."""
    key, socket = make_key(tmp_path, passphrase="secret words"), tmp_path / "a"  # noqa: S106 -- of this test
    ask = tmp_path / "ask"
    ask.write_text("#!/bin/sh\necho secret words\n", encoding="utf-8")
    ask.chmod(0o700)
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None
            agent.stdout.readline()
            variables = {**os.environ, "SSH_AUTH_SOCK": str(socket), "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
            subprocess.run(["ssh-add", "-q", str(key)], env=variables, check=True, stdin=subprocess.DEVNULL, timeout=60)
            monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
            for number, name in enumerate((key, key.with_suffix(".pub"))):
                target = tmp_path / f"{number}.zip"
                assert main(["bundle", str(kept), "-o", str(target), "--key", str(name)]) == 0
                assert verify(capsys, target)[1]["signature"][0] == "ok"
        finally:
            agent.kill()


@with_ssh
def test_a_key_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    """A token that nobody touches: a sentence after a while, and no file."""
    key = make_key(tmp_path)
    (tmp_path / "ssh-keygen").write_text("#!/bin/sh\nexec sleep 100\n", encoding="utf-8")
    (tmp_path / "ssh-keygen").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(signature, "WITHIN_S", 0.2)
    assert "did not end within" in refusal(capsys, "bundle", kept, "-o", tmp_path / "b.zip", "--key", key)
    assert not (tmp_path / "b.zip").exists()


def test_refused_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """No run, half a run, one that goes on, a link among its files, a file that is there: a sentence, nothing written."""
    target = tmp_path / "b.zip"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no " in refusal(capsys, "bundle", tmp_path / "none", "-o", target)
    assert "is no results directory" in refusal(capsys, "bundle", kept / "results.json", "-o", target)
    assert "has no journal.jsonl" in refusal(capsys, "bundle", empty, "-o", target)
    (empty / "journal.jsonl").write_bytes((kept / "journal.jsonl").read_bytes())
    assert f"'gpucluster report {empty}' writes it" in refusal(capsys, "bundle", empty, "-o", target)
    (empty / "results.json").write_bytes(b'{"schema": 1')
    assert "is damaged" in refusal(capsys, "bundle", empty, "-o", target)
    document = json.loads((kept / "results.json").read_bytes())
    (empty / "results.json").write_text(json.dumps({**document, "schema_version": 99}), encoding="utf-8")
    assert "schema_version 99" in refusal(capsys, "bundle", empty, "-o", target)
    (empty / "results.json").write_text(json.dumps({**document, "environment": {"unfinished": True}}), encoding="utf-8")
    assert "has not ended" in refusal(capsys, "bundle", empty, "-o", target)
    (empty / "junit.xml").symlink_to(kept / "junit.xml")
    assert "symbolic link" in refusal(capsys, "bundle", empty, "-o", target)
    assert "the following arguments are required: -o" in refusal(capsys, "bundle", kept)
    assert "there is no folder" in refusal(capsys, "bundle", kept, "-o", tmp_path / "none" / "b.zip")
    assert not target.exists()
    target.write_text("mine", encoding="utf-8")
    assert "is there already, and a bundle replaces nothing" in refusal(capsys, "bundle", kept, "-o", target)
    assert target.read_text(encoding="utf-8") == "mine"


def test_no_other_file_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A forged journal names a key as its file of limits: whoever bundles it would send that away."""
    own, file = tmp_path / "id_ed25519", tmp_path / "b.zip"
    own.write_text("extends: packaged\ncriteria:\n  bf16_tflops:\n    above: 650\n", encoding="utf-8")
    kept = keep_run(tmp_path / "r", thresholds=own)
    own.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n", encoding="utf-8")
    assert main(["bundle", str(kept), "-o", str(file)]) == 0
    assert "verify will say 'stale' of its limits" in capsys.readouterr().err
    assert "limits/as-read.yaml" not in read_archive(file).files


def test_half_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """It is packed as it lies, said at once, and not valid; nor is the JUnit file that is made of it."""
    for number, journal in enumerate((b"", b"{", (kept / "journal.jsonl").read_bytes()[:9000])):
        folder, target = tmp_path / f"r{number}", tmp_path / f"b{number}.zip"
        folder.mkdir()
        (folder / "results.json").write_bytes((kept / "results.json").read_bytes())
        (folder / "journal.jsonl").write_bytes(journal)
        assert main(["bundle", str(folder), "-o", str(target)]) == 1
        assert "verify will say 'not ok' of its results" in capsys.readouterr().err
        code, found, _ = verify(capsys, target)
        assert (code, found["results"][0]) == (1, "not ok")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """A folder that cannot be written: a sentence."""
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(capsys, "bundle", kept, "-o", tmp_path / "b.zip")


def zip_of(*members: tuple[zipfile.ZipInfo | str, bytes]) -> bytes:
    """A zip as Python writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members:
            made.writestr(name, content)
    return buffer.getvalue()


def member(name: str, *, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    """A member with a mode."""
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def encrypted() -> bytes:
    """A zip whose only file says that it is encrypted."""
    content = bytearray(zip_of(("results.json", b"{}")))
    for at in (6, content.index(b"PK\1\2") + 8):
        content[at] |= 1
    return bytes(content)


def with_two() -> bytes:
    """Two files of one name."""
    return zip_of(("results.json", b"{}"), ("results.jsan", b"{}")).replace(b"results.jsan", b"results.json")


def endless() -> bytes:
    """A zip that says it holds 65,000 files."""
    content = bytearray(zip_of(("results.json", b"{}")))
    at = content.rindex(b"PK\5\6")
    struct.pack_into("<HH", content, at + 8, 65_000, 65_000)
    return bytes(content)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb": (lambda: zip_of(("results.json", b"0" * (8 << 20))), "a zip bomb"),
    "too much together": (lambda: zip_of(*((f"{n}", os.urandom(600)) for n in range(10))), "MiB together"),
    "many files": (lambda: zip_of(*((f"{n}", b"") for n in range(65))), "more than 64 files"),
    "a number of files": (endless, "more than 64 files"),
    "a path that leaves it": (lambda: zip_of(("../../evil", b"x")), "leads out of it"),
    "a path that leaves it later": (lambda: zip_of(("limits/../../evil", b"x")), "leads out of it"),
    "an absolute path": (lambda: zip_of(("/tmp/evil", b"x")), "leads out of it"),  # noqa: S108 -- never written
    "a path of Windows": (lambda: zip_of(("..\\evil", b"x")), "leads out of it"),
    "a drive": (lambda: zip_of(("C:evil", b"x")), "leads out of it"),
    "a terminal's command": (lambda: zip_of(("a\x1b[2J", b"x")), "leads out of it"),
    "a link": (lambda: zip_of((member("results.json", mode=stat.S_IFLNK | 0o777), b"/etc/passwd")), "is a link"),
    "a device": (lambda: zip_of((member("results.json", mode=stat.S_IFCHR | 0o777), b"")), "or a device"),
    "a folder": (lambda: zip_of((member("limits/", mode=stat.S_IFDIR | 0o755), b"")), "a folder"),
    "two of one name": (with_two, "two files results.json"),
    "encrypted": (encrypted, "is encrypted"),
    "no zip": (lambda: b"no zip at all", "is no zip file"),
    "nothing": (lambda: b"", "is no zip file"),
    "an empty zip": (zip_of, "is no bundle of gpucluster"),
    "another zip": (lambda: zip_of(("photo.jpg", b"x")), "is no bundle of gpucluster"),
    "a newer bundle": (lambda: zip_of(("MANIFEST.sha256", b"# gpucluster bundle 2\n")), "reads up to 1"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bundles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Each is refused in a sentence with exit code 4; nothing is written."""
    if case == "too much together":
        monkeypatch.setattr(archive, "MOST_BYTES", 5_000)
    make, text = HOSTILE[case]
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "b.zip").write_bytes(make())
    monkeypatch.chdir(folder)
    said = refusal(capsys, "verify", "b.zip")
    assert text in said
    assert "\x1b" not in said
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["b.zip"]


def test_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """Nothing there, a folder, a pipe, half a bundle, no signers: a sentence, and no waiting."""
    file = tmp_path / "b.zip"
    assert main(["bundle", str(kept), "-o", str(file)]) == 0
    capsys.readouterr()
    os.mkfifo(tmp_path / "pipe")
    for name, text in {
        "none": "there is no ",
        ".": "is no file; gpucluster bundle makes one",
        "pipe": "is no file",
    }.items():
        assert text in refusal(capsys, "verify", tmp_path / name)
    assert "there is no file of signers" in refusal(capsys, "verify", file, "--signers", tmp_path / "none")
    whole = file.read_bytes()
    for size in (10, len(whole) // 2, len(whole) - 30, len(whole) - 5):
        (tmp_path / "half.zip").write_bytes(whole[:size])
        assert "is no " in refusal(capsys, "verify", tmp_path / "half.zip")


def test_files_that_are_no_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path) -> None:
    """Every file of a bundle may hold anything: a step that is not ok, never a traceback, never an endless entity."""
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><testsuite name="&b;"/>'
    for name in ("journal.jsonl", "results.json", "junit.xml", "report.html", "environment.json", FILES[-1]):
        for content in (b"[" * 100_000, b"null", bomb):
            parts = {one: (kept / one).read_bytes() for one in ("journal.jsonl", "results.json", "junit.xml", "report.html")}
            (tmp_path / "b.zip").write_bytes(zip_of(*{**parts, name: content}.items()))
            code, found, _ = verify(capsys, tmp_path / "b.zip")
            assert code == 1
            assert found["manifest"][0] == "not ok"
            assert any(state == "not ok" for step, (state, _) in found.items() if step not in ("manifest", "contents"))
