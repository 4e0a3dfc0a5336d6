"""The public API on tiny models: input types and errors, streams, stop strings, sampling, limits, closing.

Catches text that differs between generate and stream, requests that leak or disturb each other, raw Python errors instead of
clear messages, and memory that is still held after close.
"""

import asyncio
import gc
import json
import pickle
import re
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.garbage import freeze_tests
from support.tiny import add_tokenizer
from support.vocabularies import llama_like, save

from minirt import (
    AsyncGenerator,
    Generator,
    LoadOptions,
    Samples,
    SamplingParams,
    SpeculativeOptions,
    StructuredOutputsParams,
)
from minirt.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InputError,
    MinirtError,
    NumericsError,
    QueueFullError,
    TokenizerError,
    UnsupportedError,
)
from minirt.modeling.plan import Plan, PlanRow

CACHE = 1 << 22
PROMPTS = ("hello", "the quick brown fox", "a", "2 + 2 = ")


def params(count=24, **options):
    return SamplingParams(max_tokens=count, ignore_eos=True, **options)


def load(folder, **options):
    return Generator.from_pretrained(folder, device="cpu", **{"kv_cache_memory": CACHE, **options})


@pytest.fixture(scope="module")
def generator(folder):
    with load(folder) as loaded:
        yield loaded


def free_pages(generator):
    """Once all that was asked for before has been done."""
    return generator._engine.call(lambda engine: generator._cache.allocator.num_free)


def idle(generator):
    """Whether the engine has no request left, and no caller is waited for."""
    return generator._engine.call(lambda engine: not engine.has_work and not generator._engine._sinks)


# Input


def test_forms_of_prompts(generator):
    ids = [generator.encode(text) for text in PROMPTS]
    alone = [generator.generate(text, params()) for text in PROMPTS]
    assert len({c.text for c in alone}) == len(PROMPTS)
    assert [c.prompt_token_ids for c in alone] == ids
    for many in (list(PROMPTS), tuple(PROMPTS), ids, [PROMPTS[0], ids[1], tuple(ids[2]), np.array(ids[3]).tolist()]):
        assert [c.token_ids for c in generator.generate(many, params())] == [c.token_ids for c in alone]
    assert generator.generate(list(np.array(ids[1])), params()).token_ids == alone[1].token_ids
    assert generator.generate([], params()) == []


@pytest.mark.parametrize(
    "array",
    [torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.uint8), lambda ids: torch.tensor([ids, ids]).T[:, 1], np.array,
     lambda ids: np.array(ids, dtype=">u2"), lambda ids: np.repeat(np.array(ids, dtype=np.int32), 2)[::2]],
    ids=["tensor", "uint8", "strided", "numpy", "big endian", "strided numpy"],
)  # fmt: skip
def test_arrays_of_token_ids(array, generator):
    ids = [generator.encode(text) for text in PROMPTS[:2]]
    alone = [generator.generate(own, params(5)).token_ids for own in ids]
    done = generator.generate(array(ids[0]), params(5))
    assert (done.prompt_token_ids, done.token_ids) == (ids[0], alone[0])
    assert set(map(type, done.prompt_token_ids)) == {int}
    assert [c.token_ids for c in generator.generate([array(ids[0]), ids[1]], params(5))] == alone
    assert [t for piece in generator.stream(array(ids[1]), params(5)) for t in piece.token_ids] == alone[1]
    assert torch.equal(generator.logits(array(ids[0])), generator.logits(ids[0]))
    generator.check(array(ids[0]))


REVEAL = """
from minirt import Generator, SamplingParams
import torch

def f(g: Generator, ids: list[int], texts: list[str], mixed: list[str | list[int]], one: SamplingParams, t: torch.Tensor) -> None:
    reveal_type(g.generate("a"))
    reveal_type(g.generate(ids, one))
    reveal_type(g.generate(texts, [one, None]))
    reveal_type(g.generate(mixed, one, progress=True))
    reveal_type(g.generate([ids, t]))
    reveal_type(g.chat([{"role": "user"}]))
    g.generate("a", [one])
"""


