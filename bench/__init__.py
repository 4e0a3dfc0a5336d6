"""Benchmarks of minirt: what `minirt bench` measures, and how fast a checkpoint loads (`loading.py`).

`measure` runs and times prompts, `decode`, `latency` and `throughput` are the benchmarks, `check` compares with the eager
layers before anything is timed, `ceiling` says how fast the memory can be read, `report` prints. Stored results lie in
bench/results, the log of what was tried in docs/decisions.
"""
