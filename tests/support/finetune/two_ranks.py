"""A rank of two: join a gloo group, make each run of runs.json in it, and write the outcomes of this rank."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from finetune_smoke.settings.config import preset
from finetune_smoke.training.loop import finetune


def main(folder: Path) -> None:
    """Make all runs. The group is ours: finetune must use it and must not destroy it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    outcomes = {}
    for name, settings in json.loads((folder / "runs.json").read_text()).items():
        if name == "resumed" and rank == 0:
            shutil.rmtree(Path(settings["checkpoint_dir"]) / "step-6")
        dist.barrier()
        outcomes[name] = dataclasses.asdict(finetune(preset("tiny", **settings)))
        assert dist.is_initialized(), "the group was not made by finetune"
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
    os._exit(0)  # as finetune_smoke itself exits


if __name__ == "__main__":
    main(Path(sys.argv[1]))
