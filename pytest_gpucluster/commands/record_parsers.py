"""The arguments of the commands that read kept results: show, compare, history, merge, bundle, verify.

Wrong usage of them is exit code 4.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG_USAGE = 4
ARGPARSE_USAGE = 2


class CommandParser(argparse.ArgumentParser):
    """The parser of a command: wrong usage has the exit code ``usage_code`` of its defaults, argparse's own without one."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.print_usage(sys.stderr)
        self.exit(self.get_default("usage_code") or ARGPARSE_USAGE, f"{self.prog}: error: {message}\n")


def add_record_commands(add: Callable[..., CommandParser]) -> None:
    """Add the six commands; ``add`` makes a parser of a name and a help text."""
    _add_show(add("show", help="what a criterion asks and why; or what a results directory holds, also as CSV"))
    _add_compare(add("compare", help="what has changed between two runs"))
    _add_history(add("history", help="the kept runs in a folder, and the trend of a criterion"))
    _add_merge(add("merge", help="the runs of many nodes as one results directory with one verdict"))
    _add_bundle(add("bundle", help="a run as one zip file, signed if you have a key: what a customer keeps"))
    _add_verify(add("verify", help="whether a bundle is unchanged, who signed it, and whether all in it belongs together"))


def _add_show(show: CommandParser) -> None:
    show.usage = "gpucluster show CRITERION [--limits FILE] | RESULTS [CRITERION|PLACE] [--csv]"
    show.description = "A name of a criterion is one, unless results lie in a folder of that name."
    words = "a criterion (busbw: all busbw[...]); or a results directory, or its results.json"
    show.add_argument("folder", type=Path, metavar="CRITERION|RESULTS", help=words)
    words = "of a criterion: a thresholds file; default: the packaged one"
    show.add_argument("--limits", type=Path, metavar="FILE", help=words)
    words = "a criterion (busbw: all busbw[...]), or a place by id, hostname, UUID or serial; default: the whole run"
    show.add_argument("subject", nargs="?", metavar="CRITERION|PLACE", help=words)
    show.add_argument("--csv", action="store_true", help="CSV: a line an outcome, then a line for every other number")
    show.set_defaults(act="show", usage_code=WRONG_USAGE)


def _add_compare(compare: CommandParser) -> None:
    compare.usage = "gpucluster compare A B [--markdown] [--html FILE] | --order FILE [INVENTORY ...]"
    compare.description = (
        "Exit code 0: nothing is worse in B; 1: something is; 4: the two cannot be compared. "
        "With --order 0: as ordered; 1: something differs; 3: a serial is not known; 4: a file is wrong."
    )
    words = "the results directories of the earlier and the later run; with --order, inventories of hosts"
    compare.add_argument("runs", type=Path, nargs="*", metavar="A B", help=words)
    words = "an order, CSV or JSON, beside inventories (gpucluster info --inventory); beside this host where none is given"
    compare.add_argument("--order", type=Path, metavar="FILE", help=words)
    compare.add_argument("--markdown", action="store_true", help="Markdown in place of text")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write a page: one file, without a script")
    compare.set_defaults(act="compare", error=compare.error, usage_code=WRONG_USAGE)


def _add_history(history: CommandParser) -> None:
    history.add_argument("folder", type=Path, metavar="DIR", help="a folder of results directories, however deep")
    history.add_argument("criterion", nargs="?", metavar="CRITERION", help="show its median and its worst value in each run")
    words = "of one GPU or node only: hostname, UUID or serial, wherever it was at the time"
    history.add_argument("--part", metavar="PART", help=words)
    history.set_defaults(act="history", usage_code=WRONG_USAGE)


def _add_merge(merge: CommandParser) -> None:
    merge.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="results directories of different nodes")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the new results directory")
    merge.add_argument("--hosts", metavar="A,B,...", help="all hosts that are expected; one in no run is a gap")
    words = "print how sbatch takes the nodes that passed and excludes the others; each DIR has its node's name in Slurm"
    merge.add_argument("--exclude", action="store_true", help=words)
    merge.set_defaults(act="merge", usage_code=WRONG_USAGE)


def _add_bundle(bundle: CommandParser) -> None:
    bundle.description = "Exit code 0: written; 4: it is not, and no file was touched."
    bundle.add_argument("folder", type=Path, metavar="RESULTS", help="the results directory of a run that has ended")
    bundle.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.zip", help="the bundle; it must not exist")
    words = "an SSH key that signs it; one with a passphrase must be in ssh-agent"
    bundle.add_argument("--key", type=Path, metavar="SSHKEY", help=words)
    bundle.set_defaults(act="bundle", usage_code=WRONG_USAGE)


def _add_verify(verify: CommandParser) -> None:
    verify.description = "Exit code 0: valid; 1: not valid, or not signed by one of --signers; 4: no bundle."
    verify.add_argument("file", type=Path, metavar="FILE", help="the bundle")
    words = "who may sign, as ssh-keygen(1) describes ALLOWED SIGNERS; default: any signature, or none"
    verify.add_argument("--signers", type=Path, metavar="FILE", help=words)
    verify.set_defaults(act="bundle:verify", usage_code=WRONG_USAGE)
