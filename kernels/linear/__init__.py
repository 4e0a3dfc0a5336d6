"""Linear layers: norm, matrix product, bias, activation and residual in as few kernels as the number of tokens allows."""
