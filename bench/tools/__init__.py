"""Scripts that make results, tables and pictures. They run from a checkout and are not installed."""
