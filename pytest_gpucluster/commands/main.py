"""The ``gpucluster`` command: what is done around a run. Exit code 2 for wrong usage, 1 for a bad result."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from pytest_gpucluster.config.run_files import RESULTS_DIR
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.config.settings import OPTIONS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.fleet.simulation import FAULTS
from pytest_gpucluster.text import visible

WRONG_USAGE, OF_RECORDS = 2, 4
"""The exit codes of wrong usage: argparse's own, and that of the commands that read kept results."""
READ_RECORDS = ("report", "show", "compare", "history", "merge", "bundle", "verify")
MODULES = {
    "verify": "bundle:verify",
    "plan": "criteria:plan",
    "audit": "criteria:audit",
    "demo": "criteria:demo",
    "launch": "launch_lines",
    "kubernetes-condition": "healthcheck:condition",
}
"""Where a command is that has no module of its name with a ``main``."""
SWITCHES = frozenset(
    {"--pyargs", "--co", "--collect-only", "--lf", "--ff", *(one.name for one in OPTIONS if one.metavar is None)}
)
"""Long options after which no value comes. Of another one a value is expected."""
SHORT_WITH_VALUE = ("-k", "-m", "-p", "-c", "-o", "-n", "-r", "-W")
INTERRUPTED, NO_READER = 130, 141  # 128 + SIGINT, and SIGPIPE, as shells count


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, which has its own exit code of wrong usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.print_usage(sys.stderr)
        self.exit(_usage_code(self.prog.rpartition(" ")[2]), f"{self.prog}: error: {message}\n")


def _add_show(show: CommandParser) -> None:
    show.usage = "gpucluster show CRITERION [--limits FILE] | RESULTS [CRITERION|PLACE] [--csv]"
    show.description = "If a folder with results has a criterion's name, the folder is shown."
    words = "a criterion (busbw: all busbw[...]); or a results directory, or its results.json"
    show.add_argument("folder", type=Path, metavar="CRITERION|RESULTS", help=words)
    words = "of a criterion: a thresholds file; default: the packaged one"
    show.add_argument("--limits", type=Path, metavar="FILE", help=words)
    words = "a criterion (busbw: all busbw[...]), or a place by id, hostname, UUID or serial; default: the whole run"
    show.add_argument("subject", nargs="?", metavar="CRITERION|PLACE", help=words)
    show.add_argument("--csv", action="store_true", help="CSV: a line an outcome, then a line for every other number")


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
    compare.set_defaults(error=compare.error)


def _add_history(history: CommandParser) -> None:
    history.add_argument("folder", type=Path, metavar="DIR", help="a folder of results directories, however deep")
    history.add_argument("criterion", nargs="?", metavar="CRITERION", help="show its median and its worst value in each run")
    words = "of one GPU or node only: hostname, UUID or serial, wherever it was at the time"
    history.add_argument("--part", metavar="PART", help=words)


def _add_merge(merge: CommandParser) -> None:
    merge.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="results directories of different nodes")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the new results directory")
    merge.add_argument("--hosts", metavar="A,B,...", help="all hosts that are expected; one in no run is a gap")
    words = "print how sbatch takes the nodes that passed and excludes the others; each DIR has its node's name in Slurm"
    merge.add_argument("--exclude", action="store_true", help=words)


def _add_bundle(bundle: CommandParser) -> None:
    bundle.description = "Exit code 0: written; 1: written, but not valid; 4: not written, no file was touched."
    bundle.add_argument("folder", type=Path, metavar="RESULTS", help="the results directory of a run that has ended")
    bundle.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.zip", help="the bundle; it must not exist")
    words = "an SSH key that signs it; one with a passphrase must be in ssh-agent"
    bundle.add_argument("--key", type=Path, metavar="SSHKEY", help=words)


