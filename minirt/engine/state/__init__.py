"""What the host knows of requests: `Sequence`, and the arrays of those that run."""
