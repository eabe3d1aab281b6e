"""The calls that show whether a path is shared, one after the other, each on every host at once."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from pytest_gpucluster import MeasurementError, health
from pytest_gpucluster.measurements.shared_paths import clear_path, count_under_lock, leave_mark, read_marks, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpucluster import Place
    from pytest_gpucluster.measurements.shared_paths import PathMark


class Hosts:
    """The hosts that still answer of one path. One that fails in a call is not called again: it would hang again."""

    def __init__(self, cluster: Any, path: str, deadline_s: float) -> None:
        """``deadline_s`` is that of each call."""
        self.path = path
        self.errors: dict[str, MeasurementError] = {}
        self._cluster = cluster
        self._deadline_s = deadline_s

    def ask(self, function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
        """What each host returned, by node id; None is left out."""
        nodes: list[Place] = [node for node in self._cluster.nodes if node.id not in self.errors]
        if not nodes:
            return {}
        results = self._cluster.run(
            function, per="host", places=nodes, deadline_s=self._deadline_s, path=self.path, **arguments
        )
        for node, error in results.errors.items():
            text = f"{self.path}: {error}"
            self.errors[node.id] = MeasurementError(text, culprits=error.culprits, kind=error.kind, blame=error.blame)
        return {node.id: results[node] for node in results if node not in results.errors and results[node] is not None}


def observe(hosts: Hosts, *, within_s: float, lock_s: float) -> health.PathObservations:
    """Have every host write, read what all wrote, do both again, count under locks and replace a file; what was seen."""
    run = secrets.token_hex(8)
    try:
        marks = hosts.ask(leave_mark, run=run)
        seen = hosts.ask(read_marks, digests=_digests(marks), within_s=within_s)
        rewritten = hosts.ask(leave_mark, run=run)
        seen_again = hosts.ask(read_marks, digests=_digests(rewritten), within_s=within_s)
        parties = _parties(rewritten, seen, seen_again) if lock_s else []
        together = {"run": run, "parties": parties, "seconds": lock_s}
        counted = hosts.ask(count_under_lock, **together) if parties else {}
        flocked = hosts.ask(count_under_lock, **together, flock=True) if parties else {}
        replaced = hosts.ask(replace_file, **together) if parties else {}
    finally:
        left = hosts.ask(clear_path, run=run)
    turns = {"marks": marks, "seen": seen, "rewritten": rewritten, "seen_again": seen_again}
    return health.PathObservations(**turns, counted=counted, flocked=flocked, replaced=replaced, left=left)


def _digests(marks: Mapping[str, PathMark]) -> dict[str, str]:
    """The digest of the file in each host's folder."""
    return {mark.folder: mark.digest for mark in marks.values() if mark.problem is None}


def _parties(marks: Mapping[str, PathMark], *seen: Mapping[str, Any]) -> list[str]:
    """The folders of the hosts that saw every file in time, but for those of hosts that see no other's: these are apart."""
    folders = {node: mark.folder for node, mark in marks.items() if mark.problem is None}
    missed = {
        node: {one for turn in seen for one in (turn[node].missed if node in turn else folders.values())} for node in folders
    }
    apart = {folders[node] for node, ones in missed.items() if len(ones) >= len(folders) - 1 > 0}
    return [folder for node, folder in folders.items() if missed[node] <= apart - {folder}]
