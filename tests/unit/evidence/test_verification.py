"""Every planted change is found and named; what is old is stale and not invalid."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.evidence import verification
from pytest_gpucluster.evidence.archive import MANIFEST, SIGNATURE, STATEMENTS, as_json, environment_of, packed, read_archive
from pytest_gpucluster.page.document import document_of
from pytest_gpucluster.page.render import model_of, page_from
from tests.support import REPOSITORY
from tests.support.evidence import changed, keep_run, make_key, signature_of, signers_of, verify, with_ssh
from tests.unit.reporting.test_merge import run_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Files = dict[str, bytes]

pytestmark = with_ssh


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory."""
    return keep_run(tmp_path_factory.mktemp("run") / "results")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vendor's key."""
    return make_key(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def bundle(kept: Path, key: Path) -> Path:
    """The signed bundle of the run."""
    target = kept.parent / "signed.zip"
    assert main(["bundle", str(kept), "-o", str(target), "--key", str(key)]) == 0
    return target


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Files], None]:
    """A change of one text in one file."""

    def change(files: Files) -> None:
        assert old in files[name]
        files[name] = files[name].replace(old, new, 1)

    return change


def flip(files: Files) -> None:
    """One bit of one byte."""
    content = bytearray(files["journal.jsonl"])
    content[len(content) // 2] ^= 1
    files["journal.jsonl"] = bytes(content)


def rename(files: Files) -> None:
    """The same content under another name."""
    renamed = {"junit2.xml" if name == "junit.xml" else name: one for name, one in files.items()}
    files.clear()
    files.update(renamed)


def reorder(files: Files) -> None:
    """The last file before all others."""
    name, content = files.popitem()
    rest = dict(files)
    files.clear()
    files.update({name: content, **rest})


def exchange(files: Files) -> None:
    """Two files, each with the content of the other one."""
    files["junit.xml"], files["results.json"] = files["results.json"], files["junit.xml"]


def write_again(files: Files) -> None:
    """results.json with the same values in other lines."""
    files["results.json"] = json.dumps(json.loads(files["results.json"]), indent=3, sort_keys=True).encode()


BY_A_STRANGER: dict[str, tuple[Callable[[Files], object], str, str]] = {
    "a flipped byte": (flip, "files", "journal.jsonl was changed"),
    "a removed file": (lambda files: files.pop("junit.xml"), "files", "junit.xml is missing"),
    "an added file": (lambda files: files.update({"more.txt": b"x"}), "files", "more.txt was added"),
    "a renamed file": (rename, "files", "junit.xml was renamed to junit2.xml"),
    "files in another order": (reorder, "order", "statements/verdict.json does not stand where"),
    "no signature any more": (lambda files: files.pop(SIGNATURE), "signature", "the manifest says that it was signed"),
    "exchanged files": (exchange, "files", "junit.xml was changed"),
    "results with the same values": (write_again, "files", "results.json was changed"),
    "a zip inside": (lambda files: files.update({"b.zip": packed({"a": b"b"})}), "files", "b.zip was added"),
    "a name like another": (lambda files: files.update({"RESULTS.JSON": b"{}"}), "files", "RESULTS.JSON was added"),
    "no manifest": (lambda files: files.pop(MANIFEST), "manifest", "MANIFEST.sha256 is missing"),
    "another manifest": (replaced(MANIFEST, b"report.html", b"repost.html"), "signature", "no signature of MANIFEST"),
    "a longer manifest": (replaced(MANIFEST, b"\n#", b"\n\n#"), "manifest", "not written as gpucluster writes it"),
}


@pytest.mark.parametrize("case", BY_A_STRANGER)
def test_what_a_stranger_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle: Path, case: str) -> None:
    """Each change is named in its step, also where nobody was asked who may sign."""
    change, step, text = BY_A_STRANGER[case]
    code, found, last = verify(capsys, changed(bundle, tmp_path / "b.zip", change))
    assert code == 1
    assert found[step][0] == "not ok"
    assert text in found[step][1]
    assert last.startswith("NOT VALID: ")
    assert step in last


def junit_case(files: Files) -> None:
    """The failed testcase passes, and the suite counts one failure less."""
    text = files["junit.xml"].decode()
    text, number = re.subn(r"<failure.*?</failure>", "", text, count=1, flags=re.DOTALL)
    assert number == 1
    files["junit.xml"] = text.replace('failures="2"', 'failures="1"').encode()


