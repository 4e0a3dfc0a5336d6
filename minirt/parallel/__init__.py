"""Tensor parallelism: several processes, a GPU each, compute one model."""
