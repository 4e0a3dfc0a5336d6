"""`App`: the ASGI application. Routes, the API key, CORS, errors, time limits, and one line in the log for each request."""

import asyncio
import hmac
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from minirt.errors import MinirtError
from minirt.foreign_names import similar
from minirt.server import adapters, admin, anthropic, chat, completions, page, responses, tokenization
from minirt.server.answers import send
from minirt.server.errors import HTTPError, status_of
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front

# A handler returns what `send` takes, or None if it has answered.
Handler = Callable[[Front, Exchange], Awaitable[Any]]
# "METHOD path" → handler; "*" at the end stands for any rest. Each module of an API has its own. Those that generate have a
# time limit.
_GENERATE: Mapping[str, Handler] = {**chat.ROUTES, **completions.ROUTES, **responses.ROUTES, **anthropic.ROUTES}
ROUTES: Mapping[str, Handler] = {
    **_GENERATE, **responses.STORED, **tokenization.ROUTES, **admin.ROUTES, **page.ROUTES, **adapters.ROUTES,
}  # fmt: skip
# First words of paths of OpenAI and vLLM that do something else than generate text, though some are spelled like a path here.
_NOT_TEXT = ("audio", "batches", "classify", "embeddings", "files", "images", "moderations", "pooling", "rerank", "score")
_PUBLIC = ("/", "/health", "/ping", "/ready")  # paths that need no API key
_QUIET = ("/health", "/ping", "/ready", "/metrics")  # paths without a line in the log, because they are polled


class App:
    """Answers HTTP requests with a front."""

    def __init__(self, front: Front) -> None:
        self._front, self._options = front, front.options
        self._prefixes = {route[:-1]: handler for route, handler in ROUTES.items() if route.endswith("*")}
        self._methods: dict[str, list[str]] = {}
        for method, path in (route.split(" ") for route in ROUTES if not route.endswith("*")):
            self._methods.setdefault(path, []).append(method)
        self._keys = [key.encode() for key in self._options.api_keys]
        self._public = _PUBLIC if self._options.metrics_need_key else (*_PUBLIC, "/metrics")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, uuid.uuid4().hex, self._options.root_path)
        if (origin := self._allowed_origin(exchange)) is not None:
            exchange.headers += [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        anthropic.adopt(exchange)
        self._front.exchanges.add(exchange)
        error: MinirtError | None = None
        try:
            if origin is not None and exchange.method == "OPTIONS":
                await self._preflight(exchange)
            else:
                await self._handle(exchange)
        except asyncio.CancelledError:
            if not exchange.disconnected:
                raise
        except MinirtError as named:
            error = exchange.named(named)
        except TimeoutError:
            error = HTTPError(504, "the request took too long", expected=f"at most {self._options.request_timeout} s")
        except RecursionError:  # while it was parsed or handled
            error = HTTPError(400, "the body is nested too deeply", param="body")
        except Exception as unforeseen:
            traceback.print_exc(file=sys.stderr)
            error = HTTPError(500, f"unexpected {type(unforeseen).__name__}: {unforeseen}")
        finally:
            exchange.stop_watching()
            try:
                if error is not None:
                    exchange.log["error"] = str(error)
                    if not exchange.disconnected:
                        await exchange.answer_error(self._front.for_client(error))
                        if exchange.streaming:
                            exchange.status = status_of(error)
            finally:
                self._front.exchanges.discard(exchange)
                if exchange.disconnected:
                    exchange.status = 499
                self._write_log(exchange)

    async def _handle(self, exchange: Exchange) -> None:
        if exchange.path not in self._public:
            self._check_key(exchange)
        route = f"{'GET' if exchange.method == 'HEAD' else exchange.method} {exchange.path}"
        handler = ROUTES.get(route) or next((self._prefixes[start] for start in self._prefixes if route.startswith(start)), None)
        if handler is None:
            methods = self._methods.get(exchange.path)
            if methods is None:
                raise self._no_such_path(exchange.path[:200])
            raise HTTPError(405, "the path does not have this method", expected=" or ".join(methods), found=exchange.method)
        timeout = self._options.request_timeout if handler in _GENERATE.values() else None
        async with asyncio.timeout(timeout):
            if (content := await handler(self._front, exchange)) is not None:
                await send(self._front, exchange, content)

    def _no_such_path(self, path: str) -> HTTPError:
        """The error that names the paths like this one, or those that generate."""
        what = "there is no such path"
        near = [] if path.removeprefix("/v1").strip("/").partition("/")[0] in _NOT_TEXT else similar(path, self._methods)
        if near:
            return HTTPError(404, what, found=path, hint=f"did you mean {' or '.join(near)}?")
        paths = ", ".join(route.partition(" ")[2] for route in _GENERATE)
        hint = f"this server generates text: POST to {paths}; GET /v1/models has the model's name"
        return HTTPError(404, what, found=path, hint=hint)

    def _check_key(self, exchange: Exchange) -> None:
        """Compare the key with every accepted one, in a time that does not depend on its value."""
        if not self._keys:
            return
        scheme, _, key = (exchange.header(b"authorization") or b"").partition(b" ")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        given += [key] if (key := exchange.header(b"x-api-key") or b"") else []
        same = [hmac.compare_digest(accepted, key) for accepted in self._keys for key in given]
        if not any(same):
            hint = "send Authorization: Bearer KEY, or x-api-key: KEY"
            raise HTTPError(401, "the API key is missing or wrong", code="invalid_api_key", hint=hint)

    def _allowed_origin(self, exchange: Exchange) -> bytes | None:
        origin = exchange.header(b"origin")
        allowed = origin is not None and {"*", origin.decode("latin-1")} & set(self._options.allowed_origins)
        return origin if allowed else None

    async def _preflight(self, exchange: Exchange) -> None:
        headers = [
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"), (b"access-control-max-age", b"600"),
            (b"access-control-allow-headers", exchange.header(b"access-control-request-headers") or b"authorization"),
        ]  # fmt: skip
        await exchange.answer(b"", 200, headers)

    def _write_log(self, exchange: Exchange) -> None:
        if self._options.quiet or exchange.path in _QUIET:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "id": exchange.id, "client": exchange.client,
            "method": exchange.method, "path": exchange.path[:200], "status": exchange.status,
            "ms": round((time.perf_counter() - exchange.started) * 1e3, 1),
        }  # fmt: skip
        sys.stderr.write(encode_json(line | exchange.log).decode() + "\n")
