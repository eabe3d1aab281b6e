"""From values to outcomes to a verdict. Pure: no torch, no NVML, no pytest."""