def outcome(files: Files) -> None:
    """results.json without the failure, with the verdict that would follow, and its own page."""
    document = json.loads(files["results.json"])
    document["verdict"], document["verdict_line"] = "ACCEPTED", "ACCEPTED: all passed"
    for row in (*document["criteria"], *document["values"]):
        is_column = isinstance(row["outcome"], list)
        row["outcome"] = ["passed"] * len(row["outcome"]) if is_column else "passed"
    of_results(files, document)


def value(files: Files) -> None:
    """A value of results.json, and the page of it."""
    document = json.loads(files["results.json"])
    document["values"][0]["value"][0] += 1
    document["criteria"][0]["value"] += 1
    of_results(files, document)


def member(files: Files) -> None:
    """What results.json says of who ran it."""
    document = json.loads(files["results.json"])
    of_results(files, {**document, "profile": "b200"})


def no_null(files: Files) -> None:
    """A member whose value is null is gone: nothing that a reader of the file misses."""
    document = json.loads(files["results.json"])
    del document["limits"]["gpu_count"]["noise"]
    of_results(files, document)


def hardware(files: Files) -> None:
    """The model of the GPUs, in results.json, its page and the environment."""
    document = json.loads(files["results.json"])
    document["environment"]["gpus"] = ["NVIDIA B200"]
    of_results(files, document)
    files["environment.json"] = as_json(environment_of(document_of(files["results.json"])))


def serial(files: Files) -> None:
    """The serial number of the part that is bad."""
    document = json.loads(files["results.json"])
    for place in document["places"]:
        place["serial"] = place["serial"] and place["serial"].replace("1654923", "1654924")
    of_results(files, document)


def of_results(files: Files, document: dict[str, Any]) -> None:
    """Put results.json there, and the page that follows from it."""
    files["results.json"] = json.dumps(document).encode()
    files["report.html"] = page_from(model_of(document_of(files["results.json"]))).encode()
    statements_again(files)


def statements_again(files: Files) -> None:
    """The statements that follow from the files."""
    run = document_of(files["results.json"])
    for name, make in STATEMENTS.items():
        files[name] = as_json(make(run, files))


def looser(files: Files) -> None:
    """A limit in the file of limits."""
    replaced("limits/as-read.yaml", b"above: 700", b"above: 500")(files)


def looser_everywhere(files: Files) -> None:
    """A looser file of limits, whose digest stands in the journal and in results.json too."""
    before = hashlib.sha256(files["limits/as-read.yaml"]).hexdigest().encode()
    looser(files)
    after = hashlib.sha256(files["limits/as-read.yaml"]).hexdigest().encode()
    for name in ("journal.jsonl", "results.json"):
        files[name] = files[name].replace(before, after)
    of_results(files, json.loads(files["results.json"]))


def limit_of_results(files: Files) -> None:
    """A limit in results.json alone."""
    document = json.loads(files["results.json"])
    document["limits"]["bf16_tflops"]["numbers"] = {"any": 500}
    of_results(files, document)


BY_THE_SIGNER: dict[str, tuple[Callable[[Files], object], str, str]] = {
    "other limits": (looser, "limits", "limits/as-read.yaml is not the file of the verdict"),
    "a comment in the limits": (
        lambda files: files.update({"limits/as-read.yaml": b"# more\n" + files["limits/as-read.yaml"]}),
        "limits",
        "limits/as-read.yaml is not the file of the verdict",
    ),
    "results written again": (write_again, "page", "the page holds another results.json"),
    "an event more": (
        lambda files: files.update({"journal.jsonl": files["journal.jsonl"] + b'{"event": "more", "at_s": 1}\n'}),
        "results",
        "and the journal gives",
    ),
    "limits with their digest": (looser_everywhere, "limits", "gives other limits than those in results.json"),
    "limits in the results": (limit_of_results, "limits", "are not those of its limits_sha256"),
    "a testcase that passes": (junit_case, "JUnit", "bf16_tflops[node1-gpu2] is passed, and the journal gives failure"),
    "a testcase that is gone": (
        lambda files: files.update({"junit.xml": re.sub(rb"(?s)\n<testcase .*?</testcase>", b"", files["junit.xml"], count=1)}),
        "JUnit",
        "is missing",
    ),
    "a testcase more": (
        replaced("junit.xml", b"\n<testcase", b'\n<testcase classname="test_compute" name="test_x" />\n<testcase'),
        "JUnit",
        "test_compute.test_x does not follow",
    ),
    "a value in the JUnit": (replaced("junit.xml", b"543.25", b"743.25"), "JUnit", "texts or values of the testcase"),
    "a page with another number": (replaced("report.html", b"543.25", b"743.25"), "page", "of the page has"),
    "another verdict": (outcome, "results", "the verdict is ACCEPTED, and the journal gives REJECTED"),
    "another value": (value, "results", "bf16_tflops at node0-gpu0: value is"),
    "another model of GPU": (hardware, "results", 'environment.gpus[0] is "NVIDIA B200", and the journal gives "NVIDIA H200"'),
    "another time": (
        replaced("results.json", b"21.8", b"11.8"),
        "results",
        "timings.total_s is 11.8, and the journal gives 21.8",
    ),
    "another serial number": (serial, "results", "places[0].serial is"),
    "a null that is gone": (no_null, "results", 'limits.gpu_count.noise is "nothing", and the journal gives null'),
    "another profile": (member, "results", 'profile is "b200", and the journal gives "h200-sxm"'),
    "another environment": (replaced("environment.json", b'"user"', b'"uses"'), "environment", "does not say what"),
    "half a journal": (
        lambda files: files.update({"journal.jsonl": files["journal.jsonl"][:-2000]}),
        "results",
        "the journal gives",
    ),
    "other packaged limits": (
        replaced("limits/packaged.json", b"h200", b"h201"),
        "limits",
        "the packaged limits are not those of this version",
    ),
    "another statement": (
        replaced("statements/test-result.json", b'"result": "FAILED"', b'"result": "PASSED"'),
        "statements",
        'test-result.predicate.result is "PASSED"',
    ),
}


