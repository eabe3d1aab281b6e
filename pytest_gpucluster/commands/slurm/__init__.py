"""What is Slurm's: the step that started a launcher, and commands that start jobs."""
