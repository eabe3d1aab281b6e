"""The flight recorder of a worker that hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.worker import flight_recorder
from tests.support import REPOSITORY

HANGS = """
import signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
import torch, torch.distributed as dist
from pytest_gpucluster.worker import flight_recorder
flight_recorder.answer_requests(Path(sys.argv[1]))
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
for _ in range(2):
    dist.all_reduce(torch.ones(4))
print("hangs", flush=True)
store.wait(["never"])  # inside C++
"""


@pytest.mark.e2e
def test_main_thread_in_a_wait(tmp_path: Path) -> None:
    """It answers all the same, with the last collectives."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    file = tmp_path / "flight.json"
    command = [sys.executable, "-c", HANGS, str(file)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hangs\n"
            flight_recorder.ask(process.pid, file)
            deadline_s = time.monotonic() + 120
            while not (told := flight_recorder.summarize(file)) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        finally:
            process.kill()
    assert told.splitlines() == ["all_reduce 1: scheduled, Float [4]", "all_reduce 2: scheduled, Float [4]"]


def entry(number: int, **changes: Any) -> dict[str, Any]:
    """As PyTorch writes it."""
    told = {"profiling_name": "nccl:all_reduce", "state": "completed", "input_dtypes": ["Float"], "input_sizes": [[8]]}
    return {**told, "collective_seq_id": number, **changes}


def test_the_last_few(tmp_path: Path) -> None:
    """The newest stands last."""
    file = tmp_path / "flight.json"
    file.write_text(json.dumps({"entries": [*(entry(number) for number in range(1, 6)), entry(6, state="started")]}))
    assert flight_recorder.summarize(file).splitlines()[0] == "all_reduce 3: completed, Float [8]"
    assert flight_recorder.summarize(file).splitlines()[-1] == "all_reduce 6: started, Float [8]"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"entries": 1}', '{"entries": [{"profiling_name": "x"}]}', "null"])
def test_no_answer_is_no_evidence(tmp_path: Path, text: str) -> None:
    """A recorder that is off, or writes something else, adds nothing and breaks nothing."""
    file = tmp_path / "flight.json"
    file.write_text(text)
    assert flight_recorder.summarize(file) == ""
    assert flight_recorder.summarize(tmp_path / "absent") == ""


def test_asking_nobody() -> None:
    """A process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    flight_recorder.ask(gone.pid, Path("absent"))
