"""The training: set-up, steps, the loop, and an early stop."""