@pytest.mark.parametrize("case", BY_THE_SIGNER)
def test_what_the_signer_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle: Path, key: Path, case: str
) -> None:
    """Whoever has the key can sign anything: what does not follow from the journal and the limits is named."""
    change, step, text = BY_THE_SIGNER[case]
    code, found, last = verify(capsys, changed(bundle, tmp_path / "b.zip", change, key=key), "--signers", signers_of(key))
    assert code == 1
    assert found["signature"][0] == found["files"][0] == "ok"
    assert found[step][0] == "not ok"
    assert text in found[step][1]
    assert step in last


@pytest.mark.parametrize(
    "case",
    [
        ('valid-before="20200101"', "expired: "),
        ('valid-before="202001010000Z"', "expired: "),
        ('valid-after="21000101"', "is not valid yet"),
        ('namespaces="git,file"', "may not sign for gpucluster-handover"),
    ],
)
def test_signers_who_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle: Path, key: Path, case: tuple[str, str]
) -> None:
    """An expired key, one of later, and one for something else: named; without --signers the same bundle is valid."""
    options, text = case
    code, found, last = verify(capsys, bundle, "--signers", signers_of(key, options=options))
    assert (code, found["signature"][0], last) == (1, "not ok", "NOT VALID: signature")
    assert text in found["signature"][1]
    assert verify(capsys, bundle)[0] == 0


def test_anothers_signature(tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle: Path, key: Path) -> None:
    """A bundle that a stranger made anew and signed: valid by itself, refused by the file of signers."""
    other = make_key(tmp_path, "other")
    file = changed(bundle, tmp_path / "b.zip", lambda _files: None, key=other)
    code, found, _ = verify(capsys, file, "--signers", signers_of(key))
    assert (code, found["signature"][0]) == (1, "not ok")
    assert "does not list that key: it is another's signature" in found["signature"][1]
    assert verify(capsys, file)[0] == 0
    nameless = verify(capsys, bundle, "--signers", key.with_suffix(".pub"))[1]["signature"]  # the vendor's key as it was sent
    assert nameless[1].endswith("; a line there is NAME ssh-ed25519 AAAA...")
    stolen = signature_of(b"something else", key, tmp_path)
    code, found, _ = verify(capsys, changed(bundle, file, lambda files: files.update({SIGNATURE: stolen})))
    assert (code, found["signature"][0]) == (1, "not ok")


