"""Tests of pytest_gpucluster/inventory."""
