"""A distributed test whose body would need a fixture of the controller's process."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import pytest


@pytest.mark.distributed
def test_sum(rank, world_size, tmp_path, capsys):
    assert rank < world_size
