"""Requests whose schemas, grammars, patterns and values are chains, trees, cycles and towers of any size."""

import json
from collections.abc import Callable
from math import exp, log
from random import Random
from typing import Any

CHATS, RESPONSES, MESSAGES, TEXTS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
LARGEST = 300_000  # characters of a schema or grammar: above the limit of both

WRAPS: tuple[Callable[[Any], Any], ...] = (
    lambda own: own, lambda own: {"type": "object", "properties": {"": own}},
    lambda own: {"type": "object", "properties": {"x": own}, "required": ["x"], "additionalProperties": False},
    lambda own: {"type": "object", "properties": {"x": own, "y": own}, "required": ["x", "y"]},
    lambda own: {"type": "object", "additionalProperties": own},
    lambda own: {"type": "object", "patternProperties": {"^a": own}}, lambda own: {"type": "array", "items": own},
    lambda own: {"type": "array", "items": own, "minItems": 9, "maxItems": 99},
    lambda own: {"type": "array", "prefixItems": [own, own], "items": False}, lambda own: {"anyOf": [{"type": "null"}, own]},
    lambda own: {"anyOf": [own, {"type": "array", "items": own}]}, lambda own: {"oneOf": [{"const": 1}, own]},
    lambda own: {"allOf": [own]}, lambda own: {"allOf": [own, {"type": ["object", "null", "string"]}]},
    lambda own: {"allOf": [own, {"type": "object", "properties": {"y": own}}]},
    lambda own: {"allOf": [own, {"pattern": "^([^a]|.a)*$"}]},
)  # fmt: skip
LEAVES: tuple[Any, ...] = (
    {"type": "null"}, {"type": "object"}, {"type": "string"}, {"type": "string", "pattern": "([^b]|.b)*"}, {"enum": [1, "a"]},
    {"type": "integer", "minimum": 3}, {"format": "date-time", "type": "string"}, True,
)  # fmt: skip
RULES = ('"x" {}', '{} {} | "x"', "{}", "{}?", '{} "x" | "z"', '({} | "x")*', '[{}] "y"', "({}){{2,5}}", '(("a" ({})))')
TERMINALS = ('{} "x"', "{} {}", '{} | "x{i}"', "{} & /[^a]*/", "~({})", "({}){{3}}", "/[a-z]+/ | {}", "{}? {}")
REGEXES = ("({})*", "({}|b)", "({}){{1,9}}", "({})?", "[a-z]{}", "(?:{})+", "{}a", "{}|a", "(a|{}b)", "{}{}")


def size(random: Random, largest: int) -> int:
    """All orders of magnitude are about as likely."""
    return int(exp(random.uniform(0, log(largest))))


def schema(random: Random) -> Any:
    shape = random.choice(("chain", "chain", "tower", "tower", "cycle", "wide"))
    count, leaf = size(random, 9000), random.choice(LEAVES)
    wraps = random.choices(WRAPS, k=random.choice((1, 1, 2, 3)))
    if shape == "tower":
        text = leaf
        for i in range(min(count, 200)):
            grown = wraps[i % len(wraps)](text)
            if len(json.dumps(grown)) > LARGEST:
                break
            text = grown
        return text
    if shape == "wide":
        parts = [wraps[i % len(wraps)]({"const": f"v{i}"} if leaf is True else leaf) for i in range(min(count, 6000))]
        names = {f"p{i}": part for i, part in enumerate(parts)}
        return random.choice((
            {"type": "object", "properties": names}, {"type": "object", "properties": names, "required": list(names)},
            {"anyOf": parts}, {"oneOf": parts}, {"allOf": parts}, {"type": "array", "prefixItems": parts}, {"enum": list(names)},
            {"type": "object", "patternProperties": {f"^{name}": part for name, part in names.items()}},
        ))  # fmt: skip
    refs = [{"$ref": f"#/$defs/a{i}"} for i in range(count + 1)]
    parts = {f"a{i}": wraps[i % len(wraps)](refs[i + 1]) for i in range(count)}
    return {**refs[0], "$defs": parts | {f"a{count}": wraps[0](refs[0]) if shape == "cycle" else leaf}}


def grammar(random: Random) -> str:
    terminals = random.random() < 0.5
    name, forms = ("T", TERMINALS) if terminals else ("r", RULES)
    forms, count = random.choices(forms, k=random.choice((1, 1, 2, 3))), size(random, 20_000)
    shape = random.choice(("chain", "chain", "cycle", "wide", "tower", "template", "condition"))
    last = f"{name}0" if shape == "cycle" else '"y"'
    if shape == "wide":
        parts = [random.choice((f'"a{i}"', f"/[a-z]{i}/")) for i in range(count)]
        return "start: T\nT: " + random.choice((" | ", " ", " & ")).join(parts)
    if shape == "tower":
        return "start: T0\nT0: " + random.choice(("(", "[", "~(", "((")) * count + '"a"' + ")" * count
    if shape == "template":
        return "start: " + "a{" * count + "a" + "}" * count + '\na: "x"'
    if shape == "condition":
        return 'start: a::0x0\na::_: "x" %if ' + "not(" * count + "true" + ")" * count
    bodies = [forms[i % len(forms)].replace("{}", f"{name}{i + 1}").replace("{i}", str(i)) for i in range(count)]
    lines = [f"{name}{i}: {body.replace('{{', '{').replace('}}', '}')}" for i, body in enumerate(bodies)]
    return "\n".join([f"start: {name}0", *lines, f"{name}{count}: {last}"])


def regex(random: Random) -> str:
    text, forms = "a", random.choices(REGEXES, k=random.choice((1, 2, 3)))
    for i in range(size(random, 5000)):
        if len(text) > 40_000:
            break
        text = forms[i % len(forms)].replace("{}", text).replace("{{", "{").replace("}}", "}")
    return text


