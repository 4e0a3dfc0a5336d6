"""CPU time that the front of `minirt serve` spends on a token, without a model: `python bench/tools/front_cost.py`.

Three processes: an engine that only sends steps, the real front, and a client that reads and drops bytes. The engine keeps a
pace at which the front is never behind; otherwise the front would join tokens, and look cheaper than it is.
"""

import argparse
import asyncio
import cProfile
import os
import pstats
import select
import socket
import time

from minirt import models
from minirt.engine.request import TokenOutput
from minirt.server.app import App
from minirt.server.front import Front
from minirt.server.http_protocol import HTTPProtocol
from minirt.server.metrics import Metrics
from minirt.server.options import ServerOptions
from minirt.server.remote_engine import RemoteEngine
from minirt.server.run import FrontServer
from minirt.server.wire import TO_ENGINE, Found, Frames, Ready, Start, Step, Submit, frame


def fake_engine(connection: socket.socket, streams: int, tokens: int, pace: float) -> None:
    """Waits for `streams` requests, then sends a step every `pace` seconds. Prints what its messages cost."""
    frames, ids, done = Frames(), [], False
    while not done:
        for body in frames.feed(connection.recv(1 << 20)):
            match TO_ENGINE.decode(body):
                case Start():
                    connection.sendall(frame(Found(str(models.embedded()))) + frame(Ready(8192, 4096, 256, (), None, {})))
                case Submit(requests=requests):
                    ids += [request.id for request in requests]
        done = len(ids) == streams
    spent, due = 0.0, time.perf_counter()
    for step in range(tokens):
        finish = "length" if step == tokens - 1 else None
        begun = time.process_time()
        connection.sendall(frame(Step([TokenOutput(i, (300 + (i * 7 + step) % 3000,), finish) for i in ids])))
        spent += time.process_time() - begun
        due += pace
        time.sleep(max(0.0, due - time.perf_counter()))
    print(f"engine's messages: {spent / tokens / streams * 1e6:6.2f} µs a token", flush=True)
    connection.recv(1)


def client(port: int, streams: int, tokens: int) -> None:
    """Opens all streams and reads them to their ends."""
    poll, sockets = select.epoll(), {}
    body = b'{"prompt":[1,2,3],"stream":true,"max_tokens":%d}' % tokens
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(streams):
        own = socket.create_connection(("127.0.0.1", port))
        own.sendall(head + body)
        poll.register(own, select.EPOLLIN)
        sockets[own.fileno()] = own
    received = events = 0
    while sockets:
        for number, _ in poll.poll():
            data = sockets[number].recv(1 << 16)
            received += len(data)
            events += data.count(b"data: ")
            if not data:
                poll.unregister(number)
                sockets.pop(number).close()
    print(f"client: {received / 1e6:.1f} MB, {events} events of {streams * tokens} tokens", flush=True)


async def front(connection: socket.socket, listening: socket.socket, streams: int, tokens: int, profile: bool) -> None:
    import uvicorn

    engine = await RemoteEngine.connect(connection, None, Start({}, False))
    own = Front(ServerOptions("fake", quiet=True), engine, Metrics("fake"), 0)
    await own.load()
    config = uvicorn.Config(App(own), http=HTTPProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
    server = FrontServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while len(own.generations) < streams:
        await asyncio.sleep(0.01)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    before, begun = time.process_time(), time.perf_counter()
    while own.generations:
        await asyncio.sleep(0.05)
    spent, wall = time.process_time() - before, time.perf_counter() - begun
    profiler.disable()
    count = streams * tokens
    print(f"front: {spent / count * 1e6:6.2f} µs a token; {count / wall:,.0f} tokens/s, {spent / wall:.0%} CPU", flush=True)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    server.should_exit = True
    connection.close()
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pace", type=float, default=0.03, help="seconds of a step")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    own, other = socket.socketpair()
    children = []
    for work in (
        lambda: fake_engine(other, options.streams, options.tokens, options.pace),
        lambda: client(listening.getsockname()[1], options.streams, options.tokens),
    ):
        if (child := os.fork()) == 0:
            own.close()
            work()
            os._exit(0)
        children.append(child)
    other.close()
    asyncio.run(front(own, listening, options.streams, options.tokens, options.profile))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
