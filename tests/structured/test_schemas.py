# ruff: noqa: E501  (schemas stand on one line each)
"""A list of JSON schemas, by keyword: most are accepted and all of their outputs are valid; the others are refused by name.

Catches a keyword that is accepted and not enforced, an output that the schema does not accept, and a refusal that does not say
what is refused. The judge is `jsonschema`.
"""

import datetime
import json
import random
from pathlib import Path

import jsonschema
import pytest
from support.structured import compiled, constraints, draw, text_of

from minirt.errors import InputError, UnsupportedError
from minirt.structured import contradictions
from minirt.structured import grammar as grammar_module
from minirt.structured.enforceable import enforceable
from minirt.structured.schema import check_schema, parse_schema

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
ACCEPTED = [entry for entry in SCHEMAS if "refused" not in entry]
REFUSED = [entry for entry in SCHEMAS if "refused" in entry]
OWN = constraints()


def validator(schema):
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


@pytest.mark.parametrize("group", sorted({entry["group"] for entry in ACCEPTED}))
def test_every_finished_output_is_valid(group):
    ended = 0
    entries = [entry["schema"] for entry in ACCEPTED if entry["group"] == group]
    for schema in entries:
        judge, grammar = validator(schema), compiled(OWN, json=schema)
        for seed in range(2):
            tokens, done = draw(OWN, grammar.start((0,), 0), seed)
            if done:
                ended += 1
                judge.validate(json.loads(text_of(tokens)))
    assert ended >= 1.3 * len(entries), "too few outputs have ended for this test to mean anything"


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: f"{entry['group']}-{entry['refused']}")
def test_the_others_are_refused_by_name(entry):
    expected = UnsupportedError if entry["group"] == "unsupported" else InputError
    with pytest.raises(expected) as caught:
        compiled(OWN, json=entry["schema"])
    assert str(caught.value).startswith("structured_outputs.json"), caught.value
    assert entry["refused"] in str(caught.value)


@pytest.mark.parametrize(("schema", "place"), [
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "/properties/a~1b/items"),
        ({"$defs": {"x~": {"anyOf": [{}, {"minimum": 2, "maximum": 1}]}}, "$ref": "#/$defs/x~0"}, "/$defs/x~0/anyOf/1"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "/properties/a/pattern"),
        ({"prefixItems": [{}, {"oneOf": [{}, {}]}]}, "/prefixItems/1"),
        ({"additionalProperties": {"patternProperties": {"x": {"type": "text"}}}}, "/additionalProperties/patternProperties/x"),
])  # fmt: skip
def test_errors_name_the_place_within_the_schema(schema, place):
    with pytest.raises((InputError, UnsupportedError), match=rf"^structured_outputs\.json, {place.replace('$', '[$]')}: "):
        compiled(OWN, json=schema)


def test_what_only_looks_like_a_keyword_is_none():
    schema = {"enum": [{"not": 1}], "default": {"if": 1}, "examples": [{"foo": 2}]}
    tokens, done = draw(OWN, compiled(OWN, json=schema).start((0,), 0), 0)
    assert done
    assert json.loads(text_of(tokens)) == {"not": 1}


