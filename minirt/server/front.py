"""`Front`: what the handlers of the front process share. Holds the tokenizer and the chat template, not the weights."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from minirt.errors import InputError, MinirtError, inside, printable
from minirt.processor import Call, Processor
from minirt.server.errors import HTTPError
from minirt.server.exchange import Exchange
from minirt.server.generation import Generation
from minirt.server.metrics import Metrics
from minirt.server.options import ServerOptions
from minirt.server.remote_engine import RemoteEngine
from minirt.server.wire import Ready, Start
from minirt.text.reply_format import ReplyFormat
from minirt.text.tokenizer import Tokenizer

T = TypeVar("T")
_LONG = 2000  # bytes of a request: from here on, checking and encoding it takes longer than a change of threads
_THREADS = 4  # that check and encode long requests, and render chat templates
_MAX_NOTED = 1000  # names of unknown fields that are remembered
_MAX_NAME = 80  # characters of each


def start_message(options: ServerOptions, load_options: dict[str, Any]) -> Start:
    """The first message to the engine's process. `load_options`: the fields of `LoadOptions`."""
    return Start(load_options, not options.quiet, list(options.warm_prompts), list(options.imports))


@dataclass(eq=False)
class Front:
    """The state of the front process.

    Attributes:
        loaded: the processor and the model's limits, once it is loaded.
        folder: of the model's files, once it is known.
        reply_format: how answers of chats are read.
        draining: whether new requests are refused, because the server is about to end.
        exchanges: those that are being answered.
        generations: those that are running.
        created: the time of the start, as Unix time.
        loras: the names of adapters, which clients may ask for as for models.
    """

    options: ServerOptions
    engine: RemoteEngine
    metrics: Metrics
    created: int
    folder: str | None = None
    loaded: tuple[Processor, Ready] | None = None
    tokenizer: Tokenizer | None = None
    reply_format: ReplyFormat = field(default_factory=ReplyFormat)
    draining: bool = False
    loras: list[str] = field(default_factory=list)
    exchanges: set[Exchange] = field(default_factory=set)
    generations: set[Generation] = field(default_factory=set)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "minirt-encode"))
    _noted: set[str] = field(default_factory=set)

    @classmethod
    async def start_engine(cls, options: ServerOptions, load_options: dict[str, Any]) -> "Front":
        """A front whose engine's process has begun. `load_options`: the fields of `LoadOptions`."""
        engine = await RemoteEngine.start(start_message(options, load_options))
        return cls(options, engine, Metrics(options.names[0]), int(time.time()))

    async def load(self) -> None:
        """Load the tokenizer while the engine's process loads the weights, then wait for it. Raises what has prevented it."""
        template = declared = None
        self.folder = await self.engine.folder
        if self.folder is not None:
            self.tokenizer = await self.in_thread(Tokenizer.load, Path(self.folder))
        if self.tokenizer is not None:
            template, declared = self.tokenizer.tool_template, self.tokenizer.response_template
        with inside("--tool-call-parser"):
            self.reply_format = ReplyFormat.choose(template, declared, self.options.tool_call_parser)
        for note in self.reply_format.notes:
            sys.stderr.write(f"minirt: {printable(note)}\n")
        info = await self.engine.ready
        name = self.options.names[0]
        processor = Processor(self.engine, name, self.tokenizer, info.generation_config, info.eos_token_ids, info.vocab_size)
        if taken := set(self.options.names).intersection(info.loras):
            raise InputError("an adapter has the model's name", where="--lora", found=min(taken))
        self.loaded, self.loras = (processor, info), info.loras
        if not self.options.quiet:
            for file, kept in info.facts.get("warm_prompts", {}).items():
                sys.stderr.write(f"minirt: {printable(file)}: {kept} tokens are kept for prompts that begin with them\n")

    @property
    def state(self) -> str:
        """"loading", "ready", "draining" or "failed"."""
        if self.engine.ended.done():
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if self.loaded is None else "ready"

    def check_ready(self) -> tuple[Processor, Ready]:
        """The processor and the model's limits. Raises 503 while the model is loaded or the server drains, and after the end."""
        state = self.state
        if state == "ready" and self.loaded is not None:
            return self.loaded
        if state == "failed":
            raise HTTPError(503, "the engine has failed, and the server is ending", found=str(self.engine.ended.result()))
        what = "the model is being loaded" if state == "loading" else "the server is ending, and takes no new requests"
        raise HTTPError(503, what, retry_after=5 if state == "loading" else None)

    def check_model(self, name: str | None) -> None:
        """Raise 404 unless it is a name of the model or of an adapter. None is."""
        if name is not None and name not in self.options.names and name not in self.loras:
            expected = " or ".join([*self.options.names, *self.loras[:8]])
            what, code = "there is no such model", "model_not_found"
            raise HTTPError(404, what, param="model", code=code, expected=expected, found=name[:200])

    def for_client(self, error: MinirtError) -> MinirtError:
        """The error as an answer says it: files of the model are named without their folder."""
        public = error.at(error.where)
        for name in ("what", "where", "expected", "found", "hint"):
            if self.folder is not None and (value := getattr(public, name)) is not None:
                setattr(public, name, str(value).replace(f"{self.folder}{os.sep}", ""))
        return public

    async def body(self, exchange: Exchange) -> bytes:
        """The body of a request that needs the model."""
        self.check_ready()
        return await exchange.body(self.options.max_body_size)

    @staticmethod
    def reads(function: "Callable[[Front, Exchange, bytes], T]") -> "Callable[[Front, Exchange], Awaitable[T]]":
        """The handler that returns what a function makes of the body of a request, in another thread."""

        async def handler(front: Front, exchange: Exchange) -> T:
            return await front.in_thread(function, front, exchange, await front.body(exchange))

        return handler

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def aside(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function of a request; in another thread if its body of `size` bytes may keep the event loop for long."""
        return function(*arguments) if size < _LONG else await self.in_thread(function, *arguments)

    def start(self, call: Call, interval: int | None, on_slow: Callable[[], None] = lambda: None) -> Generation:
        """The running requests of a call; see `Generation`."""
        return Generation(self.engine, call, self.metrics, self.generations, interval, on_slow)

    def note_unknown(self, names: Sequence[str], what: str = "unknown fields of requests") -> None:
        """Write to the log that something is ignored, each name once."""
        short = dict.fromkeys(name[:_MAX_NAME] for name in names)
        new = [name for name in short if name not in self._noted][: _MAX_NOTED - len(self._noted)]
        if new:
            self._noted.update(new)
            sys.stderr.write(f"minirt: {what} are ignored: {', '.join(map(printable, new))}\n")

    async def close(self) -> None:
        """End the engine's process."""
        await self.engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
