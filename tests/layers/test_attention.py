"""`Attention` with settings of its own, against a formula in fp64 and against transformers.

Catches a setting of the layer that an implementation ignores, in prefill, in decode steps or in steps of both; a window that is
off by one, or that starts at the first cached page; a rope that layers share although theirs differ.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from minirt import Generator, SamplingParams, models
from minirt.errors import ConfigError
from minirt.layers import Attention, LayerContext, implementation
from minirt.modeling.config import AttentionSettings, RopeConfig
from minirt.models.decoder import decoder_layers
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EPS, HIDDEN, LENGTH = 1e-5, 96, 160
PAGES = [[4], [1, 6, 3], [0, 2]]
# The chunks of three sequences in each step: prompts in parts beside a single token, decode steps, few tokens of each.
STEPS = [
    [(0, 1), (0, 70), (0, 9)], [(1, 2), (70, 129), (9, 10)], [(2, 3), (129, 130), (10, 11)], [(3, 4), (130, 131), (11, 12)],
    [(4, 9), (131, 139), (12, 13)],
]  # fmt: skip
GATE = {"gate": "gate_proj"}
PARTIAL = {"rope": RopeConfig(theta=77.0, partial_rotary_factor=0.5)}
SCALED_Q = {"rope": RopeConfig(kind="linear", theta=77.0, factor=2.0, original_max_position=24, query_scaling_beta=0.7)}
OF_LAYER = {"norm", "post_norm", "residual_multiplier"}  # arguments of the layer
# Settings of the layer that are not those of its config, and arguments.
OWN = {
    "none": {}, "theta": {"rope": RopeConfig(theta=77.0)},
    "linear": {"rope": RopeConfig(kind="linear", theta=500.0, factor=4.0)}, "no rope": {"rope": None}, "partial rope": PARTIAL,
    "factors of q": SCALED_Q, "scale": {"scale": 0.31}, "window of 1": {"window": 1}, "window of 5": {"window": 5},
    "window over a page's end": {"window": 66}, "wide window": {"window": 1000}, "QK-norm": {"qk_norm": "weighted"},
    "QK-norm without weights": {"qk_norm": "plain", **PARTIAL}, "gate": GATE,
    "QK-norm after rope": {"qk_norm": "weighted_after_rope"}, "QK-norm over all heads": {"qk_norm": "weighted_all"},
    "gate in q_proj": {"gate": "q_proj", "qkv_bias": True}, "post norm": {"post_norm": "post"},
    "factor": {"residual_multiplier": 0.22}, "only a post norm": {"norm": None, "post_norm": "post", **GATE},
    "all": {"window": 7, "scale": 0.31, "qk_norm": "weighted", "gate": "q_proj", "post_norm": "post", **PARTIAL},
    "all without rope": {"rope": None, "qk_norm": "plain", "gate": "gate_proj", "post_norm": "post", "o_bias": True},
}  # fmt: skip


def make(impl, heads, kv_heads, head_dim, changes):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11, "head_dim": head_dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": EPS, "rope_theta": 10000.0}
    config = models.parse_config({"model_type": "llama", "max_position_embeddings": LENGTH, **sizes})
    settings = replace(config.attention(), **{key: value for key, value in changes.items() if key not in OF_LAYER})
    layer = Attention(
        config, name="attention", prefix="self", settings=settings, post_norm_eps=0.25, names={"o_proj": "dense"},
        **{"norm": "norm"} | {key: value for key, value in changes.items() if key in OF_LAYER},
    )  # fmt: skip
    layer.context = LayerContext(LENGTH, DEVICE)
    random = torch.Generator().manual_seed(heads)
    tensors = {}
    for parameter in layer.parameters():
        parameter.allocate(DEVICE, torch.float32)
        for name, shape, *_ in parameter.expected():
            if name not in tensors:
                drawn = torch.randn(shape, generator=random) / (3 if len(shape) == 1 else shape[-1] ** 0.5)
                tensors[name] = drawn + (len(shape) == 1)
            parameter.load(name, tensors[name])
    layer.bind(implementation("attention", impl))
    return layer, {name: tensor.double() for name, tensor in tensors.items()}


def normalized(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 if weight is None else weight)


def truth(layer, w, x):
    """The output for a whole sequence x [T, H] in fp64: one query head and one token after the other, without a cache.

    It is computed from the checkpoint's tensors, so it does not know how layers pack them.
    """
    factor, layer = layer.residual_multiplier, layer.settings
    x, nq, d = x.double().cpu(), layer.num_heads, layer.head_dim
    group, rope, window = nq // layer.num_kv_heads, layer.rope, layer.window or len(x)
    h = normalized(x, w["norm.weight"], EPS) if "norm.weight" in w else x

    def linear(name):
        return h @ w[f"self.{name}_proj.weight"].T + w.get(f"self.{name}_proj.bias", 0)

    q, k, v = (linear(name).view(len(x), -1, d) for name in "qkv")
    gate = linear("gate").view(len(x), nq, d) if layer.gate == "gate_proj" else None
    if layer.gate == "q_proj":  # the rows of a head are those of q, then those of the gate
        q, gate = linear("q").view(len(x), nq, 2 * d).chunk(2, -1)


    def qk_norm(*heads):
        weights = (w.get(f"self.{name}_norm.weight") for name in "qk")
        flat = [x.flatten(1) if layer.qk_norm == "weighted_all" else x for x in heads]
        return (normalized(x, weight, EPS).view(len(x), -1, d) for x, weight in zip(flat, weights, strict=True))

    if layer.qk_norm not in (None, "weighted_after_rope"):
        q, k = qk_norm(q, k)
    if rope is not None:
        r = int(d * rope.partial_rotary_factor)
        angles = torch.arange(len(x)).double()[:, None] * rope.theta ** (-torch.arange(0, r, 2).double() / r) / rope.factor
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def rotated(heads):
            turned = torch.complex(heads[..., : r // 2], heads[..., r // 2 : r]) * turn
            return torch.cat((turned.real, turned.imag, heads[..., r:]), -1)

        q, k = rotated(q), rotated(k)
        if rope.query_scaling_beta:
            chunks = torch.tensor([t // rope.original_max_position for t in range(len(x))]).double()
            q = q * (1 + rope.query_scaling_beta * (1 + chunks).log())[:, None, None]
    if layer.qk_norm == "weighted_after_rope":
        q, k = qk_norm(q, k)
    a = torch.empty(len(x), nq, d, dtype=torch.float64)
    for i in range(nq):
        for t in range(len(x)):
            seen = slice(max(0, t - window + 1), t + 1)
            a[t, i] = ((k[seen, i // group] @ q[t, i]) * layer.scale).softmax(0) @ v[seen, i // group]
    if gate is not None:
        a = a / (1 + (-gate).exp())
    y = a.flatten(1) @ w["self.dense.weight"].T + w.get("self.dense.bias", 0)
    return x + factor * (normalized(y, w["post.weight"], 0.25) if "post.weight" in w else y)


def worst_error(impl, heads, kv_heads, head_dim, changes):
    """The largest error of a row of what the layer adds to x, in all steps, relative to the row's norm."""
    layer, weights = make(impl, heads, kv_heads, head_dim, changes)
    cache = KVCache([layer.cache_spec], 7, DEVICE)
    for pages in cache.layers[0][:2]:
        pages.fill_(float("nan"))
    x = [torch.randn(step[1], HIDDEN, generator=torch.Generator().manual_seed(i)) for i, step in enumerate(STEPS[-1])]
    expected, worst = [truth(layer, weights, rows) for rows in x], 0.0
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


