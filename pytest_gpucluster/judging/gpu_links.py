"""The links of GPUs beside what is promised: NVLinks that are up at their rate, and the PCIe link. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.inventory.nvlinks import NvLink


@dataclass(frozen=True, slots=True)
class LinksUp:
    """The NVLinks of several GPUs.

    Attributes:
        by_gpu: how many links of each GPU are up at their rate; a GPU of which nothing is known is left out.
        facts: what is wrong with the others.
        unknown: by GPU, why nothing can be said of some of its links, or of all. Such a link counts as up in ``by_gpu``.
    """

    by_gpu: Mapping[str, int]
    facts: tuple[str, ...]
    unknown: Mapping[str, tuple[str, ...]]


def count_nvlinks(nvlinks: Mapping[str, list[NvLink] | NotAvailable], *, gb_s: float) -> LinksUp:
    """How many NVLinks of each GPU are up and carry ``gb_s`` (10^9 bytes a second, one way) or more."""
    by_gpu: dict[str, int] = {}
    facts: list[str] = []
    unknown: dict[str, tuple[str, ...]] = {}
    for gpu, links in nvlinks.items():
        if isinstance(links, NotAvailable):
            unknown[gpu] = (f"its NVLinks are {links}",)
            continue
        bad = {f"{gpu} link {one.link} {fault}" for one in links if (fault := _fault(one, gb_s)) is not None}
        by_gpu[gpu] = len(links) - len(bad)
        facts += sorted(bad)
        whys = tuple(f"link {one.link}: {why}" for one in links if (why := _unknown(one)) is not None)
        unknown.update({gpu: whys} if whys else {})
    return LinksUp(by_gpu, tuple(facts), unknown)


def worst_ber(
    nvlinks: Mapping[str, list[NvLink] | NotAvailable], *, kind: str
) -> tuple[dict[str, tuple[float, int]], dict[str, tuple[str, ...]]]:
    """The highest bit error rate of each GPU's NVLinks that are up, with its link; and by GPU, of which links nothing is known.

    Args:
        nvlinks: by GPU.
        kind: ``effective``, after correction, or ``symbol``.
    """
    found: dict[str, tuple[float, int]] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    for gpu, links in nvlinks.items():
        if isinstance(links, NotAvailable):
            unknown[gpu] = (f"its NVLinks are {links}",)
            continue
        rates = {one.link: getattr(one, f"{kind}_ber") for one in links if one.is_up is not False}
        whys = tuple(f"link {link}: its {kind} BER is {rate}" for link, rate in rates.items() if isinstance(rate, NotAvailable))
        unknown.update({gpu: whys} if whys else {})
        known = [(rate, link) for link, rate in rates.items() if not isinstance(rate, NotAvailable)]
        if known:
            found[gpu] = max(known)
    return found, unknown


def _fault(link: NvLink, gb_s: float) -> str | None:
    """What is wrong with a link, as far as that is known."""
    if link.is_up is False:
        return "is down"
    if link.is_up is True and not isinstance(link.speed_gb_s, NotAvailable) and link.speed_gb_s < gb_s:
        return f"at {link.speed_gb_s:g} of {gb_s:g} GB/s"
    return None


def _unknown(link: NvLink) -> str | None:
    """What of a link is not known, and why. The rate of a link that is down does not matter."""
    if isinstance(link.is_up, NotAvailable):
        return f"its state is {link.is_up}"
    if link.is_up and isinstance(link.speed_gb_s, NotAvailable):
        return f"its rate is {link.speed_gb_s}"
    return None