def nested(random: Random) -> Any:
    """JSON text of a value."""
    count = size(random, 200_000)
    objects, lists = '{"a":' * count + "1" + "}" * count, "[" * count + "]" * count
    return random.choice((objects, lists, "[" + "[]," * count + "1]", "9" * count))


def case(random: Random) -> tuple[str, bytes]:
    """A path and the body of a request to it."""
    path = random.choice((CHATS, RESPONSES, MESSAGES, TEXTS))
    field = "input" if path == RESPONSES else "prompt" if path == TEXTS else "messages"
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body: dict[str, Any] = {field: "Once" if path in (RESPONSES, TEXTS) else [{"role": "user", "content": "Hi"}], limit: 2}
    kind = random.choice(("schema", "schema", "schema", "grammar", "grammar", "regex", "choice", "tools", "tools", "value"))
    raw = ""
    if kind == "schema":
        own = schema(random)
        if path in (CHATS, TEXTS) and random.random() < 0.5:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": own}}
        elif path == RESPONSES and random.random() < 0.5:
            body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": own}}
        else:
            as_text = random.random() < 0.5
            body["structured_outputs"] = {"json": json.dumps(own) if as_text else own}
    elif kind == "choice":
        count, length = size(random, 6000), size(random, 200)
        body["structured_outputs"] = {"choice": [f"{i}" + "x" * length for i in range(count)]}
    elif kind in ("grammar", "regex"):
        body["structured_outputs"] = {kind: grammar(random) if kind == "grammar" else regex(random)}
    elif kind == "tools" and path != TEXTS:
        tools = [{"name": f"f{i}", "parameters": schema(random)} for i in range(random.choice((1, 1, 2, 5)))]
        if path == CHATS:
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        else:
            body["tools"] = [{"type": "function", **tool} for tool in tools]
            if path == MESSAGES:
                body["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
        body["tool_choice"] = {"type": "any"} if path == MESSAGES else "required"
    else:
        raw = nested(random)
        if random.random() < 0.3:
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": raw}}
            body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}], limit: 2}
            raw = ""
    text = json.dumps(body)
    if raw:
        names = ("metadata", "tools", "chat_template_kwargs", "structured_outputs", "response_format", "text", "unknown", field)
        text = f'{text[:-1]}, "{random.choice(names)}": {raw}}}'
    return path, text.encode()


def chain(count: int, wrap: Callable[[Any], Any], leaf: Any) -> str:
    """A schema of `count` definitions that each refer to the next, in few characters."""
    names = {f"{i:x}": wrap({"$ref": f"#/$defs/{i + 1:x}"}) for i in range(count)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": names | {f"{count:x}": leaf}}, separators=(",", ":"))


def rules(count: int, form: str) -> str:
    """A grammar of `count` rules that each refer to the next."""
    lines = [f"r{i}: " + form.replace("{}", f"r{i + 1}") for i in range(count)]
    return "\n".join(["start: r0", *lines, f'r{count}: "y"'])


def _all(own: Any) -> Any:
    return {"allOf": [own]}


def _items(own: Any) -> Any:
    return {"items": own, "type": "array"}


# What recurses deeply, at `limits.MAX_LEVELS`.
DEEPEST: tuple[tuple[str, Callable[[int], dict[str, Any]]], ...] = (
    ("objects", lambda most: {"json": chain(most // 2 - 50, WRAPS[1], {"type": "null"})}),  # as many as fit
    ("references", lambda most: {"json": chain(most - 5, WRAPS[0], {"type": "null"})}),
    ("allOf", lambda most: {"json": chain(most // 5 - 2, lambda own: _all(_all(_all(_all(own)))), {})}),
    ("anyOf", lambda most: {"json": chain(most // 5 - 2, lambda own: _items(_items(WRAPS[9](_items(own)))), {"type": "null"})}),
    ("rules", lambda most: {"grammar": rules(most - 2, '"x" {}')}),
    ("brackets", lambda most: {"grammar": rules(most // 11 - 1, '(((((((((("x" {}))))))))))')}),
    ("templates", lambda most: {"grammar": "start: " + "a{" * (most - 2) + "a" + "}" * (most - 2) + '\na: "x"'}),
    ("conditions", lambda most: {"grammar": 'start: a::0x0\na::_: "x" %if ' + "not(" * (most - 7) + "true" + ")" * (most - 7)}),
)  # fmt: skip


def compiles(random: Random, folder: Any) -> str:
    """A case for `support.fuzz.run`: seeds below the number of `DEEPEST` are those, others are drawn."""
    from support.structured import EOS, allowed, constraints  # only its processes need it

    from minirt.structured.limits import MAX_LEVELS
    from minirt.structured.params import StructuredOutputsParams

    global _OWN
    _OWN = _OWN or constraints()
    first = random.random()
    index = next((i for i in range(len(DEEPEST)) if Random(i).random() == first), None)
    if index is not None:
        spec = DEEPEST[index][1](MAX_LEVELS)
    else:
        kind = random.choice(("json", "json", "grammar", "grammar", "regex"))
        spec = {kind: json.dumps(schema(random)) if kind == "json" else grammar(random) if kind == "grammar" else regex(random)}
    constraint = _OWN.prepare(StructuredOutputsParams(**spec), (EOS,), 0).result()
    for _ in range(4):
        tokens = allowed(_OWN, constraint).nonzero().flatten().tolist()
        copy = constraint.copy()
        copy.accept([tokens[-1]])
        constraint.accept([tokens[-1]])
    return "compiles" if index is None else DEEPEST[index][0]


_OWN: Any = None