@pytest.mark.parametrize(("schema", "text"), [
        # A second property of the same name, written with an escape, would replace the first one's value.
        ({"properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": {"type": "string"}},
         '{"id":1,"\\u0069d":"x"}'),
        ({"properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": True}, '{"id":1,"id":2}'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"a":2}'),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, '{"\\u0078":"y"}'),
        ({"type": "array"}, "[\n\n1]"), ({"type": "array"}, "[\n" + " " * 21 + "1]"), ({"type": "array"}, "[  1]"),
        ({"type": "array"}, " []"), ({"type": "array"}, "[]\n"), ({"type": "string"}, '"\\ud800"'),
])  # fmt: skip
def test_texts_that_are_not_allowed(schema, text):
    ids = OWN._made_of[0].encode(text)
    for spec in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        assert compiled(OWN, **spec).start((0,), 0).matcher.try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize(("schema", "error", "message"), [
        ('{"type": "string", "nullable": true}', UnsupportedError, '1: the keyword is not supported; found "nullable"'),
        ('{\n"x-guidance": {"lenient": true}, "not": {}}', UnsupportedError, '1: .* found "x-guidance"'),
        ('{"properties":{"a/b":{"const":"\\u0001"}}}', UnsupportedError, "1, /properties/a~1b: .* control character"),
        ('{"type": "object", "minProperties": 3}', UnsupportedError, "minProperties is not supported"),
        ('{"properties": {"a": {"minimum": 2, "maximum": 1}}}', InputError, "1, /properties/a: the schema contradicts itself"),
        ('{"a": 1, "a": 2}', InputError, "repeats a key"),
        ("{", InputError, "1: the schema is not JSON; found .*line 1"),
        ('3 "x"', InputError, "1: not a JSON schema"),
        ('{"type": "null"}\nx: %json {"if": {}}', UnsupportedError, '2: .* found "if"'),
        ('true\nx: "a" # %json {\ny: /%json {/ "%json {" %lark {\nstart: %json {"if": 1}}', UnsupportedError, '4: .*"if"'),
        ('{"type":\n\n"null"} x\nx: nope', InputError, r'found line 4, column \d+: unknown name: "nope"$'),
])  # fmt: skip
def test_schemas_in_a_lark_grammar_are_checked_alike(schema, error, message):
    with pytest.raises(error, match=message) as caught:
        compiled(OWN, grammar=f"start: %json {schema}")
    assert str(caught.value).startswith("structured_outputs.grammar")


@pytest.mark.parametrize(("lark", "text"), [
        ('start: "%json {" %json {"const": "%json"}', '%json {"%json"'),
        ('start: /%json [\\/]\\// "#" x # %json {\nx: %json\n {"type": "null"} "!" // %json', "%json //#null!"),
        ('start: %json true "." %lark {\nstart: %json {"const": "<a>"} <[3]>\n}', '[ 1 ]."<a>"' + text_of([3])),
        ('%llguidance {"no_forcing": true}\nstart: %regex {"substring_words": "a %json b"} "," %json {"const": 1}', "a %json,1"),
])  # fmt: skip
def test_what_is_no_schema_in_a_lark_grammar(lark, text):
    constraint, ids = compiled(OWN, grammar=lark).start((0,), 0), OWN._made_of[0].encode(text)
    if "<[3]>" in lark:
        ids = [*OWN._made_of[0].encode(text.removesuffix(text_of([3]))), 3]
    assert constraint.matcher.try_consume_tokens(ids) == len(ids), constraint.matcher.get_error()
    assert constraint.matcher.is_accepting()


@pytest.mark.parametrize("text", ["[\n" + "\t" * 20 + "1]", '[ 1 , 2 ]', "[1,2]", '{\n  "a": [\n    1\n  ]\n}', '"\\n\\t\\\\"'])
def test_usual_white_space_is_allowed(text):
    constraint = compiled(OWN, json=True).start((0,), 0)
    ids = OWN._made_of[0].encode(text)
    assert constraint.matcher.try_consume_tokens(ids) == len(ids)
    assert constraint.matcher.is_accepting()


def test_no_white_space_at_all():
    own = compiled(OWN, json={"type": "array", "items": {"type": "object"}}, disable_any_whitespace=True)
    for text, fits in (('[{"a b":[1,{}]},{}]', True), ('[ {"a":1}]', False), ('[{"a": 1}]', False), ("[{},\n{}]", False)):
        constraint, tokens = own.start((0,), 0), OWN._made_of[0].encode(text)
        assert (constraint.matcher.try_consume_tokens(tokens) == len(tokens)) == fits


