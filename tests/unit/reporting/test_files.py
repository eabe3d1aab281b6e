"""Links, devices and pipes where reports are written: none is replaced, and none in the results directory is followed."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.config.run_files import RUN_FILES
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.files import (
    KEPT_RUNS,
    PREVIOUS,
    ResultsDirectory,
    is_in_use,
    is_replaceable,
    require_apart,
    require_no_links,
    require_takeable,
    require_unread,
    require_writable,
    results_lock,
    write_atomically,
    write_report,
)
from pytest_gpucluster.reporting.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
PLANTED = (".lock", ".probe", ".results.json.1.tmp", "previous", *RUN_FILES)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody else."""
    path = tmp_path / "victim"
    path.write_text("mine", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("take", [ResultsDirectory, lambda folder: results_lock(folder).__enter__(), require_no_links])
@pytest.mark.parametrize("target", ["victim", "absent", ".", "loop"])
def test_a_planted_link_is_refused(
    tmp_path: Path, victim: Path, name: str, take: Callable[[Path], object], target: str
) -> None:
    """By its name, in one sentence; it leads to a file, to nothing, to a folder or to itself, and stays as it is."""
    folder = tmp_path / "results"
    folder.mkdir()
    link = folder / name
    link.symlink_to(link if target == "loop" else tmp_path / target)
    with pytest.raises(ConfigurationError, match=rf"cannot be written: {name} in it is a symbolic link") as refused:
        take(folder)
    assert "\n" not in str(refused.value)
    assert link.is_symlink()
    assert victim.read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "victim"]
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_results_directory_may_be_a_link(tmp_path: Path) -> None:
    """The user chose it; its own links, and links of other names in it, are followed and left alone."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "latest").symlink_to(tmp_path)
    ResultsDirectory(tmp_path / "results").close()
    ResultsDirectory(tmp_path / "results").close()
    assert (tmp_path / "disk" / "logs").is_dir()
    assert (tmp_path / "disk" / "latest").is_symlink()


@pytest.mark.parametrize("name", [".results.json.{pid}.tmp", "results.json"])
def test_a_link_planted_later(tmp_path: Path, victim: Path, name: str) -> None:
    """Also where it was put during the run, the write fails by name and the link stays."""
    link = tmp_path / name.format(pid=os.getpid())
    link.symlink_to(victim)
    with pytest.raises(OSError, match="is a symbolic link"):
        write_atomically(tmp_path / "results.json", "ours")
    assert link.is_symlink()
    assert victim.read_text(encoding="utf-8") == "mine"


def test_what_a_killed_run_left_is_no_hindrance(tmp_path: Path, victim: Path) -> None:
    """A probe and a temporary file that are no links are replaced; a hard link's other name keeps its content."""
    for name in (".probe", f".results.json.{os.getpid()}.tmp"):
        (tmp_path / name).hardlink_to(victim)
    ResultsDirectory(tmp_path).close()
    write_atomically(tmp_path / "results.json", "ours")
    assert victim.read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "results.json").read_text(encoding="utf-8") == "ours"


def test_the_journal_follows_no_link(tmp_path: Path, victim: Path) -> None:
    """Not even one that was planted after the directory was looked at."""
    (tmp_path / "journal.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Journal(tmp_path / "journal.jsonl")
    assert victim.read_text(encoding="utf-8") == "mine"


# The JUnit file, which may lie anywhere.


def check_and_write(file: Path) -> None:
    """What a run does with its JUnit file, while it goes on and at its end."""
    require_writable(file)
    write_report(file, "<testsuites/>")


def test_a_link_to_a_file(tmp_path: Path, victim: Path) -> None:
    """Its target gets the report, as from pytest; the link stays a link."""
    link = tmp_path / "junit.xml"
    link.symlink_to(victim)
    require_writable(link)
    assert victim.read_text(encoding="utf-8") == "mine"
    check_and_write(link)
    assert link.is_symlink()
    assert victim.read_text(encoding="utf-8") == "<testsuites/>"


def test_a_dangling_link(tmp_path: Path) -> None:
    """Its target is made when the report is written, and not before."""
    link = tmp_path / "junit.xml"
    link.symlink_to(tmp_path / "later.xml")
    require_writable(link)
    assert link.is_symlink()
    assert not (tmp_path / "later.xml").exists()
    check_and_write(link)
    assert (tmp_path / "later.xml").read_text(encoding="utf-8") == "<testsuites/>"
    assert link.is_symlink()


@pytest.mark.parametrize("target", ["junit.xml", "absent/later.xml", "folder"])
def test_a_link_that_leads_nowhere(tmp_path: Path, target: str) -> None:
    """To itself, into a folder that is not there, to a folder: refused, and nothing is made."""
    (tmp_path / "folder").mkdir()
    link = tmp_path / "junit.xml"
    link.symlink_to(tmp_path / target)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        require_writable(link)
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "junit.xml"]