@pytest.mark.slow
def test_an_editor_knows_what_generate_returns(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "user.py").write_text(REVEAL)
    # Without following torch's own modules, which takes most of the time. A tensor is then of any type.
    (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\n[mypy-torch.*,triton.*]\nfollow_imports = skip\n")
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache"), "--follow-imports=silent"]
    out, err, _ = api.run([*options, str(tmp_path / "user.py")])
    freeze_tests()  # mypy has released what was frozen
    revealed = re.findall(r'Revealed type is "(.*)"', out)
    kinds = ["list" if "list[" in text else "one" for text in revealed if text.rstrip("]").endswith("minirt.outputs.Completion")]
    assert kinds == ["one", "one", "list", "list", "list", "one"], out + err
    assert re.findall(r"user.py:(\d+): error", out) == ["12"], "several parameters for one prompt"


@pytest.mark.parametrize(("method", "arguments", "words"), [
    ("generate", {"sampling_params": None}, r"Generator.generate: .*sampling_params \(vLLM's name; here params=…\)"),
    ("generate", {"use_tqdm": True}, "vLLM's name; here progress=… of Generator.generate"),
    ("generate", {"max_tokens": 5}, r"found max_tokens \(params=SamplingParams\(max_tokens=…\)\)"),
    ("generate", {"max_new_tokens": 5}, r"transformers' name; here SamplingParams\(max_tokens=…\)"),
    ("generate", {"param": None}, r"one of prompts, params, priority, progress, lora; found param \(did you mean params\?\)"),
    ("chat", {"tools": []}, "not supported here: requests to minirt serve may have it"),
    ("chat", {"lora_request": None}, "vLLM's name; here lora=… of Generator.generate"),
    ("stream", {"sampling_params": None}, "params=…"), ("stream_completion", {"temperature": 1}, "params=SamplingParams"),
    ("completions", {"request_id": "1"}, "not needed: leaving an iterator"), ("score", {"use_tqdm": True}, "progress=…"),
    ("encode_chat", {"chat_template": ""}, "that of the model's folder"), ("encode", {"text": ""}, "one of prompt, max_tokens"),
    ("logits", {"input_ids": [1]}, "transformers' name"), ("warm_prompt", {"prompts": "x"}, "did you mean prompt"),
])  # fmt: skip
def test_arguments_of_other_libraries_are_explained(method, arguments, words, generator):
    """Catches a TypeError that says only "unexpected keyword argument"."""
    with pytest.raises(InputError, match=words):
        getattr(generator, method)(["hi"], **arguments)


def test_an_argument_of_loading_is_no_argument_of_the_class():
    """`Generator("Qwen3-4B", dtype="bfloat16")`, as vLLM's LLM has it, was a TypeError."""
    with pytest.raises(InputError, match=r"Generator: no such .*dtype \(Generator.from_pretrained\(dtype=…\)\)"):
        Generator("Qwen3-4B", dtype="bfloat16")


def test_every_public_method_explains_its_arguments():
    """Of both classes; catches a new method whose unknown arguments are a bare TypeError."""
    left_out = {"from_pretrained", "close"}
    for kind in (Generator, AsyncGenerator):
        methods = {name: own for name, own in vars(kind).items() if callable(own) and not name.startswith("_")}
        assert {name for name in methods.keys() - left_out if not hasattr(methods[name], "__wrapped__")} == set()


def test_a_generator_is_made_by_from_pretrained():
    for name in ("embedded", Path("somewhere")):
        with pytest.raises(InputError, match=r"Generator\.from_pretrained\(.*(embedded|somewhere)"):
            Generator(name)
    with pytest.raises(InputError, match="expected a minirt Model; found NoneType"):
        Generator(None)


@pytest.mark.parametrize("ends", [(2, 211), (-1,), ("2",), (True,), 2, None])
def test_ends_are_token_ids_of_the_model(generator, ends):
    """An end that has no logit would be written behind the row of logits, where `min_tokens` forbids it."""
    with pytest.raises(InputError, match=r"^eos_token_ids: .*from 0 to 210"):
        Generator(generator.model, eos_token_ids=ends)


def test_what_a_generator_and_its_plan_show(folder):
    with load(folder) as generator:
        shown, table = repr(generator), str(generator.plan)
        for words in (generator.name, "llama", "parameters", "cpu", "float32", "9 eager", "KV cache", "256 positions"):
            assert words in shown, words
        assert "\n" not in shown
        assert "M parameters · cpu" in table
        lines = table.splitlines()
        assert len(generator.plan.rows) == 9
        names = ("embedding", "layers.0-2.attention", "layers.0-2.mlp", "select", "head")
        for name in names:
            assert any(name in line and "eager" in line and "auto: the device is cpu" in line for line in lines), name
        for html in (generator._repr_html_(), generator.plan._repr_html_()):
            assert html.count("<tr>") == len(names) + 2
            assert "<td>layers.0-2.mlp</td><td>eager</td>" in html
        assert generator.name in generator._repr_html_()
    assert repr(generator).endswith("closed>")
    assert "closed" in generator._repr_html_()
    rows = (PlanRow("<b>", "mlp", "eager", "a\x1b[31m & b", "float32", (), 5, False),)
    plan = Plan(rows, "cpu", None, model_type="llama", num_parameters=1)
    assert "&lt;b&gt;" in plan.html("<i>")
    assert "<b>" not in plan.html("<i>")
    assert "<i>" not in plan.html("<i>")
    assert "\x1b" not in plan.html() + str(plan)


def test_rows_of_a_plan_that_differ_stand_alone():
    """Catches a layer that is counted to others of another size, reason or kind, and a long name or reason that is cut."""
    def row(layer, size=5, reason="auto", formats=("fp8",)):
        return PlanRow(layer, "mlp", "triton", reason, "bfloat16", formats, size, True)

    why = "auto: triton cannot: compute capability 8.0 is below 8.9 for fp8 weights"
    long = "an.own.layer.of.a.model.with.a.name.that.is.very.long.indeed.and.goes.on.and.on.3.mlp"
    rows = [row(f"layers.{i}.mlp", size=6 if i == 3 else 5, reason=why if i == 7 else "auto") for i in (0, 1, 2, 3, 4, 7, 9)]
    plan = Plan((*rows, row("layers.11.mlp", formats=()), row("head"), row(long)), "cpu", None)
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    first = [line.split()[0] for line in text.splitlines() if "triton" in line and "[1] auto" not in line]
    assert first[:5] == ["layers.0-2,4,9.mlp", "layers.3.mlp", "layers.7.mlp", "layers.11.mlp", "head"]
    assert "5B × 5" in text
    assert f"[1] {why}" in text
    assert long in "".join(line.split("  ")[0].strip() for line in text.splitlines())
    assert f"<td>{long}</td>" in plan.html()
    assert why in plan.html()


def test_parameters_for_each_prompt(generator):
    counts = [3, 9, 1, 6]
    done = generator.generate(list(PROMPTS), [params(n) for n in counts])
    assert [len(c.token_ids) for c in done] == counts
    assert all(c.finish_reason == "length" for c in done)
    for wrong, found in (([params()] * 3, 3), ([], 0), ("params", "str"), (7, "int")):
        with pytest.raises(InputError, match=f"SamplingParams for each prompt.*a list of 4; found {found}$"):
            generator.generate(list(PROMPTS), wrong)
    with pytest.raises(InputError, match=r"one prompt takes one SamplingParams; found list$"):
        generator.generate(PROMPTS[0], [params()])


def test_a_dict_of_sampling_parameters_names_the_remedy(generator):
    """The message said what it is not, and not how it becomes one."""
    own = {"max_tokens": 3}
    for prompts, wrong in ((PROMPTS[0], own), (list(PROMPTS), own), (list(PROMPTS), [params(), None, own, params()])):
        with pytest.raises(InputError, match=r"found dict \(SamplingParams\(\*\*…\) "):
            generator.generate(prompts, wrong)


def test_streams_refuse_a_request_at_the_call(generator):
    """They did so at the first piece, which another function may ask for, far from the mistake."""
    for stream in (generator.stream, generator.stream_completion):
        for prompt, own in (("", None), (["hello", "a"], None), ([5] * 256, None), ("hello", {"max_tokens": 3}), ("hello", 5)):
            with pytest.raises(InputError):
                stream(prompt, own)
        stream("hello")  # it never runs
    assert idle(generator)


WRONG = [
    "", None, 5, 2.5, b"bytes", {1, 2}, [1.5], [True, 2], [-1], [211], [1, 2, 10**30], [[]], [""],
    ["a", None], ["a", 5], [[1], 5], [[1, "2"]], [["a"]], "\ud800",
    torch.tensor([1.0, 2.0]), torch.tensor(3), torch.tensor([True]), torch.tensor([1, 211]),
    torch.empty(3, dtype=torch.int64, device="meta"), torch.tensor([], dtype=torch.int64), [torch.tensor([1.0])],
    [torch.tensor(1), torch.tensor(2)], np.array([1.0]), np.array([[1, 2]]), np.array([True, False]), np.array(["a"]),
    np.array([1, -2]), np.array([1, None]), np.array([2**63], dtype=np.uint64), np.int64(3), np.ma.array([1, 2], mask=[0, 1]),
]


@pytest.mark.parametrize(("prompt", "words"), [
    *((prompt, None) for prompt in WRONG), *((["hello", second], r"^prompts\[1\]") for second in ("", [5, 211], [5] * 256)),
    (torch.tensor([[3, 4], [5, 6]]), r"found int64 with 2 dimensions \(list\(array\)"),
    ({"prompt": "a"}, "give the value of 'prompt' instead"), ([{"prompt": "a"}], "give the value of 'prompt' instead"),
    ([{"prompt_token_ids": [1]}], "give the value of 'prompt_token_ids' instead"), ({"messages": []}, "use chat"),
], ids=lambda p: ascii(p)[:30])  # fmt: skip
def test_bad_prompts_are_input_errors(prompt, words, generator):
    before = free_pages(generator)
    with pytest.raises(InputError, match=words):
        generator.generate(prompt, params())
    assert free_pages(generator) == before
    assert idle(generator)


def test_a_list_of_prompts_for_a_method_of_one_prompt(generator):
    for call in (generator.stream, generator.warm_prompt, generator.logits, generator.encode):
        for prompts in (["hello", "a"], [[5, 6], [7]]):
            with pytest.raises(InputError, match="a list of prompts where one prompt is expected"):
                call(prompts)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples(folder, prefix_cache):
    """Each is the completion of its own seed; the prompt's full pages are computed once."""
    prompt, last = [5 + i % 150 for i in range(130)], 2**64 - 2
    with load(folder, prefix_cache=prefix_cache) as small:
        alone = [small.generate(prompt, params(8, temperature=1.0, seed=(last + i) % 2**64)) for i in range(4)]
    with load(folder, prefix_cache=prefix_cache) as small:
        own = params(8, temperature=1.0, seed=last, n=4)
        many = small.generate([prompt, "hello"], [own, params(3)])
        assert isinstance(many[0], Samples)
        assert many[0].prompt_token_ids == prompt
        assert many[0].error is None
        for name in ("text", "token_ids", "finish_reason", "decode_tokens_per_s"):
            with pytest.raises(AttributeError, match=rf"each sample has its own, samples\[0\].{name} for the first"):
                getattr(many[0], name)
        assert not hasattr(many[0], "nothing"), "and no hint where a completion has none, either"
        assert pickle.loads(pickle.dumps(many[0])).outputs == many[0].outputs
        failed = replace(many[0].outputs[2], error=InputError("x"))
        assert Samples(prompt, [*many[0].outputs[:2], failed]).error is failed.error
        assert [c.token_ids for c in many[0].outputs] == [c.token_ids for c in alone]
        assert len({tuple(c.token_ids) for c in alone}) > 2
        assert [c.cached_tokens for c in many[0].outputs] == ([0, 128, 128, 128] if prefix_cache else [0] * 4)
        assert [c.sampling.seed for c in many[0].outputs] == [last, last + 1, 0, 1]
        assert [c.index for c in many[0]] == [0, 1, 2, 3]
        assert (len(many[0]), many[0][-1], many[0][1:3]) == (4, many[0].outputs[3], many[0].outputs[1:3])
        assert many[1].outputs[0] is many[1], "vLLM's request_output.outputs[0]"
        with pytest.raises(IndexError):
            many[0][4]
        assert many[1].token_ids == small.generate("hello", params(3)).token_ids
        pieces = list(small.stream(prompt, own))
        for i in range(4):
            assert "".join(p.text for p in pieces if p.sample == i) == alone[i].text
        assert small.generate(prompt, params(8, temperature=1.0, seed=last, n=1)).token_ids == alone[0].token_ids
        assert idle(small)


def test_when_samples_are_complete(folder):
    """A result comes once all its samples are over. They are drawn, unless a temperature of 0 is asked for, which is refused."""
    with load(folder) as small:
        running = small.completions(["hello", "a"], [params(9, n=3), params(2)])
        assert [i for i, _ in running] == [1, 0]
        assert all(len(c.token_ids) == 9 and c.sampling.temperature == 1 for c in running.all[0].outputs)
        assert running.all[0].outputs[0].sampling.sources["temperature"] == "implied by n"
    with pytest.raises(InputError, match=r"SamplingParams.n: greedy decoding has one sample.*found 2"):
        params(temperature=0.0, n=2)
    for wrong in (0, -1, 1.5, True, "2", 10**9):
        with pytest.raises(InputError, match=r"SamplingParams.n"):
            params(n=wrong)


def test_every_method_passes_its_priority_on(generator, monkeypatch):
    seen, inner, messages = [], generator._processor.prepare, [{"role": "user", "content": "hello"}]

    def prepare(prompts, own, priority, **options):
        seen.append(priority)
        return inner(prompts, own, priority, **options)

    monkeypatch.setattr(generator._processor, "prepare", prepare)
    generator.generate("a", params(1), priority=1)
    list(generator.completions(["a"], params(1), priority=2))
    generator.chat(messages, params(1), priority=3)
    list(generator.stream("a", params(1), priority=4))
    list(generator.stream_completion("a", params(1), priority=5))

    async def run():
        agen = AsyncGenerator(generator)
        await agen.generate("a", params(1), priority=6)
        await agen.chat(messages, params(1), priority=7)
        [_ async for _ in agen.stream("a", params(1), priority=8)]
        [_ async for _ in agen.stream_completion("a", params(1), priority=9)]

    asyncio.run(run())
    assert seen == [*range(1, 10)]


def test_max_waiting(folder):
    with load(folder, max_num_seqs=1, max_waiting=1) as small:
        assert small.max_waiting == 1
        done = dict(small.completions(["hello", "a", "b"], params(2)))
        assert [type(done[i].error) for i in range(3)] == [type(None), type(None), QueueFullError]
        with pytest.raises(QueueFullError, match=r"^prompts\[2\]: too many requests wait"):
            small.generate(["hello", "a", "b"], params(2))
        assert idle(small)
    for wrong in (-1, True, 1.5, "2"):
        with pytest.raises(InputError, match="--max-waiting"):
            load(folder, max_waiting=wrong)


@pytest.mark.parametrize("tokens", [None, 3, [1.5], "", [211]], ids=repr)
def test_what_are_no_tokens(tokens, generator):
    for ask in (generator.logits, generator.check, generator.chat):
        with pytest.raises(InputError):
            ask(tokens)


def test_logits_of_chunks(folder, generator):
    """`logits` computes at most `max_num_batched_tokens` tokens at once."""
    tokens = list(range(3, 60))
    with load(folder, max_num_batched_tokens=7) as small:
        torch.testing.assert_close(small.logits(tokens), generator.logits(tokens), rtol=0, atol=2e-4)


def test_too_long_prompts(folder, generator):
    with pytest.raises(ContextLengthError, match=r"at most 255 tokens.*found 256 tokens .*the model itself takes at most 256"):
        generator.generate([5] * 256)
    with load(folder, max_model_len=10) as short:
        assert short.max_len == 10
        assert len(short.generate([5] * 9, params()).token_ids) == 1
        with pytest.raises(ContextLengthError, match=r"at most 9 tokens.*found 10 tokens.*--max-model-len"):
            short.generate([5] * 10)
    one_page = 3 * 2 * 64 * 2 * 16 * 4
    with load(folder, kv_cache_memory=one_page) as small:
        with pytest.raises(ContextLengthError, match=r"at most 63 tokens.*found 64 tokens.*--kv-cache-memory"):
            small.generate([5] * 64)
        assert len(small.generate([5] * 60, params()).token_ids) == 4


# Streams


@pytest.mark.parametrize("stop", [(), ("Fr",), ("?o)", "o)*"), ("zzzzzz",)])
def test_stream_is_generate_in_pieces(stop, generator):
    for prompt in PROMPTS:
        whole = generator.generate(prompt, params(40, stop=stop))
        pieces = list(generator.stream(prompt, params(40, stop=stop)))
        assert "".join(p.text for p in pieces) == whole.text
        assert [t for p in pieces for t in p.token_ids] == whole.token_ids
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason
        if not stop:
            assert whole.text == generator.tokenizer.decode(whole.token_ids)


def test_a_turn_ends_with_the_tokenizers_end(copy):
    """Catches an answer that runs on to max_tokens, because generation_config.json names another end than the tokenizer."""
    path = copy / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 0}))
    with pytest.warns(UserWarning, match=r"eos_token_id is \[0\]; 2 \('</s>'\), the tokenizer's eos_token, ends a text, too"):
        loaded = load(copy)
    with loaded as generator:
        assert generator.eos_token_ids == (0, 2)
        done = generator.chat([{"role": "user", "content": "a"}], SamplingParams(max_tokens=6, logit_bias={2: 100}))
        assert (done.finish_reason, len(done.token_ids)) == ("stop", 1)


