"""Schemas, grammars and patterns that are too deep or too large: each is refused by the name of a limit, and no process ends.

Catches an overflow of the stack in llguidance, which ends the process, work that only a limit here bounds, and a refusal that
does not say what is too large.
"""

import json

import pytest
from fuzz.request_cases import DEEPEST, WRAPS, chain, rules
from support.fuzz import run
from support.mutate import budget
from support.structured import compiled, constraints

from minirt.errors import InputError

OWN = constraints()


def pattern(letter):
    return {"pattern": f"^([^{letter}]|.{letter})*$"}


def conjunctions(count):
    return "start: T\nT: " + " & ".join(f"/([^{chr(97 + i)}]|.{chr(97 + i)})*/" for i in range(count))


TOO_LARGE = [
    ({"json": chain(4200, WRAPS[0], {"type": "null"})}, "too many levels of schemas .*; expected at most 4,096; found 4,203"),
    ({"json": '{"const": ' + "[" * 101 + "]" * 101 + "}"}, "nested too deeply; expected at most 100 brackets; found 102"),
    ({"json": {"type": "string", "allOf": [pattern(chr(97 + i)) for i in range(16)]}}, "too complex; expected (at|one)"),
    ({"json": {"patternProperties": {f"^a{i:04}": {} for i in range(1000)}}}, r"simplify its patternProperties and pattern\)$"),
    ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(500)}}}, "too many alternatives .* 2,000; found 2,"),
    ({"json": {"properties": {f"p{i}": {} for i in range(1100)}}}, "optional properties; expected about 480; found 1100"),
    ({"grammar": rules(5000, '"x" {}')}, "too many rules, terminals and .*; expected at most 4,096; found 5,002"),
    ({"grammar": "start: " + "a{" * 5000}, "too many rules, terminals and opening brackets"),
    ({"grammar": conjunctions(20)}, r"compiles in 0.5 s of CPU; found it was stopped after 0.5 s \(simplify its &\)"),
    ({"grammar": "start: T\nT: " + "~(" * 13 + '"a"' + ' "b"){9}' * 13}, "too complex"),
    ({"grammar": "start: T0" + "".join(f'\nT{i}: T{(i + 1) % 1500} "x"' for i in range(1500))}, "circular|0.5 s of CPU"),
    ({"regex": "(" * 300 + "a" + ")" * 300}, r"exceed the maximum number of nested parentheses/brackets \(250\)$"),
]


@pytest.mark.parametrize(("spec", "message"), TOO_LARGE, ids=lambda own: str(own)[:30])
def test_what_is_too_large_is_named(spec, message):
    with pytest.raises(InputError, match=message):
        compiled(OWN, **spec)


APART = {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": pattern("b")}}], "$defs": {"a": {"items": pattern("a")}}}
CYCLE = {"$ref": "#/$defs/n", "$defs": {"n": {"allOf": [{"properties": {"n": {"$ref": "#/$defs/n"}}}]}}}
SAME = json.loads(chain(16, lambda own: {"allOf": [own, pattern("a")]}, True))
MANY = {"type": "object", "properties": {f"p{i}": pattern("a") for i in range(60)}}  # one value has one of them


@pytest.mark.parametrize("spec", [
    {"json": MANY}, {"json": APART}, {"json": CYCLE}, {"json": SAME}, {"grammar": conjunctions(2)},
    {"grammar": "start: T\nT: " + '"a"~2 ' * 9},
    {"grammar": 'start: "(((' + "&" * 9000 + ':" # ((((\n' + "//" + "(" * 9000},
], ids=["many", "apart", "cycle", "same", "conjunctions", "repetitions", "literals"])  # fmt: skip
def test_what_only_looks_large_compiles(spec):
    compiled(OWN, **spec)


def test_no_process_ends():
    """The deepest of each kind compile in the stack that they get; drawn ones compile or are refused."""
    outcomes, faults = run("fuzz.request_cases:compiles", budget(40))
    assert not faults, "\n".join(faults[:20])
    assert {name for name, _ in DEEPEST} - {"templates", "conditions"} <= outcomes.keys()
    assert outcomes["compiles"] > 5
    assert outcomes["InputError"] > 5


