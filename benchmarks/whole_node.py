"""All that has to be seen once on a node of many GPUs, in two calls of at most 9 minutes each.

    python3 benchmarks/whole_node.py measure --out DIR    acceptance with self-test; all collectives beside nccl-tests' formulas
    python3 benchmarks/whole_node.py faults --out DIR     two halves as two nodes; a GPU that is shared; faults inside
                                                          collectives; slowed GPUs, found by their siblings

Each part leaves its terminal, and JUnit file and results.json where it has them, in DIR/PART. DIR/CALL.json says of each part
how it ended, what its verdict was, and the seconds of its start-up and bookkeeping. A part that is too slow is ended, and the
next one begins; what does not fit into --within-s is not begun, and said so. The exit code is 1 unless every part ended as it
should. Without GPUs it is a rehearsal with 4 ranks on the CPU. --gpus N takes the first N (of 8, to try it on fewer).

NVLink SHARP stays as the machine has it. Where NCCL_NVLS_ENABLE=0 forbids it, 8 GPUs cannot reach the handover's 400 GB/s:
this run's limits then ask for 340, and results.json tells that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
WITHIN_S = 530.0
"""A command on a lent machine may take 10 minutes; this leaves time to copy what was written."""
LEAST_S = 20.0
"""No part is begun with less."""
GRACE_S = 15.0
"""From SIGINT, at which a run writes its reports, to SIGKILL."""
LATER_S = 5.0
"""The other torchrun of a pair ends a moment later by itself; after an interrupt too."""
STAYS_S = "60"
"""A competitor, through a measurement and its second one at the end: 48 s on 4 H200."""
BETWEEN = "inter_node or transport or nodes_reachable or slow_rail or memory_scaling_cluster"
LIMITS = """extends: packaged
profiles:
  halves: {{inherits: lab-2x2, gpu: h200-sxm, nodes: 2, gpus_per_node: {half}}}
  nvls-off: {{inherits: h200-sxm, gpu: h200-sxm, nodes: 1, gpus_per_node: 8}}
criteria:
  "busbw[all_reduce]":
    profiles:
      nvls-off:
        above: {{any: 340}}
        why: NVLink SHARP is switched off on this machine, so rings carry it.
        source: about 367 without NVLS says the handover; less 7 %
