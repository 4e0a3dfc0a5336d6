"""`minirt compare`: each layer's implementation against its eager implementation, and the whole model."""
