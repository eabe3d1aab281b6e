"""NVLinks of GPUs beside the promised rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.nvlink import judge_ber, judge_nvlinks
from pytest_gpucluster.inventory.nvlinks import NvLink
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pytest_gpucluster.judging.finding import Finding

REFUSED = NotAvailable("Not Supported")


def links(number: int = 18, **of_link_4: Any) -> list[NvLink]:
    """A GPU's links, all healthy but for link 4."""
    healthy = {"is_up": True, "speed_gb_s": 26.562, "effective_ber": 1.5e-254, "symbol_ber": 1.5e-254}
    fields: list[dict[str, Any]] = [{**healthy, **(of_link_4 if link == 4 else {})} for link in range(number)]
    return [NvLink(link=link, **one) for link, one in enumerate(fields)]


def count(bad: list[NvLink] | NotAvailable) -> Finding:
    """A healthy GPU beside this one."""
    return judge_nvlinks({"gpu0": links(), "gpu1": bad}, gb_s=25.0)


def test_healthy_links() -> None:
    """All of them count, at the promised rate or above it."""
    found = count(links(speed_gb_s=25.0))
    assert (found.value, found.facts, found.doubts) == (18, (), ())


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"is_up": False}, "gpu1: link 4 is down"),
        ({"is_up": False, "speed_gb_s": REFUSED}, "gpu1: link 4 is down"),
        ({"is_up": False, "speed_gb_s": 0.0}, "gpu1: link 4 is down"),
        ({"speed_gb_s": 24.9}, "gpu1: link 4 at 24.9 of 25 GB/s"),
        ({"speed_gb_s": 0.0}, "gpu1: link 4 at 0 of 25 GB/s"),
    ],
)
def test_bad_link(change: dict[str, Any], fact: str) -> None:
    """One link less on that GPU, named; a link that is down needs no rate."""
    found = count(links(**change))
    assert (found.value, found.facts, found.doubts) == (17, (fact,), ())


@pytest.mark.parametrize(
    ("change", "worst", "unknown"),
    [
        ({}, (1.5e-254, 17), ()),
        ({"effective_ber": 3e-9}, (3e-9, 4), ()),
        ({"effective_ber": 3e-9, "is_up": False}, (1.5e-254, 17), ()),  # a link that is down is nvlink_links'
        ({"symbol_ber": 3e-9}, (1.5e-254, 17), ()),
        ({"effective_ber": REFUSED}, (1.5e-254, 17), ("link 4: its effective BER is not available: Not Supported",)),
    ],
)
def test_the_worst_bit_error_rate(change: dict[str, Any], worst: tuple[float, int], unknown: tuple[str, ...]) -> None:
    """Of the links that are up, with the link; one that gives no rate is shown."""
    peers = {"gpu0": links(), "gpu1": links(**change)}
    found = judge_ber(peers, kind="effective", is_healthy=lambda rate: rate < 1e-12)
    rate, link = worst
    assert (found.value, found.evidence["gpu1"]) == (rate, f"link {link}: {rate:g}")
    assert [*found.bad] == ["gpu1"] * (rate > 1e-12)
    assert found.unknown == ({"gpu1": unknown} if unknown else {})


def test_link_that_is_not_listed() -> None:
    """Fewer links than promised are fewer."""
    found = count(links(17))
    assert (found.value, found.facts) == (17, ("gpu1: 17 links, and others have 18",))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"is_up": REFUSED}, "link 4: its state is not available: Not Supported"),
        ({"is_up": REFUSED, "speed_gb_s": 1.0}, "link 4: its state is not available: Not Supported"),
        ({"speed_gb_s": REFUSED}, "link 4: its rate is not available: Not Supported"),
    ],
)
def test_unknown_link_is_neither_good_nor_bad(change: dict[str, Any], why: str) -> None:
    """It does not fail the GPU, and is shown."""
    found = count(links(**change))
    assert (found.value, found.facts, found.unknown) == (18, (), {"gpu1": (why,)})


def test_gpu_whose_links_are_refused() -> None:
    """It has no count; the other GPUs keep theirs."""
    found = count(REFUSED)
    assert (found.value, found.facts) == (18, ())
    assert found.unknown == {"gpu1": ("its NVLinks are not available: Not Supported",)}
