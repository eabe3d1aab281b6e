"""``gpucluster healthcheck``: for Slurm's HealthCheckProgram, prolog and epilog. Reads, and runs nothing on a GPU.

With ``--drain`` the node is drained by a reason of ours, and freed from no other reason than ours. Slurm does nothing by a
HealthCheckProgram's exit code (tried with 22.05); by a prolog's or an epilog's it drains the node itself, and these must not
call Slurm's commands.

``gpucluster kubernetes-condition`` is the same health for Kubernetes' node-problem-detector: its exit codes, and one line.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_gpucluster.commands.info import BAD, GOOD, UNSEEN
from pytest_gpucluster.commands.info_tables import value_at
from pytest_gpucluster.health.defects import find, unseen
from pytest_gpucluster.inventory import machine as whole_machine
from pytest_gpucluster.inventory.reading import NotAvailable, unavailable
from pytest_gpucluster.inventory.slurm import change, read_node
from pytest_gpucluster.text import counted, one_line, within_bytes

VARIABLE = "GPUCLUSTER_DRAIN"
OURS = "gpucluster: "
"""What every reason of ours begins with; a site's tools can look for it."""
NVML_S = 10.0
"""Healthy GPUs answer in a second or two. A driver that hangs has to be said, and drained, in what Slurm leaves."""
WITHIN_S = 12.0
"""Of one call with ``--drain``, Slurm's commands included; these have at least :data:`LEAST_S` each."""
LEAST_S = 2.0
LONGEST = 500
"""Characters of a reason."""
DRAINED = {"DRAIN", "DOWN", "FAIL"}
READ = (
    "repair.recovery_action",
    "remapped_rows_failed",
    "remapped_rows_pending",
    "ecc_uncorrected_volatile",
    "ecc_enabled",
    "pcie_width",
    "clocks_event_reasons",
)
"""What has to be read of a GPU that supports it: a value that is not there is not healthy."""
UNSUPPORTED = "Not Supported"
CONDITIONS = {GOOD: 0, BAD: 1}
"""By exit code of the health check, that of node-problem-detector: 0 OK, 1 a problem."""
UNKNOWN = 2
"""Of node-problem-detector: the condition is unknown. Every other exit code of the health check becomes this."""
MOST_OUTPUT_BYTES = 80
"""node-problem-detector's ``max_output_length``, as it is where a site sets none."""


def main(chosen: argparse.Namespace) -> int:
    """Print what is wrong: 0 healthy, 1 something is wrong (the node is drained where asked), 3 not everything was read."""
    ends = time.monotonic() + WITHIN_S
    machine = read_machine()
    drains = chosen.drain or os.environ.get(VARIABLE) == "1"
    host = platform.node()
    name = chosen.node or host.partition(".")[0]
    node = read_node(name, hostname=host, within_s=_left_s(ends)) if drains else None
    num_gpus = chosen.gpus
    if num_gpus is None and node is not None and not isinstance(node, NotAvailable):
        num_gpus = None if isinstance(node.gpus, NotAvailable) else node.gpus
    wrong, unread, code = _judge(machine, num_gpus)
    for text in (*wrong, *unread):
        sys.stdout.write(f"{OURS}{text}\n")
    is_without_gpus = num_gpus == 0 and machine["gpus_on_pci_bus"] == 0
    reason = "" if is_without_gpus else "; ".join((*wrong, *unread))
    if node is not None and not _drain(node, reason, within_s=_left_s(ends)):
        return code or UNSEEN
    return code


def read_machine() -> dict[str, Any]:
    """This machine; NVML has :data:`NVML_S` to answer."""
    return whole_machine.read_machine(nvml_s=NVML_S)


def _left_s(ends: float) -> float:
    return max(LEAST_S, round(ends - time.monotonic(), 1))


