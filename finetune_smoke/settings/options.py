"""The command line as settings: one option for each field of Config. This module imports nothing heavy."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from finetune_smoke.settings import configfile
from finetune_smoke.settings.config import FAULTS, PRESETS, TYPES, Config, InputError, OwnInputError, preset

BAD_USAGE = 2
RANK_0_LEAD_S = 10.0
"""How long another rank waits for rank 0 to print the message. torchrun ends it as soon as rank 0 has left."""

HELP = {
    "model": "directory or hub id of any causal language model; default: the shaped random base",
    "dataset": "directory or hub id with .jsonl or .json rows of 'text', of 'system' and 'chat', or of 'instruction', 'input' "
    "and 'output', trained on in full, shuffled by the seed; "
    "default: synthetic function calls, loss on the answers only",
    "steps": "training steps; the learning rate falls to 0 over them",
    "rows": "rows of a pass, of which a step has --accumulation: of all ranks with --rows-shared, else of each",
    "accumulation": "passes of a step; their gradients are added",
    "strategy": "ddp: every rank holds the base; fsdp: FSDP2 shards it; auto: ddp where there are ranks",
    "lora_dropout": "dropout of the adapters' inputs, by peft's forward; switches the lock-step audits off",
    "target_modules": "linears with adapters: all-linear (161 M weights on Qwen2-7B at rank 64), or names with commas "
    "(q_proj,k_proj,v_proj,o_proj: 40.4 M)",
    "cpu_offload": "with strategy fsdp: shards lie in host memory and are copied to the GPU for each use",
    "own_lora": "compute the adapters with fewer kernels than peft does; the layout stays peft's",
    "compile": "layers: torch.compile every decoder layer; off",
    "cuda_graph": "capture a step as CUDA graphs, for models that launches slow down",
    "loader_workers": "threads that make rows ahead; 0: none",
    "prefetch": "number of steps for which rows are made ahead",
    "packed": "put whole examples or texts one after another into rows of exactly --row-tokens tokens",
    "loss_limit": "nats per predicted token that the loss must be below, or 'none'",
    "peak_bf16_tflops": "dense bf16 peak of one GPU in TFLOPS, for MFU",
    "checkpoint_dir": "directory, shared by all ranks, for checkpoints and the adapter in final/; SIGTERM or SIGUSR1 to any "
    "rank ends the run with a checkpoint and exit code 3",
    "checkpoint_every": "steps between checkpoints; 0: only after the last step",
    "keep_checkpoints": "how many checkpoints to keep, the newest; 0: all",
    "resume": "'auto' continues from the newest complete checkpoint in --checkpoint-dir, saved by any number of ranks",
    "output": "directory for the adapter in peft's layout; default: final/ in --checkpoint-dir, if there is one",
    "tensorboard": "directory for TensorBoard's curves; needs the package tensorboard",
    "scratch": "folder of the node for rows tokenised once, used again by whoever has the same data and settings",
    "spread_limit": "slowest rank's forward time over the median rank's, or 'none'",
}


def settings(arguments: Sequence[str] | None, *, quiet: bool = False, command: str = "") -> dict[str, object]:
    """The settings in --config's file and on the command line, which overrides the file, by field of Config.

    Further options of ``command`` are among them. Exits with code 2 on wrong usage, silently if ``quiet``; raises InputError
    for an unusable file.
    """
    given = vars(_parser(command, quiet=quiet).parse_args(arguments))
    file = given.pop("config", None)
    if file is None:
        return given
    try:
        return {**configfile.read(Path(file), tell=(lambda _line: None) if quiet else print), **given}
    except InputError as error:
        if not quiet:
            raise
        wait_for_rank_0()  # torchrun ends this rank meanwhile if rank 0 found the same: else it is wrong on this node only
        raise OwnInputError(f"rank {os.environ.get('RANK')}: {error}") from error


def config_of(given: dict[str, object]) -> Config:
    """The Config of these settings. The default preset is tiny, with a model it is preset model."""
    name = given.pop("preset", None) or ("tiny" if given.get("model") is None else "model")
    return preset(str(name), **given)


class _Parser(argparse.ArgumentParser):
    """A parser whose error is three lines: 60 options above it hide what was wrong. None if ``quiet``: rank 0 prints them."""

    quiet = False

    def error(self, message: str) -> NoReturn:
        """Say how it is called, what is wrong and which option may be meant, and where all of them are; exit code 2."""
        if self.quiet:
            wait_for_rank_0()
            sys.exit(BAD_USAGE)
        known = [*(option for option in self._option_string_actions if option.startswith("--")), *filter(None, COMMANDS)]
        typed = message.rpartition("unrecognized arguments: ")[2].split()
        near = [close for word in typed for close in _near(word.partition("=")[0], known)]
        guess = f". Did you mean {near[0]}?" if near and len(typed) < len(message.split()) else ""
        usage = f"usage: {self.prog} [OPTIONS]\n{self.prog}: error: {message}{guess}\n"
        self.exit(BAD_USAGE, f"{usage}all options: {self.prog} --help\n")


def _near(word: str, known: Sequence[str]) -> list[str]:
    """The known word that ``word`` is near to, if there is one: the dashes before both make no likeness."""
    names = {one.lstrip("-"): one for one in known}
    return [names[close] for close in difflib.get_close_matches(word.lstrip("-").lower(), names, 1)]


def _parser(command: str, *, quiet: bool) -> argparse.ArgumentParser:
    description, more = COMMANDS[command]
    parser = _Parser(
        prog=f"finetune_smoke {command}".strip(),
        description=description,
        epilog="faults, for the self-test: " + "; ".join(f"{name}: {what}" for name, what in FAULTS.items()),
        argument_default=argparse.SUPPRESS,
    )
    parser.quiet = quiet
    parser.add_argument("--config", metavar="FILE", help="YAML of settings, named as here with _ for -; options win")
    parser.add_argument("--preset", help=f"{', '.join(PRESETS)}; default: tiny, or model with --model")
    parser.add_argument("--fault", metavar="NAME[:RANK]", help="plant a fault and see which check finds it (self-test)")
    texts = {field.name: HELP.get(field.name, f"default of tiny: {field.default}") for field in dataclasses.fields(Config)}
    for name, text in {**texts, **more}.items():
        kind, option = TYPES.get(name, str), "--" + name.replace("_", "-")
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        elif name not in {"preset", "fault"}:
            parser.add_argument(option, type=_reader(kind), metavar=name.split("_")[-1].upper(), help=text)
    return parser


COMMANDS: dict[str, tuple[str, dict[str, str]]] = {
    "": ("Does this cluster really train? A LoRA fine-tune with exact checks. Other commands: evaluate, preprocess.", {}),
    "evaluate": (
        "Which held-out function calls come out right, by real generation: the base against the adapter.",
        {"adapter": "directory of an adapter in peft's layout, as final/ is"},
    ),
    "preprocess": (
        "Tokenise and pack the rows of a run into a folder of this node (--scratch), before it starts.",
        {"world_size": "ranks that the training will have; default: those of torchrun, or 1"},
    ),
}
"""What each command does, and its further options with their help; without a command the program trains."""


def _reader(kind: object) -> Callable[[str], object]:
    """A function from text to a value of ``kind``: str, int, float, or an optional one, where 'none' means None."""
    inner = [part for part in typing.get_args(kind) if part is not type(None)]
    convert: Callable[[str], object] = inner[0] if inner else typing.cast("Callable[[str], object]", kind)

    def read(text: str) -> object:
        return None if inner and text.lower() == "none" else convert(text)

    read.__name__ = getattr(convert, "__name__", "value")  # argparse prints this name: "invalid int value"
    return read


def wait_for_rank_0() -> None:
    """Wait before this rank exits: torchrun ends the other ranks as soon as one exits, before rank 0 may have printed."""
    time.sleep(RANK_0_LEAD_S)
