"""The engine: requests in, tokens out. Scheduling, KV cache, step input, CUDA graphs, sampling."""
