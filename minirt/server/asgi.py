"""`Application`: the server as one ASGI application, for a host other than `minirt serve`, such as Ray Serve."""

from typing import Any

from minirt.errors import MinirtError
from minirt.server.app import App
from minirt.server.errors import HTTPError
from minirt.server.front import Front
from minirt.server.options import ServerOptions
from minirt.server.run import drain

__all__ = ["Application", "ServerOptions"]


class Application:
    """The server as an ASGI application. The host's lifespan events start and end it.

    At the startup, the engine's process begins and loads the model; at the shutdown, running requests end, then the process does.
    Before its start, an application can be pickled.

    Args:
        options: those of the server.
        load_options: how the model `options.model` is loaded, as the fields of `LoadOptions`.
    """

    def __init__(self, options: ServerOptions, **load_options: Any) -> None:
        self._options, self._load_options = options, {"model": options.model} | load_options
        self._front: Front | None = None
        self._app: App | None = None  # stays after the end, and refuses requests

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            raise MinirtError("the application has not been started", hint="its host must support ASGI's lifespan events")

    def check_health(self) -> None:
        """Raise an HTTPError unless the server takes requests, as `/health` does."""
        if self._front is None:
            raise HTTPError(503, "the application has not been started, or has ended")
        self._front.check_ready()

    async def start(self) -> None:
        """Load the model. Raises a MinirtError if it cannot be loaded."""
        self._front = await Front.start_engine(self._options, self._load_options)
        self._app = App(self._front)
        try:
            await self._front.load()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Let running requests end, for at most `options.drain_timeout` seconds, then end the engine's process."""
        front, self._front = self._front, None
        if front is not None:
            if not front.engine.ended.done():
                await drain(front)
            await front.close()

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        try:
            await self.start()
        except MinirtError as error:
            await send({"type": "lifespan.startup.failed", "message": f"minirt: {error}"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})
