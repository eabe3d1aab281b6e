"""What a run is told from outside: options, torchrun's environment, YAML with line numbers."""
