"""Writes the reports of a run whose controller died.

The controller's journal lies on the disk of its node. An agent of that node sees at once when the controller ends, and writes
the reports from the journal. If the whole node is lost, an agent of another node writes them from its journal replica, where
its own command line says. The lines of the replica came through the store.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.protocol.channel import ChannelLostError, StoreChannel, journal_key
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.messages import JournalText, ReportTarget

REBUILD_S, REBUILD_S_PER_MB = 20.0, 2.0
"""How long the reports may take, and how much longer for each megabyte of the journal: ten times what a free core takes."""


def write_reports(target: ReportTarget, *, journal_copy: Path | None = None) -> None:
    """Write the reports, from ``journal_copy`` if the journal in the target's folder is missing."""
    source = journal_copy if journal_copy is not None else Path(target.folder) / JOURNAL
    junit = ["--junitxml", target.junit] if target.junit else []
    journal = ["--journal", str(journal_copy)] if journal_copy is not None else ["--run", target.run]
    command = [sys.executable, "-m", "pytest_gpucluster.cli", "report", target.folder, *junit, *journal]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(  # noqa: S603 -- our own command
            command,
            timeout=rebuild_deadline_s(source),
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun's SIGTERM goes to the whole process group of a rank
        )


def rebuild_deadline_s(journal: Path) -> float:
    """How long it may take to write the reports from a journal of this length."""
    with contextlib.suppress(OSError):
        return REBUILD_S + REBUILD_S_PER_MB * journal.stat().st_size / 1e6
    return REBUILD_S


class JournalReplica:
    """A copy of the controller's journal on another node."""

    def __init__(self, reader: StoreChannel, target: ReportTarget, file: Path) -> None:
        """Start copying into ``file``, in a thread that has the connection ``reader`` for itself."""
        self._target = target
        self._file = file
        threading.Thread(target=self._copy, args=(reader,), daemon=True).start()

    def _copy(self, reader: StoreChannel) -> None:
        with self._file.open("w", encoding="utf-8") as copy, contextlib.suppress(ChannelLostError, RefusedMessageError):
            number = 0
            while True:
                copy.write(reader.take(journal_key(number), JournalText.read).text)
                copy.flush()
                number += 1

    def write_reports(self) -> None:
        """Write the reports from the copy, because the controller is lost."""
        sys.stderr.write(f"gpucluster: the controller is lost; its report is finished here, in {self._target.folder}\n")
        write_reports(self._target, journal_copy=self._file)
