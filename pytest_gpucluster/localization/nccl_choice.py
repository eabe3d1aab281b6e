"""Whether NCCL's own choice of an algorithm makes a collective slow: then no node, cable or switch is to blame. Pure.

Large messages over many nodes go best by rings. Where NCCL chose something else and rings are fast enough, the library is slow
and the fabric is not. :data:`KNOWN` has the versions of which somebody published that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RINGS = {"NCCL_ALGO": "Ring"}
"""What makes NCCL take rings."""
CHOICE = "NCCL's choice of an algorithm"
"""The culprit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChoice:
    """A choice of which it is published that it is slow.

    Attributes:
        algorithm: as NCCL's log calls it.
        since: the first version known to have it.
        mended: the first version without it.
        nodes: the fewest nodes.
        text: what was measured, in GB/s of bus bandwidth.
        source: who says so.
    """

    algorithm: str
    since: tuple[int, ...]
    mended: tuple[int, ...]
    nodes: int
    text: str
    source: str


KNOWN = (
    KnownChoice(
        algorithm="NVLS_TREE",
        since=(2, 29, 7),
        mended=(2, 30, 3),
        nodes=4,
        text="16 nodes of 8 B300 reach 200 GB/s by it, and 760 GB/s by rings",
        source="NVIDIA/nccl, issue 2035",
    ),
)
"""Never seen by this program: nothing ran here on four nodes."""


def is_another(algorithm: str | None) -> bool:
    """Whether NCCL told that it chose something else than rings."""
    return algorithm is not None and algorithm.replace("_", "").lower() != "ring"


def advice(algorithm: str, version: str | None, *, nodes: int) -> str:
    """What to do about a choice that is slow where rings are fast.

    Args:
        algorithm: that NCCL chose, as its log calls it.
        version: of NCCL, ``2.29.7``; None where it is not known.
        nodes: of the collective.
    """
    what = f"take another NCCL than {version or 'this one'}, or set NCCL_ALGO=Ring for jobs of this size"
    numbers = tuple(map(int, re.findall(r"\d+", version or "")))[:3]
    for known in KNOWN:
        if known.algorithm == algorithm and known.since <= numbers < known.mended and nodes >= known.nodes:
            return f"{what}; known of {algorithm}: {known.text} ({known.source}), mended in {_dotted(known.mended)}"
    return what


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
