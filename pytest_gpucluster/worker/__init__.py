"""Inside a worker, the process that touches the GPU, and what it leaves for a report when it dies."""