def test_chat_is_the_rendered_prompt(generator):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    text = "<s>[system]be brief\n[user]hello\n[assistant]"
    assert generator.tokenizer.render_chat(messages) == text
    done = generator.chat(messages, params())
    assert done.prompt_token_ids.count(1) == 1, "one BOS"
    assert done.token_ids == generator.generate(done.prompt_token_ids, params()).token_ids
    for wrong in ([], [{}], [{"role": "user"}], [{"role": "user", "content": None}], ["hello"]):
        with pytest.raises(InputError):
            generator.chat(wrong)
    for wrong in ({"max_tokens": 3}, [params()], "params"):
        with pytest.raises(InputError, match=r"^params: .*SamplingParams"):
            generator.chat(messages, wrong)


# Sampling


def test_a_bad_word_without_tokens_is_refused(copy):
    path = copy / "tokenizer.json"
    removes = {"type": "Replace", "pattern": {"String": "~"}, "content": ""}
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": removes}))
    with load(copy) as generator:
        generator.check("hello", params(bad_words=["a~"]))
        with pytest.raises(InputError, match=r'^bad_words: .*no tokens.*found "~"'):
            generator.check("hello", params(bad_words=["a", "~"]))


def test_stop_tokens_and_min_tokens(generator):
    full = generator.generate("hello", params(30))
    end = full.token_ids[6]
    first = full.token_ids.index(end)
    done = generator.generate("hello", params(30, stop_token_ids=[end]))
    assert (done.finish_reason, done.token_ids) == ("stop", full.token_ids[: first + 1])
    assert done.text == generator.tokenizer.decode(done.token_ids[:-1])
    whole = generator.generate("hello", params(30, stop_token_ids=[end], include_stop_str_in_output=True))
    assert whole.text == generator.tokenizer.decode(done.token_ids)
    later = generator.generate("hello", params(30, stop_token_ids=[end], min_tokens=12))
    assert end not in later.token_ids[:12]
    stop = full.text[4:6]
    included = generator.generate("hello", params(30, stop=stop, include_stop_str_in_output=True))
    assert included.text == full.text[: full.text.find(stop) + 2]
    unstopped = generator.generate("hello", params(30, min_tokens=30))
    assert generator.tokenizer.eos_token_id not in unstopped.token_ids
    stop = unstopped.text[4:6]
    assert generator.generate("hello", params(30, stop=stop, min_tokens=30)).text == unstopped.text
    pieces = [piece.text for piece in generator.stream("hello", params(30))]
    i = next(i for i in range(2, 30) if pieces[i] and pieces[i] not in "".join(pieces[:i]))
    for least, ended in ((i, True), (i + 1, False)):  # as in vLLM: the last of `min_tokens` tokens does not end the text either
        done = generator.generate("hello", params(30, stop=pieces[i], min_tokens=least))
        assert (len(done.token_ids) == i + 1) == ended


