"""A model's kernels for a GPU that is not in this machine: `minirt compile`."""
