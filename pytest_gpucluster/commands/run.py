"""``gpucluster run``: one measurement on this machine's GPUs, outside pytest, through the real controller and agents.

A criterion, which has a recipe and a limit, is judged by pytest: ``criteria.py``.

Values go to stdout, messages to stderr. What the function prints goes to stdout too, or to stderr with ``--json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pytest_gpucluster.cluster import calls
from pytest_gpucluster.cluster.binding import Binding, bind
from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.commands import arguments, criteria
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.config.settings import parse_expect
from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.config.torchrun import read_launch
from pytest_gpucluster.controller.call import Observer
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.controller.inline import InlineController
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.inventory.detect import Detected, detect_gpus
from pytest_gpucluster.inventory.reading import as_plain
from pytest_gpucluster.judging.failure_text import summarize
from pytest_gpucluster.places import Device, Inventory, Place
from pytest_gpucluster.protocol.channel import ChannelLostError
from pytest_gpucluster.protocol.codec import Secret
from pytest_gpucluster.run_setup import REHEARSAL_RANKS, require_torch
from pytest_gpucluster.session import JOIN_S
from pytest_gpucluster.text import barred, counted, lines, one_line, visible

NOT_GOOD = 1
LINE_INTERVAL_S = 5.0
SHOWN_ITEMS = 8
OWN_CALLS = ("read_occupancy", "identity", "leave_group")
Field: TypeAlias = "tuple[str, str]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure, checked before anything starts. ``places`` is None for all places."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    places: list[Place] | None
    per: str
    deadline_s: float | None


def main(chosen: argparse.Namespace) -> int:
    """Measure and print the values of a function or a criterion; 0 when every place has a value.

    Raises:
        ConfigurationError: wrong usage.
    """
    if criteria.may_be_criterion(chosen.function):
        return criteria.run(chosen)
    if read_launch() is not None:
        raise ConfigurationError(
            "this command is for one machine and starts its ranks by itself, but torchrun's variables are set; "
            "start it without torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK"
        )
    require_torch()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    inventory, num_local = _machine(chosen)
    order = _order(chosen, inventory)
    with tempfile.TemporaryDirectory(prefix="gpucluster-run-") as folder:
        controller = _controller(inventory.device, num_local, inline=chosen.inline)
        return _Measuring(controller, inventory, logs=Path(folder), as_json=chosen.json).run(order)


def _machine(chosen: argparse.Namespace) -> tuple[Inventory, int]:
    """The GPUs of this machine that may be used, and the number of agents."""
    try:
        expect = parse_expect(chosen.expect)
        detected = Detected(names=()) if chosen.device == "cpu" else detect_gpus()
    except ConfigurationError as error:  # said by parts that speak of pytest's options
        text = str(error).replace("--gpucluster-expect", "--expect").replace("--gpucluster-profile rehearsal", "--device cpu")
        raise ConfigurationError(text) from None
    if expect.nodes not in (None, 1):
        raise ConfigurationError(f"--expect nodes={expect.nodes}: this command is for one machine; pytest measures a cluster")
    if chosen.device == "cuda" and not detected.num_gpus:
        raise ConfigurationError("--device cuda: NVML shows no GPU here; leave it out to rehearse on the CPU")
    size = 1 if chosen.inline else expect.gpus_per_node or detected.num_gpus or REHEARSAL_RANKS
    device: Device = "cuda" if detected.num_gpus else "cpu"
    inventory = Inventory(num_nodes=1, gpus_per_node=size, device=device)
    return inventory, detected.num_gpus or size


def _order(chosen: argparse.Namespace, inventory: Inventory) -> Order:
    """Check the arguments. argparse took an argument behind ``--place ID`` for one more id; an id has no ``=``."""
    ids = [word for word in chosen.place if "=" not in word]
    values = arguments.read_arguments([*chosen.words, *(word for word in chosen.place if "=" in word)])
    known = {place.id: place for place in (*inventory.places, *inventory.nodes)}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise ConfigurationError(f"there is no place {', '.join(unknown)}; places: {', '.join(known)}")
    if chosen.per not in calls.PER:
        near = did_you_mean(chosen.per, calls.PER)
        raise ConfigurationError(f"--per {chosen.per} is not one of {', '.join(calls.PER)}.{near}")
    if chosen.deadline_s is not None and not 0 < chosen.deadline_s < float("inf"):
        raise ConfigurationError(f"--deadline-s {chosen.deadline_s:g} is not a time above zero")
    function = arguments.find_function(chosen.function)
    arguments.require_fit(function, values)
    places = [known[name] for name in dict.fromkeys(ids)] or None
    return Order(function=function, arguments=values, places=places, per=chosen.per, deadline_s=chosen.deadline_s)


def _controller(device: Device, num_local: int, *, inline: bool) -> Controller | InlineController:
    rootdir, secret = Path.cwd(), Secret.take()
    if inline:
        return InlineController(device=device, rootdir=rootdir)
    return Controller(None, num_local=num_local, device=device, rootdir=rootdir, secret=secret)


class _Measuring:
    """One order, from the start of the agents to their end."""

    def __init__(self, controller: Controller | InlineController, inventory: Inventory, *, logs: Path, as_json: bool) -> None:
        self._controller = controller
        self._inventory = inventory
        self._places = inventory.places
        self._logs = logs
        self._as_json = as_json

    def run(self, order: Order) -> int:
        """Measure and print; no agent stays behind, whatever happens."""
        if isinstance(self._controller, Controller):  # inline, nothing could stop the function but the signal itself
            signal.signal(signal.SIGTERM, lambda *_: self._controller.terminate("SIGTERM"))
        try:
            results = self._measure(order, Observer(on_progress=progress_lines(self._name)))
        except (MeasurementError, ChannelLostError) as error:
            self._show_output(order)
            sys.stderr.write(f"{visible(str(error))}\n")
            return NOT_GOOD
        finally:
            self._controller.quit(0)
        self._show_output(order)
        return self._show(results)

    def _measure(self, order: Order, observer: Observer) -> Results:
        inline_output = sys.stderr if self._as_json else sys.stdout
        self._controller.start(log=self._logs / "agents.log", observer=observer)
        binding = bind(self._controller, self._inventory, within_s=JOIN_S)
        self._places = binding.places
        cluster = calls.Cluster(self._controller, binding)
        self._announce(order, cluster, binding)
        with contextlib.redirect_stdout(inline_output):
            results = cluster.run(
                order.function, per=order.per, places=order.places, deadline_s=order.deadline_s, **order.arguments
            )
        if not len(results):
            raise ConfigurationError(f"--per {order.per}: nothing to measure among {counted(len(order.places or ()), 'place')}")
        return results

    def _announce(self, order: Order, cluster: calls.Cluster, binding: Binding) -> None:
        noun, on = ("GPU", "") if cluster.device == "cuda" else ("rank", " on the CPU (a rehearsal: no number of it counts)")
        here = f"{counted(cluster.world_size, noun)}{on}"
        sys.stderr.write(f"gpucluster run: {order.function.__name__} per {order.per}; here: {here}\n")
        for reason in (*binding.unidentified.values(), *(f"not expected: {rank}" for rank in binding.unexpected)):
            sys.stderr.write(one_line(reason) + "\n")
        if binding.unidentified and (log := self._logs / "agents.log").is_file():
            sys.stderr.write(barred(log.read_text(encoding="utf-8", errors="backslashreplace")[-4000:]) + "\n")

    def _name(self, rank: int) -> str:
        return next((place.id for place in self._places if place.rank == rank), f"rank {rank}")

    def _show(self, results: Results) -> int:
        values = {_key(place): as_plain(results[place]) for place in results if place not in results.errors}
        if self._as_json:
            absent = {_key(place): None for place in results.errors}
            sys.stdout.write(json.dumps(strict_json({**values, **absent}), indent=1, allow_nan=False) + "\n")
        else:
            sys.stdout.write(as_lines(values))
        sys.stdout.flush()
        for text in dict.fromkeys(str(error) for error in results.errors.values()):
            sys.stderr.write(f"{visible(text)}\n")
        return NOT_GOOD if results.errors else 0

    def _show_output(self, order: Order) -> None:
        """Print what the function printed. The controller kept it call by call, below a heading."""
        sink = sys.stderr if self._as_json else sys.stdout
        headings = [f"--- {name}" for name in (order.function.__qualname__, *OWN_CALLS)]
        for place in self._places:
            log = self._logs / f"rank{place.rank}.log"
            text = log.read_text(encoding="utf-8", errors="backslashreplace") if log.is_file() else ""
            sink.writelines(f"{place.id} | {line}\n" for line in lines(text) if line not in headings)


def progress_lines(name: Callable[[int], str]) -> Callable[[int, str, float | None], None]:
    """What writes a line on stderr every few seconds: what one rank does now. ``name``: the place of a rank."""
    last_s = time.monotonic()

    def write(rank: int, step: str, fraction: float | None) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > LINE_INTERVAL_S:
            last_s = time.monotonic()
            share = f" {100 * fraction:3.0f} %" if fraction is not None else ""
            sys.stderr.write(one_line(f"{name(rank)}: {step}{share}") + "\n")

    return write


def _key(place: Any) -> str:
    """A place by its id, an ordered pair of places as ``node0-gpu0,node0-gpu1``."""
    return ",".join(str(member) for member in place) if isinstance(place, tuple) else str(place)


def as_lines(values: Mapping[str, Any]) -> str:
    """One aligned line for each number: place, name and value."""
    rows = [(place, *field) for place, value in values.items() for field in fields_of(value)]
    place_width = max((len(place) for place, _, _ in rows), default=0)
    name_width = max((len(name) for _, name, _ in rows), default=0)
    return "".join(f"{place:<{place_width}}  {name:<{name_width}}  {text}".rstrip() + "\n" for place, name, text in rows)


def fields_of(value: Any, name: str = "value") -> list[Field]:
    """(name, text) of every field of a value; nested names are joined by dots, long lists of numbers summarized."""
    if isinstance(value, Mapping):
        prefix = "" if name == "value" else f"{name}."
        return [field for key, item in value.items() for field in fields_of(item, f"{prefix}{key}")]
    if isinstance(value, float):
        return [(name, f"{value:.6g}")]
    if isinstance(value, str):
        return [(one_line(name), one_line(value))]
    if isinstance(value, list) and len(value) > SHOWN_ITEMS and all(isinstance(item, (int, float)) for item in value):
        return [(name, f"{counted(len(value), 'value')}: {summarize(value)}")]
    return [(name, json.dumps(value))]
