"""/v1/messages, read by Anthropic's own client: the front beside a fake engine with hand-written answers, and a real server.

Catches blocks that streams and whole answers show differently, a part of a conversation that the model does not see, a wrong
reason for the end, and errors in a form that the client cannot read, wherever they arise.
"""

import asyncio
import json

import anthropic
import pytest
from support.chats import Model, model_folders
from support.server import answered, message

from minirt import Generator, SamplingParams
from minirt.engine.request import TokenOutput
from minirt.errors import NumericsError

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SHOWN = (  # a template that shows all parts of a conversation
    "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}: {{ m.content }}"
    "{% if m.reasoning_content %} ({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls or [] %} {{ call.id }}={{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{{ '\\n' }}{% endfor %}{# <tool_call> #}{% if add_generation_prompt %}bot:{% endif %}"
)
SWITCH = (  # one that opens the reasoning unless it is told not to
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
)
USER = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
NOW_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return model_folders(tmp_path_factory.mktemp("models"), shown=SHOWN, switch=SWITCH)


class Messages(Model):
    @staticmethod
    def connect(url):
        return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20)

    async def create(self, text, reason="stop", cached=0, **fields):
        """The whole message, if the model answers with `text`."""
        asking = self.client.messages.create(**_body(fields))
        return await self.answered(asking, text, reason=reason, together=1000, cached=cached)

    async def streamed(self, text, reason="stop", together=1, cached=0, **fields):
        """The same message as a stream, added up by the client."""

        async def asking():
            async with self.client.messages.stream(**_body(fields)) as stream:
                return await stream.get_final_message()

        return await self.answered(asking(), text, reason=reason, together=together, cached=cached)

    async def events(self, text, **fields):
        """The events of a stream."""

        async def asking():
            return [event async for event in await self.client.messages.create(**_body(fields), stream=True)]

        return await self.answered(asking(), text)

    async def asked(self, text, data):
        """Status and body of the answer to an HTTP request."""

        async def asking():
            status, _, body = await answered(self.ask(data))
            return status, body

        return await self.answered(asking(), text)

    async def refused(self, **fields):
        """The message of the error of a request."""
        with pytest.raises(anthropic.BadRequestError) as error:
            await self.client.messages.create(**_body(fields))
        assert error.value.type == "invalid_request_error"
        return error.value.api_message


run, on_model = Messages.run, Messages.on


def _body(fields):
    return {"model": "fake", "max_tokens": 500, "messages": USER} | fields


