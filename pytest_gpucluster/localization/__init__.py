"""Which part is the culprit: searches that hang on one function, which measures groups. Pure: no torch, no NVML, no pytest.

What stands here is public: ``from pytest_gpucluster import localization``.
"""

from __future__ import annotations

from pytest_gpucluster.localization.gpus import *
from pytest_gpucluster.localization.rails import *
