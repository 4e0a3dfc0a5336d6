"""Experts in FP8 with a scale for each block of g rows and 128 columns, against a formula in fp64 that gathers the scale of each
weight.

Catches: the scale of another block, expert, part (gate for up) or token; a last block that is taken for a whole one; sums scaled
twice or not at all; outputs past the end that read scales past the end.
"""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.linear.gemm import GemmConfig
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe import few_tokens, products
from minirt.kernels.moe.dispatch import mixture_residual
from minirt.kernels.moe.route import route
from minirt.kernels.quantize import quantize

EPS = 1e-6
# E, k, H, I, rows of a block of gate and up, and of down. Sizes that are no multiples of 128; blocks of fewer rows than a tile;
# a short last block; rows that are not aligned to a load.
SIZES = [(5, 2, 272, 192, 64, 16), (4, 3, 200, 80, 16, 8), (3, 1, 97, 33, 1, 1), (4, 2, 144, 256, 128, 128)]


def blocks(make, E, rows, K, g):
    """Experts, a scale for each block, and what they stand for in fp64. Neighbouring scales differ by factors up to 64."""
    weight = make(E, rows, K, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.exp2(make(E, -(-rows // g), -(-K // 128), dtype=torch.float32).clamp(-2, 2) * 1.5) * K**-0.5
    n, k = torch.arange(rows, device=scale.device) // g, torch.arange(K, device=scale.device) // 128
    return weight, scale, weight.double() * scale.double()[:, n][:, :, k]


def experts(make, E, H, inter, g_up, g_down):
    return blocks(make, E, 2 * inter, H, g_up), blocks(make, E, H, inter, g_down)


def widened(values, x_scale):
    """Quantized rows [n, K] with scales [n, ⌈K / 128⌉] in fp64."""
    return values.double() * x_scale.double()[:, torch.arange(values.shape[1], device=values.device) // 128]


def unused(logits):
    """The same logits, but no token chooses the experts 0 and 2."""
    logits[:, [0, 2]] = -9
    return logits


def rounded(truth, dtype):
    """On a GPU at most bf16: its tensor cores sum the 128 products of a block less exactly than fp32 does."""
    return truth.to(torch.bfloat16 if truth.is_cuda else dtype)


def run_products(x, gate_up, down, routing, inner, rows, first, second):
    """Both products of quantized tokens. The second one's input is the first one's output, quantized."""
    values, x_scale = quantize(x, blocks=True)
    up = Product(values, gate_up[0], inner, None, Epilogue(gate_up[1], x_scale, activation="silu"))
    products.launch(up, routing, first)
    h, h_scale = quantize(inner, blocks=True)
    products.launch(Product(h, down[0], rows, None, Epilogue(down[1], h_scale)), routing, second)
    return widened(values, x_scale), widened(h, h_scale)


def check_products(T, sizes, dtype, make, nan, agrees, logits, first=None, second=None):
    E, k, H, inter, *_ = sizes
    gate_up, down = experts(make, E, *sizes[2:])
    routing = route(logits, k, True, products.block_t(T))
    inner, rows = nan(T * k, inter, dtype=dtype), nan(T * k, H, dtype=dtype)
    x, h = run_products(make(T, H, dtype=dtype), gate_up, down, routing, inner, rows, first, second)
    expert = routing.experts.flatten().long()
    order = routing.order.long()
    truth = reference.gated(torch.stack([gate_up[2][expert[pair]] @ x[pair // k] for pair in order]), "silu")
    agrees(inner, rounded(truth, dtype), truth)
    truth = torch.stack([down[2][expert[pair]] @ h[routing.places[pair].long()] for pair in range(T * k)])
    agrees(rows, rounded(truth, dtype), truth)


@pytest.mark.parametrize("T", [2, 21])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(T, sizes, make, nan, agrees):
    check_products(T, sizes, torch.float16, make, nan, agrees, make(T, sizes[0], dtype=torch.float16))


@pytest.mark.parametrize("T", [3, 70])
def test_experts_without_tokens_and_one_with_all(T, dtype, make, nan, agrees):
    logits = unused(make(T, 6, dtype=dtype))
    logits[:, 5] = 9  # of every token, so it has several tiles
    check_products(T, (6, 2, 136, 48, 16, 8), dtype, make, nan, agrees, logits)


@pytest.mark.parametrize("block_k", [32, 64, 128])
@pytest.mark.parametrize("block_n", [16, 64])
def test_products_with_any_configuration(block_n, block_k, make, nan, agrees):
    """Steps shorter than a block, tiles of rows narrower and wider than a block."""
    config = GemmConfig(16, block_n, block_k, 4, 2)
    sizes = (4, 2, 200, 96, 32, 8)
    check_products(9, sizes, torch.float16, make, nan, agrees, make(9, 4, dtype=torch.float16), config, config)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("T", "config"), [(1, None), (3, (4, 1, 64, 1, 3)), (1, (8, 2, 128, 4, 1)), (3, (16, 2, 256, 9, 2))], ids=str
)
def test_few_tokens(T, sizes, config, make, nan, agrees):
    """Blocks of outputs that lie in one block of rows, in several, and past the end. Activations are not rounded."""
    E, k, H, inter, *_ = sizes
    gate_up, down = experts(make, E, *sizes[2:])
    x, residual, logits = (make(T, n, dtype=torch.float16) for n in (H, H, E))
    norm, config = 1 + make(H, dtype=torch.float16, scale=0.3), config and few_tokens.FewTokensConfig(*config)
    inner, out = nan(T * k, inter, dtype=torch.float16), nan(T, H, dtype=torch.float16)
    up = Product(x, gate_up[0], inner, Norm(norm, EPS), Epilogue(gate_up[1], activation="silu"))
    few_tokens.gate_up(up, logits, k, config=config)
    few_tokens.down(Product(inner, down[0], out, None, Epilogue(down[1], residual=residual)), logits, k, True, config=config)
    weights, chosen = reference.route(logits.double(), k, True)
    h, pairs = reference.rms_norm(x.double(), norm.double(), EPS), [(t, e) for t in range(T) for e in chosen[t]]
    truth = reference.gated(torch.stack([gate_up[2][e] @ h[t] for t, e in pairs]), "silu")
    agrees(inner, truth.half(), truth)
    terms = [w * (down[2][e] @ y) for w, (_, e), y in zip(weights.flatten(), pairs, inner.double(), strict=True)]
    truth = residual.double() + torch.stack(terms).view(T, k, H).sum(1)
    agrees(out, truth.half(), truth)


def test_scales_that_fit_no_weight_are_named(make):
    (gate_up, up_scale, _), (down, down_scale, _) = experts(make, 4, 200, 96, 32, 8)
    h, logits = make(2, 200, dtype=torch.float32), make(2, 4, dtype=torch.float32)
    operands = (h, logits, gate_up, down, h, 2, True, "silu")
    rows = down_scale[:, :1, 0].repeat(1, 200)
    for wrong in (up_scale[:, :-1], up_scale[..., :1], up_scale[:3], up_scale.half()):
        with pytest.raises(InputError, match=r"^gate_up_scale.*wrong"):
            mixture_residual(*operands, gate_up_scale=wrong.contiguous(), down_scale=down_scale)
    with pytest.raises(InputError, match=r"^down_scale\[0\]: wrong shape for blocks"):
        mixture_residual(*operands, gate_up_scale=up_scale, down_scale=down_scale[:, :3].contiguous())
    with pytest.raises(InputError, match="both scales are of rows or of blocks"):
        mixture_residual(*operands, gate_up_scale=up_scale, down_scale=rows)
    wide = up_scale[:, ::2].contiguous()  # blocks of 64 rows, of which one has rows of gate and of up
    with pytest.raises(InputError, match="blocks that hold no rows of both gate and up"):
        mixture_residual(*operands, gate_up_scale=wide, down_scale=down_scale)
    routing, config = route(logits, 2, True, 16), GemmConfig(16, 32, 256, 4, 1)
    values, x_scale = quantize(h, blocks=True)
    up = Product(values, gate_up, h.new_empty(4, 96), epilogue=Epilogue(up_scale, x_scale, activation="silu"))
    with pytest.raises(InputError, match=r"config.block_k: a step in K has one scale; expected a divisor of 128; found 256"):
        products.launch(up, routing, config)
