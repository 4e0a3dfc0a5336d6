"""The third stage of a step: the table of slots, the model or its CUDA graph, the draw."""
