"""One number to compare a value with.

What physics allows collectives between nodes, as bus bandwidth in GB/s (10^9 bytes a second). Pure arithmetic.

Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): 2 (n - 1) / n x S / t for n GPUs that reduce S bytes in t seconds,
and (n - 1) / n x S / t for all_gather, reduce_scatter and all_to_all, where S is the whole buffer of a GPU.
With N nodes of G GPUs, n = N x G, and rates one way, an all-reduce:

* Between nodes, each byte of the result needs the shares of N - 1 other nodes, and has to reach them: a node sends at least
  2 (N - 1) / N x S over its ports together. In a ring a node sends 2 (n - 1) / n x S, which is more.
* In a node the same holds for each GPU and its NVLinks: 2 (G - 1) / G x S. Where the switches add up (NVLS), a GPU sends
  S for the sum and S / G for the result.

A tree on two nodes may so exceed the rate of the ports: 2 nodes of 8 GPUs with 50 GB/s each reach 435 GB/s in the handover, and
not more than 750. Switches of a fabric that add up (SHARP) are left out: they halve what a node sends.

In a ring, all_gather and reduce_scatter send (n - 1) / n x S: half of an all-reduce, and counted half. The rate is equal.
In an all_to_all each GPU has S / n for every other one. No ring helps there: (n - G) / n x S leave by its ports.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from pytest_gpucluster.thresholds.layers import Kind

SIGNS: dict[Kind, str] = {"above": ">", "below": "<", "min": ">=", "max": "<="}
NO_CEILING = 1_000_000
"""What ``below`` says of a value for which nobody knows a limit, as ``above: 0`` does of a rate."""
HOLDS: dict[Kind, Callable[..., bool]] = {"above": operator.gt, "below": operator.lt, "min": operator.ge, "max": operator.le}
_MISSED: dict[Kind, str] = {"above": "not above", "below": "not below", "min": "below", "max": "above"}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The best value that hardware can give: the most of what should be high, the least of what should be low.

    ``by``: what says so, in words.
    """

    value: float
    unit: str
    is_most: bool
    by: str

    def allows(self, value: float) -> bool:
        """Whether hardware could give this value."""
        return value <= self.value if self.is_most else value >= self.value


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One number to compare with. ``above`` and ``below`` are strict, ``min`` and ``max`` inclusive.

    ``basis``: where several limits are written, which one this is, in words. ``bound``: the best value that is possible;
    None where nobody knows it.
    """

    kind: Kind
    value: int | float
    unit: str
    basis: str | None = None
    bound: Bound | None = field(default=None, compare=False)

    @property
    def is_floor(self) -> bool:
        """Whether higher is better."""
        return self.kind in {"above", "min"}

    @property
    def is_none(self) -> bool:
        """Whether any value will do, above zero or below :data:`NO_CEILING`: it is shown, and nobody knows a number to ask."""
        return (self.kind, self.value) in (("above", 0), ("below", NO_CEILING))

    @property
    def text(self) -> str:
        """``> 700 TFLOPS``."""
        return f"{SIGNS[self.kind]} {_number(self.value)} {self.unit}"

    @property
    def missed_word(self) -> str:
        """How a value outside the limit stands to it: ``not above``."""
        return _MISSED[self.kind]

    def holds(self, value: object) -> bool:
        """Whether a value is within the limit. Anything but a finite int or float is not."""
        return is_finite(value) and HOLDS[self.kind](value, self.value)

    def margin_percent(self, value: float) -> float | None:
        """How far inside the limit (above 0) or outside (below 0) a value is, in percent of the limit.

        None when the limit is 0, the value is not finite, or the distance is beyond every number.
        """
        if self.value == 0 or not is_finite(value):
            return None
        distance = value - self.value if self.is_floor else self.value - value
        percent = distance / abs(self.value) * 100.0
        return percent if is_finite(percent) else None


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that can be compared: no bool, no NaN, no infinity, and no int beyond every float."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def ring_gb_s(*, gpus_per_node: int, nic_gb_s_per_gpu: float, nvlink_gb_s: float) -> float:
    """The bus bandwidth of rings over all nodes: that of the ports of a node together, or of a GPU's NVLinks if that is less.

    Rings are what NCCL takes for large messages on many nodes. Their rate does not depend on the number of nodes.
    """
    return min(gpus_per_node * nic_gb_s_per_gpu, nvlink_gb_s)


def most_gb_s(*, nodes: int, gpus_per_node: int, nic_gb_s_per_gpu: float, nvlink_gb_s: float) -> float:
    """More than this no all-reduce over at least two nodes can reach, by whichever algorithm, with NVLS and without SHARP."""
    gpus = nodes * gpus_per_node
    bus = 2 * (gpus - 1) / gpus
    between = bus * gpus_per_node * nic_gb_s_per_gpu / (2 * (nodes - 1) / nodes)
    return between if gpus_per_node == 1 else min(between, bus * nvlink_gb_s / _sent_in_node(gpus_per_node))


def most_possible_gb_s(*, nodes: int, gpus_per_node: int, nic_gb_s_per_gpu: float, nvlink_gb_s: float) -> float:
    """More than this no all_reduce, all_gather or reduce_scatter over nodes can reach, whatever adds up, SHARP and NVLS too.

    With SHARP a node sends its sum once and receives the result once, so S over its ports. What a GPU sends in its node may
    take its own port besides its NVLinks. ``nodes`` are two or more.
    """
    bus = 2 * (1 - 1 / (nodes * gpus_per_node))
    if gpus_per_node == 1:
        return bus * nic_gb_s_per_gpu
    by_gpu = nvlink_gb_s + nic_gb_s_per_gpu
    return min(bus * gpus_per_node * nic_gb_s_per_gpu, bus * by_gpu / _sent_in_node(gpus_per_node))


def most_by_nvlink_gb_s(*, gpus: int, nvlink_gb_s: float) -> float:
    """More than this no all-reduce can reach over at least two GPUs that NVLink joins, with NVLS or without."""
    return 2 * (gpus - 1) / gpus * nvlink_gb_s / _sent_in_node(gpus)


def _sent_in_node(gpus: int) -> float:
    """What a GPU sends by its NVLinks for each byte, without the switches that add up, or with them."""
    return min(2 * (gpus - 1) / gpus, 1 + 1 / gpus)


def all_to_all_gb_s(*, nodes: int, gpus_per_node: int, nic_gb_s_per_gpu: float, nvlink_gb_s: float) -> float:
    """More than this no all_to_all can reach: what a GPU has for other nodes takes its ports, the rest takes its NVLinks.

    Raises:
        ValueError: fewer than two GPUs, or no node.
    """
    gpus = nodes * gpus_per_node
    if nodes < 1 or gpus < 2:
        raise ValueError(f"{nodes} x {gpus_per_node} are no GPUs with something between them")
    by_ports = (gpus - 1) / (gpus - gpus_per_node) * nic_gb_s_per_gpu if nodes > 1 else float("inf")
    by_nvlinks = (gpus - 1) / (gpus_per_node - 1) * nvlink_gb_s if gpus_per_node > 1 else float("inf")
    return min(by_ports, by_nvlinks)
