"""What a trained chat model answers, as JSON lines for bench/results/cpu-trained-models.jsonl.

python tests/tools/trained_answers.py chat MODEL NAME NEW_TOKENS     greedy answers in fp32, beside those of transformers
python tests/tools/trained_answers.py tools URL NAME                 tool calls and JSON by a schema of a running `minirt serve`

This is not a test: it needs a folder with weights that are not in this repository.
"""

import gc
import json
import sys
import urllib.request
from typing import Any

import jsonschema
import torch
import transformers

from minirt import Generator, SamplingParams

CHATS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What does the SQL statement SELECT COUNT(*) FROM users WHERE age > 30 return?",
    "Which is larger, 17 * 23 or 400? Answer with one number and one sentence.",
    "Name the capital of Italy.",
    "Explain a hash table in two sentences.",
)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT, _NUMBER, _INTEGER = ({"type": kind} for kind in ("string", "number", "integer"))
_UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
TOOLS = {
    "temperature": ("The temperature in a city now.", _object(city=_TEXT, unit=_UNIT)),
    "add_event": ("Add an event to the calendar.", _object(title=_TEXT, date=_TEXT, minutes=_INTEGER)),
    "convert": ("Convert an amount of money.", _object(amount=_NUMBER, source=_TEXT, target=_TEXT)),
}
CALLS = (  # a question, the tool that answers it, and what its arguments contain
    ("How warm is it in Oslo, in celsius?", "temperature", {"city": "Oslo", "unit": "celsius"}),
    ("What is the temperature in Cairo in fahrenheit?", "temperature", {"city": "Cairo", "unit": "fahrenheit"}),
    ("Put a meeting called Budget on 2026-12-01 for 45 minutes.", "add_event", {"date": "2026-12-01", "minutes": 45}),
    ("Schedule Lunch with Ida on 2027-01-15, 90 minutes.", "add_event", {"date": "2027-01-15", "minutes": 90}),
    ("How many EUR are 250 USD?", "convert", {"amount": 250, "source": "USD", "target": "EUR"}),
    ("Convert 19.5 GBP to JPY.", "convert", {"amount": 19.5, "source": "GBP", "target": "JPY"}),
)
_PERSON = _object(name=_TEXT, age=_INTEGER, city=_TEXT)
EXTRACTIONS = (  # a request, a schema, and the right answer
    ("Extract the person: Mara is 31 years old and lives in Oslo.", _PERSON, {"name": "Mara", "age": 31, "city": "Oslo"}),
    ("Extract the person: At 44, Jon moved to Bergen.", _PERSON, {"name": "Jon", "age": 44, "city": "Bergen"}),
    ("List the even numbers from 1 to 9.", _object(numbers={"type": "array", "items": _INTEGER}), {"numbers": [2, 4, 6, 8]}),
    ("Is 'The food was awful' positive or negative?", _object(label={"enum": ["positive", "negative"]}), {"label": "negative"}),
    ("Order 3 coffees and 2 teas.", _object(coffees=_INTEGER, teas=_INTEGER), {"coffees": 3, "teas": 2}),
    ("Is 17 a prime number?", _object(prime={"type": "boolean"}), {"prime": True}),
)


@torch.inference_mode()
def chat(folder: str, name: str, count: str) -> None:
    """Both engines after each other, so that only one of them is in memory."""
    params = SamplingParams(max_tokens=int(count), temperature=0, repetition_penalty=1)
    with Generator.from_pretrained(folder, dtype="float32", device="cpu", max_model_len=512) as generator:
        found = [generator.chat([{"role": "user", "content": text}], params) for text in CHATS]
    del generator
    gc.collect()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, own in zip(CHATS, found, strict=True):
        ids = torch.tensor([own.prompt_token_ids])
        settings = {"max_new_tokens": int(count), "do_sample": False, "repetition_penalty": 1.0}
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist()
        same = own.token_ids == theirs[: len(own.token_ids)]
        line = {"kind": "chat", "model": name, "prompt": text, "text": own.text, "tokens": len(own.token_ids)}
        print(json.dumps(line | {"same_tokens": same}, ensure_ascii=False), flush=True)


def tools(url: str, name: str) -> None:
    offered = [
        {"type": "function", "function": {"name": key, "description": text, "parameters": schema}}
        for key, (text, schema) in TOOLS.items()
    ]

    def answer(text: str, **more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 96} | more
        sent, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", sent, kind)
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]

    def valid(value: Any, schema: Any) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid(value)

    for text, tool, wanted in CALLS:  # "required": Qwen2.5-Coder writes its calls in ```json, without the tags of its template
        made = [call["function"] for call in answer(text, tools=offered, tool_choice="required").get("tool_calls") or []]
        good = len(made) == 1 and made[0]["name"] in TOOLS
        arguments = json.loads(made[0]["arguments"]) if good else {}
        good = good and valid(arguments, TOOLS[made[0]["name"]][1])
        said = {key: str(value).casefold() for key, value in arguments.items()}  # "usd" is USD
        right = good and made[0]["name"] == tool and all(said.get(key) == str(own).casefold() for key, own in wanted.items())
        line = {"kind": "tool", "model": name, "prompt": text, "calls": made, "valid": good, "right": right}
        print(json.dumps(line), flush=True)
    for text, schema, wanted in EXTRACTIONS:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        found = json.loads(answer(text, response_format=form)["content"])
        line = {"kind": "schema", "model": name, "prompt": text, "answer": found, "valid": valid(found, schema)}
        print(json.dumps(line | {"right": found == wanted}), flush=True)


if __name__ == "__main__":
    {"chat": chat, "tools": tools}[sys.argv[1]](*sys.argv[2:])
