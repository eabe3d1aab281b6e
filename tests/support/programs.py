"""Programs that a test needs: a test asks the program, for an installed program may still not work (an unconfigured Slurm)."""

from __future__ import annotations

import shutil
import subprocess

ANSWER_S = 60


def why_not_working(*command: str) -> str | None:
    """Why a command cannot be used here, in words; None if it ends with 0. What it prints is dropped."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed here"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} does not work here: {error}"
    if done.returncode == 0:
        return None
    said = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"{' '.join(command)} does not work here (exit code {done.returncode}): {' '.join(said)}"
