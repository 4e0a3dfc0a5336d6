"""Many clients, most of which behave badly, and SIGTERM in the middle: no answer is lost or mixed up, and nothing leaks.

MINIRT_SOAK_SECONDS sets the length; 900 is a quarter of an hour. With `-s` the test prints the memory of both processes.
"""

import asyncio
import json
import os
import random
import signal
import socket

import psutil
from support.server import Server, answer, events, message

from minirt import models
from minirt.text.tokenizer import Tokenizer

SECONDS = float(os.environ.get("MINIRT_SOAK_SECONDS", "1"))
LONG = SECONDS >= 60
CLIENTS = 64 if LONG else 24
PARTS = 3 if LONG else 1  # after each, all clients pause, and nothing may be left of their requests
GROWTH = 32  # MiB by which a process may grow after the first part
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CLOSED = {"type": "object", "additionalProperties": False, "required": ["a"]}
WRONG = [
    {"prompt": "a", "temperature": "hot"}, {"prompt": "Once " * 600}, {"prompt": [10**6]}, {"prompt": "a", "n": 10**6},
    {"prompt": "a", "stop": ["x"] * 100_000}, {"prompt": "a", "structured_outputs": {"regex": "(a*)*b" * 10_000}},
    {"prompt": "a", "structured_outputs": {"grammar": "start: A\nA: /(.*a){200}/ & /(.*b){200}/ & ~/(.*c){200}/\n"}},
]  # fmt: skip
NONSENSE = [
    b"\x00\xff" * 50, b"GET / HTTP/9.9\r\n\r\n", message(b"{", COMPLETIONS), message([], "/x"),
    message(b'{"prompt": ' + b"[" * 10_000, COMPLETIONS), message(b'{"prompt": "\xc3\x28"}', COMPLETIONS),
]  # fmt: skip


class Client:
    """Asks one thing after the other, each drawn at random.

    Attributes:
        answered, refused: number of whole answers, and of requests that a server that ends did not take.
        idle: it waits because `going` is not set.
    """

    tokenizer = Tokenizer.load(models.embedded())

    def __init__(self, number, port, going):
        self._draw, self._port, self._going = random.Random(number), port, going
        self.answered = self.refused = 0
        self.idle = False
        bad = [self.leaves, self.aborts_its_upload, self.reads_slowly, self.sends_nonsense, self.errs]
        self._kinds = [*bad, self.chats, *[self.completes] * 4]

    async def run(self):
        """Goes on until the server takes no more requests."""
        while not self.refused:
            self.idle = True
            await self._going.wait()
            self.idle = False
            try:
                await self._draw.choice(self._kinds)()
            except (OSError, asyncio.IncompleteReadError):  # the server has ended: `_whole` notices
                await asyncio.sleep(0.01)

    async def _ask(self, data, receive_buffer=None):
        own = socket.socket()
        own.setblocking(False)
        if receive_buffer is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self._port))
        except OSError:
            own.close()
            raise
        reader, writer = await asyncio.open_connection(sock=own, limit=1 << 24)
        writer.write(data)
        return reader, writer

    async def _whole(self, *requests):
        """The bodies of whole answers to requests on one connection. An answer that has begun must come to its end."""
        bodies, writer = [], None
        try:
            reader, writer = await self._ask(b"")
            for path, body in requests:
                try:
                    writer.write(message(body, path))
                    begin = await reader.readuntil(b"\r\n")
                except (OSError, asyncio.IncompleteReadError):
                    self.refused += 1
                    break
                try:
                    status, _, data = await answer(reader, begin)
                except (OSError, asyncio.IncompleteReadError) as error:
                    raise RuntimeError(f"an answer that has begun is lost: {begin!r}") from error
                if status == 503:
                    self.refused += 1
                    break
                assert status == 200, data
                self.answered += 1
                bodies.append(data)
        except ConnectionRefusedError:
            self.refused += 1
        finally:
            if writer is not None:
                writer.close()
        return bodies

    async def completes(self):
        """Each answer must consist of the one token that its request allows."""
        draw, requests = self._draw, []
        for _ in range(draw.choice([1, 1, 2])):
            body = {"prompt": ["Once " * draw.randint(1, 60)] * draw.choice([1, 1, 1, 2]), "n": draw.choice([1, 1, 1, 3])}
            body |= {"max_tokens": draw.randint(1, 6), "seed": draw.randint(0, 99), "stream": draw.random() < 0.7}
            body |= {"allowed_token_ids": [draw.randint(300, 2000)], "logprobs": draw.choice([None, None, None, 3])}
            requests.append((COMPLETIONS, body | {"ignore_eos": True}))
        for (_, body), data in zip(requests, await self._whole(*requests), strict=False):
            count = len(body["prompt"]) * body["n"]
            text = self.tokenizer.decode(body["allowed_token_ids"] * body["max_tokens"])
            if body["stream"]:
                found = events(data)
                assert found[-1] == "[DONE]"
                texts, reasons = [""] * count, [None] * count
                for event in found[:-1]:
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                        reasons[choice["index"]] = choice["finish_reason"]
            else:
                choices = json.loads(data)["choices"]
                texts, reasons = [choice["text"] for choice in choices], [choice["finish_reason"] for choice in choices]
            assert texts == [text] * count
            assert reasons == ["length"] * count

    async def chats(self):
        """Answers with a grammar, some of which nobody has used before."""
        draw = self._draw
        number = draw.choice([1, 2, draw.randint(3, 10**6)])
        schema = CLOSED | {"properties": {"a": {"const": number}}}
        body = {"messages": USER, "max_tokens": 300, "structured_outputs": {"json": schema, "disable_any_whitespace": True}}
        for data in await self._whole((CHATS, body)):
            assert json.loads(json.loads(data)["choices"][0]["message"]["content"]) == {"a": number}

    async def errs(self):
        """Its request is refused, with a status."""
        reader, writer = await self._ask(message(self._draw.choice(WRONG), COMPLETIONS))
        status, _, data = await answer(reader)
        writer.close()
        assert status in (400, 503), data

    async def leaves(self):
        """Goes at some point of its answer, or before it."""
        draw = self._draw
        body = {"prompt": "Once " * draw.choice([1, 1, 1, 400]), "max_tokens": 100, "ignore_eos": True}
        body |= {"n": draw.choice([1, 1, 1, 4]), "seed": 1, "stream": draw.random() < 0.7}
        reader, writer = await self._ask(message(body, COMPLETIONS))
        if body["stream"] and draw.random() < 0.5:
            await reader.read(draw.randint(1, 2000))
        elif draw.random() < 0.5:
            await asyncio.sleep(draw.random() / 10)
        writer.transport.abort()

    async def aborts_its_upload(self):
        data = message({"prompt": "Once " * self._draw.choice([50, 10**5])}, COMPLETIONS)
        _, writer = await self._ask(data[: self._draw.randint(1, len(data) - 1)])
        writer.transport.abort()

    async def reads_slowly(self):
        reader, writer = await self._ask(message({"prompt": "Once", "max_tokens": 9, "stream": True}, COMPLETIONS))
        for _ in range(5):
            if not await reader.read(100):
                break
            await asyncio.sleep(0.05)
        writer.close()

    async def reads_nothing(self, server):
        """Asks for more than the server keeps for one client, and goes when it is dropped."""
        dropped = server.log.count("reads too slowly")
        body = {"prompt": "Once", "max_tokens": 400, "n": 32, "seed": 0, "logprobs": 20, "ignore_eos": True, "stream": True}
        _, writer = await self._ask(message(body, COMPLETIONS), receive_buffer=4096)
        writer.transport.pause_reading()
        await until(lambda: server.log.count("reads too slowly") > dropped)
        writer.transport.abort()

    async def sends_nonsense(self):
        reader, writer = await self._ask(self._draw.choice(NONSENSE))
        writer.write_eof()
        await reader.read(1000)
        writer.close()


