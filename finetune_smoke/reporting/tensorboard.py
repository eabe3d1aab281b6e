"""Curves for TensorBoard (``--tensorboard DIR``), written by rank 0. RESULT holds the same numbers without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finetune_smoke.reporting.outcome import Log
from finetune_smoke.settings.config import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.run import TrainingRun

CurveWriter = Callable[[int, Log], None]
"""Called after each window with its last step and the log so far."""


@contextmanager
def curve_writer(run: TrainingRun) -> Iterator[CurveWriter]:
    """A writer of the curves of ``run``, which does nothing without --tensorboard.

    Raises InputError on every rank if the curves cannot be written.
    """
    folder = run.config.tensorboard
    if folder is None:
        yield lambda _step, _log: None
        return
    writer = run.ranks.run_on_all_ranks(lambda: _writer(folder) if run.ranks.rank == 0 else None)
    if writer is None:
        yield lambda _step, _log: None
        return
    try:
        yield functools.partial(_write, writer)
    finally:
        writer.close()


def _writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 -- only there with the tensorboard package
    except ImportError as error:
        raise InputError(f"--tensorboard needs the package tensorboard (pip install tensorboard): {error}") from error
    try:
        return SummaryWriter(folder)
    except OSError as error:
        raise InputError(f"directory for TensorBoard cannot be written: {error}") from error


def _write(writer: Any, step: int, log: Log) -> None:
    """Write the steps of the last window. The log has the norms of this process, and the losses of earlier ones too."""
    window = log.clock.windows[-1]
    for at in range(window.first, window.last):
        writer.add_scalar("loss", log.losses[at], at)
        writer.add_scalar("gradient_norm", log.norms[at - step], at)
        writer.add_scalar("learning_rate", log.learning_rates[at - step], at)
    writer.add_scalar("tokens_per_s_per_gpu", window.tokens / window.seconds, step - 1)
    writer.add_scalar("step_ms", 1e3 * window.step_s, step - 1)
    writer.flush()
