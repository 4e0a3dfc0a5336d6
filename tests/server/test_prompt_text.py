"""Answers that continue their prompts, in all APIs, with a tokenizer whose decoder drops the first space of a text.

Catches an answer that loses its first space, an echoed prompt that does not join with it, and offsets that are not those of the
text. The engine is a fake: the test sends the tokens.
"""

import asyncio
import json

import pytest
from support.server import answer, answered, events, front, message
from support.vocabularies import llama_like, save

from minirt.engine.request import TokenLogprobs, TokenOutput
from minirt.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save(llama_like(), tmp_path_factory.mktemp("model") / "llama", chat_template=TEMPLATE)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def asked(folder, path, body, tokens, scored=False, reason="length", **options):
    """The body of the answer, and the request that reached the engine, if the model draws these tokens."""

    async def run():
        async with front(folder, **options) as (_, engine, ask):
            reader, _ = await ask(message({"model": "fake", **body}, path))
            await engine.until(lambda own: own.requests)
            (request,) = engine.requests
            for i, token in enumerate(tokens):
                scores = None
                if scored and i == 0:
                    scores = tuple(TokenLogprobs(own, -1.0, 1) for own in request.prompt_token_ids[1:])
                logprobs = (TokenLogprobs(token, -2.0, 1),) if scored else ()
                last = reason if i == len(tokens) - 1 else None
                engine.send(TokenOutput(request.id, (token,), last, logprobs=logprobs, prompt_logprobs=scores))
            return (await answer(reader))[-1], request

    return asyncio.run(run())


PIECES = ["▁there", "▁was", "<0x0A>", "▁▁▁▁", "a"]
TEXT = " there was\n    a"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(("prompt", "before", "first"), [
    ("Once upon a time", "Once upon a time", []), (["<s>", "▁Once", "▁upon"], "Once upon", []), (["<s>"], "", []),
    (["▁a", "<0xE4>", "<0xBD>"], "a", ["<0xA0>"]),
])  # fmt: skip
def test_completions_continue_the_prompt_and_offsets_are_places_in_the_text(folder, tokenizer, prompt, before, first, echo):
    """Also prompts without text, and one that ends inside a character, which then belongs to the completion."""
    prompt = prompt if isinstance(prompt, str) else [tokenizer.token_id(own) for own in prompt]
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    tokens = [tokenizer.token_id(own) for own in (*first, *PIECES)]
    whole = tokenizer.decode(ids + tokens)
    body = {"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": len(tokens)}
    data, _ = asked(folder, "/v1/completions", body, tokens, scored=True)
    choice = json.loads(data)["choices"][0]
    assert choice["text"] == (whole if echo else whole[len(before) :])
    places, names = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert len(places) == len(tokens) + (len(ids) if echo else 0)
    for place, name, token in zip(places, names, ids * echo + tokens, strict=True):
        assert name == tokenizer.token_bytes(token).decode("utf-8", "replace")
        own = name if token > 2 and not name.startswith("\ufffd") else ""  # special tokens, and parts of characters
        assert choice["text"].startswith((own, own.removeprefix(" ") if place == 0 else own), place)
    data, _ = asked(folder, "/v1/completions", body | {"stream": True}, tokens, scored=True)
    chunks = [event["choices"][0] for event in events(data)[:-1] if event["choices"]]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert [place for chunk in chunks if chunk["logprobs"] for place in chunk["logprobs"]["text_offset"]] == places


def test_a_chat_continues_the_final_message(folder, tokenizer):
    """The space between a message and what the model adds was lost."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon a time"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = [tokenizer.token_id(own) for own in PIECES]
    for echo, text in ((False, TEXT), (True, "Once upon a time" + TEXT)):
        data, request = asked(folder, "/v1/chat/completions", body | {"echo": echo}, tokens)
        assert json.loads(data)["choices"][0]["message"]["content"] == text
        whole = tokenizer.decode([*request.prompt_token_ids, *tokens])
        assert whole == "[user]a[assistant]Once upon a time" + TEXT
        data, _ = asked(folder, "/v1/chat/completions", body | {"echo": echo, "stream": True}, tokens)
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in events(data)[:-1]]
        assert "".join(deltas) == text


def test_responses_and_messages_continue_the_prompt(folder, tokenizer):
    tokens = [tokenizer.token_id(own) for own in PIECES]
    data, _ = asked(folder, "/v1/responses", {"input": "a"}, tokens)
    assert json.loads(data)["output"][0]["content"][0]["text"] == TEXT
    data, _ = asked(folder, "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}, tokens)
    assert json.loads(data)["content"] == [{"type": "text", "text": TEXT}]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
])  # fmt: skip
def test_the_engine_learns_where_the_history_ends(folder, tokenizer, path, body):
    """In all APIs; and only an engine that keeps states, since it costs a second rendering of the template."""
    for keeps in (True, False):
        _, request = asked(folder, path, body, [tokenizer.token_id("▁there")], keeps_states=keeps)
        history = request.prompt_token_ids[: request.history_len]
        assert history == (tokenizer.encode_plain("<s>[user]a") if keeps else [])
    if "chat" in path:  # an answer that is continued has no generation prompt
        messages = [*body["messages"], {"role": "assistant", "content": "Once"}]
        continued = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        assert asked(folder, path, continued, [5], keeps_states=True)[1].history_len == 0


def test_a_special_token_ends_a_message_as_the_stop_sequence_that_it_is(folder, tokenizer):
    """The engine gets it as a stop token; the answer names the stop sequence."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stop_sequences": ["zzz", "<s>"]}
    data, request = asked(folder, "/v1/messages", body, [tokenizer.token_id("▁there"), 1], reason="stop")
    found = json.loads(data)
    assert request.sampling.stop_token_ids == (1,)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "<s>")
    assert found["content"] == [{"type": "text", "text": " there"}]
    data, _ = asked(folder, "/v1/messages", body, [tokenizer.token_id("▁there"), 2], reason="stop")
    assert json.loads(data)["stop_reason"] == "end_turn"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stop_string_with_a_special_token_and_more_is_refused(folder, path):
    async def run():
        async with front(folder) as (_, _, ask):
            own = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
            return await answered(ask(message({"model": "fake", "stop": ["</s>\n"]} | own, path)))

    status, *_, data = asyncio.run(run())
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, "stop")
    assert "holds the special token </s>" in error["message"]
