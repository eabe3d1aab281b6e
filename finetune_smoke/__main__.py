"""Command line: ``python -m finetune_smoke`` on one GPU or CPU, ``torchrun ... -m finetune_smoke`` on many.

``finetune_smoke evaluate`` scores an adapter against its base. ``finetune_smoke preprocess`` makes the rows of a run
before it starts. Rank 0 ends its standard output with the line ``RESULT {json}``. Exit code 0: the loss is below its limit
(if the preset promises one) and every check passed; 1: the loss or a check failed; 2: unusable input; 3: stopped by a
signal with a checkpoint, to be resumed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from finetune_smoke.reporting import report
from finetune_smoke.settings import options
from finetune_smoke.settings.config import Config, InputError, OwnInputError

GOOD, NOT_GOOD, BAD_INPUT, STOPPED = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with ``arguments`` (default: the process's own) and return the exit code; torchrun's file gets what it raises."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return _main(arguments)
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415 -- torch takes seconds

    code = record(_main)(arguments)
    return GOOD if code is None else code  # record returns None where --help left


def _main(arguments: Sequence[str] | None) -> int:
    first = int(os.environ.get("RANK", "0")) == 0
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = {"evaluate": _evaluate, "preprocess": _preprocess}.get(words[0] if words else "", _train)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when CUDA starts
    try:
        return command(words if command is _train else words[1:], first=first)
    except InputError as error:
        if first or isinstance(error, OwnInputError):
            sys.stderr.write(f"finetune_smoke: {error}\n")
        else:
            options.wait_for_rank_0()
        return BAD_INPUT


def parse(arguments: Sequence[str] | None, *, quiet: bool = False) -> Config:
    """The Config that the command line of a training asks for; exits with code 2 on wrong usage, silently if ``quiet``."""
    return options.config_of(options.settings(arguments, quiet=quiet))


def _train(arguments: Sequence[str], *, first: bool) -> int:
    config = parse(arguments, quiet=not first)
    from finetune_smoke.training.loop import finetune  # noqa: PLC0415 -- torch takes seconds; options are checked first

    with _progress_display(first=first) as progress:
        outcome = finetune(config, progress=progress)
    if first:
        _print_line(report.summary(config, outcome))
        _print_line(report.line(report.result(config, outcome)))
    if outcome.problems():
        return NOT_GOOD
    return STOPPED if outcome.stopped else GOOD


def _evaluate(arguments: Sequence[str], *, first: bool) -> int:
    given = options.settings(arguments, quiet=not first, command="evaluate")
    from finetune_smoke import ranks  # noqa: PLC0415 -- torch takes seconds; options are checked first
    from finetune_smoke.evaluation import score_adapter  # noqa: PLC0415 -- torch takes seconds; options are checked first

    with _progress_display(first=first) as progress, ranks.all_ranks() as members:
        source = members.run_on_all_ranks(lambda: score_adapter.find_adapter(given))
        config = members.run_on_all_ranks(lambda: score_adapter.config_of(source, given))
        scores = score_adapter.score(config, source, members, progress=progress or (lambda _step, _fraction: None))
    if first:
        _print_line(score_adapter.table(scores))
        _print_line(report.line({"command": "evaluate", **dataclasses.asdict(scores)}))
    return GOOD


def _preprocess(arguments: Sequence[str], *, first: bool) -> int:
    given = options.settings(arguments, quiet=not first, command="preprocess")
    ranks = str(given.pop("world_size", os.environ.get("WORLD_SIZE", "1")))
    if not ranks.isdecimal() or not int(ranks):
        raise InputError(f"world size {ranks!r}: a number of ranks is needed")
    config = options.config_of(given)
    if config.scratch is None:
        raise InputError("preprocess needs --scratch DIR")
    from finetune_smoke.data import batches, cache, hub  # noqa: PLC0415 -- torch takes seconds; options are checked first

    begin = time.monotonic()
    step_rows = batches.local_rows(config, int(ranks)) * int(ranks)
    codec = hub.codec_of(config)
    made = cache.open_rows(config, codec, step_rows=step_rows, say=_print_line)
    if first:
        if codec.remark:
            _print_line(codec.remark)
        _print_line(made.remark)
        counts = {name: getattr(made, name) for name in ("train", "heldout", "tokens", "made")}
        seconds = time.monotonic() - begin
        _print_line(report.line({"command": "preprocess", "folder": str(made.folder), **counts, "seconds": seconds}))
    return GOOD


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _progress_display(*, first: bool) -> Iterator[Callable[[str, float | None], None] | None]:
    """The progress callback: a bar on a terminal, otherwise lines; None on other ranks than the first."""
    if not first:
        yield None
    elif not sys.stderr.isatty():
        yield lambda step, _fraction: _print_line(step)
    else:
        from rich.console import Console  # noqa: PLC0415 -- only for a terminal
        from rich.progress import Progress  # noqa: PLC0415 -- as above

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("start", total=1.0)
            yield lambda step, fraction: bar.update(task, description=step, completed=fraction or 0.0)


def run_and_leave() -> NoReturn:
    """Run and end at once, also after a crash; process groups are destroyed by then.

    A thread of torch that wakes up while Python shuts down aborts the process (one exit in thirty, gloo).
    """
    code = NOT_GOOD
    try:
        code = main()
    except SystemExit as wrong_usage:
        code = wrong_usage.code if isinstance(wrong_usage.code, int) else GOOD
    except BaseException:  # noqa: BLE001 -- nothing may reach Python's own shutdown
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    run_and_leave()