def _add_verify(verify: CommandParser) -> None:
    verify.description = "Exit code 0: valid; 1: not valid, or not signed by one of --signers; 4: no bundle."
    verify.add_argument("file", type=Path, metavar="FILE", help="the bundle")
    words = "who may sign, as ssh-keygen(1) describes ALLOWED SIGNERS; default: any signature, or none"
    verify.add_argument("--signers", type=Path, metavar="FILE", help=words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    chosen = _parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        code = _function(chosen.command)(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (| head); what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (ConfigurationError, OSError) as error:
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        sys.stderr.write(f"gpucluster {chosen.command}: {visible(why)}\n")
        return _usage_code(chosen.command)
    except KeyboardInterrupt:
        sys.stderr.write(f"gpucluster {chosen.command}: interrupted\n")
        return INTERRUPTED
    return code


def _parse(words: list[str]) -> argparse.Namespace:
    """Read the command line. ``typed`` has the words before ``--`` and ``beyond`` those after it, which argparse changes.

    An empty word after it is left out, as pytest would collect the current folder for it; not the value of an option, which
    would take the next word instead.
    ``run`` takes ``key=value`` anywhere between its options, which argparse cannot do in a subcommand either. So the words that
    argparse left over are added to the arguments of ``run``.
    """
    end = words.index("--") if "--" in words else len(words)
    parser, parsers = _parser()
    if not words:
        parser.error("say a command; 'gpucluster --help' lists all")
    if end and not words[0].startswith("-") and words[0] not in parsers:
        hint = did_you_mean(words[0], [*parsers])
        parser.error(visible(f"there is no command {words[0]!r}.{hint} 'gpucluster --help' lists all."))
    chosen, extra = parser.parse_known_args(words[:end])
    chosen.typed = words[:end]
    chosen.beyond = [word for before, word in pairwise(words[end:]) if word.strip() or _takes_value(before)]
    if chosen.command == "run":
        chosen.words = [*chosen.words, *(word for word in extra if not word.startswith("-"))]
        extra = [word for word in extra if word.startswith("-")]
    has_more = chosen.command in ("launch", "demo", "resume", "plan", "audit", "sweep")
    extra += [] if has_more else chosen.beyond
    if extra:
        parser = parsers[chosen.command]
        known = [name for action in parser._actions for name in action.option_strings]  # noqa: SLF001 -- no public list
        hint = did_you_mean(extra[0].partition("=")[0], known) or has_more * " Arguments of pytest stand after --."
        parser.error(f"unrecognized arguments: {' '.join(extra)}{hint and f'.{hint}'}")
    return chosen


def _takes_value(word: str) -> bool:
    """Whether the next word is the value of this one, an option of pytest or of a plugin; ``--`` itself is none."""
    is_long = word.startswith("--") and len(word) > 2 and "=" not in word
    return (is_long and word not in SWITCHES) or word in SHORT_WITH_VALUE


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, CommandParser]]:
    """The parser of all, and those of the commands."""
    words = "Tools around a run. The run itself: pytest --pyargs tests_acceptance; on several nodes: gpucluster launch --run."
    parser = argparse.ArgumentParser(prog="gpucluster", description=words)
    parser.add_argument("--version", action="version", version=f"pytest-gpucluster {version('pytest-gpucluster')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    _add_report(commands.add_parser("report", help="the reports of a run again, from its journal, and its page"))
    lint = commands.add_parser("lint", help="check thresholds files and waivers; nothing is run")
    lint.add_argument("files", type=Path, nargs="*", metavar="FILE", help="limits; default: the packaged ones")
    words = "files and folders of your own tests; default: those beside each FILE"
    lint.add_argument("--tests", type=Path, nargs="+", action="extend", metavar="PATH", help=words)
    lint.add_argument("--schema", action="store_true", help="print the JSON schema for editors instead")
    resume = commands.add_parser("resume", help="go on with a run that was killed, or that left something unmeasured")
    resume.usage = "gpucluster resume DIR [-- MORE PYTEST ARGUMENTS]"
    resume.description = "Exit code 4, and a sentence, where that run cannot go on; otherwise that of the run."
    resume.add_argument("folder", type=Path, metavar="DIR", help="the results directory of the run")
    _add_run(commands.add_parser("run", help="one measurement, or one criterion, on this machine", allow_abbrev=False))
    plan = commands.add_parser("plan", help="what would run here, with limits and seconds; nothing is measured")
    plan.usage = "gpucluster plan [--fleet NxM [--profile NAME]] [-- PYTEST ARGUMENTS]"
    plan.add_argument("--fleet", metavar="NODESxGPUS", help="for a cluster of this shape that is not here")
    audit = commands.add_parser("audit", help="judge what only needs to be read, beside jobs too; accepts nothing")
    audit.usage = "gpucluster audit [--fleet NxM [--profile NAME]] [-- PYTEST ARGUMENTS]"
    audit.description = "Takes no load, opens no GPU, needs no root. Exit code 1 where something read is bad or unread."
    audit.add_argument("--fleet", metavar="NODESxGPUS", help="of a simulated cluster of this shape")
    for one in (plan, audit):
        one.add_argument("--profile", default="h200-sxm", metavar="NAME", help="its GPU (default: h200-sxm)")
    _add_launch(commands.add_parser("launch", help="torchrun on every node, with a deadline for joining", allow_abbrev=False))
    _add_healthcheck(commands.add_parser("healthcheck", help="the health of this node for Slurm; can drain it"))
    condition = commands.add_parser("kubernetes-condition", help="that health for Kubernetes' node-problem-detector")
    condition.description = "Exit code 0: healthy; 1: something is wrong; 2: not known. Prints one line of at most 80 bytes."
    condition.add_argument("--gpus", type=_count, metavar="N", help="how many GPUs this node has")
    _add_sweep(commands.add_parser("sweep", help="each node alone, then the fabric, as jobs of Slurm", allow_abbrev=False))
    _add_demo(commands.add_parser("demo", help="the suite on a simulated fleet; no GPU is used, nothing can be accepted"))
    _add_info(commands.add_parser("info", help="what this machine shows of its GPUs, links and host; nothing is run"))
    _add_watch(commands.add_parser("watch", help="a live picture of this node, and of a run by its files; touches nothing"))
    docs = commands.add_parser("docs", help="the pages of the documentation, which are installed too")
    docs.add_argument("page", nargs="?", metavar="PAGE", help="handover, slurm, decisions/0012; default: the list")
    add = commands.add_parser
    _add_show(add("show", help="what a criterion asks and why; or what a results directory holds, also as CSV"))
    _add_compare(add("compare", help="what has changed between two runs"))
    _add_history(add("history", help="the kept runs in a folder, and the trend of a criterion"))
    _add_merge(add("merge", help="the runs of many nodes as one results directory with one verdict"))
    _add_bundle(add("bundle", help="a run as one zip file, signed if you have a key: what a customer keeps"))
    _add_verify(add("verify", help="whether a bundle is unchanged, who signed it, and whether all in it belongs together"))
    return parser, commands.choices


def _add_report(report: argparse.ArgumentParser) -> None:
    report.description = "Of a results.json, or with -o, the page alone is made, and no other file is touched."
    words = f"the results directory of the run, or a results.json; default: {RESULTS_DIR}"
    report.add_argument("folder", type=Path, nargs="?", default=Path(RESULTS_DIR), metavar="RESULTS", help=words)
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="make only the page, and put it here")
    report.add_argument("--junitxml", type=Path, metavar="FILE", help="default: junit.xml in RESULTS")
    report.add_argument("--journal", type=Path, metavar="FILE", help="a copy of the journal, for RESULTS that lost their own")
    report.add_argument("--run", help=argparse.SUPPRESS)


