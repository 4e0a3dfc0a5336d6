"""Models whose answers tests write by hand: the front beside a fake engine, asked by an API's own client."""

import asyncio
import json
import shutil
from pathlib import Path

import openai

from minirt import models
from minirt.engine.request import TokenLogprobs, TokenOutput
from minirt.text.tokenizer import Tokenizer
from support.qwen3_5 import TEMPLATE as QWEN3_5
from support.server import answer, as_test, front, message

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + PLAIN
REASONS = "{% if add_generation_prompt %}bot:{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
# In the style of Ministral 3's: its reasoning is a part of the content.
MISTRAL = Path(__file__).with_name("templates").joinpath("mistral.jinja").read_text(encoding="utf-8")[:-1]
MUSE = Path(__file__).with_name("templates").joinpath("muse_glimmer.jinja").read_text(encoding="utf-8")[:-1]
GEMMA = Path(__file__).with_name("templates").joinpath("gemma4.jinja").read_text(encoding="utf-8")[:-1]
HARMONY = Path(__file__).with_name("templates").joinpath("harmony.jinja").read_text(encoding="utf-8")[:-1]
TEMPLATES = {
    "plain": PLAIN, "unknown": WITH_TOOLS, "hermes": WITH_TOOLS + "{# <tool_call> #}",
    "qwen3_coder": WITH_TOOLS + "{# <tool_call><function=f><parameter=p> #}",
    "llama3_json": WITH_TOOLS + "{# <|python_tag|> #}",
    "thinks": WITH_TOOLS + "{# <tool_call> <think></think> #}{% if add_generation_prompt %}bot:{% endif %}",
    "opens": WITH_TOOLS + "{# <tool_call> #}" + REASONS, "qwen3_5": QWEN3_5, "mistral": MISTRAL, "muse_glimmer": MUSE,
    "gemma4": GEMMA, "harmony": HARMONY,
}  # fmt: skip
RESPONSE_TEMPLATE = {
    "start_anchor": "bot:",
    "fields": {
        "tool_calls": {"open": "CALL", "close": "END", "content": "json"},
        "content": {},
        "reasoning": {"open": "((", "close": "))"},
    },
}
SPECIAL = {
    "special": ("<tool_call>", "</tool_call>", "</think>"), "mistral": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "muse_glimmer": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "gemma4": ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>'),
    "harmony": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
}  # fmt: skip


def model_folders(root: Path, **more: str) -> dict[str, Path]:
    """Template's name → the embedded model with this template; "special" and "declared" have more than a template.

    `more`: templates besides `TEMPLATES`.
    """
    templates, found = TEMPLATES | more, {}
    for name in (*templates, "special", "declared"):
        found[name] = root / name
        shutil.copytree(models.embedded(), found[name])
        path = found[name] / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"chat_template": templates.get(name, templates["opens"])}
        if name == "declared":
            config |= {"chat_template": WITH_TOOLS + "bot:", "response_template": RESPONSE_TEMPLATE}
        path.write_text(json.dumps(config))
    first = Tokenizer.load(models.embedded()).vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for name, markers in SPECIAL.items():
        path = found[name] / "tokenizer.json"
        content = json.loads(path.read_text())
        content["added_tokens"] += [{"id": first + i, "content": marker} | flags for i, marker in enumerate(markers)]
        path.write_text(json.dumps(content))
    return found


class Model:
    """Answers in place of the engine. `client`: asks the front."""

    def __init__(self, this, engine, ask, client):
        self.front, self.engine, self.ask, self.client = this, engine, ask, client
        self.tokenizer = this.tokenizer

    @classmethod
    def run(cls, folder, scenario, **options):
        """Run `scenario(model)` with a front that has these options."""

        async def main():
            async with front(folder, **options) as (this, engine, ask):
                reader, writer = await ask(message(b"", "/health", "GET"))
                await answer(reader)
                host, port = writer.get_extra_info("peername")
                async with cls.connect(f"http://{host}:{port}") as client:
                    await scenario(cls(this, engine, ask, client))

        asyncio.run(main())

    @classmethod
    def on(cls, name, **options):
        """A test that is a coroutine `(model, fixtures…)` runs with the model `folders[name]`; see `run`."""

        def decorate(test):
            def run(folders, **fixtures):
                cls.run(folders[name], lambda model: test(model, **fixtures), **options)

            return as_test(run, test, 1, "folders")

        return decorate

    @staticmethod
    def connect(url):
        """The client of the server at `url`."""
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def tokens(self, text, reason):
        """Each token alone, with its place as its log-probability. An answer that has stopped ends with one more token."""
        ids = self.tokenizer.encode_plain(text) + ([0] if reason == "stop" else [])
        reasons = [None] * (len(ids) - 1) + [reason]
        rows = [TokenLogprobs(token, -float(i), 1, ()) for i, token in enumerate(ids)]
        return list(zip(ids, rows, reasons, strict=True))

    async def answered(self, asking, *texts, reason="stop", together=1, cached=0):
        """What `asking` returns, if the model answers its request with these texts, one for each choice.

        `together`: tokens that come at once. `cached`: tokens of the prompt that were in the prefix cache.
        """
        before = len(self.engine.requests)
        asked = asyncio.create_task(asking)
        await self.engine.until(lambda e: asked.done() or len(e.requests) == before + len(texts))
        for request, text in zip(self.engine.requests[before:], texts, strict=True):
            rows = self.tokens(text, reason)
            for i in range(0, len(rows), together):
                ids, scores, reasons = zip(*rows[i : i + together], strict=True)
                wanted = scores if request.sampling.logprobs is not None else ()
                self.engine.send(TokenOutput(request.id, ids, reasons[-1], logprobs=wanted, num_cached=cached))
                await asyncio.sleep(0)
        return await asked

    @property
    def last(self):
        """The last request that reached the engine."""
        return self.engine.requests[-1]

    @property
    def prompt(self):
        return self.tokenizer.decode(self.last.prompt_token_ids, skip_special_tokens=False)
