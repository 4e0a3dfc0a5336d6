"""From a model's name to weights on a device: files, options, memory, checkpoint."""
