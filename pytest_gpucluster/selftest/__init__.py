"""``--gpucluster-selftest``: plants faults in software before the run and checks that the run's own machinery finds them."""
