"""`minirt serve`: an OpenAI-compatible server in two processes.

Needs the extra `minirt[serve]`. Only `minirt serve` imports this package.
"""
