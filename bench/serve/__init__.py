"""`minirt bench serve`: load for an OpenAI-compatible server, and what its clients see. Imports no PyTorch.

`http` reads event streams, `client` runs one request, `workload` makes the requests and their times, `worker` is a process that
sends its share of them, `run` starts the processes, `metrics` computes the result, `report` and `picture` show it.
"""
