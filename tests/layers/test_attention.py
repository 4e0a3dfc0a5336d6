"""`Attention` with a rope, a scale or a window of its own, against a formula in fp64 and against transformers.

Catches a field of the layer that an implementation ignores, in prefill, in decode steps or in steps of both; a window that is off
by one, or that starts at the first cached page; a rope that layers share although theirs differ.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from minirt import Generator, LoadOptions, SamplingParams, models
from minirt.errors import UnsupportedError
from minirt.gpus import find_gpu
from minirt.layers import Attention, LayerContext, implementation
from minirt.loading.load import plan_load
from minirt.modeling.config import RopeConfig
from minirt.models.decoder import decoder_layers
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EPS, HIDDEN, LENGTH = 1e-5, 96, 160
PAGES = [[4], [1, 6, 3], [0, 2]]
# The chunks of three sequences in each step: prompts in parts beside a single token, then decode steps.
STEPS = [[(0, 1), (0, 70), (0, 9)], [(1, 2), (70, 129), (9, 10)], [(2, 3), (129, 130), (10, 11)], [(3, 4), (130, 131), (11, 12)]]
OWN = {
    "none": {},
    "theta": {"rope": RopeConfig(theta=77.0)},
    "linear": {"rope": RopeConfig(kind="linear", theta=500.0, factor=4.0)},
    "scale": {"scale": 0.31},
    "window of 1": {"window": 1},
    "window of 5": {"window": 5},
    "window over a page's end": {"window": 66},
    "wide window": {"window": 1000},
    "all": {"rope": RopeConfig(theta=77.0), "scale": 0.31, "window": 7},
}


def make(impl, heads, kv_heads, head_dim, own):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11, "head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": EPS, "rope_theta": 10000.0}
    config = models.parse_config({"model_type": "llama", "max_position_embeddings": LENGTH, **sizes})
    layer = Attention(config, name="attention", norm="norm", q="q", k="k", v="v", o="o", **own)
    layer.context = LayerContext(LENGTH, DEVICE)
    random = torch.Generator().manual_seed(heads)
    for parameter in layer.parameters():
        parameter.allocate(DEVICE, torch.float32)
        weight = parameter.weight
        drawn = torch.randn(weight.shape, generator=random) / (3 if weight.ndim == 1 else weight.shape[-1] ** 0.5)
        weight.copy_(drawn + (weight.ndim == 1))
    layer.bind(implementation("attention", impl))
    return layer


def truth(layer, x, own):
    """The output for a whole sequence x [T, H] in fp64: one query head and one token after the other, without a cache."""
    config, x = layer.config, x.double().cpu()
    d, group = config.head_dim, config.num_heads // config.num_kv_heads
    rope, scale, window = own.get("rope", config.rope), own.get("scale", d**-0.5), own.get("window", len(x))
    h = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * layer.norm.weight.double().cpu()
    heads = (h @ layer.qkv.weight.double().cpu().T).view(len(x), -1, d)
    angles = torch.arange(len(x)).double()[:, None] * rope.theta ** (-torch.arange(0, d, 2).double() / d) / rope.factor
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(heads[..., : d // 2], heads[..., d // 2 :]) * turn
    rotated = torch.cat((turned.real, turned.imag), -1)
    a = torch.empty(len(x), config.num_heads, d, dtype=torch.float64)
    for i in range(config.num_heads):
        k = rotated[:, config.num_heads + i // group]
        v = heads[:, config.num_heads + config.num_kv_heads + i // group]
        for t in range(len(x)):
            seen = slice(max(0, t - window + 1), t + 1)
            a[t, i] = ((k[seen] @ rotated[t, i]) * scale).softmax(0) @ v[seen]
    return x + a.flatten(1) @ layer.o.weight.double().cpu().T


def worst_error(impl, heads, kv_heads, head_dim, own):
    """The largest error of a row of what the layer adds to x, in all steps, relative to the row's norm."""
    layer = make(impl, heads, kv_heads, head_dim, own)
    cache = KVCache([layer.cache_spec], 7, DEVICE)
    for pages in cache.layers[0][:2]:
        pages.fill_(float("nan"))
    x = [torch.randn(step[1], HIDDEN, generator=torch.Generator().manual_seed(i)) for i, step in enumerate(STEPS[-1])]
    expected, worst = [truth(layer, rows, own) for rows in x], 0.0
    for step in STEPS:
        chunks = [Chunk([0] * (end - start), start, pages) for (start, end), pages in zip(step, PAGES, strict=True)]
        batch = Batch.build(chunks, cache.page_size).to(DEVICE)
        given, exact = (torch.cat([rows[a:b] for (a, b), rows in zip(step, all_rows, strict=True)]) for all_rows in (x, expected))
        out = layer(given.to(DEVICE), batch, cache.layers[0]).double().cpu()
        worst = max(worst, float(((out - exact).norm(dim=1) / (exact - given.double()).norm(dim=1)).max()))
    return worst


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 20), (6, 2, 64), (7, 1, 32)])
@pytest.mark.parametrize("name", OWN)
def test_eager_equals_the_formula(name, heads, kv_heads, head_dim):
    assert worst_error("eager", heads, kv_heads, head_dim, OWN[name]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (7, 1)])
def test_triton_equals_the_formula(heads, kv_heads):
    assert worst_error("triton", heads, kv_heads, 64, OWN["linear"] | OWN["scale"]) < 1e-5


def windowed(config):
    layers = decoder_layers(config)
    for layer in layers:
        if layer.kind == "attention":
            layer.window = 5
    return layers


def test_a_window_equals_that_of_transformers(hf_folder):
    """A prompt in chunks of 7 tokens, and greedy tokens after it."""
    folder = hf_folder("Mistral", seed=5)
    theirs = AutoModelForCausalLM.from_pretrained(folder, sliding_window=5, attn_implementation="eager").eval()
    prompt = torch.randint(3, 211, (73,), generator=torch.Generator().manual_seed(1)).tolist()
    options = {"layers": windowed, "max_num_batched_tokens": 7, "kv_cache_memory": 1 << 22, "device": "cpu"}
    with torch.inference_mode(), Generator.from_pretrained(folder, **options) as generator:
        found = generator.logits(prompt)
        torch.testing.assert_close(found, theirs(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)
        tokens = generator.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)).token_ids
        assert theirs(torch.tensor([prompt + tokens])).logits[0].argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as generator:
        assert (generator.logits(prompt) - found).abs().max() > 0.1, "without a window, the logits differ"


def test_the_plan_says_why_a_window_is_eager(hf_folder):
    folder = hf_folder("Mistral", seed=5, head_dim=64)
    options, h200 = LoadOptions(model=folder, layers=windowed), find_gpu("H200")
    rows = {row.layer: row for row in plan_load(options, h200)[0].plan.rows}
    attention = rows["layers.0.attention"]
    assert (attention.implementation, attention.reason) == ("eager", "auto: triton cannot: its kernels have no sliding window")
    assert rows["layers.0.mlp"].implementation == "triton"
    with pytest.raises(UnsupportedError, match=r"triton cannot run layers\.0\.attention: its kernels have no sliding window"):
        plan_load(LoadOptions(model=folder, layers=windowed, impl="triton"), h200)
    plain = plan_load(LoadOptions(model=folder), h200)[0].plan.rows
    assert {row.implementation for row in plain} == {"triton"}
