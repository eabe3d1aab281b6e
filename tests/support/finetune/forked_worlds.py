"""Runs of several worlds one after another. Each rank is a fork of this process, which imports torch only once.

Reads worlds.json in the given folder: a list of runs with ``name``, ``world_size``, ``settings``, and optionally:

* ``copy``: a checkpoint to begin with, as (from, to);
* ``signal``: rank and step at which a rank sends SIGUSR1 to itself;
* ``full_disk``: markers of checkpoints cannot be written;
* ``bad_row``: a rank whose rows are invalid from step 3 on; ``no_room``: a rank without a temporary folder;
* ``graphs``: use the stand-in for CUDA graphs;
* ``evaluate``: by rank, the arguments of that command, which is run instead.

Writes NAME.json with the outcome of rank 0, and NAME.RANK.json with the rows that the rank trained on by step, its error,
and the calls of the stand-in for copy engines.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft  # noqa: F401 -- before forking
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM  # noqa: F401 -- as above

from finetune_smoke.__main__ import main
from finetune_smoke.checkpoints import reading, writing
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training import steps
from finetune_smoke.training.loop import finetune
from tests.support.finetune import graph_stand_in

read_rows, write_synced = steps.read_rows, writing.write_synced


def noting_rows(seen: dict[str, list[int]], run: Any, step: int) -> Any:
    """The rows of a step; ``seen`` gets the numbers of those that are really taken from the source."""
    numbers = seen.setdefault(str(step), [])

    def row(number: int) -> Any:
        numbers.append(number)
        return run.source.row(number)

    return read_rows(dataclasses.replace(run, source=dataclasses.replace(run.source, row=row)), step)


def bad_from_step_3(run: Any, step: int) -> Any:
    """The rows of a step; from step 3 on InputError, as for an example that is too long."""
    if step >= 3:
        raise InputError("an example has 99 tokens: more than row_tokens = 64")
    return read_rows(run, step)


class NoFolder:
    """Replaces tempfile.TemporaryDirectory on a full disk."""

    def __init__(self) -> None:
        raise OSError("no room for a temporary folder")


def refused(path: Path, content: bytes) -> None:
    """Replaces write_synced on a disk without room for a marker."""
    if path.name == "_SUCCESS":
        raise OSError(f"no space left for {path.name}")
    write_synced(path, content)


def plant(world: dict[str, Any], rank: int, seen: dict[str, list[int]]) -> None:
    """Plant what is wrong on this rank; ``seen`` gets the rows that it reads."""
    steps.read_rows = bad_from_step_3 if world.get("bad_row") == rank else functools.partial(noting_rows, seen)
    writing.write_synced = refused if world.get("full_disk") else write_synced
    if world.get("no_room") == rank:
        reading.tempfile = SimpleNamespace(TemporaryDirectory=NoFolder)
    if world.get("graphs"):
        graph_stand_in.install()


def rank_of(world: dict[str, Any], rank: int, folder: Path, meeting: str) -> None:
    """Join the world, run, and write the outcome and this rank's report."""
    size = world["world_size"]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    signalled = world.get("signal")

    def progress(step: str, _part: float | None) -> None:
        if signalled and signalled["rank"] == rank and step.startswith(f"step {signalled['step']} "):
            os.kill(os.getpid(), signal.SIGUSR1)

    seen: dict[str, list[int]] = {}
    plant(world, rank, seen)
    report: dict[str, Any] = {"rows": seen}
    outcome: dict[str, Any] = {}
    try:
        if "evaluate" in world:
            report["code"], report["error"] = evaluated(world["evaluate"][rank], rank)
        else:
            outcome = dataclasses.asdict(finetune(preset("tiny", **world["settings"]), progress=progress))
    except (InputError, OSError) as error:
        report["error"] = str(error)
    (folder / f"{world['name']}.{rank}.json").write_text(json.dumps(report))
    if rank == 0:
        (folder / f"{world['name']}.json").write_text(json.dumps(outcome))
    if size > 1:
        dist.destroy_process_group()


def evaluated(arguments: list[str], rank: int) -> tuple[int, str]:
    """The exit code of ``evaluate`` on this rank, and its standard error."""
    os.environ["RANK"] = str(rank)
    printed = io.StringIO()
    with redirect_stderr(printed), redirect_stdout(io.StringIO()):
        code = main(["evaluate", *arguments])
    return code, printed.getvalue()


def run(world: dict[str, Any], folder: Path) -> None:
    """Fork the ranks of a world and wait for them; raises SystemExit if one fails."""
    for source, target in world.get("copy", []):
        shutil.copytree(source, target)
    with tempfile.TemporaryDirectory() as meeting:
        children = []
        for rank in range(world["world_size"]):
            child = os.fork()
            if child == 0:
                try:
                    rank_of(world, rank, folder, f"{meeting}/store")
                    os._exit(0)
                except BaseException:  # noqa: BLE001 -- a fork must never go on as its parent
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{world['name']}: exit codes {codes}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    place = Path(sys.argv[1])
    for each in json.loads((place / "worlds.json").read_text()):
        run(each, place)
