"""What the tables of mixtures of experts, and of the quantization of activations, declare of their kernels is true.

Catches a declaration that was copied from another kernel, or that a change of the kernel has left behind.
"""

from dataclasses import fields

import pytest
import torch
from support.experts import four_bits

from minirt.kernels import quantize as quantization
from minirt.kernels import reference
from minirt.kernels.launch import Gpu
from minirt.kernels.linear.product import Norm, ProductFacts
from minirt.kernels.moe import experts_int4_sm90, experts_sm90, few_tokens, few_tokens_int4, products, products_int4
from minirt.kernels.moe.dispatch import REGIMES, ROUTER, regime
from minirt.kernels.moe.mixture import Mixture
from minirt.kernels.moe.route import last_tokens, token_regime
from minirt.kernels.moe.router import router_logits  # in parts

FORMATS = ("fp16", "fp32", "fp8", "fp8_fp32", "fp8_blocks", "fp8_blocks_fp32", "int4", "int4_fp32")
FEW, FEW_INT4, HOPPER, HOPPER_INT4, INT4, TILES = REGIMES
E, K, INTER, TOP_K = 5, 72, 48, 2
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def mixture(T, stored, H=256, inter=192, parts=False, shift=0):
    """A mixture of two experts without memory; only the weights are real, and miss aligned addresses by `shift` values."""
    dtype = torch.float32 if "fp32" in stored else torch.bfloat16
    kept = torch.float8_e4m3fn if stored.startswith("fp8") else torch.int16 if "int4" in stored else dtype
    sizes = (16, 2 * inter, H), (16, H, inter)
    with DEVICE:
        up, down = (torch.empty(E * n * k + 16, dtype=kept)[shift : shift + E * n * k].view(E, n, k) for E, n, k in sizes)
        scales = None, None
        if "blocks" in stored:
            scales = torch.empty(16, -(-2 * inter // 64), -(-H // 128)), torch.empty(16, -(-H // 128), -(-inter // 128))
        elif "fp8" in stored:
            scales = torch.empty(16, 2 * inter), torch.empty(16, H)
        elif "int4" in stored:
            scales = torch.empty(16, 4, 2 * inter, dtype=torch.int32), torch.empty(16, 3, H, dtype=torch.int32)
        h = torch.empty(T, H, dtype=dtype)
    logits = router_logits(h, None, 1e-6, h.new_zeros(16, H)) if parts else h.new_empty(T, 16)
    return Mixture(h, logits, up, down, h, h, 1, True, "silu", None, *scales)


@pytest.mark.parametrize("stored", FORMATS)
def test_a_kernel_accepts_what_is_within_its_limits_and_nothing_else(stored):
    for one in REGIMES:
        T = one.first
        assert one.accepts(mixture(T, stored)) == (stored in one.limits.formats)
        for changed in ({"shift": 3}, {"H": 260}, {"inter": 196}):
            wrong = one.accepts(mixture(T, stored, **changed))
            assert wrong == (stored in one.limits.formats and one.limits.alignment == 1), (one.kernel, changed)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("capability", [80, 90])
def test_each_mixture_has_a_kernel(stored, capability, monkeypatch):
    """Also few tokens whose logits are in parts, which the kernels of few tokens do not take."""
    monkeypatch.setattr("minirt.kernels.moe.dispatch.capability", lambda device: capability)
    hopper = next((one for one in (HOPPER, HOPPER_INT4) if capability == 90 and stored in one.limits.formats), None)
    rest, few, most = (INT4, FEW_INT4, few_tokens_int4.MOST) if "int4" in stored else (TILES, FEW, few_tokens.MOST)
    many = most + 1
    for T in range(1, many):
        assert regime(mixture(T, stored)) is few
        assert not few.accepts(mixture(T, stored, parts=True))
    assert regime(mixture(2, stored, parts=True)) is (hopper or rest)
    assert regime(mixture(many, stored)) is (hopper or rest)
    assert regime(mixture(many, stored, shift=3)) is rest


@pytest.mark.parametrize("kernels", [experts_sm90, experts_int4_sm90, products, products_int4], ids=lambda one: one.FAMILY.name)
def test_no_configuration_of_tiles_changes_the_order_with_the_tokens(kernels):
    """The step in K, of which the order follows, is no field or depends on no number of tokens. K is not split."""
    family = kernels.FAMILY
    assert not {"split", "splits"} & {field.name for field in fields(family.config)}
    for one in (HOPPER, HOPPER_INT4, INT4, TILES):
        assert (one.sums.splits, one.sums.by_tokens) == (False, False)
    for itemsize in (1, 2, 4):
        for gated in (False, True):
            facts = [ProductFacts(token_regime(T), 768, 2048, itemsize, gated, rows=64) for T in range(2, 1100)]
            steps = {getattr(family.rule(one, Gpu(90, 132)), "block_k", None) for one in facts}
            assert len(steps) == 1


def test_the_height_of_tiles_is_that_of_the_routing():
    """`rule` gets tokens that are rounded up to the end of a variant, the routing gets those of the step."""
    for T in range(1, 3000):
        facts = ProductFacts(token_regime(T), 768, 2048, 2)
        for kernels in (products, products_int4):
            assert kernels.rule(facts, Gpu(80, 132)).block_t == kernels.block_t(T)
        assert last_tokens(T) in (token_regime(T), None)


def operands(stored, T, make):
    dtype = torch.float32 if "fp32" in stored else torch.float16
    up, down = make(E, 2 * INTER, K, dtype=torch.float32) / K**0.5, make(E, K, INTER, dtype=torch.float32) / INTER**0.5
    scales = None, None
    if "blocks" in stored:
        (up, up_scale), (down, down_scale) = (
            tuple(map(torch.stack, zip(*(reference.quantize_fp8_blocks(w, n) for w in weight), strict=True)))
            for weight, n in ((up, 2 * INTER // 16), (down, 9))
        )
        scales = up_scale, down_scale
    elif "fp8" in stored:
        (up, up_scale), (down, down_scale) = reference.quantize_fp8(up), reference.quantize_fp8(down)
        scales = up_scale, down_scale
    elif "int4" in stored:
        (up, up_scale), (down, down_scale) = (four_bits(weight, 32)[:2] for weight in (up, down))
        scales = up_scale, down_scale
    else:
        up, down = up.to(dtype), down.to(dtype)
    h, logits, norm = make(T, K, dtype=dtype), make(T, E, dtype=dtype), 1 + make(K, dtype=dtype, scale=0.1)
    return h, logits, up.contiguous(), down.contiguous(), scales, Norm(norm, 1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_a_token_does_not_depend_on_the_step(stored, make):
    """Bit by bit, in each format that is declared: a token alone, among few, and among so many that tiles are higher. Close to
    the reference."""
    h, logits, up, down, scales, norm = operands(stored, 70, make)
    rows = []
    for T in (1, 3, 70):
        out = torch.full_like(h[:T], torch.nan)
        made = Mixture(h[:T], logits[:T], up, down, h[:T], out, TOP_K, True, "silu", norm, *scales)
        (INT4 if "int4" in stored else TILES).launch(made)
        rows.append(out[0])
    assert all(torch.equal(row, rows[0]) for row in rows) == (not TILES.sums.by_tokens)
    x = reference.rms_norm(h[:1], norm.weight, norm.eps)
    weights, experts = reference.route(logits[:1], TOP_K, True)
    truth = h[0] + reference.mixture(x, weights, experts, up, down, "silu", *scales)[0]
    assert ((rows[0] - truth).float().norm() / truth.float().norm()).item() < (0.03 if "fp8" in stored else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_the_parts_of_the_router_depend_on_the_step(dtype, make):
    """16 parts of the hidden size, from 513 tokens on 4."""
    _, router = ROUTER
    x, weight = make(514, 640, dtype=dtype), make(6, 640, dtype=dtype)
    parts = [router_logits(x[:T], None, 1e-6, weight).sums for T in (2, 514)]
    assert router.sums.by_tokens == (parts[0].shape[0] != parts[1].shape[0])
    assert router.sums.splits == (parts[0].shape[0] > 1)
    for sums in parts:
        torch.testing.assert_close(sums.sum(0)[:2], x[:2].float() @ weight.float().T, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("stored", [stored for one in quantization.REGIMES for stored in one.limits.formats])
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_a_quantized_row_does_not_depend_on_the_step(stored, blocks, make):
    for K in (200, 1300):
        x = make(40, K, dtype=torch.float32 if stored == "fp32" else torch.float16)
        results = [quantization.quantize(x[:T], blocks=blocks) for T in (1, 3, 40)]
        for values, scale in results[1:]:
            assert torch.equal(values[0].view(torch.uint8), results[0][0][0].view(torch.uint8))
            assert torch.equal(scale[0], results[0][1][0])
