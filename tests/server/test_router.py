"""Two servers behind smg, a router from the package index: requests are spread, and a worker that ends or dies stops nobody else.

Catches an endpoint or a field that the router needs and the server lacks, a status of a server that ends for which the router
does not try another server, answers that are cut off at the end, and a killed worker whose engine stays behind.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable

import openai
import pytest
from support.package import ROOT
from support.router import Router, free_port, install
from support.server import Server

from minirt import Generator, SamplingParams

LONG = {"model": "tiny", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Fleet:
    """Two workers on fixed ports, and a router."""

    def __init__(self, smg, folder, logs):
        self._arguments = ("--model", folder, "--kv-cache-memory", "16MiB", "--max-num-seqs", 8, "--served-model-name", "tiny")
        self._logs, self._ports, self._starts = logs, (free_port(), free_port()), 0
        self.workers = [self._start(port) for port in self._ports]
        for worker in self.workers:
            worker.wait()
        self.router = Router(smg, logs / "router", [worker.url for worker in self.workers])
        self.until_healthy(2)

    def _start(self, port):
        self._starts += 1
        return Server(self._logs / f"worker{self._starts}", "--port", port, *self._arguments)

    def until_healthy(self, count):
        """Wait until the router counts so many healthy workers."""

        def counted():
            if self.router.process.poll() is not None:
                raise RuntimeError(f"the router has ended: {self.router.log[-3000:]}")
            try:
                body = self.router.request("GET", "/readiness")[2]
            except ConnectionRefusedError:  # it starts
                return False
            return json.loads(body).get("healthy_workers") == count

        self.router.until(counted, 60)

    def restore(self):
        """Start workers that have ended again, where they were. Waits until the router has noticed."""
        for i, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.workers[i] = self._start(self._ports[i])
        for worker in self.workers:
            worker.wait()
        self.until_healthy(2)

    def running(self):
        """How many requests each worker runs."""
        return [worker.metric("vllm:num_requests_running") for worker in self.workers]

    def close(self):
        self.router.process.kill()  # it would wait for its connections
        self.router.process.wait(30)
        for worker in self.workers:
            worker.stop()


@pytest.fixture(scope="module")
def started(folder, tmp_path_factory):
    smg = install(ROOT / ".cache" / f"smg-{sys.implementation.cache_tag}")
    fleet = Fleet(smg, folder, tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(started):
    """Both workers are there, and nothing runs."""
    started.restore()
    started.router.until(lambda: started.running() == [0, 0])
    return started


def conversation(i):
    return [{"role": "user", "content": f"Tell a story about {i} dogs."}]


async def read(stream):
    """Read a stream to its end → its text, why it ended, the error."""
    text, reason = "", None
    try:
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
    except openai.APIError as error:
        return text, reason, error
    return text, reason, None


async def until(fleet, condition):
    await asyncio.to_thread(fleet.router.until, condition)


async def four_streams(client) -> list[Awaitable]:
    """Four long streams, one after the other, that have begun: two on each worker."""
    streams = [await client.chat.completions.create(messages=conversation(i), stream=True, **LONG) for i in range(4)]
    return [asyncio.create_task(read(stream)) for stream in streams]


async def short(client, count):
    """Short answers, in turn whole and streamed. Returns their texts."""
    texts = []
    for i in range(count):
        fields = {"model": "tiny", "messages": conversation(i), "max_tokens": 8, "temperature": 0}
        if i % 2:
            text, reason, error = await read(await client.chat.completions.create(stream=True, **fields))
            assert error is None
            assert reason is not None
            texts.append(text)
        else:
            texts.append((await client.chat.completions.create(**fields)).choices[0].message.content)
    return texts


def with_client(fleet, work):
    """Run `work(client)`. The client does not try again: what succeeds is the router's doing."""

    async def run():
        url = f"{fleet.router.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
            return await work(client)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def expected(folder):
    """What the model says to the first conversations."""
    params = SamplingParams(max_tokens=8, temperature=0)
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 23) as generator:
        return [generator.chat(conversation(i), params).text for i in range(8)]


def test_requests_go_to_both_workers(fleet, expected):
    before = [worker.metric("vllm:request_success_total") for worker in fleet.workers]
    assert with_client(fleet, lambda client: short(client, 8)) == expected
    after = [worker.metric("vllm:request_success_total") for worker in fleet.workers]
    assert [new - old for new, old in zip(after, before, strict=True)] == [4, 4]
    assert [own["id"] for own in json.loads(fleet.router.request("GET", "/v1/models")[2])["data"]] == ["tiny"]
    logs = "".join(worker.log for worker in fleet.workers)
    assert "unknown fields" not in logs  # else the router adds a field that protocol.py should know


def test_a_worker_that_ends_finishes_its_answers(fleet, expected):
    """As in a rolling update: nobody sees an error."""

    async def work(client):
        streams = await four_streams(client)
        await until(fleet, lambda: fleet.running() == [2, 2])
        fleet.workers[0].process.send_signal(signal.SIGTERM)
        await until(fleet, lambda: "ending; 2 requests are still running" in fleet.workers[0].log)
        return await short(client, 8), await asyncio.gather(*streams)

    texts, streams = with_client(fleet, work)
    assert texts == expected
    assert [(reason, error) for _, reason, error in streams] == [("length", None)] * 4
    assert fleet.workers[0].process.wait(60) == 0


def test_a_worker_is_killed(fleet, expected):
    """Its streams end with an error. Its other requests are answered by the other worker, as are all after them."""

    async def work(client):
        streams = await four_streams(client)
        whole = [asyncio.create_task(client.chat.completions.create(messages=conversation(i), **LONG)) for i in range(4)]
        await until(fleet, lambda: fleet.running() == [4, 4])
        engine = fleet.workers[1].engine
        fleet.workers[1].process.kill()
        texts = await short(client, 8)
        await until(fleet, lambda: not engine.is_running())
        return texts, await asyncio.gather(*streams), await asyncio.gather(*whole)

    texts, streams, whole = with_client(fleet, work)
    assert texts == expected
    broken = [(text, reason) for text, reason, error in streams if error is not None]
    assert len(broken) == 2
    assert all(text and reason is None for text, reason in broken)  # they had begun
    assert [reason for _, reason, error in streams if error is None] == ["length"] * 2
    assert [answer.usage.completion_tokens for answer in whole] == [200] * 4
    fleet.until_healthy(1)
