"""The controller's side of a run: calls to agents, their replies, and which rank is the cause of a failure."""
