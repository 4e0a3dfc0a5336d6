"""`minirt serve` as a process, asked by OpenAI's own client and over plain HTTP, against results of `Generator`."""

import json
import math
import os
import signal
import socket
import threading

import openai
import psutil
import pytest
from support.cli import caller, refused, start
from support.server import WARM, Server, events, message

from minirt import Generator, SamplingParams

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def generator(folder):
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 23) as generator:
        yield generator


def client(server, kind=openai.OpenAI):
    return kind(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_completions_are_those_of_the_generator(tiny, generator):
    prompts = [STORY, "The dog", "A girl named Lily found", "x"]
    expected = generator.generate(prompts, SamplingParams(max_tokens=24, temperature=0))
    found = client(tiny).completions.create(model="tiny", prompt=prompts, max_tokens=24, temperature=0)
    assert [choice.text for choice in found.choices] == [own.text for own in expected]
    assert [choice.finish_reason for choice in found.choices] == [own.finish_reason for own in expected]
    assert found.usage.completion_tokens == sum(len(own.token_ids) for own in expected)
    ids = [generator.encode(prompt) for prompt in prompts]
    for prompt in (ids, ids[0]):
        found = client(tiny).completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
        assert [choice.text for choice in found.choices] == [own.text for own in expected[: len(found.choices)]]


@pytest.mark.parametrize("fields", [
    {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"temperature": 1.2, "top_k": 5, "min_p": 0.05, "seed": 2**64 - 1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"stop": ["little", " the"], "max_tokens": 40},
    {"logit_bias": {"300": 5, "17": -100}}, {"allowed_token_ids": [20, 30, 40]}, {"bad_words": ["there", "was"]},
    {"truncate_prompt_tokens": 2, "min_tokens": 3}, {"stop": " named", "include_stop_str_in_output": True, "max_tokens": 40},
    {"ignore_eos": True, "stop_token_ids": [15, 16, 17]}, {"skip_special_tokens": False, "max_tokens": 20},
])  # fmt: skip
def test_every_parameter_reaches_the_engine(tiny, generator, fields):
    fields = {"max_tokens": 12, "seed": 7} | fields
    expected = generator.generate(STORY, SamplingParams(**fields))
    status, found = tiny.post("/v1/completions", {"model": "tiny", "prompt": STORY} | fields)
    assert status == 200
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)


def test_a_streamed_completion_is_the_same(tiny, generator):
    expected = generator.generate(STORY, SamplingParams(max_tokens=40, temperature=0))
    found = client(tiny).completions.create(
        model="tiny", prompt=STORY, max_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(found)
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == expected.text
    assert pieces[-2].choices[0].finish_reason == expected.finish_reason
    assert pieces[-1].usage.completion_tokens == 40
    assert pieces[-1].choices == []


def test_logprobs_of_prompt_and_completion(tiny, generator):
    """The form that lm-eval reads: echo, and log-probabilities of all tokens."""
    prompt = "Once upon a time there was a dog"
    tokens = generator.encode(prompt)
    reference = generator.logits(tokens).log_softmax(-1)
    found = client(tiny).completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=2).choices[0]
    assert found.text == prompt
    assert found.logprobs.token_logprobs[0] is None
    expected = [reference[i, token].item() for i, token in enumerate(tokens[1:])]
    assert found.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert "".join(found.logprobs.tokens) == prompt
    assert [prompt[i:].startswith(own) for i, own in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True)]
    best = [generator.tokenizer.decode([token]) for token in reference.argmax(-1)[:-1].tolist()]
    assert [max(top, key=top.get) for top in found.logprobs.top_logprobs[1:]] == best
    request = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 0, "temperature": 0}
    both = client(tiny).completions.create(**request).choices[0]
    assert len(both.logprobs.tokens) == len(tokens) + 3
    assert both.text.startswith(prompt)
    assert both.logprobs.token_logprobs[len(tokens)] == pytest.approx(reference[-1].max().item(), abs=1e-4)
    streamed = list(client(tiny).completions.create(**request, stream=True))
    assert "".join(piece.choices[0].text for piece in streamed) == both.text
    rows = [row for piece in streamed for row in piece.choices[0].logprobs.token_logprobs]
    assert rows[1:] == pytest.approx(both.logprobs.token_logprobs[1:])
    offsets = [offset for piece in streamed for offset in piece.choices[0].logprobs.text_offset]
    assert offsets == both.logprobs.text_offset