def _add_info(info: argparse.ArgumentParser) -> None:
    info.description = "Exit code 0: nothing is wrong; 1: something is; 3: what the view is about could not be seen."
    views = ("summary", "gpu", "links", "ib", "host", "software", "offered", "kubernetes", "all")
    info.add_argument("view", nargs="?", choices=views, default="summary", help="default: summary")
    info.add_argument("--json", action="store_true", help="everything that was read, as one JSON object")
    words = "chassis, board, adapters and GPUs by serial, as CSV or with --json; exit code 3: a serial is not known"
    info.add_argument("--inventory", action="store_true", help=words)


def _add_watch(watch: argparse.ArgumentParser) -> None:
    words = "a results directory, or a journal; default: gpucluster-results, where a run has begun there"
    watch.add_argument("source", type=Path, nargs="?", metavar="DIR", help=words)
    watch.add_argument("--interval-s", type=float, default=2.0, metavar="S", help="between two pictures (default: 2)")
    watch.add_argument("--once", action="store_true", help="one picture, after two readings")
    watch.add_argument("--plain", action="store_true", help="for a log: a block every interval; default without a terminal")


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.usage = "gpucluster demo [--fleet NxM] [--bad PART:FAULT ...] [--seed N] [--profile NAME] [-- PYTEST ARGUMENTS]"
    demo.description = f"Results: gpucluster-demo. Faults: {'; '.join(f'{kind} ({words})' for kind, words in FAULTS.items())}."
    demo.add_argument("--fleet", default="1x8", metavar="NODESxGPUS", help="the shape of the fleet (default: 1x8)")
    words = "a planted fault: node3-gpu5:slow, node7:absent"
    demo.add_argument("--bad", action="append", default=[], metavar="PART:FAULT", help=words)
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal values (default: 0)")
    demo.add_argument("--profile", default="h200-sxm", metavar="NAME", help="the GPU (default: h200-sxm)")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = "A criterion is measured by its recipe and judged; its results lie in gpucluster-run."
    words = "or path/to/file.py:FUNCTION, or the name of a criterion"
    run.add_argument("function", metavar="MODULE:FUNCTION|CRITERION", help=words)
    words = "its arguments; values as in YAML: sizes=[4096,8192]"
    run.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help=words)
    run.add_argument("--place", nargs="+", action="extend", default=[], metavar="ID", help="node0-gpu3 ...; default: all")
    words = "who shares a process group: gpu (default), host, node, domain, cluster, pair"
    run.add_argument("--per", default="gpu", metavar="WHAT", help=words)
    run.add_argument("--deadline-s", type=float, metavar="S", help="how long one call may take (default: 300)")
    run.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: rehearse, whatever is here")
    run.add_argument("--expect", metavar="nodes=1,gpus_per_node=M", help="how many GPUs (ranks on the CPU) there should be")
    run.add_argument("--inline", action="store_true", help="in this process, one place, no deadline: for a debugger")
    run.add_argument("--json", action="store_true", help="the values as one JSON object by place id")