def test_special_tokens_and_no_text(generator):
    eos = generator.tokenizer.eos_token_id
    options = {"logit_bias": {eos: 100.0}, "stop": []}
    assert generator.generate("hello", params(3, **options)).text == ""
    assert generator.generate("hello", params(3, skip_special_tokens=False, **options)).text == "</s>" * 3
    plain = generator.generate("hello", params(5))
    silent = generator.generate("hello", params(5, detokenize=False))
    assert (silent.text, silent.token_ids) == ("", plain.token_ids)
    assert [piece.text for piece in generator.stream("hello", params(5, detokenize=False))] == [""] * 5


def test_samples_with_penalties_and_logprobs(generator):
    """Each is what its seed gives alone; the first has the scores of the prompt."""
    options = {"temperature": 0.9, "presence_penalty": 0.8, "logprobs": 1, "bad_words": "an"}
    found = generator.generate("hello", params(8, n=3, seed=5, prompt_logprobs=0, **options))
    for i, completion in enumerate(found.outputs):
        single = generator.generate("hello", params(8, seed=5 + i, prompt_logprobs=0, **options))
        assert completion.token_ids == single.token_ids
        assert [row.rank for row in completion.logprobs] == [row.rank for row in single.logprobs]
        assert (completion.prompt_logprobs is None) == (i > 0)
        assert i or [row and row.token_id for row in completion.prompt_logprobs[1:]] == completion.prompt_token_ids[1:]


