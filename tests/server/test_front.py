"""The front beside a fake engine, which sends what a test decides: streams, errors, disconnects, slow readers."""

import asyncio
import json
import shutil
import socket
import threading

import pytest
from support.server import answer, answered, chunks, events, front, message, on_front

from minirt import models
from minirt.engine.request import EngineStats, TokenLogprobs, TokenOutput
from minirt.errors import InputError, NumericsError, OutOfMemoryError, QueueFullError
from minirt.server import exchange, generation, protocol
from minirt.server.metrics import Histogram, Metrics
from minirt.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(models.embedded())
PATH = "/v1/completions"


def run(scenario, folder=True, **options):
    async def main():
        async with front(models.embedded() if folder else None, **options) as (this, engine, ask):
            await scenario(this, engine, ask)

    asyncio.run(main())


def stream(**fields):
    return message({"prompt": "Once", "stream": True, "max_tokens": 2000} | fields, PATH)


def ids_of(text):
    return TOKENIZER.encode_plain(text)


def texts(found):
    return [event["choices"][0]["text"] for event in found if event != "[DONE]" and event["choices"]]


@on_front()
async def test_a_stream_token_by_token(this, engine, ask):
    ids = ids_of("Once there was a dog named \"Max\"\n who said:\t'hi \\ ho'")
    reader, _ = await engine.gets(ask(stream(stream_options={"include_usage": True})))
    request = engine.requests[0]
    assert request.prompt_token_ids == TOKENIZER.encode("Once")
    assert request.sampling.max_tokens == 2000
    found = []
    for i, token in enumerate(ids):
        engine.send(TokenOutput(request.id, (token,), "length" if i == len(ids) - 1 else None, num_cached=3))
        if i == 0:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            assert b"text/event-stream" in head
            body = chunks(reader)
        if i < len(ids) - 1:
            part = await anext(body)
            assert part.startswith(b"data: ")
            assert part.endswith(b"\n\n")
            found.append(part)
    found += [part async for part in body]
    found = events(b"".join(found))
    assert texts(found) == [TOKENIZER.decode([token]) for token in ids]
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"] == {
        "prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip
    reasons = [event["choices"][0]["finish_reason"] for event in found[:-2]]
    assert reasons == [None] * (len(ids) - 1) + ["length"]
    assert {(event["id"], event["object"], event["model"]) for event in found[:-1]} == {
        (found[0]["id"], "text_completion", "fake")
    }


@on_front()
async def test_no_character_is_cut(this, engine, ask):
    text = "a€b😀é"
    pieces = [token for c in text for token in [TOKENIZER.token_id(p) for p in _byte_tokens(c)]]
    reader, _ = await engine.gets(ask(stream()))
    found, body = b"", None
    for i, token in enumerate(pieces):
        engine.send(TokenOutput(engine.requests[0].id, (token,), "length" if i == len(pieces) - 1 else None))
        await asyncio.sleep(0)  # the front sees each token alone
        if body is None:
            await reader.readuntil(b"\r\n\r\n")
            body = chunks(reader)
    async for part in body:
        found += part
    assert "".join(texts(events(found))) == text
    assert all("�" not in own for own in texts(events(found)))


def _byte_tokens(character):
    from minirt.text.tokenizer_file import byte_alphabet

    spelled = {byte: own for own, byte in byte_alphabet().items()}
    return [spelled[byte] for byte in character.encode()]


@on_front()
async def test_tokens_that_arrive_together_are_sent_together(this, engine, ask):
    ids = ids_of("Once upon a time there was a little girl who lived in a house.")
    reader, _ = await engine.gets(ask(stream()))
    engine._writer.writelines([])
    for i, token in enumerate(ids):  # one write, and so one read of the front
        engine.send(TokenOutput(engine.requests[0].id, (token,), "length" if i == len(ids) - 1 else None))
    _, _, body = await answer(reader)
    assert len(events(body)) < len(ids)
    assert "".join(texts(events(body))) == TOKENIZER.decode(ids)


