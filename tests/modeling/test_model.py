"""Composition from Python: a custom implementation, and a model composed of layers. tests/test_docs.py runs the examples.

The references are transformers models with rewritten checkpoints: blocks removed, or repeated with separate KV caches. Catches
layers that depend on their index, and KV pages shared by two uses of one layer.
"""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import config as read_config
from support.checkpoints import distance, load, restate, transformers_greedy, transformers_logits
from support.raising import raises

from minirt import SamplingParams
from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import base

PROMPT = [5, 17, 99, 3, 42, 42, 180]


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Remove the implementations that a test registers after the test."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))


def rearranged(folder, order, target):
    """Write a checkpoint with the blocks `order` of `folder`, renumbered, to the new folder `target`."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name: t for name, t in tensors.items() if ".layers." not in name}
    for new, old in enumerate(order):
        prefix = f"model.layers.{old}."
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                renamed[f"model.layers.{new}." + name.removeprefix(prefix)] = tensor.clone()
    save_file(renamed, target / "model.safetensors", {"format": "pt"})
    kinds = read_config(folder).get("layer_types", ...)
    restate(target, num_hidden_layers=len(order), layer_types=kinds if kinds is ... else kinds[:1] * len(order))
    return target


def taking(order):
    """A `layers` function for `from_pretrained`: the architecture's own layers, with the blocks in the order `order`."""
    from minirt import models

    def compose(config):
        embedding, *blocks, head = models.build(config)
        return [embedding, *(layer for i in order for layer in blocks[2 * i : 2 * i + 2]), head]

    return compose


