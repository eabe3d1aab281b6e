"""The runs of finetune_smoke's tests: a quick run's settings, the runs of the pair of ranks, torchrun and forked ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY

SCRIPTS = Path(__file__).parent

QUICK: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "lora_rank": 8,
    "rows": 8,
    "steps": 6,
    "window_steps": 3,
    "audit_every": 3,
    "digest_every": 3,
    "heldout_rows": 16,
    "greedy_rows": 2,
    "loss_limit": None,
    "spread_limit": 100.0,
}
"""A run of a second, too short to learn. On a busy machine its forwards of 3 ms spread widely, hence the limit."""

CHEAP = {**QUICK, "audit_every": 0, "greedy_rows": 0, "restore_check": False}
"""Without what takes longer than the training itself."""

ONE_RANK = {
    "base": "base_digest",
    "base-late": "base_digest",
    "bitflip": "lock_step",
    "bitflip-exp": "lock_step",
    "bitflip-late": "lock_step",
    "scale": "lock_step",
    "zero": "lock_step",
    "noise": "lock_step",
    "signflip": "lock_step",
    "post-bitflip": "adapter_digest",
    "post-bitflip-once": "adapter_digest",
    "post-scale": "adapter_digest",
    "post-signflip": "adapter_digest",
    "wrongdata": "data_digest",
    "dupdata": "data_digest",
    "straggler": "step_time_spread",
    "truncate-ckpt": "restore",
}
"""Faults of one rank, and the check that finds each: the table of docs/finetune/checks.md."""

RUNS: dict[str, dict[str, Any]] = {
    "clean": {},
    "lr0": {"fault": "lr0"},
    "frozen": {"fault": "frozen"},
    "noallreduce": {"fault": "noallreduce"},
    "base": {"fault": "base:1"},
    "base-late": {"fault": "base-late:1"},
    "bitflip": {"fault": "bitflip:1"},
    "bitflip-exp": {"fault": "bitflip-exp:0"},
    "bitflip-late": {"fault": "bitflip-late:1"},
    "scale": {"fault": "scale"},
    "zero": {"fault": "zero"},
    "noise": {"fault": "noise"},
    "signflip": {"fault": "signflip"},
    "post-bitflip": {"fault": "post-bitflip:1"},
    "post-bitflip-once": {"fault": "post-bitflip-once:1", "steps": 12, "window_steps": 12},
    "post-scale": {"fault": "post-scale"},
    "post-signflip": {"fault": "post-signflip"},
    "wrongdata": {"fault": "wrongdata:1"},
    "dupdata": {"fault": "dupdata:1"},
    "dupdata-of-rank-0": {"fault": "dupdata:0"},
    "straggler": {"fault": "straggler:1", "spread_limit": 1.75},
    "truncate-ckpt": {"fault": "truncate-ckpt:1"},
    "eight-steps": {"steps": 8, "layers": 2},
    "fsdp": {"steps": 8, "layers": 2, "strategy": "fsdp"},
    "fsdp-passes": {
        "steps": 8,
        "layers": 2,
        "strategy": "fsdp",
        "rows": 4,
        "accumulation": 2,
        "gradient_checkpointing": True,
    },
    "fsdp-offload": {"steps": 8, "layers": 2, "strategy": "fsdp", "cpu_offload": True},
    "fsdp-bitflip": {"strategy": "fsdp", "fault": "bitflip:1"},
    "fsdp-base-late": {"strategy": "fsdp", "fault": "base-late:1"},
    "fsdp-noallreduce": {"strategy": "fsdp", "fault": "noallreduce"},
    "fsdp-straggler": {"strategy": "fsdp", "fault": "straggler:1", "spread_limit": 1.75},
    "packed": {"packed": True, "row_tokens": 128, "rows": 2, "rows_shared": False},
    "checkpointed": {"checkpoint_every": 3},
    "resumed": {"checkpoint_every": 3, "resume": "auto"},
}
"""The runs of the pair of ranks, one after the other; `resumed` continues from step 3 of `checkpointed`."""


def options(settings: dict[str, Any]) -> list[str]:
    """``settings`` as options of the command line."""
    found = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        found += [option if value else f"--no-{option[2:]}"] if isinstance(value, bool) else [f"{option}={value}"]
    return found


def result(printed: str) -> dict[str, Any]:
    """The RESULT in the last line of what a run printed."""
    found: dict[str, Any] = json.loads(printed.splitlines()[-1].removeprefix("RESULT "))
    return found


def failed(outcome: dict[str, Any]) -> set[str]:
    """Names of the checks that did not pass."""
    return {name for name, check in outcome["checks"].items() if not check["passed"]}


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of a file; its size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def torchrun(*arguments: str | Path, timeout_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module or script under torchrun as two gloo ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, arguments)]
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY), "PYTHONFAULTHANDLER": "1"}
    surroundings = {**os.environ, **ours}
    return subprocess.run(
        command, env={**surroundings, **environment}, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def forked(folder: Path, worlds: list[dict[str, Any]], *, timeout_s: float = 300) -> dict[str, dict[str, Any]]:
    """Run ``worlds`` in ``folder``, one after the other (forked_worlds.py); returns their outcomes by name."""
    (folder / "worlds.json").write_text(json.dumps(worlds))
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "forked_worlds.py", folder],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {each["name"]: json.loads((folder / f"{each['name']}.json").read_text()) for each in worlds}
