"""The command line of finetune_smoke; rank 1 kills itself after step 6 of the first start, before its checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from finetune_smoke.__main__ import main
from finetune_smoke.training import loop

progress_text = loop._progress_text


def progress(config: Any, step: int, log: Any) -> str:
    """Kill this process after step 6, when the checkpoint of step 4 is complete."""
    if step == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return progress_text(config, step, log)


if __name__ == "__main__":
    loop._progress_text = progress
    sys.exit(main())