def test_chat_is_that_of_the_generator(tiny, generator):
    messages = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "About a dog."}]
    expected = generator.chat(messages, SamplingParams(max_tokens=16, temperature=0))
    found = client(tiny).chat.completions.create(model="tiny", messages=messages, max_completion_tokens=16, temperature=0)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    content = [{"type": "text", "text": "Tell a story."}]
    parts = [{"role": "developer", "content": content}, messages[1]]
    again = client(tiny).chat.completions.create(model="tiny", messages=parts, max_tokens=16, temperature=0)
    assert again.choices[0].message.content == expected.text


def test_chat_templates_take_options(tiny, generator):
    def prompt(**fields):
        status, found = tiny.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]} | fields)
        assert status == 200, found
        return generator.tokenizer.decode(found["tokens"])

    assert prompt() == "user: hi\nassistant:"
    assert prompt(add_generation_prompt=False) == "user: hi\n"
    assert prompt(chat_template_kwargs={"mood": "glad"}) == "user: hi\nassistant: (glad)"
    ends = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, I "}]
    assert prompt(messages=ends, continue_final_message=True) == "user: hi\nassistant: Well, I "  # as in transformers
    status, found = tiny.post("/tokenize", {"messages": ends, "chat_template_kwargs": {"messages": []}})
    assert (status, found["error"]["param"]) == (400, "chat_template_kwargs")
    status, found = tiny.post("/tokenize", {"messages": ends[:1], "continue_final_message": True})
    assert (status, found["error"]["param"]) == (400, "continue_final_message")
    tiny.post("/tokenize", {"messages": ends, "chat_template_kwargs": {"nobody_reads_this": 1}})
    assert tiny.log.count("nobody_reads_this") == 1


def test_the_default_limits_of_tokens(tiny, generator):
    """Completions have OpenAI's 16, chats what fits."""
    found = client(tiny).completions.create(model="tiny", prompt=STORY, extra_body={"ignore_eos": True})
    assert found.usage.completion_tokens == 16
    long = [{"role": "user", "content": "word " * 490}]
    found = client(tiny).chat.completions.create(model="tiny", messages=long, extra_body={"ignore_eos": True})
    assert found.usage.total_tokens == generator.max_len
    assert found.choices[0].finish_reason == "length"