async def until(condition):
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.05)


async def soak(server):
    """Returns the clients, and the processes that the server had."""
    front, engine = psutil.Process(server.process.pid), server.engine
    going = asyncio.Event()
    clients = [Client(number, int(server.url.rpartition(":")[2]), going) for number in range(CLIENTS)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    memory = []
    for _ in range(PARTS):
        going.set()
        if LONG:  # it takes all places of the engine for a while
            await clients[0].reads_nothing(server)
        await asyncio.wait(tasks, timeout=SECONDS / PARTS, return_when=asyncio.FIRST_COMPLETED)
        going.clear()
        await until(lambda: all(client.idle or task.done() for client, task in zip(clients, tasks, strict=True)))
        assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        await until(lambda: all(own.status == "LISTEN" for own in front.net_connections("inet")))
        await until(lambda: server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0)
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert json.loads(server.request("GET", "/load")[2]) == {"server_load": 0}
        memory.append([own.memory_info().rss >> 20 for own in (front, engine)])
        count, threads = sum(client.answered for client in clients), (front.num_threads(), engine.num_threads())
        print(f"{count:,} answers; MiB of the front and the engine: {memory[-1]}; threads: {threads}", flush=True)
    assert all(last - first < GROWTH for first, last in zip(memory[0], memory[-1], strict=True)), memory
    processes = front.children(recursive=True)
    going.set()
    await asyncio.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(120):
        await asyncio.gather(*tasks)
    return clients, processes


def test_soak(folder, tmp_path):
    options = ("--kv-cache-memory", "4MiB", "--max-num-seqs", 8, "--drain-timeout", 120)
    server = Server(tmp_path / "log", "--model", folder, *options).wait()
    try:
        clients, processes = asyncio.run(soak(server))
        assert server.process.wait(60) == 0, server.log[-3000:]
    finally:
        server.process.kill()
    assert not psutil.wait_procs(processes, 30)[1]
    assert any(client.answered for client in clients)
    assert server.log.count("reads too slowly") == (PARTS if LONG else 0)
    strange = [line for line in server.log.splitlines() if not line.startswith(("{", "minirt: "))]
    assert not strange, strange[:20]
    assert {line["status"] for line in server.lines} <= {200, 400, 404, 499, 503}
