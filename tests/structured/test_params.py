"""`StructuredOutputsParams`: plain values, checked when they are made.

Catches a spec that another process cannot get or that is compared wrongly, and wrong values that come out as Python errors.
"""

import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from minirt import SamplingParams, StructuredOutputsParams
from minirt.errors import InputError
from minirt.sampling_params import resolve
from minirt.structured.params import KINDS, MAX_LENGTH

VALUES = {
    "json": {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}, "regex": "[ä-ü]+", "choice": ["a", "b"],
    "grammar": 'start: "x"', "json_object": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_is_a_plain_value(kind):
    spec = StructuredOutputsParams(**{kind: VALUES[kind]}, reasoning_end="</think>", may_call=True)
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert spec.kind == kind
    assert spec != StructuredOutputsParams(**{kind: VALUES[kind]})
    assert StructuredOutputsParams.of(spec.stated()) == spec
    fields = {name: getattr(spec, name) for name in vars(spec)}
    assert StructuredOutputsParams.of(json.loads(json.dumps(fields))) == spec
    with pytest.raises(FrozenInstanceError):
        spec.regex = "x"


def test_a_schema_is_kept_as_text_with_its_order():
    text = StructuredOutputsParams(json=VALUES["json"]).json
    assert json.loads(text) == VALUES["json"]
    assert text.index('"b"') < text.index('"a"')
    own = ' {"type":\n"integer"}'
    assert StructuredOutputsParams(json=own).json == own
    assert StructuredOutputsParams(json=True).json == "true"


def test_sampling_params_take_a_mapping():
    params = SamplingParams(structured_outputs={"choice": ["x", "y", "x"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=("x", "y"))
    sampling = resolve(params, {"do_sample": True})
    assert sampling.structured_outputs is params.structured_outputs
    assert "structured_outputs choice ('x', 'y') (user)" in sampling.describe()
    assert resolve(None, None).structured_outputs is None


@pytest.mark.parametrize(("values", "where", "message"), [
    ({}, "", "one of json, regex, choice, grammar, json_object; found none"), ({"json_object": False}, "", "found none"),
    ({"reasoning_end": "x"}, "", "found none"), ({"regex": "a", "choice": ["b"]}, "", "found regex and choice"),
    ({"json": True, "json_object": True}, "", "found json and"), ({"json_object": 1}, ".json_object", "True or False"),
    ({"regex": "a", "disable_any_whitespace": True}, ".disable_any_whitespace", "is about JSON, and this is regex"),
    ({"json": True, "disable_any_whitespace": "no"}, ".disable_any_whitespace", "True or False"),
    ({"json": False}, ".json", "accepts nothing"), ({"json": "false"}, ".json", "accepts nothing"),
    ({"json": 3}, ".json", "a dict, a bool or JSON text"),
    ({"json": "{"}, ".json", "not JSON; found .* at line 1, column 2"), ({"json": "[]"}, ".json", "not a JSON schema"),
    ({"json": '{"a": 1, "a": 1}'}, ".json", "repeats a key; found 'a'"), ({"json": '{"a": NaN}'}, ".json", "NaN"),
    ({"json": {"a": float("inf")}}, ".json", "not JSON"), ({"json": {"a": {1, 2}}}, ".json", "not JSON"),
    ({"json": "[" * 100_000}, ".json", "nested too deeply"),
    ({"json": '{"a":' + "9" * 5000 + "}"}, ".json", "not acceptable"),
    ({"json": '{"title": "\\"' + "x" * MAX_LENGTH["json"] + '"}'}, ".json", "too long"),
    ({"regex": ""}, ".regex", "a text that is not empty"), ({"regex": 3}, ".regex", "a text"),
    ({"regex": "\ud800"}, ".regex", "surrogate"),
    ({"regex": "a" * (MAX_LENGTH["regex"] + 1)}, ".regex", "at most 32768 characters; found 32769"),
    ({"grammar": b"start: x"}, ".grammar", "a text"), ({"choice": []}, ".choice", "at least one"),
    ({"choice": "ab"}, ".choice", "a list"), ({"choice": ["a", ""]}, ".choice", "none empty"),
    ({"choice": ["a", 1]}, ".choice", "a list of texts"),
    ({"choice": [str(i) for i in range(5000)]}, ".choice", "at most 4096"),
    ({"regex": "a", "reasoning_end": ""}, ".reasoning_end", "empty"),
    ({"regex": "a", "reasoning_end": "x" * 300}, ".reasoning_end", "at most 256"),
])  # fmt: skip
def test_wrong_values_are_refused(values, where, message):
    with pytest.raises(InputError, match=rf"(?s)^StructuredOutputsParams{where}: .*{message}"):
        StructuredOutputsParams(**values)
    with pytest.raises(InputError, match=rf"(?s)^SamplingParams\.structured_outputs{where}: .*{message}"):
        SamplingParams(structured_outputs=values)


@pytest.mark.parametrize("value", ["x", 3, ["regex"], {"regexp": "a"}, {1: 2}])
def test_what_is_no_mapping_of_its_fields_is_refused(value):
    with pytest.raises(InputError, match=r"^SamplingParams\.structured_outputs: .*json, regex, choice, grammar"):
        SamplingParams(structured_outputs=value)


def test_a_text_that_ends_cannot_ignore_its_end():
    with pytest.raises(InputError, match=r"SamplingParams\.ignore_eos: .*ends with an end-of-sequence token"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)
