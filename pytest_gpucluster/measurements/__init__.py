"""Measurements: plain functions that run on the GPUs and return frozen dataclasses.

They know torch and NVML; they know nothing of pytest, thresholds or verdicts.
"""