@pytest.mark.parametrize("interval", [2, 5])
def test_stream_interval(interval):
    ids = ids_of("a b c d e f g h i j k l m")

    async def scenario(this, engine, ask):
        reader, _ = await engine.gets(ask(stream()))
        for i, token in enumerate(ids):
            engine.send(TokenOutput(engine.requests[0].id, (token,), "length" if i == len(ids) - 1 else None))
            await asyncio.sleep(0.002)
        _, _, body = await answer(reader)
        found = texts(events(body))
        assert found[0] == TOKENIZER.decode(ids[:1])  # the first token does not wait
        assert len(found) <= 2 + len(ids) // interval
        assert "".join(found) == TOKENIZER.decode(ids)

    run(scenario, stream_interval=interval)


@on_front()
async def test_a_stop_string_over_several_tokens_ends_the_request(this, engine, ask):
    ids = ids_of("one two three four")
    reader, _ = await engine.gets(ask(stream(stop=["o three"])))
    for token in ids:
        engine.send(TokenOutput(engine.requests[0].id, (token,), None))
    _, _, body = await answer(reader)
    assert "".join(texts(events(body))) == "one tw"
    assert [event["choices"][0]["finish_reason"] for event in events(body)[:-1]][-1] == "stop"
    await engine.until(lambda e: e.aborted)
    assert engine.aborted == [engine.requests[0].id]
    assert this.metrics.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}


@on_front()
async def test_several_choices(this, engine, ask):
    reader, _ = await engine.gets(ask(stream(n=3, seed=5, prompt=["a", "b"])), 6)
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 7] * 2
    words = ["red", "green", "blue", "cat", "dog", "house"]
    for i in (4, 1, 0, 5, 3, 2):
        engine.send(TokenOutput(engine.requests[i].id, tuple(ids_of(words[i])), "stop" if i % 2 else "length"))
    _, _, body = await answer(reader)
    joined, reasons = [""] * 6, [None] * 6
    for event in events(body)[:-1]:
        (choice,) = event["choices"]
        joined[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    # The token that ends a text by "stop" is no part of it.
    assert joined == [word if i % 2 == 0 else TOKENIZER.decode(ids_of(word)[:-1]) for i, word in enumerate(words)]
    assert reasons == ["length", "stop"] * 3


ROW = TokenLogprobs(ids_of("a")[0], -0.5, 1, tuple((i, -0.1 * i) for i in range(300, 320)))


@pytest.mark.parametrize(("error", "status", "code"), [
    (QueueFullError("too many requests wait"), 429, "rate_limit_error"), (NumericsError("NaN"), 500, "server_error"),
    (OutOfMemoryError("no memory left"), 500, "server_error"), (InputError("bad", where="top_k"), 400, "invalid_request_error"),
])  # fmt: skip
@pytest.mark.parametrize("streams", [True, False])
@on_front()
async def test_an_error_before_the_first_token_has_its_status(this, engine, ask, error, status, code, streams):
    reader, _ = await engine.gets(ask(stream(stream=streams)))
    engine.send(TokenOutput(engine.requests[0].id, (), "error", error=error))
    found, headers, body = await answer(reader)
    content = json.loads(body)["error"]
    assert (found, content["type"], content["message"]) == (status, code, str(error))
    assert ("retry-after" in headers) == (status == 429)
    assert content["param"] == ("top_k" if status == 400 else None)


@on_front()
async def test_an_error_later_is_the_last_event(this, engine, ask):
    reader, _ = await engine.gets(ask(stream(n=2, seed=1)), 2)
    first, second = engine.requests
    engine.send(TokenOutput(first.id, (ids_of("a")[0],), None))
    await reader.readuntil(b"\r\n\r\n")
    body = chunks(reader)
    found = await anext(body)
    engine.send(TokenOutput(second.id, (), "error", error=NumericsError("NaN")))
    async for part in body:
        found += part
    assert events(found)[-1]["error"]["message"] == "NaN"
    await engine.until(lambda e: first.id in e.aborted)
    assert not this.generations
    assert not this.engine._sinks


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_aborts_its_requests(begun, streams, capfd):
    async def scenario(this, engine, ask):
        reader, writer = await engine.gets(ask(stream(stream=streams, n=2, seed=0)), 2)
        if begun:
            engine.send(TokenOutput(engine.requests[0].id, (ids_of("a")[0],), None))
            if streams:
                await reader.readuntil(b"data: ")
        writer.transport.abort()
        await engine.until(lambda e: len(e.aborted) == 2)
        assert sorted(engine.aborted) == [request.id for request in engine.requests]
        assert not this.engine._sinks
        while this.exchanges:
            await asyncio.sleep(0.01)
        assert this.metrics.finished["abort"] == 2

    run(scenario, quiet=False)
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["status"], line["finish"]) == (499, "abort")


