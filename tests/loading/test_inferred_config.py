"""What config.json leaves open, the tensors decide. Catches a default that wins over the file, and a statement that does not win.

The models are those of transformers, with a config.json that states everything; then fields are removed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints
from support.checkpoints import distance, plan, refused, restate, rewrite, transformers_logits

from minirt.loading.checkpoint import Entry
from minirt.loading.load import inferred_config
from minirt.models import parse_config

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
# family, its fields, those that are removed, what the note says
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}, ("tie_word_embeddings",), "tie_word_embeddings is true"),
    "not tied": ("SmolLM3", {"tie_word_embeddings": False}, ("tie_word_embeddings",), "tie_word_embeddings is false"),
    "head_dim": ("Qwen3", {"head_dim": 24}, ("head_dim",), "head_dim is 24"),
    "the heads of keys and values": (
        "Mistral", {"num_attention_heads": 8, "num_key_value_heads": 2}, ("num_key_value_heads",), "num_key_value_heads is 2",
    ),
    "biases": (
        "Llama", {"attention_bias": True, "mlp_bias": True}, ("attention_bias", "mlp_bias"),
        "attention_bias is true, mlp_bias is true",
    ),
    "no biases, and a dense layer": (
        "Qwen2Moe", MIXTURE | {"qkv_bias": False, "mlp_only_layers": [1]}, ("qkv_bias", "mlp_only_layers"),
        r"qkv_bias is false, mlp_only_layers is \[1\]",
    ),
    "nothing": ("Llama", {}, ("tie_word_embeddings", "attention_bias", "mlp_bias", "head_dim"), ""),
}  # fmt: skip


logits = partial(checkpoints.logits, warm_up="none")


@pytest.mark.parametrize("name", CASES)
def test_the_tensors_decide(name: str, hf_folder: Any) -> None:
    family, fields, removed, note = CASES[name]
    folder = hf_folder(family, **fields)
    truth = transformers_logits(folder)
    restate(folder, **dict.fromkeys(removed, ...))
    assert distance(logits(folder), truth) < 1e-5
    notes = "; ".join(plan(folder).notes)
    assert (f"by the tensors, {note}".replace("\\", "") in notes) if note else "by the tensors" not in notes


def test_a_copy_of_a_tied_head_and_a_statement(hf_folder: Any) -> None:
    """Catches a copy that is loaded as a second table, and a stated tie that another head overrides."""
    folder = hf_folder("SmolLM3", tie_word_embeddings=True)
    truth, count = logits(folder), plan(folder).num_parameters
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    restate(folder, tie_word_embeddings=...)
    assert torch.equal(logits(folder), truth)
    assert plan(folder).num_parameters == count
    rewrite(folder, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    assert not torch.equal(logits(folder), truth)
    restate(folder, tie_word_embeddings=True)
    refused(folder, r"ties the head to the embedding, but the checkpoint has a different head")
    folder = hf_folder("Qwen2Moe", **MIXTURE, mlp_only_layers=[1])
    restate(folder, mlp_only_layers=[])
    refused(folder, "tensors are missing")


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_two_levels_that_contradict_each_other(outer: bool | None, inner: bool | None, head: bool) -> None:
    """Of a model with a vision encoder: without one statement, the head that is there or not decides."""
    text: dict[str, Any] = {
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 8,
        "vocab_size": 211, "sliding_window": None,
    }  # fmt: skip
    raw = {"model_type": "mistral3", "text_config": text | ({} if inner is None else {"tie_word_embeddings": inner})}
    raw |= {} if outer is None else {"tie_word_embeddings": outer}
    names = ["model.embed_tokens.weight", *(["lm_head.weight"] if head else [])]
    entries = {name: Entry(name, Path("absent"), (211, 64), "BF16") for name in names}
    config, note = inferred_config(raw, parse_config(raw), entries)
    stated = {tie for tie in (outer, inner) if tie is not None}
    assert config.tie_word_embeddings == (stated.pop() if len(stated) == 1 else not head)
    assert (note is not None) == (config != parse_config(raw))
