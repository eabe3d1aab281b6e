"""``cluster.run``: a function on many places, and its results by place."""
