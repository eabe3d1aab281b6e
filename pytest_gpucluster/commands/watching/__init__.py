"""What ``gpucluster watch`` draws on a terminal."""
