"""The settings of a run: defaults, presets, a YAML file, the command line."""
