"""Attention on the paged KV cache, and the write of new K and V to it."""
