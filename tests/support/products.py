"""Matrix products that a CPU build of torch may lack."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONAL_ON_A_CPU = ("float8_e4m3fn", "int8")


@contextlib.contextmanager
def skip_without_cpu_product(dtype: str) -> Iterator[None]:
    """Skip the test if torch has no CPU kernel for this dtype's product; every other error fails the test."""
    try:
        yield
    except NotImplementedError as error:
        if dtype not in OPTIONAL_ON_A_CPU or "arguments from the 'CPU' backend" not in str(error):
            raise
        pytest.skip(f"torch has no {dtype} product for CPUs here: {error}")
