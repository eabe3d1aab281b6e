"""Real launches by torchrun and pytest."""
