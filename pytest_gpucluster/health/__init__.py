"""Judges of hardware and hosts: readings in, what is bad and what is unknown out. Pure: no torch, no NVML, no pytest."""
