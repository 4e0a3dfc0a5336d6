"""`minirt serve`: an OpenAI-compatible server in two processes.

Needs the extra `minirt[serve]`. Inside minirt, only `minirt serve` imports this package.
"""