@pytest.mark.parametrize("schema", [
    {"type": "integer", "multipleOf": 9_999_991}, {"$defs": {"a": {"multipleOf": 499_979}}, "items": {"$ref": "#/$defs/a"}},
    {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    {"prefixItems": [{"multipleOf": 10_007 + i} for i in range(0, 40, 2)]},
    {"multipleOf": 991, "anyOf": [{"multipleOf": 0.997}, {"multipleOf": 9.83}]},
    {"properties": {"a": {"multipleOf": 997}}, "patternProperties": {"a": {"multipleOf": 991}}},
])  # fmt: skip
def test_numbers_whose_multiples_take_minutes_to_compile_are_refused(schema):
    spec = {"grammar": f"start: %json\n {json.dumps(schema)}"} if "prefixItems" in schema else {"json": schema}
    message = r"^structured_outputs\.\w+: the grammar is too complex; expected one that compiles in 0.5 s .*simplify its multipleOf"
    with pytest.raises(InputError, match=message):
        compiled(OWN, **spec)


@pytest.mark.parametrize("schema", [
        {"type": "integer", "minimum": 1e30}, {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 5},
        {"minimum": 10**18}, {"type": "number", "exclusiveMaximum": 2**53 + 1}, {"type": "number", "minimum": 1e-300},
        {"type": "integer", "exclusiveMaximum": 2**63}, {"maximum": -1e-23}, {"maximum": 2**63},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_bounds_that_are_rounded_or_crash_are_refused(schema, kind):
    spec = {"json": schema} if kind == "json" else {"grammar": f"start: %json {json.dumps(schema)}"}
    with pytest.raises(UnsupportedError, match=r'"(ex|m)\w+" is too large or too close to 0 .* from 1e-22 to 2\^53; found -?\d'):
        compiled(OWN, **spec)


@pytest.mark.parametrize("schema", [
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53}, {"type": "integer", "minimum": 2**53 - 9},
        {"type": "number", "minimum": 2**53}, {"type": "number", "minimum": 1e-22, "maximum": 2e-22},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
])  # fmt: skip
def test_large_and_small_bounds(schema):
    own = compiled(OWN, json=schema)
    for seed in range(4):
        validator(schema).validate(json.loads(text_of(draw(OWN, own.start((0,), 0), seed, push=3)[0])))


@pytest.mark.parametrize("start", ['"' + '\\"' * 20_000, "/" + "\\/" * 20_000, '"a' * 20_000, "%json " * 9_000], ids=ascii)
def test_each_character_of_a_lark_grammar_is_looked_at_once(start, monkeypatch):
    """A text or an expression without an end is one lexeme. Searched from each of its quotes, it would take minutes."""
    pattern, searched = grammar_module._LARK, []

    class Counts:
        def search(self, text, first):
            found = pattern.search(text, first)
            searched.append(len(text) - first if found is None else found.end() - first)
            return found

    monkeypatch.setattr(grammar_module, "_LARK", Counts())
    with pytest.raises((InputError, UnsupportedError)):
        compiled(OWN, grammar=f"start: {start}")
    assert sum(searched) <= len(start) + 7
    again = [m.start() for m in pattern.finditer(start)]
    assert len(again) <= 20_000
    assert (len(again) == 1) == ("\\" in start), "nothing is found in the middle of a text without an end"


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"big": {"enum": list(range(3000))}},
         "properties": {str(i): {"$ref": "#/$defs/big", "minLength": 1} for i in range(1000)}},
        {"allOf": [{"enum": list(range(5000))}, {"enum": list(range(4999, 0, -1))}],
         "properties": {str(i): {"$ref": "#"} for i in range(500)}},
        {"properties": {str(i): {"allOf": [{"$ref": "#"}, {"minLength": i}]} for i in range(500)}},
    ],
    ids=["an enum of many", "two enums", "all of the root"],
)  # fmt: skip
def test_work_on_contradictions_is_bounded(schema, monkeypatch):
    """Counted in keys of values and in groups of schemas."""
    keys, groups = [], []
    key, together = contradictions._key, contradictions._check_together
    monkeypatch.setattr(contradictions, "_key", lambda value: keys.append(1) or key(value))
    monkeypatch.setattr(contradictions, "_check_together", lambda *args: groups.append(1) or together(*args))
    check_schema(schema, "here")
    assert len(keys) < 300_000
    assert len(groups) <= contradictions._MAX_VISITS // contradictions._GROUP_COST


