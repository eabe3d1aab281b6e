"""The outcome of a run, as one JSON line, a summary and TensorBoard curves."""
