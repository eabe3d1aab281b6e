"""The page of a comparison: all that the text says, by the same exit code; foreign text stays text."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands import compare as command
from pytest_gpucluster.commands import main
from pytest_gpucluster.records.comparison import compare
from tests.support.kept_runs import KeptCluster, keep
from tests.support.pages import Page

if TYPE_CHECKING:
    from pytest_gpucluster.records.comparison import RunComparison

HOSTILE = [
    "<script>alert(1)</script>",
    "</style><script>x</script>",
    "</title><img src=x onerror=alert(1)>",
    '"><svg onload=x>',
    "' onmouseover='x",
    "{{ 7*7 }}{% raw %}",
    "<!--",
    "\x00\x1b[31m",
    "\u202etxt.exe",
    "\ud800",
    "&lt;b&gt;",
    "שלום עולם",
    "a" * 300_000,
]


def found(text: str = "rate", *, lost: float = 600.0) -> RunComparison:
    """A GPU that lost, one that moved, one that is gone, and settings that differ; ``text`` is wherever foreign text can be."""
    before, after = KeptCluster(), KeptCluster()
    for cluster in (before, after):
        cluster.places = {
            name: replace(place, hostname=f"h{text[:200]}{place.node}", serial=place.serial and f"{place.serial}{text}")
            for name, place in cluster.places.items()
        }
    after.swap("node0-gpu0", "node1-gpu2")
    after.places["node1-gpu3"] = replace(after.places["node1-gpu3"], uuid=None, serial=None, rank=None)
    versions = [{"environment": {"versions": {f"v{text}": number}}} for number in ("1", text)]
    worse = [
        replace(one, outcome="failed", reason=text) if one.place == "node1-gpu1" else one
        for one in after.records({"node1-gpu1": lost}, criterion=f"c{text}")
    ]
    earlier = before.document(before.records(criterion=f"c{text}"), profile=text, **versions[0])
    runs = (earlier, after.document(worse, **versions[1]))
    return compare(*(_of_today(run, text) for run in runs))


def _of_today(run: Any, text: str) -> Any:
    return {**run, "run": {"id": f"i{text}", "started": text, "host": text, "user": text}}


def test_the_page_says_all_that_the_text_says() -> None:
    """Each sentence of each section, the conclusion, and both runs with verdict, date and id."""
    one = found()
    read = Page(command.page_of(one))
    assert command.conclusion(one) in read.text
    titles = [title for title, _ in command.sections(one)]
    assert {"worse outcomes", "values lost beyond noise", "parts that are gone", "parts that moved"} <= {*titles}
    for title, items in command.sections(one):
        assert title in read.text.lower()
        for item in items:
            assert item in read.text
    assert len(read.all("h1")) == 1
    for fact in ("irate", one.before["verdict_line"], one.after["verdict_line"]):
        assert fact in read.text


def test_only_where_nothing_is_worse_is_it_green() -> None:
    """Not for a lost value, and not for a part that is gone."""
    cluster = KeptCluster()
    same = cluster.document(cluster.records())
    assert Page(command.page_of(compare(same, same))).all("section", class_="b-good")
    read = Page(command.page_of(found()))
    assert read.all("section", class_="b-bad")
    assert not read.all("section", class_="b-good")


def test_many_changes_are_all_there() -> None:
    """The text names 20 a section; the page has the rest behind a fold, up to a number that keeps it small."""
    cluster = KeptCluster(nodes=20, gpus=8)
    before = cluster.document(cluster.records())
    bad = cluster.document([replace(one, outcome="failed", value=1.0) for one in cluster.records()])
    html = command.page_of(compare(before, bad))
    assert Page(html).text.count("passed -> failed") == 160
    assert len(html) < 300_000
    huge = KeptCluster(nodes=300, gpus=8)
    before = huge.document(huge.records())
    bad = huge.document([replace(one, outcome="failed", value=1.0) for one in huge.records()])
    html = command.page_of(compare(before, bad))
    assert f"{300 * 8 - command.MOST_ON_PAGE:,} more" in Page(html).text
    assert len(html) < 1_000_000


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_foreign_text_stays_text(text: str) -> None:
    """As host, serial number, criterion, reason, profile, version, run id: no new element, attribute, script or comment."""
    html, plain = command.page_of(found(text)), Page(command.page_of(found()))
    read = Page(html)
    assert {one.name for one in read.elements} == {one.name for one in plain.elements}
    assert read.all("script") == []
    assert read.comments == []
    assert {key for one in read.elements for key in one.attributes} == {key for one in plain.elements for key in one.attributes}
    assert re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", html) is None
    shown = text[:100].encode("unicode_escape").decode() if not text[:100].isprintable() else text[:100]
    assert shown in read.text
    assert len(html) < 1_000_000


def test_nothing_is_loaded_and_nothing_runs() -> None:
    """The policy allows our own style by its digest; no script at all, no address, no handler, no inline style."""
    read = Page(command.page_of(found()))
    policy = read.all("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    style = Path(command.__file__).parents[1] / "page" / "templates" / "style.css"
    digest = base64.b64encode(hashlib.sha256(style.read_text(encoding="utf-8").strip().encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    names = {key for one in read.elements for key in one.attributes}
    assert not {"src", "style", "action"} & names
    assert not [key for key in names if key.startswith("on")]
    assert all(one.attributes.get("href", "#").startswith("#") for one in read.elements)


@pytest.mark.parametrize("words", [(), ("--markdown",)])
def test_the_command_writes_it(words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it prints and its exit code unchanged; the folder is made, an older page is replaced."""
    cluster = KeptCluster()
    before = keep(tmp_path / "a", cluster.document(cluster.records()))
    after = keep(tmp_path / "b", cluster.document(cluster.records({"node1-gpu1": 600.0})))
    file = tmp_path / "new" / "compare.html"
    for second, code in ((before, 0), (after, 1)):
        assert main.main(["compare", str(before), str(second), *words]) == code
        alone = capsys.readouterr()
        assert main.main(["compare", str(before), str(second), *words, "--html", str(file)]) == code
        with_page = capsys.readouterr()
        assert with_page.out == alone.out
        assert str(file) in with_page.err
        assert ("nothing is worse" in Page(file.read_text(encoding="utf-8")).text) is (code == 0)
    assert [one.name for one in file.parent.iterdir()] == ["compare.html"]


@pytest.mark.parametrize("case", ["results", "journal", "a link to results", "a folder", "different clusters", "no run"])
def test_nothing_is_overwritten(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of a run is replaced by no page, and a wrong use touches no file: a sentence, exit code 4."""
    cluster, other = KeptCluster(), KeptCluster()
    other.places = {name: replace(place, hostname="x", uuid="x", serial="x") for name, place in other.places.items()}
    first = keep(tmp_path / "a", cluster.document(cluster.records()))
    second = keep(tmp_path / "b", cluster.document(cluster.records()))
    foreign = keep(tmp_path / "c", other.document(other.records()))
    (second / "journal.jsonl").write_text("{}\n", encoding="utf-8")
    (tmp_path / "link.html").symlink_to(first / "results.json")
    (tmp_path / "page.html").write_text("old", encoding="utf-8")
    file = {
        "results": first / "results.json",
        "journal": second / "journal.jsonl",
        "a link to results": tmp_path / "link.html",
        "a folder": tmp_path / "a",
    }.get(case, tmp_path / "page.html")
    later = {"different clusters": foreign, "no run": tmp_path / "nothing"}.get(case, second)
    kept = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    assert main.main(["compare", str(first), str(later), "--html", str(file)]) == 4
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()} == kept
