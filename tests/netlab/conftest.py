"""The lab's hosts, real launches on them, and why there may be none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.launching import starter
from tests.support.netlab import Host, lab, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["starter"]


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips the test where no lab can be made."""
    if (why := why_not()) is not None:
        pytest.skip(why)


@pytest.fixture
def hosts(possible: None) -> Iterator[tuple[Host, ...]]:
    """Four hosts with two interfaces each."""
    with lab(hosts=4) as made:
        yield made
