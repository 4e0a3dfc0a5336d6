"""The experts of few tokens with 4-bit weights, against the reference in fp64.

Catches the scale, share or words of a neighbouring expert, group or row, gate for up, a wrong place where a tile of `down` goes
from one expert to the next, columns past K, rows of another token.
"""

import pytest
import torch
from support.experts import four_bits

from minirt.kernels import reference
from minirt.kernels.launch import Gpu
from minirt.kernels.linear.product import Epilogue, Norm, Product, ProductFacts
from minirt.kernels.moe import few_tokens_int4
from minirt.kernels.moe.few_tokens_int4 import CASES, MOST, FewTokensInt4Config
from minirt.kernels.moe.mixture import SharedOutput

EPS = 1e-6


def operands(make, case, dtype, T):
    E, _, H, inter, group = case.values()
    x, residual, logits, shared, gate = (make(T, n, dtype=dtype) for n in (H, H, E, H, 1))
    up, down = (four_bits(make(E, *size, dtype=torch.float32) / size[1] ** 0.5, group) for size in ((2 * inter, H), (H, inter)))
    return x, 1 + make(H, dtype=dtype, scale=0.3), residual, logits, shared, gate, up, down


def expected(x, norm, residual, logits, shared, gate, up, down, k, normalize, activation):
    h = reference.rms_norm(x, norm, EPS)
    mixed = reference.mixture(h, *reference.route(logits, k, normalize), up, down, activation)
    return residual + mixed + gate.sigmoid() * shared


def run(given, k, normalize, activation, nan):
    x, norm, residual, logits, shared, gate, up, down = given
    (T, H), inter = x.shape, down[2].shape[2]
    inner, out = nan(T * k, inter, dtype=x.dtype), nan(T, H, dtype=x.dtype)
    first = Product(x, up[0], inner, Norm(norm, EPS), Epilogue(up[1], activation=activation))
    few_tokens_int4.gate_up(first, logits, k)
    second = Product(inner, down[0], out, None, Epilogue(down[1], residual=residual))
    return few_tokens_int4.down(second, logits, k, normalize, SharedOutput(shared, gate))


def check(given, k, normalize, activation, out, agrees):
    *rest, up, down = given
    dtype = given[0].dtype
    options = (k, normalize, activation)
    same = expected(*rest, *(w[2].to(dtype) for w in (up, down)), *options)
    truth = expected(*(t.double() for t in rest), up[2], down[2], *options)
    agrees(out, same, truth)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("T", [1, 3])
def test_few_tokens(case, T, dtype, make, nan, agrees):
    """Each token with its experts, shares, residual and shared expert."""
    given, k, normalize = operands(make, case, dtype, T), case["k"], case["E"] % 2 == 1
    activation = "silu" if k > 1 else "gelu_tanh"
    check(given, k, normalize, activation, run(given, k, normalize, activation, nan), agrees)


CONFIGS = [FewTokensInt4Config(*sizes) for sizes in ((1, 1, 1), (2, 2, 1), (4, 1, 2), (8, 1, 1))]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.rows}-{c.num_warps}-{c.tiles}")
def test_gate_up(config, dtype, make, nan, agrees):
    """Programs of 1 to 8 outputs, of which the last have fewer; two tiles, the second with an end of K that is ragged, in flight
    together or not; with a norm and without."""
    E, k, K, N, T = 5, 2, 1400, 9, 2
    group = 32 if config.rows in (1, 4) else 128
    words, scales, exact = four_bits(make(E, 2 * N, K, dtype=torch.float32) / K**0.5, group)
    x, logits, norm, out = make(T, K, dtype=dtype), make(T, E, dtype=dtype), 1 + make(K, dtype=dtype), nan(T * k, N, dtype=dtype)
    weight = None if config.rows == 2 else Norm(norm, EPS)
    few_tokens_int4.gate_up(Product(x, words, out, weight, Epilogue(scales, activation="silu")), logits, k, config=config)
    experts = reference.route(logits, k, True)[1].flatten()

    def each(x, norm, weights):
        h = x if weight is None else reference.rms_norm(x, norm, EPS)
        rows = zip(h.repeat_interleave(k, 0), experts.tolist(), strict=True)
        return torch.stack([reference.gated((weights[e] @ row)[None], "silu")[0] for row, e in rows])

    agrees(out, each(x, norm, exact.to(dtype)), each(x.double(), norm.double(), exact))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.rows}-{c.num_warps}-{c.tiles}")
@pytest.mark.parametrize(("k", "K"), [(5, 300), (3, 1056), (4, 61)])
def test_down(config, k, K, dtype, make, nan, agrees):
    """The same; tiles that begin in one expert and end in the second or fifth next."""
    E, N, T = 7, 9, 2
    words, scales, exact = four_bits(make(E, N, K, dtype=torch.float32) / K**0.5, 32 if config.rows in (1, 4) else 128)
    x, logits, residual = (make(*sizes, dtype=dtype) for sizes in ((T * k, K), (T, E), (T, N)))
    out = nan(T, N, dtype=dtype)
    product = Product(x, words, out, None, Epilogue(scales, residual=residual))
    few_tokens_int4.down(product, logits, k, True, config=config)

    def total(x, logits, residual, weights):
        shares, experts = reference.route(logits, k, True)
        rows = torch.einsum("tjnk,tjk->tjn", weights[experts], x.unflatten(0, (T, k)))
        return residual + (rows * shares[:, :, None]).sum(1)

    agrees(out, total(x, logits, residual, exact.to(dtype)), total(x.double(), logits.double(), residual.double(), exact))


@pytest.mark.parametrize("sms", [132, 20])
def test_configurations(sms):
    """A thread's words in flight fit in its registers, x of gate and up too, and the tokens decide nothing."""
    shapes = ((768, 2048, True), (2048, 768, False), (512, 4096, True), (7168, 2048, False), (2048, 7168, True), (9, 40, True))
    for N, K, gated in shapes:
        found = {few_tokens_int4.rule(ProductFacts(T, N, K, 2, gated, E=128, k=8), Gpu(90, sms)) for T in range(1, MOST + 1)}
        (c,) = found
        rows = c.rows * (2 if gated else 1)
        assert c.rows in (1, 2, 4, 8)
        assert 4 * rows * c.tiles <= 64
        assert not gated or c.num_warps >= K / 16 / 128
