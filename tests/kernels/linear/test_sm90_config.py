"""Catches: a configuration of `gemm_sm90` that does not fit the device or computes a column twice, and a rule that leaves
SMs idle where a measured form does not."""

import pytest

from minirt.kernels.launch import Gpu
from minirt.kernels.linear import gemm_sm90
from minirt.kernels.linear.product import ProductFacts

H200 = Gpu(90, 132)
MODELS = {"Qwen2.5-7B": (3584, 18944, 4608), "Llama-3.1-8B": (4096, 14336, 6144), "Qwen3-4B": (2560, 9728, 6144),
          "Qwen2.5-0.5B": (896, 4864, 1152), "SmolLM2-135M": (576, 1536, 960)}  # fmt: skip


def linears(model):
    """(N, K, gated, residual)"""
    hidden, inter, qkv = MODELS[model]
    added = ((hidden, hidden, False, True), (hidden, inter, False, True))
    return ((qkv, hidden, False, False), (inter, hidden, True, False), *added)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_hopper_configurations(model, itemsize):
    """They depend on regimes only, have tiles enough on their way, and set sums of fp8 products aside in time."""
    cases = [(*case, splits, 2) for case in linears(model) for splits in (False, True)]
    for N, K, gated, residual, splits, out_itemsize in (*cases, (152064, MODELS[model][0], False, False, True, 4)):
        for regime in (
            range(65, 129), range(129, 193), range(193, 257), range(257, 385), range(385, 513), range(4097, 8193, 64),
        ):  # fmt: skip
            facts = ProductFacts(0, N, K, itemsize, gated, residual, False, out_itemsize, splits)
            chosen = {gemm_sm90.rule(facts._replace(T=T), H200) for T in regime}
            assert len(chosen) == 1
            c = chosen.pop()
            rows = 64 * c.groups
            widest = 32 if out_itemsize == 4 or (c.groups == 3 and c.more >= 64 and not residual) else 128
            buffers = rows * out_itemsize * sum(min(columns // 2, widest) for columns in (c.width, c.more))
            buffers *= 2 if residual or out_itemsize == 4 else 1
            if c.split == 2:
                parts = 2 * -(-max(regime) // 128) * -(-N // (c.width + c.more))
                assert splits
                assert not gated
                assert parts <= 132
                assert 128 * (c.width + c.more) * parts <= 1 << 22  # sums that a workspace has room for
            assert c.groups == 2 or (itemsize == out_itemsize == 2 and c.split == 1 and max(regime) in (192, 384))
            assert c.num_stages >= 3
            assert c.num_stages * (rows + c.width + c.more) * 128 + buffers < 227 * 1024
            most = 0 if itemsize == 2 else 16 if c.width + c.more > 192 else 8
            assert c.promote <= most
            assert c.promote > 0 or itemsize == 2 or 128 * most >= -(-K // c.split)
