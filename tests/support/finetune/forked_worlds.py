"""Runs of several worlds one after another, each rank a fork of this process: torch and transformers are imported once.

Reads worlds.json in the folder given: a list of runs with ``name``, ``world_size``, ``settings``, and where wanted
``copy`` (a checkpoint to begin with, from and to), ``signal`` (rank and step of a SIGUSR1 to itself), ``full_disk`` (markers
of checkpoints cannot be written), ``bad_row`` and ``no_room`` (a rank whose rows are no good from step 3 on, or that has no
temporary folder), ``graphs`` (a stand-in for CUDA graphs is used), ``copy_engines`` (one for theirs), ``evaluate`` (by rank,
the arguments of that command, which is run instead). Writes NAME.json: the outcome of rank 0; NAME.RANK.json: the rows that
a rank trained on by step, what it was told, and what the stand-in for copy engines did.
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
from tests.support.finetune import gather_stand_in, graph_stand_in

read_rows, write_synced = steps.read_rows, writing.write_synced


def noted(seen: dict[str, list[int]], run: Any, step: int) -> Any:
    """The rows of a step, with their numbers in ``seen``: those that are really taken from the source."""
    numbers = seen.setdefault(str(step), [])

    def row(number: int) -> Any:
        numbers.append(number)
        return run.source.row(number)

    return read_rows(dataclasses.replace(run, source=dataclasses.replace(run.source, row=row)), step)


def bad_from_step_3(run: Any, step: int) -> Any:
    """As a text of a data set that is too long for a row, far from its beginning."""
    if step >= 3:
        raise InputError("an example has 99 tokens: more than row_tokens = 64")
    return read_rows(run, step)


class NoFolder:
    """As tempfile.TemporaryDirectory where there is no room."""

    def __init__(self) -> None:
        raise OSError("no room for a temporary folder")


def refused(path: Path, _text: str) -> None:
    """As a disk that is full."""
    raise OSError(f"no space left for {path.name}")


def plant(world: dict[str, Any], rank: int, seen: dict[str, list[int]]) -> None:
    """What is wrong on this rank; the rows that it reads are noted in ``seen``."""
    steps.read_rows = bad_from_step_3 if world.get("bad_row") == rank else functools.partial(noted, seen)
    writing.write_synced = refused if world.get("full_disk") else write_synced
    if world.get("no_room") == rank:
        reading.tempfile = SimpleNamespace(TemporaryDirectory=NoFolder)
    if world.get("graphs"):
        graph_stand_in.install()
    if world.get("copy_engines"):
        gather_stand_in.install()


def rank_of(world: dict[str, Any], rank: int, folder: Path, meeting: str) -> None:
    """Join the world, run, and write the outcome; must be the same on every rank."""
    size = world["world_size"]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    signalled = world.get("signal")

    def progress(step: str, _part: float | None) -> None:
        if signalled and signalled["rank"] == rank and step.startswith(f"step {signalled['step']} "):
            os.kill(os.getpid(), signal.SIGUSR1)

    seen: dict[str, list[int]] = {}
    plant(world, rank, seen)
    told: dict[str, Any] = {"rows": seen, "gathers": gather_stand_in.DONE}
    outcome: dict[str, Any] = {}
    try:
        if "evaluate" in world:
            told["code"], told["error"] = evaluated(world["evaluate"][rank], rank)
        else:
            outcome = dataclasses.asdict(finetune(preset("tiny", **world["settings"]), progress=progress))
    except (InputError, OSError) as error:
        told["error"] = str(error)
    (folder / f"{world['name']}.{rank}.json").write_text(json.dumps(told))
    if rank == 0:
        (folder / f"{world['name']}.json").write_text(json.dumps(outcome))
    if size > 1:
        dist.destroy_process_group()


def evaluated(arguments: list[str], rank: int) -> tuple[int, str]:
    """The exit code of ``evaluate`` on this rank, and what it said to standard error."""
    os.environ["RANK"] = str(rank)
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main(["evaluate", *arguments])
    return code, said.getvalue()


def run(world: dict[str, Any], folder: Path) -> None:
    """Fork its ranks and wait for them; raises SystemExit if one fails."""
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
