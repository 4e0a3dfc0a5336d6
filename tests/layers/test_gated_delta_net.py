"""The gated DeltaNet layer: eager against transformers' module, Triton against eager, formats, what it states of itself."""

import dataclasses
from typing import Any

import pytest
import torch

from minirt import models
from minirt.errors import ConfigError
from minirt.layers import Embedding, GatedDeltaNet, Head, implementation
from minirt.loading import checkpoint
from minirt.modeling.config import GatedDeltaNetConfig
from minirt.modeling.formats import Quantization
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import CacheRoom

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
H, HK, HV, DK, DV, EPS = 48, 2, 6, 16, 32, 1e-5
CONFIG = models.parse_config({
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": 67, "num_hidden_layers": 1, "vocab_size": 61,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": EPS,
})  # fmt: skip
PREFIX = "model.layers.0.linear_attn"


def model_of(quantization: Quantization | None = None, impl: str = "eager", heads: tuple[int, int] = (HK, HV)) -> Model:
    config = dataclasses.replace(CONFIG, gated_delta_net=GatedDeltaNetConfig(*heads, DK, DV, frozenset({0})))
    layer = GatedDeltaNet(config, name="layers.0.gated_delta_net", norm="model.layers.0.input_layernorm", prefix=PREFIX)
    ends = Embedding(CONFIG, name="embedding", weight="model.embed_tokens"), Head(CONFIG)
    model = Model(CONFIG, [ends[0], layer, ends[1]], quantization)
    model.allocate(DEVICE, torch.float32, 64)
    model.resolve(["eager", f"layers.*={impl}"])
    checkpoint.randomize(model, 5)
    return model


def layer_of(*args: Any, **options: Any) -> GatedDeltaNet:
    return next(layer for layer in model_of(*args, **options).layers if isinstance(layer, GatedDeltaNet))


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def state_of(layer: GatedDeltaNet, slots: int = 3) -> Any:
    state = layer.cache_spec.allocate(CacheRoom(0, 64, slots, torch.float32, DEVICE))
    for tensor in state.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 10**6)
    return state