def test_logprobs_of_a_chat(tiny, generator):
    messages = [{"role": "user", "content": "About a dog."}]
    expected = generator.chat(messages, SamplingParams(max_tokens=8, temperature=0))
    request = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    (choice,) = client(tiny).chat.completions.create(**request).choices
    assert choice.message.content == expected.text
    for row in choice.logprobs.content:
        assert bytes(row.bytes).decode() == row.token
        assert len(row.top_logprobs) == 2
        assert row.top_logprobs[0].logprob == pytest.approx(row.logprob, abs=1e-5)
        assert math.exp(row.logprob) <= 1
    assert "".join(row.token for row in choice.logprobs.content).startswith(choice.message.content)
    pieces = list(client(tiny).chat.completions.create(**request, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    rows = [row.token for piece in pieces if piece.choices[0].logprobs for row in piece.choices[0].logprobs.content]
    assert rows == [row.token for row in choice.logprobs.content]


def test_structured_output(tiny):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "own", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
    status, found = tiny.post("/v1/chat/completions", body | {"response_format": form})
    assert status == 200
    assert json.loads(found["choices"][0]["message"]["content"])["n"] in (1, 2)
    own = {"choice": ["one", "two"]}
    _, found = tiny.post("/v1/chat/completions", body | {"structured_outputs": own, "n": 3, "temperature": 1})
    assert {choice["message"]["content"] for choice in found["choices"]} <= {"one", "two"}
    refused = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}
    for wrong, param in (
        ({"response_format": refused}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": schema}}, "response_format.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": False}, "structured_outputs"),
    ):
        status, found = tiny.post("/v1/chat/completions", body | wrong)
        assert (status, found["error"]["param"]) == (400, param)


def test_a_full_queue_is_429(tiny):
    """8 run and 32 wait: one more is refused, and what was accepted goes on."""
    body = {"prompt": STORY, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with tiny.connect() as eight, tiny.connect() as many:
        eight.sendall(message(body | {"n": 8, "seed": 0}, "/v1/completions"))
        tiny.until(lambda: tiny.metric("vllm:num_requests_running") == 8)
        many.sendall(message(body | {"prompt": [STORY] * 32}, "/v1/completions"))
        tiny.until(lambda: tiny.metric("vllm:num_requests_waiting") == 32)
        status, headers, found = tiny.request("POST", "/v1/completions", body)
        assert status == 429
        assert headers["retry-after"] == "1"
        assert json.loads(found)["error"]["type"] == "rate_limit_error"
        assert eight.recv(100).startswith(b"HTTP/1.1 200")


def test_tokenize_and_detokenize(tiny, generator):
    text = "Zoë said: 'hello' 😀"
    status, found = tiny.post("/tokenize", {"prompt": text, "return_token_strs": True, "model": "tiny"})
    tokens = generator.encode(text)
    assert status == 200
    assert found["tokens"] == tokens
    assert found["count"] == len(tokens)
    assert found["max_model_len"] == generator.max_len
    assert len(found["token_strs"]) == len(tokens)
    assert tiny.post("/detokenize", {"tokens": tokens}) == (200, {"prompt": text})
    status, found = tiny.post("/detokenize", {"tokens": [1, -1]})
    assert (status, found["error"]["param"]) == (400, "tokens[1]")


def test_what_clients_and_routers_ask(tiny, generator, folder):
    models = client(tiny).models
    assert [(own.id, own.max_model_len) for own in models.list()] == [("tiny", generator.max_len)]
    assert models.retrieve("tiny").id == "tiny"
    assert tiny.request("GET", "/v1/models/other")[0] == 404
    assert json.loads(tiny.request("GET", "/ready")[2]) == {"status": "ready", "graphs_to_capture": 0}
    for path in ("/health", "/ping", "/version", "/load", "/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        assert tiny.request("GET", path)[0] == 200, path
    assert tiny.request("HEAD", "/health")[0] == 200
    info = json.loads(tiny.request("GET", "/server_info")[2])
    assert (info["max_model_len"], info["model_path"]) == (generator.max_len, folder.name)
    assert json.loads(tiny.request("GET", "/get_model_info")[2])["is_generation"] is True
    status, _, body = tiny.request("GET", "/v1/completions")
    assert status == 405
    assert "POST" in json.loads(body)["error"]["message"]


def test_metrics(tiny):
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_count",
             "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
             "prefix_cache_queries_total")  # fmt: skip
    before = {name: tiny.metric(f"vllm:{name}") for name in names}
    _, found = tiny.post("/v1/completions", {"prompt": ["a dog", "a cat"], "max_tokens": 5, "ignore_eos": True})
    prompts = found["usage"]["prompt_tokens"]
    added = [tiny.metric(f"vllm:{name}") - before[name] for name in names]
    assert added == [prompts, 10, 2, 2, 8, 2, 2, prompts]
    text = tiny.request("GET", "/metrics")[2].decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert f'vllm:{name}{{model_name="tiny"}}' in text


def test_metrics_of_drafts(folder, tmp_path, tiny):
    """A text that repeats its prompt. A server without drafts has no such metrics; an engine whose front is killed ends."""
    options = ("--kv-cache-memory", "16MiB", "--served-model-name", "drafts", "--speculate", "ngram")
    server = Server(tmp_path / "log", "--model", folder, *options).wait()
    engine = server.engine
    body = {"prompt": "one two three four five six seven eight. " * 4, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    server.post("/v1/completions", body | {"logit_bias": {str(token): 50 for token in (5, 6)}})
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    drafts, drafted, accepted = (server.metric(f"vllm:spec_decode_{name}") for name in names)
    metrics = server.request("GET", "/metrics")[2].decode()
    server.process.kill()
    assert drafts > 0
    assert 0 < accepted <= drafted
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="drafts",position="0"}' in metrics
    assert "spec_decode" not in tiny.request("GET", "/metrics")[2].decode()
    engine.wait(30)


def test_the_prefix_cache_shows_in_the_usage(tiny):
    body = {"prompt": "a very long word " * 20, "max_tokens": 1}
    tiny.post("/v1/completions", body)
    _, found = tiny.post("/v1/completions", body)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    _, found = tiny.post("/v1/completions", body | {"cache_salt": "other"})
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_warm_prompt_is_kept_from_the_start(tiny, generator):
    """It comes from the prefix cache although no request has had it."""
    tokens = len(generator.encode(WARM))
    assert tokens > 64
    _, found = tiny.post("/v1/completions", {"prompt": WARM + "Then", "max_tokens": 1})
    kept = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert kept == tokens // 64 * 64
    assert f"king.txt: {kept} tokens are kept" in tiny.log
    (stated,) = json.loads(tiny.request("GET", "/server_info")[2])["warm_prompts"]
    assert stated == kept


@pytest.mark.parametrize("serves", [False, True], ids=["while it loads", "while it serves"])
def test_control_c_is_a_clean_end(serves, folder, tmp_path):
    """Catches exit code 130, a traceback, and an engine that stays. vLLM and uvicorn end with 0."""
    server = Server(tmp_path / "log", "--model", folder, "--kv-cache-memory", "8MiB")
    server.until(lambda: psutil.Process(server.process.pid).children())
    engine = server.wait().engine if serves else psutil.Process(server.process.pid).children()[0]
    # A terminal would send SIGINT to both, were they of one session. A child is seen before it has begun its own.
    server.until(lambda: os.getsid(engine.pid) != os.getsid(server.process.pid))
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    engine.wait(30)
    assert all(line.startswith("minirt: serving ") for line in server.log.splitlines()), server.log


def test_a_second_signal_ends_at_once(folder, tmp_path):
    server = Server(tmp_path / "log", "--model", folder, "--kv-cache-memory", "8MiB").wait()
    engine = server.engine
    with server.connect() as own:
        body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "n": 8, "seed": 0, "stream": True}
        own.sendall(message(body, "/v1/completions"))
        own.recv(1000)
        server.process.send_signal(signal.SIGINT)
        server.until(lambda: "ending; 1 request is still running" in server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130
    engine.wait(30)


def test_the_engine_is_killed(folder, tmp_path):
    """Every client gets an error at once, and the server ends with one."""
    server = Server(tmp_path / "log", "--model", folder, "--kv-cache-memory", "8MiB").wait()
    results = []
    body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True}

    def ask(streams):
        results.append(server.request("POST", "/v1/completions", body | {"stream": streams}))

    threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    server.until(lambda: server.metric("vllm:num_requests_running") == 6)
    server.engine.kill()
    for thread in threads:
        thread.join(30)
    assert server.process.wait(30) == 1
    assert len(results) == 6
    for status, _, data in results:
        found = json.loads(data) if status == 503 else events(data)[-1]
        assert status in (200, 503)
        assert "SIGKILL" in found["error"]["message"]
    assert {status for status, _, _ in results} == {200, 503}
    last = server.log.splitlines()[-1]
    assert last.startswith("minirt: the engine's process has ended")
    assert "SIGKILL" in last


def test_loads_that_fail(tmp_path):
    """What the engine's process refuses, and what the front refuses meanwhile. The processes run side by side."""
    words = tmp_path / "words.txt"
    words.write_text("word " * 9000)
    starts = {
        ("--tool-call-parser", "response_template"): (2, ["--tool-call-parser", "response_template"]),
        ("--warm-prompt", str(words), "--kv-cache-memory", "8MiB"): (1, ["words.txt", "the prompt is too long"]),
    }
    running = [start("serve", "--device", "cpu", "-q", "--port", "0", *arguments) for arguments in starts]
    for process, (code, words) in zip(running, starts.values(), strict=True):
        text = process.communicate(timeout=120)[1].decode()
        assert process.returncode == code, text
        assert text.startswith("minirt: "), text
        assert text.count("\n") == 1, text
        assert all(word in text for word in words), text


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("--port", "70000"), 2, ["--port"]), (("--host", "no.such.host.invalid"), 2, ["--host", "cannot listen"]),
    (("--api-key", ""), 2, ["--api-key", "empty"]), (("--config", "/no/such/file"), 1, ["/no/such/file"]),
])  # fmt: skip
def test_starts_that_fail(arguments, code, words, capfd, monkeypatch):
    refused(caller(capfd, monkeypatch)("serve", "-q", "--port", "0", *arguments), *words, code=code)


def test_a_port_that_is_taken(capfd, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = caller(capfd, monkeypatch)("serve", "--port", taken.getsockname()[1], "-q")
        refused(result, "cannot listen", "another --port", code=2)
