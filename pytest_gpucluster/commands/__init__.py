"""The larger commands of ``gpucluster``, one module each; ``cli`` knows their options and loads the one that is wanted."""
