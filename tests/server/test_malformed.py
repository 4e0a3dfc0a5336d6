"""Requests that are wrong in many ways: each is refused with a 4xx that names the field, and nothing else suffers."""

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

from support.server import events, message

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
DEEP = "[" * 10_000 + "]" * 10_000


def nested(levels):
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def completions(**fields):
    return TEXT, {"prompt": "a", "max_tokens": 1} | fields


def chats(**fields):
    return CHAT, {"messages": USER, "max_tokens": 1} | fields


def cases():
    """(path, body, the field that the error names, the accepted statuses)"""
    texts = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for name in (*texts, "max_tokens", "top_k", "n", "seed", "min_tokens", "truncate_prompt_tokens", "priority"):
        for wrong in ("1", [1], {}, True):
            yield *completions(**{name: wrong}), name
    for name in ("max_tokens", "top_k", "n", "seed", "min_tokens"):
        yield *completions(**{name: 1.5}), name
    for name in ("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo"):
        for wrong in ("true", 1, []):
            yield *completions(**{name: wrong}), name
    for name, wrongs in {
        "temperature": (-0.1, -1e300), "top_p": (0, 1.01, -1), "min_p": (-0.1, 1.5), "top_k": (-2, -(2**53), 2**60),
        "n": (0, -1, 129, 10**6, 2**70), "max_tokens": (0, -1, 2**60), "seed": (-1, 2**64, 2**200), "min_tokens": (-1, 2),
        "presence_penalty": (-2.1, 3), "frequency_penalty": (9,), "repetition_penalty": (0, -1, 1e-320, 1e308),
        "logprobs": (-1, 21, 10**6),
        "truncate_prompt_tokens": (0, -2), "best_of": (2, -1), "priority": (2**60,),
        "stop": ("", [""], ["a"] * 100_000, ["a"] * 17, "x" * 5000, [["a"]], 5, ["a", 1]),
        "bad_words": ([""], ["a"] * 2000, 7), "stop_token_ids": ([-1], ["1"], [1.5], 3, [2**60], [10**6], [1] * 2000),
        "logit_bias": ({"a": 1}, {"1": 101}, {"1": "x"}, {"-1": 1}, [], {str(i): 1 for i in range(5000)}, {"999999": 1}),
        "allowed_token_ids": ([], [-1], [999_999], ["a"]), "cache_salt": (5,), "user": (5,), "model": (5, []),
        "stream_options": ({"include_usage": True}, [], 1), "prompt_logprobs": (21, -1, -2, "a"), "metadata": (nested(70),),
    }.items():  # fmt: skip
        for wrong in wrongs:
            yield *completions(**{name: wrong}), name
    for wrong in (None, 5, {}, [], [[]], [None], ["a", 1], [["a"]], [1, "a"], [[1], [1.5]], True, "", [1, 2.5]):
        yield *completions(prompt=wrong), "prompt"
    for wrong in ([1, -1], [10**6], [[1], [10**6]], "word " * 600, [5] * 600, [2**60], [["a"]]):
        yield *completions(prompt=wrong), "prompt"
    yield *completions(prompt=["a"] * 5000), "prompt"
    yield *completions(prompt=["a"] * 100, n=100, seed=1), "prompt"
    yield *completions(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"
    yield *completions(max_tokens=0, echo=True, stream=True), "max_tokens"
    yield *completions(n=2, temperature=0), "n"
    yield TEXT, {"max_tokens": 1}, "prompt"
    yield TEXT, {}, "prompt"
    for name, wrong in {
        "chat_template": "{{ 1 }}", "documents": [{}], "suffix": "x", "use_beam_search": True, "length_penalty": 2,
        "store": True,
        "guided_json": {}, "guided_regex": "a", "logits_processors": ["os.system"], "prediction": {}, "audio": {},
        "modalities": ["audio"], "functions": [{}], "return_hidden_states": True, "spaces_between_special_tokens": False,
        "web_search_options": {}, "function_call": "auto",
    }.items():  # fmt: skip
        yield *chats(**{name: wrong}), name
    for wrong in ({"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 5}}, "json", [], 5,
                  {"type": "json_schema", "json_schema": {"schema": nested(200)}}):  # fmt: skip
        yield *chats(response_format=wrong), "response_format"
    for wrong in ({"regex": "(a*)*b" * 10_000}, {"nothing": 1}, {"json": {}, "regex": "a"}, 5, "x", nested(100), {"choice": []}):
        yield *chats(structured_outputs=wrong), "structured_outputs"
    for wrong in (None, [], {}, "hi", 5, [5], ["hi"], [None]):
        yield *chats(messages=wrong), "messages"
    for wrong in ({}, {"role": "king", "content": "a"}, {"role": 5, "content": "a"}, {"role": "function", "content": "a"},
                  {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 5},
                  {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                  {"role": "user", "content": ["a"]}, {"role": "user", "content": [{"type": "text"}]},
                  {"role": "user", "content": {"type": "text", "text": "a"}},
                  {"role": "assistant", "content": "", "tool_calls": [{}]},
                  {"role": "user", "content": "word " * 600}):  # fmt: skip
        yield *chats(messages=[wrong]), "messages"
    for name, wrongs in {
        "logprobs": (5, "yes"), "top_logprobs": (3, -1, "a"), "max_completion_tokens": (0, -5, "1", 2), "tools": ([{}], 5),
        "tool_choice": ("required", {"type": "function"}), "chat_template_kwargs": (5, nested(100), {"messages": []}),
        "reasoning_effort": ("high", 5), "continue_final_message": (True, 1), "add_generation_prompt": ("x",),
    }.items():  # fmt: skip
        for wrong in wrongs:
            yield *chats(**{name: wrong}), name
    yield *chats(logprobs=True, top_logprobs=21), "top_logprobs"
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        for wrong in (b"", b"{", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\xc3\x28"}', b"[]", b"null", b"5", b'"a"',
                      b"{'a': 1}",
                      b'{"a": 1} x', b'{"a": 01}', b'{"a": NaN}', b'{"prompt": ' + DEEP.encode() + b"}", DEEP.encode(),
                      b"\x00" * 100,
                      b'{"a": "\\ud800"}'):  # fmt: skip
            yield path, wrong, ("body", "prompt", "messages", "tokens")
    for levels in range(880, 1000, 7):  # just readable, or just not
        deep = b"[" * levels + b"]" * levels
        for name in ("prompt", "messages", "tools", "response_format", "stop", "metadata", "model", "n"):
            path = CHAT if name in ("messages", "tools", "response_format") else TEXT
            start = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
            yield path, start + b'"%b": %b}' % (name.encode(), deep), ("body", name)
    for wrong in ({"prompt": 5}, {}, {"prompt": "a", "messages": USER}, {"prompt": ["a"]}):
        yield "/tokenize", wrong, "prompt"
    for wrong in ({"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [-1]}, {"tokens": [10**9]}, {}):
        yield "/detokenize", wrong, "tokens"


def test_each_is_refused_with_the_name_of_its_field(tiny):
    where, failed, count = urlsplit(tiny.url), [], 0
    body = {"prompt": "Once", "max_tokens": 150, "stream": True, "ignore_eos": True, "temperature": 0}
    beside = []
    other = threading.Thread(target=lambda: beside.append(tiny.request("POST", TEXT, body)))
    other.start()
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each body waits for a delayed ACK
    for path, content, fields in cases():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        connection.request("POST", path, data)
        response = connection.getresponse()
        answer, count = response.read(), count + 1
        try:
            error = json.loads(answer)["error"]
            wanted = (fields,) if isinstance(fields, str) else fields
            named = str(error["param"]).split(".")[0].split("[")[0] in {own.split(".")[0] for own in wanted}
            good = response.status == 400 and named and error["type"] == "invalid_request_error" and error["message"]
        except (ValueError, KeyError):
            good = False
        if not good:
            failed.append((path, data[:80], fields, response.status, answer[:200]))
    connection.close()
    assert not failed, "\n".join(map(str, failed))
    assert count >= 200
    other.join(60)
    assert events(beside[0][2])[-1] == "[DONE]"


def test_requests_that_are_no_http(tiny):
    for data in (b"\x00" * 100, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
                 message({}, "/v1/completions")[:40]):  # fmt: skip
        with tiny.connect() as own:
            own.sendall(data)
            own.shutdown(1)
            answer = b""
            while part := own.recv(1000):
                answer += part
            assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408")), answer
    assert tiny.request("GET", "/health")[0] == 200


def test_integral_floats_are_integers(tiny):
    body = {"prompt": [5.0, 6], "max_tokens": 3.0, "n": 1.0, "top_k": 4.0, "seed": 5.0, "stop_token_ids": [4.0]}
    status, found = tiny.post(TEXT, body | {"ignore_eos": True})
    assert status == 200, found
    assert found["usage"]["completion_tokens"] == 3


def test_nulls_mean_not_set(tiny):
    names = ("temperature", "top_p", "n", "seed", "stop", "logit_bias", "stream", "stream_options", "logprobs", "ignore_eos",
             "user", "response_format", "suffix", "best_of", "chat_template", "metadata")  # fmt: skip
    status, _ = tiny.post(TEXT, {"prompt": "a", "max_tokens": 1} | dict.fromkeys(names))
    assert status == 200