@pytest.mark.parametrize("schema", [
        {"const": 1.0, "enum": [1]}, {"const": [1.0], "enum": [[1]]}, {"const": {"a": 1.0, "b": 2}, "enum": [{"b": 2, "a": 1}]},
        {"allOf": [{"enum": [1, "x"]}, {"enum": ["x", 2]}]},
        {"minimum": 1, "maximum": 1}, {"type": "number", "allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.75}, {"minimum": 0.6}]},
])  # fmt: skip
def test_what_only_looks_like_a_contradiction(schema):
    check_schema(schema, "here")


@pytest.mark.parametrize("schema", [
        {"minimum": 1, "exclusiveMinimum": 1, "maximum": 1}, {"minimum": 1, "exclusiveMaximum": 1, "maximum": 1},
        {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 1},
        {"type": "number", "allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.75}, {"minimum": 0.6, "maximum": 1.4}]},
        {"const": True, "enum": [1]}, {"const": [1], "enum": [[True]]}, {"allOf": [{"enum": [1, 2]}, {"enum": ["1", 3]}]},
        {"type": "array", "minItems": 2, "items": [{"type": "null"}], "additionalItems": {"$ref": "#"},
         "$schema": "http://json-schema.org/draft-07/schema#"},
])  # fmt: skip
def test_contradictions(schema):
    with pytest.raises(InputError, match=r"^here.*: (the schema contradicts itself|no text fits)"):
        check_schema(schema, "here")


def test_a_search_that_is_given_up_refuses_nothing(monkeypatch):
    monkeypatch.setattr(contradictions, "_MAX_VISITS", 1)
    check_schema({"properties": {"a": {"$ref": "#"}}, "type": "object", "required": ["b"]}, "here")


def test_numbers_without_a_value():
    with pytest.raises(InputError, match=r"json: a number of the schema is too large; .* found 1e999"):
        compiled(OWN, json='{"enum": [1e999], "minimum": 0}')


NUMBERS = ["0", "-0", "0.0", "0.00", "0.0005", "0.1", "0.25", "0.5", "0.51", "0.9", "1", "1.0", "1.0001", "1.5", "2", "2.75",
           "10", "10.2", "10.5", "-0.25", "-0.5", "-0.9", "-1", "-1.0", "-1.2", "-1.5", "-2.6", "-3", "99.5", "100"]  # fmt: skip


LOWS, HIGHS = (-3, -1.5, -1, 0, 0.5, 10), (-2.5, -0.25, 0, 0.5, 1.5, 10.5)
INCLUSIVE = ("minimum", "maximum")
KEYWORDS = (("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "exclusiveMaximum"), INCLUSIVE)
BOUNDS = [
    (low, high, keywords)
    for low in LOWS for high in HIGHS for keywords in KEYWORDS if low < high or (low == high and keywords == INCLUSIVE)
]  # fmt: skip


@pytest.mark.parametrize(("low", "high", "keywords"), BOUNDS, ids=str)
def test_bounds_of_numbers_are_exact(low, high, keywords):
    """Every number that is accepted is within the bounds, and usual ones within the bounds are accepted."""
    schema = dict(zip(keywords, (low, high), strict=True))
    for own in (schema, schema | {"type": "number"}, schema | {"type": ["number", "string"]}):
        start = compiled(OWN, json=own).start((0,), 0).matcher
        for text in NUMBERS:
            ids, matcher = OWN._made_of[0].encode(text), start.deep_copy()
            accepted = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            valid = validator(schema).is_valid(json.loads(text))
            assert not accepted or valid, text
            assert accepted or not valid or float(text).is_integer() or len(text) > 4, text  # 0.00 and the like may be left out


def test_bounds_of_draft_4_and_of_several_schemas():
    draft_4 = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}
    matcher = compiled(OWN, json=draft_4).start((0,), 0).matcher
    ids = OWN._made_of[0].encode("0")
    assert not (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())
    for schema in ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, {"allOf": [{"minimum": -0.5}], "exclusiveMaximum": 0}):
        with pytest.raises(UnsupportedError, match=r"these bounds cannot be enforced together; found \w+imum .* \w+imum"):
            compiled(OWN, json=schema)
    both = {"exclusiveMinimum": 0, "maximum": 0.5}
    for schema in ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 3}]}, {"allOf": [both, {}]}):
        compiled(OWN, json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog")],
         "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}}},
        {"type": "integer", "format": "int32"}, {"type": ["number", "null"], "format": "double"},
        {"type": "string", "pattern": "^[\\u{1F600}\\x{e9}]$"},
    ],
    ids=["discriminator", "int32", "double", "code points"],
)  # fmt: skip
def test_what_pydantic_and_openapi_write(schema):
    tokens, done = draw(OWN, compiled(OWN, json=schema).start((0,), 0), 1, push=3)
    assert done
    rest = {name: value for name, value in schema.items() if name not in ("discriminator", "format", "pattern")}
    validator(rest).validate(json.loads(text_of(tokens)))


