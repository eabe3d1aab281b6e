"""Tests of pytest_gpucluster/thresholds."""
