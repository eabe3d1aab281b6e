"""A pytest plugin (``-p impatient``): who is on the GPUs has to be read within three seconds."""

from __future__ import annotations

from pytest_gpucluster.cluster import calls

calls.LOOK_S = 3.0
