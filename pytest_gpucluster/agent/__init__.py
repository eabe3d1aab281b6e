"""The agent of one rank: it starts a worker, keeps the deadline, kills, and answers the controller."""