@pytest.mark.parametrize(
    "schema",
    [{"properties": {"a": {}}, "discriminator": {"propertyName": "a"}}, {"format": "int32"},
     {"type": ["string", "null"], "format": "x"}, {"pattern": "\\x{1}"}, {"pattern": "\\u{0007F}"}, {"pattern": "[\\x{0}-z]"}],
)  # fmt: skip
def test_what_only_looks_like_it(schema):
    with pytest.raises(UnsupportedError):
        compiled(OWN, json=schema)


@pytest.mark.parametrize(("schema", "kept"), [
        ({"type": "integer", "$defs": {"Z": {"$ref": "#/$defs/Z"}, "Old": {"propertyNames": {"pattern": "^a"}}}}, None),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"items": {"$ref": "#/$defs/c/items"}}, "c": {"items": {}}, "d": {"not": {}}}},
         {"a/b", "c"}),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}, "definitions": {"d": {"minimum": 2, "maximum": 1}}}, None),
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}, "b": {}}}, {"a", "b"}),
        ({"$ref": "#/$defs/%61", "$defs": {"a": {}, "b": {}}}, {"a"}),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}, "items": {"$ref": "#/$defs/a"}}, {"a", "b"}),
])  # fmt: skip
def test_definitions_that_nothing_refers_to(schema, kept):
    """They may have what is not supported. A definition that is used must stay, however it is referred to."""
    found = parse_schema(json.dumps(schema), "here")
    assert set(found.get("$defs", found.get("definitions", ()))) == (kept or set())
    check_schema(found, "here")


def test_a_used_definition_is_checked():
    schema = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"not": {}}}, "items": {"$ref": "#/$defs/a"}}
    with pytest.raises(UnsupportedError, match=r'/\$defs/b: .* found "not"'):
        compiled(OWN, json=schema)


def fits(schema, text):
    """Whether the grammar of a schema accepts a whole text."""
    matcher, ids = compiled(OWN, json=schema).start((0,), 0).matcher, OWN._made_of[0].encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("value", [9007199254740993, 1234567890123456789, -(2**53) - 1, 123456789.12345679, 10**23, 5e-324, 1.7976931348623157e308])
@pytest.mark.parametrize("place", [lambda v: {"const": v}, lambda v: {"enum": ["x", {"a": [v]}]}])
def test_constants_that_would_be_changed_are_refused(value, place):
    """llguidance rounds numbers twice: the text would be another number."""
    with pytest.raises(UnsupportedError, match=r'"(const|enum)" has a number that is not enforced exactly; .*found '):
        compiled(OWN, json=place(value))


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_bounds_that_would_be_changed_are_refused(keyword):
    with pytest.raises(UnsupportedError, match=f'"{keyword}" has a number that is not enforced exactly'):
        compiled(OWN, json={"type": "number", keyword: 123456789.12345679})


@pytest.mark.parametrize("value", [2**53, -(2**53), 0.1, 0.30000000000000004, 123456.123456789, 1e22, 1e-7, 10**20, -0.0, 3.0, 0, True])
def test_constants_are_exact(value):
    constraint = compiled(OWN, json={"const": value}).start((0,), 0)
    tokens, done = draw(OWN, constraint, 0, push=1)
    assert done
    assert json.loads(text_of(tokens)) == value


