"""`minirt tune`: launch configurations measured on this GPU."""