def condition(chosen: argparse.Namespace) -> int:
    """Print one line of at most 80 bytes; node-problem-detector's exit code. A fault of our own is no problem of the node."""
    try:
        machine = read_machine()
        wrong, unread, code = _judge(machine, chosen.gpus)
    except Exception as error:  # noqa: BLE001 -- Python would leave with 1, which says that the node has a problem
        wrong, unread, code = [], [f"the health check failed: {type(error).__name__}: {error}"], UNSEEN
    found = [*wrong, *unread] or [f"{counted(len(machine['gpus']['gpus']), 'GPU is', 'GPUs are')} healthy"]
    sys.stdout.write(f"{_in_one_line(found)}\n")
    return CONDITIONS.get(code, UNKNOWN)


def _in_one_line(texts: Sequence[str]) -> str:
    """The first text, and how many more there are, in at most :data:`MOST_OUTPUT_BYTES` of UTF-8."""
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    return within_bytes(one_line(texts[0]), MOST_OUTPUT_BYTES - len(more)) + more


def _judge(machine: Mapping[str, Any], num_gpus: int | None) -> tuple[list[str], list[str], int]:
    """What is wrong, what was not read, and the exit code by both."""
    wrong, unread = [*_wrong(machine, num_gpus)], [*_unread(machine)]
    code = BAD if wrong else UNSEEN if unread else GOOD
    why = one_line(machine["gpus"]["error"] or "")
    again = {*[text for text in (*wrong, *unread) if why and why in text][1:]}  # one cause is said once
    return [text for text in wrong if text not in again], [text for text in unread if text not in again], code


def _wrong(machine: Mapping[str, Any], num_gpus: int | None) -> Iterator[str]:
    serials = {f"GPU {gpu['index']}": gpu["serial"] for gpu in machine["gpus"]["gpus"]}
    for one in find(machine):
        serial = serials.get(one.part)
        of = f" serial {serial}" if isinstance(serial, str) else ""
        yield one_line(f"{one.what}, {one.part}{of}" if one.part.startswith("GPU ") else one.what)
    seen = len(machine["gpus"]["gpus"])
    promised = max(num_gpus or 0, machine["gpus"]["count"])
    if seen < promised:
        why = machine["gpus"]["error"]
        yield one_line(f"NVML shows {seen} of {promised} GPUs" + (f" ({why})" if why else ""))
    elif "gpus" in unseen(machine) and isinstance(machine["gpus_on_pci_bus"], int) and machine["gpus_on_pci_bus"] > seen:
        yield one_line(unseen(machine)["gpus"])


def _unread(machine: Mapping[str, Any]) -> Iterator[str]:
    gpus = machine["gpus"]["gpus"]
    if not gpus:
        yield one_line(f"no GPU was judged: {machine['gpus']['error'] or 'NVML shows none'}")
    for gpu in gpus:
        for name in READ:
            why = unavailable(value_at(gpu, name))
            if why is not None and UNSUPPORTED not in why:
                yield one_line(f"{name} of GPU {gpu['index']} was not read: {why}")


def _drain(node: Any, reason: str, *, within_s: float) -> bool:
    """Drain the node, renew our own reason, or free the node from it; whether Slurm did that, or nothing was to be done."""
    if isinstance(node, NotAvailable):
        sys.stderr.write(f"gpucluster healthcheck: not drained: {node.why}\n")
        return False
    is_ours, is_drained = node.reason.startswith(OURS), bool(DRAINED & set(node.states))
    if is_drained and node.reason and not is_ours:
        sys.stderr.write(f"gpucluster healthcheck: {node.name} is drained by others, left alone: {one_line(node.reason)}\n")
        return True
    said = f"{OURS}{reason}"[:LONGEST]
    if reason and not (is_drained and node.reason.startswith(said)):
        wanted = ["State=DRAIN", f"Reason={said}"]
    elif not reason and is_ours and "DRAIN" in node.states:
        wanted = ["State=UNDRAIN"]
    else:
        return True
    refused = change("update", f"NodeName={node.name}", *wanted, within_s=within_s)
    if refused is not None:
        sys.stderr.write(f"gpucluster healthcheck: {node.name} stays as it is: {refused.why}\n")
    return refused is None