"""
FORGOTTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Processes that start together in one folder, and what their end has to look like.

    ``expects`` gets the folder and the exit codes, and returns what is wrong; empty if nothing is. ``first`` is the process
    whose end ends the part.
    """

    name: str
    processes: tuple[tuple[str, ...], ...]
    variables: tuple[Mapping[str, str], ...]
    within_s: float
    expects: Callable[[Path, Sequence[int]], str]
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One part, afterwards; ``wrong`` is empty where it ended as it should."""

    part: str
    wrong: str
    seconds: float
    exit_codes: list[int] = field(default_factory=list)
    verdict_line: str | None = None
    timings: dict[str, float] | None = None
    culprits: list[str] = field(default_factory=list)


# --- Parts ---


def parts_of(call: str, *, gpus: int, out: Path) -> list[Part]:
    """The parts of one call; ``gpus`` is 0 for a rehearsal."""
    ranks = gpus or 4
    limits = out / "limits.yaml"
    limits.write_text(LIMITS.format(half=ranks // 2), encoding="utf-8")
    if call == "measure":
        return [acceptance(ranks, limits, gpus=gpus), *([beside_the_formulas(ranks)] if ranks > 1 else [])]
    if ranks < 4:
        return []
    return [two_halves(ranks, limits, gpus=gpus), *([shared_gpu(ranks)] if gpus else []), planted(ranks), slowed(gpus=gpus)]


def acceptance(ranks: int, limits: Path, *, gpus: int) -> Part:
    """The whole suite at level standard, as on the day of a handover."""
    own = gpus == 8 and os.environ.get("NCCL_NVLS_ENABLE") == "0"
    chosen = (f"--gpucluster-thresholds={limits}", "--gpucluster-profile=nvls-off") if own else ()
    command = (*torchrun(ranks), *suite("--gpucluster-level=standard", "--gpucluster-selftest", *chosen))
    return Part(name="acceptance", processes=(command,), variables=({},), within_s=360, expects=zero)


def beside_the_formulas(ranks: int) -> Part:
    """Six collectives at six sizes."""
    command = (*torchrun(ranks), str(BENCHMARKS / "reference_collectives.py"), "--json", "collectives.json")
    return Part(name="collectives", processes=(command,), variables=({},), within_s=240, expects=zero)


def two_halves(ranks: int, limits: Path, *, gpus: int) -> Part:
    """Two torchruns of one machine stand for two nodes; between them NCCL has sockets only."""
    port, half = free_port(), ranks // 2
    chosen = (f"--gpucluster-thresholds={limits}", "--gpucluster-profile=halves") if gpus else ()
    processes, variables = [], []
    for node in (0, 1):
        place = ("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
        processes.append((*torchrun(half, *place), *suite("--gpucluster-level=standard", "-k", BETWEEN, *chosen)))
        visible = ",".join(map(str, range(node * half, node * half + half))) if gpus else ""
        variables.append({"NCCL_HOSTID": f"half{node}", "CUDA_VISIBLE_DEVICES": visible})
    return Part(name="halves", processes=tuple(processes), variables=tuple(variables), within_s=200, expects=nothing_failed)


def shared_gpu(ranks: int) -> Part:
    """Somebody computes on the last GPU while all are measured, twice: that GPU, and no other one, is not idle.

    Who leaves sooner costs that GPU nothing: it is measured again at the end, and passes with a remark.
    """
    competitor = (sys.executable, str(BENCHMARKS / "competitor.py"), "--gpu", str(ranks - 1), "--seconds", STAYS_S)
    command = (*torchrun(ranks), *suite("-k", "test_bf16_sustained or test_straggler and bf16_sustained"))
    wanted = f"node0-gpu{ranks - 1}"

    def named(folder: Path, _exit_codes: Sequence[int]) -> str:
        found = culprits_of(folder)
        return "" if found and set(found) == {wanted} else f"named {', '.join(found) or 'nobody'}, not {wanted} alone"

    return Part(name="shared-gpu", processes=(command, competitor), variables=({}, {}), within_s=100, expects=named)


def planted(ranks: int) -> Part:
    """Ranks that raise, die or hang inside a collective; a healthy collective after each."""
    command = (
        *torchrun(ranks),
        "-m",
        "pytest",
        "--gpucluster",
        "test_planted.py",
        "--junitxml=junit.xml",
        "-p",
        "no:cacheprovider",
    )
    return Part(name="planted", processes=(command,), variables=({},), within_s=150, expects=each_fault_and_its_twin)


def slowed(*, gpus: int) -> Part:
    """GPUs that are slowed by a known amount, found by their siblings."""
    rounds = ("--repeats", "3", "--slowdowns", "5", "10", "--limit-s", "110") if gpus else ("--repeats", "2", "--dry-run")
    command = (sys.executable, str(BENCHMARKS / "sensitivity.py"), "--json", "slowed.json", *rounds)
    return Part(name="slowed", processes=(command,), variables=({},), within_s=140, expects=zero)


def torchrun(ranks: int, *place: str) -> tuple[str, ...]:
    """The launcher, by this interpreter."""
    return (sys.executable, "-m", "torch.distributed.run", *(place or ("--standalone",)), f"--nproc-per-node={ranks}")


def suite(*options: str) -> tuple[str, ...]:
    """The acceptance suite, from any folder."""
    return ("-m", "pytest", str(ROOT / "tests_acceptance"), "--junitxml=junit.xml", "-p", "no:cacheprovider", *options)


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- What an end has to look like ---


def zero(_folder: Path, exit_codes: Sequence[int]) -> str:
    """Every process says that all is well."""
    return "" if not any(exit_codes) else f"exit codes {', '.join(map(str, exit_codes))}"


def outcomes_of(folder: Path) -> dict[str, str]:
    """Outcome of each testcase but the verdict's: ``passed``, ``failure``, ``error`` or ``skipped``."""
    cases = ET.parse(folder / "junit.xml").iter("testcase")  # noqa: S314 -- written by this run
    found = {case.get("name", ""): next((one.tag for one in case if one.tag in BAD), "passed") for case in cases}
    return {name: outcome for name, outcome in found.items() if name != "gpucluster.verdict"}


BAD = ("failure", "error", "skipped")


def nothing_failed(folder: Path, _exit_codes: Sequence[int]) -> str:
    """What was chosen passed, or does not apply; a part of a suite is never accepted, so its exit code says nothing."""
    outcomes = outcomes_of(folder)
    bad = sorted(name for name, outcome in outcomes.items() if outcome in ("failure", "error"))
    if bad:
        return f"not passed: {', '.join(bad[:5])}"
    return "" if "passed" in outcomes.values() else "nothing passed"


