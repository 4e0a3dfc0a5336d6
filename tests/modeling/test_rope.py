"""Rotary tables: bit for bit against transformers, and against the formulas in fp64."""

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from minirt.errors import ConfigError
from minirt.modeling.config import ROPE_KEYS, Fields, RopeConfig, read_rope
from minirt.modeling.rope import inverse_frequencies, query_scales, rope_table
from minirt.models import parse_config

OWNERS = {
    "llama": (transformers.LlamaConfig, LlamaRotaryEmbedding), "qwen2": (transformers.Qwen2Config, Qwen2RotaryEmbedding),
    "qwen3": (transformers.Qwen3Config, Qwen3RotaryEmbedding), "mistral": (transformers.MistralConfig, MistralRotaryEmbedding),
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: list[dict[str, Any]] = [
    {"rope_theta": 10000.0},
    {"rope_theta": 1000000},  # an integer, as in many files
    {"rope_theta": 5e5} | LLAMA3,
    {"rope_theta": 5e5} | LLAMA3 | {"factor": 32, "low_freq_factor": 0.7, "high_freq_factor": 5.3},
    {"rope_theta": 5e5} | LLAMA3 | {"original_max_position_embeddings": 517},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_theta": 1e6} | YARN,
    {"rope_theta": 1e6} | YARN | {"truncate": False},
    {"rope_theta": 1e6} | YARN | {"factor": 1.0},
    {"rope_theta": 1e4} | YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    {"rope_theta": 1e4} | YARN | {"attention_factor": 0.9, "beta_fast": 24, "beta_slow": 3},
    {"rope_theta": 1e4} | YARN | {"mscale": 1.4},
    {"rope_theta": 1e4} | YARN | {"original_max_position_embeddings": 5},  # both ends of the ramp are at dimension 0
    {"rope_theta": 3.0} | YARN,  # both ends of the ramp are beyond the head
    {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
    {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
]


def make(rope: dict[str, Any], kind: str = "llama", head_dim: int = 64) -> tuple[RopeConfig, Any, Any]:
    """Our rope config, transformers' config and transformers' rotary module for the same file."""
    raw = {
        "model_type": kind, "hidden_size": 4 * head_dim, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": 64,
        "max_position_embeddings": 2048, "sliding_window": None, "rope_parameters": rope,
    }  # fmt: skip
    ours = parse_config(raw).rope
    config_class, module = OWNERS[kind]
    theirs = config_class(**copy.deepcopy(raw))
    return ours, theirs, module(theirs)


@pytest.mark.parametrize("kind", OWNERS)
@pytest.mark.parametrize("rope", ROPES)
def test_table_equals_transformers(rope: dict[str, Any], kind: str) -> None:
    ours, _, module = make(rope, kind)
    cos, sin = module(torch.zeros(1), torch.arange(2500)[None])  # beyond max_position_embeddings too
    table = rope_table(ours, 64, 2500)
    assert table.dtype == torch.float32
    assert table.shape == (2500, 64)
    assert torch.equal(table[:, :32], cos[0, :, :32])
    assert torch.equal(table[:, 32:], sin[0, :, 32:])


@pytest.mark.parametrize("head_dim", [2, 6, 80, 128, 256])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_equal_transformers(rope: dict[str, Any], head_dim: int) -> None:
    ours, theirs, module = make(rope, head_dim=head_dim)
    compute = ROPE_INIT_FUNCTIONS.get(ours.kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    frequencies, attention_factor = compute(theirs)
    assert torch.equal(inverse_frequencies(ours, head_dim), frequencies)
    assert ours.attention_factor == attention_factor == module.attention_scaling


FILE = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 256,
}  # fmt: skip


def test_an_outer_original_length() -> None:
    inner = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
    raw = FILE | {"original_max_position_embeddings": 700, "rope_scaling": inner}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(raw)))
    assert torch.equal(inverse_frequencies(parse_config(raw).rope, 64), theirs.inv_freq)


def test_rope_places() -> None:
    def rope(**fields: Any) -> RopeConfig:
        return parse_config(FILE | fields).rope

    assert rope() == RopeConfig("default", 10000.0)
    assert rope(rope_theta=5) == RopeConfig("default", 5.0)
    assert rope(rope_theta=7, rope_parameters={"rope_theta": 7.0}).theta == 7.0
    assert rope(rope_theta=5, rope_parameters={"rope_type": "default"}).theta == 5.0
    assert rope(rope_scaling={}, rope_parameters={"rope_theta": 7}).theta == 7.0
    assert rope(rope_parameters={"rope_type": "linear", "factor": 2, "beta_fast": None}).factor == 2.0  # null counts as absent
    assert rope(rope_scaling={"rope_type": "linear", "type": "linear", "factor": 2}).kind == "linear"
    # the original length: the top-level value or the inner value, else max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert rope(rope_parameters=YARN).original_max_position == 32768
    assert rope(rope_parameters=yarn).original_max_position == 256
    assert rope(rope_parameters=yarn, original_max_position_embeddings=32).original_max_position == 32
    for contradiction in (
        {"rope_theta": 5, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_parameters": YARN, "original_max_position_embeddings": 32},
        {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2}},
    ):
        with pytest.raises(ConfigError, match="contradict"):
            rope(**contradiction)
    assert rope(rope_parameters=yarn).attention_factor == 0.1 * math.log(2) + 1
    assert (rope(rope_parameters=YARN | {"attention_factor": 1.5, "mscale": 1, "mscale_all_dim": 1}).attention_factor == 1.5)
    assert rope(rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}).attention_factor == 1.0
    assert rope(rope_parameters=yarn | {"mscale": 3.0}).attention_factor == 0.1 * math.log(2) + 1  # mscale alone is unused
    linear = {"rope_type": "linear", "factor": 4.0}
    assert rope(rope_scaling=linear, rope_parameters=linear | {"type": "linear"}).factor == 4.0