def batch_of(*members: tuple[int, int, int]) -> Batch:
    """(new tokens, tokens before, slot) of each sequence."""
    chunks = [Chunk([0] * count, start, range(-(-(start + count) // 64)), slot=slot) for count, start, slot in members]
    return Batch.build(chunks, 64).to(DEVICE)


@pytest.mark.parametrize("quantization", [None, Quantization("fp8"), Quantization("int4")], ids=str)
@torch.inference_mode()
def test_triton_is_eager(quantization: Quantization | None) -> None:
    """One token (the norm in the product), several, a mix; with 16- or 32-bit weights one product, else two."""
    mine, plain = (layer_of(quantization, impl=impl) for impl in ("triton", "eager"))
    states = state_of(mine), state_of(plain)
    for members in (((1, 0, 2),), ((1, 1, 2), (70, 0, 0)), ((1, 70, 0), (1, 2, 2)), ((3, 3, 2), (1, 71, 0))):
        x = values(sum(count for count, _, _ in members), H, seed=len(members))
        batch = batch_of(*members)
        result, expected = (layer(x, batch, state) for layer, state in zip((mine, plain), states, strict=True))
        bound = 1e-4 if quantization is None else 2e-2
        assert (result - expected).norm() < bound * (expected - x).norm()
    slots = torch.tensor([0, 2], device=DEVICE)
    for name in ("conv", "recurrent"):
        difference = states[0][name][slots].nan_to_num(0) - states[1][name][slots].nan_to_num(0)
        assert difference.norm() < (1e-4 if quantization is None else 4e-2) * states[1][name][slots].nan_to_num(0).norm()
        assert states[0][name][1].isnan().all()


@pytest.mark.parametrize("impl", ["eager", "triton"])
@torch.inference_mode()
def test_steps_are_undone(impl: str) -> None:
    """Steps of 1 + 2 tokens of which 1 to 3 stay: the next step begins after them, and folds them.

    Only the device's lengths are right; the host's are upper bounds, as in the engine. Catches a layer that asks the host how
    many tokens stayed, and drafts that leave a trace in the state.
    """
    plain, layer = layer_of(heads=(1, 2)), layer_of(impl=impl, heads=(1, 2))
    layer.context.undoable = 3
    kept_counts = (1, 3, 2, 1) if impl == "eager" else (1, 2)
    x, wrong = values(sum(kept_counts) + 5, H), values(2, H, seed=9)
    expected = plain(x, batch_of((len(x), 0, 1)), state_of(plain))
    state, length, outs = state_of(layer), 0, []
    assert {name: tensor.shape[1] for name, tensor in state.items() if name != "recurrent"} == {
        "conv": 3 + 2 * 3, "gates": 3 + 2 * 3, "folded": 2,
    }  # fmt: skip
    for kept in kept_counts:
        tokens = torch.cat((x[length : length + kept], wrong))[:3]
        batch = batch_of((3, length, 1))
        bounds = dataclasses.replace(batch, seq_lens=tuple(n + 2 for n in batch.seq_lens))
        outs.append(layer(tokens, bounds, state)[:kept])
        length += kept
    assert state["folded"][1].eq(length - kept_counts[-1]).all()  # the last step's tokens are not in the matrices yet
    if impl == "eager":  # a part of a prompt folds all its tokens
        outs.append(layer(x[length:], batch_of((5, length, 1)), state))
        assert state["folded"][1].eq(length + 5).all()
    torch.testing.assert_close(torch.cat(outs), expected[: sum(map(len, outs))], rtol=1e-4, atol=2e-5)


def test_what_is_quantized() -> None:
    """in_proj_qkv, in_proj_z and out_proj; A_log and dt_bias are fp32 in a model of any dtype."""
    model = model_of(Quantization("fp8"))
    layer = next(layer for layer in model.layers if isinstance(layer, GatedDeltaNet))
    assert {name for weights in layer.quantizable() for name in weights.modules} == {
        f"{PREFIX}.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")
    }
    assert layer.in_proj.weight.dtype == layer.out_proj.weight.dtype == torch.float8_e4m3fn
    assert layer.in_proj.joined is None
    assert layer.in_proj_ba.weight.dtype == torch.float32
    model.allocate(DEVICE, torch.bfloat16, 64)
    assert {p.weight.dtype for p in (layer.A_log, layer.dt_bias)} == {torch.float32}
    assert {p.weight.dtype for p in (layer.conv, layer.gated_norm, layer.in_proj_ba)} == {torch.bfloat16}


def test_joined_projections_are_one_matrix() -> None:
    """Loading a part writes into the matrix that the product reads; its bytes count once."""
    layer = layer_of()
    joined = layer.in_proj.joined
    assert joined is not None
    assert len(joined) == layer.channels + HV * DV + 2 * HV
    layer.in_proj_ba.load(f"{PREFIX}.in_proj_a.weight", torch.full((HV, H), 3.0))
    assert joined[-HV:].eq(3).all()
    assert not joined[-2 * HV : -HV].eq(3).any()
    assert sum(op.linear.out_features for op in layer.linear_ops()[:-1]) == len(joined)
    size = layer.in_proj.nbytes(torch.float32) + layer.in_proj_ba.nbytes(torch.float32)
    assert size == joined.nbytes


def test_refusals() -> None:
    """Uneven heads, a missing state, and head sizes that no kernel takes (said, not computed otherwise)."""
    with pytest.raises(ConfigError, match="cannot be divided evenly"):
        layer_of(heads=(2, 5))
    with pytest.raises(ConfigError, match="needs a state"):
        layer_of()(values(1, H), batch_of((1, 0, 0)), None)
    odd = layer_of()
    odd.heads = dataclasses.replace(odd.heads, head_k_dim=24)
    assert implementation("gated_delta_net", "triton").unsupported(odd, DEVICE) == (
        "linear_key_head_dim 24 is neither 16 nor 32 nor 64 nor 128"
    )


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts launches of Triton's interpreter")
def test_one_token_is_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm with all projections, gated DeltaNet, output with residual. A quantized layer has one product more, for b and a."""
    from minirt.kernels import prepared

    launched: list[str] = []
    launch = prepared._Interpreted.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        launched.append(self._kernel.fn.__name__)
        return launch(self, grid)

    monkeypatch.setattr(prepared._Interpreted, "__getitem__", counted)
    for quantization, products in ((None, 2), (Quantization("fp8"), 3)):
        layer = layer_of(quantization, impl="triton")
        launched.clear()
        layer(values(1, H), batch_of((1, 0, 0)), state_of(layer))
        assert sorted(launched) == ["_delta_decode_kernel", *["_gemv_kernel"] * products]