def blocks(found):
    """The content of a message, without ids."""
    shown = []
    for block in found.content:
        if block.type == "text":
            shown.append(block.text)
        elif block.type == "thinking":
            assert block.signature
            shown.append(("thinking", block.thinking))
        else:
            assert block.type == "tool_use"
            assert block.id.startswith("toolu_")
            shown.append((block.name, block.input))
    ids = [block.id for block in found.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    return shown


# template, the answer, the blocks, the reason of the end
ANSWERS = [
    ("plain", "Hello, <think> and é.\n", ["Hello, <think> and é.\n"], "end_turn"),
    ("plain", "", [], "end_turn"),
    ("hermes", f"Let me see.\n\n{CALL}\n{NOW_CALL}", ["Let me see.", ("weather", {"city": "Zürich", "days": 3}), ("now", {})],
     "tool_use"),
    ("hermes", f"{NOW_CALL} and then\n{NOW_CALL}", [("now", {}), "and then", ("now", {})], "tool_use"),
    ("hermes", "a <tool_cal", ["a <tool_cal"], "end_turn"),
    ("thinks", f"<think>\nIt is {NOW_CALL}.\n</think>\n\nSo {CALL}",
     [("thinking", f"It is {NOW_CALL}."), "So", ("weather", {"city": "Zürich", "days": 3})], "tool_use"),
    ("thinks", "Nothing to think about.", ["Nothing to think about."], "end_turn"),
    ("switch", "Hm, é\n</think>\nYes.", [("thinking", "Hm, é"), "Yes."], "end_turn"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected", "reason"), ANSWERS)
def test_streams_and_whole_answers_are_the_same(folders, name, text, expected, reason):
    tools = {"tools": TOOLS} if name in ("hermes", "thinks") else {}

    async def scenario(model):
        found = await model.create(text, **tools)
        shown = [own.strip() if isinstance(own, str) and tools else own for own in blocks(found)]
        assert (shown, found.stop_reason, found.stop_sequence) == (expected, reason, None)
        assert (found.type, found.role, found.model) == ("message", "assistant", "fake")
        for together in (1, 2, 7, 1000):
            streamed = await model.streamed(text, together=together, **tools)
            assert blocks(streamed) == blocks(found)
            assert (streamed.stop_reason, streamed.stop_sequence) == (reason, None)
            assert streamed.usage == found.usage
            assert streamed.id.startswith("msg_")

    run(folders[name], scenario)


@on_model("thinks")
async def test_the_events_of_a_stream(model):
    """In the order of Anthropic's API: a block stops before the next one starts."""
    found = await model.events(f"<think>a</think>b {NOW_CALL}", tools=TOOLS)
    start, *middle, delta, stop = found
    assert (start.type, start.message.content, start.message.stop_reason) == ("message_start", [], None)
    assert start.message.usage.input_tokens > 0
    assert (delta.type, delta.delta.stop_reason, stop.type) == ("message_delta", "tool_use", "message_stop")
    assert delta.usage.output_tokens > start.message.usage.output_tokens
    order = []
    for event in middle:
        kind = event.delta.type if event.type == "content_block_delta" else event.type
        if (kind, event.index) not in order:
            order.append((kind, event.index))
    starts = [event.content_block for event in middle if event.type == "content_block_start"]
    assert order == [
        ("content_block_start", 0), ("thinking_delta", 0), ("signature_delta", 0), ("content_block_stop", 0),
        ("content_block_start", 1), ("text_delta", 1), ("content_block_stop", 1),
        ("content_block_start", 2), ("input_json_delta", 2), ("content_block_stop", 2),
    ]  # fmt: skip
    assert [block.type for block in starts] == ["thinking", "text", "tool_use"]
    assert (starts[0].thinking, starts[1].text, starts[2].input) == ("", "", {})


@on_model("hermes")
async def test_an_answer_that_is_cut_off(model):
    """The input of a cut call has the values that are complete. A full context is another reason than max_tokens."""
    count = len(model.tokenizer.encode_plain("x"))
    for cut, expected in (("rich", {}), (', "days"', {"city": "Zürich"}), ("3}", {"city": "Zürich"})):
        text = CALL.partition(cut)[0] + ("3" if cut == "3}" else "")
        count = len(model.tokenizer.encode_plain(text))
        for limit, reason in ((count, "max_tokens"), (count + 1, "model_context_window_exceeded")):
            found = await model.create(text, "length", tools=TOOLS, max_tokens=limit)
            assert (blocks(found), found.stop_reason) == ([("weather", expected)], reason)
            assert (await model.streamed(text, "length", tools=TOOLS, max_tokens=limit)).stop_reason == reason
    found = await model.create("<think>so", "length", tools=TOOLS, max_tokens=count)
    assert blocks(found) == ["<think>so"]


@on_model("hermes")
async def test_numbers_of_an_input_are_those_of_the_model(model):
    """They pass as text: no float in between changes them, and what is too large for one stays."""
    text = '<tool_call>{"name": "now", "arguments": {"a": 123456789012345678901234567890, "b": 0.10, "c": 1e999}}</tool_call>'
    _, body = await model.asked(text, message(_body({"tools": TOOLS}), PATH))
    assert b'{"a": 123456789012345678901234567890, "b": 0.10, "c": 1e999}' in body


@on_model("hermes")
async def test_stop_sequences(model):
    text = "one two three four"
    for stops, expected, which in (
        (["x", "o three"], "one tw", "o three"), (["four", "two"], "one ", "two"), (["x"], text, None),
    ):  # fmt: skip
        reason = "end_turn" if which is None else "stop_sequence"
        for found in (await model.create(text, stop_sequences=stops), await model.streamed(text, stop_sequences=stops)):
            assert (blocks(found), found.stop_reason, found.stop_sequence) == ([expected], reason, which)
    # One that ends an answer with a call is still the reason.
    found = await model.create(f"{NOW_CALL} END", stop_sequences=["END"], tools=TOOLS)
    assert (blocks(found), found.stop_reason) == ([("now", {})], "stop_sequence")
    assert (await model.refused(stop_sequences=[""])).startswith("stop_sequences")


@on_model("shown")
async def test_what_the_model_sees_of_a_conversation(model):
    marked = {"cache_control": {"type": "ephemeral"}}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"} | marked, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "t1", "name": "now", "input": {}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Zürich"}} | marked]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "noon"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "rain"}]} | marked,
            {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t3", "name": "now", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
              {"type": "text", "text": "You are"} | marked, {"type": "text", "text": "kind."}]  # fmt: skip
    await model.create("e", messages=conversation, system=system, tools=[WEATHER | marked])
    function = {"name": "weather", "description": "Tells it.", "parameters": CITY}
    assert model.prompt == (
        json.dumps([{"type": "function", "function": function}]) + "\nsystem: You are\nkind.\nuser: a\nb\nc\n"
        'assistant: Let me see. (hm) t1=now{} t2=weather{"city": "Zürich"}\n'
        "tool[t1]: noon\ntool[t2]: Error: no\nrain\nuser: d\nassistant:  t3=now{}\ntool[t3]: \nbot:"
    )
    await model.create("e", system="Be kind.")
    assert model.prompt == "system: Be kind.\nuser: Weather?\nbot:"
    await model.create("e", system="Be kind.", messages=[{"role": "system", "content": "Always."}, *USER])
    assert model.prompt == "system: Be kind.\nAlways.\nuser: Weather?\nbot:"
    await model.create("e", system=system[:1])
    assert model.prompt == "user: Weather?\nbot:"
    # The model goes on with the assistant's last message.
    found = await model.create(" two", messages=[*USER, {"role": "assistant", "content": "one"}])
    assert model.prompt == "user: Weather?\nassistant: one"
    assert blocks(found) == [" two"]
    assert (await model.refused(messages=conversation[:3])).startswith("messages[2]")


