"""Commands that start jobs of Slurm."""
