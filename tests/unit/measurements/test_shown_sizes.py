"""The table of a collective by size, beside its judged value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import Blame, MeasurementError
from pytest_gpucluster.measurements.collective_sizes import CollectiveSizes
from tests_acceptance.conftest import sizes_or_error

if TYPE_CHECKING:
    from pytest_gpucluster.errors import Part

TABLE = CollectiveSizes(rows=[{"bytes": 8}], left_out=["bfloat16"])


def failing(part: Part) -> Any:
    """A reader whose measurement failed."""

    def read() -> None:
        raise MeasurementError("by_size was not measured: rank 0: some error\n  traceback", blame=Blame(part=part))

    return read


def test_the_table() -> None:
    """Its rows, and the dtypes without."""
    assert sizes_or_error(lambda: TABLE) == {"sizes": [{"bytes": 8}], "without": ["bfloat16"]}


def test_an_error_of_our_own_is_shown() -> None:
    """The judged value stands: a table for the report cannot spoil it."""
    assert sizes_or_error(failing("software")) == {"sizes": "not measured: by_size was not measured: rank 0: some error"}


@pytest.mark.parametrize("part", ["unknown", "gpu", "link", "host"])
def test_a_fault_is_raised(part: Part) -> None:
    """Wrong elements, a rank that hung or died."""
    with pytest.raises(MeasurementError, match="some error"):
        sizes_or_error(failing(part))
