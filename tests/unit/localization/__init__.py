"""Tests of pytest_gpucluster/localization."""
