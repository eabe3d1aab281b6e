"""The pytest plugin. pytest loads this package and finds here every hook and fixture of its modules."""

from __future__ import annotations

from pytest_gpucluster.plugin.fixtures import *  # noqa: F403 -- pytest asks this module for them, and for no list
from pytest_gpucluster.plugin.options import *  # noqa: F403 -- as above
