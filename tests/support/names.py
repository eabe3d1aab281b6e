"""Names of functions for controllers that tests play."""

from __future__ import annotations

from pytest_gpucluster.protocol.messages import FunctionName


def function_named(qualname: str) -> FunctionName:
    """The name of a function that no worker will look for."""
    return FunctionName(module="m", qualname=qualname, file="m.py", relative="m.py", digest="0")
