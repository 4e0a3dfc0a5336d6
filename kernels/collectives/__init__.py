"""Sums over the GPUs of one host: each GPU stores its part into the others' memory."""
