"""Kill a run with SIGKILL at random moments, let it resume, and compare its end with that of an uninterrupted run.

``kill_and_resume.py FOLDER SETTINGS KILLS SEED``: each run is a fork of this process, so that a start costs a second. The
last line is JSON: the number of kills, and the newest checkpoint at each of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import peft  # noqa: F401 -- before forking
from transformers import AutoModelForCausalLM  # noqa: F401 -- as above

from finetune_smoke.settings.config import preset
from finetune_smoke.training.loop import finetune


def forked(folder: Path, settings: dict[str, Any]) -> int:
    """Start a run that resumes from ``folder``; returns the process's id."""
    child = os.fork()
    if child:
        return child
    try:
        config = preset("tiny", **settings, checkpoint_dir=str(folder / "checkpoints"), resume="auto")
        outcome = finetune(config)
        (folder / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
        os._exit(0)
    except BaseException:  # noqa: BLE001 -- a fork must never go on as its parent
        traceback.print_exc()
        os._exit(1)


def to_its_end(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The outcome of an uninterrupted run, and how many seconds it took."""
    begin = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(forked(folder, settings), 0)[1])
    if code:
        sys.exit(f"an uninterrupted run exited with {code}")
    return json.loads((folder / "outcome.json").read_text()), time.monotonic() - begin


def main(folder: Path, settings: dict[str, Any], kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill ``kills`` times, then let the run end. A run that ended before its kill is checked, and another one begins.

    Every second kill waits for a new checkpoint first: on a busy machine a time alone may always come before one.
    """
    (folder / "whole").mkdir()
    whole, seconds = to_its_end(folder / "whole", settings)
    rounds, newest = 0, []
    while len(newest) < kills:
        place = folder / f"round{rounds}"
        place.mkdir(exist_ok=True)
        earliest_s = min(0.9 * whole["setup_s"], 0.5 * seconds)
        if len(newest) % 2:
            saved, delay_s = newest_step(place / "checkpoints"), rng.uniform(0.0, 0.2 * seconds)
        else:
            saved, delay_s = -1, rng.uniform(earliest_s, seconds)
        took_s = killed_after(forked(place, settings), delay_s, folder=place / "checkpoints", beyond=saved)
        if took_s is None:
            newest.append(newest_step(place / "checkpoints"))
        else:
            check(json.loads((place / "outcome.json").read_text()), whole)
            rounds += 1
            seconds = min(seconds, took_s)  # the first run may have read from a cold disk
    last, _ = to_its_end(place, settings)
    check(last, whole)
    return {"killed": len(newest), "rounds": rounds + 1, "newest_at_kill": newest}


def killed_after(child: int, seconds: float, *, folder: Path, beyond: int) -> float | None:
    """Kill ``child`` ``seconds`` after ``folder`` has a checkpoint beyond a step; the seconds it took if it ended before."""
    begin_s = time.monotonic()
    saved_s = None if beyond >= 0 else begin_s
    while saved_s is None or time.monotonic() - saved_s < seconds:
        if os.waitpid(child, os.WNOHANG)[0]:
            return time.monotonic() - begin_s
        if saved_s is None and newest_step(folder) > beyond:
            saved_s = time.monotonic()
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return None if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else seconds


def newest_step(folder: Path) -> int:
    """The newest step with a marker, 0 without one."""
    return max((int(path.parent.name[5:]) for path in folder.glob("step-*/_SUCCESS") if path.parent.suffix == ""), default=0)


def check(outcome: dict[str, Any], whole: dict[str, Any]) -> None:
    """Exit with a message unless adapters and losses are equal to the bit."""
    if (outcome["adapter_digest"], outcome["losses"]) != (whole["adapter_digest"], whole["losses"]):
        sys.exit(f"a killed run ended differently: {outcome['losses']} against {whole['losses']}, {outcome['notes']}")


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), random.Random(int(sys.argv[4])))
    print(json.dumps(result))  # noqa: T201 -- its result