def _add_launch(launch: argparse.ArgumentParser) -> None:
    launch.usage = "gpucluster launch [--nnodes N --nproc-per-node M --master-addr HOST] [options] -- PYTEST ARGUMENTS"
    launch.description = (
        "In a step of Slurm (srun --ntasks-per-node=1) all numbers come from Slurm, in a Pod of deploy/kubernetes from its "
        "variables, unless you give them."
    )
    launch.add_argument("--nnodes", type=int, metavar="N", help="how many nodes")
    launch.add_argument("--nproc-per-node", type=int, metavar="M", help="how many GPUs on each")
    launch.add_argument("--node-rank", type=int, metavar="R", help="which node this is, 0 to N - 1; needed with --run")
    launch.add_argument("--master-addr", metavar="HOST", help="node 0, as the others reach it")
    launch.add_argument("--master-port", type=int, metavar="P", help="default: 29500, in Slurm one of this start of the job")
    words = "hostnames in the order of node ranks, gpu-[01-16] too, or the path of a file or of an earlier run's results"
    launch.add_argument("--hosts", metavar="A,B,...", help=words)
    words = "until all nodes are there; default: 120"
    launch.add_argument("--join-deadline-s", type=float, default=120.0, metavar="S", help=words)
    launch.add_argument("--run", action="store_true", help="start it here; without it, the lines for all nodes are printed")
    words = "print the commands for torchrun (default), slurm or kubernetes, and explain each part; starts nothing"
    kinds = ("torchrun", "slurm", "kubernetes")
    launch.add_argument("--show", nargs="?", choices=kinds, const=kinds[0], help=words)


def _add_healthcheck(check: argparse.ArgumentParser) -> None:
    check.description = "Exit code 0: healthy; 1: something is wrong; 3: not everything could be read."
    words = "drain the node in Slurm with the reason, free it from a reason of ours (GPUCLUSTER_DRAIN=1 does the same)"
    check.add_argument("--drain", action="store_true", help=words)
    check.add_argument("--node", metavar="NAME", help="this node's name in Slurm; default: its hostname")
    check.add_argument("--gpus", type=_count, metavar="N", help="how many GPUs it has; default with --drain: those of its GRES")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs")
    return int(text)


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    sweep.usage = "gpucluster sweep DIR --file FILE [--nodes LIST] [--job OPTIONS] [--fabric OPTIONS] [-- ARGUMENTS OF FILE]"
    sweep.description = "For deploy/slurm/sweep.sbatch. Exit code 0: submitted; 1: no node can take a job; 2: wrong usage."
    sweep.add_argument("folder", type=Path, metavar="DIR", help="the folder of the sweep, on a path that all nodes share")
    words = "the job file; STAGE says what a job of it does"
    sweep.add_argument("--file", type=Path, required=True, metavar="FILE", help=words)
    words = "nodes by their names in Slurm: gpu-[001-256]; default: all of the partition that this job is in"
    sweep.add_argument("--nodes", default="", metavar="LIST", help=words)
    sweep.add_argument("--job", default="", metavar="OPTIONS", help="sbatch's options for the jobs that measure")
    sweep.add_argument("--fabric", metavar="OPTIONS", help="submit the last stage with these options of sbatch too")


def _usage_code(command: str) -> int:
    return OF_RECORDS if command in READ_RECORDS else WRONG_USAGE


def _function(command: str) -> Callable[[argparse.Namespace], int]:
    """What a command does. Its module is imported only now: a command loads what it needs itself."""
    module, _, name = MODULES.get(command, command).partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(import_module(f"pytest_gpucluster.commands.{module}"), name or "main")
    return found


if __name__ == "__main__":
    sys.exit(main())
