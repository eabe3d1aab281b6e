"""``gpucluster resume``: which command goes on with a run, and each refusal, which is a sentence and the exit code 4."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands import main as commands
from pytest_gpucluster.commands.resume import command
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.results import why_other_parts
from pytest_gpucluster.reporting.unfinished_run import read_unfinished_run
from tests.unit.reporting.test_unfinished_run import GPU, NODE, STARTED, record, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RANK_1 = Launch(
    rank=1,
    world_size=2,
    local_rank=0,
    local_world_size=1,
    group_rank=1,
    master_addr="a",
    master_port=1,
    run_id="none",
    agent_hosts_store=True,
    restart_count=0,
)


def begun(folder: Path, *, torchrun: dict[str, int] | None = None, **started: Any) -> Path:
    """An unfinished run that was started so."""
    how = {"arguments": ["tests_acceptance", "-k", "hbm"], "folder": str(folder), "torchrun": torchrun}
    return write(folder / "results", record("one", "passed"), **{"command": how, **started})


def test_the_same_command_again(tmp_path: Path) -> None:
    """In the same folder, with what the user adds."""
    results = begun(tmp_path)
    words, folder = command(results, ["-v"], launch=None)
    assert words[1:6] == ["-m", "pytest", "tests_acceptance", "-k", "hbm"]
    assert words[6:] == ["--gpucluster", "--gpucluster-resume", f"--gpucluster-results={results}", "-v"]
    assert folder == tmp_path


def test_one_node_of_torchrun(tmp_path: Path) -> None:
    """Torchrun is started again."""
    words, _ = command(begun(tmp_path, torchrun={"nodes": 1, "ranks": 8}), [], launch=None)
    assert words[1:6] == ["-m", "pytest_gpucluster.commands.torchrun", "--standalone", "--nnodes=1", "--nproc-per-node=8"]


def test_several_nodes_of_torchrun(tmp_path: Path) -> None:
    """They need a launcher each: the line for them is shown. Under torchrun the run goes on."""
    results = begun(tmp_path, torchrun={"nodes": 2, "ranks": 8})
    line = (
        rf"in {tmp_path}, with its own R: gpucluster launch --run --nnodes=2 --nproc-per-node=8 --node-rank=R "
        rf"--master-addr=HOST -- tests_acceptance -k hbm -v --gpucluster-results={results}$"
    )
    with pytest.raises(ConfigurationError, match=line):
        command(results, ["-v"], launch=None)
    assert command(results, [], launch=replace(RANK_1, rank=0))[0][1:3] == ["-m", "pytest"]


def test_a_node_without_the_results(tmp_path: Path) -> None:
    """It becomes an agent; what the run asks for is known on node 0."""
    words, _ = command(tmp_path / "nowhere", [], launch=RANK_1)
    assert words[1:5] == ["-m", "pytest", "--gpucluster", "--gpucluster-resume"]
    with pytest.raises(ConfigurationError, match="has no journal of a run"):
        command(tmp_path / "nowhere", [], launch=replace(RANK_1, rank=0))


@pytest.mark.parametrize("how", [None, {}, "pytest", {"arguments": "x", "folder": "/", "torchrun": None}])
def test_a_journal_of_another_version(tmp_path: Path, how: Any) -> None:
    """It does not say how its run was started, in a way that is understood."""
    with pytest.raises(ConfigurationError, match="how its run was started: it was merged from others, or is of another"):
        command(begun(tmp_path, command=how), [], launch=None)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """The run was started on another machine."""
    how = {"arguments": [], "folder": "/no/such/folder", "torchrun": None}
    with pytest.raises(ConfigurationError, match="was started in /no/such/folder, which is no folder here"):
        command(begun(tmp_path, command=how), [], launch=None)


def test_the_journal_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """His command is not run."""
    results = begun(tmp_path)
    owner = (results / "journal.jsonl").stat().st_uid
    if owner == 0:
        os.chown(results / "journal.jsonl", 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        command(results, [], launch=None)


@pytest.mark.parametrize("kind", ["nothing", "file", "ended", "failed", "damaged"])
def test_a_refusal_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """And the exit code 4."""
    results = tmp_path / "results"
    if kind == "file":
        results.write_text("a person's own", encoding="utf-8")
    elif kind == "ended":
        write(results, *(record(key, "passed") for key in ("one", "two", "three")), verdict="ACCEPTED")
    elif kind == "failed":
        write(results, record("one", "failed"))
    elif kind == "damaged":
        begun(tmp_path)
        lines = (results / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        (results / "journal.jsonl").write_text("\n".join([*lines[:2], "{", *lines[2:], ""]), encoding="utf-8")
    assert commands.main(["resume", str(results)]) == 4
    said = capsys.readouterr().err
    assert said.startswith("gpucluster resume: ")
    assert said.count("\n") == 1


def test_what_a_run_writes_of_its_command(tmp_path: Path) -> None:
    """The first line of the journal has it, as plain data."""
    first = json.loads((begun(tmp_path) / "journal.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert first["command"]["folder"] == str(tmp_path)


LEFT_OUT = object()
OTHER_VALUES = (LEFT_OUT, None, 7, "x", [], {}, True, float("inf"))


def members_of(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each member of plain data, however deep."""
    for name, member in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, name)
        yield from members_of(member, *above, name)


def edited(event: dict[str, Any], way: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The event with another value there, or without that member."""
    found = copy.deepcopy(event)
    above: Any = found
    for name in way[:-1]:
        above = above[name]
    above[way[-1]] = value
    if value is LEFT_OUT:
        del above[way[-1]]
    return found


def test_an_edited_journal_is_a_sentence(tmp_path: Path) -> None:
    """Whatever member of whatever line somebody changed, or an older version does not have: a refusal, or no more stays."""
    results = begun(tmp_path)
    events = [json.loads(line) for line in (results / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    cases = ((at, way, value) for at, event in enumerate(events) for way in members_of(event) for value in OTHER_VALUES)
    for at, way, value in cases:
        lines = [json.dumps(edited(event, way, value) if at == number else event) for number, event in enumerate(events)]
        (results / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        try:
            found = read_unfinished_run(results, completes=True)
            found.why_other(STARTED)
            why_other_parts(found.state.places, {GPU.id: GPU, NODE.id: NODE})
            command(results, [], launch=None)
        except ConfigurationError:
            continue
        assert len(found.kept) <= 1, (at, way, value)


@pytest.mark.parametrize("value", [699.0, None])
def test_a_pass_beyond_its_limit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float | None) -> None:
    """Somebody turned a failure, or an error, into a pass: what the line says of itself does not agree."""
    results = write(tmp_path / "results", replace(record("one", "passed"), value=value))
    assert commands.main(["resume", str(results)]) == 4
    assert "one at node0-gpu0 passed in it with a value that is not > 700 TFLOPS: it was edited" in capsys.readouterr().err
