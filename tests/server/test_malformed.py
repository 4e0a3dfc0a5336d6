"""Requests that are wrong in many ways: each is refused with a 4xx that names the field, and nothing else suffers."""

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest
from support.server import events, message

from minirt.server.completions import CompletionRequest
from minirt.server.errors import HTTPError
from minirt.server.protocol import convert

TEXT, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
DEEP = "[" * 10_000 + "]" * 10_000


def nested(levels):
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


TYPES = [
    ({"temperature": "0.7"}, "temperature: wrong type; expected a number or null; found a string"),
    ({"stream": 1}, "stream: wrong type; expected true or false or null; found an integer"),
    ({"stop": 5}, "stop: wrong type; expected a string or a list or null; found an integer"),
    ({"stop": [5]}, "stop[0]: wrong type; expected a string; found an integer"),
    ({"max_tokens": "5"}, "max_tokens: wrong type; expected an integer or null; found a string"),
    ({"stream_options": []}, "stream_options: wrong type; expected an object or null; found a list"),
    ({}, "prompt: is missing"),
]


@pytest.mark.parametrize(("fields", "message"), TYPES, ids=lambda own: str(own)[:20])
def test_wrong_types_are_told_in_the_words_of_json(fields, message):
    with pytest.raises(HTTPError) as error:
        convert(fields | ({"prompt": "a"} if fields else {}), CompletionRequest)
    assert str(error.value) == message
    assert error.value.param == message.partition(":")[0]


def completions(**fields):
    return TEXT, {"prompt": "a", "max_tokens": 1} | fields


def chats(**fields):
    return CHAT, {"messages": USER, "max_tokens": 1} | fields


def responses(**fields):
    return RESPONSES, {"input": "a", "max_output_tokens": 1} | fields


