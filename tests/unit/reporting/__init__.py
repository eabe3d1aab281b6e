"""Tests of pytest_gpucluster/reporting."""