@on_front()
async def test_a_client_that_goes_while_its_prompt_is_encoded(this, engine, ask):
    entered, gate = asyncio.Event(), asyncio.Event()

    async def in_thread(function, *arguments):
        entered.set()
        await gate.wait()
        return function(*arguments)

    this.in_thread = in_thread
    _, writer = await ask(stream(prompt="word " * 600))
    await entered.wait()
    writer.transport.abort()
    while this.exchanges:
        await asyncio.sleep(0.01)
    gate.set()
    assert not engine.requests


def test_a_slow_reader_is_dropped_and_others_are_not(monkeypatch, capfd):
    monkeypatch.setattr(generation, "MAX_UNSENT", 50)

    async def scenario(this, engine, ask):
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        probe, _ = await ask(message(b"", "/health", "GET"))
        await answer(probe)
        slow.connect(_._transport.get_extra_info("peername"))
        slow.sendall(stream(logprobs=20))
        await engine.until(lambda e: len(e.requests) == 1)
        reader, _w = await engine.gets(ask(stream()))
        first, second = engine.requests
        sent = 0
        while not engine.aborted:
            token = ROW.token_id
            engine.send(TokenOutput(first.id, (token,) * 20, None, logprobs=(ROW,) * 20), TokenOutput(second.id, (token,), None))
            sent += 1
            await asyncio.sleep(0)
            assert sent < 20_000
        assert engine.aborted == [first.id]
        engine.send(TokenOutput(second.id, (token,), "length"))
        _, _, body = await answer(reader)
        assert "".join(texts(events(body))) == "a" * (sent + 1)
        while this.exchanges:
            await asyncio.sleep(0.01)
        received = b""
        while data := slow.recv(1 << 20):
            received += data
        slow.close()
        assert "reads too slowly" in capfd.readouterr().err
        assert not received.endswith(b"0\r\n\r\n")  # the client sees that the answer is incomplete
        assert received.count(b"data: ") < sent

    run(scenario, max_len=1 << 20, quiet=False)


@on_front()
async def test_the_engine_dies(this, engine, ask):
    begun, _ = await engine.gets(ask(stream()))
    engine.send(TokenOutput(engine.requests[0].id, (ROW.token_id,), None))
    await begun.readuntil(b"\r\n\r\n")
    waiting, _ = await engine.gets(ask(stream(stream=False)))
    await engine.close()
    status, _, body = await answer(waiting)
    assert status == 503
    assert "has ended" in json.loads(body)["error"]["message"]
    found = b"".join([part async for part in chunks(begun)])
    assert "has ended" in events(found)[-1]["error"]["message"]
    for data in (stream(), message(b"", "/health", "GET"), message({"prompt": "a"}, "/tokenize")):
        assert (await answered(ask(data)))[0] == 503
    assert this.engine.ended.done()


def test_tokens_that_were_computed_again_for_want_of_a_state_are_a_metric():
    """Only of engines that keep states: others would show 0 for what they cannot have."""
    for recomputed, shown in ((7, True), (0, True), (None, False)):
        stats = EngineStats(prefix_cache_recomputed=recomputed)
        text = Metrics("fake").exposition(stats).decode()
        assert (f'vllm:prefix_cache_recomputed_total{{model_name="fake"}} {recomputed}.0\n' in text) == shown
        assert ("recomputed" in text) == shown


