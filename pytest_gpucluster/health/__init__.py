"""Judges of hardware and hosts: readings in, a ``Finding`` out. Pure: no torch, no NVML, no pytest.

What a module lists in ``__all__`` is public: ``from pytest_gpucluster import health``, then
``criterion.judge(health.judge_nvlinks(...))``.
"""

from __future__ import annotations

from pytest_gpucluster.health.dcgm import *
from pytest_gpucluster.health.drift import *
from pytest_gpucluster.health.driver_errors import *
from pytest_gpucluster.health.gpu import *
from pytest_gpucluster.health.growth import *
from pytest_gpucluster.health.host_parts import *
from pytest_gpucluster.health.hosts import *
from pytest_gpucluster.health.isolation import *
from pytest_gpucluster.health.nic_growth import *
from pytest_gpucluster.health.nics import *
from pytest_gpucluster.health.nvlink import *
from pytest_gpucluster.health.schedulers import *
from pytest_gpucluster.health.shared_paths import *
from pytest_gpucluster.health.versions import *
from pytest_gpucluster.judging.finding import merge as merge
