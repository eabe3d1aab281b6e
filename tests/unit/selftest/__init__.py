"""Tests of pytest_gpucluster/selftest."""
