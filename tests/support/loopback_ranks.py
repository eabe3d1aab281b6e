"""Ranks of one group over gloo on the loopback. One process imports torch and the test's own file, and forks the ranks.

A test file calls :func:`results_of_ranks` in a fixture, and :func:`fork_ranks` where it is run as a program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 150.0
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def results_of_ranks(file: str, folder: Path, *, ranks: int) -> list[dict[str, Any]]:
    """What each rank of the program in ``file`` returned, in rank order.

    Raises:
        AssertionError: a rank failed; its traceback is in the output of the test.
        subprocess.TimeoutExpired: they did not end within :data:`DEADLINE_S`.
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": path}
    started = subprocess.Popen([sys.executable, file, str(folder)], env=environment, start_new_session=True)
    try:
        assert started.wait(timeout=DEADLINE_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def fork_ranks(program: Callable[[int, Path], dict[str, Any]], *, ranks: int) -> None:
    """Run ``program(rank, folder)`` on each rank of a group, and write what it returns. Exits with 1 if a rank failed."""
    folder = Path(sys.argv[1])
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
                found = program(rank, folder)
                (folder / f"rank{rank}.json").write_text(json.dumps(found, allow_nan=False))
                dist.barrier()
                dist.destroy_process_group()
                os._exit(0)
            except BaseException:  # noqa: BLE001 -- a fork must never go on as its parent
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    sys.exit(any(os.waitstatus_to_exitcode(os.wait()[1]) for _ in children))
