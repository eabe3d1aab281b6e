"""A pytest plugin (``-p impatient``): the occupancy of the GPUs has to be read within three seconds."""

from __future__ import annotations

from pytest_gpucluster.cluster import binding

binding.OCCUPANCY_DEADLINE_S = 3.0
