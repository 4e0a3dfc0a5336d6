# ruff: noqa: E501  (schemas stand on one line each)
"""The tools of a request: what is refused, values by their schema, schemas that force calls; and the incremental JSON checker.

Catches values of a wrong type in calls, references that break when schemas are put together, and JSON that differs from Python's.
"""

import json
import random

import pytest
from support.structured import compiled, constraints

from minirt.errors import InputError, UnsupportedError
from minirt.text.json_checker import JsonChecker, completed, escaped
from minirt.text.tools import call_schema, chosen, read_tools, typed_json, types

OWN = constraints()


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", **parameters}}}


@pytest.mark.parametrize(("value", "where"), [
        ({}, "tools"), (None, "tools"), ([{}] * 513, "tools"), ([5], "tools[0]"),
        ([tool(), {"type": "web_search"}], "tools[1].type"), ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"), ([tool("a b")], "tools[0].function.name"),
        ([tool("a" * 129)], "tools[0].function.name"),
        ([{"function": {"name": "f", "parameters": [1]}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": {"type": "array", "items": {}}}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f", "parameters": {"anyOf": [{"type": "null"}]}}}], "tools[0].function.parameters"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name"),
])  # fmt: skip
def test_what_is_no_tool_is_named(value, where):
    with pytest.raises(InputError) as caught:
        read_tools(value)
    assert caught.value.where == where


def test_a_tool_without_parameters_has_none():
    (found,) = read_tools([{"type": "function", "function": {"name": "a.b/c-d_1"}}])
    assert found.parameters == {"type": "object", "properties": {}}
    assert found.types("x") == ()
    (found,) = read_tools([tool(properties={"x": {"type": "string"}}, additionalProperties={"type": "integer"})])
    assert (found.types("x"), found.types("y")) == (("string",), ("integer",))


@pytest.mark.parametrize("kind", ["object", ["object"], ["null", "object"]])
def test_arguments_are_an_object(kind):
    """A forced call cannot be null, which is no call."""
    (found,) = read_tools([{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}])
    assert found.parameters == {"type": "object"}


@pytest.mark.parametrize(("schema", "text", "value"), [
        ({"type": "string"}, " 5 ", " 5 "), ({"type": "string"}, "null", "null"), (None, "5", "5"), ({}, "true", "true"),
        (7, "x", "x"), ({"type": "integer"}, " 12 ", 12), ({"type": "integer"}, "-3.0", -3),
        ({"type": "integer"}, "3.5", "3.5"), ({"type": "integer"}, "1_0", "1_0"), ({"type": "integer"}, "٣", "٣"),
        ({"type": "integer"}, "9" * 400, "9" * 400), ({"type": "number"}, "1.50", 1.5), ({"type": "number"}, "4", 4),
        ({"type": "number"}, "1e3", 1000.0), ({"type": "number"}, "nan", "nan"), ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "+007.50", 7.5), ({"type": "array"}, '["a\nb"]', ["a\nb"]), ({"type": "number"}, "inf", "inf"),
        ({"type": "number"}, ".5", 0.5), ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"), ({"type": "null"}, "None", None), ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "None", None), ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "x", "x"),
        ({"type": ["integer", "string"]}, "5", 5), ({"type": ["string", "integer"]}, "5", "5"),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[1, 2]", [1, 2]),
        ({"type": "array"}, '["a", {"b": null}]', ["a", {"b": None}]), ({"type": "array"}, "{}", "{}"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}), ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, "[NaN]", "[NaN]"), ({"type": "array"}, "[" * 9999, "[" * 9999), ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["a", 1]}, "1", "1"), ({"const": True}, "true", True), ({"type": "weird"}, "x", "x"),
        ({"enum": "a"}, "x", "x"), ({"anyOf": 3}, "x", "x"),
])  # fmt: skip
def test_values_by_their_schema(schema, text, value):
    found = json.loads(typed_json(text, types(schema)))
    assert (type(found), found) == (type(value), value)


