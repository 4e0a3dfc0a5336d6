"""Many clients that behave badly, and SIGTERM in the middle: nothing is lost, and nothing leaks.

MINIRT_SOAK_SECONDS sets the length; 900 is a quarter of an hour.
"""

import asyncio
import json
import os
import random
import signal

import psutil
from support.server import Server, answer, events, message

SECONDS = float(os.environ.get("MINIRT_SOAK_SECONDS", "3"))
CLIENTS = 64


async def whole(ask, draw):
    """Reads its answer to the end, which must come once it has begun. Returns whether there was none."""
    body = {"prompt": "Once " * draw.randint(1, 60), "max_tokens": draw.randint(1, 12), "seed": draw.randint(0, 99)}
    body |= {"n": draw.choice([1, 1, 3]), "stream": draw.random() < 0.7, "ignore_eos": True}
    try:
        reader, writer = await ask(message(body, "/v1/completions"))
        begin = await reader.readuntil(b"\r\n")
    except (OSError, asyncio.IncompleteReadError):  # the server has ended
        return True
    status, _, data = await answer(reader, begin)
    writer.close()
    if status == 503:
        return True
    assert status == 200, data
    if body["stream"]:
        found = events(data)
        assert found[-1] == "[DONE]"
        reasons = [event["choices"][0]["finish_reason"] for event in found[:-1]]
        assert reasons.count("length") == body["n"]
    else:
        assert json.loads(data)["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
    return False


async def leaves(ask, draw):
    """Goes at some point of its answer, or before it."""
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": draw.random() < 0.7}
    reader, writer = await ask(message(body, "/v1/completions"))
    if body["stream"] and draw.random() < 0.5:
        await reader.read(draw.randint(1, 2000))
    writer.transport.abort()


async def aborts_its_upload(ask, draw):
    data = message({"prompt": "Once " * 50}, "/v1/completions")
    _, writer = await ask(data[: draw.randint(1, len(data) - 1)])
    writer.transport.abort()


async def reads_slowly(ask, draw):
    reader, writer = await ask(message({"prompt": "Once", "max_tokens": 20, "stream": True}, "/v1/completions"))
    for _ in range(5):
        if not await reader.read(100):
            break
        await asyncio.sleep(0.05)
    writer.close()


async def sends_nonsense(ask, draw):
    data = draw.choice([b"\x00\xff" * 50, b"GET / HTTP/9.9\r\n\r\n", message(b"{", "/v1/completions"), message([], "/x")])
    reader, writer = await ask(data)
    writer.write_eof()
    await reader.read(1000)
    writer.close()


def test_soak(folder, tmp_path):
    options = ("--kv-cache-memory", "4MiB", "--max-num-seqs", 8, "--drain-timeout", 120)
    server = Server(tmp_path / "log", "--model", folder, *options).wait()
    port = int(server.url.rpartition(":")[2])
    front, engine = psutil.Process(server.process.pid), server.engine
    counts = {"answered": 0, "refused": 0}
    ending = asyncio.Event()

    async def ask(data):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(data)
        return reader, writer

    async def client(number):
        draw = random.Random(number)
        kinds = [whole, whole, whole, leaves, aborts_its_upload, reads_slowly, sends_nonsense]
        while True:
            kind = draw.choice(kinds)
            try:
                none = await kind(ask, draw)
            except OSError:  # of those who do not care for their answers
                if kind is whole:
                    raise
                none = ending.is_set()
            counts["refused" if none else "answered"] += none or kind is whole
            if none:
                assert ending.is_set()
                return

    async def main():
        tasks = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        loop = asyncio.get_running_loop()
        end, before = loop.time() + SECONDS, None
        while loop.time() < end and not any(task.done() for task in tasks):
            await asyncio.sleep(0.1)
            if before is None and loop.time() > end - SECONDS / 2:
                before = front.memory_info().rss, front.num_threads(), engine.num_threads()
        after = front.memory_info().rss, front.num_threads(), engine.num_threads()
        assert after[0] - before[0] < 30 << 20
        assert after[1] - before[1] <= 2  # encoding threads start as they are needed
        assert after[2] == before[2]
        ending.set()
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert server.process.wait(60) == 0, server.log[-3000:]
    engine.wait(30)
    assert counts["answered"] > 0
    assert counts["refused"] > 0
    assert "Traceback" not in server.log, server.log[-5000:]
    assert "unexpected" not in server.log
