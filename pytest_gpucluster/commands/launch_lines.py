"""``gpucluster launch --show``: the commands that start a run by torchrun, Slurm or Kubernetes, each part explained.

What is printed is a shell script: commands, and comments that explain them. No secret is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.commands import launch
from pytest_gpucluster.commands.launch import Job
from pytest_gpucluster.commands.sweep import read_step
from pytest_gpucluster.config.settings import OPTIONS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.lines import hosts_from

CHECKOUT = Path(__file__).parents[2]
SBATCH = Path("deploy", "slurm", "accept.sbatch")
MANIFEST = Path("deploy", "kubernetes", "job", "job.yaml")
PYTEST_OPTIONS = {
    "-k": "only the tests whose names fit; such a run accepts nothing",
    "--junitxml": "the JUnit file of the run, on node 0",
    "--pyargs": "the name behind it is a package, not a folder",
    **{option.name: option.help for option in OPTIONS},
}
WITH_A_VALUE = {"-k", "-m", "-o", "-p", "--junitxml", "--pyargs", *(option.name for option in OPTIONS if option.metavar)}
"""Options that may have their value as the next word."""
RESULTS = "--gpucluster-results"
EXPLANATION = 40
"""Column in which an explanation begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownJob:
    """What is to be shown: the job, and the options of the launcher that were given and that no scheduler can know."""

    job: Job
    launcher: tuple[str, ...] = ()

    @property
    def own_arguments(self) -> tuple[str, ...]:
        """The arguments of pytest that a template does not have."""
        arguments = self.job.pytest_arguments
        return arguments[len(launch.SUITE) :] if arguments[: len(launch.SUITE)] == launch.SUITE else arguments


def main(chosen: argparse.Namespace) -> int:
    """Print the commands of one kind for the shape given; without ``--show``, launch.

    Raises:
        ConfigurationError: wrong usage.
    """
    if not chosen.show:
        return launch.main(chosen)
    if chosen.run:
        raise ConfigurationError("--show prints, --run starts: give one of them")
    job = launch.read_job(_with_shape(chosen))
    given = {"--join-deadline-s": f"{chosen.join_deadline_s:g}", "--master-port": str(chosen.master_port)}
    typed = {word.partition("=")[0] for word in chosen.typed}
    shown = ShownJob(job=job, launcher=tuple(f"{name}={value}" for name, value in given.items() if name in typed))
    sys.stdout.write("".join(f"{line}\n" for line in KINDS[chosen.show](shown)))
    if chosen.show == "torchrun":
        launch.say_variables(job)
    return 0


def _with_shape(chosen: argparse.Namespace) -> argparse.Namespace:
    """With what the Slurm job or the hosts say: an allocation without a step will do, since nothing is started."""
    given = argparse.Namespace(**vars(chosen))
    hosts = hosts_from(chosen.hosts) if chosen.hosts else ()
    if given.nnodes is None and hosts:
        given.nnodes = len(hosts)
    if given.nnodes is None or given.nproc_per_node is None:
        step = read_step(os.environ, whole_job=True)
        if step is not None:
            launch.fill(vars(given), len(step.hosts), step.num_gpus)
            if given.nproc_per_node is None:
                raise ConfigurationError(launch.NO_GPU)
            if chosen.show == "torchrun":
                hosts, given.master_port = hosts or step.hosts, chosen.master_port or step.port
    given.hosts = ",".join(hosts) or None
    if given.master_addr is None and (hosts or given.nnodes == 1 or chosen.show != "torchrun"):
        given.master_addr = hosts[0] if hosts else launch.ONE_HOST
    return given


def torchrun(shown: ShownJob) -> list[str]:
    """A line for each node."""
    job = shown.job
    threads = launch.threads_of(job).items()
    lines = [
        "# One line for each node. Start each on its own node, in any order.",
        *launch.torchrun_lines(job),
        "#",
        *(_part(f"{name}={value}", "threads of a rank; torchrun sets the same, and warns") for name, value in threads),
        _part(f"--nnodes={job.num_nodes}", "how many nodes there are"),
        _part(f"--nproc-per-node={job.num_local}", "how many ranks a node has: one for each GPU"),
        _part("--node-rank=...", "which node this is; node 0 has the reports"),
        _part(f"--master-addr={job.master_addr}", "node 0, as the others reach it"),
        _part(f"--master-port={job.master_port}", "a free TCP port of node 0; the others must reach it"),
        _part("-m pytest", "each rank starts pytest; rank 0 has the tests, the others measure for it"),
        *_pytest_parts(job.pytest_arguments),
    ]
    if job.num_nodes == 1:
        return lines
    deadline = "# torchrun waits for an absent node without an end. The same with a deadline, on each node:"
    return [*lines, deadline, f"#   {_with_deadline(job)}"]