DEFINITIONS = {
    "Place": {"properties": {"city": {"type": "string"}}}, "Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "a/b": {"items": {}}, "q": {"$anchor": "named", "type": "boolean"},
    "Tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"$ref": "#/$defs/Tree"}, {"type": "number"}]},
}  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), [
        ({"$ref": "#/$defs/Place"}, ("object",)), ({"allOf": [{"$ref": "#/$defs/Count"}], "default": 1}, ("integer",)),
        ({"$ref": "#/$defs/Maybe"}, ("null", "object")), ({"$ref": "#/$defs/a~1b"}, ("array",)), ({"$ref": "#named"}, ("boolean",)),
        ({"$ref": "#/$defs/Loop"}, ()), ({"$ref": "#/$defs/Tree"}, ("array", "number")), ({"$ref": "#"}, ("object",)),
        ({"$ref": "#/nowhere"}, ()), ({"$ref": "https://example.com/x"}, ()), ({"$ref": 5, "items": 1}, ("array",)),
        ({"type": ["integer", "string", "null"], "allOf": [{"type": ["null", "number"]}]}, ("null", "integer")),
        ({"type": "number", "allOf": [{"$ref": "#/$defs/Count"}]}, ("integer",)), ({"minimum": 2}, ("number",)),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ("object",)), ({"maxLength": 2}, ("string",)),
        ({"type": ["string", "integer"], "enum": [1, 2]}, ("integer",)), ({"type": "string", "enum": [1]}, ("string",)),
])  # fmt: skip
def test_types_behind_references(schema, expected):
    """Pydantic's and MCP's schemas: a value of a nested model must not become a string."""
    (found,) = read_tools([tool(properties={"x": schema}, **{"$defs": DEFINITIONS})])
    assert found.types("x") == expected


def test_arguments_that_only_a_part_of_the_schema_states():
    parts = [{"$ref": "#/$defs/Args"}, {"patternProperties": {"^n[0-9]+$": {"type": "integer"}, "(": {"type": "null"}}}]
    args = {"properties": {"x": {"type": "number"}}, "anyOf": [{"properties": {"y": {"type": "array"}}}, {"$ref": "#"}]}
    (found,) = read_tools([tool(allOf=parts, **{"$defs": {"Args": args}})])
    assert [found.types(name) for name in ("x", "y", "n12", "n", "z")] == [("number",), ("array",), ("integer",), (), ()]


def test_a_schema_without_end_has_no_types():
    schema: dict = {}
    schema["anyOf"] = [schema]
    assert types(schema) == ()


def test_schemas_that_cannot_be_put_together():
    deep: dict = {}
    deep["properties"] = {"a": deep}
    with pytest.raises(InputError, match="nested too deeply"):
        call_schema(read_tools([tool(properties={"a": deep})]), True)


