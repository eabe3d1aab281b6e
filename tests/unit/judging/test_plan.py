"""The expected set: which (criterion, place) need an outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpucluster.judging.plan import Plan, complete, places_of, rule_against
from pytest_gpucluster.judging.verdict import MISSING, NOT_SELECTED, PASSED, Record, Terms, decide
from pytest_gpucluster.places import Inventory
from tests.support.entries import threshold

INVENTORY = Inventory(num_nodes=2, gpus_per_node=2, device="cuda")


def test_unselected_criteria_are_recorded() -> None:
    """Every place of an unselected criterion counts; what was selected is not counted twice."""
    plan = Plan()
    plan.expect("tflops", "node0-gpu0", nodeid="t::a")
    complete(
        plan, {"tflops": threshold(), "busbw": threshold("busbw", per="node")}, INVENTORY, level="quick", accept_at="quick"
    )
    assert [(record.criterion, record.place, record.outcome) for record in plan] == [
        ("tflops", "node0-gpu0", "pending"),
        ("tflops", "node0-gpu1", NOT_SELECTED),
        ("tflops", "node1-gpu0", NOT_SELECTED),
        ("tflops", "node1-gpu1", NOT_SELECTED),
        ("busbw", "node0", NOT_SELECTED),
        ("busbw", "node1", NOT_SELECTED),
    ]


@pytest.mark.parametrize(
    ("level", "accept_at", "due"),
    [("quick", "quick", 1), ("quick", "standard", 2), ("standard", "quick", 2), ("soak", "standard", 3), ("quick", "soak", 3)],
)
def test_levels(level: str, accept_at: str, due: int) -> None:
    """Due is everything up to the run's level or the profile's, the higher of both; criteria above the run are not selected."""
    criteria = {name: threshold(name, per="cluster", level=name) for name in ("quick", "standard", "soak")}
    plan = Plan()
    complete(plan, criteria, INVENTORY, level=level, accept_at=accept_at)
    assert len(list(plan)) == due
    assert all(record.outcome == NOT_SELECTED for record in plan)


def test_excluded_criteria_are_not_expected() -> None:
    """A criterion that the profile's rules exclude is not expected at all."""
    plan = Plan()
    criteria = {
        "no": threshold("no", skip="not inside Slurm"),
        "many": threshold("many", per="node", needs={"places": 4}),
        "far": threshold("far", per="cluster", needs={"nodes": 3}),
    }
    complete(plan, criteria, INVENTORY, level="soak", accept_at="quick")
    assert not list(plan)
    reasons = [rule_against(criterion, INVENTORY) for criterion in criteria.values()]
    texts, causes = zip(*[(rule.text, rule.cause) for rule in reasons if rule is not None], strict=True)
    assert texts[0] == "not inside Slurm"
    assert "needs 4 GPUs" in texts[1]
    assert "needs 3 nodes" in texts[2]
    assert causes == ("not inside Slurm", "2 GPUs", "2 nodes")
    assert rule_against(threshold(needs={"places": 1}), INVENTORY) is None
    assert rule_against(threshold(per="cluster", needs={"places": 4}), INVENTORY) is None


@pytest.mark.parametrize(("fabric", "applies"), [("infiniband", True), ("roce", True), ("sockets", False), ("none", False)])
def test_a_rule_by_the_promised_fabric(fabric: str, applies: bool) -> None:  # noqa: FBT001 -- a parameter
    """A criterion of NICs applies where NICs are promised; the reason names both fabrics."""
    rule = rule_against(threshold(fabrics=["infiniband", "roce"]), replace(INVENTORY, fabric=fabric))
    said = None if rule is None else rule.text
    assert said == (None if applies else f"needs the fabric infiniband or roce, and the profile promises {fabric}")


def test_a_rule_by_shared_paths() -> None:
    """A criterion of shared paths applies where the limits name one."""
    needy = threshold(needs={"shared_paths": True})
    assert rule_against(needy, replace(INVENTORY, shared_paths=("/mnt",))) is None
    rule = rule_against(needy, INVENTORY)
    assert rule is not None
    assert rule.text == "needs a path that the nodes share, and the limits name none (cluster: shared_paths)"


def test_a_rule_by_slurm() -> None:
    """A criterion of Slurm applies where the run is in a job."""
    needy = threshold(needs={"slurm": True})
    assert rule_against(needy, replace(INVENTORY, slurm_job="12")) is None
    rule = rule_against(needy, INVENTORY)
    assert rule is not None
    assert rule.text == "needs a job of Slurm that can be asked: SLURM_JOB_ID is not set, or scontrol is not on the PATH"


def test_a_rule_by_the_kernel_log() -> None:
    """A criterion of the kernel log applies where the limits require that it can be read."""
    needy = threshold(needs={"kernel_log": True})
    assert rule_against(needy, replace(INVENTORY, requires_kernel_log=True)) is None
    rule = rule_against(needy, INVENTORY)
    assert rule is not None
    assert "the limits do not require that it can be read (cluster: kernel_log: required)" in rule.text


def test_a_rule_by_the_rails() -> None:
    """Adapters are measured one by one where the limits ask for it."""
    needy = threshold(needs={"rails": True})
    assert rule_against(needy, replace(INVENTORY, measures_rails=True)) is None
    rule = rule_against(needy, INVENTORY)
    assert rule is not None
    assert "(cluster: rails: measured)" in rule.text


@pytest.mark.parametrize(
    ("nodes", "nodes_per_domain", "needed", "text"),
    [
        (2, 1, 1, "needs an NVLink domain of several nodes, and NVLink ends at the node"),
        (1, 18, 1, "needs an NVLink domain of several nodes, and NVLink ends at the node"),
        (2, 18, 1, None),
        (18, 18, 2, "needs 2 NVLink domains, and 1 is expected"),
        (19, 18, 2, None),
    ],
)
def test_a_rule_by_the_nvlink_domains(nodes: int, nodes_per_domain: int, needed: int, text: str | None) -> None:
    """A rack is a domain of 18 nodes; of HGX each node is one by itself."""
    rule = rule_against(
        threshold(needs={"domains": needed}), replace(INVENTORY, num_nodes=nodes, nodes_per_domain=nodes_per_domain)
    )
    assert (rule and rule.text) == text


@pytest.mark.parametrize(("per", "number"), [("gpu", 4), ("node", 2), ("cluster", 1)])
def test_places_of(per: str, number: int) -> None:
    """Every GPU, every node, or the cluster once."""
    assert len(places_of(threshold(per=per), INVENTORY)) == number


def test_closing_gives_every_pending_one_an_outcome() -> None:
    """Closing a plan makes a verdict possible and changes only pending records."""
    plan = Plan()
    plan.expect("a", None, nodeid="t::a")
    plan.expect("b", "node0", nodeid="t::b")
    plan.set_outcome(Record(criterion="a", place=None, outcome=PASSED))
    with pytest.raises(ValueError, match="pending"):
        decide(plan, Terms(rehearsal=False, level_reached=True))
    closed = plan.close(outcome=MISSING, why="not run: terminated")
    assert [(record.criterion, record.reason) for record in closed] == [("b", "not run: terminated")]
    assert plan.nodeid(closed[0]) == "t::b"
    assert {record.criterion: record.outcome for record in plan} == {"a": PASSED, "b": MISSING}
    assert not plan.pending()
