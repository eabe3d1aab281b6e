"""``--gpucluster-selftest``: faults planted in software before the run, and whether this run's own machinery finds them."""
