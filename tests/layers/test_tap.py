"""`Tap` and `DraftInput`: what a draft model gets of its target, alone and in a `Model`.

Catches a tap behind `Select`, which lacks rows; one that changes the residual stream; states that are kept where nobody reads
them; and weights of the target that a draft model holds again.
"""

from dataclasses import replace

import pytest
import torch

from minirt import models
from minirt.errors import ConfigError
from minirt.kernels import reference
from minirt.layers import Attention, DraftInput, Select, Tap
from minirt.loading.checkpoint import randomize
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache

CONFIG = models.parse_config({
    "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 101, "max_position_embeddings": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2,
})  # fmt: skip
CPU = torch.device("cpu")


def build(rows=None):
    layers, draft = models.build_with_drafts(CONFIG, rows)
    model = Model(CONFIG, layers, draft_layers=draft)
    model.allocate(CPU, torch.float32, 128)
    model.resolve("eager")
    randomize(model)
    return model


def batch_of(model, *lengths):
    """Prompts of these lengths, of which only the last rows need logits, and a cache."""
    chunks = [Chunk(list(range(i, i + n)), 0, [i], slot=i) for i, n in enumerate(lengths)]
    cache = KVCache(model.cache_specs, len(lengths), CPU, torch.float32, num_slots=len(lengths))
    return Batch.build(chunks, cache.page_size), cache


def test_states_of_all_rows_are_handed_over():
    """Also of rows that need no logits; the logits are those without a tap."""
    model = build()
    batch, cache = batch_of(model, 5, 1, 9)
    taps = torch.full((15, 32), torch.nan)
    plain, tapped = model(batch, cache), model(replace(batch, taps=taps), cache)
    assert torch.equal(plain, tapped)
    assert taps.isfinite().all()
    head = model.layers[-1]
    of_states = reference.linear(taps, head.lm_head.weight)[batch.logits_indices]
    assert (of_states - plain).abs().max() < 1e-5
    assert taps.pow(2).mean() > 0.1


def test_select_comes_after_the_tap():
    embedding, *rest, head = models.build(CONFIG)
    tap, select = Tap(CONFIG, norm="model.norm"), Select(CONFIG)
    kinds = [layer.kind for layer in Model(CONFIG, [embedding, *rest, tap, head]).layers]
    assert kinds[-3:] == ["tap", "select", "head"]
    embedding, *rest, head = models.build(CONFIG)
    with pytest.raises(ConfigError, match=r"attention or a tap after a select layer would lack rows"):
        Model(CONFIG, [embedding, *rest, select, Tap(CONFIG, norm="model.norm"), head])
    embedding, *rest, head = models.build(CONFIG)
    layers = [embedding, *rest, Select(CONFIG), Tap(CONFIG, norm="model.norm", every_row=False), head]
    assert Model(CONFIG, layers).layers == layers


def test_what_both_models_have_is_there_once():
    """Embedding and head, and in each model the norm of tap and head. `cache_specs` has the draft model's last."""
    model = build()
    draft = model.draft_model
    assert draft.layers[0].table is model.layers[0].table
    assert draft.layers[-1].lm_head is model.layers[-1].lm_head
    assert draft.layers[-1].norm is draft.layers[-2].norm is not model.layers[-1].norm
    assert len(model.cache_specs) == len(Model(CONFIG, models.build(CONFIG)).cache_specs) + 1
    names = [row.layer for row in model.plan.rows]
    assert names[-6:] == ["mtp.input", "mtp.attention", "mtp.select", "mtp.mlp", "mtp.tap", "mtp.head"]
    assert isinstance(draft.layers[1], Attention)
    assert model.num_parameters == sum(parameter.num_parameters for parameter in {id(p): p for p in model.parameters()}.values())


def test_some_rows_of_a_head_are_a_weight_of_their_own():
    """Also where the head is the embedding."""
    config = replace(CONFIG, tie_word_embeddings=True)
    layers, draft = models.build_with_drafts(config, 40)
    model = Model(config, layers, draft_layers=draft)
    assert draft[0].table is model.layers[0].table is model.layers[-1].lm_head
    assert draft[-1].lm_head is not model.layers[0].table
    assert draft[-1].lm_head.out_features == 40
    assert model.num_parameters - Model(config, models.build(config)).num_parameters > 40 * 32


def test_a_draft_model_needs_states():
    model = build()
    batch, cache = batch_of(model, 3)
    with pytest.raises(ConfigError, match=r"mtp\.input: a draft model needs the hidden states"):
        model.draft_model(batch, cache)
    hidden = torch.randn(3, 32)
    first = next(layer for layer in model.draft_model.layers if isinstance(layer, DraftInput))
    assert first(torch.empty(0), replace(batch, hidden=hidden)).shape == (3, 32)


def test_implementations_are_chosen_by_name():
    """`--impl` reaches the layers of the draft model, and their names are known."""
    layers, draft = models.build_with_drafts(CONFIG, None)
    model = Model(CONFIG, layers, draft_layers=draft)
    plan = model.resolve(["eager", "mtp.*=eager"])
    assert {row.reason for row in plan.rows if row.layer.startswith("mtp.")} == {"--impl mtp.*=eager"}
    assert {layer.implementation for layer in model.draft_model.layers} == {"eager"}
