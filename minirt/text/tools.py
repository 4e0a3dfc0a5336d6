"""The tools of a request: `Tool`, values of parameters by their JSON schema, and schemas that force calls (`tool_choice`)."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import takewhile
from typing import Any

from minirt.errors import InputError, UnsupportedError, quoted, shortened
from minirt.modeling.patterns import matches
from minirt.structured.schema import References, normalized, without_unused
from minirt.text.json_checker import escaped, json_text
from minirt.text.messages import object_at

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MAX_DEPTH = 100  # of a schema
_SAY_TYPE = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: of the function.
        parameters: JSON schema of its arguments, an object.
        value: the tool as the request has it, for the chat template.
    """

    name: str
    parameters: dict[str, Any]
    value: dict[str, Any]

    @cached_property
    def types(self) -> Callable[[str], tuple[str, ...]]:
        """From an argument to its JSON types, "null" first, then in the schema's order; () if the schema does not say."""
        return cache(_Types(self.parameters).of_argument)


def chat_tool(value: object, place: str) -> dict[str, Any]:
    """A tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool = object_at(value, place)
    if tool.get("type", "function") != "function":
        raise InputError("a tool of another type", where=f"{place}.type", expected="function", found=shortened(tool["type"], 40))
    object_at(tool.get("function"), f"{place}.function")
    return tool


def read_tools(
    values: object, read: Callable[[object, str], dict[str, Any] | None] = chat_tool, name_field: str = "function.name",
    schema_field: str = "function.parameters",
) -> list[Tool]:  # fmt: skip
    """Check a request's `tools`.

    Args:
        read: from one of them and its place to OpenAI's form; None: it is left out.
        name_field, schema_field: where one of them has its name and its JSON schema, for errors.
    Raises:
        InputError: names the value that is wrong.
    """
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        shown = type(values).__name__ if not isinstance(values, list) else len(values)
        raise InputError("not a list of tools", where="tools", expected=f"a list of at most {MAX_TOOLS}", found=shown)
    tools: dict[str, Tool] = {}
    for i, value in enumerate(values):
        place = f"tools[{i}]"
        if (chat := read(value, place)) is None:
            continue
        tool = _checked_tool(chat, f"{place}.{name_field}", f"{place}.{schema_field}")
        if tool.name in tools:
            raise InputError("two tools have the same name", where=f"{place}.{name_field}", found=tool.name)
        tools[tool.name] = tool
    return list(tools.values())


def _checked_tool(value: dict[str, Any], name_at: str, parameters_at: str) -> Tool:
    """A tool in OpenAI's form. `name_at`, `parameters_at`: the places of the two in the request."""
    name, parameters = value["function"].get("name"), value["function"].get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected, shown = "1 to 128 letters, digits and _ . : / -", quoted(name, 80)
        raise InputError("not the name of a function", where=name_at, expected=expected, found=shown)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    parameters = object_at(parameters, parameters_at, "not a JSON schema", "an object")
    if not parameters.keys() & _SAY_TYPE:  # arguments are an object, also where the schema does not say so
        parameters = {"type": "object"} | parameters
    stated = types(parameters)
    if stated and "object" not in stated:
        what, expected = "the arguments of a function are an object", 'a JSON schema of "type": "object"'
        raise InputError(what, where=parameters_at, expected=expected, found=" or ".join(stated))
    if isinstance(parameters.get("type"), list):
        parameters = parameters | {"type": "object"}
    return Tool(name, parameters, value)


# --- values that are written as plain text ---

