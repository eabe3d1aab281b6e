"""The environment that torchrun gives a process; None without torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import visible

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One rank of a torchrun job, as its environment describes it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int = 0
    master_addr: str
    master_port: int
    run_id: str = "none"
    agent_hosts_store: bool
    restart_count: int = 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes. Torchrun starts equally many ranks on each."""
        return max(1, self.world_size // self.local_world_size)


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the torchrun job that this process belongs to; None if torchrun did not start it.

    Raises:
        ConfigurationError: some of torchrun's variables are set and others are not, or one is no number.
    """
    if not any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return None
    missing = [name for name in REQUIRED if name not in environment]
    if missing:
        there = [name for name in REQUIRED if name in environment]
        raise ConfigurationError(
            f"{', '.join(there)} set without {', '.join(missing)}: this is half of torchrun's environment, so there is no "
            "store to meet the other ranks in. Start with torchrun, or unset these variables to use this machine alone."
        )
    numbers = {name: _number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return Launch(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", default=numbers["WORLD_SIZE"]),
        group_rank=_number(environment, "GROUP_RANK", default=0),
        master_addr=environment["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
        run_id=environment.get("TORCHELASTIC_RUN_ID", "none"),
        agent_hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=_number(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def private_folder() -> Path | None:
    """The folder that torchrun made for this attempt of all ranks of this node, which no other user can enter.

    None where there is none, as with ``--log-dir /dev/null``. torchrun 2.13 names the error file of a rank
    ``<log dir>/<run id>_<random>/attempt_<n>/<local rank>/error.json`` and makes the second folder with mkdtemp.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or len(Path(path).parents) < 4:
        return None
    attempt = Path(path).parents[1]
    with contextlib.suppress(OSError):
        own = attempt.parent.lstat()
        if stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o077:
            return attempt
    return None


def show_last(lines: str) -> None:
    """Write the last lines of a run on this node's screen."""
    with contextlib.suppress(OSError):
        sys.stdout.write(visible(lines) + "\n")
        sys.stdout.flush()


def write_error_file(text: str, code: int) -> None:
    """Give torchrun what its closing banner shows as the cause, in its own format.

    Without this file, the banner of a rank that leaves non-zero says "To enable traceback see", and a link.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or code == 0:
        return
    message = {"message": visible(text), "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number; torchrun sets it, nobody else should") from None
