"""Every shape from 1x1 to 8x8: each packaged criterion is skipped by rule or has a limit, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import rule_against
from pytest_gpucluster.places import Inventory
from tests.support.thresholds_files import packaged

SHAPES = [(nodes, gpus) for nodes in range(1, 9) for gpus in range(1, 9)]
BY_SIZE = {"busbw[all_reduce]", "busbw_soak"}
"""Entries with a required limit for each number of GPUs."""
IN_EACH_NODE = {"busbw_scaling", "domain_busbw[all_reduce]"}
"""Criteria of the cluster that measure a collective inside each node, or each domain."""


def inventory(nodes: int, gpus: int, profile: str) -> Inventory:
    """A healthy cluster of this shape, as the profile promises it."""
    promised = packaged().profiles[profile]
    return Inventory(
        num_nodes=nodes,
        gpus_per_node=gpus,
        device="cuda",
        fabric=promised.fabric,
        nodes_per_domain=promised.nodes_per_domain,
    )


@pytest.mark.parametrize("profile", [name for name, one in packaged().profiles.items() if not one.rehearsal])
@pytest.mark.parametrize(("nodes", "gpus"), SHAPES)
def test_every_criterion_has_a_limit_or_a_rule(nodes: int, gpus: int, profile: str) -> None:
    """No shape meets an error in the midst of a run: what applies has a limit."""
    here = inventory(nodes, gpus, profile)
    group = {"gpu": 1, "node": gpus, "cluster": nodes * gpus}
    missing = []
    for threshold in packaged().criteria(packaged().profiles[profile]).values():
        if rule_against(threshold, here) is not None:
            continue
        try:
            threshold.limit(gpus=group[threshold.per], cluster=here.facts)
        except ConfigurationError as error:
            missing.append(str(error))
    ports = packaged().profiles[profile].nic_gb_s_per_gpu
    known = [one for one in missing if "nic_gb_s_per_gpu" in one and ports is None]
    assert missing == known, "only profiles that do not say what their ports carry ask for it"


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("nodes", range(1, 9))
def test_what_is_measured_in_each_node_needs_two_gpus_there(nodes: int, gpus: int) -> None:
    """One GPU has nothing to reduce with; the rule counts the GPUs of a node, never those of the cluster."""
    criteria = packaged().criteria(packaged().profiles["h200-sxm"])
    rule = rule_against(criteria["busbw_scaling"], inventory(nodes, gpus, "h200-sxm"))
    assert (rule is None) == (nodes >= 2 and gpus >= 2)
    if rule is not None and nodes >= 2:
        assert rule.text == "needs 2 GPUs in each node, and 1 is expected"
        assert rule.cause == "one GPU a node"


@pytest.mark.parametrize("key", sorted(IN_EACH_NODE))
def test_a_rack_of_nodes_with_one_gpu(key: str) -> None:
    """The last rack of 19 nodes has one node, and so one GPU."""
    criteria = packaged().criteria(packaged().profiles["gb200-nvl72"])
    assert rule_against(criteria[key], replace(inventory(19, 1, "gb200-nvl72"))) is not None
    assert rule_against(criteria[key], replace(inventory(19, 2, "gb200-nvl72"))) is None


@pytest.mark.parametrize("key", sorted(BY_SIZE))
@pytest.mark.parametrize("profile", ["h100-sxm", "h200-sxm"])
def test_a_size_in_between_has_the_limit_of_the_next_smaller_one(key: str, profile: str) -> None:
    """A ring's bus bandwidth does not fall with the number of GPUs; the handover's 8 GPUs keep their own."""
    threshold = packaged().criteria(packaged().profiles[profile])[key]
    limits = {gpus: threshold.limit(gpus=gpus, cluster={}).value for gpus in range(2, 9)}
    assert limits == {2: 310, 3: 310, 4: 335, 5: 335, 6: 335, 7: 335, 8: 400}
    assert "derived" in packaged().criteria(packaged().profiles[profile])["busbw[all_reduce]"].source
    with pytest.raises(ConfigurationError, match="has no limit for 16 GPUs"):
        threshold.limit(gpus=16, cluster={})


@pytest.mark.parametrize("profile", [name for name, one in packaged().profiles.items() if not one.rehearsal])
def test_a_pair_that_takes_the_host_is_required_where_nvlink_joins_all_gpus(profile: str) -> None:
    """It is exact; only bridges that are sold apart are no promise."""
    pairs = packaged().criteria(packaged().profiles[profile])["gpu_pairs"]
    assert pairs.severity == "required"
    assert (pairs.skip is not None) == (profile in ("h100-pcie", "h100-nvl", "h200-nvl", "rtx-pro-6000", "l40s"))
