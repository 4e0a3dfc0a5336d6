"""What the table of the linear layers declares of its kernels is true.

Catches a declaration that was copied from another kernel, or that a change of the kernel has left behind. Dispatch chooses by the
formats; nothing chooses by the rest yet, so nothing else would notice.
"""

from dataclasses import fields

import pytest
import torch

from minirt.kernels import reference
from minirt.kernels.launch import Gpu, Workspace
from minirt.kernels.linear import dispatch
from minirt.kernels.linear.dispatch import REGIMES
from minirt.kernels.linear.product import Epilogue, Product, ProductFacts
from minirt.kernels.quantize import quantize
from minirt.kernels.regimes import covering

FORMATS = ("fp16", "fp32", "fp8", "fp8_blocks", "int4", "int4_fp32")
TOKENS = (1, 2, 8, 9, 64, 65, 128, 129, 256, 257)
BY_NAME = {regime.kernel: regime for regime in REGIMES}


def meta(T, N, K, stored):
    """A product of these sizes with a weight of this format, without memory. x is already quantized where the layers do it."""
    dtype = torch.float32 if "fp32" in stored else torch.bfloat16
    weight, scale, x = torch.empty(N, K, dtype=dtype, device="meta"), None, dtype
    if "fp8" in stored:
        places = (-(-N // 128), -(-K // 128)) if "blocks" in stored else (N,)
        weight, scale = weight.to(torch.float8_e4m3fn), torch.empty(places, device="meta")
        x = torch.float8_e4m3fn if T > 1 else dtype
    elif "int4" in stored:
        weight = torch.empty(N, -(-K // 128) * 32, dtype=torch.int16, device="meta")
        scale = torch.empty(-(-K // 128), N, dtype=torch.int32, device="meta")
    out = torch.empty(T, N, dtype=dtype, device="meta")
    return Product(torch.empty(T, K, dtype=x, device="meta"), weight, out, epilogue=Epilogue(scale))


def test_each_regime_declares_its_limits_and_its_order():
    assert [regime.kernel for regime in REGIMES if regime.limits is None or regime.sums is None] == []
    assert all(set(regime.limits.formats) <= set(FORMATS) for regime in REGIMES)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("capability", [80, 90])
def test_what_a_kernel_gets_is_within_its_limits(stored, capability):
    """Whichever product dispatch gives it; and no kernel refuses what it declares. K = 3592: rows of 16 bytes, K = 3581: not."""
    for T in TOKENS:
        for N, K in ((18944, 3584), (4608, 3581), (152, 3592)):
            product = meta(T, N, K, stored)
            assert product.format == stored
            chosen = dispatch.regime(product, capability)
            assert stored in chosen.limits.formats
            row_bytes = K * product.x.element_size()
            assert row_bytes % chosen.limits.alignment == 0
            for regime in covering(REGIMES, T, capability, stored):
                assert stored in regime.limits.formats
                worthwhile = regime.kernel != "gemv_int4_sm90" or N == 18944  # it leaves small weights to others
                if row_bytes % regime.limits.alignment == 0 and worthwhile:
                    assert regime.accepts(product), regime.kernel
                if "int4" in regime.kernel and row_bytes % regime.limits.alignment:
                    assert not regime.accepts(product), regime.kernel
    assert not BY_NAME["gemm_sm90"].accepts(meta(128, 4608, 3581, "fp16"))
    assert not BY_NAME["gemm_sm90"].accepts(meta(128, 4608, 3584, "fp32"))


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("capability", [80, 90])
def test_no_residual_is_dropped(stored, capability):
    """Catches that `gemm_sm90` gets a product with an activation and a residual: it adds a residual only to plain sums."""
    for T in TOKENS:
        product = meta(T, 2 * 18944, 3584, stored)
        residual = torch.empty(T, 18944, dtype=product.out.dtype, device="meta")
        gated = product._replace(out=torch.empty_like(residual), epilogue=product.epilogue._replace(activation="silu"))
        both = gated._replace(epilogue=gated.epilogue._replace(residual=residual))
        chosen = dispatch.regime(both, capability)
        assert chosen.kernel != "gemm_sm90"
        assert stored in chosen.limits.formats
        if capability == 90 and T >= 65 and stored in ("fp16", "fp8", "fp8_blocks"):  # only the residual is refused
            assert dispatch.regime(gated, capability).kernel == "gemm_sm90"


def test_the_norm_and_row_maxima_are_declared():
    """With one token, no kernel before the product normalizes x; with more, one does."""
    for regime in REGIMES:
        assert regime.limits.norm or regime.first > 1 or regime.sums.invariant  # whose x is normalized before
        assert regime.limits.row_maxima == (regime.row_maxima_tiles is not dispatch.LinearRegime.row_maxima_tiles)


def test_a_split_is_declared_where_configurations_have_one():
    for regime in REGIMES:
        if regime.family is not None:
            assert regime.sums.splits == any(field.name == "split" for field in fields(regime.family.config)), regime.kernel


# Fields of configurations that the order of sums follows from: steps in K, parts of K, warps side by side along K.
ORDER = {
    "gemv_int4_sm90": ("num_warps",), "gemm_int4_small_sm90": ("num_warps", "chains"), "gemm_int4_sm90": ("split",),
    "gemv_int4": ("num_warps",), "gemm_int4": ("split", "exact"), "gemv": ("num_warps",),
    "gemm_sm90": ("split", "promote"), "gemm_small": ("block_k", "split"), "gemm": ("block_k",),
}  # fmt: skip


@pytest.mark.parametrize("name", [regime.kernel for regime in REGIMES if regime.family is not None])
def test_whether_the_order_depends_on_the_number_of_tokens(name):
    """By the rule, for shapes of well-known models: where it does, some shape shows it; where it does not, none does."""
    regime = BY_NAME[name]
    tokens = range(regime.first, min(regime.last or 4096, 4096) + 1, 1 if regime.last else 61)
    seen = set()
    for hidden, q, inter in ((576, 960, 1536), (896, 1152, 4864), (3584, 4608, 18944)):
        for N, K, gated in ((q, hidden, False), (inter, hidden, True), (hidden, inter, False)):
            for itemsize in (1, 2, 4) if name in ("gemv", "gemm_small", "gemm") else (2,):
                orders = set()
                for T in {regime.family.tokens(T) for T in tokens}:
                    c = regime.family.rule(ProductFacts(T, N, K, itemsize, gated), Gpu(regime.capability or 80, 132))
                    orders.add(tuple(getattr(c, field) for field in ORDER[name]))
                seen.add(len(orders) > 1)
    assert (True in seen) == regime.sums.by_tokens
    if not regime.sums.by_tokens and regime.family.candidates is not None and regime.last != 1:
        assert "T" not in regime.family.facts  # a tuned configuration must not depend on it either


INTERPRETED = [
    (regime.kernel, stored)
    for regime in REGIMES if regime.capability is None and regime.last != 1 for stored in regime.limits.formats
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "stored"), INTERPRETED)
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_a_row_does_not_depend_on_the_values_of_others(name, stored, make, device):
    """Bit by bit: other tokens change, by factors that would change a scale that they shared, and the row stays."""
    regime = BY_NAME[name]
    dtype = torch.float32 if "fp32" in stored else torch.float16
    T, N, K = (5 if regime.first < 5 else regime.first + 2), 20, 264
    x, weight, scale = make(T, K, dtype=dtype), make(N, K, dtype=torch.float32) / K**0.5, None
    if stored == "fp8":
        weight, scale = reference.quantize_fp8(weight)
    elif stored == "fp8_blocks":
        weight, scale = reference.quantize_fp8_blocks(weight, 1)
        weight = weight.contiguous()
    elif "int4" in stored:
        codes, group_scale, zero = reference.quantize_int4(weight, 128)
        weight, scale = reference.pack_int4(codes), reference.pack_int4_scale(group_scale, zero)
    else:
        weight = weight.to(dtype)
    workspace, rows = Workspace(device), []
    for factor in (1.0, -3.0, 100.0):
        h, x_scale = x * factor, None
        h[1] = x[1]
        if "fp8" in stored:
            h, x_scale = quantize(h, blocks="blocks" in stored)
        out = torch.full((T, N), torch.nan, dtype=dtype, device=device)
        regime.launch(Product(h, weight, out, epilogue=Epilogue(scale, x_scale), workspace=workspace))
        rows.append(out[1])
        assert out.isfinite().all()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(out[0], out[1])