def test_yarn_without_a_factor() -> None:
    """Catches another factor than transformers' for null: the positions divided by the original ones."""
    raw = FILE | {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 100}}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(raw)))
    parsed = parse_config(raw).rope
    assert parsed.factor == 2.56
    assert torch.equal(inverse_frequencies(parsed, 64), theirs.inv_freq)
    assert parsed.attention_factor == theirs.attention_scaling


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100, "factor": 2.5,
    "short_factor": [1.0 + i / 7 for i in range(32)], "long_factor": [1 + i * i for i in range(32)],
}  # fmt: skip
BY_LENGTH: list[dict[str, Any]] = [
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 3.7, "original_max_position_embeddings": 32}, LONGROPE,
    {name: value for name, value in LONGROPE.items() if name != "factor"}, LONGROPE | {"factor": 1.0},
    LONGROPE | {"attention_factor": 1.19},
    {name: value for name, value in LONGROPE.items() if name not in ("factor", "original_max_position_embeddings")},
]  # fmt: skip


@pytest.mark.parametrize("length", [1, 99, 100, 101, 256, 257, 400])
@pytest.mark.parametrize("rope", BY_LENGTH)
def test_frequencies_by_length_equal_transformers(rope: dict[str, Any], length: int) -> None:
    """Catches a change of frequencies at a length that is off by one, and another factor of cosines and sines.

    The table of so many served positions is that of transformers for a sequence of that length.
    """
    raw = FILE | {"rope_parameters": rope}
    parsed, theirs = parse_config(raw).rope, transformers.LlamaConfig(**copy.deepcopy(raw))
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, seq_len=length)
    assert torch.equal(inverse_frequencies(parsed, 64, length), frequencies)
    assert parsed.attention_factor == attention_factor
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(length)[None])
    table = torch.cat((cos[0, :, :32], sin[0, :, :32]), -1)
    if rope["rope_type"] == "dynamic":  # there, transformers computes theta from the length in fp32
        torch.testing.assert_close(rope_table(parsed, 64, length), table, rtol=0, atol=1e-4)
    else:
        assert torch.equal(rope_table(parsed, 64, length), table)


@pytest.mark.parametrize("kind", sorted({*ROPE_KEYS} - {"default"}))
def test_partial_rotary_frequencies_equal_transformers(kind: str) -> None:
    """Catches frequencies of the head's channels where only the first ones are rotated, and the other way round."""
    settings: dict[str, dict[str, Any]] = {
        "linear": {"factor": 3.0}, "dynamic": {"factor": 3.0}, "llama3": LLAMA3, "yarn": YARN,
        "longrope": LONGROPE | {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8}, "proportional": {},
    }  # fmt: skip
    rope = {"rope_theta": 1e4} | settings[kind] | {"rope_type": kind, "partial_rotary_factor": 0.25}
    theirs = transformers.LlamaConfig(**copy.deepcopy(FILE | {"rope_parameters": rope}))
    parsed = read_rope(Fields(FILE | {"rope_parameters": rope}), 256, 64, partial=True)
    assert parsed.rotary_dim(64) == (rotated := 64 if kind == "proportional" else 16)
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=300)
    assert torch.equal(inverse_frequencies(parsed, rotated, 300), frequencies)


def test_partial_rotary_factors_that_do_not_fit() -> None:
    """Catches an odd number of rotated channels, and two factors that differ."""
    assert read_rope(Fields(FILE | {"partial_rotary_factor": 0.7}), 256, 64, partial=True).rotary_dim(64) == 44
    for share, words in ((0.02, "1 of 64"), (0.0, "0 of 64"), (0.55, "35 of 64")):
        raw = FILE | {"rope_parameters": {"partial_rotary_factor": share}}
        with pytest.raises(ConfigError, match=rf"rope_parameters\.partial_rotary_factor: .*{words}"):
            read_rope(Fields(raw), 256, 64, partial=True)
    raw = FILE | {"partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 0.25}}
    with pytest.raises(ConfigError, match="partial_rotary_factor: the value contradicts"):
        read_rope(Fields(raw), 256, 64, partial=True)


def test_query_scales_equal_transformers() -> None:
    """Catches a factor that changes one position too early or too late, and fp64 rounding."""
    rope = RopeConfig("yarn", original_max_position=7, query_scaling_beta=0.3)
    theirs = get_llama_4_attn_scale(torch.arange(50)[None], 0.3, 7).flatten()
    assert torch.equal(query_scales(rope, 50), theirs)
    assert query_scales(rope, 8).tolist()[:7] == [1.0] * 7


def test_table_starts_at_position_zero_and_may_be_empty() -> None:
    rope = RopeConfig("yarn", 1e4, 2.0, 128, attention_factor=1.5)
    table = rope_table(rope, 6, 3)
    assert table[0].tolist() == [1.5, 1.5, 1.5, 0.0, 0.0, 0.0]
    assert rope_table(rope, 6, 0).shape == (0, 6)
    assert torch.equal(rope_table(rope, 6, 1), table[:1])  # a longer table has the same first rows