def test_prompts_are_truncated_at_their_beginning(generator):
    tokens = generator.encode("the quick brown fox")
    for prompt in ("the quick brown fox", tokens):
        done = generator.generate(prompt, params(4, truncate_prompt_tokens=3))
        assert done.prompt_token_ids == tokens[-3:]
    assert generator.generate("a", params(4, truncate_prompt_tokens=300)).prompt_token_ids == generator.encode("a")
    long = [5] * 300 + [6, 7]
    done = generator.generate(long, params(4, truncate_prompt_tokens=-1))
    assert done.prompt_token_ids == long[-255:]
    assert len(generator.generate("hello " * 500, params(1, truncate_prompt_tokens=-1)).prompt_token_ids) == 255
    with pytest.raises(ContextLengthError):
        generator.generate(long, params(4, truncate_prompt_tokens=256))
    message = [{"role": "user", "content": "hello " * 500}]
    assert len(generator.chat(message, params(1, truncate_prompt_tokens=40)).prompt_token_ids) == 40


def test_generation_config_counts_and_says_so(copy):
    path = copy / "generation_config.json"
    config = {"do_sample": True, "top_k": 3, "repetition_penalty": 1.1, "typical_p": 0.9, "stop_strings": ["Z"]}
    path.write_text(json.dumps(config))
    with load(copy) as loaded:
        settled = loaded.generate("hello", SamplingParams(max_tokens=2, top_k=5)).sampling
        assert (settled.top_k, settled.sources["top_k"]) == (5, "user")
        assert settled.sources["temperature"] == settled.sources["stop"] == "generation_config.json"
        assert settled.not_applied == ("typical_p=0.9",)
        assert (settled.repetition_penalty, settled.sources["repetition_penalty"]) == (1.1, "generation_config.json")


