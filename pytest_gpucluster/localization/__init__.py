"""Which part is the culprit: searches that hang on one function, which measures groups. Pure: no torch, no NVML, no pytest.

What stands here is public: ``from pytest_gpucluster import localization``.
"""

from __future__ import annotations

from pytest_gpucluster.localization.gpus import judge_pair_paths, pair_lags, pairs_of, position_of
from pytest_gpucluster.localization.rails import (
    RailRate,
    better_of,
    gpus_near,
    judge_lags,
    judge_shares,
    rail_lags,
    rails_of_interfaces,
    rails_of_nics,
    rates_of,
    slow_rails,
)

__all__ = [
    "RailRate",
    "better_of",
    "gpus_near",
    "judge_lags",
    "judge_pair_paths",
    "judge_shares",
    "pair_lags",
    "pairs_of",
    "position_of",
    "rail_lags",
    "rails_of_interfaces",
    "rails_of_nics",
    "rates_of",
    "slow_rails",
]
