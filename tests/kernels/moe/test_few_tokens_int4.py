"""The experts of few tokens with 4-bit weights, against the reference in fp64.

Catches the scale, share or words of a neighbouring expert, group or row, gate for up, a wrong place where a tile of `down` goes
from one expert to the next, columns past K, rows of another token.
"""

import pytest
import torch
from support.experts import four_bits

from minirt.kernels import reference
from minirt.kernels.launch import Gpu
from minirt.kernels.linear.gemv import GemvConfig
from minirt.kernels.linear.product import Epilogue, Norm, Product, ProductFacts
from minirt.kernels.moe import few_tokens_int4
from minirt.kernels.moe.few_tokens_int4 import CASES, MOST
from minirt.kernels.moe.mixture import SharedOutput

EPS = 1e-6


def operands(make, case, dtype, T):
    E, _, H, inter, group = case.values()
    x, residual, logits, shared, gate = (make(T, n, dtype=dtype) for n in (H, H, E, H, 1))
    up, down = (four_bits(make(E, *size, dtype=torch.float32) / size[1] ** 0.5, group) for size in ((2 * inter, H), (H, inter)))
    return x, 1 + make(H, dtype=dtype, scale=0.3), residual, logits, shared, gate, up, down


def expected(x, norm, residual, logits, shared, gate, up, down, k, normalize, activation):
    h = x if norm is None else reference.rms_norm(x, norm, EPS)
    mixed = reference.mixture(h, *reference.route(logits, k, normalize), up, down, activation)
    return residual + mixed + gate.sigmoid() * shared


def check(given, k, normalize, activation, nan, agrees, config=None):
    *rest, up, down = given
    x, norm, residual, logits, shared, gate = rest
    (T, H), inter, dtype = x.shape, down[2].shape[2], x.dtype
    inner, out = nan(T * k, inter, dtype=dtype), nan(T, H, dtype=dtype)
    normed = None if norm is None else Norm(norm, EPS)
    first = Product(x, up[0], inner, normed, Epilogue(up[1], activation=activation))
    few_tokens_int4.gate_up(first, logits, k, config=config)
    second = Product(inner, down[0], out, None, Epilogue(down[1], residual=residual))
    few_tokens_int4.down(second, logits, k, normalize, SharedOutput(shared, gate), config=config)
    options = (k, normalize, activation)
    same = expected(*rest, *(weights[2].to(dtype) for weights in (up, down)), *options)
    agrees(out, same, expected(*(t if t is None else t.double() for t in rest), up[2], down[2], *options))


@pytest.mark.parametrize("case", [*CASES, CASES[0] | {"H": 136, "group": (32, torch.bfloat16)}], ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_few_tokens(case, T, dtype, make, nan, agrees):
    """Each token with its experts, shares, residual and shared expert."""
    check(operands(make, case, dtype, T), case["k"], case["E"] % 2 == 1, "silu" if case["k"] > 1 else "gelu_tanh", nan, agrees)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sizes", "k", "H", "inter"), [
    ((1, 1, 1), 5, 9, 300), ((2, 2, 1), 2, 1400, 9), ((4, 1, 2), 3, 9, 1056), ((4, 1, 2), 2, 1400, 9), ((8, 1, 1), 4, 9, 61),
    ((2, 2, 1), 3, 320, 200),
])  # fmt: skip
def test_any_configuration(sizes, k, H, inter, dtype, make, nan, agrees):
    """Programs of 1 to 8 outputs, of which the last have fewer; two tiles, the second with an end of K that is ragged, in flight
    together or not; tiles of down that begin in one expert and end in the second or fifth next; with a norm and without."""
    config = GemvConfig(*sizes)
    case = {"E": 7, "k": k, "H": H, "I": inter, "group": 32 if config.block_n in (1, 4) else "mx" if H == 320 else 128}
    x, norm, *rest = operands(make, case, dtype, 2)
    check((x, None if config.block_n == 2 else norm, *rest), k, True, "silu", nan, agrees, config)


@pytest.mark.parametrize("sms", [132, 20])
def test_configurations(sms):
    """A thread's words in flight fit in its registers, x of gate and up too, and the tokens decide nothing."""
    shapes = ((768, 2048, True), (2048, 768, False), (512, 4096, True), (7168, 2048, False), (2048, 7168, True), (9, 40, True))
    for N, K, gated in shapes:
        (c,) = {few_tokens_int4.rule(ProductFacts(T, N, K, 2, gated, E=128, k=8), Gpu(90, sms)) for T in range(1, MOST + 1)}
        rows = c.block_n * (2 if gated else 1)
        assert c.block_n in (1, 2, 4, 8)
        assert 4 * rows * c.tiles <= 64
        assert not gated or c.num_warps >= K / 16 / 128