BAD_FIELDS = [{"top_p": 2}, {"do_sample": 1}, {"eos_token_id": "2"}, {"temperature": float("nan")}]


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_bad_generation_config(field, copy):
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": True, **field}))
    with pytest.raises(ConfigError, match=next(iter(field))), load(copy) as loaded:
        loaded.generate("hello", params())


# No tokenizer, other tokenizers


def test_a_model_without_tokenizer_serves_token_ids(folder, generator, hf_folder):
    with load(hf_folder("Llama", seed=3)) as bare:
        assert bare.tokenizer is None
        ids = generator.encode("hello")
        done = bare.generate(ids, params())
        assert done.token_ids == generator.generate(ids, params()).token_ids
        assert done.text == ""
        for refused in (lambda: bare.generate("hello"), lambda: bare.chat([{"role": "user", "content": "hello"}])):
            with pytest.raises(TokenizerError, match=r"no tokenizer.*token ids"):
                refused()
        with pytest.raises(TokenizerError, match="stop strings"):
            bare.generate(ids, params(stop="a"))


def test_a_tokenizer_of_another_model(hf_folder):
    """Catches ids beyond the embedding. Prompts without them work: tests/loading/test_load.py."""
    folder = add_tokenizer(hf_folder("Llama", vocab_size=101))
    with pytest.warns(UserWarning, match="the tokenizer has ids up to 210, but vocab_size of config.json is 101"):
        generator = load(folder)
    with generator:
        for call in (generator.generate, generator.stream):
            with pytest.raises(InputError, match=r"prompt token \d+: the model has no such token; expected ids from 0 to 100"):
                call("the quick brown fox")
        with pytest.raises(InputError, match="the model has no such token"):
            generator.chat([{"role": "user", "content": "the fox"}])


