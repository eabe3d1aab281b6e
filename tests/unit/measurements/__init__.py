"""Tests of pytest_gpucluster/measurements."""
