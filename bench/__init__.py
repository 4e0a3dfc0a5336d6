"""Benchmarks of minirt: the code behind `minirt bench`, `compare`, `tune` and `eval`.

`decode`, `prefill` and `throughput` are the model benchmarks. `measure` runs and times prompts. `check` compares with
the eager layers before anything is timed. `ceiling` measures memory bandwidth and the rate of matrix products. `report` prints.
Stored results are in bench/results; docs/decisions records what was tried.
"""
