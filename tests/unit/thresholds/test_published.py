"""Clusters whose bus bandwidth somebody published as healthy: the packaged limits accept each, or the table says why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.support.thresholds_files import packaged

SPREAD = 0.05
"""The spread of healthy repeats by ``noise:``: a limit within it would leave a healthy cluster undecided."""


@dataclass(frozen=True)
class Published:
    """One row: GB/s of bus bandwidth, of which collective, over how many nodes and GPUs, with ports of which GB/s a GPU."""

    profile: str
    nodes: int
    gpus: int
    busbw_gb_s: float
    source: str
    port_gb_s: float = 50.0
    operation: str = "all_reduce"
    why_not: str = ""

    def limit_holds(self, share: float = 1.0) -> bool:
        """Whether the packaged limit of this shape accepts so much of what was published."""
        name = "busbw" if self.nodes == 1 else "inter_node_busbw"
        file = packaged()
        entry = dict(file.criteria(file.profiles[self.profile]))[f"{name}[{self.operation}]"]
        if entry.rates is not None:
            entry = entry.model_copy(update={"rates": replace(entry.rates, nic_gb_s_per_gpu=self.port_gb_s)})
        facts = {"nodes": self.nodes, "gpus_per_node": self.gpus, "world_size": self.nodes * self.gpus}
        return entry.limit(gpus=self.nodes * self.gpus, cluster=facts).holds(share * self.busbw_gb_s)


PUBLISHED = (
    Published("h100-sxm", 1, 8, 466, "NVIDIA/dgxc-benchmarking, nccl/README.md, 1 GiB; 480 from 8 GiB on"),
    Published("h100-sxm", 1, 8, 360, "NVIDIA/nccl-tests, issue 326: up to 16 GiB, as expected", operation="all_gather"),
    Published("h100-sxm", 1, 8, 370, "NVIDIA/nccl-tests, issue 212: all but all-reduce", operation="reduce_scatter"),
    Published("h100-sxm", 1, 8, 370, "the same", operation="all_to_all"),
    Published("h100-sxm", 1, 8, 370, "the same", operation="broadcast"),
    Published("h100-sxm", 1, 8, 370, "the same", operation="send_recv"),
    Published("h200-sxm", 1, 4, 326, "docs/results/2026-11-20-h200-tools.md, 1 GiB, out of place", operation="all_gather"),
    Published("h200-sxm", 1, 4, 326.9, "the same", operation="reduce_scatter"),
    Published("h200-sxm", 1, 8, 326, "the rings of 4 GPUs", operation="all_gather"),
    Published("h200-sxm", 1, 8, 326.9, "the rings of 4 GPUs", operation="reduce_scatter"),
    Published("h100-sxm", 2, 8, 430, "NVIDIA/nccl, issue 1221: 8 x 400 RoCE, NCCL 2.19.3, NVLS on"),
    Published("h100-sxm", 2, 8, 330, "the same, NVLS off", why_not="the handover asks 350 of 2 x 8, and NVLS was off"),
    Published("h100-sxm", 4, 8, 320, "NVIDIA/nccl, issue 1221: 8 x 400 RoCE, NCCL 2.19.3"),
    Published("h100-sxm", 4, 8, 330.9, "a study of Voltage Park: InfiniBand of 3.2 Tb/s"),
    Published("h100-sxm", 4, 8, 323.5, "the same", operation="all_gather"),
    Published("h100-sxm", 8, 8, 280, "pytorch/pytorch, issue 117748: EFA, NCCL 2.19.3; 104 before it was mended"),
    Published("h100-sxm", 12, 8, 366, "coreweave/nccl-tests, README, 1 GiB; 387 at 8 GiB"),
    Published("h100-sxm", 32, 8, 340, "NVIDIA/nccl, issue 1218, 2 GiB"),
    Published("h200-sxm", 248, 8, 350, "NVIDIA/nccl-tests, issue 283, 512 MiB"),
    Published("h100-sxm", 5, 8, 190, "NVIDIA/nccl, issue 1368: 4 x 400 RoCE, ring", port_gb_s=25),
    Published("h100-sxm", 5, 8, 150, "the same, tree", port_gb_s=25),
    Published("a100-sxm", 3, 8, 192, "NVIDIA/nccl, issue 812: DGX A100, 2 nodes or more", port_gb_s=25),
    Published("b200-sxm", 4, 8, 382, "stas00/ml-engineering, network: EFA v4, NCCL 2.27.7, 16 GiB; 362 at 1 GiB"),
    Published("b200-sxm", 1, 8, 723, "the same, one node, 1 GiB; 846 at 16 GiB"),
    Published("b200-sxm", 16, 8, 760, "NVIDIA/nccl, issue 2035: B300, ring, NCCL 2.29.7", port_gb_s=100),
    Published(
        "b200-sxm", 16, 8, 200, "the same, NVLSTree", port_gb_s=100, why_not="NVLSTree of 2.29.7 is known to be slow there"
    ),
    Published("gb300-nvl72", 2, 4, 842, "NVIDIA/aicr, PR 2410: within the domain, NVLS"),
    Published("gb300-nvl72", 2, 4, 44.9, "the same, over the ports", why_not="NVLink joins them, and was not used"),
    Published("gb200-nvl72", 18, 4, 835, "coreweave/nccl-tests, README: 8 GiB, NCCL 2.26.2"),
    Published("gb200-nvl72", 36, 4, 810, "the same, two racks, 16 GiB"),
)


NOT_JUDGED = ("all_to_all", "broadcast", "send_recv")
"""Nobody published a number of 8 GPUs in a node: measured, and not judged (docs/decisions/0080)."""


@pytest.mark.parametrize(
    "row", PUBLISHED, ids=[f"{row.profile}-{row.nodes}x{row.gpus}-{row.operation}-{row.busbw_gb_s}" for row in PUBLISHED]
)
def test_a_published_healthy_cluster_is_accepted(row: Published) -> None:
    """With the whole spread of repeats between it and the limit, or not at all for the reason of the table."""
    assert row.limit_holds(1 - SPREAD) is (not row.why_not)
    assert row.limit_holds() is (not row.why_not)


@pytest.mark.parametrize("row", [row for row in PUBLISHED if not row.why_not], ids=lambda row: f"{row.source} {row.operation}")
def test_half_of_a_healthy_rate_is_not(row: Published) -> None:
    """A rail or link at half of its rate halves the rings that go through it; what nobody published is not judged."""
    is_judged = row.nodes > 1 or row.operation not in NOT_JUDGED
    assert row.limit_holds(0.5) is not is_judged
