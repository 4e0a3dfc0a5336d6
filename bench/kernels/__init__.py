"""`minirt bench kernels`: every kernel on a model's shapes, with its error, its time and the roofline."""
