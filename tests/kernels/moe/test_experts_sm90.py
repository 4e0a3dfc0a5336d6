"""The experts' kernel for Hopper, on a GPU or emulated, and all regimes on a GPU: against the reference in fp64.

Catches what the interpreter cannot see: barriers and fences that are missing, tiles that reach into another expert's rows, stages
that are skipped, sums that are set aside at the wrong step, the scale of another expert, block, part (gate for up) or token.
"""

import os
from typing import NamedTuple

import pytest
import torch
from support.experts import lists

from minirt.bench import bounds
from minirt.kernels import reference
from minirt.kernels.launch import Gpu
from minirt.kernels.linear.product import Epilogue, Product, ProductFacts
from minirt.kernels.moe import experts_sm90
from minirt.kernels.moe.dispatch import REGIMES, mixture_residual
from minirt.kernels.moe.mixture import Mixture
from minirt.kernels.moe.route import gather, route

# Rows (H, I) end within a tile, experts without a token, one expert with most tokens, more items than programs.
CASES = [
    {"T": 5, "E": 4, "k": 2, "H": 136, "I": 72, "block_t": 8, "strip": 64},
    {"T": 9, "E": 4, "k": 2, "H": 136, "I": 72, "block_t": 8, "strip": 128},
    {"T": 40, "E": 3, "k": 2, "H": 256, "I": 144, "block_t": 16, "strip": 128},
    {"T": 40, "E": 5, "k": 1, "H": 128, "I": 80, "block_t": 32, "strip": 64},
    {"T": 150, "E": 3, "k": 1, "H": 192, "I": 80, "block_t": 128, "strip": 128},
    {"T": 190, "E": 2, "k": 1, "H": 144, "I": 80, "block_t": 128, "strip": 128, "extra": 32},
    {"T": 150, "E": 2, "k": 1, "H": 192, "I": 72, "block_t": 64, "strip": 128, "extra": 32},
]
# The same with scales of blocks of g rows, and two programs on an SM. A last block of rows that is not full; columns of a last
# block; strips of gate and up past the last row.
CASES_OF_BLOCKS = [
    {"T": 5, "E": 4, "k": 2, "H": 272, "I": 64, "block_t": 8, "strip": 64, "programs": 2, "g": 64},
    {"T": 9, "E": 4, "k": 2, "H": 144, "I": 192, "block_t": 8, "strip": 128, "programs": 1, "g": 64},
    {"T": 40, "E": 5, "k": 1, "H": 304, "I": 192, "block_t": 16, "strip": 128, "programs": 1, "g": 64},
    {"T": 40, "E": 3, "k": 2, "H": 400, "I": 128, "block_t": 32, "strip": 64, "programs": 2, "g": 128},
    {"T": 150, "E": 3, "k": 1, "H": 272, "I": 256, "block_t": 64, "strip": 64, "programs": 2, "g": 128},
    {"T": 150, "E": 4, "k": 1, "H": 336, "I": 128, "block_t": 64, "strip": 128, "programs": 1, "g": 128},
]


@pytest.fixture
def on_hopper():
    if "MINIRT_EMULATE" not in os.environ and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    return experts_sm90.launch


class Quantized(NamedTuple):
    """Values, their scales or None, and what both stand for in fp64."""

    values: torch.Tensor
    scale: torch.Tensor | None
    wide: torch.Tensor


def in_rows(x):
    values, scale = reference.quantize_fp8(x)
    return Quantized(values, scale, values.double() * scale.double()[..., None])


