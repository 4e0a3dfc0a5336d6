"""`minirt compare`: each layer's implementation against its eager form, and the whole model."""
