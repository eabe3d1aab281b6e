"""Input of a run: options, torchrun's environment, YAML with line numbers."""