def in_blocks(x, g):
    """x [..., N, K] with a scale for each g of N rows and 128 columns."""
    pairs = [reference.quantize_fp8_blocks(matrix, -(-x.shape[-2] // g)) for matrix in x.view(-1, *x.shape[-2:])]
    wide = torch.stack([reference.dequantize_fp8(*pair, torch.float64) for pair in pairs])
    values, scale = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return Quantized(values.view_as(x), scale.view(*x.shape[:-2], *scale.shape[1:]), wide.view_as(x))


def weights_in_blocks(weight):
    """Values and scales of blocks of 128 rows of experts [E, N, K]."""
    pairs = [reference.quantize_fp8_blocks(matrix, -(-weight.shape[1] // 128)) for matrix in uneven(weight, 128)]
    values, scale = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return values, scale


def uneven(x, g):
    """x [..., N, K] times a factor for each g rows and 128 columns. Neighbouring factors differ by up to 16."""
    rows, columns = torch.arange(x.shape[-2], device=x.device) // g, torch.arange(x.shape[-1], device=x.device) // 128
    generator = torch.Generator().manual_seed(x.shape[-1])
    factors = torch.exp2(torch.randn(*x.shape[:-2], int(rows[-1]) + 1, int(columns[-1]) + 1, generator=generator).clamp(-2, 2))
    return x * factors.to(x)[..., rows, :][..., columns]


def accepts(dtype, gate_up, down, *scales):
    """Whether the kernel accepts a mixture of these experts."""
    h = torch.empty(3, gate_up.shape[2], dtype=dtype, device=gate_up.device)
    (hopper,) = (regime for regime in REGIMES if regime.kernel == "experts_sm90")
    return hopper.accepts(Mixture(h, h, gate_up, down, h, h, 1, True, "silu", None, *scales))


def check_products(case, x, logits, gate_up, down, quantize, config, nan, launch):
    """Both products. The second one's input is the first one's output, quantized."""
    T, E, k, H, inter = (case[name] for name in ("T", "E", "k", "H", "I"))
    weights, experts = reference.route(logits, k, True)
    routing = lists(experts, weights, E, config.rows)
    place_experts = experts.flatten()[routing.order.long()]
    x = quantize(x[routing.order // k])
    out = nan(T * k, inter, dtype=logits.dtype)
    product = Product(x.values, gate_up.values, out, None, Epilogue(gate_up.scale, x.scale, activation="silu"), pdl=True)
    inner = launch(product, routing, config)
    up = torch.einsum("pnh,ph->pn", gate_up.wide[place_experts], x.wide)
    close(inner, reference.gated(up, "silu"))
    h, out = quantize(inner), nan(T * k, H, dtype=logits.dtype)
    rows = launch(Product(h.values, down.values, out, None, Epilogue(down.scale, h.scale), pdl=True), routing, config)
    y = torch.einsum("phi,pi->ph", down.wide[place_experts], h.wide)
    expected = torch.empty_like(y)
    expected[routing.order.long()] = y
    close(rows, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_products(case, fp8, make, nan, on_hopper, monkeypatch):
    T, E, _, H, inter, block_t, strip, *extra = case.values()
    if fp8 and (H % 16 or inter % 16):
        pytest.skip("TMA cannot move such rows")
    monkeypatch.setattr(experts_sm90, "_PROMOTE", 128)  # so that sums are set aside, in every other case
    dtype = torch.float16
    gate_up, down = make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)
    logits = make(T, E, dtype=dtype)
    if T > 100:
        logits[:, 1] += 3
    quantize = in_rows if fp8 else lambda x: Quantized(x, None, x.double())
    config = experts_sm90.derive_config(block_t, strip, 1, *extra)
    x = make(T, H, dtype=dtype)
    check_products(case, x, logits, quantize(gate_up), quantize(down), quantize, config, nan, on_hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES_OF_BLOCKS, ids=str)
def test_products_in_blocks(case, make, nan, on_hopper):
    """The first expert has no token, and NaN as scales."""
    T, E, _, H, inter, block_t, strip, programs, g = case.values()
    dtype = torch.float16
    gate_up, down = make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)
    gate_up, down = (in_blocks(uneven(w, g), g) for w in (gate_up, down))
    assert accepts(dtype, gate_up.values, down.values, gate_up.scale, down.scale)
    gate_up.scale[0], down.scale[0] = torch.nan, torch.nan
    logits = make(T, E, dtype=dtype)
    logits[:, 0] = -100
    if T > 100:
        logits[:, 1] += 3
    x, config = uneven(make(T, H, dtype=dtype), 1), experts_sm90.derive_config(block_t, strip, programs)
    check_products(case, x, logits, gate_up, down, lambda x: in_blocks(x, 1), config, nan, on_hopper)


def close(out, truth):
    assert not out.isnan().any()
    assert (out - truth).norm() < 2e-3 * truth.norm()
    assert (out - truth).norm(dim=1).max() < 1e-2 * truth.norm(dim=1).max()


@pytest.mark.gpu
@pytest.mark.skipif("MINIRT_EMULATE" in os.environ, reason="too large to emulate")
@pytest.mark.parametrize("T", [1, 2, 3, 8, 17, 64, 100, 129, 256, 513, 2048])
@pytest.mark.parametrize("stored", ["16 bits", "rows", "blocks"])
def test_mixture_of_a_real_size(T, stored, make, half_dtype, device):
    """All regimes with the shapes of Qwen3-30B-A3B, and 100 experts so that some sizes divide nothing."""
    E, k, H, inter = 100, 8, 2048, 768 if stored == "blocks" else 784
    dtype = half_dtype
    gate_up, down = make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)
    h, residual, logits = make(T, H, dtype=dtype), make(T, H, dtype=dtype), make(T, E, dtype=dtype)
    logits[:, 7] += 2
    fp8, up_scale, down_scale = stored != "16 bits", None, None
    if fp8:
        quantize = weights_in_blocks if stored == "blocks" else reference.quantize_fp8
        (gate_up, up_scale), (down, down_scale) = map(quantize, (gate_up, down))

    def expected(convert):
        chosen = reference.route(convert(logits), k, True)
        weights = (gate_up, down) if fp8 else (convert(gate_up), convert(down))
        return convert(residual) + reference.mixture(convert(h), *chosen, *weights, "silu", up_scale, down_scale)

    for pdl in (False, torch.cuda.get_device_capability() >= (9, 0)):
        out = mixture_residual(
            h, logits, gate_up, down, residual, k, True, "silu", gate_up_scale=up_scale, down_scale=down_scale, pdl=pdl
        )
        truth, same = expected(torch.Tensor.double), expected(lambda t: t)
        least = bounds.floor(dtype, quantized_activations=fp8 and T > 1)
        assert bounds.fault(bounds.errors(out, truth), bounds.errors(same, truth), least) is None


@pytest.mark.gpu
@pytest.mark.skipif("MINIRT_EMULATE" in os.environ, reason="a CUDA graph")
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("T", [1, 5, 70, 300])
def test_a_cuda_graph_follows_the_logits(T, blocks, make, device):
    """Nothing waits for the device, and another choice of experts needs no other launch. The same input gives the same bits."""
    E, k, H, inter, dtype = 24, 4, 256, 128, torch.bfloat16
    gate_up, down = make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)
    h, logits, scales = make(T, H, dtype=dtype), make(T, E, dtype=dtype), {}
    if blocks:
        (gate_up, up_scale), (down, down_scale) = map(weights_in_blocks, (gate_up, down))
        scales = {"gate_up_scale": up_scale, "down_scale": down_scale}
    pdl = torch.cuda.get_device_capability() >= (9, 0)

    def run():
        return mixture_residual(h, logits, gate_up, down, h, k, True, "silu", pdl=pdl, check=False, **scales)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    choices = [make(T, E, dtype=dtype), torch.arange(E, device=device).to(dtype).expand(T, E), make(T, E, dtype=dtype)]
    for choice in choices:
        logits.copy_(choice)
        graph.replay()
        first = out.clone()
        assert torch.equal(first, run())
        graph.replay()
        assert torch.equal(first, out)


def test_gather_is_the_order_of_experts(make):
    T, E, k, H = 7, 5, 2, 40
    x, logits = make(T, H, dtype=torch.float32), make(T, E, dtype=torch.float32)
    routing = route(logits, k, True, 8)
    rows, scale = gather(x, routing, False)
    assert scale is None
    assert torch.equal(rows, x[routing.order.long() // k])
    values, scale = gather(x, routing, True)
    expected, scales = reference.quantize_fp8(rows)
    assert torch.equal(scale, scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("itemsize", "blocks"), [(1, False), (1, True), (2, False)])
def test_configurations_fit_on_an_sm(itemsize, blocks):
    for K in (256, 2048, 4096):
        facts, h200 = ProductFacts(16, 768, K, itemsize, blocks=blocks), Gpu(90, 132)
        configs = experts_sm90.candidates(facts, h200)
        assert max(c.rows for c in configs) == (64 if blocks or (itemsize == 1 and K > 2048) else 160)
        for T in (2, 100, 2048):
            rows = experts_sm90.block_t(T, K, itemsize, blocks)
            assert experts_sm90.rule(facts._replace(rows=rows), h200) in configs
        for c in configs:
            stage = (c.rows + 2 * c.strip) * 128
            assert c.num_stages >= 3
            assert c.programs * (c.num_stages * stage + 2048) <= 227 * 1024
