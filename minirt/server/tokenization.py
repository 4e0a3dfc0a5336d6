"""/tokenize and /detokenize: text to token ids and back, as the model's tokenizer does it; /tokenizer_info: what it is."""

import json
from typing import Any

import msgspec

from minirt.errors import InputError
from minirt.server.chat import conversation_of
from minirt.server.conversation import render
from minirt.server.errors import bad_field
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.protocol import Int, decode
from minirt.text.tools import read_tools


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text in `prompt`, or a conversation in `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    tools: list[Any] | None = None
    truncate_prompt_tokens: None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[Int]
    model: str | None = None
    skip_special_tokens: bool | None = None


def tokenize(front: Front, exchange: Exchange, body: bytes) -> dict[str, Any]:
    processor, info = front.check_ready()
    request = decode(front, exchange, body, TokenizeRequest)
    exchange.prompt_field = "prompt" if request.messages is None else "messages"
    tokenizer = processor.text()
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "either prompt or messages must be given")
    if request.prompt is None:
        tokens: list[int] = render(front, conversation_of(front, request, read_tools(request.tools or [])))
    else:
        encode = tokenizer.encode_plain if request.add_special_tokens is False else tokenizer.encode
        tokens = encode(request.prompt, info.max_len)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": info.max_len, "tokens": tokens}
    if request.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return answer


def detokenize(front: Front, exchange: Exchange, body: bytes) -> dict[str, str]:
    processor, info = front.check_ready()
    request = decode(front, exchange, body, DetokenizeRequest)
    for i, token in enumerate(request.tokens):
        if not 0 <= token < info.vocab_size:
            expected = f"an integer from 0 to {info.vocab_size - 1}"
            raise InputError("not a token id of this model", where=f"tokens[{i}]", expected=expected, found=token)
    return {"prompt": processor.text().decode(request.tokens, bool(request.skip_special_tokens))}


async def tokenizer_info(front: Front, exchange: Exchange) -> bytes:
    """The tokenizer's configuration, from which clients such as lm-eval take the chat template and the special tokens."""
    processor, _ = front.check_ready()
    return json.dumps(processor.text().info).encode()  # it may have integers that are too large for msgspec


ROUTES = {
    "POST /tokenize": Front.reads(tokenize), "POST /detokenize": Front.reads(detokenize), "GET /tokenizer_info": tokenizer_info,
}  # fmt: skip