def test_a_bound_of_a_histogram_is_the_last_value_of_its_bucket():
    histogram = Histogram("m", "", [0.5, 2])
    for value, times in ((0.4, 1), (0.5, 2), (2, 1), (2.1, 3)):
        histogram.observe(value, times)
    samples = [(sample.labels.get("le"), sample.value) for sample in histogram.metric("model").samples]
    assert samples[:4] == [("0.5", 3), ("2.0", 4), ("+Inf", 7), (None, 7)]
    assert samples[4][1] == pytest.approx(0.4 + 1 + 2 + 6.3)


def test_metrics_without_an_answer_of_the_engine(monkeypatch):
    """The engine is busy or stuck. The front's own metrics still come."""
    monkeypatch.setattr("minirt.server.admin._STATS_SECONDS", 0.05)

    async def scenario(this, engine, ask):
        status, _, body = await answered(ask(message(b"", "/metrics", "GET")))
        assert status == 200
        assert b"vllm:generation_tokens_total" in body
        assert b"num_requests_running" not in body

    run(scenario)


@on_front(request_timeout=0.1)
async def test_request_timeout(this, engine, ask):
    status, _, body = await answered(ask(stream(stream=False)))
    assert status == 504
    assert "too long" in json.loads(body)["error"]["message"]
    await engine.until(lambda e: e.aborted)


@on_front()
async def test_draining_refuses_new_requests_and_ends_running_ones(this, engine, ask):
    reader, _ = await engine.gets(ask(stream(stream=False)))
    this.draining = True
    for path, method in ((PATH, "POST"), ("/health", "GET"), ("/v1/models", "GET")):
        assert (await answered(ask(message({"prompt": "a"}, path, method))))[0] == 503
    engine.send(TokenOutput(engine.requests[0].id, (ROW.token_id,), "length"))
    status, _, body = await answer(reader)
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "a"


@pytest.mark.parametrize(("path", "method", "key", "status"), [
    (PATH, "POST", None, 401), (PATH, "POST", "Bearer wrong", 401), (PATH, "POST", "Bearer one", 400),
    (PATH, "POST", "bearer two", 400), (PATH, "POST", "one", 401), (PATH, "POST", "Bearer ", 401),
    ("/v1/models", "GET", None, 401), ("/nothing", "GET", None, 401), ("/health", "GET", None, 200),
    ("/ping", "GET", None, 200), ("/metrics", "GET", None, 401), ("/version", "GET", "Bearer one", 200),
])  # fmt: skip
def test_api_keys(path, method, key, status, monkeypatch):
    monkeypatch.setattr("minirt.server.admin._STATS_SECONDS", 0.01)

    async def scenario(this, engine, ask):
        assert (await answered(ask(message({}, path, method, **({} if key is None else {"authorization": key})))))[0] == status

    run(scenario, api_keys=("one", "two"), metrics_need_key=True)


