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
            widest = 32 if out_itemsize == 4 or (c.groups == 3 and c.second >= 64 and not residual) else 128
            buffers = rows * out_itemsize * sum(min(columns // 2, widest) for columns in (c.width, c.second))
            buffers *= 2 if residual or out_itemsize == 4 else 1
            if c.split == 2:
                parts = 2 * -(-max(regime) // 128) * -(-N // (c.width + c.second))
                assert splits
                assert not gated
                assert parts <= 132
                assert 128 * (c.width + c.second) * parts <= 1 << 22  # sums that a workspace has room for
            assert c.groups == 2 or (itemsize == out_itemsize == 2 and c.split == 1 and max(regime) in (192, 384))
            assert c.num_stages >= 3
            assert c.num_stages * (rows + c.width + c.second) * 128 + buffers < 227 * 1024
            most = 0 if itemsize == 2 else 16 if c.width + c.second > 192 else 8
            assert c.promote <= most
            assert c.promote > 0 or itemsize == 2 or 128 * most >= -(-K // c.split)


def test_hopper_widths_fill_whole_rounds():
    """On 132 SMs: three strips wide where that leaves none idle, narrow where there are few tiles."""
    def columns(T, N, K, gated=False):
        c = gemm_sm90.rule(ProductFacts(T, N, K, 2, gated, splits=False), H200)
        return c.width + c.second

    assert columns(8192, 18944, 3584, True) == columns(8192, 3584, 18944) == 256
    assert columns(256, 18944, 3584, True) == columns(2048, 4608, 3584) == 192
    assert columns(512, 4608, 3584) == columns(128, 18944, 3584, True) == 144
    assert columns(256, 3584, 3584) == 64


def test_hopper_rows_fit_the_tokens():
    """Three groups of warps where their tiles hold all tokens once or twice, in wide tiles; what was measured, as a whole."""
    def chosen(T, N, K, gated=False, itemsize=2, out_itemsize=2):
        residual = not gated and N == 3584
        c = gemm_sm90.rule(ProductFacts(T, N, K, itemsize, gated, residual, out_itemsize=out_itemsize), H200)
        return c.groups, c.width, c.second, c.split

    for T in (129, 192):
        assert chosen(T, 18944, 3584, True) == (3, 128, 16, 1)
        assert chosen(T, 14336, 4096, True) == (3, 128, 128, 1)
        assert chosen(T, 4608, 3584) == (2, 64, 16, 1)
        assert chosen(T, 3584, 3584) == (2, 64, 0, 1)
        assert chosen(T, 3584, 18944) == (2, 128, 0, 2)
    assert chosen(384, 18944, 3584, True) == (3, 128, 64, 1)
    assert chosen(384, 4608, 3584) == (2, 128, 0, 1)
    assert chosen(384, 3584, 18944) == (2, 128, 64, 2)
    for T in (128, 193, 256, 512, 1024):
        assert chosen(T, 18944, 3584, True)[0] == chosen(T, 14336, 4096, True)[0] == chosen(T, 3584, 3584)[0] == 2
    for T in (129, 300):
        assert chosen(T, 18944, 3584, True, itemsize=1)[0] == 2  # sums are set aside
        assert chosen(T, 152064, 3584, out_itemsize=4)[0] == 2


def test_hopper_splits_what_leaves_processors_idle():
    """In two parts, where both run at once and K is long: down at up to 384 tokens, never with an activation."""
    def split(T, N, K, gated=False, itemsize=2):
        return gemm_sm90.rule(ProductFacts(T, N, K, itemsize, gated, not gated), H200).split

    assert all(split(T, 3584, 18944) == 2 for T in (128, 192, 256, 384))
    assert split(512, 3584, 18944) == split(256, 18944, 3584, True) == split(256, 3584, 1024) == 1
    assert split(256, 3584, 18944, itemsize=1) == split(256, 4608, 3584) == split(384, 3584, 3584) == 1  # measured slower


def test_whole_tiles():
    """The rest of the tiles is halved where its halves are one round: not without a whole round, nor where the rest is more."""
    for tiles, whole in ((320, 264), (330, 264), (331, 331), (264, 264), (60, 60), (132, 132), (133, 132), (199, 199)):
        assert gemm_sm90.whole_tiles(tiles, 132) == whole
    wide = gemm_sm90.derive_config(256, 0, 17408, 1, True, 132)
    times = [gemm_sm90.predicted(wide, ProductFacts(T, 5120, 17408, 1, residual=True)) for T in (1664, 1792, 2048, 2176)]
    assert times[0] < times[1] == times[2] < times[3]  # 260, 280, 320 and 340 tiles: 2, 2.5 and 3 rounds
