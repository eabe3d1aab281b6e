"""``gpucluster report``: the reports of a run again, from its journal, and its page from whatever the run left."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from pytest_gpucluster.config.run_files import JOURNAL, METRICS, REPORT, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.page.outputs import Wanted, page_about, write_outputs
from pytest_gpucluster.reporting.files import require_unread, require_writable, results_lock
from pytest_gpucluster.reporting.rebuild import rebuild, require_journal_of, take_over

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

GOOD = ("ACCEPTED", "ACCEPTED_WITH_WAIVERS", "REHEARSED")


def main(chosen: argparse.Namespace) -> int:
    """Write the reports; 0 where the verdict is good, else 1.

    With ``-o``, for a results.json, or for a directory that has no journal, only the page is made and no other file is touched.

    Raises:
        ConfigurationError: there is no run, its files are damaged, or a report cannot be written there.
        OSError: the disk refused a report.
    """
    folder: Path = chosen.folder
    from_journal = chosen.journal is not None or chosen.run is not None or chosen.junitxml is not None
    if chosen.output is not None and from_journal:
        raise ConfigurationError("-o makes the page alone, so it goes with none of --junitxml, --journal")
    if not from_journal and (chosen.output is not None or not (folder / JOURNAL).is_file()):
        return _page(folder, chosen.output)
    if chosen.junitxml is not None:
        read = [folder / JOURNAL, folder / RESULTS, folder / REPORT, folder / METRICS]
        require_unread(chosen.junitxml, [*read, *([chosen.journal] if chosen.journal is not None else [])])
    if chosen.journal is not None:
        take_over(folder, chosen.journal)
    if chosen.junitxml is not None:
        require_writable(chosen.junitxml)
    with results_lock(folder) if chosen.run is not None else contextlib.nullcontext():
        if chosen.run is not None:
            require_journal_of(chosen.run, folder)
        verdict = rebuild(folder, junit=chosen.junitxml, replaces_ended=chosen.run is not None)
        on_github = os.environ if chosen.run is not None else {}  # a run that was lost has no other to write its summary
        said = write_outputs(folder, Wanted(environment=on_github))
    for problem in said.problems:
        sys.stderr.write(f"gpucluster report: {problem}\n")
    sys.stdout.write("".join(f"{line}\n" for line in (*said.annotations, f"verdict {verdict.line}")))
    return 0 if verdict.is_good else 1


def _page(source: Path, output: Path | None) -> int:
    file, run = page_about(source, output=output)
    sys.stdout.write(f"verdict {run.facts.get('verdict_line', run.word)}\npage {file}\n")
    return 0 if run.word in GOOD else 1