def each_fault_and_its_twin(folder: Path, _exit_codes: Sequence[int]) -> str:
    """Every planted fault is an error, and everything after it passes."""
    outcomes = outcomes_of(folder)
    healthy = {name for name in outcomes if name.startswith(("test_after", "test_before"))}
    wrong = sorted(name for name, outcome in outcomes.items() if outcome != ("passed" if name in healthy else "error"))
    if wrong:
        return f"not as planted: {', '.join(f'{name} {outcomes[name]}' for name in wrong[:5])}"
    return "" if len(healthy) > 1 and len(outcomes) > len(healthy) else "nothing was planted"


def culprits_of(folder: Path) -> list[str]:
    """The places that results.json names."""
    with suppress(OSError, ValueError):
        culprits = json.loads((folder / "gpucluster-results" / "results.json").read_text(encoding="utf-8"))["culprits"]
        return [culprit["place"]["id"] if culprit["place"] else "nobody" for culprit in culprits]
    return []


# --- Running ---


def run(part: Part, folder: Path, *, left_s: float) -> Ended:
    """Run one part in its own folder, and end all that it started."""
    if left_s < LEAST_S:
        return Ended(part=part.name, wrong="not begun: the time was over", seconds=0.0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if part.name == "planted":
        shutil.copy(ROOT / "tests" / "faults" / "planted_ranks.py", folder / "test_planted.py")
    start_s = time.monotonic()
    children = [start(part, index, folder) for index in range(len(part.processes))]
    try:
        children[part.first].wait(min(part.within_s, left_s))
        late = ""
    except subprocess.TimeoutExpired:
        late = f"ended after {min(part.within_s, left_s):.0f} s"
    finally:
        exit_codes = [end(child, grace_s=GRACE_S if index == part.first else LATER_S) for index, child in enumerate(children)]
    ended = Ended(part=part.name, wrong=late, seconds=round(time.monotonic() - start_s, 1), exit_codes=exit_codes)
    try:
        ended = replace(ended, wrong=late or part.expects(folder, exit_codes))
    except (OSError, ET.ParseError) as error:
        ended = replace(ended, wrong=f"{type(error).__name__}: {error}")
    return tidied(ended, folder)


def start(part: Part, index: int, folder: Path) -> subprocess.Popen[bytes]:
    """One process in a group of its own; the first one's terminal is ``terminal.txt``."""
    kept = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
    path = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    name = "terminal.txt" if index == part.first else f"terminal{index}.txt"
    with (folder / name).open("wb") as terminal:
        return subprocess.Popen(  # noqa: S603 -- our own commands
            part.processes[index],
            cwd=folder,
            env={**kept, "PYTHONPATH": path, **part.variables[index]},
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(child: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """The exit code, after all of its group is gone."""
    if child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(LATER_S)
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
    return child.returncode if child.returncode is not None else -signal.SIGKILL


def tidied(ended: Ended, folder: Path) -> Ended:
    """Adds what results.json says, and moves that file up; logs and journals are not kept."""
    results = folder / "gpucluster-results" / "results.json"
    if not results.exists():
        return ended
    said: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    told = replace(ended, verdict_line=said["verdict_line"], timings=said["timings"], culprits=culprits_of(folder))
    results.replace(folder / "results.json")
    shutil.rmtree(folder / "gpucluster-results")
    return told


def count_gpus() -> int:
    """CUDA's GPUs, counted in a process of its own: this one keeps no context on them."""
    command = (sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)  # noqa: S603


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one call's parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("call", choices=("measure", "faults"))
    parser.add_argument("--out", type=Path, required=True, help="where everything is left")
    parser.add_argument("--gpus", type=int, help="how many to take (default: all; 0 for a rehearsal)")
    parser.add_argument("--within-s", type=float, default=WITHIN_S, help="for all parts together (default: %(default)g)")
    parser.add_argument("--only", nargs="+", help="some of the parts")
    options = parser.parse_args(arguments)
    gpus = count_gpus() if options.gpus is None else options.gpus
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))) if gpus else ""
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + options.within_s
    ended = []
    for part in parts_of(options.call, gpus=gpus, out=out):
        if options.only and part.name not in options.only:
            continue
        print(f"{part.name}: begins, {end_s - time.monotonic():.0f} s left", flush=True)
        ended.append(run(part, out / part.name, left_s=end_s - time.monotonic()))
        print(
            f"{part.name}: {ended[-1].wrong or 'as it should'}, {ended[-1].seconds} s {ended[-1].verdict_line or ''}",
            flush=True,
        )
    said = {"call": options.call, "gpus": gpus, "parts": [asdict(one) for one in ended]}
    (out / f"{options.call}.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    if not ended:
        print(f"nothing to run on {gpus} GPUs: it takes 4 for faults", file=sys.stderr)
    return int(not ended or any(one.wrong for one in ended))


if __name__ == "__main__":
    sys.exit(main())
