"""The same bits for a row, however many rows are computed with it, on a CPU: with tensor cores that add one product of two values
after the other, whatever the tile, a result tells in which order a kernel adds.

Catches: parts of K chosen by the number of tokens, or put together in another order; 4-bit weights that are rounded for prompts
and not for one token; K and V of a prefix by another shape; a router, experts or a sum over experts with other kernels, or one
scale, for some steps. Each fault is planted as well, and has to be seen. `test_invariant.py` has what only a GPU shows.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton import language
from triton.runtime import interpreter

from minirt.kernels import reference
from minirt.kernels.attention.dispatch import attention
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences
from minirt.kernels.launch import Workspace
from minirt.kernels.linear import gemm_int4
from minirt.kernels.linear.dispatch import linear
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe import dispatch as moe
from minirt.kernels.moe import products, router
from minirt.kernels.moe.mixture import SharedOutput

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
TOKENS = (1, 2, 17, 130, 260)
STEPS = (1, 5, 70)  # of mixtures


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch):
    """Products of the interpreter are added one by one, in fp32."""

    def chain(self, a, b, d, *options):
        left, right = a.data, b.data
        if a.dtype.primitive_bitwidth == 8:
            left, right = (interpreter._convert_float(x.data, x.dtype, language.float16, None).view(np.float16) for x in (a, b))
        total = d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total = total + left[:, k, None].astype(np.float32) * right[None, k].astype(np.float32)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", chain)


def rows_differ(compute, tokens=TOKENS):
    """Numbers of tokens with which the first token, or the last of few, gets other bits than alone."""
    alone = compute(0, 1)
    assert alone.isfinite().all()
    differ = [T for T in tokens if not torch.equal(compute(0, T)[:1], alone)]
    return differ + [-1] * (not torch.equal(compute(5, 3)[2:], compute(7, 1)))


def of_product(form, kind, N=40, K=640):
    """compute(first token, tokens): rows of a product in an invariant step."""
    gen, dtype = torch.Generator().manual_seed(N + K), torch.float16

    def make(*shape, scale=1.0):
        return (torch.randn(*shape, generator=gen) * scale).to(dtype)

    weight, scale = make(2 * N if form == "gated" else N, K, scale=K**-0.5), None
    if kind != "fp16":
        weight, scale = reference.quantize_weight(weight, kind)
    x, residual, norm = make(max(TOKENS), K), make(max(TOKENS), N), Norm(make(K), 1e-6)
    workspace = Workspace("cpu", invariant=True)

    def compute(first, count):
        rows = slice(first, first + count)
        added = residual[rows].contiguous() if form == "residual" else None
        out = torch.full((count, N), torch.nan)  # in fp32: no rounding hides a difference
        ep = Epilogue(scale, activation="silu" if form == "gated" else None, residual=added)
        return linear(Product(x[rows].contiguous(), weight, out, None if form == "residual" else norm, ep, workspace))

    return compute


@pytest.mark.parametrize("form", ["plain", "residual", "gated"])
@pytest.mark.parametrize("kind", ["fp16", "int4", "mxfp4"])
def test_products(form, kind):
    assert not rows_differ(of_product(form, kind))


def test_four_bits_are_the_product_of_the_unpacked_weight():
    """For one token too. Catches scales that multiply sums of groups, which another kernel does not have."""
    gen, N, K = torch.Generator().manual_seed(1), 24, 520
    words, scale = reference.quantize_weight(torch.randn(N, K, generator=gen).half(), "int4")
    wide, x = gemm_int4.unpack_weight(words, scale, K, torch.float16, multiplied=True), torch.randn(3, K, generator=gen).half()
    for T in (1, 3):
        packed, plain = (
            linear(Product(x[:T], w, torch.full((T, N), torch.nan), None, Epilogue(s), Workspace("cpu", invariant=True)))
            for w, s in ((words, scale), (wide, None))
        )
        assert torch.equal(packed, plain)


def _part_by_tokens(monkeypatch):
    facts = Product.facts
    monkeypatch.setattr(
        Product, "facts",
        lambda self, tokens, *rest: facts(self, tokens, *rest)._replace(part=256 if tokens > 64 else 384),
    )  # fmt: skip


def _whole_for_prompts(monkeypatch):
    facts = Product.facts
    monkeypatch.setattr(
        Product, "facts",
        lambda self, tokens, *rest: facts(self, tokens, *rest)._replace(part=640 if tokens > 64 else 384),
    )  # fmt: skip


def _exact_for_few(monkeypatch):
    lookup = type(gemm_int4.FAMILY).lookup

    def looked_up(self, device, facts):
        c = lookup(self, device, facts)
        return replace(c, exact=facts.T <= 16) if self is gemm_int4.FAMILY else c

    monkeypatch.setattr(type(gemm_int4.FAMILY), "lookup", looked_up)


@pytest.mark.parametrize(("plant", "kind"), [
    (_part_by_tokens, "fp16"), (_part_by_tokens, "int4"), (_whole_for_prompts, "fp16"), (_exact_for_few, "int4"),
])  # fmt: skip
def test_planted_faults_are_seen(plant, kind, monkeypatch):
    """Catches a comparison that sees nothing."""
    plant(monkeypatch)
    assert rows_differ(of_product("plain", kind))


def last_outputs(sizes, dtype=torch.float16, Nq=2, Nkv=1, D=64):
    """QKV and attention of a sequence that is computed in chunks of these sizes: the output of its last token."""
    gen, H, page, T = torch.Generator().manual_seed(D), 384, 16, sum(sizes)
    x, weight = torch.randn(T, H, generator=gen), torch.randn((Nq + 2 * Nkv) * D, H, generator=gen).to(dtype) / H**0.5
    cos_sin, norms = torch.randn(64, D, generator=gen), [torch.randn(D, generator=gen).to(dtype) for _ in range(2)]
    pages = KVPages(*(torch.full((4, page, Nkv, D), torch.nan, dtype=dtype) for _ in range(2)))
    table, workspace, start = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), Workspace("cpu", invariant=True), 0
    for size in sizes:
        h, end = x[start : start + size].to(dtype), start + size
        heads = linear(Product(h, weight, torch.full((size, len(weight)), torch.nan).to(dtype), workspace=workspace))
        positions = torch.arange(start, end)
        slots = table[0].long()[positions // page] * page + positions % page
        ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
        a = AttentionInput(
            heads, pages, Sequences(table, ints(end), ints(0, 1), None if size == 1 else ints(0, size)), Scores(D**-0.5),
            torch.full((size, Nq, D), torch.nan).to(dtype), Rope(cos_sin, *norms, 1e-6), positions, slots, workspace, 1, end,
            size,
        )  # fmt: skip
        out, start = attention(a)[-1], end
    return out, pages


def test_a_prefix_has_the_bits_of_any_chunks():
    whole, pages = last_outputs((23,))
    for sizes in ((22, 1), (1, 2, 19, 1)):
        out, others = last_outputs(sizes)
        assert torch.equal(out, whole)
        assert torch.equal(others.k.nan_to_num(), pages.k.nan_to_num())
        assert torch.equal(others.v.nan_to_num(), pages.v.nan_to_num())


def test_a_prefix_that_another_shape_has_written_is_seen(monkeypatch):
    """Its K and V are of a product with other parts. Catches a comparison that sees nothing."""
    facts = Product.facts
    monkeypatch.setattr(
        Product, "facts", lambda self, tokens, *rest: facts(self, tokens, *rest)._replace(part=128 if tokens > 16 else 256)
    )
    (whole, pages), (out, others) = (last_outputs(sizes, torch.float32) for sizes in ((23,), (1, 2, 19, 1)))
    assert not torch.equal(pages.k.nan_to_num(), others.k.nan_to_num())
    assert not torch.equal(out, whole)


def of_mixture(kind, shared=False, E=6, k=3, H=264, inter=72):
    """compute(first token, tokens): rows of the router and the experts in an invariant step."""
    gen, dtype = torch.Generator().manual_seed(H), torch.float32 if kind == "fp32" else torch.float16

    def make(*shape, scale=1.0):
        return (torch.randn(*shape, generator=gen) * scale).to(dtype)

    up, down, scales = make(E, 2 * inter, H, scale=H**-0.5), make(E, H, inter, scale=inter**-0.5), {}
    if kind not in ("fp16", "fp32"):
        stored = [[reference.quantize_weight(one, kind) for one in weight] for weight in (up, down)]
        (up, scales["gate_up_scale"]), (down, scales["down_scale"]) = (map(torch.stack, zip(*one, strict=True)) for one in stored)
    x, norm, weight, y, gate = make(max(TOKENS), H), make(H), make(E, H, scale=0.1), make(max(TOKENS), H), make(max(TOKENS), 1)

    def compute(first, count):
        h = x[first : first + count].contiguous()
        logits = moe.router_logits(h, norm, 1e-6, weight, k, four_bits=bool(scales), invariant=True)
        rest = SharedOutput(y[first : first + count].contiguous(), gate[first : first + count].contiguous()) if shared else None
        return moe.mixture_residual(
            h, logits, up, down, h, k, True, "silu", norm_weight=norm, eps=1e-6, shared=rest, invariant=True, **scales
        )

    return compute


@pytest.mark.parametrize(("kind", "shared"), [("fp32", True), ("fp16", False), ("int4", False), ("mxfp4", False)])
def test_mixtures(kind, shared):
    assert not rows_differ(of_mixture(kind, shared), STEPS)


def _kernels_of_few_tokens(monkeypatch):
    few = replace(moe.REGIMES[0], sums=replace(moe.REGIMES[0].sums, invariant=True))
    monkeypatch.setattr(moe, "REGIMES", (few, *moe.REGIMES[1:]))
    logits = moe.router_logits
    monkeypatch.setattr(moe, "router_logits", lambda *args, invariant, **rest: logits(*args, **rest))


def _fewer_parts_of_the_router(monkeypatch):
    monkeypatch.setattr(router, "_split", lambda T, invariant=False: (16, 1 if T > 64 else 16))


def _one_scale_for_all_tokens(monkeypatch):
    """As experts have that are quantized with a dynamic scale of the whole tensor."""
    launch = products.launch

    def scaled(product, routing, *rest):
        x = product.x
        scale = x.abs().max() / 448
        return launch(product._replace(x=(x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale), routing, *rest)

    monkeypatch.setattr(products, "launch", scaled)


def _another_sum_above_32_tokens(monkeypatch):
    combine = products.combine

    def backwards(x, rows, weights, out, shared=None, **rest):
        T, k = weights.shape
        if T > 32:
            rows, weights = rows.view(T, k, -1).flip(1).reshape(T * k, -1), weights.flip(1).contiguous()
            return out.copy_(x + (rows * weights.view(-1, 1)).view(T, k, -1).sum(1))
        return combine(x, rows, weights, out, shared, **rest)

    monkeypatch.setattr(products, "combine", backwards)


@pytest.mark.parametrize("plant", [
    _kernels_of_few_tokens, _fewer_parts_of_the_router, _one_scale_for_all_tokens, _another_sum_above_32_tokens,
])  # fmt: skip
def test_planted_faults_of_mixtures_are_seen(plant, monkeypatch):
    """Catches a comparison that sees nothing."""
    plant(monkeypatch)
    assert rows_differ(of_mixture("fp32"), STEPS)  # no rounding to 16 bits hides a difference