@pytest.mark.parametrize(("parameters", "good", "bad"), [
        ({"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"x": {"type": "integer", "minimum": 3, "exclusiveMinimum": True}}},
         '{"x":4}', '{"x":3}'),
        ({"properties": {"x": {"type": "integer", "minimum": 3, "exclusiveMinimum": True}}}, None, None),
        ({"properties": {"x": {"$ref": "#a"}}, "$defs": {"q": {"$anchor": "a", "type": "integer"}}}, '{"x":4}', '{"x":null}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"$ref": "#a"}}, "definitions": {"q": {"$id": "#a", "type": "integer"}}},
         '{"x":4}', '{"x":null}'),
        ({"properties": {"x": {"const": {"$ref": "#/a"}}}}, '{"x":{"$ref":"#/a"}}', '{"x":{"$ref":"#/$defs/a~1b/a"}}'),
        ({"properties": {"x": {"$ref": "#/properties/$ref"}, "$ref": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"type": "null"}}}, '{"x":null}', '{"x":1}'),
        ({"$id": "http://x/y", "properties": {"x": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"type": "null"}, "unused": {"not": {}}}}, '{"x":null}', '{"x":1}'),
        ({"properties": {"x": {"$id": "http://x/y", "items": {"$ref": "#/$defs/q"}}}, "$defs": {"q": {"type": "null"}}}, None, None),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"type": "array", "minItems": 2, "additionalItems": False,
          "items": [{"$ref": "#/properties/x/items/1"}, {"type": "null"}]}}}, '{"x":[null,null]}', '{"x":[1,null]}'),
        ({"properties": {"x": {"$ref": "#/$defs/A[int]%25 b"}}, "$defs": {"A[int]% b": {"type": "null"}}}, '{"x":null}', '{"x":1}'),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"x": {"const": 3}}}, '{"x":3}', '{"x":4}'),
        ({"properties": {"x": {"$ref": "#/nope"}}}, None, None), ({"properties": {"x": 7}}, None, None), ({"properties": 7}, None, None),
])  # fmt: skip
def test_a_list_of_calls_and_a_named_function_have_the_same_arguments(parameters, good, bad):
    """Put into a larger schema, a tool's schema lost its draft and its names, and constants were changed. None: both refuse."""
    parameters = {"type": "object", "additionalProperties": False, "required": ["x"], **parameters}
    tools = read_tools([{"function": {"name": "a/b", "parameters": parameters}}, tool("g")])
    named = chosen(tools, {"type": "function", "function": {"name": "a/b"}}).parameters
    for schema, before, after in ((named, "", ""), (call_schema(tools, False), '[{"name":"a/b","arguments":', "}]")):
        if good is None:
            with pytest.raises((InputError, UnsupportedError)):
                compiled(OWN, json=schema)
            continue
        for text, fits in ((good, True), (bad, False)):
            matcher = compiled(OWN, json=schema, disable_any_whitespace=True).start((0,), 0).matcher
            ids = OWN._made_of[0].encode(before + text + after)
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fits, (text, schema)


def test_the_chosen_tool():
    tools = read_tools([tool("f"), tool("g")])
    assert chosen(tools, {"type": "function", "function": {"name": "g"}}) is tools[1]
    for choice in ({"type": "function", "function": {"name": "h"}}, {"function": 3}, "g", None):
        with pytest.raises(InputError, match=r"tool_choice: no such tool; expected .*f, g"):
            chosen(tools, choice)


# --- the incremental JSON checker ---


def accepts(text):
    checker = JsonChecker()
    return all(map(checker.push, text)) and checker.done


def test_json_as_python_reads_it():
    """Objects and lists, whole, cut and damaged, against json.loads. Python also takes NaN and Infinity."""
    rng = random.Random(2)

    def value(depth=0):
        kind = rng.randrange(8 if depth < 4 else 6)
        if kind == 6:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 7:
            return {rng.choice(["", "a", 'q"\\\n', "é"]): value(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice([True, False, None, 0, -1, 12.5, 1e-9, -3e20, "", 'a"b\\/\u0001é', "👧", "\x7f"])

    def strict(text):
        try:
            json.loads(text, parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            return False
        return True

    kept = 0
    for _ in range(3000):
        text = json.dumps([value()], ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        assert accepts(text)
        characters = list(text)
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(characters))
            characters[place : place + rng.randrange(2)] = rng.choice(
                ["", "0", "-", ".", "e", '"', "\\", "u", "[", "]", "{", "}", ",", ":", " ", "t", "x"]
            )
        damaged = "".join(characters).strip()
        if damaged[:1] in ("[", "{"):
            assert accepts(damaged) == strict(damaged), damaged
            kept += strict(damaged)
    assert 500 < kept < 2900


def test_control_characters_in_strings_are_escaped():
    assert escaped(' {"a\n": "b\t\x00\\n"}\n') == '{"a\\n": "b\\t\\u0000\\n"}'
    assert json.loads(escaped('{"a": "x\ny"}')) == {"a": "x\ny"}
    for text in ("", "5", "{} {}", "{", "[1,]", "nope"):
        assert escaped(text) is None
    assert completed('{"a": "x\ny", "b": "') == '{"a": "x\\ny"}'
    assert not accepts("[" * 201 + "]" * 201)
    assert accepts("[" * 200 + "]" * 200)
    assert not accepts("[" + "1" * 501 + "]")