def test_text_that_gives_no_tokens(copy):
    """The tiny vocabulary has no Chinese and this tokenizer adds no BOS, so the prompt has no tokens."""
    path = copy / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    with load(copy) as loaded, pytest.raises(InputError, match="empty"):
        loaded.generate("长城")


# Logits


def test_logits_agree_with_generation(generator):
    prompt = generator.encode("the lazy dog")
    done = generator.generate(prompt, params(20))
    logits = generator.logits(prompt + done.token_ids)
    assert logits.shape == (len(prompt) + 20, 211)
    assert logits.dtype == torch.float32
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == done.token_ids
    for wrong in ([], [211], ["a"], [5] * 257):
        with pytest.raises(InputError):
            generator.logits(wrong)
    assert generator.logits([5] * 256).shape[0] == 256


def test_nan_logits_are_reported_and_nothing_stays(copy):
    path = copy / "model.safetensors"
    tensors = {k: v.clone() for k, v in load_file(path).items()}
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path)
    with load(copy) as loaded:
        with pytest.raises(NumericsError, match=r"NaN.*--check-weights"):
            loaded.generate(["hello", "a"], params())
        assert idle(loaded)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        load(copy, check_weights=True)


# Closing


@pytest.mark.parametrize(("options", "words"), [
    ({"quantize_head": True}, "--quantize-head"), ({"check_weights": True, "random_weights": True}, "--check-weights"),
    ({"quantize_head": "no", "quantization": "fp8"}, "quantize_head"),
    ({"max_num_seqs": 2.0}, "--max-num-seqs.*an integer from 1 to"), ({"max_num_seqs": -1}, "an integer from 1 to"),
    ({"max_num_batched_tokens": "8"}, "--max-num-batched-tokens.*an integer from 1 to"),
    ({"dtype": "half"}, "did you mean float16"), ({"dtype": "bf16"}, "did you mean bfloat16"),
    ({"dtype": torch.float32}, "did you mean float32"), ({"kv_cache_dtype": "fp8_e4m3"}, "did you mean fp8"),
    ({"max_model_len": "256"}, "not a number of tokens.*an integer from 1 to 256; found '256'"),
    ({"kv_cache_memory": "4GiBi"}, "not a size.*such as '4GiB'; found '4GiBi'"),
    ({"threads": "2"}, "an integer from 1 to .*found '2'"), ({"progress": True}, "progress: not a function.*found True"),
], ids=str)  # fmt: skip
def test_values_that_options_do_not_take(folder, options, words):
    """An option that would be ignored, a dtype under another library's name (the message names it), a text for a number."""
    with pytest.raises(MinirtError, match=words):
        load(folder, **options)


@pytest.mark.parametrize(("name", "words"), [
    ("torch_dtype", "here dtype=…"), ("enable_prefix_caching", "vLLM's name; here prefix_cache=…"),
    ("tensor_parallel_size", "here tensor_parallel=…"), ("load_format", "here random_weights=True"),
    ("enforce_eager", "here cuda_graphs=False"), ("enable_lora", "not needed: --lora"), ("trust_remote_code", "not needed"),
    ("max_tokens", "generate takes params=SamplingParams"),
    ("Device", "did you mean device"), ("nothing_like_it", "one of model, device, dtype"),
])  # fmt: skip
def test_options_that_do_not_exist(name, words, folder):
    """The error names `from_pretrained`, and what the option is here: names of vLLM were answered with a list of all options."""
    for call in (lambda **own: load(folder, **own), lambda **own: Generator.from_pretrained(LoadOptions(), **own)):
        with pytest.raises(ConfigError, match=f"from_pretrained: no such argument.*found {name}") as error:
            call(**{name: 1})
        assert words in str(error.value)
    with pytest.raises(ConfigError, match=f"LoadOptions: no such argument.*found {name}"):
        LoadOptions(**{name: 1})


