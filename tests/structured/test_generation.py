"""Structured output of the embedded model through the public API and the command line.

Catches a request that changes its batch-mates' tokens or is changed by them, a state that a preemption loses, an output that does
not fit its grammar, samples that share a state, and grammar errors that end other requests or come too late.
"""

import asyncio
import dataclasses
import json
import re

import jsonschema
import pytest
from support.cli import refused
from support.structured import EOS, TEXTS

from minirt import AsyncGenerator, Generator, SamplingParams, StructuredOutputsParams
from minirt.errors import InputError, TokenizerError, UnsupportedError
from minirt.text.addressed import ADDRESSED

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "rabbit"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"], "additionalProperties": False,
}  # fmt: skip
STORY = "Once upon a time"
NO_SPACE = {token: -100.0 for token, text in enumerate(TEXTS) if text.isspace()}


def params(count=40, seed=0, **options):
    options.setdefault("temperature", 1.0)
    return SamplingParams(max_tokens=count, seed=seed if options["temperature"] else None, **options)


MIXED = [
    params(12), params(70, 1, structured_outputs={"json": SCHEMA}, logit_bias=NO_SPACE),
    params(70, temperature=0.0, ignore_eos=True),
    params(70, 2, structured_outputs={"regex": "[a-z ]{300,}"}, presence_penalty=0.8, logprobs=2),
    params(20, temperature=0.0, structured_outputs={"choice": ["A cat", "A cat and a dog", "Nobody"]}),
    params(25, 3, structured_outputs={"json_object": True}, logit_bias={5: 3.0}),
    params(30, 4, structured_outputs={"regex": "(yes|no)!?", "reasoning_end": "."}),
    params(18, 5, structured_outputs={"grammar": 'start: ("x" | "y")+'}, min_tokens=6, logit_bias={EOS: 20.0}),
    params(20, 6, repetition_penalty=1.3, logprobs=0),
    params(30, 7, structured_outputs={"regex": "[a-z ]{12,}"}, bad_words=["the", "and"], stop=" w"),
]  # fmt: skip
PROMPTS = [STORY, "The cat", "A", "One day a girl", STORY + ", there was", "It", "The dog", "x", "Tom and", "Once"]


@pytest.fixture(scope="module")
def generator():
    with Generator.from_pretrained(device="cpu", kv_cache_memory=8 << 20) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def solo(generator):
    return [generator.generate(prompt, own) for prompt, own in zip(PROMPTS, MIXED, strict=True)]


def key(completion):
    logprobs = completion.logprobs and [row.token_id for row in completion.logprobs]
    return completion.token_ids, completion.text, completion.finish_reason, logprobs


def test_mixed_batches_are_their_solo_runs(generator, solo):
    assert [key(c) for c in generator.generate(PROMPTS, MIXED)] == [key(c) for c in solo]


def test_outputs_fit(solo):
    ended = set()
    for completion, own in zip(solo, MIXED, strict=True):
        spec, text, tokens = own.structured_outputs, completion.text, completion.token_ids
        if spec is None or completion.finish_reason != "stop":
            continue
        if spec.json is not None:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif spec.reasoning_end is not None:
            assert re.search(r"\.(yes|no)!?$", text)
        elif spec.choice is not None:
            assert text in spec.choice
        elif spec.grammar is not None:
            assert re.fullmatch(r"[xy]+", text)
            assert len(tokens) == 7, "six, and the end that its bias makes certain"
        ended.add(spec.kind)
    assert ended >= {"json", "choice", "grammar", "regex"}


def test_an_output_that_cannot_be_completed_ends_as_length(generator):
    for count in (1, 5):
        completion = generator.generate(STORY, params(count, structured_outputs={"json": SCHEMA}))
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", count)
    exact = generator.generate(STORY, params(2, structured_outputs={"regex": "xy"}))
    assert (exact.text, exact.finish_reason) == ("xy", "length"), "no room for the end-of-sequence token"
    assert generator.generate(STORY, params(3, structured_outputs={"regex": "xy"})).finish_reason == "stop"