def slurm(shown: ShownJob) -> list[str]:
    """The job of ``deploy/slurm``, and the step inside an allocation that is there already."""
    job, launcher = shown.job, shown.launcher
    options = {
        f"--nodes={job.num_nodes}": "how many nodes the job takes, each as a whole",
        f"--gpus-per-node={job.num_local}": "how many GPUs a node has; each gets a rank",
    }
    if job.hosts:
        options[f"--nodelist={','.join(job.hosts)}"] = "these nodes and no others"
    if launcher:
        options[f"--export=ALL,LAUNCH_OPTIONS={' '.join(launcher)}"] = "this environment, and options of gpucluster launch"
    file = _template(SBATCH)
    step = ("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--mpi=none", "gpucluster", "launch", "--run", *launcher)
    return [
        "# From a node on which Slurm takes jobs. The exit code of the job is the gate.",
        shlex.join(["sbatch", *options, file, *shown.own_arguments]),
        "#",
        *(_part(shlex.quote(option), meaning) for option, meaning in options.items()),
        _part(file, "the job: tests_acceptance on whole nodes, a launcher a node, reports before the time limit"),
        *_pytest_parts(shown.own_arguments),
        *_absent(SBATCH),
        "# In an allocation that you have already (salloc):",
        f"#   {shlex.join([*step, '--', *job.pytest_arguments])}",
    ]


def kubernetes(shown: ShownJob) -> list[str]:
    """The manifest of ``deploy/kubernetes`` with the numbers of this shape, to ``kubectl apply``."""
    job, file = shown.job, _template(MANIFEST)
    level, others = _level(shown.own_arguments)
    values = {
        "GPUCLUSTER_NODES": f'"{job.num_nodes}"',
        "completions": str(job.num_nodes),
        "parallelism": str(job.num_nodes),
        "GPUCLUSTER_GPUS": f'"{job.num_local}"',
        "nvidia.com/gpu": str(job.num_local),
        **({"LEVEL": json.dumps(level)} if level else {}),
        **({"PYTEST_ADDOPTS": json.dumps(shlex.join(others))} if others else {}),
    }
    edits = "".join(f" -e {shlex.quote(edit)}" for edit in [*map(_edit, values, values.values()), *_deadline_edit(shown)])
    return [
        "# From where kubectl reaches the cluster. The Job fails unless the verdict is ACCEPTED.",
        f"sed -E{edits} {shlex.quote(file)} | kubectl apply -f -",
        "#",
        _part("GPUCLUSTER_NODES", "how many nodes there are"),
        _part("completions, parallelism", "the same number: a Pod a node, all at once, numbered by its index"),
        _part("GPUCLUSTER_GPUS, nvidia.com/gpu", "how many GPUs a Pod takes; each gets a rank"),
        *([_part("LEVEL", PYTEST_OPTIONS["--gpucluster-level"])] if level else []),
        *([_part("PYTEST_ADDOPTS", "more arguments of pytest:")] if others else []),
        *_pytest_parts(others),
        _part(file, "tests_acceptance as an Indexed Job, and the Service by which its Pods find node 0"),
        _part("kubectl apply -f -", "makes them from what sed printed"),
        *_absent(MANIFEST),
    ]


KINDS: dict[str, Callable[[ShownJob], list[str]]] = {"torchrun": torchrun, "slurm": slurm, "kubernetes": kubernetes}


def _part(text: str, meaning: str) -> str:
    return f"# {text:<{EXPLANATION}}  {meaning}"


def _pytest_parts(arguments: Sequence[str]) -> list[str]:
    """Each argument of pytest, an option together with its value."""
    found, left = [], list(arguments)
    while left:
        word = left.pop(0)
        words = [word, left.pop(0)] if word in WITH_A_VALUE and left else [word]
        found.append(_part(shlex.join(words), PYTEST_OPTIONS.get(word.partition("=")[0], "goes to pytest as it is")))
    return found


def _level(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The level, which the manifest has as a variable of its own, and the other arguments.

    Raises:
        ConfigurationError: an argument that the manifest would overrule.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpucluster-level", default="")
    found, others = parser.parse_known_args(list(arguments))
    if any(word.startswith(RESULTS) for word in others):
        raise ConfigurationError(f"leave out {RESULTS}: in a Pod the results are on the volume of the manifest")
    return found.gpucluster_level, others


def _edit(name: str, value: str) -> str:
    """The command of sed that gives a key of YAML a value, and leaves the comment behind it."""
    escaped = re.sub(r"([\\&~])", r"\\\1", value)
    return f's~^( *{name}:) *("[^"]*"|[^ #]*)~\\1 {escaped}~'


def _deadline_edit(shown: ShownJob) -> list[str]:
    """That of the launcher's own option.

    Raises:
        ConfigurationError: an option that Kubernetes decides.
    """
    if shown.job.hosts:
        raise ConfigurationError("leave out --hosts: Kubernetes chooses the nodes")
    if any(option.startswith("--master-port") for option in shown.launcher):
        raise ConfigurationError("leave out --master-port: it is that of the Service in the manifest")
    return [f"s~--join-deadline-s=[0-9.]+~{option}~" for option in shown.launcher]


def _with_deadline(job: Job) -> str:
    shape = [f"--nnodes={job.num_nodes}", f"--nproc-per-node={job.num_local}", f"--master-addr={job.master_addr}"]
    hosts = [f"--hosts={','.join(job.hosts)}"] if job.hosts else []
    words = ["gpucluster", "launch", "--run", *shape, f"--master-port={job.master_port}", *hosts]
    return f"{shlex.join(words)} --node-rank=... -- {shlex.join(job.pytest_arguments)}"


def _template(name: Path) -> str:
    """Where the file of a checkout lies: from here if below, else from the root; as in the checkout where there is none."""
    file = CHECKOUT / name
    if not file.is_file():
        return str(name)
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)


def _absent(name: Path) -> list[str]:
    if (CHECKOUT / name).is_file():
        return []
    return [f"# {name} comes with the sources of pytest-gpucluster, not with its wheel: copy it from there first."]