@pytest.mark.parametrize(("call", "error", "words"), [
    (LoadOptions, ConfigError, r"LoadOptions: an argument without its name; expected LoadOptions\(model=…\).*found 'x'"),
    (SpeculativeOptions, ConfigError, r"SpeculativeOptions\(method=…\)"), (SamplingParams, InputError, r"SamplingParams\("),
    (StructuredOutputsParams, InputError, r"StructuredOutputsParams\("),
])  # fmt: skip
def test_arguments_without_their_names(call, error, words):
    """A TypeError said that `__init__` takes one argument and two were given."""
    with pytest.raises(error, match=words):
        call("x")


def test_speculative_options_may_be_a_text(folder):
    """As on the command line. "ngram" was refused, with what a proposer must have; errors of a dict did not say where."""
    assert LoadOptions(speculative="ngram:3").speculative == SpeculativeOptions(num_speculative_tokens=3)
    for value in ("eagle", {"method": "eagle"}):
        with pytest.raises(UnsupportedError, match=r"^speculative.* this method of speculative decoding.*found 'eagle'"):
            LoadOptions(speculative=value)


def test_the_kv_cache_memory_may_be_a_text(folder):
    """As on the command line. It was refused as "not a number of bytes"."""
    with load(folder, kv_cache_memory="2MiB") as one, load(folder, kv_cache_memory=2 << 20) as other:
        assert one.memory.pages == other.memory.pages
        with Generator(one.model, kv_cache_memory="1MiB") as half:
            assert 0 < half.memory.pages < one.memory.pages


def test_peak_memory_is_that_of_the_generators_device(folder, monkeypatch):
    """It does not ask a GPU that the process uses for something else."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda *_: pytest.fail("it asked a GPU"))
    with load(folder) as generator:
        assert generator.generate("hello", params(2)).peak_memory_bytes > 1 << 20


def test_close_frees_the_weights_and_the_cache(folder):
    gc.disable()  # so that a reference cycle left by close stays alive
    try:
        with load(folder) as loaded:
            held = [weakref.ref(p) for p in loaded._model.parameters()]
            held += [weakref.ref(t) for layer in loaded._cache.layers for t in layer[:2]]
            stream = loaded.stream("hello", params(200))
            next(stream)
        assert [r for r in held if r() is not None] == []
    finally:
        gc.enable()
    loaded.close()
    uses = lambda: loaded.generate("hello"), lambda: loaded.logits([1]), lambda: list(stream), lambda: loaded.max_len
    for use in uses:
        with pytest.raises(MinirtError, match="closed"):
            use()


# A tokenizer whose decoder drops the first space of a text


@pytest.fixture(scope="module")
def llama(hf_folder):
    made = llama_like()
    with load(save(made, hf_folder("Llama", vocab_size=made.get_vocab_size()))) as loaded:
        yield loaded


def forced(llama, *tokens, **options):
    """Parameters with which only these tokens are drawn."""
    return SamplingParams(temperature=0, allowed_token_ids=[llama.tokenizer.token_id(token) for token in tokens], **options)


def test_all_calls_continue_the_prompt(llama):
    """The first space of the text was lost, in each of them."""
    prompt, options = "Once upon a time", forced(llama, "▁there", max_tokens=2)

    async def run():
        own = AsyncGenerator(llama)
        return (await own.generate(prompt, options)).text, "".join([piece.text async for piece in own.stream(prompt, options)])

    texts = [llama.generate(prompt, options).text, "".join(piece.text for piece in llama.stream(prompt, options))]
    assert [*texts, *asyncio.run(run())] == [" there there"] * 4
    many = dict(llama.completions([prompt, [1]], options))
    assert [many[0].text, many[1].text] == [" there there", "there there"], "nothing stands before the second"


def test_pytorchs_default_dtype_changes_nothing():
    """Scratch memory, scales and KV pages that PyTorch makes in its default dtype would be of another one, or refused."""
    drafts = SpeculativeOptions(method="mtp", adaptive=False)  # else measured times decide which tokens share a step
    options = {"device": "cpu", "quantization": "fp8", "kv_cache_dtype": "fp8", "speculative": drafts}
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, presence_penalty=0.5, logit_bias={40: 2.0}, logprobs=2)
    with Generator.from_pretrained(**options) as generator:
        expected = generator.generate("Once upon a time", params)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Generator.from_pretrained(**options) as generator:
            found = generator.generate("Once upon a time", params)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
