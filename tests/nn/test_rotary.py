"""Rotary embedding of `minirt.nn` beside transformers'.

Catches: channels paired or halves ordered wrongly, a table of another sequence, heads and tokens swapped, a norm over all heads,
strides ignored, frequencies that depend on the length taken for constants.
"""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

import minirt.nn as mn
from minirt.errors import InputError, UnsupportedError
from minirt.nn import functional


@pytest.fixture
def t():
    generator = torch.Generator().manual_seed(5)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(dtype)


def tables(t, B, T, D, dtype):
    """Halves that differ, so that each must be read."""
    return t(B, T, D, dtype=dtype), t(B, T, D, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "Nq", "Nk", "T", "D"), [(1, 1, 1, 1, 2), (2, 8, 1, 5, 64), (3, 3, 3, 7, 6), (1, 7, 1, 1, 96)])
def test_apply_rotary(B, Nq, Nk, T, D, dtype, t):
    """The same bits on a CPU: the rounding order is transformers'. Both layouts, and views of a packed projection."""
    cos, sin = tables(t, B, T, D, dtype)
    packed = t(B, T, Nq + 2 * Nk, D, dtype=dtype)
    q, k = packed[:, :, :Nq].transpose(1, 2), packed[:, :, Nq : Nq + Nk].transpose(1, 2)
    before = packed.clone()
    for given in ((q, k), (q.contiguous(), k.contiguous())):
        for result, expected in zip(mn.apply_rotary(*given, cos, sin), apply_rotary_pos_emb(*given, cos, sin), strict=True):
            assert torch.equal(result, expected)
            assert result.dtype == dtype
    swapped = q.transpose(1, 2), k.transpose(1, 2)
    expected = apply_rotary_pos_emb(*swapped, cos, sin, unsqueeze_dim=2)
    for result, wanted in zip(mn.apply_rotary(*swapped, cos, sin, unsqueeze_dim=2), expected, strict=True):
        assert torch.equal(result, wanted)
    assert torch.equal(packed, before)  # nothing is rotated in place


def test_one_table_for_all_sequences(t):
    q, k = t(3, 4, 5, 8), t(3, 2, 5, 8)
    cos, sin = tables(t, 1, 5, 8, torch.float32)
    for result, expected in zip(mn.apply_rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_heads_then_rotary(dtype, t):
    """As in Qwen3's attention."""
    norms = [Qwen3RMSNorm(16, eps=1e-4).to(dtype) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(t(16))
        q, k, (cos, sin) = t(2, 4, 5, 16, dtype=dtype), t(2, 1, 5, 16, dtype=dtype), tables(t, 2, 5, 16, dtype)
        expected = apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin)
        weights = [norm.weight for norm in norms]
        for result, wanted in zip(functional.qk_norm_rope(q, k, cos, sin, *weights, 1e-4), expected, strict=True):
            torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(mn.fused_rmsnorm_rope(q, weights[0], 1e-4, cos, sin), expected[0])


def config(**rope):
    return LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 5e5}, LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def test_rotary_embedding(rope, dtype, t):
    """The same bits as transformers', also after the model was moved to 16 bits, which rounds transformers' frequencies."""
    for theirs in (LlamaRotaryEmbedding(config(**rope)), LlamaRotaryEmbedding(config(**rope)).to(torch.bfloat16)):
        ours = mn.RotaryEmbedding.from_module(theirs)
        positions = torch.tensor([[0, 1, 63, 17], [5, 6, 7, 8]])
        x = t(2, 4, 64, dtype=dtype)
        for result, expected in zip(ours(x, positions), theirs(x, positions), strict=True):
            assert torch.equal(result, expected)
        assert ours.state_dict() == {}


def test_a_rotary_embedding_of_a_size():
    theirs = LlamaRotaryEmbedding(config(rope_type="default", rope_theta=5e5))
    assert torch.equal(mn.RotaryEmbedding(16, theta=5e5).inv_freq, theirs.inv_freq)


def test_frequencies_that_depend_on_the_length_are_refused():
    theirs = LlamaRotaryEmbedding(config(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    with pytest.raises(UnsupportedError, match=r"module\.rope_type: .*length of the sequence; found dynamic"):
        mn.RotaryEmbedding.from_module(theirs)
    with pytest.raises(InputError, match=r"module: not a rotary embedding with inv_freq \[D / 2\]; found Linear"):
        mn.RotaryEmbedding.from_module(torch.nn.Linear(2, 3))
