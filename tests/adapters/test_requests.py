"""Adapters per request: tokens and logits of mixed batches, places on the device, and what they share."""

from dataclasses import replace

import pytest
import torch
import transformers
from support import hybrids
from support.adapters import ALL, greedy, logits, write_adapter

from minirt import Generator, SamplingParams, models
from minirt.errors import InputError, MinirtError

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 64, for Triton
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj")
# Family → config, and further linears that may have adapters.
FAMILIES = {
    "Llama": ({}, ()), "Qwen2": ({}, ()), "Phi3": ({}, ("qkv_proj", "gate_up_proj")), "Mistral": ({"sliding_window": 8}, ()),
    "Qwen2Moe": ({"moe_intermediate_size": 32, "num_experts": 4, "shared_expert_intermediate_size": 32}, ()),
}  # fmt: skip
RANKS = (4, 16, 64, 16, 4)


def prompts(count):
    return [[1, *((5 + 7 * i + 11 * j) % 200 + 3 for j in range(3 + 2 * i))] for i in range(count)]


def adapters(folder, root, targets=ALL, ranks=RANKS, dtype=torch.float64):
    """The model in transformers, and the folders of its adapters, by name."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules() if "expert" not in name}
    targets = tuple(target for target in targets if target in names)
    return model, {f"a{i}": write_adapter(root / f"a{i}", model, rank, i, targets) for i, rank in enumerate(ranks)}


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_five_adapters_and_none(hf_folder, tmp_path, family, impl):
    """Catches the adapter of another request, of another module or of another layer, a rank that is cut, and rows after `Select`
    that are taken for tokens."""
    if impl == "triton" and family != "Qwen2":
        pytest.skip("one family runs in the interpreter")
    config, further = FAMILIES[family]
    folder = hf_folder(family, seed=3, **SIZES | {"num_hidden_layers": 2} | config)
    dtype = torch.float32 if family == "Qwen2Moe" else torch.float64
    targets = tuple(t for t in (*ALL, *further) if family != "Qwen2Moe" or t in ("q_proj", "k_proj", "v_proj", "o_proj"))
    model, folders = adapters(folder, tmp_path, targets, dtype=dtype)
    names = [None, *folders]
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    with Generator.from_pretrained(folder, loras=folders, dtype="float32", device=device, impl=impl) as generator:
        params = [replace(GREEDY, lora=name, logprobs=0) for name in names]
        results = generator.generate(prompts(6), params)
        for prompt, name, result in zip(prompts(6), names, results, strict=True):
            wanted = greedy(model, folders.get(name), prompt, GREEDY.max_tokens)
            assert result.token_ids == wanted, name
            last = logits(model, folders.get(name), prompt + wanted[:-1])[len(prompt) - 1 :].log_softmax(-1)
            picked = last[range(GREEDY.max_tokens), wanted]
            assert [one.logprob for one in result.logprobs] == pytest.approx(picked.tolist(), abs=2e-4)
        assert len({tuple(result.token_ids) for result in results}) == 6


@pytest.mark.parametrize("case", ["qwen3_5_moe", "qwen3_next"])
def test_hybrids(case, tmp_path):
    """Catches a projection of linear attention without its adapter, and rows of its blocks in another order, which a gate in
    `q_proj` has, too."""
    model = hybrids.make(case, tmp_path / "model").float()
    targets = {name.rpartition(".")[2] for name, _ in model.named_modules()} & {*ALL[:4], *LINEAR_ATTENTION}
    folders = {f"a{i}": write_adapter(tmp_path / f"a{i}", model, rank, i, tuple(targets)) for i, rank in enumerate((4, 16))}
    names = [None, *folders]
    with Generator.from_pretrained(tmp_path / "model", loras=folders, dtype="float32", device="cpu") as generator:
        results = generator.generate(prompts(3), [replace(GREEDY, lora=name) for name in names])
        for prompt, name, result in zip(prompts(3), names, results, strict=True):
            assert result.token_ids == greedy(model, folders.get(name), prompt, GREEDY.max_tokens), name


def test_quantized_weights_keep_their_adapter(hf_folder, tmp_path):
    """Catches an adapter that quantized weights do not apply."""
    folder = hf_folder("Llama", seed=3, **SIZES)
    _, folders = adapters(folder, tmp_path, ranks=(16,))
    for quantization in ("fp8", "int4"):
        with Generator.from_pretrained(folder, loras=folders, dtype="float32", device="cpu", quantization=quantization) as one:
            plain, adapted = (one.generate(prompts(1)[0], replace(GREEDY, logprobs=5, lora=name)) for name in (None, "a0"))
        with Generator.from_pretrained(folder, dtype="float32", device="cpu", quantization=quantization) as other:
            without = other.generate(prompts(1)[0], replace(GREEDY, logprobs=5))
        assert plain.token_ids == without.token_ids
        assert plain.logprobs == without.logprobs
        assert adapted.logprobs[0].top != plain.logprobs[0].top


def test_two_hundred_adapters_through_eight_places(hf_folder, tmp_path):
    """Catches a place that is overwritten while a request uses it, and an adapter that is not copied again after that."""
    folder = hf_folder("Llama", seed=3, num_hidden_layers=1)
    model, folders = adapters(folder, tmp_path, ("q_proj", "down_proj"), [2] * 200)
    wanted = {name: greedy(model, folders[name], [1, 9, 33], 3) for name in folders}
    params = replace(GREEDY, max_tokens=3)
    options = {"max_loras": 8, "dtype": "float32", "device": "cpu", "max_num_seqs": 16}
    with Generator.from_pretrained(folder, loras=folders, **options) as generator:
        for names in (list(folders), list(folders)[::-3]):
            results = generator.generate([[1, 9, 33]] * len(names), [replace(params, lora=name) for name in names])
            assert {name: result.token_ids for name, result in zip(names, results, strict=True)} == {n: wanted[n] for n in names}
    assert len({tuple(tokens) for tokens in wanted.values()}) > 100


def test_a_prefix_is_not_shared_with_another_adapter(hf_folder, tmp_path):
    """Catches KV pages of one adapter, or of none, that another one finds, also after the name has other weights."""
    folder = hf_folder("Llama", seed=3)
    model, folders = adapters(folder, tmp_path, ranks=(4, 16, 8))
    prompt, params = [1, *range(3, 150)], replace(GREEDY, max_tokens=2)
    with Generator.from_pretrained(folder, loras=folders, dtype="float32", device="cpu") as generator:
        for name in (None, "a0", "a1", None, "a1", "a0"):
            result = generator.generate(prompt, params, lora=name)
            assert result.token_ids == greedy(model, folders.get(name), prompt, 2)
        assert result.cached_tokens == 128  # its own pages, of the time before
        generator.load_lora("a0", folders["a2"])
        again = generator.generate(prompt, params, lora="a0")
        assert again.cached_tokens == 0
        assert again.token_ids == greedy(model, folders["a2"], prompt, 2)


def test_load_and_unload_while_requests_run(hf_folder, tmp_path):
    """Catches a request that loses its adapter, or gets the new one of the same name, in the middle of its text."""
    folder = hf_folder("Llama", seed=3)
    model, folders = adapters(folder, tmp_path, ranks=(4, 16, 8))
    params = replace(GREEDY, max_tokens=20)
    options = {"loras": {"x": folders["a0"]}, "max_lora_rank": 16, "dtype": "float32", "device": "cpu"}
    with Generator.from_pretrained(folder, **options) as generator:
        prompt = prompts(1)[0]
        first = generator.stream_completion(prompt, replace(params, lora="x"))
        next(first)
        generator.load_lora("y", folders["a1"])
        second = generator.stream_completion(prompt, replace(params, lora="y"))
        next(second)
        generator.load_lora("x", folders["a2"])
        generator.unload_lora("y")
        assert generator.loras == ["x"]
        third = generator.generate(prompt, params, lora="x")
        for stream, name in ((first, "a0"), (second, "a1")):
            *_, (_, completion) = stream
            assert completion.token_ids == greedy(model, folders[name], prompt, 20)
        assert third.token_ids == greedy(model, folders["a2"], prompt, 20)
        with pytest.raises(InputError, match="not an adapter of this model; expected x"):
            generator.generate(prompt, params, lora="y")
        large = write_adapter(tmp_path / "large", model, 32, 9)
        with pytest.raises(MinirtError, match="the rank is too large"):
            generator.load_lora("z", large)


def test_what_is_refused(hf_folder, tmp_path):
    """Catches a request for an adapter of a model without any, a later adapter of linears without room, infinite weights, which
    would reach other requests' rows, and adapters that an implementation of a user would leave out."""
    folder = hf_folder("Llama", seed=3)
    model, _ = adapters(folder, tmp_path, ranks=())
    some = {"a": write_adapter(tmp_path / "a", model, 4, 0, ("q_proj",))}
    with pytest.raises(MinirtError, match="depend on other requests"):
        Generator.from_pretrained(folder, loras=some, batch_invariant=True)
    with Generator.from_pretrained(folder, dtype="float32", device="cpu") as generator:
        with pytest.raises(InputError, match="the model was loaded without adapters"):
            generator.generate([1, 2], lora="a")
        with pytest.raises(MinirtError, match="the model was loaded without adapters"):
            generator.load_lora("a", some["a"])
    with Generator.from_pretrained(folder, loras=some, dtype="float32", device="cpu") as generator:
        other = write_adapter(tmp_path / "b", model, 4, 0, ("down_proj",))
        with pytest.raises(MinirtError, match="no room for adapters of this linear"):
            generator.load_lora("b", other)
        with pytest.raises(MinirtError, match="NaN or Inf"):
            generator.load_lora("b", write_adapter(tmp_path / "inf", model, 4, 0, ("q_proj",), size=float("inf")))
        assert "adapters" in str(generator.memory.rows())
        for name, place, words in ((4, some["a"], "not a name"), ("a=c", some["a"], "not a name"), ("c", None, "not a folder"),
                                   ("c", tmp_path / "nowhere", "no such folder")):  # fmt: skip
            with pytest.raises(MinirtError, match=words):
                generator.load_lora(name, place)
        assert generator.loras == ["a"]
    large = write_adapter(tmp_path / "large", model, 4, 0, ("q_proj",), size=1e7)
    with pytest.raises(MinirtError, match="infinite or NaN; expected finite numbers in torch.float16"):
        Generator.from_pretrained(folder, loras={"a": large}, dtype="float16", device="cpu")
    for loras in ({"x": None}, {"": some["a"]}, "a", {"a=b": some["a"]}):
        with pytest.raises(MinirtError, match=r"not an adapter|not a name"):
            Generator.from_pretrained(folder, loras=loras)
    from minirt.layers import register
    from minirt.layers.base import _REGISTRY, implementation

    register("attention", "of-a-test")(implementation("attention", "eager").factory)
    try:
        with pytest.raises(MinirtError, match="'of-a-test' applies no adapters"):
            Generator.from_pretrained(folder, loras=some, dtype="float32", device="cpu", impl="layers.1.attention=of-a-test")
    finally:
        del _REGISTRY["attention", "of-a-test"]


def test_drafts_change_no_token(tmp_path):
    """Catches a step that verifies drafts without the adapter, and drafts by a model that has one."""
    folder = models.embedded()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    folders = {f"a{i}": write_adapter(tmp_path / f"a{i}", model, 4, i, size=0.3) for i in range(2)}
    texts, params = ["Once upon a time", "One day, a cat"], [replace(GREEDY, max_tokens=24, lora=name) for name in folders]
    options = {"loras": folders, "dtype": "float32", "device": "cpu"}
    with Generator.from_pretrained(folder, **options) as generator:
        plain = [one.token_ids for one in generator.generate(texts, params)]
        without = [one.token_ids for one in generator.generate(texts, replace(GREEDY, max_tokens=24))]
    assert plain != without
    for method in ("ngram:3", "mtp:2"):
        with Generator.from_pretrained(folder, speculative=method, **options) as generator:
            results = generator.generate(texts, params)
            assert [one.token_ids for one in results] == plain
            assert sum(one.num_draft_tokens for one in results) > 0
