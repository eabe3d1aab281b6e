"""Curves for TensorBoard (``--tensorboard DIR``), written by rank 0. RESULT holds the same numbers without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
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
        yield _Curves(writer)
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


@dataclass(slots=True)
class _Curves:
    """Writes the new steps of a log; ``written`` counts the steps of this process that were written before."""

    writer: Any
    written: int = 0

    def __call__(self, step: int, log: Log) -> None:
        """Write the steps since the last call. The log has the norms of this process, and the losses of earlier ones too."""
        for number in range(self.written, len(log.norms)):
            at = step - len(log.norms) + number
            self.writer.add_scalar("loss", log.losses[at], at)
            self.writer.add_scalar("gradient_norm", log.norms[number], at)
            self.writer.add_scalar("learning_rate", log.learning_rates[number], at)
        self.written = len(log.norms)
        window = log.clock.windows[-1]
        self.writer.add_scalar("tokens_per_s_per_gpu", window.tokens / window.seconds, step - 1)
        self.writer.add_scalar("step_ms", 1e3 * window.step_s, step - 1)
        self.writer.flush()
