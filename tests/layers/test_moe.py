"""Mixtures of experts: eager against a loop over single tokens in fp64, Triton against eager, what the layer states of itself."""

import math
from typing import Any

import pytest
import torch
from support.checkpoints import load
from support.weights import InBlocks

from minirt import models
from minirt.bench.experts import expert_counts
from minirt.device import AbsentGPU
from minirt.errors import ConfigError
from minirt.kernels import reference
from minirt.kernels.reference import SharedExpert
from minirt.layers import MLPAndMoE, MoE, implementation, register
from minirt.layers.base import triton_unsupported
from minirt.loading import checkpoint
from minirt.modeling.config import ModelConfig
from minirt.modeling.formats import Quantization, StoredFp8Blocks
from minirt.modeling.model import Model
from minirt.profiling.read_bytes import expected_experts, layer_read_bytes
from minirt.step.batch import Batch

SIZES = {
    "model_type": "qwen2_moe", "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 1, "vocab_size": 61,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 37,
    "shared_expert_intermediate_size": 29,
}  # fmt: skip
NO_BATCH: Any = None  # a mixture of experts does not look at it


DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CPU = torch.device("cpu")


def parsed(**options: Any) -> ModelConfig:
    """SIZES with other fields. Qwen3's mixtures have no shared expert, and refuse its size."""
    fields = SIZES | options
    without = fields["model_type"] == "qwen3_moe"
    return models.parse_config({k: v for k, v in fields.items() if not (without and k.startswith("shared_expert"))})


def mixture(quantization: Quantization | None = None, device: torch.device = CPU, **options: Any) -> MoE:
    config = parsed(**options)
    model = Model(config, models.build(config), quantization)
    model.allocate(device, torch.float32, 64)
    model.resolve("eager")
    checkpoint.randomize(model, 5)
    return next(layer for layer in model.layers if isinstance(layer, MoE))