def test_samples_have_states_of_their_own(generator):
    own = {"structured_outputs": {"regex": "[a-z]{3,9} [0-9]{2}"}, "n": 4}
    samples = generator.generate(STORY, params(30, 9, **own)).outputs
    assert all(re.fullmatch("[a-z]{3,9} [0-9]{2}", sample.text) for sample in samples)
    assert len({sample.text for sample in samples}) > 1
    alone = generator.generate(STORY, params(30, 11, structured_outputs=own["structured_outputs"]))
    assert alone.token_ids == samples[2].token_ids


def test_streams(generator):
    pieces = list(generator.stream(STORY, params(structured_outputs={"json": SCHEMA}, seed=1)))
    completion = generator.generate(STORY, params(structured_outputs=StructuredOutputsParams(json=SCHEMA), seed=1))
    assert "".join(piece.text for piece in pieces) == completion.text


def test_asyncio(generator, solo):
    async def run():
        results = await AsyncGenerator(generator).generate(PROMPTS[:5], MIXED[:5])
        with pytest.raises(InputError, match="unclosed"):
            await AsyncGenerator(generator).generate(STORY, params(structured_outputs={"regex": "("}))
        return results

    assert [key(c) for c in asyncio.run(run())] == [key(c) for c in solo[:5]]


def test_errors_come_before_any_request_runs(generator):
    bad = params(structured_outputs={"json": {"properties": {"a": {"uniqueItems": True}}}})
    expected = r'^prompts\[1\], structured_outputs\.json, /properties/a: the keyword is not supported; found "uniqueItems"'
    with pytest.raises(UnsupportedError, match=expected):
        generator.generate([STORY, STORY], [params(), bad])
    with pytest.raises(UnsupportedError, match="uniqueItems"):
        generator.check([1], bad)


ENDED = [(".", ""), ("</think>", "\n\n"), ("<|endoftext|>", " "), ("é!", ""), (ADDRESSED[1], "")]


@pytest.mark.parametrize(("marker", "space"), ENDED)
def test_a_prompt_that_has_ended_its_reasoning(generator, marker, space):
    """Also if calls might have come before."""
    calls = marker == ADDRESSED[1]
    request = params(12, structured_outputs={"choice": ["yes", "no"], "reasoning_end": marker, "may_call": calls})
    end = STORY + marker + space
    for prompt in (end, generator.encode(end)):
        completion = generator.generate(prompt, request)
        assert (completion.text in ("yes", "no"), completion.finish_reason) == (True, "stop")
        assert completion.sampling.structured_outputs.reasoning_end is None
    for prompt in (f"{end}and", STORY + marker[:-1]):
        assert generator.generate(prompt, request).sampling.structured_outputs.reasoning_end == marker, "it goes on"
    with pytest.raises(InputError, match="not a token id"):
        generator.generate([2**40], request)


def test_the_grammar_has_all_text_after_the_reasoning(generator):
    """Also if a token would hold the end of the block and more."""
    biases = {token: 60.0 + 40.0 * (len(text) > 1) for token, text in enumerate(TEXTS) if text.startswith(".")}
    assert len(biases) > 1
    own = params(20, structured_outputs={"regex": "(yes|no)!", "reasoning_end": "."}, logit_bias=biases)
    for seed in range(4):
        text = generator.generate(STORY, dataclasses.replace(own, seed=seed)).text
        assert text.partition(".")[2] in ("yes!", "no!"), text


def test_settings_that_leave_no_token(generator):
    digits, cat = {"structured_outputs": {"regex": "[0-9]+"}}, {"structured_outputs": {"choice": ["cat"]}}
    ids = generator.encode("cat")
    own = [
        params(**digits, allowed_token_ids=[300]), params(4), params(**cat, allowed_token_ids=ids),
        params(**cat, bad_words="cat"), params(**cat, min_tokens=30, logit_bias=dict.fromkeys(range(2048), -100.0)),
    ]  # fmt: skip
    ended = dict(generator.completions([STORY] * len(own), own))
    for i, (name, count) in {0: ("allowed_token_ids", 0), 2: ("allowed_token_ids", len(ids)), 3: ("bad_words", None)}.items():
        assert isinstance(ended[i].error, InputError), "the request is at fault, not the model"
        start = f"{name}: no token is left to draw; expected a token that fits structured_outputs and "
        assert str(ended[i].error).startswith(start)
        assert f"none for generated token {len(ended[i].token_ids)}" in str(ended[i].error)
        assert count in (None, len(ended[i].token_ids))
    assert ended[1].token_ids == generator.generate(STORY, params(4)).token_ids
    why = "a bias is no mask, and where only an end fits, min_tokens does not forbid it"
    assert (ended[4].text, ended[4].finish_reason) == ("cat", "stop"), why


