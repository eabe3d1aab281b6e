"""Tests of pytest_gpucluster/health."""