def test_a_valid_bundle(capsys: pytest.CaptureFixture[str], bundle: Path, key: Path) -> None:
    """Each step is ok; the signer is named."""
    code, found, last = verify(capsys, bundle, "--signers", signers_of(key, options='namespaces="gpucluster-handover"'))
    assert (code, last) == (0, "valid")
    assert {state for state, _ in found.values()} == {"ok"}
    assert found["signature"][1].startswith("vendor@example.org signed it with ED25519 SHA256:")
    assert [*found] == [
        "zip", "manifest", "files", "order", "signature", "version", "limits", "results", "JUnit", "page", "environment",
        "statements",
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["killed", "hangs"])
def test_a_check_whose_process_is_killed_is_done_here(
    end: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bundle: Path, key: Path
) -> None:
    """Limits and page are checked in a second process. What became of it changes no verdict."""
    here, check = os.getpid(), verification.CHECKS["limits"]
    away = {"killed": lambda: os._exit(9), "hangs": lambda: time.sleep(600)}[end]
    killed: Callable[[Any], Any] = lambda found: check(found) if os.getpid() == here else away()  # noqa: E731
    monkeypatch.setitem(verification.CHECKS, "limits", killed)
    monkeypatch.setattr(verification, "WITHIN_S", 5.0 if end == "hangs" else 600.0)
    code, found, last = verify(capsys, bundle, "--signers", signers_of(key))
    assert (code, last, {state for state, _ in found.values()}) == (0, "valid", {"ok"})


def test_unsigned(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Path, key: Path) -> None:
    """It is said by both commands; only with --signers it is a fault."""
    file = tmp_path / "b.zip"
    assert main(["bundle", str(kept), "-o", str(file)]) == 0
    assert "UNSIGNED" in capsys.readouterr().out
    code, found, last = verify(capsys, file)
    assert (code, found["signature"][0], last) == (0, "UNSIGNED", "valid, UNSIGNED")
    code, found, last = verify(capsys, file, "--signers", signers_of(key))
    assert (code, found["signature"][0], last) == (1, "not ok", "NOT VALID: signature")


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_byte_of_the_zip(tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle: Path, where: float) -> None:
    """Among the packed bytes: the file that holds it is damaged."""
    content = bytearray(bundle.read_bytes())
    content[int(len(content) * where)] ^= 0x10
    (tmp_path / "b.zip").write_bytes(content)
    code, found, _ = verify(capsys, tmp_path / "b.zip")
    assert code == 1
    assert found["zip"][0] == "not ok"
    assert "is damaged" in found["zip"][1]


def test_older_versions_and_limits_are_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: Path) -> None:
    """A run of another version, limits that are packaged otherwise today, a page of another version: stale, and valid."""
    old = {"pytest-gpucluster": "0.0.9", "pytest-gpucluster's files": "0123456789ab", "torch": "2.9"}
    kept, file = keep_run(tmp_path / "r", versions=old), tmp_path / "b.zip"
    page = (kept / "report.html").read_text(encoding="utf-8")
    (kept / "report.html").write_text(page.replace("</body>", "<p>as it was</p></body>"), encoding="utf-8")
    assert main(["bundle", str(kept), "-o", str(file), "--key", str(key)]) == 0
    assert "verify will say 'stale' of its version" in capsys.readouterr().err
    old_limits = replaced("limits/packaged.json", b"h200", b"h201")

    def change(files: Files) -> None:
        old_limits(files)
        files["junit.xml"] = files["junit.xml"].replace(b'classname="gpucluster"', b'classname=""')
        statements_again(files)

    code, found, last = verify(capsys, changed(file, file, change, key=key), "--signers", signers_of(key))
    assert (code, last) == (0, "valid, stale")
    assert [name for name, (state, _) in found.items() if state == "stale"] == ["version", "limits", "page"]
    assert "another version made it (0.0.9)" in found["page"][1]
    code, found, _ = verify(capsys, changed(file, file, outcome, key=key))
    assert (code, found["results"][0]) == (1, "not ok")


