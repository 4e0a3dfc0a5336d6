"""The tools of a request: `Tool`, values of parameters by their JSON schema, and schemas that force calls (`tool_choice`)."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirt.errors import InputError, shortened

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

    def parameter(self, key: str) -> Any:
        """The JSON schema of an argument; None if there is none."""
        properties, others = self.parameters.get("properties"), self.parameters.get("additionalProperties")
        found = properties.get(key) if isinstance(properties, dict) else None
        return found if found is not None else others if isinstance(others, dict) else None


def read_tools(values: object) -> list[Tool]:
    """Check a request's `tools`: {"type": "function", "function": {"name", "description", "parameters"}}.

    Raises:
        InputError: names the value that is wrong.
    """
    tools = [_read_tool(value, f"tools[{i}]") for i, value in enumerate(checked_list(values))]
    check_names(tools, [f"tools[{i}].function.name" for i in range(len(tools))])
    return tools


def checked_list(values: object) -> list[Any]:
    """A request's `tools`, if they are a list that is not too long."""
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        found = type(values).__name__ if not isinstance(values, list) else len(values)
        raise InputError("not a list of tools", where="tools", expected=f"a list of at most {MAX_TOOLS}", found=found)
    return values


def check_names(tools: Sequence[Tool], where: Sequence[str]) -> None:
    """Check that no two tools have the same name. `where`: the place of each name in the request."""
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError("two tools have the same name", where=where[i], found=name)


def _read_tool(value: object, where: str) -> Tool:
    if not isinstance(value, dict):
        raise InputError("not an object", where=where, found=type(value).__name__)
    if value.get("type", "function") != "function":
        raise InputError("a tool of another type", where=f"{where}.type", expected="function", found=shortened(value["type"], 40))
    function = value.get("function")
    if not isinstance(function, dict):
        raise InputError("not an object", where=f"{where}.function", found=type(function).__name__)
    return checked_tool(value, f"{where}.function.name", f"{where}.function.parameters")


def checked_tool(value: dict[str, Any], name_at: str, parameters_at: str) -> Tool:
    """A tool in the form that chat templates get. `name_at`, `parameters_at`: the places of the two in the request."""
    name, parameters = value["function"].get("name"), value["function"].get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected, found = "1 to 128 letters, digits and _ . : / -", shortened(repr(name), 80)
        raise InputError("not the name of a function", where=name_at, expected=expected, found=found)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        found = type(parameters).__name__
        raise InputError("not a JSON schema", where=parameters_at, expected="an object", found=found)
    if not parameters.keys() & _SAY_TYPE:  # arguments are an object, also where the schema does not say so
        parameters = {"type": "object"} | parameters
    stated = types(parameters)
    if stated and "object" not in stated:
        what, found = "the arguments of a function are an object", " or ".join(stated)
        raise InputError(what, where=parameters_at, expected='a JSON schema of "type": "object"', found=found)
    if isinstance(parameters.get("type"), list):
        parameters = parameters | {"type": "object"}
    return Tool(name, parameters, value)


# --- values that are written as plain text ---


def types(schema: Any) -> tuple[str, ...]:
    """The JSON types that a schema allows, "null" first, then in its order; empty if it does not say."""
    found = dict.fromkeys(_types(schema, 0))
    return (*(kind for kind in found if kind == "null"), *(kind for kind in found if kind != "null"))


def _types(schema: Any, depth: int) -> list[str]:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return []
    stated = schema.get("type")
    found = [kind for kind in (stated if isinstance(stated, list) else [stated]) if isinstance(kind, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            found += _types(choice, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not found and isinstance(values, list):
        found = [_type_of(value) for value in values]
    return [*found, "null"] if schema.get("nullable") is True else found


def _type_of(value: Any) -> str:
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def typed(text: str, schema: Any) -> Any:
    """The value that a parameter's plain text stands for, by its JSON schema.

    The first type that fits decides. A text that fits none, and one without a schema, is a string.
    """
    word = text.strip()
    for kind in types(schema):
        if kind == "null" and word in ("null", "None"):
            return None
        if kind == "boolean" and word.lower() in ("true", "false"):
            return word.lower() == "true"
        if kind in ("integer", "number") and (number := _number(word, kind)) is not None:
            return number
        if kind in ("array", "object"):
            value = _json(word)
            if isinstance(value, list if kind == "array" else dict):
                return value
        if kind == "string":
            return text
    return text


def _number(word: str, kind: str) -> int | float | None:
    if re.fullmatch(r"[+-]?[0-9]{1,300}(\.0{1,300})?" if kind == "integer" else r"[+-]?[0-9]{1,300}", word):
        return int(word.partition(".")[0])
    if kind == "number" and re.fullmatch(r"[+-]?([0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})([eE][+-]?[0-9]{1,4})?", word):
        number = float(word)
        return number if abs(number) < float("inf") else None
    return None


def _json(word: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(word, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


# --- tool_choice ---


def call_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """JSON schema of a list of calls, for a `tool_choice` of "required": [{"name": …, "arguments": {…}}, …].

    Args:
        parallel: whether there may be several calls.
    Raises:
        InputError: there is no tool, or a schema is nested too deeply.
    """
    if not tools:
        raise InputError('"required" needs tools', where="tool_choice")
    definitions: dict[str, Any] = {}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": _embedded(tool, definitions)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
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
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools)
    expected = f'none, auto, required, or {{"type": "function", "function": {{"name": …}}}} with one of {names}'
    raise InputError("no such tool", where="tool_choice", expected=shortened(expected), found=shortened(repr(choice), 80))


def _embedded(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments as a part of a larger one: its definitions go to `definitions`, under the tool's name."""

    def moved(value: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            expected = f"at most {_MAX_DEPTH} levels"
            raise InputError("the JSON schema is nested too deeply", where=f"tool {tool.name}", expected=expected)
        if isinstance(value, list):
            return [moved(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        return {key: _moved_reference(own, prefix) if key == "$ref" else moved(own, depth + 1) for key, own in value.items()}

    prefix = tool.name.replace("~", "~0").replace("/", "~1")
    schema = moved(tool.parameters, 0)
    definitions[tool.name] = schema
    return {"$ref": f"#/$defs/{prefix}"}


def _moved_reference(reference: Any, prefix: str) -> Any:
    """A reference into the tool's own schema, from the root of the larger one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return reference
    return f"#/$defs/{prefix}{reference[1:]}"
