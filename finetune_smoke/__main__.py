"""Command line: ``python -m finetune_smoke`` on one GPU or CPU, ``torchrun ... -m finetune_smoke`` on many.

The last line on standard output, of rank 0, is ``RESULT {json}``. Exit code 0: loss below the limit (where the preset
promises one) and every check passed; 1: not so; 2: what was given cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import typing
from contextlib import contextmanager
from typing import TYPE_CHECKING

from finetune_smoke.config import FAULTS, PRESETS, Config, InputError, OwnInputError, preset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from finetune_smoke.train import Outcome

GOOD, NOT_GOOD, BAD_INPUT = 0, 1, 2

HELP = {
    "model": "directory or hub id of any causal language model; default: the shaped random base",
    "dataset": "directory or hub id with .jsonl or .json rows of 'text' or 'system' and 'chat', trained on in full; "
    "default: synthetic function calls, loss on the answers only",
    "steps": "training steps; the learning rate falls to a tenth over them",
    "rows": "rows of a step: of all ranks with --rows-shared, else of each",
    "loss_limit": "nats per predicted token that the loss must be below, or 'none'",
    "peak_bf16_tflops": "dense bf16 peak of one GPU in TFLOPS, for MFU",
    "checkpoint_dir": "directory, shared by all ranks, for checkpoints",
    "checkpoint_every": "steps between checkpoints; 0: only after the last step",
    "resume": "'auto' goes on from the newest complete checkpoint in --checkpoint-dir",
    "spread_limit": "slowest rank's forward time over the median rank's",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with ``arguments`` (default: the process's own) and return the exit code."""
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        config = parse(arguments, quiet=not first)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when CUDA starts
        from finetune_smoke.train import finetune  # noqa: PLC0415 -- torch takes seconds; options are checked first

        with _shown(first=first) as progress:
            outcome = finetune(config, progress=progress)
    except InputError as error:
        if first or isinstance(error, OwnInputError):
            sys.stderr.write(f"finetune_smoke: {error}\n")
        return BAD_INPUT
    if first:
        _say(summary(config, outcome))
        _say("RESULT " + json.dumps(result(config, outcome), allow_nan=False))
    return NOT_GOOD if outcome.problems() else GOOD


def parse(arguments: Sequence[str] | None, *, quiet: bool = False) -> Config:
    """The Config that the command line asks for; exits with code 2 on wrong usage, silently if ``quiet``."""
    given = vars(_parser(quiet=quiet).parse_args(arguments))
    name = given.pop("preset", None) or ("model" if "model" in given else "tiny")
    return preset(name, **given)


def _parser(*, quiet: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetune_smoke",
        description="Does this cluster really train? A LoRA fine-tune with exact checks.",
        epilog="faults, for the self-test: " + "; ".join(f"{name}: {what}" for name, what in FAULTS.items()),
        argument_default=argparse.SUPPRESS,
    )
    if quiet:
        parser.error = lambda _message: sys.exit(BAD_INPUT)  # type: ignore[method-assign,assignment]  # rank 0 says it
    parser.add_argument("--preset", help=f"{', '.join(PRESETS)}; default: tiny, or model with --model")
    parser.add_argument("--fault", metavar="NAME[:RANK]", help="plant a fault and see which check finds it (self-test)")
    types = typing.get_type_hints(Config)
    for field in dataclasses.fields(Config):
        if field.name in {"preset", "fault"}:
            continue
        kind, option = types[field.name], "--" + field.name.replace("_", "-")
        text = HELP.get(field.name, f"default of tiny: {field.default}")
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(option, type=_reader(kind), metavar=field.name.split("_")[-1].upper(), help=text)
    return parser


def _reader(kind: object) -> Callable[[str], object]:
    """What turns text into a value of ``kind``: str, int, float, or one of them or None, spelled 'none'."""
    inner = [part for part in typing.get_args(kind) if part is not type(None)]
    convert: Callable[[str], object] = inner[0] if inner else typing.cast("Callable[[str], object]", kind)

    def read(text: str) -> object:
        return None if inner and text.lower() == "none" else convert(text)

    read.__name__ = getattr(convert, "__name__", "value")  # argparse names it: "invalid int value"
    return read


def result(config: Config, outcome: Outcome) -> dict[str, object]:
    """The outcome for RESULT: strict JSON, NaN and infinity as null."""
    fields: dict[str, object] = {"preset": config.preset, "fault": config.fault, "passed": not outcome.problems()}
    fields |= dataclasses.asdict(outcome)
    return {name: _strict(value) for name, value in fields.items()}


def _strict(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value


def summary(config: Config, outcome: Outcome) -> str:
    """A few lines for people: what was learnt, how fast, which check saw what."""
    limit = "no limit" if outcome.loss_limit is None else f"limit {outcome.loss_limit}"
    floor = "" if outcome.blind_floor_nats is None else f", {outcome.blind_floor_nats:.2f} without reading the prompt"
    scope = "all tokens" if config.dataset else "answers only"
    fall = f"loss {outcome.first_loss:.3f} -> {outcome.loss:.4f} in {outcome.steps} steps"
    lines = [f"{fall} ({limit}{floor}; {scope}), held-out {outcome.heldout_loss:.4f}"]
    if outcome.exact_match is not None:
        drawn = "" if outcome.greedy_exact_match is None else f", {outcome.greedy_exact_match:.0%} of those generated"
        lines.append(f"held-out calls exact: {outcome.exact_match:.1%}{drawn}")
    if outcome.tokens_per_s_per_gpu is not None and outcome.step_ms is not None:
        mfu = "" if outcome.mfu is None else f", MFU {outcome.mfu:.1%}"
        lines.append(f"{outcome.step_ms:.1f} ms a step, {outcome.tokens_per_s_per_gpu:.0f} tokens/s/GPU{mfu}")
    lines.append(f"set-up {outcome.setup_s:.1f} s, training {outcome.train_s:.1f} s, evaluation {outcome.eval_s:.1f} s")
    for name, check in outcome.checks.items():
        lines.append(f"{'ok  ' if check['passed'] else 'FAIL'} {name}: {check['detail']}")
    lines += [f"NOT GOOD: {problem}" for problem in outcome.problems()]
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _shown(*, first: bool) -> Iterator[Callable[[str, float | None], None] | None]:
    """Who hears the progress: a bar on a terminal, else plain lines, and nobody on other ranks than the first."""
    if not first:
        yield None
    elif not sys.stderr.isatty():
        yield lambda step, _fraction: _say(step)
    else:
        from rich.console import Console  # noqa: PLC0415 -- only where somebody looks
        from rich.progress import Progress  # noqa: PLC0415 -- as above

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("start", total=1.0)
            yield lambda step, fraction: bar.update(task, description=step, completed=fraction or 0.0)


if __name__ == "__main__":
    sys.exit(main())