def response_cases():
    """Those of /v1/responses."""
    for name, wrongs in {
        "max_output_tokens": (0, -2, 1.5, "1", [], 2**60), "temperature": ("1", -0.1, []), "top_p": (0, 1.5, "x"), "n": (2, 0),
        "instructions": (5, [], {}), "stream": ("true", 1), "tools": (5, {}, [{}] * 600, [nested(100)]), "text": (5, "text", []),
        "tool_choice": ("any", 5, "required", {"type": "function"}, {"type": "function", "name": "f"}, {"type": "web_search"}),
        "parallel_tool_calls": (1, "true"), "reasoning": ("high", 5, []), "include": (5, "a", [5]), "metadata": (5, "a", [1]),
        "store": ("yes", 1), "stream_options": (5, []), "previous_response_id": ("resp_1", 5),
        "conversation": ("conv_1", {"id": "conv_1"}), "background": (True,), "prompt": ({"id": "pmpt_1"}, "a"),
        "truncation": ("auto", 5), "context_management": ([{}],), "moderation": ({"model": "m"},), "top_logprobs": (1, -1),
        "messages": (USER,), "max_tokens": (5,), "max_completion_tokens": (5,), "response_format": ({"type": "text"},),
        "reasoning_effort": ("high",), "chat_template_kwargs": (5, {"messages": []}, nested(100)), "model": (5,),
        "max_tool_calls": ("a", 1.5), "chat_template": ("{{ 1 }}",), "seed": (2**64, -(2**63) - 1), "stop": ("", 5), "user": (5,),
        "logit_bias": ({"a": 1}, {str(i): 1 for i in range(5000)}), "structured_outputs": (5, {"nothing": 1}),
        "verbosity": ("low",),
        "input": (None, 5, [], {}, True, [5], ["a"], [None], [{}], [{"type": "message"}], nested(3), "word " * 600),
    }.items():  # fmt: skip
        for wrong in wrongs:
            yield *responses(**{name: wrong}), name
    yield RESPONSES, {}, "input"
    yield RESPONSES, {"model": "tiny"}, "input"
    yield *responses(include=["message.output_text.logprobs"]), "include"
    call, output = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    for wrong, name in (
        ({"role": "king", "content": "a"}, "role"), ({"role": "tool", "content": "a"}, "role"), ({"content": "a"}, "type"),
        ({"role": "user"}, "content"), ({"role": "user", "content": 5}, "content"), ({"role": "user", "content": {}}, "content"),
        ({"role": "user", "content": ["a"]}, "content[0]"), ({"role": "user", "content": [{}]}, "content[0].type"),
        ({"role": "user", "content": [image]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_file"}]}, "content[1].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"type": ["input_text"], "text": "a"}]}, "content[0].type"),
        (call | {"name": None}, "name"), (call | {"call_id": 5}, "call_id"), (call | {"arguments": {}}, "arguments"),
        (call | {"arguments": "[" * 100_001}, "arguments"), (output | {"output": "a"}, "call_id"),
        (output | {"call_id": "c"}, "output"), (output | {"call_id": "c", "output": [image]}, "output[0].type"),
        ({"type": "reasoning", "content": [{"type": "x"}]}, "content[0].type"),
        ({"type": "reasoning", "summary": 5}, "summary"), ({"type": "reasoning", "summary": [5]}, "summary[0]"),
        ({"type": "item_reference", "id": "msg_1"}, "type"), ({"type": "web_search_call"}, "type"), ({"type": 5}, "type"),
        ({"type": {"a": 1}}, "type"), ({"type": "local_shell_call_output", "output": "a"}, "type"),
    ):  # fmt: skip
        yield *responses(input=[{"role": "user", "content": "a"}, wrong]), f"input[1].{name}"
    tool = {"type": "function", "name": "f"}
    for wrong, name in (
        (5, ""), ({}, ""), ({"name": "f"}, ""), (tool | {"name": "a b"}, ".name"), ({"type": "function"}, ".name"),
        (tool | {"parameters": 5}, ".parameters"), (tool | {"description": 5}, ".description"), (tool | {"type": 5}, ""),
        ({"type": "function", "function": {"name": "f"}}, ".name"), (tool, ".name"),
    ):  # fmt: skip
        yield *responses(tools=[{"type": "web_search"}, tool, wrong]), f"tools[2]{name}"
    yield *responses(tools=[tool]), "tools"  # the model's template does not use them
    for wrong, name in (
        ({"format": 5}, "format"), ({"format": {"type": "xml"}}, "format.type"), ({"format": {"schema": {}}}, "format.type"),
        ({"format": {"type": "json_schema"}}, "format.schema"),
        ({"format": {"type": "json_schema", "schema": 5}}, "format.schema"),
        ({"format": {"type": "json_schema", "schema": {"type": 5}}}, None), ({"format": nested(100)}, None),
        ({"verbosity": 5}, "verbosity"),
    ):  # fmt: skip
        yield *responses(text=wrong), f"text.{name}" if name else ("text", "structured_outputs")
    for wrong in (5, ["low"]):
        yield *responses(reasoning={"effort": wrong}), "reasoning.effort"


def messages(**fields):
    return MESSAGES, {"messages": USER, "max_tokens": 1} | fields


