"""Tests of pytest_gpucluster/worker."""
