"""Hidden states of requests, against transformers. Catches rows of another request or token, a row that is lost or comes twice
through chunks, preemption, drafts that were wrong or the prefix cache, states before the last layer of a block or after the final
norm, and an edit that reaches another request."""

import dataclasses
import random
import sys

import pytest
import torch
from safetensors.torch import load_file
from support import hybrids, model_cases, mtp
from support.checkpoints import distance

from minirt import Generator, SamplingParams
from minirt.errors import InputError
from minirt.hooks.capture import ROWS, Capture
from minirt.hooks.layer import ablate, add, replace, silence
from minirt.sampling_params import resolve

DENSE = ("Llama", "Qwen2", "Qwen3", "Mistral")
MODELS = (*DENSE, "smollm3", "qwen3_5_moe", "qwen3_next", "qwen3_5")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
MIXES = {
    "at once": {}, "chunks": {"max_num_batched_tokens": 17, "max_num_seqs": 3}, "drafts": {"speculative": "ngram:3"},
    "few pages": {"max_num_seqs": 8, "max_num_batched_tokens": 40, "kv_cache_memory": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(request, hf_folder, tmp_path_factory):
    """A folder, transformers' model, and the number of its layers."""
    import transformers

    name = request.param
    if name in DENSE:
        folder = hf_folder(name, seed=5)
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        folder = tmp_path_factory.mktemp(name)
        make = mtp.make if name == "qwen3_5" else None
        made = make(folder) if make else (model_cases if name == "smollm3" else hybrids).make(name, folder)
    return folder, made, made.config.num_hidden_layers


@torch.inference_mode()
def expected(made, tokens):
    """The residual stream [T, H] behind the embedding and behind each block."""
    seen = []
    keep = made.model.layers[-1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    states = made(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    keep.remove()
    last = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return [state[0] for state in states[:-1]] + [last.reshape(len(tokens), -1)]


def check(made, completion, layers, rows="all"):
    tokens = [*completion.prompt_token_ids, *completion.token_ids][:-1]
    first = Capture(("x",), rows).first(len(completion.prompt_token_ids))
    end = len(completion.prompt_token_ids) if rows == "prompt" else len(tokens)
    first = len(tokens) - 1 if rows == "last" else first
    states = expected(made, tokens)
    for index, name in [(0, "embedding"), *((i + 1, f"layers.{i}") for i in range(layers))]:
        if name in completion.captured:
            captured, wanted = completion.captured[name], states[index][first:end]
            assert captured.shape == wanted.shape, (name, rows, captured.shape, wanted.shape)
            if len(wanted):
                assert distance(captured, wanted) < 1e-4, (name, rows)


    if "logits" in completion.captured:
        with torch.inference_mode():
            logits = made(input_ids=torch.tensor([tokens])).logits[0]
        wanted = logits[len(tokens) - 1 if rows == "last" else len(completion.prompt_token_ids) - 1 :]
        assert completion.captured["logits"].shape == wanted.shape
        assert distance(completion.captured["logits"], wanted) < 1e-4


def prompts(rng, lengths):
    """Random ones, and some with repetitions that drafts find and beginnings that others have."""
    made = [[rng.randrange(3, 211) for _ in range(n)] for n in lengths]
    return [*made, made[-1][:70] + made[0], [5, 6, 7] * 9, [*made[-1][:70], 9]]


@pytest.mark.filterwarnings("ignore:--kv-cache-memory")
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_states_are_those_of_transformers(model, mix):
    folder, made, layers = model
    options = dict(MIXES[mix])
    if "kv_cache_memory" in options:
        options["kv_cache_memory"] = 14 * 64 * 1024 if made.config.model_type.title() in DENSE else 1 << 20
    rng = random.Random(3)
    asked = prompts(rng, (1, 5, 17, 33, 90))
    params = [SamplingParams(**GREEDY, max_tokens=1 + 7 * (i % 3), capture=["embedding", "layers.*"]) for i in range(len(asked))]
    params[1::2] = [dataclasses.replace(each, capture=["embedding", "layers.*", "logits"]) for each in params[1::2]]
    params[2] = SamplingParams(**GREEDY, max_tokens=9)
    with Generator.from_pretrained(folder, device="cpu", capture=["embedding", "layers.*"], **options) as generator:
        first = generator.generate(asked[-1], SamplingParams(**GREEDY, max_tokens=2))  # its pages are in the prefix cache
        assert first.captured is None
        completions = generator.generate(asked, params)
    assert completions[2].captured is None
    for place, completion in enumerate(completions):
        if place != 2:
            logits = ["logits"] if place % 2 else []
            assert set(completion.captured) == {"embedding", *(f"layers.{i}" for i in range(layers)), *logits}
            check(made, completion, layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:--kv-cache-memory")
@pytest.mark.parametrize("model", ["Llama"], indirect=True)
def test_each_of_2000_random_requests_gets_its_rows(model):
    folder, made, layers = model
    rng = random.Random(11)
    begin = [rng.randrange(3, 211) for _ in range(80)]
    asked, params, rows = [], [], []
    for _ in range(2000):
        prompt = begin[: rng.choice((0, 0, 20, 66))] + [rng.randrange(3, 211) for _ in range(rng.randrange(1, 40))]
        kind = rng.choice((None, *ROWS))
        capture = None if kind is None else Capture(tuple(rng.sample(["embedding", "layers.0", "layers.1", "layers.2"], 2)), kind)
        asked.append(prompt)
        rows.append(kind)
        drawn = {"temperature": rng.choice((0.0, 1.0)), "seed": 1}
        params.append(SamplingParams(**drawn, max_tokens=rng.randrange(1, 40), capture=capture))
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 24, "kv_cache_memory": 24 * 49152, "speculative": "ngram:2"}
    with Generator.from_pretrained(folder, device="cpu", capture=["embedding", "layers.*"], **options) as generator:
        completions = generator.generate(asked, params)
        assert generator._engine.engine.stats.num_preemptions
    for completion, kind in zip(completions, rows, strict=True):
        assert (completion.captured is None) == (kind is None)
        if kind is not None:
            check(made, completion, layers, kind)


@pytest.mark.parametrize("model", ["Qwen2"], indirect=True)
def test_what_a_layer_adds_and_files(model, tmp_path):
    """Attention and MLP of a block; other dtypes; a folder."""
    folder, made, _ = model
    with Generator.from_pretrained(folder, device="cpu", capture=["layers.1.*", "layers.0"]) as generator:
        asked = Capture(("layers.1.attention", "layers.1.mlp", "layers.0"), dtype="bfloat16", folder=tmp_path / "new")
        completion = generator.generate([4, 5, 6], SamplingParams(**GREEDY, max_tokens=3, capture=asked))
    states = load_file(completion.captured)
    assert {(state.dtype, len(state)) for state in states.values()} == {(torch.bfloat16, 5)}
    tokens, seen = [4, 5, 6, *completion.token_ids[:-1]], []
    made.model.layers[1].self_attn.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    behind = expected(made, tokens)
    assert distance(states["layers.1.mlp"], behind[2]) < 1e-2
    assert distance(states["layers.1.attention"] - states["layers.0"], seen[0].reshape(5, -1)) < 3e-2


@pytest.mark.parametrize("model", ["Llama"], indirect=True)
def test_within_layers(model):
    """Heads and neurons: the inputs of the last products, also of the last layer; and a head and neurons that are silenced."""
    folder, made, _ = model
    places, seen, kept = ["layers.*.attention.heads", "layers.*.mlp.neurons"], {}, []
    for i, block in enumerate(made.model.layers):
        products = {f"layers.{i}.attention.heads": block.self_attn.o_proj, f"layers.{i}.mlp.neurons": block.mlp.down_proj}
        for name, product in products.items():
            kept.append(product.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0][0]})))
    heads, neurons = torch.arange(64) // 16 == 2, torch.arange(97) % 3 == 0
    edits = {"layers.1.attention.heads": silence(heads), "layers.2.mlp.neurons": silence(neurons)}
    with Generator.from_pretrained(folder, device="cpu", capture=places, edits=edits) as generator:
        params = SamplingParams(**GREEDY, max_tokens=4, capture=places)
        whole = generator.generate([7, 8, 9], params)
        steered = SamplingParams(**GREEDY, max_tokens=4, steer=dict.fromkeys(edits, 1.0), capture=places)
        silenced = generator.generate([7, 8, 9], steered)
    for completion in (whole, silenced):
        with torch.inference_mode():
            made(input_ids=torch.tensor([[7, 8, 9, *completion.token_ids[:-1]]]))
        for name, states in completion.captured.items():
            assert distance(states, seen[name]) < 1e-4, name
        for name, (product, mask) in {
            "layers.1.attention.heads": (made.model.layers[1].self_attn.o_proj, heads),
            "layers.2.mlp.neurons": (made.model.layers[2].mlp.down_proj, neurons),
        }.items():  # for the second completion
            assert bool(completion.captured[name][:, mask].any()) == (completion is whole)
            kept.append(product.register_forward_pre_hook(lambda module, inputs, mask=mask: (inputs[0] * ~mask,), prepend=True))
    for handle in kept:
        handle.remove()


