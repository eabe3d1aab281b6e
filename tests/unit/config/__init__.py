"""Tests of pytest_gpucluster/config."""
