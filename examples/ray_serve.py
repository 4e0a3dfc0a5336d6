"""Replicas of one model behind Ray Serve, which spreads requests and replaces replicas whose engine has failed.

python examples/ray_serve.py [MODEL [REPLICAS]]     needs `pip install '.[serve]' 'ray[serve]'`, and a GPU for each replica

`minirt.server.asgi.Application` is all of `minirt serve` as one ASGI application. Any host that supports ASGI's lifespan events
can run it: `uvicorn --factory`, hypercorn and others.
"""

import sys

try:
    from ray import serve
except ModuleNotFoundError:
    sys.exit("this example runs Ray Serve, and ray is missing: pip install 'ray[serve]'")

from minirt.server.asgi import Application, ServerOptions


def deployment(model: str, replicas: int, gpus: float = 1, **load_options: object) -> serve.Application:
    """One engine for each replica. `load_options`: those of `minirt.LoadOptions`."""

    @serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=512,  # Ray's default is 5; the engine itself batches and queues
        health_check_period_s=2,
        graceful_shutdown_timeout_s=90,  # longer than running requests get to end
        ray_actor_options={"num_gpus": gpus},
    )
    @serve.ingress(Application(ServerOptions(model), **load_options))
    class Model:
        def check_health(self) -> None:  # Ray replaces a replica in which it raises three times
            self.app.check_health()

    return Model.bind()


if __name__ == "__main__":
    model, replicas = (*sys.argv[1:], *("embedded", "1")[len(sys.argv) - 1 :])
    serve.run(deployment(model, int(replicas)), blocking=True)