def by_hand(made, prompt, count, layer, edit):
    """Greedy decoding by transformers, with the stream behind a block edited."""
    def change(module, inputs, output):
        return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)

    handle, ids = made.model.layers[layer].register_forward_hook(change), list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(made(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    handle.remove()
    return ids[len(prompt) :]


@pytest.mark.parametrize("model", ["Llama", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("mix", ["at once", "chunks", "drafts"])
def test_edits_change_the_requests_that_ask(model, mix):
    folder, made, _ = model
    vector = torch.randn(64, generator=torch.Generator().manual_seed(1))
    unit = vector / vector.norm()
    by_edit = {  # of the model → by transformers' hook
        "add": (add(vector), lambda x: x + 3 * vector), "ablate": (ablate(vector), lambda x: x - (x @ unit).unsqueeze(-1) * unit),
        "replace": (replace(vector), lambda x: vector.expand_as(x)),
    }  # fmt: skip
    factors = {"add": 3.0, "ablate": 1.0, "replace": 1.0}
    asked = prompts(random.Random(5), (3, 21, 80))
    for name, (edit, same) in by_edit.items():
        steer = [{"layers.1": factors[name]} if i % 2 else None for i in range(len(asked))]
        with Generator.from_pretrained(folder, device="cpu", edits={"layers.1": edit}, **MIXES[mix]) as generator:
            params = [SamplingParams(**GREEDY, max_tokens=6, steer=factor) for factor in steer]
            completions = generator.generate(asked, params)
        for i, completion in enumerate(completions):
            edited = by_hand(made, asked[i], 6, 1, same if i % 2 else lambda x: x)
            assert completion.token_ids == edited, (name, i)


def doubled(x, factor):
    return x * 2


def favors_5(ids, logits):
    return logits.index_fill(0, torch.tensor([5]), 1e4)


def test_functions_by_name_and_logits_without_hooks(folder):
    """Catches a name that is not looked up, and logits after a processor or of another draw."""
    (name,) = [module for module, loaded in sys.modules.items() if getattr(loaded, "favors_5", None) is favors_5]
    params = SamplingParams(**GREEDY, max_tokens=3, capture=["logits"], logits_processors=f"{name}:favors_5")
    with Generator.from_pretrained(folder, device="cpu", edits={"layers.1": f"{name}:doubled"}) as generator:
        plain, changed = generator.generate([[1, 2]] * 2, [params, dataclasses.replace(params, steer={"layers.1": 1.0})])
    with Generator.from_pretrained(folder, device="cpu", capture=["logits"]) as generator:
        again, last = generator.generate([[1, 2]] * 2, [params, dataclasses.replace(params, capture=Capture("logits", "last"))])
        logits = generator.logits([1, 2, 5, 5, 5])[1:4]
    assert plain.token_ids == changed.token_ids == [5, 5, 5]
    assert distance(plain.captured["logits"], logits) < 1e-5 < distance(changed.captured["logits"], logits)
    assert distance(again.captured["logits"], logits) < 1e-5 > distance(last.captured["logits"], logits[-1:])


def test_what_is_refused(folder):
    options = {"capture": ["layers.1"], "edits": {"layers.0": add(torch.ones(64))}}
    with Generator.from_pretrained(folder, device="cpu", **options) as generator:
        hint = r"load the model with capture=\['layers\.9'\]"
        with pytest.raises(InputError, match=rf"capture 'layers\.9'.*expected layers\.1.*{hint}"):
            generator.generate([1, 2], SamplingParams(capture=["layers.9"]))
        with pytest.raises(InputError, match=r"not an edit of this model.*expected layers\.0"):
            generator.generate([1, 2], SamplingParams(steer={"layers.1": 1.0}))
        assert len(generator.generate([1, 2], SamplingParams(**GREEDY, max_tokens=2)).token_ids) == 2
    with Generator.from_pretrained(folder, device="cpu") as generator, pytest.raises(InputError, match="loaded without hooks"):
        generator.generate([1, 2], SamplingParams(capture=["layers.1"]))
    with pytest.raises(InputError, match=r"edits 'layers\.1'.*cannot be imported.*expected module:name"):
        Generator.from_pretrained(folder, device="cpu", edits={"layers.1": "minirt.hooks.layer:nothing"})
    with pytest.raises(InputError, match=r"matches no place.*layers\.7"):
        Generator.from_pretrained(folder, device="cpu", capture=["layers.7"])
    with pytest.raises(InputError, match=r"not an edit.*expected a function"):
        Generator.from_pretrained(folder, device="cpu", edits={"layers.1": 3})
    for wrong in ({"places": ()}, {"places": ("a",), "rows": "some"}, {"places": ("a",), "dtype": "int8"},
                  {"places": ("logits",), "rows": "prompt"}):
        with pytest.raises(InputError, match=r"Capture\."):
            Capture(**wrong)
    with pytest.raises(InputError, match=r"SamplingParams\.stop.*captures states.*use stop_token_ids"):
        resolve(SamplingParams(capture=["layers.1"], stop="end"), None)
    with pytest.raises(InputError, match="max_tokens of 1 or more"):
        SamplingParams(capture=["layers.1"], max_tokens=0, prompt_logprobs=0)