def test_bodies_that_are_too_large_or_too_slow(monkeypatch):
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.1)

    async def scenario(this, engine, ask):
        assert (await answered(ask(message(b"x" * 2000, PATH))))[0] == 413
        reader, _ = await ask(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n".encode())
        assert (await answer(reader))[0] == 413  # before the body
        chunked = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        assert (await answered(ask(chunked + b"400\r\n" + b"x" * 1024 + b"\r\n1\r\nx\r\n")))[0] == 413
        reader, _ = await ask(f'POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{{"prompt"'.encode())
        assert (await answer(reader))[0] == 408
        assert not engine.requests

    run(scenario, max_body_size=1024)


@on_front()
async def test_a_conversation_without_a_chat_template_names_the_other_endpoint(this, engine, ask):
    """And no path of the server's disk."""
    status, _, body = await answered(ask(message({"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions")))
    assert status == 400
    assert json.loads(body)["error"]["message"] == (
        "messages: the model has no chat template (send a prompt to /v1/completions)"
    )


@pytest.mark.parametrize(("path", "fields"), [
    (PATH, {"prompt": ["a"] * 500, "max_tokens": -2}), (PATH, {"prompt": "a", "bad_words": ["xy"] * 500, "n": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 50}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 50}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 50, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}] * 50}),
    ("/tokenize", {"prompt": "word " * 400}), ("/detokenize", {"tokens": [5] * 1000}),
])  # fmt: skip
def test_large_requests_are_read_beside_the_event_loop(path, fields, monkeypatch):
    threads, decoded, convert = [], protocol.object_at, protocol.convert
    monkeypatch.setattr(protocol, "object_at", lambda *args: (threads.append(threading.current_thread()), decoded(*args))[1])
    monkeypatch.setattr(protocol, "convert", lambda *args: (threads.append(threading.current_thread()), convert(*args))[1])

    async def scenario(this, engine, ask):
        assert (await answered(ask(message(fields, path))))[0] in (200, 400)  # the model has no chat template
        assert len(threads) == 2
        assert threading.main_thread() not in threads

    run(scenario)


def test_bad_words_of_many_prompts_are_encoded_once(monkeypatch):
    words, spellings = [], Tokenizer.spellings
    monkeypatch.setattr(Tokenizer, "spellings", lambda self, word: (words.append(word), spellings(self, word))[1])

    async def scenario(this, engine, ask):
        await engine.gets(ask(stream(prompt=["Once", "upon", "a"], bad_words=["king", "queen"])), 3)
        assert words == ["king", "queen"]
        assert len({own.bad_words for own in engine.requests}) == 1
        assert len(engine.requests[2].bad_words) >= 2

    run(scenario)


@on_front()
async def test_tokens_do_not_wait_for_acknowledgements(this, engine, ask):
    await engine.gets(ask(stream()))
    (own,) = this.exchanges
    connection = own._scope["extensions"]["minirt"]["transport"].get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@on_front(allowed_origins=("https://a.example",))
async def test_cross_origin(this, engine, ask):
    reader, _ = await ask(message(b"", PATH, "OPTIONS", origin="https://a.example", access_control_request_headers="x-y"))
    status, headers, _ = await answer(reader)
    assert (status, headers["access-control-allow-origin"], headers["access-control-allow-headers"]) == (
        200, "https://a.example", "x-y",
    )  # fmt: skip
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        reader, _ = await ask(message(b"", "/version", "GET", origin=origin))
        assert ("access-control-allow-origin" in (await answer(reader))[1]) == allowed


@on_front()
async def test_a_path_that_does_not_exist(this, engine, ask):
    """A client whose base URL lacks /v1 gets the path that it meant: it was told that its path does not exist. One that asks for
    what this server does not do is told what it does: /v1/moderations was taken for /v1/completions."""
    does = " (this server generates text: POST to /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages"
    paths = {"/chat/completions": " (did you mean /v1/chat/completions or ", "/v1/chat/completion": " (did you mean"}
    others = ("embeddings", "audio/transcriptions", "images/generations", "moderations", "files", "rerank", "nothing")
    paths |= {f"/v1/{name}": does for name in others} | {"/embeddings": does, "/api/generate": does, "//": does}
    for path, hint in paths.items():
        status, _, body = await answered(ask(message({}, path)))
        text = json.loads(body)["error"]["message"]
        assert status == 404, path
        assert text.startswith(f"there is no such path; found {path}{hint}"), text
        assert ("did you mean" in text) == (hint != does)


@on_front()
async def test_no_cross_origin_by_default(this, engine, ask):
    reader, _ = await ask(message(b"", "/version", "GET", origin="https://a.example"))
    assert "access-control-allow-origin" not in (await answer(reader))[1]
    assert (await answered(ask(message(b"", PATH, "OPTIONS", origin="https://a.example"))))[0] == 405


