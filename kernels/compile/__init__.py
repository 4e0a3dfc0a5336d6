"""Compiling kernels before they are needed, and the launch configurations that `minirt tune` stores."""