def test_thinking(folders, capfd):
    async def scenario(model):
        for thinking, start in (
            ({"type": "enabled", "budget_tokens": 2000}, "<think>"), ({"type": "disabled"}, "<think></think>"),
            ({"type": "adaptive"}, "<think>"), (None, "<think>"),
        ):  # fmt: skip
            found = await model.create("a", **({} if thinking is None else {"thinking": thinking}))
            assert model.prompt == f"Weather?{start}"
            assert blocks(found) == (["a"] if start.endswith("</think>") else [("thinking", "a")])
        await model.create("a", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert model.prompt.endswith("</think>")
        assert (await model.refused(thinking={"type": "sometimes"})).startswith("thinking.type")

    async def without(model):
        for _ in range(2):
            assert blocks(await model.create("a", thinking={"type": "enabled", "budget_tokens": 2000})) == ["a"]

    run(folders["switch"], scenario)
    run(folders["plain"], without)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "thinking.budget_tokens" in lines[0]
    assert "no enable_thinking" in lines[1]


def test_tool_choice(folders):
    async def scenario(model):
        arguments = '{"city": "Zürich", "days": 3}'
        listed = f'[{{"name": "weather", "arguments": {arguments}}}, {{"name": "now", "arguments": {{}}}}]'
        call = ("weather", json.loads(arguments))
        found = await model.create(listed, tools=TOOLS, tool_choice={"type": "any"})
        assert (blocks(found), found.stop_reason) == ([call, ("now", {})], "tool_use")
        schema = json.loads(model.last.sampling.structured_outputs.json)
        assert [own["properties"]["name"]["const"] for own in schema["items"]["anyOf"]] == ["weather", "now"]
        await model.create(listed, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        assert json.loads(model.last.sampling.structured_outputs.json)["maxItems"] == 1
        found = await model.streamed(arguments, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
        assert (blocks(found), found.stop_reason) == ([call], "tool_use")
        assert json.loads(model.last.sampling.structured_outputs.json) == CITY
        for choice, expected in (
            ({"type": "auto", "disable_parallel_tool_use": True}, [("now", {})]), ({"type": "none"}, [NOW_CALL + CALL]),
            ({"type": "auto"}, [("now", {}), call]),
        ):  # fmt: skip
            for found in (
                await model.create(NOW_CALL + CALL, tools=TOOLS, tool_choice=choice),
                await model.streamed(NOW_CALL + CALL, tools=TOOLS, tool_choice=choice),
            ):
                assert blocks(found) == expected
            assert model.last.sampling.structured_outputs is None
        for fields, start in (
            ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tools": [NOW, WEATHER, NOW]}, "tools[2].name"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}, NOW | {"name": "a b"}]}, "tools[1].name"),
        ):  # fmt: skip
            assert (await model.refused(**fields)).startswith(f"{start}: ")

    async def unknown(model):
        assert (await model.refused(tools=TOOLS)).startswith("tools: ")

    run(folders["hermes"], scenario)
    run(folders["plain"], unknown)


@on_model("plain")
async def test_structured_output(model):
    form = {"type": "json_schema", "schema": CITY}
    assert blocks(await model.create('{"city": "x"}', output_config={"format": form})) == ['{"city": "x"}']
    assert json.loads(model.last.sampling.structured_outputs.json) == CITY
    assert (await model.refused(output_config={"format": {"type": "xml"}})).startswith("output_config.format")


@on_model("harmony")
async def test_tools_and_a_schema(model):
    """Catches a schema that makes a call reasoning."""
    form = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}, "tools": TOOLS}
    text = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    for reply in (await model.create(text, **form), await model.streamed(text, **form)):
        assert (blocks(reply), reply.stop_reason) == ([("now", {})], "tool_use")
        assert model.last.sampling.structured_outputs.may_call


def test_what_is_ignored_is_in_the_log_once(folders, capfd):
    """What coding agents send: each is named, and disturbs nothing."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, NOW | {"eager_input_streaming": True}]
    body = {
        "context_management": {"edits": []}, "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}, "tools": tools,
        "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "speed": "standard",
    }  # fmt: skip

    async def scenario(model):
        for _ in range(2):
            found = await model.client.beta.messages.count_tokens(model="fake", messages=USER, betas=["a-2025"], tools=tools)
            assert found.input_tokens > 0
            data = message(_body(body), f"{PATH}?beta=true", anthropic_beta="x", anthropic_version="2023-06-01")
            status, content = await model.asked(NOW_CALL, data)
            assert status == 200
            assert json.loads(content)["stop_reason"] == "tool_use"
        assert "web_search" not in model.prompt

    run(folders["hermes"], scenario)
    err = capfd.readouterr().err
    names = ("tools[web_search_20250305]", "tools[].eager_input_streaming", "context_management", "output_config.effort", "speed")
    for name in names:
        assert err.count(name) == 1, name
    assert "metadata" not in err
    assert "cache_control" not in err


@on_model("hermes", max_len=500)
async def test_tokens_are_counted_as_they_are_sent(model):
    """The tokens of the prompt that the engine gets, also of one that is too long for it."""
    fields = {"tools": TOOLS, "system": "Be kind.", "messages": [*USER, {"role": "assistant", "content": "It"}]}
    found = await model.create("a", cached=5, **fields)
    counted = await model.client.messages.count_tokens(model="fake", **fields)
    assert counted.input_tokens == len(model.last.prompt_token_ids)
    usage = found.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted.input_tokens - 5, 5)
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (2, 0)
    assert (await model.streamed("a", cached=5, **fields)).usage == usage
    long = [{"role": "user", "content": "word " * 10_000}]
    assert (await model.client.messages.count_tokens(model="fake", messages=long)).input_tokens >= 10_000
    assert "too long" in await model.refused(messages=long)


# --- errors ---


@on_model("plain")
async def test_an_error_later_is_an_event_that_the_client_raises(model):
    stream = asyncio.create_task(model.client.messages.create(**_body({"stream": True})))
    await model.engine.until(lambda e: e.requests)
    model.engine.send(TokenOutput(model.last.id, tuple(model.tokenizer.encode_plain("a")), None))
    found, events = [], await stream

    async def read():
        async for event in events:
            if not found:
                model.engine.send(TokenOutput(model.last.id, (), "error", error=NumericsError("NaN")))
            found.append(event.type)

    with pytest.raises(anthropic.APIStatusError) as error:
        await read()
    assert (error.value.type, error.value.api_message) == ("api_error", "NaN")
    assert found[0] == "message_start"
    assert "message_stop" not in found


@on_model("plain", api_keys=("one", "two"), max_body_size=4096, request_timeout=0.2)
async def test_errors_before_the_endpoint(model):
    """Of the key, the path, the method, the size, the JSON and the time; other paths keep OpenAI's form."""
    key = {"x_api_key": "one"}
    for data, status, kind in (
        (message({}, PATH), 401, "authentication_error"),
        (message({}, COUNT, x_api_key="three"), 401, "authentication_error"),
        (message({}, PATH, authorization="Bearer three"), 401, "authentication_error"),
        (message({}, PATH, authorization="one"), 401, "authentication_error"),
        (message({}, PATH, authorization="Basic one"), 401, "authentication_error"),
        (message({}, "/v1/messages/batches", **key), 404, "not_found_error"),
        (message({}, PATH, "GET", **key), 405, "invalid_request_error"),
        (message(b"x" * 5000, PATH, **key), 413, "request_too_large"),
        (message(b"{", PATH, **key), 400, "invalid_request_error"),
        (message(_body({"model": "other"}), COUNT, authorization="Bearer two"), 404, "not_found_error"),
        (message({}, PATH, x_api_key="three", authorization="bearer two"), 400, "invalid_request_error"),
        (message({}, PATH, authorization="Bearer three", **key), 400, "invalid_request_error"),
        (message(_body({}), PATH, **key), 504, "timeout_error"),
    ):  # fmt: skip
        found, headers, body = await answered(model.ask(data))
        content = json.loads(body)
        assert (found, content["type"], content["error"]["type"]) == (status, "error", kind), data
        assert content["request_id"] == headers["request-id"]
        assert content["error"].keys() == {"type", "message"}
    found, headers, body = await answered(model.ask(message({}, "/v1/chat/completions", x_api_key="one")))
    assert (found, json.loads(body)["error"]["param"]) == (400, "messages")
    assert "request-id" not in headers
    model.front.draining = True
    found, _, body = await answered(model.ask(message(_body({}), PATH, x_api_key="one")))
    assert (found, json.loads(body)["error"]["type"]) == (503, "overloaded_error")


# --- a real server ---


@pytest.fixture(scope="module")
def expected(folder):
    """What the model answers to a short conversation."""
    messages = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "About a dog."}]
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 23) as generator:
        return generator.chat(messages, SamplingParams(max_tokens=40, temperature=0))