_TYPE_OF = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
_IMPLIED = (  # types of which a schema speaks that does not name one
    ("object", {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}),
    ("array", {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"}),
    ("number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    ("string", {"pattern", "minLength", "maxLength"}),
)


def types(schema: Any) -> tuple[str, ...]:
    """The JSON types that a schema allows, "null" first, then in its order; empty if it does not say."""
    return _null_first(_Types(schema).of(schema))


def _null_first(kinds: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(kinds or ()), key="null".__ne__))


class _Types:
    """The types that the schemas of a document allow. Looks at each schema once, also if references go in circles."""

    def __init__(self, root: Any) -> None:
        self._root, self._target = root, References(root)
        self._known: dict[int, list[str] | None] = {}  # by the id of a schema of the document

    def of(self, schema: Any, depth: int = 0) -> list[str] | None:
        """The types in the schema's order; None: it does not say."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = None  # for a reference to itself
            self._known[id(schema)] = self._find(schema, depth + 1)
        return self._known[id(schema)]

    def _find(self, schema: dict[str, Any], depth: int) -> list[str] | None:
        stated = schema.get("type")
        limits = [[kind for kind in (stated if isinstance(stated, list) else [stated]) if isinstance(kind, str)]]
        for union in ("anyOf", "oneOf"):
            limits.append([kind for choice in _listed(schema, union) for kind in self.of(choice, depth) or ()])
        limits += [self.of(part, depth) or [] for part in _listed(schema, "allOf")]
        if isinstance(schema.get("$ref"), str):
            limits.append(self.of(self._target(schema["$ref"]), depth) or [])
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        limits.append([_TYPE_OF.get(type(value), "null") for value in values] if isinstance(values, list) else [])
        limits = [kinds for kinds in limits if kinds] or [[kind] for kind, keywords in _IMPLIED if keywords & schema.keys()][:1]
        common: list[str] = reduce(_common, limits) if limits else []
        result = [*dict.fromkeys(common)] if limits else None
        return [*(result or ()), "null"] if schema.get("nullable") is True else result

    def of_argument(self, name: str) -> tuple[str, ...]:
        """The types of a property of the root, whichever of its parts states it."""
        stated, others, todo, seen = list[Any](), list[Any](), [self._root], set[int]()
        while todo:
            part = todo.pop(0)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            properties, patterns = part.get("properties"), part.get("patternProperties")
            if isinstance(properties, dict) and name in properties:
                stated.append(properties[name])
            for pattern, schema in patterns.items() if isinstance(patterns, dict) else ():
                stated += [schema] if _covers(pattern, name) else []
            others.append(part.get("additionalProperties"))
            todo += [inner for keyword in ("allOf", "anyOf", "oneOf") for inner in _listed(part, keyword)]
            todo += [self._target(part["$ref"])] if isinstance(part.get("$ref"), str) else []
        return _null_first([kind for schema in stated or others for kind in self.of(schema) or ()])


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    return schema[keyword] if isinstance(schema.get(keyword), list) else []


def _common(first: list[str], second: list[str]) -> list[str]:
    """The types of both, in the order of the first; the first if they contradict each other."""
    narrowed = ["integer" if kind == "number" and "number" not in second else kind for kind in first]
    wide = {*second, "integer"} if "number" in second else {*second}
    return [kind for kind in narrowed if kind in wide] or first


def _covers(pattern: Any, name: str) -> bool:
    """Whether a pattern of "patternProperties" is found in a name; not if it is not simple enough to be sure in bounded time."""
    with suppress(UnsupportedError):
        return isinstance(pattern, str) and matches(rf"[\s\S]*(?:{pattern})", name)
    return False


def typed_json(text: str, kinds: Sequence[str]) -> str:
    """The JSON of the value that a parameter's plain text stands for.

    Numbers, arrays and objects keep the digits and escapes of the text. A Python literal is a string.

    Args:
        kinds: the types that the value may have. The first that fits decides. A text that fits none is a string.
    """
    word = text.strip()
    for kind in takewhile("string".__ne__, kinds):
        read = _READ.get(kind)
        if read is not None and (result := read(word)) is not None:
            return result
    return json_text(text)


def number_json(word: str, kind: str) -> str | None:
    """The JSON of an "integer" or a "number" that a double can hold; None if `word` is none. Its digits are kept."""
    if re.fullmatch(r"[+-]?[0-9]{1,300}(\.0{1,300})?" if kind == "integer" else r"[+-]?[0-9]{1,300}", word):
        return str(int(word.partition(".")[0]))
    known = re.fullmatch(r"[+-]?([0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})([eE][+-]?[0-9]{1,4})?", word)
    if kind != "number" or known is None or abs(float(word)) == float("inf"):
        return None
    return word if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", word) else json_text(float(word))


# JSON type → the JSON of a value of this type that is written as plain text; None if a word is none.
_READ: dict[str, Callable[[str], str | None]] = {
    "null": lambda word: "null" if word in ("null", "None") else None,
    "boolean": lambda word: word.lower() if word.lower() in ("true", "false") else None,
    "integer": lambda word: number_json(word, "integer"), "number": lambda word: number_json(word, "number"),
    "array": lambda word: escaped(word) if word.startswith("[") else None,
    "object": lambda word: escaped(word) if word.startswith("{") else None,
}  # fmt: skip


# --- tool_choice ---


def call_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """JSON schema of a list of calls, for a `tool_choice` of "required": [{"name": …, "arguments": {…}}, …].

    Args:
        tools: one or more.
        parallel: whether there may be several calls.
    Raises:
        InputError: a schema is nested too deeply.
    """
    definitions: dict[str, Any] = {}
    fields = ({"name": {"const": tool.name}, "arguments": _embedded(tool, definitions)} for tool in tools)
    rest = {"required": ["name", "arguments"], "additionalProperties": False}
    calls = [{"type": "object", "properties": properties} | rest for properties in fields]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | ({} if parallel else {"maxItems": 1}) | ({"$defs": definitions} if definitions else {})


def chosen(tools: Sequence[Tool], choice: object) -> Tool:
    """The tool of a `tool_choice` that names a function: {"type": "function", "function": {"name": …}}.

    Its `parameters` are the JSON schema of the arguments, which are then all that the model writes.

    Raises:
        InputError: it is no such object, or names another function.
    """
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if (tool := next((tool for tool in tools if tool.name == name), None)) is not None:
        return tool
    names = ", ".join(tool.name for tool in tools)
    expected = f'none, auto, required, or {{"type": "function", …}} with the name of a tool: {names}'
    raise InputError("no such tool", where="tool_choice", expected=shortened(expected), found=quoted(choice, 80))


def _embedded(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments as a part of a larger one: it goes to `definitions`, under the tool's name.

    In the form of one draft and without names, it means there what it means alone.
    """
    name = tool.name.replace("~", "~0").replace("/", "~1")
    try:
        definitions[tool.name] = normalized(without_unused(tool.parameters), f"/$defs/{name}")
    except InputError as error:
        raise error.at(f"tool {tool.name}") from error
    return {"$ref": f"#/$defs/{name}"}