@pytest.mark.parametrize(("kind", "good", "bad"), [
        ("date", ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31", "2023-02-28", "2023-04-30"],
         ["2023-02-29", "1900-02-29", "2100-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2024-02-30", "2023-1-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+23:59", "12:00:00-08:00"], ["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00", "12:60:00Z"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2023-01-01T00:00:00.123-01:30"],
         ["2023-02-29T00:00:00Z", "2016-12-31T23:59:60Z", "2024-02-29 00:00:00Z", "2024-02-29"]),
        ("hostname", ["a", "a-b.example.com", "a" * 63 + ".b"], ["a" * 64, "-a", "a..b", ".".join(["a" * 63] * 4)]),
        ("email", ["a.b+c@example.com", "x" * 64 + "@b"], ["x" * 65 + "@b", "a..b@c", "a@" + "b" * 64, "a@b@c", "@b"]),
])  # fmt: skip
def test_formats_are_exact(kind, good, bad):
    """Also beside a pattern and lengths of the schema, and where null may stand instead."""
    for schema in ({"type": "string", "format": kind}, {"type": ["null", "string"], "format": kind, "allOf": [{"maxLength": 300}], "pattern": "."}):
        assert [text for text in good if not fits(schema, json.dumps(text))] == []
        assert [text for text in bad if fits(schema, json.dumps(text))] == []
    assert fits({"type": ["null", "string"], "format": kind}, "null")


def test_dates_are_those_of_the_calendar():
    """Against Python's calendar: each day of a century and of the years around its ends, and what would follow it."""
    schema, rng = {"type": "string", "format": "date"}, random.Random(1)
    for _ in range(120):
        year, month, day = rng.choice([1896, 1900, 1904, 2000, 2023, 2024, 2100, 2400]), rng.choice([2, 2, 4, 12]), rng.randint(27, 32)
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            datetime.date.fromisoformat(text)
        except ValueError:
            assert not fits(schema, f'"{text}"'), text
        else:
            assert fits(schema, f'"{text}"'), text


SCORE = {"type": "object", "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {}}, "additionalProperties": False}


@pytest.mark.parametrize(("patterns", "good", "bad"), [
        ({"^score$": {"type": "integer"}}, ['{"score":7}', '{"score":7,"b":1}', "{}"], ['{"score":7,', '{"x":1}', '{"score":"a"}']),
        ({"^score$": {"minimum": 50}}, ['{"score":77}'], ['{"score":7}']),
        ({"^(score|b)$": {"type": "integer"}}, ['{"score":7,"b":1}'], ['{"b":null}']),
        ({"^sc(o)re$": {}, "^[b]{1}$|^b$": {"type": "null"}}, ['{"score":7,"b":null}'], ['{"b":1}']),
        ({"^(score|x)$": {"type": "integer"}}, ['{"score":7,"x":123}'], ['{"x":null}', '{"y":1}']), ({"^s": {}}, ['{"score":7,"sx":null}'], ['{"x":1}']),
        ({"^b?$": {"type": "null"}}, ['{"b":null,"":null}'], ['{"b":1}']),
])  # fmt: skip
def test_patterns_that_match_only_stated_properties(patterns, good, bad):
    """After a comma, no name was left, and half of the answers ended with an error."""
    schema = SCORE | {"patternProperties": patterns}
    assert [text for text in good if not fits(schema, text)] == []
    assert [text for text in bad if fits(schema, text)] == []
    for seed in range(12):
        validator(schema).validate(json.loads(text_of(draw(OWN, compiled(OWN, json=schema).start((0,), 0), seed, push=4)[0])))


def test_patterns_whose_texts_are_too_many():
    names = {"a" * i: {} for i in range(200)}
    patterns = {"^(a?){150}" + f"(a{{{i}}})?$": {} for i in range(20)}
    with pytest.raises(InputError, match='"patternProperties" are too complex'):
        enforceable(SCORE | {"properties": names, "patternProperties": patterns})
    schema = SCORE | {"patternProperties": {"^" + "(x|y)" * 5000 + "$": {}}}
    assert enforceable(schema) == schema


@pytest.mark.parametrize(("schema", "good", "bad"), [
        ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 3}, "3", "4"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [{"type": "null"}], "items": {}, "minItems": 1}, "[null]", "[1]"),
        ({"type": "array", "items": {"type": "null"}, "additionalItems": False}, "[null,null]", "[1]"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#x"}, "type": "array", "definitions": {"q": {"$anchor": "x", "type": "null"}}},
         "[null]", "[1]"),
])  # fmt: skip
def test_keywords_mean_the_same_in_all_drafts(schema, good, bad):
    """A keyword that is younger than the draft of "$schema" was accepted and ignored."""
    assert fits(schema, good)
    assert not fits(schema, bad)


def test_additional_items_without_a_list_of_items():
    with pytest.raises(UnsupportedError, match='"additionalItems" beside "prefixItems" is not supported'):
        compiled(OWN, json={"type": "array", "prefixItems": [{}], "additionalItems": {"type": "string"}})