def values(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """The definition, token by token in fp64."""
    moe, eps = layer.moe, layer.config.rms_norm_eps
    gate_up, down = (weights.stacked[0].double() for weights in (layer.gate_up, layer.down))

    def mlp(h: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        gate, up = first[: len(first) // 2] @ h, first[len(first) // 2 :] @ h
        return last @ (gate / (1 + (-gate).exp()) * up)

    rows = []
    for row in x.double():
        h = row / (row.square().mean() + eps).sqrt() * layer.norm.weight.double()
        scores = (layer.router.weight.double() @ h).exp()
        probabilities = (scores / scores.sum()).tolist()
        chosen = sorted(range(moe.num_experts), key=lambda e: -probabilities[e])[: moe.experts_per_token]
        whole = sum(probabilities[e] for e in chosen) if moe.normalize else 1.0
        for e in chosen:
            row = row + probabilities[e] / whole * mlp(h, gate_up[e], down[e])
        if layer.shared_gate is not None and layer.shared_gate_up is not None and layer.shared_down is not None:
            gate = 1 / (1 + (-(layer.shared_gate.weight.double() @ h)).exp())
            row = row + gate * mlp(h, layer.shared_gate_up.weight.double(), layer.shared_down.weight.double())
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("options", [
    {}, {"norm_topk_prob": True}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 11, "norm_topk_prob": True},
    {"model_type": "qwen3_moe", "norm_topk_prob": True}, {"num_experts": 1, "num_experts_per_tok": 1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("T", [1, 7])
def test_eager_is_the_definition(options: dict[str, Any], T: int) -> None:
    layer = mixture(**options)
    x = values(T, 48)
    truth = one_by_one(layer, x)
    assert (layer(x, NO_BATCH) - truth).norm() < 3e-6 * truth.norm()
    assert (layer(x, NO_BATCH) - x).norm() > 0.1 * x.norm()


def test_router() -> None:
    """The lower of equal experts; normalized in fp32 and rounded last; a row with NaN concerns no other."""
    logits = torch.zeros(3, 70)
    logits[1, [69, 8, 31]] = 2.0
    logits[2, 40:] = -torch.inf
    weights, experts = reference.route(logits, 4, True)
    assert experts.tolist() == [[0, 1, 2, 3], [8, 31, 69, 0], [0, 1, 2, 3]]
    assert weights[0].tolist() == [0.25] * 4
    assert weights[1, :3].unique().numel() == 1
    assert weights[1, 3] < weights[1, 2]
    logits = values(33, 19).bfloat16()
    weights, experts = reference.route(logits, 5, True)
    exact = logits.double().softmax(-1).gather(1, experts)
    exact /= exact.sum(1, keepdim=True)
    assert weights.dtype == torch.bfloat16
    assert (weights - exact).abs().max() <= 2**-9 * exact.max()
    plain, _ = reference.route(logits, 5, False)
    assert plain.sum(1).max() < 1
    logits = values(2, 9)
    logits[1, 4] = torch.nan
    weights, experts = reference.route(logits, 3, True)
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert experts[1].tolist() == [0, 1, 2]


def test_fp8_experts_are_quantized_like_single_linears() -> None:
    """Catches a scale of another expert or part. The router and the shared expert's gate stay as they are."""
    plain, layer = mixture(), mixture(Quantization("fp8"))
    assert {p.format is None for p in (layer.router, layer.norm, layer.shared_gate)} == {True}
    rows = {"gate_proj": slice(37), "up_proj": slice(37, None), "down_proj": slice(None)}
    for name in ("gate_up", "down"):
        held, stacked = getattr(layer, name), getattr(plain, name).stacked[0]
        for spec in held.expected():
            expert, part = spec.name.split(".")[5:7]
            held.load(spec.name, stacked[int(expert)][rows[part]])
        for weight, scale, exact in zip(*held.stacked, stacked, strict=True):
            expected, expected_scale = reference.quantize_fp8(exact)
            assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(scale, expected_scale)


def test_fp8_outputs() -> None:
    """Near those of the weights that FP8 stands for; in a step of many tokens, each token's activations are quantized."""
    layer = mixture(Quantization("fp8"))
    wide = mixture()
    for name in ("gate_up", "down", "shared_gate_up", "shared_down", "router", "norm", "shared_gate"):
        held = getattr(layer, name)
        scale = getattr(held, "scale", None)
        getattr(wide, name).weight.copy_(held.weight.float() if scale is None else held.weight.float() * scale.unsqueeze(1))
    x = values(13, 48)
    truth = one_by_one(wide, x) - x
    together = layer(x, NO_BATCH) - x
    alone = torch.cat([layer(row.unsqueeze(0), NO_BATCH) for row in x]) - x
    assert (alone - truth).norm() < 3e-6 * truth.norm()  # 16- or 32-bit activations
    assert 1e-3 * truth.norm() < (together - truth).norm() < 0.05 * truth.norm()
    # A row does not depend on how many tokens its experts have.
    count = 5  # more than few of 11 experts
    fewer = layer(x[:count], NO_BATCH) - x[:count]
    assert (fewer - together[:count]).norm() < 1e-5 * fewer.norm()


def test_what_the_layer_states() -> None:
    """Bytes and operations by hand; the experts of many tokens against random draws."""
    layer = mixture()
    assert layer.residual
    assert layer.cache_spec is None
    one = 3 * 48 * 37
    rest = 4 * (48 + 48 * 11 + 3 * 48 * 29 + 48)
    assert layer.decode_read_bytes(torch.float32) == 3 * one * 4 + rest
    assert layer_read_bytes(layer, torch.float32, 1) == 3 * one * 4 + rest
    assert layer_read_bytes(layer, torch.float32, 10**4) == 11 * one * 4 + rest
    assert layer.flops(5) == 2 * 5 * (3 * one + 48 * 11 + 3 * 48 * 29)  # the shared expert's gate apart
    fp8 = mixture(Quantization("fp8"))
    scales = 4 * (2 * 37 + 48)
    assert fp8.decode_read_bytes(torch.bfloat16) == 3 * (one + scales) + 2 * (48 + 48 * 11 + 48) + 3 * 48 * 29 + 4 * (58 + 48)
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 4, 100):
        draws = [torch.rand(tokens, 16, generator=generator).topk(3).indices.unique().numel() for _ in range(300)]
        assert sum(draws) / 300 == pytest.approx(expected_experts(16, 3, tokens), rel=0.03)


def test_a_model_without_experts() -> None:
    """Catches an error that names no layer. `names` renames a part of the checkpoint."""
    dense = models.parse_config({k: v for k, v in SIZES.items() if "expert" not in k} | {"model_type": "qwen2"})
    with pytest.raises(ConfigError, match="m: the model has no mixtures of experts"):
        MoE(dense, name="m", norm="n", prefix="mlp")
    layer = MoE(models.parse_config(SIZES), name="m", norm="n", prefix="mlp", names={"gate": "router"})
    assert [next(iter(part.expected())).name for part in (layer.router, layer.gate_up)] == [
        "mlp.router.weight", "mlp.experts.0.gate_proj.weight"
    ]  # fmt: skip


WIDE = {"hidden_size": 144, "moe_intermediate_size": 136, "shared_expert_intermediate_size": 132}  # blocks of 16, 8 and 4 rows
ALIKE = WIDE | {"shared_expert_intermediate_size": 136, "num_experts_per_tok": 2}  # but down has blocks of 16 and of 128 rows


@pytest.mark.parametrize("T", [0, 1, 9])
@pytest.mark.parametrize(
    ("quantization", "options"),
    [(None, {}), (Quantization("fp8"), {}), (InBlocks(), {}), (InBlocks(), WIDE), (InBlocks(), ALIKE)],
    ids=["plain", "fp8", "blocks", "wide blocks", "blocks of other rows"],
)  # fmt: skip
def test_triton_is_eager(T: int, quantization: Any, options: dict[str, Any]) -> None:
    """In Triton's interpreter, or on a GPU: with a shared expert, sizes that are no multiple of a tile."""
    layer = mixture(quantization, device=DEVICE, **options)
    forward = implementation("moe", "triton").factory(layer)
    x = values(T, layer.config.hidden_size).to(DEVICE)
    out, expected = forward(x, NO_BATCH, None), layer(x, NO_BATCH)
    assert out.shape == x.shape
    assert (out - expected).norm() <= (1e-2 if quantization and T > 1 else 2e-6) * (expected - x).norm()


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize(
    ("quantization", "options"), [(None, {}), (Quantization("fp8"), {}), (InBlocks(), ALIKE | {"hidden_size": 128})],
    ids=["plain", "fp8", "blocks"],
)  # fmt: skip
def test_few_tokens_have_the_shared_expert_as_one_more(
    T: int, quantization: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the experts' width and format: no linear layer computes it, and activations are not rounded to FP8."""
    layer = mixture(quantization, device=DEVICE, **{"shared_expert_intermediate_size": 37, "num_experts_per_tok": 2, **options})
    monkeypatch.setattr("minirt.kernels.linear.dispatch.norm_gate_up", None)
    x = values(T, layer.config.hidden_size).to(DEVICE)
    out, expected = implementation("moe", "triton").factory(layer)(x, NO_BATCH, None), layer(x, NO_BATCH)
    assert (out - expected).norm() <= 2e-6 * (expected - x).norm()
    assert layer.shared_down is not None
    layer.shared_down.weight.zero_()
    assert (out - layer(x, NO_BATCH)).norm() > 0.02 * (expected - x).norm()


@pytest.mark.parametrize("options", [{"shared_expert_intermediate_size": 37, "num_experts_per_tok": 2}, WIDE], ids=str)
def test_an_invariant_step(options: dict[str, Any]) -> None:
    """One token has the bits that it has among others. Catches a shared expert that joins the experts of few tokens."""
    layer = mixture(device=DEVICE, **options)
    layer.context.invariant = True
    forward = implementation("moe", "triton").factory(layer)
    x = values(9, layer.config.hidden_size).to(DEVICE)
    out = forward(x, NO_BATCH, None)
    assert (out - layer(x, NO_BATCH)).norm() <= 2e-6 * (out - x).norm()
    for row in (0, 8):
        assert torch.equal(forward(x[row : row + 1].clone(), NO_BATCH, None)[0], out[row])


def test_fp8_experts_that_cannot_be_invariant_are_refused() -> None:
    """Catches a run on kernels whose order depends on the step. Each reason alone."""
    whole = {"hidden_size": 64, "moe_intermediate_size": 64}
    for options, dtype, capability, refused in (
        (whole, torch.bfloat16, (9, 0), False), (whole, torch.bfloat16, (8, 9), True), (whole, torch.float32, (9, 0), True),
        ({}, torch.bfloat16, (9, 0), True),
    ):  # fmt: skip
        layer = mixture(Quantization("fp8"), **options)
        layer.context.dtype = dtype
        for layer.context.invariant in (False, True):
            why = implementation("moe", "triton").unsupported(layer, AbsentGPU("a", 1 << 30, capability))
            assert ("batch-invariant experts in FP8 need" in str(why)) == (refused and layer.context.invariant)


def test_a_shared_expert_of_another_form_has_its_own_kernels() -> None:
    """Of another width or format, also of `down` alone, or of scales of other rows."""
    e, h, inter = 16, 32, 24
    up, down, scales = torch.zeros(e, 2 * inter, h), torch.zeros(e, h, inter), (torch.ones(e, 2 * inter), torch.ones(e, h))
    eight, gate = torch.float8_e4m3fn, torch.zeros(1, h)
    fp8 = SharedExpert(up[0].to(eight), down[0].to(eight), gate, scales[0][0], scales[1][0])
    whole = SharedExpert(up[0], down[0], gate)
    experts, stored = (up, down, None, None), (up.to(eight), down.to(eight), *scales)
    for T, weights, expert, joins in (
        (1, experts, whole, True), (4, experts, whole, True), (5, experts, whole, False), (1, stored, fp8, True),
        (1, experts, fp8, False), (1, stored, whole, False), (1, stored, fp8._replace(down=down[0], down_scale=None), False),
        (1, experts, whole._replace(gate_up=up[0, 2:], down=down[0, :, 1:]), False),
        (1, stored, fp8._replace(down_scale=torch.ones(h // 2)), False),
    ):  # fmt: skip
        assert reference.computes_shared(T, 2, *weights, expert) == joins


class WithoutKernels(InBlocks):
    """A format of one's own."""

    class Own(StoredFp8Blocks):
        capability = math.inf

    def format_of(self, modules: Any, *, head: bool, tied: bool) -> StoredFp8Blocks | None:
        return None if head else self.Own()


def test_the_plan_says_why_experts_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a reason that is lost, and a mixture that is eager where it has kernels."""
    monkeypatch.setattr("minirt.layers.base.interpreting", lambda: False)
    monkeypatch.setattr("minirt.layers.base.is_nvidia", lambda device: True)
    monkeypatch.setattr("minirt.layers.base.compute_capability", lambda device: (9, 0))
    reasons = {}
    for name, quantization in (("own", WithoutKernels()), ("blocks", InBlocks()), ("rows", Quantization("fp8"))):
        config = models.parse_config(SIZES)
        model = Model(config, models.build(config), quantization)
        layer = next(layer for layer in model.layers if isinstance(layer, MoE))
        layer.context = model.layers[0].context
        reasons[name] = triton_unsupported(layer, torch.device("cuda", 0))
    assert reasons == {"own": "there are no Triton kernels for fp8 128x128 weights", "blocks": None, "rows": None}


def test_triton_is_in_the_plan_and_capturable() -> None:
    config = models.parse_config(SIZES)
    model = Model(config, models.build(config))
    model.allocate(DEVICE, torch.float32, 64)
    plan = model.resolve(["eager", "*.moe=triton"])
    assert [(row.implementation, row.capturable) for row in plan.rows if row.kind == "moe"] == [("triton", True)]


def test_compare_leaves_out_near_ties_and_nothing_else(hf_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert chosen otherwise breaks the bound in a settled row only; NaN breaks it everywhere."""
    from minirt.bench.compare import layers as compare
    from minirt.layers import base

    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    wrong: dict[int, float] = {}

    @register("moe", "wrong")
    def factory(layer: MoE) -> Any:
        inner = implementation("moe", "eager").factory(layer)

        def forward(x: torch.Tensor, batch: Batch, kv: None) -> torch.Tensor:
            out = inner(x, batch, kv)
            for row, value in wrong.items():
                out[row] += value
            return out

        return forward

    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 1}
    folder = hf_folder("Qwen3Moe", seed=3, **sizes)
    with load(folder, impl=["eager", "*.moe=wrong"]) as generator:
        model = generator.model
        places = compare.places(model)
        place = next(place for place in places if place.layer.kind == "moe")
        step = compare.decode(model, places, [[5, 6, n] for n in (7, 8, 9)])
        monkeypatch.setattr(compare, "settled", lambda layer, x: torch.tensor([True, False, True]))
        for planted, fault in (({}, ""), ({1: 1.0}, ""), ({2: 1.0}, "relative error"), ({1: torch.nan}, "not finite")):
            wrong.clear()
            wrong.update(planted)
            faults = compare.compare(place, step).faults
            assert bool(faults) == bool(fault)
            assert fault in " ".join(faults)
        monkeypatch.setattr(compare, "settled", lambda layer, x: torch.zeros(3, dtype=torch.bool))
        wrong.clear()
        assert compare.compare(place, step).candidate == {}


GEMMA = {
    "model_type": "gemma4_text", "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 1, "vocab_size": 61,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 11, "top_k_experts": 3, "moe_intermediate_size": 37,
}  # fmt: skip


def beside_mlp(quantization: Quantization | None = None) -> MLPAndMoE:
    config = models.parse_config(GEMMA)
    model = Model(config, models.build(config), quantization)
    model.allocate(DEVICE, torch.float32, 64)
    model.resolve("eager")
    checkpoint.randomize(model, 5)
    (layer,) = (layer for layer in model.layers if isinstance(layer, MLPAndMoE))
    layer.post_norm.weight.uniform_(0.5, 1.5, generator=torch.Generator(DEVICE).manual_seed(1))
    return layer


@pytest.mark.parametrize("T", [0, 1, 2, 40])
@pytest.mark.parametrize("quantization", [None, Quantization("fp8"), Quantization("int4")], ids=["plain", "fp8", "int4"])
def test_experts_beside_an_mlp(T: int, quantization: Quantization | None) -> None:
    """Triton is eager, with each kernel of experts. Catches factors of other experts, or applied before the weights are divided,
    and a residual that only one branch adds. Parity tests compare eager with transformers."""
    layer = beside_mlp(quantization)
    x = values(T, 48).to(DEVICE)
    out, expected = implementation("mlp_and_moe", "triton").factory(layer)(x, NO_BATCH, None), layer(x, NO_BATCH)
    assert (out - expected).norm() <= (2e-2 if quantization and T > 1 else 5e-6) * (expected - x).norm()
    layer.factors.weight.fill_(1.0)
    assert T == 0 or (out - layer(x, NO_BATCH)).norm() > 0.02 * (expected - x).norm()


def test_what_a_layer_with_both_states() -> None:
    """Bytes of a token: three experts, the MLP, the router, norms and factors. Experts by the router's norm, which is scaled at
    load."""
    layer = beside_mlp()
    one, others = 3 * 48 * 37, 3 * 48 * 67 + 48 * 11 + 6 * 48 + 11 + 1
    assert layer.decode_read_bytes(torch.float32) == 4 * (3 * one + others)
    assert layer.flops(1) == 2 * (3 * one + 3 * 48 * 67 + 48 * 11)
    h = x = values(300, 48).to(DEVICE)
    h = h / (h.square().mean(1, keepdim=True) + layer.config.rms_norm_eps).sqrt() * layer.router_norm.weight
    experts = (h @ layer.router.weight.T).topk(3).indices
    assert expert_counts(layer, x).tolist() == torch.bincount(experts.flatten(), minlength=11).tolist()
    layer.router_norm.load("", torch.ones(48))
    assert torch.equal(layer.router_norm.weight.cpu(), torch.full((48,), 48**-0.5))
