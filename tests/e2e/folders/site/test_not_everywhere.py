"""A file that one rank cannot import: a package is missing there."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

import os

import pytest

if os.environ.get("RANK") == "2":
    raise ModuleNotFoundError("No module named 'ours'", name="ours")


@pytest.mark.distributed
def test_with_our_package(rank):
    assert rank >= 0


def measured():
    return 1.0


def test_measured_with_our_package(cluster):
    assert cluster.run(measured)
