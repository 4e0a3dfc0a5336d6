"""Damaged weights: eager and Triton layers lose the same rows, and a generator ends the request with NumericsError.

Catches NaN or infinity in attention that one implementation turns into plausible tokens.
"""

import pytest
import torch

from minirt import Generator, SamplingParams, models
from minirt.errors import NumericsError
from minirt.layers import Attention
from minirt.loading import checkpoint as weights
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 61,
    "max_position_embeddings": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def q_rows(layer):
    return layer.qkv.weight[: layer.config.num_heads * layer.config.head_dim]


def k_rows(layer):
    first = layer.config.num_heads * layer.config.head_dim
    return layer.qkv.weight[first : first + layer.config.num_kv_heads * layer.config.head_dim]


DAMAGE = {
    "q NaN": (torch.float32, lambda layer: q_rows(layer).fill_(torch.nan)),
    "k NaN": (torch.float32, lambda layer: k_rows(layer)[3].fill_(torch.nan)),
    "q overflows": (torch.float16, lambda layer: q_rows(layer).mul_(1e5)),
    "scores overflow": (torch.float32, lambda layer: layer.qkv.weight[: 6 * 64].mul_(1e25)),
    "fine": (torch.float32, lambda layer: None),
}


def run(impl, dtype, damage):
    """The logits of a prompt's tokens, and of the token after it."""
    config = models.parse_config(SIZES)
    model = Model(config, models.build(config))
    model.allocate(DEVICE, dtype, 128)
    model.resolve(impl)
    weights.randomize(model)
    for layer in model.unique_layers():
        if isinstance(layer, Attention):
            damage(layer)
    cache = KVCache(model.cache_specs, 2, DEVICE, model.kv_dtype)
    chunks = [Chunk([7, 8, 9, 10, 11], 0, [1]), Chunk([12], 5, [1])]
    return torch.cat([model(Batch.build([chunk], cache.page_size), cache).cpu() for chunk in chunks])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("name", DAMAGE)
def test_eager_and_triton_agree(name):
    """Catches NaN or infinities that a kernel hides or spreads."""
    dtype, damage = DAMAGE[name]
    eager, triton = (run(impl, dtype, damage).isfinite().all(1) for impl in ("eager", "triton"))
    assert torch.equal(eager, triton)
    assert bool(eager.all()) == (name == "fine")
    assert not eager[-1] or name == "fine"


@pytest.mark.parametrize("name", [name for name in DAMAGE if name != "fine"])
def test_the_request_ends_with_an_error(name, hf_folder):
    """Catches a token that is made of NaN."""
    dtype, damage = DAMAGE[name]
    folder = hf_folder("Llama", seed=3, head_dim=64)
    with Generator.from_pretrained(folder, device=str(DEVICE), dtype=str(dtype)[6:], impl="eager") as generator:
        for layer in generator.model.unique_layers():
            if isinstance(layer, Attention):
                damage(layer)
        with pytest.raises(NumericsError, match="generated token 0"):
            generator.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=3, temperature=0))