CASES = {
    "skip": ("Llama", (0, 2, 4)), "skip the first": ("Qwen2", (1, 2, 3, 4)), "one block": ("Qwen3", (3,)),
    "reverse": ("Qwen3", (4, 3, 2, 1, 0)), "twice": ("Llama", (0, 1, 1, 2, 3, 4)),
    "three times and apart": ("Qwen2", (0, 1, 0, 2, 0)), "only doubled": ("Qwen3", (2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_blocks_skipped_shared_and_moved(case, tied, hf_folder, tmp_path):
    family, order = CASES[case]
    folder = hf_folder(family, num_hidden_layers=5, tie_word_embeddings=tied, head_dim=16)
    other = rearranged(folder, order, tmp_path / "other")
    model = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    with load(folder, layers=taking(order)) as generator:
        assert distance(generator.logits(PROMPT), transformers_logits(other, PROMPT)) < 1e-5
        together = generator.generate([[7], PROMPT, PROMPT[::-1]], SamplingParams(max_tokens=20, ignore_eos=True))
        assert together[1].token_ids == transformers_greedy(model, PROMPT, 20)
        left_out = {f"model.layers.{i}." for i in range(5) if i not in order}
        assert {name[:15] for name in generator.unused_tensors} == left_out
        assert len(generator.plan.rows) == 3 + 2 * len(order)


def test_a_shared_layer_has_its_weights_once(hf_folder):
    folder = hf_folder("Llama")
    with load(folder) as plain, load(folder, layers=taking((0, 1, 1, 1, 2))) as shared:
        assert shared.plan.weight_bytes == plain.plan.weight_bytes
        assert shared.decode_read_bytes > plain.decode_read_bytes
        assert shared.kv_cache_bytes // 5 <= plain.kv_cache_bytes // 3 + 1


def test_own_implementation_runs_where_it_was_asked_for(hf_folder):
    from minirt.layers import implementation, register

    folder, ran = hf_folder("Qwen2"), []

    @register("attention", "watched")
    def watched(layer):
        eager = implementation("attention", "eager").factory(layer)

        def forward(x, batch, kv):
            ran.append(layer.name)
            return eager(x, batch, kv)

        return forward

    @register("mlp", "picky", unsupported=lambda layer, device: "it is Tuesday" if "1" in layer.name else None)
    def picky(layer):
        return implementation("mlp", "eager").factory(layer)

    with load(folder) as plain:
        expected = plain.logits(PROMPT)
    with load(folder, impl=["eager", "layers.[02].attention=watched", "layers.0.mlp=picky"]) as generator:
        assert torch.equal(generator.logits(PROMPT), expected)
        assert ran == ["layers.0.attention", "layers.2.attention"]
        chosen = {row.layer: row.implementation for row in generator.plan.rows}
        assert chosen["layers.2.attention"] == "watched"
        assert chosen["layers.1.attention"] == chosen["head"] == "eager"
        assert chosen["layers.0.mlp"] == "picky"
    raises(r"layers\.1\.mlp.*it is Tuesday", load, folder, impl="layers.*.mlp=picky", error=UnsupportedError)
    raises(r"'watched' for mlp layers.*eager", load, folder, impl="layers.*.mlp=watched", error=UnsupportedError)
    for kind, name in (("attention", "watched"), ("mlp", "eager"), ("mlp", "auto")):
        with pytest.raises(UnsupportedError):
            register(kind, name)


RETURNS = {  # the wrong result of a custom implementation, made from the result of ours
    "strides": lambda out: out.t().contiguous().t(), "a row less": lambda out: out[1:],
    "more columns": lambda out: torch.cat((out, out), 1), "dtype": lambda out: out.half(),
    "device": lambda out: out.to("meta"), "sparse": lambda out: out.to_sparse(), "none": lambda out: None,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["embedding", "attention", "mlp", "select", "head"])
@pytest.mark.parametrize("wrong", RETURNS)
def test_what_an_own_implementation_returns_is_checked(wrong, kind, hf_folder):
    """Kernels use only addresses. With wrong strides they would silently read wrong numbers."""
    from minirt.layers import implementation, register
    from minirt.layers.base import has_implementation

    name = f"returns-{wrong.replace(' ', '-')}"
    if not has_implementation(kind, name):
        register(kind, name)(lambda layer: lambda x, batch, kv: RETURNS[wrong](
            implementation(kind, "eager").factory(layer)(x, batch, kv)
        ))  # fmt: skip
    pattern = {"attention": "layers.1.attention", "mlp": "layers.1.mlp"}.get(kind, kind)
    with load(hf_folder("Qwen2"), impl=["eager", f"{pattern}={name}"]) as generator:
        expected = r"a contiguous torch.float32 .* \(7, \d+\) on cpu"
        returns = rf"{pattern}: the output of implementation '{name}' does not fit .*; expected {expected}; found "
        raises(returns, generator.logits, PROMPT, error=UnsupportedError)


def test_layers_are_of_one_model(hf_folder):
    """Otherwise the first model would compute with the weights of the second."""
    from minirt import models

    folder, kept = hf_folder("Llama"), []

    def keep(config):
        kept[:] = kept or models.build(config)
        return kept

    with load(folder, layers=keep) as generator:
        expected = generator.logits(PROMPT)
        with pytest.raises(ConfigError, match=r"layers\[0\], embedding: this layer already belongs to a model.*make new layers"):
            load(folder, layers=keep, quantization="fp8")
        assert torch.equal(generator.logits(PROMPT), expected)


def test_impossible_compositions(hf_folder):
    from minirt import models
    from minirt.layers import MLP

    folder = hf_folder("Llama")

    def stranger(config):
        embedding, *blocks, head = models.build(config)
        mlp = MLP(config, name="extra", norm="model.extra_norm", prefix="model.extra")
        return [embedding, *blocks, mlp, head]

    raises(r"4 of .* missing.*model\.extra_norm\.weight", load, folder, layers=stranger, error=CheckpointError)
    for wrong in (5, models.build(models.preset("SmolLM2-135M").config)):
        raises(r"layers: not a function; expected a function .* config.*; found", load, folder, layers=wrong, error=ConfigError)
    for wrong in (lambda c: None, lambda c: 3):
        with pytest.raises(ConfigError, match=r"needs layers; expected a sequence of layers; found (NoneType|int)"):
            load(folder, layers=wrong)
    for place, wrong in enumerate((None, MLP, stranger)):
        message = rf"layers\[{place}\]: not a layer; expected a minirt.layers.Layer with a kind; found (NoneT|t|f)"
        with pytest.raises(ConfigError, match=message):
            load(folder, layers=lambda c, place=place, wrong=wrong: [*models.build(c)[:place], wrong])
    for wrong in (lambda c: [], lambda c: models.build(c)[1:], lambda c: models.build(c)[::-1], lambda c: models.build(c)[:1]):
        raises("one embedding", load, folder, layers=wrong, error=ConfigError)