# Settings that the kernels compute; among them is every head size.
TRITON = [
    ("linear", 6, 2, 64), ("linear", 7, 1, 64), ("scale", 3, 3, 128), ("no rope", 6, 2, 64), ("partial rope", 3, 3, 256),
    ("factors of q", 7, 1, 64), ("QK-norm", 4, 2, 80), ("QK-norm without weights", 6, 2, 64), ("gate", 3, 3, 96),
    ("gate in q_proj", 6, 2, 64), ("post norm", 4, 2, 112), ("factor", 3, 3, 64),
    ("only a post norm", 6, 2, 64), ("QK-norm after rope", 4, 2, 80), ("QK-norm over all heads", 6, 2, 64),
    ("all without rope", 4, 1, 192),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads", "kv_heads", "head_dim"), TRITON)
def test_triton_equals_the_formula(name, heads, kv_heads, head_dim):
    assert worst_error("triton", heads, kv_heads, head_dim, OWN[name]) < 1e-5


WRONG = [("qk_norm", "weight"), ("qk_norm", True), ("gate", "o_proj"), ("scale", 0.0), ("scale", -1.0), ("scale", float("nan"))]


@pytest.mark.parametrize(("name", "value"), [*WRONG, ("window", 0)])
def test_unknown_settings_are_refused(name, value):
    """Catches a misspelled setting that computes attention without it."""
    wrong = AttentionSettings(4, 2, 16, None, 0.25)
    with pytest.raises(ConfigError, match=f"{name} of attention; .*found"):
        replace(wrong, **{name: value})


def windowed(config):
    return decoder_layers(config, lambda i: replace(config.attention(i), window=5))


def test_a_window_equals_that_of_transformers(hf_folder):
    """A prompt in chunks of 7 tokens, and greedy tokens after it."""
    folder = hf_folder("Mistral", seed=5)
    theirs = AutoModelForCausalLM.from_pretrained(folder, sliding_window=5, attn_implementation="eager").eval()
    prompt = torch.randint(3, 211, (73,), generator=torch.Generator().manual_seed(1)).tolist()
    options = {"layers": windowed, "max_num_batched_tokens": 7, "kv_cache_memory": 1 << 22, "device": "cpu"}
    with torch.inference_mode(), Generator.from_pretrained(folder, **options) as generator:
        logits = generator.logits(prompt)
        torch.testing.assert_close(logits, theirs(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)
        tokens = generator.generate(prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)).token_ids
        assert theirs(torch.tensor([prompt + tokens])).logits[0].argmax(-1)[len(prompt) - 1 : -1].tolist() == tokens
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as generator:
        assert (generator.logits(prompt) - logits).abs().max() > 0.1, "without a window, the logits differ"