# The client has no parameter for the temperature.
STORY = {"model": "tiny", "max_tokens": 40, "system": "Tell a story.", "extra_body": {"temperature": 0},
         "messages": [{"role": "user", "content": "About a dog."}]}  # fmt: skip


def client(server, kind=anthropic.Anthropic, **options):
    return kind(base_url=server.url, api_key="none", max_retries=0, timeout=60, **options)


def test_the_client_and_a_real_model(tiny, expected):
    with client(tiny) as own:
        found = own.messages.create(**STORY)
        assert blocks(found) == [expected.text]
        assert found.stop_reason == ("max_tokens" if expected.finish_reason == "length" else "end_turn")
        prompt = len(expected.prompt_token_ids)
        assert own.messages.count_tokens(**{key: STORY[key] for key in ("model", "system", "messages")}).input_tokens == prompt
        assert found.usage.input_tokens + found.usage.cache_read_input_tokens == prompt
        assert found.usage.output_tokens == len(expected.token_ids)
        with own.messages.stream(**STORY) as stream:
            assert "".join(stream.text_stream) == expected.text
            assert blocks(stream.get_final_message()) == [expected.text]
        word = expected.text.split()[5]
        cut = own.messages.create(**STORY, stop_sequences=[word])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
        assert blocks(cut) == [expected.text.partition(word)[0]]
        assert [model.id for model in own.models.list()] == ["tiny"]
        with pytest.raises(anthropic.NotFoundError, match="no such model"):
            own.messages.create(**STORY | {"model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            own.messages.create(**STORY | {"messages": [{"role": "user", "content": "word " * 600}]})


def test_a_call_that_a_grammar_forces(tiny):
    """The embedded model knows no tools, so only the grammar makes it call one."""
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
    lines = tiny.post("/tokenize", {"prompt": "\n", "add_special_tokens": False})[1]["tokens"]
    extra = {"logit_bias": {str(token): -100 for token in lines}, "seed": 3, "temperature": 1}  # else most of it is white space
    fields = STORY | {"tools": [{"name": "heat", "input_schema": schema}], "max_tokens": 300, "extra_body": extra}
    with client(tiny) as own:
        for choice in ({"type": "tool", "name": "heat"}, {"type": "any", "disable_parallel_tool_use": True}):
            found = own.messages.create(**fields, tool_choice=choice)
            ((name, given),) = blocks(found)
            assert (name, found.stop_reason) == ("heat", "tool_use")
            assert given in ({"on": True}, {"on": False})
            with own.messages.stream(**fields, tool_choice=choice) as stream:
                assert blocks(stream.get_final_message()) == [(name, given)]
        with pytest.raises(anthropic.BadRequestError, match="chat template does not use tools"):
            own.messages.create(**fields)
