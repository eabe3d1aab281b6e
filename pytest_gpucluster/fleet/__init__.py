"""A simulated fleet: agents that answer from a model of the hardware. Nothing is measured, and nothing can be accepted."""
