"""Which part is the culprit: searches that hang on one function, which measures groups. Pure: no torch, no NVML, no pytest."""