FLEET = {"nodes": 2, "gpus_per_node": 4, "gpu": "h200-sxm", "seed": 0, "faults": []}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("verdict_line", "ACCEPTED: 24 passed"),
        ("profile", "b200"),
        ("level", "soak"),
        ("expected", {"nodes": 1, "gpus_per_node": 1}),
        ("simulated", None),
        ("changed_limits", []),
        ("changed_terms", []),
        ("thresholds_sha256", "0" * 64),
        ("limits_sha256", "0" * 64),
    ],
)
def test_another_version_is_no_excuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: Path, name: str, other: object
) -> None:
    """What stands in the journal as it is, every version copies: a note that is gone from the report was valid and stale."""
    kept, file = keep_run(tmp_path / "r", versions={"pytest-gpucluster": "0.0.9"}), tmp_path / "b.zip"
    first, *rest = (kept / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    started = json.loads(first)
    started["facts"] |= {"changed_limits": ["x"], "changed_terms": ["t"], "simulated": FLEET}
    (kept / "journal.jsonl").write_text("\n".join([json.dumps(started), *rest, ""]), encoding="utf-8")
    assert main(["report", str(kept)]) == 1
    assert main(["bundle", str(kept), "-o", str(file), "--key", str(key)]) == 0

    def change(files: Files) -> None:
        document = json.loads(files["results.json"])
        assert document[name] != other
        of_results(files, {**document, name: other})
        files["environment.json"] = as_json(environment_of(document_of(files["results.json"])))

    assert verify(capsys, file)[::2] == (0, "valid, stale")
    code, found, _ = verify(capsys, changed(file, file, change, key=key))
    assert (code, "not ok" in (found["results"][0], found["limits"][0])) == (1, True)


def test_a_site_s_own_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: Path) -> None:
    """The file that the run read goes along, and gives the limits again. Changed since, it is not that of the verdict."""
    own = tmp_path / "site.yaml"
    own.write_text("extends: packaged\ncriteria:\n  bf16_tflops:\n    above: 650\n", encoding="utf-8")
    kept = keep_run(tmp_path / "r", thresholds=own)
    assert main(["bundle", str(kept), "-o", str(tmp_path / "a.zip")]) == 0
    assert verify(capsys, tmp_path / "a.zip")[0] == 0
    assert read_archive(tmp_path / "a.zip").files["limits/as-read.yaml"] == own.read_bytes()
    own.write_text("extends: packaged\ncriteria:\n  bf16_tflops:\n    above: 450\n", encoding="utf-8")
    assert main(["bundle", str(kept), "-o", str(tmp_path / "b.zip")]) == 1
    assert "verify will say 'not ok' of its limits" in capsys.readouterr().err
    code, found, _ = verify(capsys, tmp_path / "b.zip")
    assert (code, found["limits"][0]) == (1, "not ok")
    own.unlink()
    assert main(["bundle", str(kept), "-o", str(tmp_path / "c.zip")]) == 0
    capsys.readouterr()
    code, found, last = verify(capsys, tmp_path / "c.zip")
    assert (code, found["limits"][0], last) == (0, "stale", "valid, UNSIGNED, stale")


def test_the_customer_s_own_tools(tmp_path: Path, bundle: Path, key: Path) -> None:
    """unzip, ssh-keygen and sha256sum check it without us, by the words of docs/how-to/evidence.md."""
    for name, content in read_archive(bundle).files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    shutil.copy(signers_of(key), tmp_path / "signers")
    text = (REPOSITORY / "docs" / "how-to" / "evidence.md").read_text(encoding="utf-8")
    block = text.partition("unzip ../handover.zip\n")[2].partition("```")[0].replace("../signers", "signers")
    done = subprocess.run(["bash", "-ec", block], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.count(b": OK") == 9


def test_verify_needs_no_torch(bundle: Path) -> None:
    """A customer's laptop has none: neither torch nor pytest is imported."""
    code = (
        "import sys; from pytest_gpucluster.commands.main import main; code = main(sys.argv[1:]);"
        "sys.exit(code or sum(name in sys.modules for name in ('torch', '_pytest', 'pynvml')))"
    )
    subprocess.run([sys.executable, "-c", code, "verify", str(bundle)], check=True, stdout=subprocess.DEVNULL)


def test_a_bundle_packed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle: Path) -> None:
    """Bytes before, between or behind the files, and two descriptions of one file, are faults of the zip."""
    content = bundle.read_bytes()
    assert content == packed(read_archive(bundle).files)
    faults = {
        "bytes before": b"PK12" + content,
        "the local time": content[:10] + b"\1" + content[11:],
        "a mark": content.replace(b"\0\0\xa4\x81", b"\0\0\xa5\x81", 1),
    }
    for name, bytes_ in faults.items():
        (tmp_path / "b.zip").write_bytes(bytes_)
        code, found, _ = verify(capsys, tmp_path / "b.zip")
        assert (code, found["zip"][0]) == (1, "not ok"), name


def test_merged_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The journal of merged runs gives two testcases of one name; its bundle is valid."""
    folders = [str(run_of(tmp_path / name, f"host-{name}")) for name in "ab"]
    main(["merge", *folders, "-o", str(tmp_path / "both")])
    assert main(["bundle", str(tmp_path / "both"), "-o", str(tmp_path / "b.zip")]) == 0
    assert "'not ok'" not in capsys.readouterr().err
    code, found, last = verify(capsys, tmp_path / "b.zip")
    assert (code, found["JUnit"][0], last) == (0, "ok", "valid, UNSIGNED, stale")
