"""`Application`, driven by ASGI messages alone, as its host sends them.

Catches a start that says it is complete before the model is loaded, an end that cuts off answers or leaves the engine's process
behind, and state that cannot be pickled.
"""

import asyncio
import json
import pickle

import pytest
from support.server import events

from minirt import Generator, SamplingParams
from minirt.errors import MinirtError
from minirt.server.asgi import Application, ServerOptions
from minirt.server.errors import HTTPError

OPTIONS = {"device": "cpu", "kv_cache_memory": 1 << 23}


class Host:
    """What a host does: it runs an application's lifespan, and hands it requests."""

    def __init__(self, application):
        self.application, self._in, self._out = application, asyncio.Queue(), asyncio.Queue()
        self._running = asyncio.create_task(application({"type": "lifespan"}, self._in.get, self._out.put))

    async def tell(self, event):
        """Send an event of the lifespan, and return the answer."""
        await self._in.put({"type": f"lifespan.{event}"})
        answer = await asyncio.wait_for(self._out.get(), 60)
        if answer["type"] != "lifespan.startup.complete":
            await asyncio.wait_for(self._running, 60)
        return answer

    async def request(self, path, body=None, on_part=lambda: None):
        """Send a request → status, body. `on_part()` is called for each part of the answer."""
        scope = {"type": "http", "method": "GET" if body is None else "POST", "path": path, "headers": [], "query_string": b""}
        sent, forever = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}], asyncio.Event()
        parts = []

        async def receive():
            if not sent:
                await forever.wait()
            return sent.pop()

        async def send(message):
            parts.append(message)
            on_part()

        await asyncio.wait_for(self.application(scope, receive, send), 60)
        return parts[0]["status"], b"".join(part.get("body", b"") for part in parts)


def test_a_life(folder):
    with Generator.from_pretrained(folder, **OPTIONS) as generator:
        expected = generator.generate("Once upon a time", SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)).text

    async def work():
        host = Host(pickle.loads(pickle.dumps(Application(ServerOptions(str(folder), quiet=True), **OPTIONS))))
        with pytest.raises(HTTPError, match="not been started"):
            host.application.check_health()
        assert (await host.tell("startup"))["type"] == "lifespan.startup.complete"
        host.application.check_health()
        engine = host.application._front.engine._process
        assert (await host.request("/health"))[0] == 200
        begun = asyncio.Event()
        body = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
        stream = asyncio.create_task(host.request("/v1/completions", body, begun.set))
        await asyncio.wait_for(begun.wait(), 60)
        assert (await host.tell("shutdown"))["type"] == "lifespan.shutdown.complete"
        status, data = await stream
        assert status == 200
        *pieces, done = events(data)
        assert done == "[DONE]"
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
        assert engine.poll() is not None
        assert (await host.request("/health"))[0] == 503
        with pytest.raises(HTTPError, match="has ended"):
            host.application.check_health()

    asyncio.run(work())


def test_a_model_that_cannot_be_loaded():
    async def work():
        answer = await Host(Application(ServerOptions("/no/such/folder", quiet=True), device="cpu")).tell("startup")
        assert answer["type"] == "lifespan.startup.failed"
        assert "/no/such/folder" in answer["message"]

    asyncio.run(work())


def test_a_host_without_lifespan():
    async def work():
        application = Application(ServerOptions("fake"))
        with pytest.raises(MinirtError, match="lifespan"):
            await application({"type": "http"}, None, None)

    asyncio.run(work())
