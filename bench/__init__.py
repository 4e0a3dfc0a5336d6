"""Benchmarks of minirt. Stored results lie in bench/results, the log of what was tried in bench/LOG.md."""