def test_settings_that_narrow_a_grammar(generator):
    digits = [generator.encode(digit)[0] for digit in "13"]
    own = {"structured_outputs": {"regex": "[0-9]{5}"}, "allowed_token_ids": [*digits, *generator.eos_token_ids]}
    assert set(generator.generate(STORY, params(**own)).text) <= set("13")
    stopped = generator.generate(STORY, params(structured_outputs={"regex": "a{3}b{9}"}, stop="ab"))
    assert (stopped.text, stopped.finish_reason) == ("aa", "stop")
    token = generator.generate(STORY, params(structured_outputs={"regex": "qz"}, stop_token_ids=generator.encode("q")))
    assert (token.token_ids, token.finish_reason) == (generator.encode("q"), "stop")


def test_without_text(generator):
    completion = generator.generate(STORY, params(structured_outputs={"choice": ["cat", "dog"]}, detokenize=False))
    assert completion.text == ""
    assert generator.tokenizer.decode(completion.token_ids) in ("cat", "dog")


def test_a_model_without_a_tokenizer(generator):
    with Generator(generator.model, eos_token_ids=(0,), kv_cache_memory=1 << 20) as bare:
        assert bare.generate([1, 2], params(2)).finish_reason == "length"
        with pytest.raises(UnsupportedError, match="structured_outputs: a grammar is about text, and there is no tokenizer"):
            bare.generate([1, 2], params(2, structured_outputs={"regex": "a"}))
        with pytest.raises(TokenizerError):
            bare.generate([1, 2], params(2, stop="x"))


# the command line


BASE = ("generate", "--device", "cpu", "-q", "--kv-cache-memory", "8MiB", "--temperature", 1, "--seed", 1, "--max-tokens", 60)


def test_options(run, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA["properties"]["age"]))
    grammar.write_text('start: "é"+ "!"\n', encoding="utf-8")
    for options, fits in (
        (["--json-schema", schema], lambda text: 0 <= json.loads(text) <= 99),
        (["--regex", "(ab)+c"], lambda text: re.fullmatch("(ab)+c", text)),
        (["--choice", "one", "--choice", "two"], lambda text: text in ("one", "two")),
        (["--grammar", grammar], lambda text: re.fullmatch("é+!", text)),
        (["--choice", "yes", "--reasoning-end", "."], lambda text: text.endswith(".yes")),
        (["--json-object", "--regex", "x"], None),
    ):
        code, out, err = run(*BASE, *options, STORY)
        if fits is None:
            assert (code, "exclude each other" in err) == (2, True)
        else:
            assert (code, err) == (0, "")
            assert fits(out[:-1]), out
    record = json.loads(run(*BASE, "--json", "-v", "--json-object", STORY)[1])
    assert record["sampling"]["structured_outputs"] == {"json_object": True}
    assert record["sampling_sources"]["structured_outputs"] == "user"


def test_prompt_lines(run, tmp_path):
    lines = tmp_path / "p.jsonl"
    own = [{"choice": ["cat", "dog"]}, None, {"json": {"type": "integer", "maximum": 5, "minimum": 3}}]
    lines.write_text("\n".join(json.dumps({"prompt": STORY, "structured_outputs": spec}) for spec in own))
    code, out, _ = run(*BASE, "--json", "--regex", "x+y", "--prompts", lines)
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    assert code == 0
    assert texts[0] in ("cat", "dog")
    assert re.fullmatch("x+y?", texts[1]), "null counts as absent, so the command line's holds"
    assert texts[2] in ("3", "4", "5")
    for spec, place in (
        ({"regexp": "a"}, ', "structured_outputs": no such argument'), ({"json": {"not": {}}}, ", structured_outputs.json: "),
        ({"choice": []}, ', "structured_outputs.choice": '),
    ):  # fmt: skip
        lines.write_text("\n" + json.dumps({"prompt": STORY, "structured_outputs": spec}))
        refused(run(*BASE, "--prompts", lines), f"p.jsonl line 2{place}")
