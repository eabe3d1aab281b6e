"""The hosts of an earlier run: read from its journal, whatever else is there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.lines import hosts_from, hosts_of_earlier_run, remembered_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def journal(folder: Path, hosts: Sequence[str | None] | None, *, simulated: bool = False) -> Path:
    """A run that bound these hosts by node number, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    events: list[Any] = [{"event": "started", "facts": {"simulated": {"seed": 1} if simulated else None}}, ["no event"]]
    if hosts is not None:
        nodes = [{"id": f"node{number}", "node": number, "hostname": host} for number, host in enumerate(hosts)]
        events.append({"event": "bound", "places": [], "nodes": nodes[::-1]})
    lines = [json.dumps(event) for event in events]
    (folder / "journal.jsonl").write_text("\n".join([lines[0], "damaged", *lines[1:], ""]), encoding="utf-8")
    return folder


def test_the_hosts_by_number(tmp_path: Path) -> None:
    """Whatever is damaged before."""
    assert hosts_of_earlier_run(journal(tmp_path, ["c", "a", "b"])) == ("c", "a", "b")


@pytest.mark.parametrize("newest", [None, ["a", None], []])
def test_the_newest_run_that_knew_all_hosts(tmp_path: Path, newest: list[str | None] | None) -> None:
    """A run that ended early, or did not know who is absent, says less than the one before."""
    journal(tmp_path, newest)
    journal(tmp_path / "previous" / "20261125-100000", ["old", "b"])
    journal(tmp_path / "previous" / "20261126-100000", ["a", "b"])
    assert hosts_of_earlier_run(tmp_path) == ("a", "b")


def test_no_run_and_no_real_one(tmp_path: Path) -> None:
    """Simulated hosts are nobody's; a link in the place of a journal is not followed."""
    assert hosts_of_earlier_run(tmp_path / "none") == ()
    assert hosts_of_earlier_run(journal(tmp_path / "simulated", ["gpu-node-0"], simulated=True)) == ()
    journal(tmp_path / "real", ["a"])
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "journal.jsonl").symlink_to(tmp_path / "real" / "journal.jsonl")
    assert hosts_of_earlier_run(tmp_path / "link") == ()


@pytest.mark.parametrize(("num_nodes", "own", "hosts"), [(2, "a.site", ("a", "b")), (2, "c", ()), (3, "a", ()), (1, "a", ())])
def test_another_cluster_is_not_remembered(tmp_path: Path, num_nodes: int, own: str, hosts: tuple[str, ...]) -> None:
    """One of another size, or without this host."""
    assert remembered_hosts(journal(tmp_path, ["a", "b"]), num_nodes=num_nodes, own=own) == hosts


def test_what_the_option_names(tmp_path: Path) -> None:
    """Names, a file of them, or the results of an earlier run."""
    assert hosts_from(" a, b ") == ("a", "b")
    assert hosts_from("x, gpu-[08-09,12],y") == ("x", "gpu-08", "gpu-09", "gpu-12", "y")
    with pytest.raises(ConfigurationError, match=r"--hosts gpu-\[1-: .*without its end"):
        hosts_from("gpu-[1-")
    assert hosts_from(f"{journal(tmp_path / 'results', ['b', 'a'])}") == ("b", "a")
    (tmp_path / "hosts.txt").write_text("# rack 1\ngpu-[08-09]\n\nx,y  # spare\n", encoding="utf-8")
    assert hosts_from(f"{tmp_path / 'hosts.txt'}") == ("gpu-08", "gpu-09", "x", "y")


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("# none\n", "it names no host"), ("n[1-", "without its end"), ("", "no host")]
)
def test_a_path_without_hosts(tmp_path: Path, text: str | None, why: str) -> None:
    """A usage error that names the path."""
    if text is not None:
        (tmp_path / "hosts.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf"--hosts .*hosts\.txt: .*{why}"):
        hosts_from(f"{tmp_path / 'hosts.txt'}")
    with pytest.raises(ConfigurationError, match="no run in this folder knew the hosts of all its nodes"):
        hosts_from(f"{tmp_path}")