def test_a_pipe(tmp_path: Path) -> None:
    """It is not opened before there is a report, so nobody waits, and its reader gets the whole report."""
    pipe = tmp_path / "junit.xml"
    os.mkfifo(pipe)
    require_writable(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    require_writable(pipe)
    write_report(pipe, "<testsuites/>")
    reader.join(60)
    assert found == ["<testsuites/>"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@AS_ROOT
@pytest.mark.parametrize(("minor", "is_full"), [(3, False), (7, True)], ids=["null", "full"])
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
def test_a_device(tmp_path: Path, minor: int, is_full: bool, linked: bool) -> None:  # noqa: FBT001 -- parameters
    """It stays a device, is written as pytest writes it, and a full one says so."""
    device = tmp_path / "device"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    file = tmp_path / "junit.xml" if linked else device
    if linked:
        file.symlink_to(device)
    assert not is_replaceable(file)
    require_writable(file)
    if is_full:
        with pytest.raises(OSError, match="No space left"):
            write_report(file, "<testsuites/>")
    else:
        write_report(file, "<testsuites/>")
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert file.is_symlink() is linked


@AS_ROOT
def test_a_disk_is_refused(tmp_path: Path) -> None:
    """A report would destroy its contents. The node is of a device number that no driver has."""
    disk = tmp_path / "junit.xml"
    os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(250, 255))
    with pytest.raises(ConfigurationError, match="it is a disk or a socket"):
        require_writable(disk)
    assert stat.S_ISBLK(disk.lstat().st_mode)


@pytest.mark.parametrize("below", ["report.xml", "deeper/report.xml"])
def test_a_report_below_a_file_says_so(tmp_path: Path, below: str) -> None:
    """Not "File exists": that reads as if the report itself stood there."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"report\.xml cannot be written: Not a directory"):
        require_writable(tmp_path / "file" / below)


def test_a_plain_file_is_replaced(tmp_path: Path) -> None:
    """The healthy twin: nothing there, then an older report."""
    file = tmp_path / "folder" / "junit.xml"
    for _ in range(2):
        assert is_replaceable(file)
        check_and_write(file)
    assert [path.name for path in file.parent.iterdir()] == ["junit.xml"]


def test_a_report_that_another_run_makes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs begin at once with one report: the file that came between is left as it is, and is no error."""
    report = tmp_path / "junit.xml"
    report.write_text("of another run", encoding="utf-8")
    monkeypatch.setattr(Path, "exists", lambda _path: False)  # as it was a moment before
    require_writable(report)
    assert report.read_text(encoding="utf-8") == "of another run"


def make_run(folder: Path, *, at_s: int) -> Path:
    """An earlier run in the results directory, of that time."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "logs" / "rank0.log").write_text("log", encoding="utf-8")
    journal = folder / "journal.jsonl"
    journal.write_text("{}\n", encoding="utf-8")
    for path in (journal, folder / "logs"):
        os.utime(path, (at_s, at_s))
    return folder


def shelves(folder: Path) -> list[str]:
    """The names in ``previous/``."""
    return sorted(path.name for path in (folder / PREVIOUS).iterdir())


def test_previous_keeps_the_newest_runs(tmp_path: Path) -> None:
    """Several of one second count by their number; the folder that goes is named."""
    removed: list[tuple[str, ...]] = []
    results = tmp_path / "results"
    for number in range(KEPT_RUNS + 7):
        make_run(results, at_s=1_700_000_000 + number // 4)
        directory = ResultsDirectory(results)
        directory.close()
        removed.append(directory.removed)
    first, second, third = "20231114-221320", "20231114-221321", "20231114-221322"
    assert shelves(tmp_path / "results") == [f"{second}-3", third, f"{third}-1", f"{third}-2", f"{third}-3"]
    assert removed[: KEPT_RUNS + 1] == [(), (), (), (), (), (first,)]
    assert removed[-1] == (f"{second}-2",)


def test_a_clock_that_was_set_back_removes_no_last_run(tmp_path: Path) -> None:
    """The run that was just moved stays, also where its files are older than all that are kept: a soak may go on with it."""
    results = tmp_path / "results"
    for number in range(KEPT_RUNS):
        make_run(results / PREVIOUS / f"2026010{number + 1}-000000", at_s=0)
    make_run(results, at_s=1_700_000_000)
    directory = ResultsDirectory(results)
    directory.close()
    assert directory.older_run == results / PREVIOUS / "20231114-221320"
    assert directory.older_run.is_dir()
    assert directory.removed == ("20260101-000000",)


def test_only_what_a_run_wrote_is_removed(tmp_path: Path) -> None:
    """A note of a person, a link, another name and what only has logs of a run that goes on, if it is not older."""
    previous = tmp_path / "results" / PREVIOUS
    for day in range(1, 8):
        make_run(previous / f"2026010{day}-000000", at_s=0)
    make_run(tmp_path / "elsewhere", at_s=0)
    (previous / "20260101-000000" / "note.txt").write_text("keep", encoding="utf-8")
    (previous / "20250101-000000").symlink_to(tmp_path / "elsewhere")
    make_run(previous / "baseline", at_s=0)
    for name in ("20260102-120000", "20260106-120000"):
        (previous / name / "logs").mkdir(parents=True)
    make_run(tmp_path / "results", at_s=1_800_000_000)
    directory = ResultsDirectory(tmp_path / "results")
    directory.close()
    assert directory.removed == ("20260103-000000", "20260102-120000", "20260102-000000")
    kept = [f"2026010{day}-000000" for day in range(4, 8)]
    others = ["20250101-000000", "20260101-000000", "20260106-120000", "20270115-080000", "baseline"]
    assert shelves(tmp_path / "results") == sorted([*kept, *others])
    assert [path.name for path in (previous / "20260101-000000").iterdir()] == ["note.txt"]
    assert (tmp_path / "elsewhere" / "journal.jsonl").exists()


def test_a_directory_that_cannot_be_taken_is_seen_early(tmp_path: Path) -> None:
    """A file in its place or above it, a folder that refuses, another run; nothing is made there."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    held = ResultsDirectory(tmp_path / "held")
    before = sorted(path for path in tmp_path.rglob("*"))
    for path, why in {
        tmp_path / "file": "cannot be written: File exists",
        tmp_path / "file" / "a" / "b": "cannot be written: Not a directory",
        Path("/proc/gpucluster/results"): "cannot be written",
        tmp_path / "held": "is in use by another run; give this one its own: --gpucluster-results DIR",
    }.items():
        with pytest.raises(ConfigurationError, match=f"the results directory {path} {why}"):
            require_takeable(path)
    for path in (tmp_path, tmp_path / "a" / "b"):
        require_takeable(path)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert is_in_use(tmp_path / "held")
    held.close()
    require_takeable(tmp_path / "held")
    assert not is_in_use(tmp_path / "held")
    assert not is_in_use(tmp_path / "a")


def by_a_link(file: Path) -> Path:
    """A link of a link to a file."""
    for name, target in (("one", file), ("two", "one")):
        file.with_name(name).symlink_to(target)
    return file.with_name("two")


def by_another_name(file: Path) -> Path:
    """A hard link."""
    os.link(file, file.with_name("hard.xml"))
    return file.with_name("hard.xml")


def by_its_folder(file: Path) -> Path:
    """Through a link to its folder."""
    file.with_name("here").symlink_to(".")
    return file.with_name("here") / file.name


NAMES = (Path, by_a_link, by_another_name, by_its_folder, lambda file: file.parent / "no" / ".." / file.name, os.path.relpath)


@pytest.mark.parametrize("named", NAMES)
@pytest.mark.parametrize("name", ["limits.yaml", "test_own.py", "hosts", "results/journal.jsonl", "results/results.json"])
def test_no_report_replaces_an_input(tmp_path: Path, named: Callable[[Path], object], name: str) -> None:
    """Neither limits, nor tests, nor a list of hosts, nor what a run writes itself, whatever the report is called."""
    file = tmp_path / name
    (file.parent / "no").mkdir(parents=True)
    file.write_text("mine", encoding="utf-8")
    report = Path(str(named(file)))
    read = [tmp_path / one for one in ("limits.yaml", "hosts", "test_own.py")]
    with pytest.raises(ConfigurationError, match="an input or another report"):
        require_apart([None, report], folder=tmp_path / "results", read=read)
    with pytest.raises(ConfigurationError, match="an input or another report"):
        require_unread(report, [file])
    assert file.read_text(encoding="utf-8") == "mine"


def test_two_reports_at_one_place(tmp_path: Path) -> None:
    """They are refused before either is there; a device may take all of them."""
    folder = tmp_path / "results"
    with pytest.raises(ConfigurationError, match="another report"):
        require_apart([tmp_path / "a.xml", tmp_path / "results" / ".." / "a.xml"], folder=folder, read=())
    require_apart([Path("/dev/null"), Path("/dev/null"), tmp_path / "a.xml", folder / "junit.xml"], folder=folder, read=())


@pytest.mark.parametrize(
    ("emptied", "is_apart"),
    [
        ("results", False),
        (".", False),
        ("link", False),
        ("results/logs", False),
        ("results/previous/x", False),
        ("results/tmp", True),
        ("result", True),
    ],
)
def test_a_folder_that_pytest_empties(tmp_path: Path, emptied: str, *, is_apart: bool) -> None:
    """It may hold nothing that the run writes, by whatever name."""
    folder = tmp_path / "results"
    (tmp_path / "link").symlink_to("results")
    with contextlib.nullcontext() if is_apart else pytest.raises(ConfigurationError, match="pytest empties --basetemp"):
        require_apart([], folder=folder, read=(), emptied=tmp_path / emptied)


@pytest.mark.parametrize("name", ["x" * 300, f"{'x' * 300}.py", "loop", "file/x", "y/" * 3000 + "z"])
def test_a_report_that_cannot_be_looked_at(tmp_path: Path, name: str) -> None:
    """It replaces nothing; whether it can be written is asked, in a sentence, where it is taken."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    require_apart([tmp_path / name], folder=tmp_path / "results", read=[tmp_path / "limits.yaml"])
    require_unread(tmp_path / name, [tmp_path / name / "limits.yaml"])
    with pytest.raises(ConfigurationError, match="cannot be written"):
        require_writable(tmp_path / name)


@pytest.mark.parametrize("name", ["logs/limits.yaml", "results.json", "logs"])
def test_an_input_where_the_run_writes(tmp_path: Path, name: str) -> None:
    """It would be moved into ``previous/``, or written over."""
    with pytest.raises(ConfigurationError, match="keep it elsewhere"):
        require_apart([], folder=tmp_path, read=[tmp_path / name])
    require_apart([], folder=tmp_path, read=[tmp_path / "limits.yaml", tmp_path / "logs.yaml"])


@pytest.mark.parametrize("name", ["results.json", "journal.jsonl", "conftest.py"])
def test_no_report_replaces_the_record_of_another_run(tmp_path: Path, name: str) -> None:
    """``gpucluster report A --junitxml B/results.json`` wrote XML over the results of B."""
    file = tmp_path / name
    require_unread(file, [])
    file.write_text("kept", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="it would replace"):
        require_unread(file, [])
    require_unread(tmp_path / f"my-{name}".replace(".py", ".txt"), [])