def messages_cases():
    """Of Anthropic's API; see `cases`."""
    for name in ("temperature", "top_p", "max_tokens", "top_k", "stream", "seed"):
        for wrong in ("1", [1], {}):
            yield *messages(**{name: wrong}), name
    deep = nested(100)
    for name, wrongs in {
        "max_tokens": (None, 0, -2, 1.5, 2**60), "temperature": (-1,), "top_p": (0, 2), "top_k": (-2, 2.5), "model": (5, []),
        "stop_sequences": ("a", [""], [5], ["a"] * 17, ["x" * 5000]), "metadata": (deep,), "service_tier": (5,),
        "system": (5, {}, [5], [{}], [{"type": "text"}], [{"type": "image", "source": {}}], deep, [{"type": "text", "text": 5}]),
        "tools": (5, {}, [5], [{}], [{"name": "f"}], [{"name": "f", "input_schema": 5}], [{"input_schema": {}}],
                  [{"name": "a b", "input_schema": {}}], [{"name": 5, "input_schema": {}}], [{"type": 5}],
                  [{"name": "f", "input_schema": {}, "description": 5}], [{"name": "f", "input_schema": deep}],
                  [{"name": "f", "input_schema": {}}] * 2, [{"name": "f", "input_schema": {}}] * 600),
        "tool_choice": (5, "auto", {"type": 5}, {"type": "some"}, {"type": "tool"}, {"type": "any"},
                        {"type": "tool", "name": "f"}, {"type": "auto", "disable_parallel_tool_use": 1}, {"name": "f"}),
        "thinking": (5, True, {"type": 5}, {"type": "often"}, {"budget_tokens": 5}, {"type": "enabled", "budget_tokens": "5"},
                     {"type": "enabled", "budget_tokens": 0}, {"type": "enabled", "budget_tokens": True}),
        "output_config": (5, {"format": 5}, {"format": {"type": "xml"}}, {"format": {"type": "json_schema"}}, {"effort": 5}),
        "chat_template_kwargs": (5, deep, {"messages": []}), "structured_outputs": (5, {"nothing": 1}), "documents": ([{}],),
        "n": (2,), "logprobs": (True, 0), "top_logprobs": (1,), "response_format": ({"type": "text"},), "container": ("c",),
        "max_completion_tokens": (5,), "mcp_servers": ([{}],), "reasoning_effort": ("low",),
        "messages": (None, [], {}, "hi", 5, [5], [None], [{"role": "user", "content": deep}]),
    }.items():  # fmt: skip
        for wrong in wrongs:
            yield *messages(**{name: wrong}), name
    yield *messages(stop=["a"], stop_sequences=["b"]), "stop_sequences"
    yield *messages(structured_outputs={"regex": "a"}, output_config={"format": {"type": "json_schema", "schema": {}}}), (
        "structured_outputs"
    )
    yield MESSAGES, {"messages": USER}, "max_tokens"
    yield MESSAGES, {"max_tokens": 1}, "messages"
    call = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    for wrong in ({}, {"role": "king", "content": "a"}, {"role": 5, "content": "a"}, {"role": "tool", "content": "a"},
                  {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 5},
                  {"role": "user", "content": []}, {"role": "user", "content": ["a"]}, {"role": "system", "content": [call]},
                  {"role": "user", "content": {"type": "text", "text": "a"}},
                  {"role": "user", "content": "word " * 600}):  # fmt: skip
        yield *messages(messages=[wrong]), "messages"
    for role, block in (
        ("user", {}), ("user", {"type": 5}), ("user", {"type": "text"}), ("user", {"type": "text", "text": 5}), ("user", call),
        ("user", {"type": "image", "source": {}}), ("user", {"type": "document", "source": {}}), ("user", {"type": []}),
        ("user", {"type": "thinking", "thinking": "x"}), ("user", {"type": "tool_result"}), ("user", {"type": "server_tool_use"}),
        ("user", {"type": "tool_result", "tool_use_id": 5}), ("user", {"type": "tool_result", "tool_use_id": "x", "content": 5}),
        ("user", {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {}}]}),
        ("user", {"type": "tool_result", "tool_use_id": "x", "is_error": "no"}), ("assistant", {"type": "thinking"}),
        ("assistant", {"type": "tool_result", "tool_use_id": "x"}), ("assistant", {"type": "tool_use"}), ("assistant", call),
        ("assistant", call | {"input": "{}"}), ("assistant", call | {"name": 5}), ("assistant", call | {"id": None}),
    ):  # fmt: skip
        yield *messages(messages=[*USER, {"role": role, "content": [block]}]), "messages"
    for levels in range(880, 1000, 30):  # just readable, or just not
        deep = b"[" * levels + b"]" * levels
        for name in ("messages", "tools", "system", "metadata", "max_tokens"):
            start = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
            yield MESSAGES, start + b'"%b": %b}' % (name.encode(), deep), ("body", name)


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
        "n": (0, -1, 129, 10**6, 2**70), "max_tokens": (0, -2, 2**60), "seed": (-(2**63) - 1, 2**64, 2**200),
        "min_tokens": (-1, 2),
        "presence_penalty": (-2.1, 3), "frequency_penalty": (9,), "repetition_penalty": (0, -1, 1e-320, 1e308),
        "logprobs": (-1, 21, 10**6), "truncate_prompt_tokens": (0, -2), "best_of": (2, -1), "priority": (2**60,),
        "stop": ("", [""], ["a"] * 100_000, ["a"] * 17, "x" * 5000, [["a"]], 5, ["a", 1]),
        "bad_words": ([""], ["a"] * 2000, 7), "stop_token_ids": ([-1], ["1"], [1.5], 3, [2**60], [10**6], [1] * 2000),
        "logit_bias": ({"a": 1}, {"1": 101}, {"1": "x"}, {"-1": 1}, [], {str(i): 1 for i in range(5000)}, {"999999": 1}),
        "allowed_token_ids": ([], [-1], [999_999], ["a"]), "cache_salt": (5,), "user": (5,), "model": (5, []),
        "stream_options": ([], 1), "prompt_logprobs": (21, -1, -2, "a"), "metadata": (nested(70),),
    }.items():  # fmt: skip
        for wrong in wrongs:
            yield *completions(**{name: wrong}), name
    for wrong in (None, 5, {}, [], [[]], [None], ["a", 1], [["a"]], [1, "a"], [[1], [1.5]], True, "", [1, 2.5]):
        yield *completions(prompt=wrong), "prompt"
    for wrong in ([1, -1], [10**6], [[1], [10**6]], "word " * 600, [5] * 600, [2**60], [["a"]]):
        yield *completions(prompt=wrong), "prompt"
    for name, wrong in {
        "max_completion_tokens": 5, "top_logprobs": 2, "tools": [{}], "tool_choice": "required", "parallel_tool_calls": "yes",
        "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "continue_final_message": True, "add_generation_prompt": 0.5,
    }.items():  # fmt: skip
        yield *completions(**{name: wrong}), name
    yield *completions(prompt=["a"] * 5000), "prompt"
    for name, wrong in {
        "bad_words": ["x" * 50] * 100, "allowed_token_ids": [5] * 900, "structured_outputs": {"regex": "x" * 6000},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 6000}}}, "stop": ["x" * 500] * 16,
        "logit_bias": {str(i): 1 for i in range(900)},
    }.items():  # fmt: skip
        yield *completions(prompt=["a"] * 4000, **{name: wrong}), name
        yield *completions(prompt=["a"] * 32, n=128, seed=1, **{name: wrong}), name
    yield *chats(n=128, seed=1, structured_outputs={"regex": "x" * 500_000}), "structured_outputs"
    yield *completions(prompt=["a"] * 100, n=100, seed=1), "prompt"
    yield *completions(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"
    yield *completions(max_tokens=0, echo=True, stream=True), "max_tokens"
    yield *completions(n=2, temperature=0), "n"
    yield TEXT, {"max_tokens": 1}, "prompt"
    yield TEXT, {}, "prompt"
    for name, wrong in {
        "chat_template": "{{ 1 }}", "documents": [{}], "suffix": "x", "use_beam_search": True, "length_penalty": 2,
        "store": 1, "moderation": {"model": "m"}, "return_token_ids": True,
        "guided_json": {}, "guided_regex": "a", "logits_processors": ["os.system"], "prediction": {}, "audio": {},
        "modalities": ["audio"], "functions": [{}], "return_hidden_states": True, "spaces_between_special_tokens": False,
        "web_search_options": {}, "function_call": {"name": "f"},
        "best_of": 3, "max_output_tokens": 5, "stop_sequences": ["a"],  # were ignored, with a line in the log
    }.items():  # fmt: skip
        yield *chats(**{name: wrong}), name
    yield *completions(max_completion_tokens=5), "max_completion_tokens"
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
        "tool_choice": ("required", {"type": "function"}),
        "chat_template_kwargs": (5, nested(100), {"messages": []}, dict.fromkeys(map(str, range(100))), {"a" * 2000: 1}),
        "reasoning_effort": (5,), "verbosity": (5,), "continue_final_message": (True, 1), "add_generation_prompt": ("x",),
    }.items():  # fmt: skip
        for wrong in wrongs:
            yield *chats(**{name: wrong}), name
    yield *chats(logprobs=True, top_logprobs=21), "top_logprobs"
    for wrong in ({"$ref": "#/nothing"}, {"not": {}}, {"pattern": "(?=a)b"}, {"enum": []}, {"properties": []}):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": wrong}}}
        yield *chats(response_format=form), "response_format"
        yield *chats(tools=[{"type": "function", "function": function}], tool_choice="required"), "tools"
        yield *completions(response_format=form), "response_format"
        yield *completions(structured_outputs={"json": wrong}), "structured_outputs"
        yield *responses(text={"format": {"type": "json_schema", "name": "a", "schema": wrong}}), "text"
        yield *responses(tools=[{"type": "function"} | function], tool_choice="required"), "tools"
        yield *messages(output_config={"format": {"type": "json_schema", "schema": wrong}}), "output_config"
        yield *messages(tools=[{"name": "f", "input_schema": function["parameters"]}], tool_choice={"type": "any"}), "tools"
    many = {"name": "f", "arguments": json.dumps({"a": [[]] * 200_000})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": many}]}
    yield *chats(messages=[*USER, call]), "messages"
    yield *responses(input=[{"type": "function_call", "call_id": "a"} | many]), "input"
    deep = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 200_000}}
    yield *chats(messages=[*USER, {"role": "assistant", "content": "", "tool_calls": [deep]}]), "messages"
    yield "/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"
    yield from response_cases()
    yield from messages_cases()
    for path in (TEXT, CHAT, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize"):
        for wrong in (b"", b"{", b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": "\xc3\x28"}', b"[]", b"null", b"5", b'"a"',
                      b"{'a': 1}",
                      b'{"a": 1} x', b'{"a": 01}', b'{"a": NaN}', b'{"prompt": ' + DEEP.encode() + b"}", DEEP.encode(),
                      b"\x00" * 100,
                      b'{"a": "\\ud800"}'):  # fmt: skip
            yield path, wrong, ("body", "prompt", "messages", "input", "tokens", "max_tokens")
    for levels in range(880, 1000, 30):  # just readable, or just not
        deep = b"[" * levels + b"]" * levels
        for name in ("prompt", "messages", "tools", "response_format", "stop", "metadata", "model", "n"):
            path = CHAT if name in ("messages", "tools", "response_format") else TEXT
            start = b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, '
            yield path, start + b'"%b": %b}' % (name.encode(), deep), ("body", name)
        for name in ("input", "tools", "text", "reasoning", "tool_choice", "metadata", "include"):
            yield RESPONSES, b'{"input": "a", "%b": %b}' % (name.encode(), deep), ("body", name)
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
            param = error["message"].partition(": ")[0] if path.startswith(MESSAGES) else str(error["param"])
            named = param in wanted or param.split(".")[0].split("[")[0] in wanted
            good = response.status == 400 and named and error["type"] == "invalid_request_error" and error["message"]
        except (ValueError, KeyError, TypeError):
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


# What asks for nothing: in each API, whether it has the field or not.
EVERYWHERE = {
    "seed": [-1, -5, -(2**63), 2**64 - 1], "presence_penalty": [0, 0.0], "frequency_penalty": [0], "repetition_penalty": [1, 1.0],
    "min_p": [0], "top_k": [0, -1], "top_p": [1], "min_tokens": [0], "logit_bias": [{}], "stop": [[]], "bad_words": [[]],
    "top_logprobs": [0], "logprobs": [False], "n": [1], "store": [True, False], "service_tier": ["auto"], "user": ["u"],
    "metadata": [{}], "safety_identifier": ["a"], "prompt_cache_key": ["a"], "prompt_cache_retention": ["24h"],
    "prompt_cache_options": [{}], "documents": [[]], "suffix": [""], "use_beam_search": [False], "functions": [[]],
    "length_penalty": [1, 1.0], "early_stopping": [False], "logits_processors": [[]], "mm_processor_kwargs": [{}],
    "spaces_between_special_tokens": [True], "modalities": [["text"], []], "function_call": ["none", "auto"],
    "return_token_ids": [False], "return_tokens_as_token_ids": [False], "return_hidden_states": [False],
    "chat_template_kwargs": [{}], "truncate_prompt_tokens": [-1], "structured_outputs": [{}], "priority": [0],
    "request_id": ["a"], "kv_transfer_params": [{}],
}  # fmt: skip
ONLY = {
    TEXT: {"tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "reasoning_effort": ["none"],
           "continue_final_message": [False], "add_generation_prompt": [True, False], "best_of": [1], "max_tokens": [-1],
           "stream_options": [{}, {"include_usage": True}], "response_format": [{"type": "text"}, {}], "echo": [False]},
    CHAT: {"tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "max_completion_tokens": [-1],
           "reasoning_effort": ["none", "low", "high"], "verbosity": ["low", "medium", "high"], "max_tokens": [-1],
           "continue_final_message": [False], "echo": [False], "stream_options": [{}, {"include_usage": True}],
           "response_format": [{"type": "text"}, {}], "thinking": [{"type": "disabled"}]},
    RESPONSES: {"tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False], "max_output_tokens": [-1],
                "reasoning": [{}, {"effort": None}, {"effort": "none"}, {"effort": "low"}], "text": [{}, {"verbosity": "low"}],
                "background": [False], "truncation": ["disabled"], "context_management": [[]], "include": [[]],
                "stream_options": [{}, {"include_obfuscation": False}], "best_of": [1]},
    MESSAGES: {"tools": [[]], "tool_choice": [{"type": "auto"}, {"type": "none"}, {}], "thinking": [{"type": "disabled"}, {}],
               "output_config": [{}, {"effort": "low"}], "mcp_servers": [[]], "parallel_tool_calls": [True], "max_tokens": [-1],
               "reasoning_effort": ["none"], "stream_options": [{"include_usage": True}]},
}  # fmt: skip


def test_neutral_values_are_accepted(tiny):
    """A field with its default, or one that is about another's service, is no reason for 400, whichever API gets it."""
    failed = []
    for make in (completions, chats, responses, messages):
        for name, values in (EVERYWHERE | ONLY[make()[0]]).items():
            for value in (*values, *([] if name == "max_tokens" else [None])):
                path, body = make(**{name: value})
                if name == "max_completion_tokens":  # the other name of the same limit
                    del body["max_tokens"]
                limit = {"stop_token_ids": list(range(1000))} if value == -1 and name.startswith("max") else {}
                status, answer = tiny.post(path, body | limit)
                if status != 200:
                    failed.append((path, name, value, answer))
    assert not failed, "\n".join(map(str, failed))


def test_false_is_not_0_where_a_field_is_not_supported(tiny):
    """In Python, False == 0: a request for log-probabilities without alternatives must not pass for one without any."""
    assert tiny.post(*messages(logprobs=0))[0] == 400
    assert tiny.post(*messages(logprobs=False))[0] == 200
    assert tiny.post(*responses(top_logprobs=False))[0] == 400
    found = tiny.post(*completions(logprobs=0))[1]["choices"][0]
    assert len(found["logprobs"]["tokens"]) == 1
    assert tiny.post(*completions(logprobs=False))[1]["choices"][0]["logprobs"] is None


def test_negative_seeds(tiny):
    """-1 means no seed, as for vLLM; every other signed integer is a seed of its own, as for OpenAI."""
    def texts(seed):
        body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.5, "ignore_eos": True, "seed": seed}
        return {tiny.post(TEXT, body)[1]["choices"][0]["text"] for _ in range(3)}

    assert len(texts(-1)) > 1
    assert len(texts(-2)) == 1
    assert texts(-2) == texts(2**64 - 2)
    assert texts(-2) != texts(-3)


def test_no_limit(tiny):
    """max_tokens of -1 goes on to the end of the context; the default of completions is 16."""
    found = tiny.post(TEXT, {"prompt": "Once", "max_tokens": -1, "ignore_eos": True, "temperature": 0})[1]
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["total_tokens"] > 100
    body = {"messages": USER, "max_tokens": -1, "ignore_eos": True, "temperature": 0}
    assert tiny.post(MESSAGES, body)[1]["stop_reason"] in ("max_tokens", "model_context_window_exceeded")
