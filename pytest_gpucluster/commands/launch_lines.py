"""``gpucluster launch --show``: the commands that start a run by torchrun, Slurm or Kubernetes, each part explained.

What is printed is a shell script: commands, and comments that explain them. No secret is in it.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.commands import launch
from pytest_gpucluster.config.settings import OPTIONS
from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from pytest_gpucluster.commands.launch import Job

CHECKOUT = Path(__file__).parents[2]
SBATCH = Path("deploy", "slurm", "accept.sbatch")
MANIFEST = Path("deploy", "kubernetes", "job.yaml")
PYTEST_OPTIONS = {
    "-k": "only the tests whose names fit; such a run accepts nothing",
    "--junitxml": "the JUnit file of the run, on node 0",
    "--pyargs": "the name behind it is a package, not a folder",
    **{option.name: option.help for option in OPTIONS},
}
WITH_A_VALUE = {"-k", "-m", "-o", "-p", "--junitxml", "--pyargs", *(option.name for option in OPTIONS if option.metavar)}
"""Options that may have their value as the next word."""
EXPLANATION = 40
"""Column in which an explanation begins."""


def main(chosen: argparse.Namespace) -> int:
    """Print the commands of one kind for the shape given.

    Raises:
        ConfigurationError: wrong usage.
    """
    if chosen.run:
        raise ConfigurationError("--show prints, --run starts: give one of them")
    job = launch.read_job(chosen)
    lines = KINDS[chosen.show](job)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if chosen.show == "torchrun":
        launch.say_variables(job)
    return 0


def torchrun(job: Job) -> list[str]:
    """A line for each node."""
    port = f"--master-port={job.master_port}"
    return [
        "# One line for each node. Start each on its own node, in any order.",
        *launch.torchrun_lines(job),
        "#",
        *(_part(f"{name}={value}", "threads of a rank; torchrun sets the same, and warns") for name, value in _threads(job)),
        _part(f"--nnodes={job.num_nodes}", "how many nodes there are"),
        _part(f"--nproc-per-node={job.num_local}", "how many ranks a node has: one for each GPU"),
        _part("--node-rank=...", "which node this is; node 0 has the reports"),
        _part(f"--master-addr={job.master_addr}", "node 0, as the others reach it"),
        _part(port, "a free TCP port of node 0; the others must reach it"),
        _part("-m pytest", "each rank starts pytest; rank 0 has the tests, the others measure for it"),
        *_pytest_parts(job.pytest_arguments),
        "# torchrun waits for an absent node without an end. The same with a deadline, on each node:",
        f"#   {_with_deadline(job)}",
    ]


def slurm(job: Job) -> list[str]:
    """The job of ``deploy/slurm``, and the step inside an allocation that is there already."""
    own = _own_arguments(job)
    options = [f"--nodes={job.num_nodes}", f"--gpus-per-node={job.num_local}"]
    explained = [
        _part(options[0], "how many nodes the job takes, each as a whole"),
        _part(options[1], "how many GPUs a node has; each gets a rank"),
    ]
    if job.hosts and not job.start:
        options.append(f"--nodelist={','.join(job.hosts)}")
        explained.append(_part(options[-1], "these nodes and no others"))
    launcher = _launcher_options(job)
    if launcher:
        options.append(f"--export=ALL,LAUNCH_OPTIONS={shlex.join(launcher)}")
        explained.append(_part("--export=ALL,LAUNCH_OPTIONS=...", "this environment, and options of gpucluster launch"))
    file = _template(SBATCH)
    step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--mpi=none", "gpucluster", "launch", "--run", *launcher]
    return [
        "# From a node on which Slurm takes jobs. The exit code of the job is the gate.",
        shlex.join(["sbatch", *options, file, *own]),
        "#",
        *explained,
        _part(file, "the job: whole nodes, a launcher a node, reports before the time limit"),
        *_pytest_parts(own),
        *_absent(SBATCH),
        "# In an allocation that you have already (salloc):",
        f"#   {shlex.join([*step, '--', *job.pytest_arguments])}",
    ]


def kubernetes(job: Job) -> list[str]:
    """The manifest of ``deploy/kubernetes`` with the numbers of this shape, to ``kubectl apply``."""
    file = _template(MANIFEST)
    numbers = {"completions": job.num_nodes, "parallelism": job.num_nodes, "nvidia.com/gpu": job.num_local}
    edits = {name: f"s|^\\( *{name}:\\) .*|\\1 {number}|" for name, number in numbers.items()}
    edited = "".join(f" -e {shlex.quote(edit)}" for edit in edits.values())
    return [
        "# From where kubectl reaches the cluster. The exit code of node 0's Pod is the gate.",
        f"sed{edited} {shlex.quote(file)} | kubectl apply -f -",
        "#",
        _part(f"completions: {job.num_nodes}", "how many nodes: a Pod a node, numbered by its index"),
        _part(f"parallelism: {job.num_nodes}", "all at once: they wait for each other"),
        _part(f"nvidia.com/gpu: {job.num_local}", "how many GPUs a Pod takes; each gets a rank"),
        _part(file, "an Indexed Job and the Service by which the Pods find node 0"),
        _part("kubectl apply -f -", "makes both from what sed printed"),
        *_absent(MANIFEST),
    ]


KINDS: dict[str, Callable[[Job], list[str]]] = {"torchrun": torchrun, "slurm": slurm, "kubernetes": kubernetes}


def _part(text: str, meaning: str) -> str:
    return f"# {text:<{EXPLANATION}}  {meaning}"


def _threads(job: Job) -> list[tuple[str, str]]:
    return list(launch.threads_of(job).items())


def _pytest_parts(arguments: Sequence[str]) -> list[str]:
    """Each argument of pytest, an option together with its value."""
    found, left = [], list(arguments)
    while left:
        word = left.pop(0)
        words = [word, left.pop(0)] if word in WITH_A_VALUE and left else [word]
        found.append(_part(shlex.join(words), PYTEST_OPTIONS.get(word.partition("=")[0], "goes to pytest as it is")))
    return found


def _own_arguments(job: Job) -> tuple[str, ...]:
    """Those of pytest that the job file has not."""
    arguments = job.pytest_arguments
    return arguments[len(launch.SUITE) :] if arguments[: len(launch.SUITE)] == launch.SUITE else arguments


def _launcher_options(job: Job) -> list[str]:
    """What the step cannot know from Slurm, where it was given."""
    options = [] if job.within_s == launch.JOIN_DEADLINE_S else [f"--join-deadline-s={job.within_s:g}"]
    return options if job.start or job.master_port == launch.DEFAULT_PORT else [*options, f"--master-port={job.master_port}"]


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