@pytest.mark.parametrize("prompts", [False, True])
def test_the_log(prompts, capfd):
    async def scenario(this, engine, ask):
        for _ in range(2):
            reader, _ = await ask(stream(stream=False, prompt="a secret", separate_reasoning=True, no_stop_trim=False))
            count = len(engine.requests)
            await engine.until(lambda e, count=count: len(e.requests) > count)
            engine.send(TokenOutput(engine.requests[-1].id, (ROW.token_id,), "length", num_cached=1, queue_time_s=0.25))
            assert (await answer(reader))[0] == 200

    run(scenario, quiet=False, log_prompts=prompts)
    err = capfd.readouterr().err.splitlines()
    lines = [json.loads(line) for line in err if line.startswith("{")]
    assert len(lines) == 2
    assert lines[0].items() >= {
        "status": 200, "path": PATH, "method": "POST", "prompt_tokens": len(TOKENIZER.encode("a secret")), "cached_tokens": 1,
        "completion_tokens": 1, "finish": "length", "queue_ms": 250.0, "client": "127.0.0.1",
    }.items()  # fmt: skip
    assert ("a secret" in "".join(err)) == prompts
    unknown = [line for line in err if "unknown fields" in line]
    assert len(unknown) == 1
    assert "separate_reasoning" in unknown[0]
    assert "no_stop_trim" in unknown[0]


