"""The facts, software and clock of this worker's host."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from pytest_gpucluster.inventory.host import HostFacts, read_host
from pytest_gpucluster.inventory.identity import read_stack, read_variables, read_versions
from pytest_gpucluster.protocol.functions import without_device


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """A host, the versions of what runs there by name, and the variables of this rank that change what CUDA and NCCL do."""

    facts: HostFacts
    versions: dict[str, str]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """What the host's clock shows, in seconds since 1970."""

    shown_s: float


@without_device
def host_state() -> HostState:
    """Read this host. A value that cannot be read says why, and leaves the others."""
    return HostState(
        facts=read_host(),
        versions={**read_versions(), **read_stack()},
        variables=read_variables(os.environ),
    )


@without_device
def host_clock() -> HostClock:
    """Read this host's clock."""
    return HostClock(shown_s=time.time())