def counted(this):
    """What the metrics say: tokens of prompts, how many prompts of requests that ended, how requests ended."""
    lines = this.metrics.exposition(None).decode().splitlines()
    values = {name.split("{")[0]: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    ends = {reason: count for reason, count in this.metrics.finished.items() if count}
    return values["vllm:prompt_tokens_total"], values["vllm:request_prompt_tokens_count"], ends


@pytest.mark.parametrize(("error", "begun", "ends"), [
    (QueueFullError("full"), False, {}), (InputError("too long"), False, {}),
    (InputError("no token is left"), True, {"error": 1}), (NumericsError("NaN"), False, {"error": 1}),
])  # fmt: skip
def test_which_requests_with_an_error_count(error, begun, ends, capfd):
    """As in vLLM, a request that is refused counts nowhere, and a prompt counts with its first token. The tokens of refused
    prompts counted, and the log called them aborted."""
    async def scenario(this, engine, ask):
        reader, _ = await engine.gets(ask(stream()))
        request = engine.requests[0]
        if begun:
            engine.send(TokenOutput(request.id, (ROW.token_id,), None))
            await reader.readuntil(b"data: ")
        engine.send(TokenOutput(request.id, (), "error", error=error))
        await reader.read()
        assert counted(this) == (len(request.prompt_token_ids) if begun else 0, 0, ends)

    run(scenario, quiet=False)
    assert json.loads(capfd.readouterr().err.splitlines()[-1])["finish"] == "error"


@on_front()
async def test_each_sample_of_a_prompt_counts(this, engine, ask):
    """As in vLLM: a request of n samples counted its prompt once, and its ends n times."""
    reader, _ = await engine.gets(ask(stream(stream=False, n=2, prompt="Once upon a time")), 2)
    for request in engine.requests:
        engine.send(TokenOutput(request.id, (ROW.token_id,), "length"))
    await answer(reader)
    assert counted(this) == (2 * len(engine.requests[0].prompt_token_ids), 2, {"length": 2})


@pytest.mark.parametrize("made", [17, None])
def test_the_log_of_an_answer_without_a_stream_that_is_aborted(made, capfd, monkeypatch):
    """It has the tokens that the engine has made, which come with the end only, or null if the engine does not say: it had 0.
    The prompt counts, too."""
    monkeypatch.setattr(generation, "_COUNT_SECONDS", 20 if made else 0.01)

    async def scenario(this, engine, ask):
        _, writer = await engine.gets(ask(stream(stream=False)))
        engine.made = made
        writer.transport.abort()
        await engine.until(lambda e: e.aborted)
        while this.exchanges:
            await asyncio.sleep(0)
        assert counted(this) == (len(engine.requests[0].prompt_token_ids) if made else 0, 0, {"abort": 1})

    run(scenario, quiet=False)
    line = json.loads(capfd.readouterr().err.splitlines()[-1])
    assert (line["status"], line["finish"], line["completion_tokens"]) == (499, "abort", made)


@on_front(folder=False)
async def test_a_model_without_a_tokenizer(this, engine, ask):
    status, _, body = await answered(ask(stream(stream=False)))
    assert status == 400
    assert json.loads(body)["error"]["param"] == "prompt"
    reader, _ = await engine.gets(ask(stream(stream=False, prompt=[1, 2], logprobs=1)))
    row = TokenLogprobs(7, -1.0, 1, ((7, -1.0),))
    engine.send(TokenOutput(engine.requests[0].id, (7,), "length", logprobs=(row,)))
    _, _, body = await answer(reader)
    assert json.loads(body)["choices"][0]["logprobs"]["tokens"] == ["token_id:7"]
    reader, _ = await engine.gets(ask(stream(prompt=[1, 2])))
    await asyncio.sleep(0)
    for i in range(3):
        engine.send(TokenOutput(engine.requests[1].id, (7,), "length" if i == 2 else None))
        if i == 0:
            await reader.readuntil(b"data: ")


@on_front()
async def test_an_unforeseen_exception_ends_one_request_only(this, engine, ask, capfd):
    reader, _ = await engine.gets(ask(stream(stream=False)))
    other, _ = await engine.gets(ask(stream(stream=False)))
    (broken,) = (own for own in this.generations if engine.requests[0].id in own._by_id)
    broken.choices[0].stream.completion = None
    for request in engine.requests:
        engine.send(TokenOutput(request.id, (ROW.token_id,), "length"))
    assert (await answer(reader))[0] == 500
    assert (await answer(other))[0] == 200


@pytest.mark.parametrize("names", [(), ("own",)])
def test_no_answer_has_a_path_of_the_server(tmp_path, names):
    """Catches the folder's path as the id of the model, in what routers ask, and in an error of a file of the model."""
    folder = tmp_path / "tiny"
    shutil.copytree(models.embedded(), folder)
    broken = {"chat_template": "{{ raise_exception('never mind') }}"}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | broken))

    async def main():
        async with front(folder, model=str(folder), served_model_names=names) as (_, _, ask):
            found = {}
            for path in ("/v1/models", "/server_info", "/model_info", "/metrics"):
                found[path] = (await answer((await ask(message(b"", path, "GET")))[0]))[2].decode()
            for model in (None, str(tmp_path)):
                body = {"messages": [{"role": "user", "content": "a"}], "model": model}
                found[str(model)] = (await answer((await ask(message(body, "/v1/chat/completions")))[0]))[2].decode()
        assert json.loads(found["/v1/models"])["data"][0]["id"] == (names or ("tiny",))[0]
        assert json.loads(found["None"])["error"]["message"].startswith("tokenizer_config.json: the chat template failed: ")
        assert "model_not_found" in found.pop(str(tmp_path))
        assert str(tmp_path) not in str(found)

    asyncio.run(main())


@on_front(root_path="/a/b", api_keys=("sesame",))
async def test_a_path_of_a_proxy(this, engine, ask):
    """With and without the prefix, for a proxy that removes it or not. Catches a prefix that avoids the key, and a page that
    calls another path."""
    async def get(path, **headers):
        status, _, body = await answer((await ask(message(b"", path, "GET", **headers)))[0])
        return status, body

    key = {"x_api_key": "sesame"}
    assert [(await get(path))[0] for path in ("/a/b/health", "/health", "/a/b", "/a/b/", "/")] == [200] * 5
    assert [(await get(path))[0] for path in ("/a/b/v1/models", "/v1/models")] == [401] * 2
    assert [(await get(path, **key))[0] for path in ("/a/b/v1/models", "/v1/models")] == [200] * 2
    assert [(await get(path, **key))[0] for path in ("/a/v1/models", "/a/bv1/models", "/a/b/a/b/v1/models")] == [404] * 3
    assert b'<base href="/a/b/">' in (await get("/a/b"))[1]
